//! Batch normalisation: every channel (last dimension) by its mean and biased variance over all rows (Ioffe & Szegedy
//! 2015, algorithm 1), or by statistics that are given.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::math::{load, store};
use super::cpu::{self, par, par::Chunks, rows};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;
use crate::simd_fn;

/// Mean and biased variance of every channel, both `[c]`, outside of the graph.
#[derive(Clone, Debug)]
pub struct Statistics {
    /// Means.
    pub mean: Tensor,
    /// Biased variances.
    pub variance: Tensor,
}

/// What channels are normalised by.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    /// The rows' own statistics, through which gradients flow.
    Batch,
    /// Given ones, which are constants.
    Given(&'a Statistics),
}

/// (x - mean) / sqrt(variance + eps) * weight + bias for `x` [.., c], and what it was normalised by.
pub fn batch_norm(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    by: By,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    let (count, c) = cpu::matrix_dims(x.dims())?;
    if weight.dims() != [c] || bias.dims() != [c] || count * c == 0 {
        bail!("weight {:?} and bias {:?} for {count} rows of {c}", weight.dims(), bias.dims());
    }
    if !super::fused_cpu(x.device()) || x.dtype() != DType::F32 {
        return composed(x, [weight, bias], by, eps);
    }
    let x = x.contiguous()?;
    let statistics = match by {
        By::Given(statistics) => statistics.clone(),
        By::Batch => cpu::with_slices([&x], |[x]| {
            let [mean, variance] = moments(x, c);
            let tensor = |values| Tensor::from_vec(values, c, weight.device());
            Ok(Statistics { mean: tensor(mean)?, variance: tensor(variance)? })
        })?,
    };
    let variance = statistics.variance.to_vec1::<f32>()?;
    let op = BatchNorm {
        mean: statistics.mean.to_vec1()?,
        inverse: variance.iter().map(|variance| 1.0 / (variance + eps as f32).sqrt()).collect(),
        own: matches!(by, By::Batch),
    };
    let y = tape::apply(&[&x, &weight.contiguous()?, &bias.contiguous()?], op)?;
    Ok((y, statistics))
}

/// The definition in plain candle operations.
pub fn composed(x: &Tensor, [weight, bias]: [&Tensor; 2], by: By, eps: f64) -> Result<(Tensor, Statistics)> {
    let flat = x.reshape(cpu::matrix_dims(x.dims())?)?;
    let (mean, variance) = match by {
        By::Given(Statistics { mean, variance }) => (mean.clone(), variance.clone()),
        By::Batch => {
            let mean = flat.mean(0)?;
            let variance = flat.broadcast_sub(&mean)?.sqr()?.mean(0)?;
            (mean, variance)
        }
    };
    let normal = flat.broadcast_sub(&mean)?.broadcast_div(&(&variance + eps)?.sqrt()?)?;
    let y = normal.broadcast_mul(weight)?.broadcast_add(bias)?.reshape(x.shape())?;
    Ok((y, Statistics { mean: mean.detach(), variance: variance.detach() }))
}

/// Mean and biased variance of every column of `x`, rows of `width`: those of chunks, put together in their order.
fn moments(x: &[f32], width: usize) -> [Vec<f32>; 2] {
    let chunks = Chunks::rows(x.len() / width, width);
    let parts = par::build(chunks.count() * 2 * width, 2 * width, |index, part| {
        let here = chunks.range(index);
        let x = &x[here.start * width..here.end * width];
        let (mean, squares) = part.split_at_mut(width);
        rows::add_column_sums(x, mean);
        mean.iter_mut().for_each(|sum| *sum /= here.len() as f32);
        add_squares_around(x, mean, squares);
    });
    let (mut mean, mut squares) = (vec![0.0; width], vec![0.0; width]);
    let mut count = 0.0;
    for (index, part) in parts.chunks_exact(2 * width).enumerate() {
        let more = chunks.range(index).len() as f64;
        let share = more / (count + more);
        for at in 0..width {
            let away = f64::from(part[at]) - mean[at];
            mean[at] += away * share;
            squares[at] += f64::from(part[width + at]) + away * away * count * share;
        }
        count += more;
    }
    let single =
        |values: Vec<f64>, scale: f64| values.into_iter().map(|value| (value * scale) as f32).collect();
    [single(mean, 1.0), single(squares, 1.0 / count)]
}

simd_fn! {
    /// Adds to `total` the squares of every column of `x` around `centre`.
    fn add_squares_around<S>(simd, x: &'a [f32], centre: &'a [f32], total: &'a mut [f32]) {
        let width = centre.len();
        for x in x.chunks_exact(width) {
            for at in (0..width).step_by(S::F32_LANES) {
                let away = simd.sub_f32s(load(simd, x, at), load(simd, centre, at));
                store(simd, total, at, simd.mul_add_e_f32s(away, away, load(simd, total, at)));
            }
        }
    }
}

simd_fn! {
    /// y = (x - mean) scale + bias, row by row.
    fn normalise<S>(
        simd, x: &'a [f32], mean: &'a [f32], scale: &'a [f32], bias: &'a [f32], y: &'a mut [f32],
    ) {
        let width = mean.len();
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            for at in (0..width).step_by(S::F32_LANES) {
                let away = simd.sub_f32s(load(simd, x, at), load(simd, mean, at));
                store(simd, y, at, simd.mul_add_e_f32s(away, load(simd, scale, at), load(simd, bias, at)));
            }
        }
    }
}

simd_fn! {
    /// Adds the sums of dy (x - mean) and of dy over all rows.
    fn backward_sums<S>(
        simd, x: &'a [f32], mean: &'a [f32], dy: &'a [f32], products: &'a mut [f32], sums: &'a mut [f32],
    ) {
        let width = mean.len();
        for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
            for at in (0..width).step_by(S::F32_LANES) {
                let (dy, away) = (load(simd, dy, at), simd.sub_f32s(load(simd, x, at), load(simd, mean, at)));
                store(simd, products, at, simd.mul_add_e_f32s(dy, away, load(simd, products, at)));
                store(simd, sums, at, simd.add_f32s(dy, load(simd, sums, at)));
            }
        }
    }
}

/// What the gradient of a value needs of its column.
#[derive(Clone, Copy)]
struct Columns<'a> {
    mean: &'a [f32],
    shift: &'a [f32],
    slope: &'a [f32],
    scale: &'a [f32],
}

simd_fn! {
    /// dx = (dy - shift - (x - mean) slope) scale, row by row.
    fn backward_rows<S>(simd, columns: Columns<'a>, x: &'a [f32], dy: &'a [f32], dx: &'a mut [f32]) {
        let Columns { mean, shift, slope, scale } = columns;
        let width = mean.len();
        for ((x, dy), dx) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width)) {
            for at in (0..width).step_by(S::F32_LANES) {
                let away = simd.sub_f32s(load(simd, mean, at), load(simd, x, at));
                let dy = simd.sub_f32s(load(simd, dy, at), load(simd, shift, at));
                let dy = simd.mul_add_e_f32s(away, load(simd, slope, at), dy);
                store(simd, dx, at, simd.mul_f32s(dy, load(simd, scale, at)));
            }
        }
    }
}

struct BatchNorm {
    mean: Vec<f32>,
    inverse: Vec<f32>,
    own: bool,
}

impl BatchNorm {
    fn scale(&self, weight: &[f32]) -> Vec<f32> {
        self.inverse.iter().zip(weight).map(|(inverse, weight)| inverse * weight).collect()
    }
}

impl FusedOp for BatchNorm {
    fn name(&self) -> &'static str {
        "batch-norm"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, weight, bias] = cpu::slices(operands)?;
        let (width, scale) = (weight.len(), self.scale(weight));
        let chunk = Chunks::rows(x.len() / width, width).size * width;
        let y = par::build(x.len(), chunk, |index, y| {
            normalise(&x[index * chunk..][..y.len()], &self.mean, &scale, bias, y);
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, weight, bias] = op::operands(operands)?;
        let width = self.mean.len();
        let (dx, mut dweight, dbias) = cpu::with_slices([x, weight, grad], |[x, weight, dy]| {
            let chunks = Chunks::rows(x.len() / width, width);
            let chunk = chunks.size * width;
            let parts = par::build(chunks.count() * 2 * width, 2 * width, |index, part| {
                let here = index * chunk..((index + 1) * chunk).min(x.len());
                let (products, sums) = part.split_at_mut(width);
                backward_sums(&x[here.clone()], &self.mean, &dy[here], products, sums);
            });
            let mut products = par::sum_parts(&parts, 2 * width);
            let sums = products.split_off(width);
            // what flows through the batch's own mean and variance
            let through = if self.own { width as f32 / x.len() as f32 } else { 0.0 };
            let shift: Vec<f32> = sums.iter().map(|sum| sum * through).collect();
            let slope = products.iter().zip(&self.inverse);
            let slope: Vec<f32> =
                slope.map(|(product, inverse)| product * inverse * inverse * through).collect();
            let scale = self.scale(weight);
            let columns = Columns { mean: &self.mean, shift: &shift, slope: &slope, scale: &scale };
            let dx = par::build(x.len(), chunk, |index, dx| {
                let here = index * chunk..index * chunk + dx.len();
                backward_rows(columns, &x[here.clone()], &dy[here], dx);
            });
            Ok((dx, products, sums))
        })?;
        dweight.iter_mut().zip(&self.inverse).for_each(|(sum, inverse)| *sum *= inverse);
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(weight, dweight)?, cpu::gradient(bias, dbias)?])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (dims, shift) in
            [(vec![2, 1, 1], 0.0), (vec![3, 8], 2.0), (vec![2, 7, 17], 0.0), (vec![3, 701, 64], 20.0)]
        {
            let c = dims[dims.len() - 1];
            let inputs = [(randn("x", &dims) + shift).unwrap(), randn("weight", &[c]), randn("bias", &[c])];
            let what = format!("{dims:?}");
            check(&what, &inputs, 3e-5, |x| Ok(batch_norm(&x[0], [&x[1], &x[2]], By::Batch, 1e-5)?.0));
            let mean = randn("mean", &[c]);
            let variance = (randn("variance", &[c]).sqr().unwrap() + 0.5).unwrap();
            check(&format!("{what}, given statistics"), &inputs, 3e-5, |x| {
                let like = |statistic: &Tensor| statistic.to_dtype(x[0].dtype());
                let given = Statistics { mean: like(&mean)?, variance: like(&variance)? };
                Ok(batch_norm(&x[0], [&x[1], &x[2]], By::Given(&given), 1e-5)?.0)
            });
        }
    }

    #[test]
    fn statistics_are_those_of_all_rows() {
        let rows = 5000;
        let values = (0..rows * 2).map(|at| if at % 2 == 0 { 1000.0 + (at / 2 % 4) as f32 } else { -3.0 });
        let x = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((5, rows / 5, 2)).unwrap();
        let ones = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
        let (_, found) = batch_norm(&x, [&ones, &ones], By::Batch, 1e-5).unwrap();
        assert_eq!(found.mean.to_vec1::<f32>().unwrap(), [1001.5, -3.0]);
        assert_eq!(found.variance.to_vec1::<f32>().unwrap(), [1.25, 0.0]);
        assert!(batch_norm(&x, [&ones.narrow(0, 0, 1).unwrap(), &ones], By::Batch, 1e-5).is_err());
        let (nothing, none) = (x.narrow(2, 0, 0).unwrap(), ones.narrow(0, 0, 0).unwrap());
        assert!(batch_norm(&nothing, [&none, &none], By::Batch, 1e-5).is_err());
    }
}
