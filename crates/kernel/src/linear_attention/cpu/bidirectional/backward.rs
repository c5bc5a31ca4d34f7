//! Gradients of sums over all keys.

use std::ops::Range;

use super::super::guard::{add_outer, add_to_rows, plain_sum, undivide, weighted_sum};
use super::super::map::{At, Side, Tile};
use super::super::rows::{Columns, Rows, RowsMut};
use super::super::{Call, Gradients, Targets, axpy, scale};
use super::{Saved, Scratch, Sums, TILE, parts, sums_len, sums_mut, sums_of, tiles};
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::{par, sample_rows};

type Inputs<'a> = super::super::Inputs<'a, Saved>;

fn scratch(call: &Call) -> Scratch {
    let mut scratch = Scratch::new(call);
    scratch.df.resize(TILE * call.map.width(), 0.0);
    scratch
}

/// What one part of the keys adds up.
struct KeyPart {
    /// [heads, params].
    params: Vec<f32>,
    /// Gradients of the peaks, per head.
    peaks: Vec<f64>,
}

pub(in super::super) fn backward(inputs: &Inputs, targets: &Targets) -> Gradients {
    let call = inputs.call;
    let (heads, params) = (call.heads, call.map.params());
    let len = sums_len(call.map.width(), call.value_width);
    let rows = parts(call.queries);
    let stride = targets.q.stride;
    let (mut query_rows, partial) = sample_rows::build_rows(
        call.samples,
        rows,
        stride,
        || scratch(call),
        |scratch, sample, part, chunk| query_part(inputs, (sample, part), (targets.q, chunk), scratch),
    );
    let dsums = par::build(call.samples * heads * len, len, |index, total| {
        let (sample, head) = (index / heads, index % heads);
        for (sums, _) in &partial[sample * rows.count()..][..rows.count()] {
            axpy(1.0, &sums[head * len..][..len], total);
        }
        finish_dsums(call, total);
    });
    let rows = parts(call.keys);
    let key_pass = |scratch: &mut Scratch, sample: usize, part: Range<usize>, chunk: &mut [f32]| {
        key_part(inputs, &dsums, (sample, part), (targets, chunk), scratch)
    };
    let (stride, init) = (targets.k.stride, || scratch(call));
    let (mut key_rows, results) = if targets.shared {
        (None, sample_rows::update_rows(&mut query_rows, call.samples, rows, stride, init, key_pass))
    } else {
        let (rows, results) = sample_rows::build_rows(call.samples, rows, stride, init, key_pass);
        (Some(rows), results)
    };
    if call.through {
        back_peaks(inputs, targets.k, &results, key_rows.as_mut().unwrap_or(&mut query_rows));
    }
    let mut dparams = vec![0.0; heads * params];
    partial.iter().for_each(|(_, part)| axpy(1.0, part, &mut dparams));
    results.iter().for_each(|part| axpy(1.0, &part.params, &mut dparams));
    Gradients { query_rows, key_rows, params: dparams, gates: None }
}

/// dQ of one part. Returns its shares of dS, dz [heads, sums] and of the gradients of the parameters.
fn query_part(
    inputs: &Inputs,
    (sample, part): (usize, Range<usize>),
    (target, chunk): (Columns, &mut [f32]),
    scratch: &mut Scratch,
) -> (Vec<f32>, Vec<f32>) {
    let call = inputs.call;
    let (f, e, params) = (call.map.width(), call.value_width, call.map.params());
    let len = sums_len(f, e);
    let (mut totals, mut dparams) = (vec![0.0; call.heads * len], vec![0.0; call.heads * params]);
    let (mut room, mut result_room) = (inputs.operands.0.room(TILE), inputs.out.room(TILE));
    for tile in tiles(part.clone()) {
        let local = tile.start - part.start..tile.end - part.start;
        for (head, total) in totals.chunks_exact_mut(len).enumerate() {
            let sums = sums_of(&inputs.saved.sums[(sample * call.heads + head) * len..][..len], f, e);
            let at = At { sample, head, first: tile.start };
            let x = inputs.operands.0.rows(sample, head, tile.clone(), &mut room);
            query_tile(inputs, (at, x), &sums, total, (scratch, &mut result_room));
            let (features, df) = (&scratch.f[..x.count * f], &mut scratch.df[..x.count * f]);
            let tile = Tile { x, f: features, df, scratch: &mut scratch.map };
            let dparams = &mut dparams[head * params..][..params];
            call.map.back(Side::Query, at, tile, target.of(chunk, head, local.clone()), dparams);
        }
    }
    (totals, dparams)
}

/// The gradient of the features of one tile of queries, in `scratch`; adds its share of dS, dz, and where needed
/// the plain sums of both gradients.
fn query_tile(
    inputs: &Inputs,
    (at, x): (At, Rows),
    sums: &Sums,
    total: &mut [f32],
    (scratch, result_room): (&mut Scratch, &mut [f32]),
) {
    let call = inputs.call;
    let (f, e, count) = (call.map.width(), call.value_width, x.count);
    let features = &mut scratch.f[..count * f];
    call.map.queries(at, x, features, &mut scratch.map);
    let (dnum, dden) = (&mut scratch.values[..count * e], &mut scratch.dden[..count]);
    let (out, dout) = inputs.results(at, count, result_room);
    undivide(features, sums.normaliser(call), out, dout, dnum, dden);
    let (ds, dz, row, number) = sums_mut(total, f, e);
    let dnum = Rows::packed(dnum, e);
    gemm_add(MatMut::new(ds, f, e), Mat::new(features, count, f).t(), dnum.mat(), 1.0, 1.0, Threads::One);
    weighted_sum(dden, Rows::packed(features, f), dz);
    if call.feature_eps != 0.0 {
        plain_sum(dnum, row);
        *number += dden.iter().sum::<f32>();
    }
    let df = &mut scratch.df[..count * f];
    gemm(MatMut::new(df, count, f), dnum.mat(), Mat::new(sums.s, f, e).t(), 1.0, Threads::One);
    add_outer(dden, sums.z, df);
}

/// Brings `feature_eps` into the gradients of S and z; then the value row holds what every key's dV gets.
fn finish_dsums(call: &Call, total: &mut [f32]) {
    let eps = call.feature_eps;
    if eps == 0.0 {
        return;
    }
    let (f, e) = (call.map.width(), call.value_width);
    let (ds, dz, row, number) = sums_mut(total, f, e);
    for ds in ds.chunks_exact_mut(e) {
        axpy(eps, row, ds);
    }
    dz.iter_mut().for_each(|dz| *dz += eps * *number);
    row.fill(0.0);
    plain_sum(Rows::packed(ds, e), row);
    scale(eps, row);
}

/// dK and dV of one part.
fn key_part(
    inputs: &Inputs,
    dsums: &[f32],
    (sample, part): (usize, Range<usize>),
    (targets, chunk): (&Targets, &mut [f32]),
    scratch: &mut Scratch,
) -> KeyPart {
    let call = inputs.call;
    let (f, e, heads, params) = (call.map.width(), call.value_width, call.heads, call.map.params());
    let len = sums_len(f, e);
    let mut room = inputs.operands.1.room(TILE);
    let mut result = KeyPart { params: vec![0.0; heads * params], peaks: vec![0.0; heads] };
    for tile in tiles(part.clone()) {
        let local = tile.start - part.start..tile.end - part.start;
        for head in 0..heads {
            let dsums = sums_of(&dsums[(sample * heads + head) * len..][..len], f, e);
            let at = At { sample, head, first: tile.start };
            let x = inputs.operands.1.rows(sample, head, tile.clone(), &mut room);
            key_tile(inputs, (at, x), &dsums, targets.v.of(chunk, head, local.clone()), scratch);
            let (features, df) = (&scratch.f[..x.count * f], &mut scratch.df[..x.count * f]);
            let tile = Tile { x, f: features, df, scratch: &mut scratch.map };
            let dparams = &mut result.params[head * params..][..params];
            let dx = targets.k.of(chunk, head, local.clone());
            result.peaks[head] += call.map.back(Side::Key, at, tile, dx, dparams);
        }
    }
    result
}

/// dV of one tile, and the gradient of its features in `scratch`.
fn key_tile(inputs: &Inputs, (at, x): (At, Rows), dsums: &Sums, mut dv: RowsMut, scratch: &mut Scratch) {
    let call = inputs.call;
    let (f, e, count) = (call.map.width(), call.value_width, x.count);
    let features = &mut scratch.f[..count * f];
    let mut peak = inputs.saved.peaks[at.sample * call.heads + at.head];
    call.map.keys(at, x, features, &mut scratch.map, &mut peak, true);
    gemm(dv.mat(), Mat::new(features, count, f), Mat::new(dsums.s, f, e), 1.0, Threads::One);
    if call.feature_eps != 0.0 {
        add_to_rows(dsums.row, dv.reborrow());
    }
    call.mask.clear_hidden(at, dv);
    let values = call.values(inputs.operands.2, at, count, &mut scratch.values);
    let df = &mut scratch.df[..count * f];
    gemm(MatMut::new(df, count, f), values.mat(), Mat::new(dsums.s, f, e).t(), 1.0, Threads::One);
    add_to_rows(dsums.z, RowsMut { data: df, stride: f, count, width: f });
}

/// Gives what all keys' logits lose to their peak to the key that set it.
fn back_peaks(inputs: &Inputs, target: Columns, results: &[KeyPart], key_rows: &mut [f32]) {
    let call = inputs.call;
    let count = parts(call.keys).count();
    for (index, peak) in inputs.saved.peaks.iter().enumerate() {
        let (sample, head) = (index / call.heads, index % call.heads);
        let total: f64 = results[sample * count..][..count].iter().map(|part| part.peaks[head]).sum();
        let at = At { sample, head, first: peak.position };
        if call.mask.of(at, 1).is_none_or(|mask| mask[0] != 0.0) {
            let chunk = &mut key_rows[sample * call.keys * target.stride..];
            let mut dx = target.of(chunk, head, peak.position..peak.position + 1);
            call.map.back_peak(peak.feature, total as f32, dx.row(0));
        }
    }
}
