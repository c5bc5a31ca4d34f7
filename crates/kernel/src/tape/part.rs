//! Parts of a model whose activations wait for the backward pass as bf16.

use candle_core::{Result, Tensor};

use super::{RECORDING, memory};
use crate::cpu::compact;
use crate::cpu::matmul_format::{MatmulFormat, matmul_format};

/// Runs a part of a model whose inner results nothing reads but its backward pass, and which is the last to read those
/// `inputs` that fused operations gave: if products are of bf16, all of them wait for the backward pass as bf16.
pub fn with_bf16_activations(inputs: &[&Tensor], run: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    let recorded = || RECORDING.with_borrow(|entries| entries.as_ref().map_or(0, Vec::len));
    let first = recorded();
    let out = run()?;
    let last = recorded();
    if matmul_format() == MatmulFormat::F32 || first == last || !out.device().is_cpu() {
        return Ok(out);
    }
    let place = |x: &Tensor| memory(x).map(|(at, _)| at);
    let result = place(&out);
    RECORDING.with_borrow(|entries| {
        for (index, entry) in entries.iter().flatten().enumerate() {
            let ends = match index < first {
                true => inputs.iter().any(|input| input.id() == entry.out.id()),
                false => place(&entry.out) != result,
            };
            if ends && !entry.given_up && !entry.is_view() {
                compact::compress(&entry.out)?;
            }
        }
        Ok(out)
    })
}

/// Makes readable what the backward pass of the plain operations behind `tensor` may read.
pub(super) fn expand(tensor: &Tensor) -> Result<()> {
    tensor.sorted_nodes().into_iter().try_for_each(compact::expand)
}
