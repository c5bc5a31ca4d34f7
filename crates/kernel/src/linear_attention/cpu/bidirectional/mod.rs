//! Sums over all keys: S = phi(K)^T V and z per sample and head, then out = phi(Q) S / guard(phi(Q) z).
//!
//! Forward: a pass over the keys adds S and z, a pass over the queries divides. Backward: a pass over the
//! queries gives dQ and adds dS, dz; a pass over the keys gives dK and dV. Features are computed per tile and
//! never stored. Passes run in parallel over parts of the sequence whose number depends on its length only;
//! sums of parts are added in index order.

mod backward;

use std::ops::Range;

use super::guard::{Normaliser, divide, plain_sum, weighted_sum};
use super::map::{At, Peak};
use super::rows::{Columns, Operand, Rows};
use super::{Call, axpy};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::par::{self, Chunks};
use crate::cpu::sample_rows;

pub(super) use backward::backward;

/// Rows per tile.
const TILE: usize = 128;
/// Most parts of a sequence, so that their sums take constant memory.
const PARTS: usize = 16;

/// The parts of a sequence that are summed on their own.
fn parts(len: usize) -> Chunks {
    Chunks::balanced(len, 256.max(len.div_ceil(PARTS)), TILE)
}

/// The tiles of a part.
fn tiles(part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = part.end;
    part.step_by(TILE).map(move |start| start..(start + TILE).min(end))
}

/// What forward leaves for backward.
pub(super) struct Saved {
    /// Per sample and head: S [f, e], z [f], then `feature_eps` times the column sums of S and z.
    sums: Vec<f32>,
    peaks: Vec<Peak>,
}

/// The sums of one head in a flat slice: S [f, e] | z [f] | a value row [e] | a number.
struct Sums<'a> {
    s: &'a [f32],
    z: &'a [f32],
    row: &'a [f32],
    number: f32,
}

fn sums_len(f: usize, e: usize) -> usize {
    f * (e + 1) + e + 1
}

fn sums_of(data: &[f32], f: usize, e: usize) -> Sums<'_> {
    let (s, rest) = data.split_at(f * e);
    let (z, rest) = rest.split_at(f);
    Sums { s, z, row: &rest[..e], number: rest[e] }
}

fn sums_mut(data: &mut [f32], f: usize, e: usize) -> (&mut [f32], &mut [f32], &mut [f32], &mut f32) {
    let (s, rest) = data.split_at_mut(f * e);
    let (z, rest) = rest.split_at_mut(f);
    let (row, number) = rest.split_at_mut(e);
    (s, z, row, &mut number[0])
}

impl Sums<'_> {
    fn normaliser(&self, call: &Call) -> Normaliser<'_> {
        let num = if call.feature_eps == 0.0 { &[] } else { self.row };
        Normaliser { z: self.z, num, den: self.number, guard: call.guard }
    }
}

/// Working space of one thread.
struct Scratch {
    f: Vec<f32>,
    df: Vec<f32>,
    values: Vec<f32>,
    dden: Vec<f32>,
    map: Vec<f32>,
}

impl Scratch {
    fn new(call: &Call) -> Self {
        let (f, e) = (call.map.width(), call.value_width);
        let df = Vec::new();
        Self { f: vec![0.0; TILE * f], df, values: vec![0.0; TILE * e], dden: vec![0.0; TILE], map: vec![] }
    }
}

/// The result rows [samples, queries, heads * e].
pub(super) fn forward(call: &Call, q: Operand, k: Operand, v: Operand) -> (Vec<f32>, Saved) {
    let saved = key_sums(call, k, v);
    let (f, e) = (call.map.width(), call.value_width);
    let len = sums_len(f, e);
    let columns = Columns { first: 0, width: e, stride: call.heads * e };
    let init = || Scratch::new(call);
    let rows = parts(call.queries);
    let (out, _) =
        sample_rows::build_rows(call.samples, rows, columns.stride, init, |scratch, sample, part, chunk| {
            for head in 0..call.heads {
                let sums = sums_of(&saved.sums[(sample * call.heads + head) * len..][..len], f, e);
                for tile in tiles(part.clone()) {
                    let x = q.rows(sample, head, tile.clone(), &mut []);
                    let features = &mut scratch.f[..tile.len() * f];
                    call.map.queries(At { sample, head, first: tile.start }, x, features, &mut scratch.map);
                    let mut out = columns.of(chunk, head, tile.start - part.start..tile.end - part.start);
                    gemm(
                        out.mat(),
                        Mat::new(features, tile.len(), f),
                        Mat::new(sums.s, f, e),
                        1.0,
                        Threads::One,
                    );
                    divide(features, sums.normaliser(call), out);
                }
            }
        });
    (out, saved)
}

/// S and z of every sample and head.
fn key_sums(call: &Call, k: Operand, v: Operand) -> Saved {
    let rows = parts(call.keys);
    let (count, heads) = (rows.count(), call.heads);
    let (f, e) = (call.map.width(), call.value_width);
    let len = sums_len(f, e);
    let partial: Vec<Vec<(Vec<f32>, Peak)>> = par::map_pieces_with(
        0..call.samples * count,
        || Scratch::new(call),
        |scratch, _, index| {
            let (sample, part) = (index / count, rows.range(index % count));
            let mut sums = vec![(vec![0.0; len], Peak::NONE); heads];
            for tile in tiles(part) {
                for (head, (sums, peak)) in sums.iter_mut().enumerate() {
                    add_tile(call, (k, v), (sample, head), tile.clone(), (sums, peak), scratch);
                }
            }
            sums
        },
    );
    let parts_of = |index: usize| {
        let parts = &partial[index / heads * count..][..count];
        parts.iter().map(move |part| &part[index % heads])
    };
    let larger = |a: Peak, b: Peak| if b.value > a.value { b } else { a };
    let peaks: Vec<Peak> = (0..call.samples * heads)
        .map(|index| parts_of(index).map(|part| part.1).fold(Peak::NONE, larger))
        .collect();
    let sums = par::build(call.samples * heads * len, len, |index, sums| {
        for (part, peak) in parts_of(index) {
            let (body, tail) = part.split_at(f * (e + 1));
            axpy(peaks[index].shrink(*peak), body, &mut sums[..f * (e + 1)]);
            axpy(1.0, tail, &mut sums[f * (e + 1)..]); // counts and sums of values know no peak
        }
        finish_sums(call, sums);
    });
    Saved { sums, peaks }
}

/// Adds one tile of the keys of a head. The value row and the number collect the visible values and their
/// count, for `feature_eps`.
fn add_tile(
    call: &Call,
    (k, v): (Operand, Operand),
    (sample, head): (usize, usize),
    tile: Range<usize>,
    (sums, peak): (&mut [f32], &mut Peak),
    scratch: &mut Scratch,
) {
    let (f, e) = (call.map.width(), call.value_width);
    let at = At { sample, head, first: tile.start };
    let features = &mut scratch.f[..tile.len() * f];
    let before = *peak;
    let x = k.rows(sample, head, tile.clone(), &mut []);
    call.map.keys(at, x, features, &mut scratch.map, peak, false);
    let shrink = peak.shrink(before);
    if shrink != 1.0 && before.value != f32::NEG_INFINITY {
        super::scale(shrink, &mut sums[..f * (e + 1)]);
    }
    let values = call.values(v, at, tile.len(), &mut scratch.values);
    let (s, z, row, number) = sums_mut(sums, f, e);
    let features = Rows::packed(features, f);
    gemm_add(MatMut::new(s, f, e), features.mat().t(), values.mat(), 1.0, 1.0, Threads::One);
    plain_sum(features, z);
    if call.feature_eps == 0.0 {
        return;
    }
    match call.mask.of(at, tile.len()) {
        Some(mask) if !call.zero_values => {
            weighted_sum(mask, values, row);
            *number += mask.iter().sum::<f32>();
        }
        _ => {
            plain_sum(values, row);
            *number += tile.len() as f32;
        }
    }
}

/// Brings `feature_eps` and `den_eps` in: S and z get their share of the plain sums, which are then replaced by
/// what every query adds.
fn finish_sums(call: &Call, sums: &mut [f32]) {
    let (f, e) = (call.map.width(), call.value_width);
    let (s, z, row, number) = sums_mut(sums, f, e);
    let eps = call.feature_eps;
    if eps != 0.0 {
        for s in s.chunks_exact_mut(e) {
            axpy(eps, row, s);
        }
    }
    let every = eps * *number + call.den_eps;
    z.iter_mut().for_each(|z| *z += every);
    row.fill(0.0);
    if eps != 0.0 {
        plain_sum(Rows::packed(s, e), row);
        super::scale(eps, row);
    }
    *number = if eps == 0.0 { 0.0 } else { eps * z.iter().sum::<f32>() };
}
