//! The CUDA kernels ([`Kernels::source`], compiled at run time) and what they read.

pub mod launch;
pub mod tables;
#[cfg(feature = "cuda")]
pub mod tensors;
#[cfg(test)]
pub(crate) mod tests;

use crate::cpu::matmul_format::MatmulFormat;

/// Which kernels a call runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Products in f32 without tensor cores: of wide heads.
    Plain,
    /// The same, and logits that depend on distances.
    Relative,
    /// Products by tensor cores, which devices have from compute capability 8.0 on: of bf16, or of f32 as the sum of three of tf32.
    TensorCores(MatmulFormat),
}

impl Kernels {
    /// Name and text in CUDA C, compiled with [`launch::defines`].
    pub fn source(self) -> (&'static str, &'static str) {
        const PLAIN: &str =
            concat!(include_str!("common.cu"), include_str!("tiles.cu"), include_str!("attend.cu"));
        const RELATIVE: &str = concat!(
            include_str!("common.cu"),
            include_str!("tiles.cu"),
            include_str!("attend.cu"),
            include_str!("relative.cu")
        );
        const TENSOR_CORES: &str = concat!(include_str!("common.cu"), include_str!("tensor_cores.cu"));
        match self {
            Self::Plain => ("attend", PLAIN),
            Self::Relative => ("attend-relative", RELATIVE),
            Self::TensorCores(_) => ("attend-tensor-cores", TENSOR_CORES),
        }
    }
}
