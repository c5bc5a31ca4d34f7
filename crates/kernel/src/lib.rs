//! The operations that models are built from.
//!
//! Each operation has a definition in composed candle operations, a fused CPU kernel with a hand-written backward pass, and
//! some have a CUDA kernel. A public function dispatches by [`KernelMode`] and device; tests prove fused and composed equal in value
//! and gradient. Float reductions use a partition that is fixed by shape and combine in index order, so that results do not
//! depend on the number of threads.
//!
//! Imports [`effattn_record`] only (patterns, units of settings), and knows no mechanism and no model. The types to know are
//! [`attend::Attend`] (softmax attention over any pattern), [`linear_attention::LinearAttention`] and [`op::FusedOp`] (a fused
//! operation with its backward pass). This is the only crate with `unsafe` code.

pub mod activation;
pub mod adamw;
pub mod aft;
pub mod attend;
pub mod batch_norm;
pub mod block;
pub mod class_token;
pub mod conv;
pub mod cpu;
#[cfg(any(feature = "cuda", test))]
pub mod cuda;
pub mod cuda_coverage;
pub mod delta_rule;
pub mod device;
pub mod diagonal_scan;
pub mod distance_attention;
pub mod dropout;
pub mod ema;
pub mod embedding;
pub mod fourier;
pub mod gating;
pub mod group;
pub mod heads;
pub mod kept_rows;
pub mod linear;
pub mod linear_attention;
pub mod linear_loss;
pub mod loss;
pub mod lsh;
pub mod masking;
pub mod nan_trace;
pub mod norm;
pub mod norm_parts;
pub mod nystrom;
pub mod op;
pub mod product_time;
pub mod profile;
pub mod project_slots;
pub mod rotary;
pub mod short_conv;
pub mod sinkhorn;
pub mod softmax;
pub mod tape;
#[cfg(test)]
mod testing;
pub mod window_2d;

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};

/// Which implementation runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelMode {
    /// Fused kernels where the device has them.
    #[default]
    Fused,
    /// The composed twins, which is what the papers' codes did.
    Composed,
}

thread_local! {
    static MODE: Cell<KernelMode> = const { Cell::new(KernelMode::Fused) };
}

/// The mode of this thread.
pub fn mode() -> KernelMode {
    MODE.get()
}

/// Sets the mode of this thread.
pub fn set_mode(mode: KernelMode) {
    MODE.set(mode);
}

/// Runs `f` in `mode` and restores the mode that was set before.
pub fn with_mode<T>(mode: KernelMode, f: impl FnOnce() -> T) -> T {
    let before = MODE.replace(mode);
    let result = f();
    MODE.set(before);
    result
}

/// Whether the fused CPU kernel should run for tensors on `device`.
#[track_caller]
pub(crate) fn fused_cpu(device: &Device) -> bool {
    let fused = mode() == KernelMode::Fused && device.is_cpu();
    if fused {
        cuda_coverage::note(false);
    }
    fused
}

/// Whether a fused kernel should run for `x`, where there is one for the CPU and one for CUDA.
#[track_caller]
pub(crate) fn fused(x: &Tensor) -> bool {
    let device = x.device();
    let fused = mode() == KernelMode::Fused
        && x.dtype() == DType::F32
        && (device.is_cpu() || cfg!(feature = "cuda") && device.is_cuda());
    if fused {
        cuda_coverage::note(true);
    }
    fused
}
