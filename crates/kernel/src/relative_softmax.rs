//! Attention weights from products of queries and keys with a learned bias of their distance (T5; Mega, equation 20).
//!
//! ```text
//! w_ij = softmax over visible j of (scale p_ij + bias[M - 1 + j - i]),  bias [2 M - 1]
//! ```

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::math::{self, load, store};
use super::cpu::{self, par};
use super::op::{self, FusedOp, SavedOutput};
use super::softmax::masked_softmax;
use super::{simd_fn, tape};

/// Who sees whom, and the factor on the products.
#[derive(Clone, Copy, Debug)]
pub struct RelativeSoftmax<'a> {
    /// Factor on every product.
    pub scale: f64,
    /// [2 M - 1]: the bias of key j for query i stands at M - 1 + j - i.
    pub bias: &'a Tensor,
    /// [groups, keys]: 1 keep, 0 hidden.
    pub keep: &'a Tensor,
    /// Whether queries see no later keys.
    pub causal: bool,
}

/// Weights of `products` [groups, n, n]; a query that sees no key has zeros.
pub fn relative_softmax(products: &Tensor, call: &RelativeSoftmax) -> Result<Tensor> {
    let ((groups, n, keys), longest) = (products.dims3()?, call.bias.dim(0)?.div_ceil(2));
    if keys != n || n > longest || call.keep.dims() != [groups, n] {
        let (products, keep) = (products.dims(), call.keep.dims());
        bail!("products {products:?} and a mask {keep:?} do not fit biases for {longest} positions");
    }
    if super::fused_cpu(products.device()) && products.dtype() == DType::F32 {
        let op = Weigh { scale: call.scale as f32, causal: call.causal };
        return tape::apply(
            &[&products.contiguous()?, &call.bias.contiguous()?, &call.keep.contiguous()?],
            op,
        );
    }
    let at = (0..n).flat_map(|i| (0..n).map(move |j| (longest - 1 + j - i) as u32));
    let at = Tensor::from_vec(at.collect::<Vec<_>>(), n * n, products.device())?;
    let bias = call.bias.index_select(&at, 0)?.reshape((n, n))?;
    let keep = call.keep.reshape((groups, 1, n))?;
    let visible = match call.causal {
        true => keep.broadcast_mul(&Tensor::tril2(n, keep.dtype(), keep.device())?)?,
        false => keep,
    };
    masked_softmax(&(products * call.scale)?.broadcast_add(&bias)?, &visible)
}

struct Weigh {
    scale: f32,
    causal: bool,
}

/// Queries of one piece of work.
const ROWS: usize = 64;

impl Weigh {
    /// Keys that query `row` may see.
    fn reach(&self, row: usize, n: usize) -> usize {
        if self.causal { row + 1 } else { n }
    }

    /// Of rows from `first` on of all groups, `each` with its group, its query, and where its biases begin.
    fn rows(&self, first: usize, n: usize, biases: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        (first..).map(move |row| (row / n, row % n, biases.div_ceil(2) - 1 - row % n))
    }
}

impl FusedOp for Weigh {
    fn name(&self) -> &'static str {
        "relative-softmax"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [products, bias, keep] = cpu::slices(operands)?;
        let shape = operands[0].1.shape();
        let (_, n, _) = shape.dims3()?;
        let weights = par::build(products.len(), ROWS * n, |index, out| {
            let (first, products) = (index * ROWS, &products[index * ROWS * n..]);
            let rows = out.chunks_exact_mut(n).zip(products.chunks_exact(n));
            for ((group, query, start), (out, products)) in self.rows(first, n, bias.len()).zip(rows) {
                let reach = self.reach(query, n);
                let (bias, keep) = (&bias[start..start + reach], &keep[group * n..group * n + reach]);
                weigh(self.scale, &products[..reach], bias, keep, &mut out[..reach]);
            }
        });
        Ok((weights, shape.clone()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn backward(&self, operands: &[&Tensor], out: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [products, bias, _keep] = op::operands(operands)?; // nothing is read of the mask: hidden weights are 0
        let ((groups, n, _), biases) = (products.dims3()?, bias.dim(0)?);
        let (dproducts, dbias) = cpu::with_slices([op::result(out)?, grad], |[weights, dy]| {
            let pieces = (groups * n).div_ceil(ROWS);
            let (dx, parts) = par::build_two(
                (weights.len(), ROWS * n),
                (pieces * biases, biases),
                || (),
                |(), index, dx, part| {
                    let here = index * ROWS * n..index * ROWS * n + dx.len();
                    let (weights, dy) = (weights[here.clone()].chunks_exact(n), dy[here].chunks_exact(n));
                    let rows = dx.chunks_exact_mut(n).zip(weights.zip(dy));
                    for ((_, query, start), (dx, (weights, dy))) in
                        self.rows(index * ROWS, n, biases).zip(rows)
                    {
                        let reach = self.reach(query, n);
                        let part = &mut part[start..start + reach];
                        weigh_back(self.scale, &weights[..reach], &dy[..reach], &mut dx[..reach], part);
                    }
                },
            );
            Ok((dx, par::sum_parts(&parts, biases)))
        })?;
        Ok(vec![cpu::gradient(products, dproducts)?, cpu::gradient(bias, dbias)?, None])
    }
}

simd_fn! {
    /// Weights of one query over the keys in reach.
    fn weigh<S>(simd, scale: f32, products: &'a [f32], bias: &'a [f32], keep: &'a [f32], out: &'a mut [f32]) {
        const HIDDEN: f32 = 1e30;
        let (factor, hidden) = (simd.splat_f32s(scale), simd.splat_f32s(HIDDEN));
        for at in (0..out.len()).step_by(S::F32_LANES) {
            let logit = simd.mul_add_e_f32s(load(simd, products, at), factor, load(simd, bias, at));
            let keep = load(simd, keep, at);
            let away = simd.mul_f32s(simd.sub_f32s(keep, simd.splat_f32s(1.0)), hidden);
            store(simd, out, at, simd.mul_add_e_f32s(logit, keep, away));
        }
        let max = math::max(simd, out);
        math::exp_in_place(simd, max, out);
        math::update(simd, keep, out, #[inline(always)] |keep, weight| simd.mul_f32s(keep, weight));
        let sum = math::sum(simd, out);
        if sum > 0.0 {
            math::scale(simd, 1.0 / sum, out);
        }
    }
}

simd_fn! {
    /// dl = w (dy - sum w dy); dp = scale dl; the biases add dl.
    fn weigh_back<S>(
        simd, scale: f32, weights: &'a [f32], dy: &'a [f32], dp: &'a mut [f32], dbias: &'a mut [f32],
    ) {
        let total = simd.splat_f32s(math::dot(simd, weights, dy));
        let scale = simd.splat_f32s(scale);
        for at in (0..dp.len()).step_by(S::F32_LANES) {
            let slope = simd.mul_f32s(load(simd, weights, at), simd.sub_f32s(load(simd, dy, at), total));
            store(simd, dbias, at, simd.add_f32s(load(simd, dbias, at), slope));
            store(simd, dp, at, simd.mul_f32s(slope, scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{check, randn};

    /// 1 where a key of a group is kept; the last group hides all of its keys.
    fn keep(groups: usize, n: usize) -> Tensor {
        let kept = |at: usize| f32::from(u8::from(at / n + 1 < groups && at % 5 != 2));
        Tensor::from_vec((0..groups * n).map(kept).collect(), (groups, n), &Device::Cpu).unwrap()
    }

    #[test]
    fn fused_is_the_twin() {
        for (groups, n, longest) in [(1, 1, 1), (2, 3, 3), (3, 7, 9), (2, 33, 40), (2, 130, 130)] {
            let inputs = [randn("products", &[groups, n, n]), randn("bias", &[2 * longest - 1])];
            for causal in [false, true] {
                let what = format!("{groups} groups of {n}, causal {causal}");
                check(&what, &inputs, 1e-5, |x| {
                    let keep = keep(groups, n).to_dtype(x[0].dtype())?;
                    let call = RelativeSoftmax { scale: 0.3, bias: &x[1], keep: &keep, causal };
                    relative_softmax(&x[0], &call)
                });
            }
        }
    }

    #[test]
    fn misfits_are_errors() {
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let weigh = |products: &[usize], bias: usize, keep: &[usize]| {
            let (bias, keep) = (ones(&[bias]), ones(keep));
            let call = RelativeSoftmax { scale: 1.0, bias: &bias, keep: &keep, causal: false };
            relative_softmax(&ones(products), &call).map(|weights| weights.dims().to_vec())
        };
        assert_eq!(weigh(&[2, 4, 4], 7, &[2, 4]).unwrap(), [2, 4, 4]);
        assert!(weigh(&[2, 4, 3], 7, &[2, 4]).is_err());
        assert!(weigh(&[2, 5, 5], 7, &[2, 5]).is_err());
        assert!(weigh(&[2, 4, 4], 7, &[1, 4]).is_err());
    }
}
