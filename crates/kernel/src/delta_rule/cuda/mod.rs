//! The CUDA kernels ([`SOURCE`], compiled at run time), and the operation that runs them.

mod launch;
pub(super) mod normalize;
mod op;
#[cfg(test)]
pub(crate) mod tests;

pub(super) use op::fused;

/// The kernels' name.
const NAME: &str = "delta-rule";

/// The kernels in CUDA C, compiled with [`launch::defines`].
const SOURCE: &str = include_str!("delta.cu");
