//! The CUDA kernels ([`SOURCE`], compiled at run time), and the operation that runs them.

mod launch;
mod op;
#[cfg(test)]
pub(crate) mod tests;

pub(super) use op::fused;

/// The kernels' name.
const NAME: &str = "linear-attention";

/// The kernels in CUDA C, compiled with [`launch::defines`].
const SOURCE: &str = concat!(include_str!("common.cu"), include_str!("sums.cu"));
