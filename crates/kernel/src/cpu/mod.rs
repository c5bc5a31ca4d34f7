//! What the fused CPU kernels share.
//!
//! | module | holds |
//! |---|---|
//! | [`matrix`] | checked views of matrices |
//! | [`exact`] | their product in f32, one thread or all |
//! | [`gemm`] | matrix products in the number format of the process |
//! | [`matmul_format`] | the number format of matrix products |
//! | [`panel`] | our products in f32, packed |
//! | [`elements`] | scaling, products and scalar products of vectors |
//! | [`few`] | products of few rows with weights where they lie |
//! | [`bf16`] | matrix products of operands rounded to bf16 |
//! | [`columns`] | column blocks of matrices, read and written by different threads |
//! | [`compact`] | tensors that wait as bf16 |
//! | [`simd`] | vector arithmetic for the processor at hand, and [`simd_fn!`](crate::simd_fn) |
//! | [`math`] | exp, the normal distribution, dot, axpy, max, sum as generic vector code |
//! | [`jobs`] | several outputs built together |
//! | [`par`] | partitions fixed by shape, outputs built in parallel |
//! | [`pieces`] | pieces of work given to threads |
//! | [`sample_rows`] | rows of several samples, cut within samples |
//! | [`dense`] | linear layers: transposed weights, gradients of weights |
//! | [`layers`] | gradients of several linear layers and the LayerNorm in front of them |
//! | [`rates`] | products and copies per second that this machine reaches |
//! | [`rows`] | row-wise pieces: LayerNorm, bias, column sums, GELU |
//! | [`softmax`] | softmax of the rows of a matrix |
//! | [`token`] | rows of one token, states that are written where they lie |
//! | [`transpose`] | transposes |
//!
//! A kernel cuts its work into chunks whose number depends on the shape only ([`par::Chunks`]), computes
//! each chunk on one thread with [`gemm::Threads::One`], and combines partial sums in index order. So the
//! bits of a result do not depend on the number of threads.

pub mod bf16;
#[allow(unsafe_code)]
pub mod columns;
pub mod compact;
pub mod dense;
pub mod elements;
#[allow(unsafe_code)]
pub mod exact;
pub mod few;
pub mod gemm;
#[allow(unsafe_code)]
pub mod jobs;
pub mod layers;
pub mod math;
pub mod matmul_format;
pub mod matrix;
pub mod panel;
#[allow(unsafe_code)]
pub mod par;
pub mod pieces;
pub mod rates;
pub mod rows;
#[allow(unsafe_code)]
pub mod sample_rows;
pub mod simd;
pub mod softmax;
pub mod token;
pub mod transpose;

use candle_core::{CpuStorage, Layout, Result, Tensor, bail};

/// The elements of a contiguous f32 operand.
///
/// # Errors
/// Another type, or a layout with gaps: the caller must have called `contiguous`.
pub fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let data = storage.as_slice::<f32>()?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
        None => bail!("a fused kernel was given a strided operand of layout {layout:?}"),
    }
}

/// The elements of the contiguous f32 operands of an operation that takes `N`.
pub fn slices<'a, const N: usize>(operands: &[(&'a CpuStorage, &Layout)]) -> Result<[&'a [f32]; N]> {
    if operands.len() != N {
        bail!("{} operands were given, not {N}", operands.len());
    }
    let mut slices = [&[][..]; N];
    for (part, (storage, layout)) in slices.iter_mut().zip(operands) {
        *part = slice(storage, layout)?;
    }
    Ok(slices)
}

/// A gradient of `like`, in its shape.
pub fn gradient(like: &Tensor, data: Vec<f32>) -> Result<Option<Tensor>> {
    Tensor::from_vec(data, like.shape(), like.device()).map(Some)
}

/// Runs `f` on the elements of contiguous f32 CPU tensors without copying them.
pub fn with_slices<T, const N: usize>(
    tensors: [&Tensor; N],
    f: impl FnOnce([&[f32]; N]) -> Result<T>,
) -> Result<T> {
    tensors.iter().try_for_each(|x| compact::expand(x))?;
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut slices = [&[][..]; N];
    for (part, (storage, layout)) in slices.iter_mut().zip(&guards) {
        *part = match &**storage {
            candle_core::Storage::Cpu(storage) => slice(storage, layout)?,
            _ => bail!("a CPU kernel was given a tensor of another device"),
        };
    }
    f(slices)
}

/// Number of rows and their width of a tensor seen as a matrix whose columns are its last dimension.
pub fn matrix_dims(dims: &[usize]) -> Result<(usize, usize)> {
    match dims.split_last() {
        Some((&width, rest)) => Ok((rest.iter().product(), width)),
        None => bail!("a scalar has no last dimension"),
    }
}
