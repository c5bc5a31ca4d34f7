//! One token: features, sums and result of every head in one pass over the sums, which are written where they lie.

use candle_core::{DType, Result, Tensor};

use super::guard::invert;
use super::map;
use crate::cpu;
use crate::cpu::math::{load, store};
use crate::cpu::par::{self, Chunks};
use crate::cpu::token::{self, HeadRows};
use crate::linear_attention::{FeatureActivation, Guard};
use crate::profile::{self, StepPart};

/// Sums of heads that a job moves on, in elements.
const CHUNK: usize = 1 << 15;

/// A token and what is done with it. Queries and keys [b, groups, 1, _], of which neighbouring heads share some; values [b, h, 1, d].
pub(in crate::linear_attention) struct Token<'a> {
    pub(in crate::linear_attention) q: &'a Tensor,
    pub(in crate::linear_attention) k: &'a Tensor,
    pub(in crate::linear_attention) v: &'a Tensor,
    /// What makes features of queries and keys.
    pub(in crate::linear_attention) activation: FeatureActivation,
    /// Sine and cosine of the position's angle: features are [phi sin, phi cos].
    pub(in crate::linear_attention) turn: Option<(f64, f64)>,
    /// Logarithms of what the sums lose, [b, h, 1 or f, 1].
    pub(in crate::linear_attention) log_decay: Option<&'a Tensor>,
    pub(in crate::linear_attention) guard: Option<Guard>,
}

impl Token<'_> {
    /// Moves the sums [b, h, f, d + 1], or [b, h, f, d] without a guard, on and reads them: [b, 1, h d].
    pub(in crate::linear_attention) fn advance(&self, sums: &Tensor) -> Result<Tensor> {
        let (b, h, f, e) = sums.dims4()?;
        let decay = match self.log_decay {
            Some(log) => log.exp()?.flatten_from(2)?.contiguous()?,
            None => Tensor::zeros(0, DType::F32, sums.device())?,
        };
        let operands = [self.q, self.k, self.v];
        let run = || {
            cpu::with_slices([&decay], |[decay]| {
                token::with_head_rows(operands, h, |rows| {
                    let call = Advance { token: self, rows, decay, dims: [b, h, f, e] };
                    token::in_place(sums, |sums| call.run(sums))
                })
            })
        };
        let moved = |_: &_| profile::bytes(operands.into_iter().chain([sums]));
        let out = profile::time("linear-token", StepPart::Forward, moved, run)?;
        let width = out.len() / b;
        Tensor::from_vec(out, (b, 1, width), sums.device())
    }
}

/// The sums that move on.
struct Advance<'a> {
    token: &'a Token<'a>,
    /// Queries, keys and values.
    rows: [HeadRows<'a>; 3],
    /// [b, h, 1 or f], or nothing.
    decay: &'a [f32],
    /// b, h, f and the width of the sums.
    dims: [usize; 4],
}

impl Advance<'_> {
    /// All heads of all samples.
    fn run(&self, sums: &mut [f32]) -> Vec<f32> {
        let [b, h, f, e] = self.dims;
        let (d, mut out) = (self.rows[2].width(), Vec::new());
        let size = Chunks::balanced(b * h, CHUNK / (f * e).max(1), 1).size;
        par::extend_beside(
            &mut out,
            (b * h * d, size * d),
            [(sums, size * f * e)],
            || (par::scratch(2 * f), par::scratch(2 * e)),
            |(features, values), index, out, [sums]| {
                let heads = out.chunks_exact_mut(d).zip(sums.chunks_exact_mut(f * e));
                for (number, (out, sums)) in heads.enumerate() {
                    self.head(index * size + number, features, values, sums, out);
                }
            },
        );
        out
    }

    /// Head number `at` of all samples; its sums move on, `out` becomes its result.
    fn head(&self, at: usize, features: &mut [f32], values: &mut [f32], sums: &mut [f32], out: &mut [f32]) {
        let [b, h, f, e] = self.dims;
        let Token { activation, turn, guard, .. } = *self.token;
        let [q, k, v] = self.rows.map(|rows| rows.at(at / h, at % h));
        let (of_q, of_k) = features.split_at_mut(f);
        map::features_of(activation, turn, q, of_q);
        map::features_of(activation, turn, k, of_k);
        // the last column of sums for a guard adds up the keys
        let (values, read) = values.split_at_mut(e);
        values.fill(1.0);
        values[..v.len()].copy_from_slice(v);
        read.fill(0.0);
        let each = self.decay.len() / (b * h);
        let decay = &self.decay[at * each..][..each];
        advance([of_q, of_k], values, decay, sums, read);
        let inverse = invert(guard, read[e - 1]).0;
        out.iter_mut().zip(&*read).for_each(|(out, read)| *out = read * inverse);
    }
}

crate::simd_fn! {
    /// S <- diag(decay) S + k v^T for sums S [f, e], and `out` += q S; no decay, one of all rows, or one of each.
    fn advance<S>(
        simd,
        features: [&'a [f32]; 2],
        v: &'a [f32],
        decay: &'a [f32],
        sums: &'a mut [f32],
        out: &'a mut [f32],
    ) {
        let [q, k] = features;
        let width = v.len();
        for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
            let (q, k) = (simd.splat_f32s(q[row]), simd.splat_f32s(k[row]));
            let kept = decay.get(row).or(decay.first()).map(#[inline(always)] |&kept| simd.splat_f32s(kept));
            for at in (0..width).step_by(S::F32_LANES) {
                let mut sum = load(simd, sums, at);
                if let Some(kept) = kept {
                    sum = simd.mul_f32s(sum, kept);
                }
                sum = simd.mul_add_e_f32s(k, load(simd, v, at), sum);
                store(simd, sums, at, sum);
                let read = simd.mul_add_e_f32s(q, sum, load(simd, out, at));
                store(simd, out, at, read);
            }
        }
    }
}
