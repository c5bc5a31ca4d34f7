//! Softmax attention of the query of one token over cached keys and values.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use crate::cpu::{self, math, par};
use crate::heads::Heads;
use crate::op::FusedOp;
use crate::softmax::softmax;
use crate::tape;

/// out = softmax(scale q K^T) V of queries [b, h, 1, d] over the first `seen` rows of `keys` [b g, rows, d] and `values`
/// [b g, rows, e]; h/g neighbouring heads read the same ones. Gradients are those of plain operations.
///
/// # Errors
/// Shapes that do not fit.
pub fn attend_cached(q: &Tensor, keys: &Tensor, values: &Tensor, seen: usize, scale: f64) -> Result<Heads> {
    let (b, h, n, d) = q.dims4()?;
    let ((caches, rows, width), (_, _, e)) = (keys.dims3()?, values.dims3()?);
    let shared = (b * h).checked_div(caches).filter(|shared| shared * caches == b * h);
    let fits = n == 1 && width == d && values.dims() == [caches, rows, e] && (1..=rows).contains(&seen);
    let Some(shared) = shared.filter(|shared| fits && h % shared == 0) else {
        bail!(
            "queries {:?} cannot read {seen} rows of keys {:?} and values {:?}",
            q.dims(),
            keys.dims(),
            values.dims()
        );
    };
    let tracked = [q, keys, values].iter().any(|x| x.track_op());
    if crate::fused_cpu(q.device()) && q.dtype() == DType::F32 && !tracked {
        let operands = [&q.contiguous()?, &keys.contiguous()?, &values.contiguous()?];
        return Ok(Heads::Merged { rows: tape::apply(&operands, Cached { seen, scale })?, heads: h });
    }
    let q = (q.contiguous()?.reshape((caches, shared, d))? * scale)?;
    let weights = softmax(&q.matmul(&keys.narrow(1, 0, seen)?.t()?)?)?;
    Ok(Heads::Split(weights.matmul(&values.narrow(1, 0, seen)?)?.reshape((b, h, 1, e))?))
}

struct Cached {
    seen: usize,
    scale: f64,
}

impl FusedOp for Cached {
    fn name(&self) -> &'static str {
        "attend-cached"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [q, k, v] = cpu::slices(operands)?;
        let (b, h, _, d) = operands[0].1.shape().dims4()?;
        let (caches, rows, e) = operands[2].1.shape().dims3()?;
        let (seen, shared) = (self.seen, b * h / caches);
        let out = par::build_with(
            b * h * e,
            shared * e,
            || par::scratch(shared * seen),
            |logits, cache, out| {
                let (k, v) = (&k[cache * rows * d..][..seen * d], &v[cache * rows * e..][..seen * e]);
                let q = &q[cache * shared * d..][..shared * d];
                attend(q, [k, v], seen, self.scale as f32, logits, out);
            },
        );
        Ok((out, (b, 1, h * e).into()))
    }
}

/// Rows of keys that stay in the first cache while all queries read them.
const ROWS: usize = 64;

crate::simd_fn! {
    /// Attention of some queries over the same `seen` keys and values; `out` is zero before.
    fn attend<S>(
        simd,
        q: &'a [f32],
        cached: [&'a [f32]; 2],
        seen: usize,
        scale: f32,
        logits: &'a mut [f32],
        out: &'a mut [f32],
    ) {
        let [k, v] = cached;
        let queries = logits.len() / seen;
        let (d, e) = (q.len() / queries, out.len() / queries);
        for (block, k) in k.chunks(ROWS * d.max(1)).enumerate() {
            for (q, logits) in q.chunks_exact(d.max(1)).zip(logits.chunks_exact_mut(seen)) {
                for (k, logit) in k.chunks_exact(d.max(1)).zip(&mut logits[block * ROWS..]) {
                    *logit = scale * math::dot(simd, q, k);
                }
            }
        }
        for logits in logits.chunks_exact_mut(seen) {
            math::exp_in_place(simd, math::max(simd, logits), logits);
            let total = math::sum(simd, logits);
            math::scale(simd, 1.0 / total, logits);
        }
        for (block, v) in v.chunks(ROWS * e.max(1)).enumerate() {
            for (weights, out) in logits.chunks_exact(seen).zip(out.chunks_exact_mut(e.max(1))) {
                let weights = &weights[block * ROWS..];
                for (v, weights) in v.chunks(4 * e.max(1)).zip(weights.chunks(4)) {
                    for at in (0..e).step_by(S::F32_LANES) {
                        let mut sum = math::load(simd, out, at);
                        for (v, &weight) in v.chunks_exact(e).zip(weights) {
                            sum = simd.mul_add_e_f32s(simd.splat_f32s(weight), math::load(simd, v, at), sum);
                        }
                        math::store(simd, out, at, sum);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{difference, randn};
    use crate::{KernelMode, with_mode};

    #[test]
    fn the_kernel_is_the_definition_at_odd_shapes() {
        for (b, h, g, d, e, rows) in
            [(1, 1, 1, 1, 1, 1), (2, 3, 3, 5, 7, 9), (1, 6, 2, 16, 20, 67), (3, 8, 1, 33, 64, 130)]
        {
            let q = randn("q", &[b, h, 1, d]);
            let (k, v) = (randn("k", &[b * g, rows, d]), randn("v", &[b * g, rows, e]));
            for seen in [1, rows.div_ceil(2), rows] {
                let run = || {
                    let out = attend_cached(&q, &k, &v, seen, 0.7).unwrap().split().unwrap();
                    assert_eq!(out.dims(), [b, h, 1, e]);
                    let out = out.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
                    out.to_vec1::<f64>().unwrap()
                };
                let apart = difference(&run(), &with_mode(KernelMode::Composed, run));
                assert!(apart < 1e-6, "{b} {h} {g} {d} {e} {seen} of {rows}: {apart}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (q, k) = (randn("q", &[1, 4, 1, 3]), randn("k", &[3, 5, 3]));
        assert!(attend_cached(&q, &k, &k, 2, 1.0).is_err(), "three caches for four heads");
        let k = randn("k", &[4, 5, 3]);
        for seen in [0, 6] {
            assert!(attend_cached(&q, &k, &k, seen, 1.0).is_err(), "{seen} of 5 rows");
        }
    }
}
