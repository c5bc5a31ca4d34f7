//! One token after another: the state is carried, so that a step costs the same at any position.

use candle_core::{DType, Result, Tensor, bail};

use super::composed::advance;
use super::{DeltaRows, DeltaRule};
use crate::cpu;
use crate::cpu::math::{load, store};
use crate::cpu::par::{self, Chunks};
use crate::cpu::token::{self, HeadRows};
use crate::heads::Heads;
use crate::profile::{self, StepPart};

/// [`super::delta_rule`] of one token after those in `state` [b, h, key_width, value_width], which moves on; `None` is the
/// zero state before the first token. Rows are [b, 1, _], beta and log decay [b, h, 1]. The CPU's kernel writes the state where it lies.
pub fn step(rows: &DeltaRows, call: &DeltaRule, state: &mut Option<Tensor>) -> Result<Heads> {
    call.check(rows)?;
    let (b, n, _) = rows.rows.dims3()?;
    if n != 1 {
        bail!("a decoding step takes one token, got {n}");
    }
    let scalar = |x: &Tensor| {
        let x = x.reshape((b, rows.heads, 1, 1))?;
        match call.mask {
            Some(mask) => x.broadcast_mul(&mask.to_dtype(x.dtype())?.reshape((b, 1, 1, 1))?),
            None => Ok(x),
        }
    };
    let [q, k, v] = rows.split()?;
    let before = match state.take() {
        Some(before) => before,
        None => Tensor::zeros((b, rows.heads, rows.key_width, rows.value_width), v.dtype(), v.device())?,
    };
    let (beta, decay) = (scalar(call.beta)?, call.log_decay.map(scalar).transpose()?);
    let tensors = [Some(&rows.rows), Some(&beta), decay.as_ref()];
    let is_plain = |x: &Tensor| x.dtype() == DType::F32 && !x.track_op();
    if crate::fused_cpu(v.device()) && tensors.into_iter().flatten().all(is_plain) {
        let rows = fused([&q, &k, &v], &beta, decay.as_ref(), &before)?;
        *state = Some(before);
        return Ok(rows);
    }
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (out, after) = advance([&q, &k, &v], &beta, decay.as_ref(), &before)?;
    *state = Some(after);
    Ok(Heads::Split(out))
}

/// [`advance`] by the kernel, which writes the state.
fn fused(operands: [&Tensor; 3], beta: &Tensor, log_decay: Option<&Tensor>, state: &Tensor) -> Result<Heads> {
    let (b, h, _, d) = operands[2].dims4()?;
    let beta = beta.flatten_all()?;
    let decay = match log_decay {
        Some(log) => log.exp()?.flatten_all()?,
        None => beta.ones_like()?,
    };
    let run = || {
        cpu::with_slices([&beta, &decay], |scalars| {
            token::with_head_rows(operands, h, |rows| {
                token::in_place(state, |state| heads(rows, scalars, state))
            })
        })
    };
    let moved = |_: &_| profile::bytes(operands.into_iter().chain([state]));
    let out = profile::time("delta-token", StepPart::Forward, moved, run)?;
    Ok(Heads::Merged { rows: Tensor::from_vec(out, (b, 1, h * d), state.device())?, heads: h })
}

/// Elements of the state that a job moves on.
const CHUNK: usize = 1 << 15;

/// The result [b, h, d] of queries, keys and values with the betas and decays of all heads, whose state [b, h, key_width, d] moves on.
fn heads([q, k, v]: [HeadRows; 3], [beta, decay]: [&[f32]; 2], state: &mut [f32]) -> Vec<f32> {
    let (count, d) = (beta.len(), v.width());
    let (each, heads) = (state.len() / count, v.heads());
    let (size, mut out) = (Chunks::balanced(count, CHUNK / each, 1).size, Vec::new());
    par::extend_beside(
        &mut out,
        (count * d, size * d),
        [(state, size * each)],
        || par::scratch(d),
        |update, index, out, [state]| {
            for (number, (out, state)) in
                out.chunks_exact_mut(d).zip(state.chunks_exact_mut(each)).enumerate()
            {
                let at = index * size + number;
                update.copy_from_slice(v.at(at / heads, at % heads));
                let rows = [q, k].map(|rows| rows.at(at / heads, at % heads));
                advance_head(rows, [beta[at], decay[at]], state, update, out);
            }
        },
    );
    out
}

crate::simd_fn! {
    /// S <- decay S, S <- S + beta k (v - S^T k)^T, `out` += S^T q for a state [key_width, d]; `update` is v before.
    fn advance_head<S>(
        simd,
        rows: [&'a [f32]; 2],
        scalars: [f32; 2],
        state: &'a mut [f32],
        update: &'a mut [f32],
        out: &'a mut [f32],
    ) {
        let ([q, k], [beta, decay], width) = (rows, scalars.map(#[inline(always)] |x| simd.splat_f32s(x)), out.len());
        for (&k, state) in k.iter().zip(state.chunks_exact_mut(width)) {
            let k = simd.splat_f32s(k);
            for at in (0..width).step_by(S::F32_LANES) {
                let kept = simd.mul_f32s(decay, load(simd, state, at));
                store(simd, state, at, kept);
                store(simd, update, at, simd.negate_mul_add_e_f32s(k, kept, load(simd, update, at)));
            }
        }
        for ((&q, &k), state) in q.iter().zip(k).zip(state.chunks_exact_mut(width)) {
            let (q, k) = (simd.splat_f32s(q), simd.mul_f32s(beta, simd.splat_f32s(k)));
            for at in (0..width).step_by(S::F32_LANES) {
                let sum = simd.mul_add_e_f32s(k, load(simd, update, at), load(simd, state, at));
                store(simd, state, at, sum);
                store(simd, out, at, simd.mul_add_e_f32s(q, sum, load(simd, out, at)));
            }
        }
    }
}
