//! Cross entropy: logsumexp(z) - z_y, natural logarithm.

use candle_core::{CpuStorage, D, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::par::{self, Chunks};
use super::cpu::{self, math};
#[cfg(feature = "cuda")]
use super::cuda::{rows, tensors};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;

/// Cross entropy of every row of `logits` [rows, classes] with `labels` `[rows]` (u32): `[rows]`.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    if super::fused(logits) {
        let (rows, classes) = logits.dims2()?;
        let labels = labels.to_vec1::<u32>()?;
        if labels.len() != rows {
            bail!("{} labels for {rows} rows of logits", labels.len());
        }
        if let Some(label) = labels.iter().find(|&&label| label as usize >= classes) {
            bail!("label {label} is not one of {classes} classes");
        }
        return tape::apply(&[&logits.contiguous()?], CrossEntropy { labels, classes });
    }
    composed(logits, labels)
}

/// The definition in plain candle operations.
pub fn composed(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&max)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let picked = shifted.gather(&labels.unsqueeze(1)?, 1)?;
    (log_sum - picked)?.squeeze(1)
}

struct CrossEntropy {
    labels: Vec<u32>,
    classes: usize,
}

impl FusedOp for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [logits] = cpu::slices(operands)?;
        Ok((losses(logits, &self.labels, self.classes), self.labels.len().into()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        tensors::forward(operands, self.labels.len(), |device, [logits]| {
            rows::cross_entropy(device, logits, &self.labels, self.classes)
        })
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [logits] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if logits.device().is_cuda() {
            return tensors::with_views([logits, grad], |device, operands| {
                let dx = rows::cross_entropy_backward(device, operands, &self.labels, self.classes)?;
                Ok(vec![Some(tensors::tensor(device, dx, logits.shape()))])
            });
        }
        let dx = cpu::with_slices([logits, grad], |[logits, grad]| {
            Ok(gradients(logits, &self.labels, grad, self.classes))
        })?;
        Ok(vec![cpu::gradient(logits, dx)?])
    }
}

/// Cross entropy of every row of `logits` [labels, classes].
pub(super) fn losses(logits: &[f32], labels: &[u32], classes: usize) -> Vec<f32> {
    let size = Chunks::rows(labels.len(), classes).size;
    par::build_with(
        labels.len(),
        size,
        || vec![0.0; classes],
        |scratch, index, losses| {
            let labels = &labels[index * size..][..losses.len()];
            forward(&logits[index * size * classes..], labels, scratch, losses);
        },
    )
}

/// Gradients of the logits for the gradients `grad` of [`losses`].
pub(super) fn gradients(logits: &[f32], labels: &[u32], grad: &[f32], classes: usize) -> Vec<f32> {
    let size = Chunks::rows(labels.len(), classes).size;
    par::build(logits.len(), size * classes, |index, dx| {
        let here = index * size..index * size + dx.len() / classes;
        backward(&logits[here.start * classes..], &labels[here.clone()], &grad[here], dx);
    })
}

crate::simd_fn! {
    fn forward<S>(simd, logits: &'a [f32], labels: &'a [u32], scratch: &'a mut [f32], losses: &'a mut [f32]) {
        let rows = logits.chunks_exact(scratch.len());
        for ((z, &label), loss) in rows.zip(labels).zip(losses) {
            let max = math::max(simd, z);
            let sum = math::exp_sum(simd, max, z, scratch);
            *loss = sum.ln() - (z[label as usize] - max);
        }
    }
}

crate::simd_fn! {
    /// dz = (softmax(z) - onehot(label)) grad, row by row.
    fn backward<S>(simd, logits: &'a [f32], labels: &'a [u32], grad: &'a [f32], dx: &'a mut [f32]) {
        let classes = dx.len() / labels.len();
        let rows = logits.chunks_exact(classes).zip(dx.chunks_exact_mut(classes));
        for (((z, dz), &label), &grad) in rows.zip(labels).zip(grad) {
            let sum = math::exp_sum(simd, math::max(simd, z), z, dz);
            math::scale(simd, grad / sum, dz);
            dz[label as usize] -= grad;
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (rows, classes) in [(1, 1), (1, 10), (7, 2), (513, 17), (5, 4099)] {
            let labels: Vec<u32> = (0..rows).map(|i| ((i * 7 + 3) % classes) as u32).collect();
            let labels = Tensor::from_vec(labels, rows, &Device::Cpu).unwrap();
            let logits = (randn("logits", &[rows, classes]) * 4.0).unwrap();
            check(&format!("[{rows}, {classes}]"), &[logits], 2e-6, |x| cross_entropy(&x[0], &labels));
        }
    }

    #[test]
    fn labels_out_of_range_and_wrong_counts_are_errors() {
        let logits = randn("logits", &[2, 3]);
        let labels = |labels: &[u32]| Tensor::new(labels, &Device::Cpu).unwrap();
        assert!(cross_entropy(&logits, &labels(&[0, 3])).is_err());
        assert!(cross_entropy(&logits, &labels(&[0])).is_err());
        assert!(cross_entropy(&logits, &labels(&[2, 0])).is_ok());
    }
}
