//! The CUDA kernels ([`source`], compiled at run time) and what they read.

pub mod launch;
pub mod tables;
#[cfg(feature = "cuda")]
pub mod tensors;
#[cfg(test)]
mod tests;

/// Name and text of the kernels in CUDA C, compiled with [`launch::defines`].
pub fn source(relative: bool) -> (&'static str, &'static str) {
    const PLAIN: &str = concat!(include_str!("common.cu"), include_str!("attend.cu"));
    const RELATIVE: &str =
        concat!(include_str!("common.cu"), include_str!("attend.cu"), include_str!("relative.cu"));
    if relative { ("attend-relative", RELATIVE) } else { ("attend", PLAIN) }
}
