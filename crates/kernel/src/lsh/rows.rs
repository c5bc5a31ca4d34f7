//! Row by row arithmetic of the fused LSH kernel.

use pulp::Simd;

use super::order::{Sample, Sizes};
use super::{HIDDEN, OWN};
use crate::cpu::math;

/// A key that no query sees.
pub const NOBODY: u32 = u32::MAX;

/// 1 / (sqrt(mean(q^2) + 1e-6) sqrt(d)) and the mean with its 1e-6.
#[inline(always)]
fn unit<S: Simd>(simd: S, q: &[f32]) -> (f32, f32) {
    let mean = math::dot(simd, q, q) / q.len() as f32 + 1e-6;
    (1.0 / (mean.sqrt() * (q.len() as f32).sqrt()), mean)
}

crate::simd_fn! {
    /// Keys of about unit length from queries [rows, d].
    pub fn unit_rows<S>(simd, q: &'a [f32], d: usize, k: &'a mut [f32]) {
        for (q, k) in q.chunks_exact(d).zip(k.chunks_exact_mut(d)) {
            let (factor, _) = unit(simd, q);
            let factor = simd.splat_f32s(factor);
            math::map(simd, q, k, #[inline(always)] |q| simd.mul_f32s(q, factor));
        }
    }
}

/// Replaces the values of pairs whose logit is fixed: `own` where key and query stand at the same position,
/// else `hidden` where the query does not see the key.
#[inline(always)]
fn replace(row: &mut [f32], query: u32, keys: &[u32], causal: bool, own: f32, hidden: f32) {
    let last = if causal { query } else { NOBODY - 1 };
    for (value, &key) in row.iter_mut().zip(keys) {
        let seen = if key > last { hidden } else { *value };
        *value = if key == query { own } else { seen };
    }
}

crate::simd_fn! {
    /// Logits [queries, keys] become unnormalised weights; `stats` [queries, 2] their maxima and sums.
    pub fn weigh_rows<S>(
        simd,
        logits: &'a mut [f32],
        queries: &'a [u32],
        keys: &'a [u32],
        causal: bool,
        stats: &'a mut [f32],
    ) {
        let rows = logits.chunks_exact_mut(keys.len()).zip(queries);
        for ((row, &query), stat) in rows.zip(stats.chunks_exact_mut(2)) {
            replace(row, query, keys, causal, OWN, HIDDEN);
            let max = math::max(simd, row);
            let shift = simd.splat_f32s(max);
            math::map_in_place(simd, row, #[inline(always)] |x| math::exp(simd, simd.sub_f32s(x, shift)));
            (stat[0], stat[1]) = (max, math::sum(simd, row));
        }
    }
}

crate::simd_fn! {
    /// `weights` come as logits [queries, keys] and become weights; `grads` come as the gradients of weights and
    /// become those of logits. `stats` [queries, 3]: maximum, reciprocal sum, product of output and its gradient.
    pub fn grad_rows<S>(
        simd,
        weights: &'a mut [f32],
        grads: &'a mut [f32],
        queries: &'a [u32],
        keys: &'a [u32],
        causal: bool,
        stats: &'a [f32],
    ) {
        let rows = weights.chunks_exact_mut(keys.len()).zip(grads.chunks_exact_mut(keys.len()));
        for (((row, grad), &query), stat) in rows.zip(queries).zip(stats.chunks_exact(3)) {
            replace(row, query, keys, causal, OWN, HIDDEN);
            let (max, factor) = (simd.splat_f32s(stat[0]), simd.splat_f32s(stat[1]));
            let delta = simd.splat_f32s(stat[2]);
            math::map_in_place(simd, row, #[inline(always)] |x| {
                simd.mul_f32s(math::exp(simd, simd.sub_f32s(x, max)), factor)
            });
            math::update(simd, row, grad, #[inline(always)] |p, g| simd.mul_f32s(p, simd.sub_f32s(g, delta)));
            replace(grad, query, keys, causal, 0.0, 0.0);
        }
    }
}

/// Joins the rounds of the forward pass.
pub struct Join<'a> {
    pub sample: Sample<'a>,
    /// [heads, rounds, n].
    pub places: &'a [u32],
    /// Per head and chunk: rows [chunk, d], then maxima and sums [chunk, 2].
    pub sorted: &'a [f32],
}

crate::simd_fn! {
    /// Output rows from `first` on, [_, heads * d], and their maxima and reciprocal sums [_, heads, 2].
    pub fn join<S>(simd, parts: &'a Join<'a>, first: usize, out: &'a mut [f32], stats: &'a mut [f32]) {
        let Sizes { n, heads, d, rounds, padded, chunk, .. } = *parts.sample.sizes;
        let record = chunk * (d + 2);
        let rows = out.chunks_exact_mut(d).zip(stats.chunks_exact_mut(2));
        for (index, (out, stat)) in rows.enumerate() {
            let (position, head) = (first + index / heads, index % heads);
            if !parts.sample.visible(position as u32) {
                continue;
            }
            let at = |round: usize| {
                let round = head * rounds + round;
                let place = round * padded + parts.places[round * n + position] as usize;
                let record = &parts.sorted[place / chunk * record..][..record];
                let row = place % chunk;
                (&record[row * d..][..d], &record[chunk * d + row * 2..][..2])
            };
            let max = (0..rounds).map(|round| at(round).1[0]).fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for round in 0..rounds {
                let (row, stat) = at(round);
                let factor = (stat[0] - max).exp();
                sum += factor * stat[1];
                math::axpy(simd, factor, row, out);
            }
            math::scale(simd, 1.0 / sum, out);
            (stat[0], stat[1]) = (max, 1.0 / sum);
        }
    }
}

/// Joins the rounds of the backward pass.
pub struct Scatter<'a> {
    pub sample: Sample<'a>,
    /// [heads, rounds, n].
    pub places: &'a [u32],
    /// Per head and chunk, [chunk, d] each: gradients of keys, values, queries; where chunks look back, also of
    /// the next chunk's queries.
    pub sorted: &'a [f32],
}

crate::simd_fn! {
    /// Gradients of the packed rows from `first` on.
    pub fn scatter<S>(simd, parts: &'a Scatter<'a>, first: usize, out: &'a mut [f32]) {
        let sizes = parts.sample.sizes;
        let Sizes { n, heads, d, row, q, v, rounds, padded, chunk, back, .. } = *sizes;
        let (chunks, pieces) = (rounds * padded / chunk, if back { 4 } else { 3 });
        let mut dk = vec![0.0; d];
        for (index, out) in out.chunks_exact_mut(row).enumerate() {
            let position = first + index;
            if !parts.sample.visible(position as u32) {
                continue;
            }
            for head in 0..heads {
                dk.fill(0.0);
                for round in head * rounds..(head + 1) * rounds {
                    let place = round * padded + parts.places[round * n + position] as usize;
                    let piece = |chunk_index: usize, piece: usize| {
                        &parts.sorted[((chunk_index * pieces + piece) * chunk + place % chunk) * d..][..d]
                    };
                    let own = place / chunk;
                    math::add(simd, piece(own, 0), &mut dk);
                    math::add(simd, piece(own, 1), &mut out[v + head * d..][..d]);
                    math::add(simd, piece(own, 2), &mut out[q + head * d..][..d]);
                    if back {
                        let before = head * chunks + (own % chunks + chunks - 1) % chunks;
                        math::add(simd, piece(before, 3), &mut out[q + head * d..][..d]);
                    }
                }
                // through the unit key: k = a q with a = 1 / (sqrt(mean) sqrt(d))
                let query = &parts.sample.rows[position * row + q + head * d..][..d];
                let (factor, mean) = unit(simd, query);
                let along = math::dot(simd, query, &dk) * factor / (mean * d as f32);
                let out = &mut out[q + head * d..][..d];
                math::axpy(simd, factor, &dk, out);
                math::axpy(simd, -along, query, out);
            }
        }
    }
}
