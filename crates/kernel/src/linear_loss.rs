//! Cross entropy of a linear layer's outputs over many classes: cross_entropy(x W^T + b, y) without all logits at once.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu;
use super::cpu::compact::Elements;
use super::cpu::dense::WeightGradient;
use super::cpu::layers::Layers;
use super::linear::{self, linear};
use super::loss::{self, cross_entropy};
use super::op::{FusedOp, SavedOutput};
use super::tape;

/// Logits that may be kept for the backward pass; above it they are computed in chunks, and again in the backward pass.
const KEPT: usize = 1 << 24;
/// Logits of a chunk.
const CHUNK: usize = 1 << 22;
/// Fewest rows of a chunk: the weights are packed once for each.
const FEWEST: usize = 48;

/// Cross entropy of every row of `x` [rows, inp] under the classes `weight` [classes, inp] and `bias` `[classes]`, with
/// `labels` `[rows]` (u32): `[rows]`, in nats.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    labels: &Tensor,
) -> Result<Tensor> {
    let (rows, classes) = (x.dim(0)?, weight.dim(0)?);
    let fused = super::fused_cpu(x.device()) && x.dtype() == DType::F32;
    match chunk(rows, classes).filter(|_| fused) {
        Some(chunk) => in_chunks((x, weight, bias), labels, chunk),
        None => composed(x, weight, bias, labels),
    }
}

/// Rows of a chunk, where the logits are too many to be kept.
fn chunk(rows: usize, classes: usize) -> Option<usize> {
    (rows * classes > KEPT).then(|| (CHUNK / classes).max(FEWEST))
}

/// The definition: the logits, then their cross entropy.
pub fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, labels: &Tensor) -> Result<Tensor> {
    cross_entropy(&linear(x, weight, bias)?, labels)
}

fn in_chunks(
    (x, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    labels: &Tensor,
    chunk: usize,
) -> Result<Tensor> {
    let (rows, classes) = (x.dim(0)?, weight.dim(0)?);
    let labels = labels.to_vec1::<u32>()?;
    if labels.len() != rows {
        bail!("{} labels for {rows} rows", labels.len());
    }
    if let Some(label) = labels.iter().find(|&&label| label as usize >= classes) {
        bail!("label {label} is not one of {classes} classes");
    }
    let (x, weight, op) = (x.contiguous()?, weight.contiguous()?, LinearLoss { labels, chunk });
    match bias {
        Some(bias) => tape::apply(&[&x, &weight, &bias.contiguous()?], op),
        None => tape::apply(&[&x, &weight], op),
    }
}

struct LinearLoss {
    labels: Vec<u32>,
    /// Rows whose logits exist at the same time.
    chunk: usize,
}

impl FusedOp for LinearLoss {
    fn name(&self) -> &'static str {
        "linear-cross-entropy"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let (x, w, bias) = match operands.len() {
            2 => cpu::slices(operands).map(|[x, w]| (x, w, &[][..]))?,
            _ => cpu::slices(operands).map(|[x, w, bias]| (x, w, bias))?,
        };
        let (out, inp) = operands[1].1.shape().dims2()?;
        let width = operands[0].1.shape().dims2()?.1;
        if width != inp || !(bias.is_empty() || bias.len() == out) {
            bail!("weight [{out}, {inp}] and {} biases for rows of {width}", bias.len());
        }
        let mut losses = Vec::with_capacity(self.labels.len());
        for (labels, x) in self.labels.chunks(self.chunk).zip(x.chunks(self.chunk * inp)) {
            let logits = linear::forward(x, labels.len(), w, out, inp, bias);
            losses.extend(loss::losses(&logits, labels, out));
        }
        Ok((losses, self.labels.len().into()))
    }

    /// Gradients of x, the weight, and (where there are some) the biases.
    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, weight, bias) = (operands[0], operands[1], operands.get(2));
        let (out, inp) = weight.dims2()?;
        let needs_x = x.track_op();
        cpu::with_slices([x, weight, bias.unwrap_or(&weight), grad], |[data, w, b, grad]| {
            let b = if bias.is_some() { b } else { &[] };
            let mut sum = WeightGradient::new(out, inp);
            let (mut dx, mut dbias) = (Vec::new(), vec![0.0; b.len()]);
            let rows = self.labels.chunks(self.chunk).zip(data.chunks(self.chunk * inp));
            for ((labels, x), grad) in rows.zip(grad.chunks(self.chunk)) {
                let logits = linear::forward(x, labels.len(), w, out, inp, b);
                let dy = loss::gradients(&logits, labels, grad, out);
                drop(logits);
                let layers = Layers { inp, norm: None, weights: vec![w], needs_x, needs_bias: !b.is_empty() };
                let (part, db) = layers.gradients(Elements::F32(x), &dy, &mut sum);
                dx.extend(part);
                dbias.iter_mut().zip(db).for_each(|(sum, part)| *sum += part);
            }
            let mut dw = vec![0.0; w.len()];
            sum.finish(&mut dw);
            let dx = if needs_x { cpu::gradient(x, dx)? } else { None };
            let mut grads = vec![dx, cpu::gradient(weight, dw)?];
            if let Some(bias) = bias {
                grads.push(cpu::gradient(bias, dbias)?);
            }
            Ok(grads)
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};
    use crate::{KernelMode, mode};

    #[test]
    fn chunks_are_the_twin() {
        for (rows, inp, classes, chunk) in [(1, 1, 1, 1), (7, 3, 5, 2), (67, 17, 130, 24), (50, 64, 70, 50)] {
            let labels: Vec<u32> = (0..rows).map(|i| ((i * 7 + 3) % classes) as u32).collect();
            let labels = Tensor::from_vec(labels, rows, &Device::Cpu).unwrap();
            let inputs = [randn("x", &[rows, inp]), randn("w", &[classes, inp]), randn("b", &[classes])];
            let run = |x: &[Tensor], bias: Option<&Tensor>| match mode() {
                KernelMode::Fused => in_chunks((&x[0], &x[1], bias), &labels, chunk),
                KernelMode::Composed => composed(&x[0], &x[1], bias, &labels),
            };
            let name = format!("[{rows}, {inp}] to {classes} by {chunk}");
            check(&name, &inputs, 2e-5, |x| run(x, Some(&x[2])));
            check(&format!("{name}, no bias"), &inputs[..2], 2e-5, |x| run(x, None));
        }
    }

    #[test]
    fn labels_out_of_range_and_wrong_counts_are_errors() {
        let (x, w) = (randn("x", &[2, 3]), randn("w", &[4, 3]));
        let of = |labels: &[u32]| {
            let labels = Tensor::new(labels, &Device::Cpu).unwrap();
            [
                in_chunks((&x, &w, None), &labels, 1).is_ok(),
                linear_cross_entropy(&x, &w, None, &labels).is_ok(),
            ]
        };
        assert_eq!([of(&[0, 4]), of(&[0]), of(&[0, 3])], [[false; 2], [false; 2], [true; 2]]);
    }

    #[test]
    fn many_logits_are_never_there_at_once() {
        assert_eq!(chunk(2048, 2002), None, "the small model's head is kept");
        for (rows, classes) in [(3072, 20_002), (3072, 207_744), (8192, 50_265)] {
            let most = chunk(rows, classes).unwrap() * classes;
            assert!(
                most <= CHUNK.max(FEWEST * classes) && most < rows * classes / 14,
                "{rows} {classes}: {most}"
            );
        }
    }
}
