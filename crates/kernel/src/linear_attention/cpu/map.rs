//! Feature maps on tiles of rows, and the elementwise ones.

use std::sync::Arc;

use super::rows::{Rows, RowsMut};
use crate::cpu::math::exp;
use crate::cpu::simd::Simd;
use crate::linear_attention::{FeatureActivation, features::angles};

/// Where a tile stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) sample: usize,
    pub(super) head: usize,
    /// Position of the tile's first row.
    pub(super) first: usize,
}

/// The largest logit of the keys so far, which exponential features subtract, and where it stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Peak {
    pub(super) value: f32,
    pub(super) position: usize,
    pub(super) feature: usize,
}

impl Peak {
    /// Before the first key.
    pub(super) const NONE: Self = Self { value: f32::NEG_INFINITY, position: 0, feature: 0 };

    /// e^(earlier - self): what a sum relative to `earlier` is worth relative to this one.
    pub(super) fn shrink(&self, earlier: Self) -> f32 {
        if earlier.value == self.value { 1.0 } else { (earlier.value - self.value).exp() }
    }
}

/// Which keys are visible, [samples, keys]: 1 or 0.
#[derive(Clone, Debug)]
pub(super) struct Mask {
    pub(super) keep: Option<Arc<[f32]>>,
    pub(super) keys: usize,
}

impl Mask {
    /// The entries of `count` keys, if any key of the call may be hidden.
    pub(super) fn of(&self, at: At, count: usize) -> Option<&[f32]> {
        self.keep.as_ref().map(|keep| &keep[at.sample * self.keys + at.first..][..count])
    }

    /// Whether a key is hidden.
    pub(super) fn hides(&self, sample: usize, key: usize) -> bool {
        self.keep.as_ref().is_some_and(|keep| keep[sample * self.keys + key] == 0.0)
    }

    /// Clears the rows of hidden keys.
    pub(super) fn clear_hidden(&self, at: At, mut rows: RowsMut) {
        if let Some(mask) = self.of(at, rows.count) {
            let hidden = mask.iter().enumerate().filter(|(_, keep)| **keep == 0.0);
            hidden.for_each(|(row, _)| rows.row(row).fill(0.0));
        }
    }
}

/// A feature map on tiles. Feature tiles are contiguous, [rows, width].
pub(super) trait Map: Send + Sync {
    /// Number of features.
    fn width(&self) -> usize;

    /// Numbers per head that get a gradient.
    fn params(&self) -> usize {
        0
    }

    /// Features of queries.
    fn queries(&self, at: At, x: Rows, f: &mut [f32], scratch: &mut Vec<f32>);

    /// Features of keys, zero rows where hidden; exponential features relative to `peak`, which grows with the
    /// keys unless `fixed`.
    fn keys(&self, at: At, x: Rows, f: &mut [f32], scratch: &mut Vec<f32>, peak: &mut Peak, fixed: bool);

    /// Features of keys for causal sums: relative to the running peak at each row. `steps` receives the
    /// logarithm of what sums up to the row before are worth at each row.
    fn causal_keys(
        &self,
        at: At,
        x: Rows,
        f: &mut [f32],
        scratch: &mut Vec<f32>,
        peak: &mut Peak,
        steps: &mut [f32],
    ) {
        steps.fill(0.0);
        self.keys(at, x, f, scratch, peak, true);
    }

    /// Turns the gradient `df` of features `f` into the gradient `dx` of rows `x`, and adds to that of the
    /// parameters. `df` may be overwritten. Returns the gradient of the peak's value (keys).
    fn back(&self, side: Side, at: At, tile: Tile, dx: RowsMut, dparams: &mut [f32]) -> f64;

    /// Gives the gradient `total` of what all logits lose to the peak to the key that set it.
    fn back_peak(&self, _feature: usize, _total: f32, _dx: &mut [f32]) {}
}

/// Whose features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Query,
    Key,
}

/// One tile on its way back.
pub(super) struct Tile<'a> {
    pub(super) x: Rows<'a>,
    pub(super) f: &'a [f32],
    pub(super) df: &'a mut [f32],
    pub(super) scratch: &'a mut Vec<f32>,
}

/// Sine and cosine of cosFormer's angles per position.
#[derive(Clone)]
pub(super) struct Turn {
    sin: Arc<[f32]>,
    cos: Arc<[f32]>,
}

impl Turn {
    /// The angles pi (i + 1) / (2 m) of `n` positions.
    pub(super) fn new(n: usize, m: usize) -> Self {
        let angles = angles(n, m);
        let pick = |f: fn(&(f64, f64)) -> f64| angles.iter().map(|angle| f(angle) as f32).collect();
        Self { sin: pick(|angle| angle.0), cos: pick(|angle| angle.1) }
    }
}

/// An activation per entry, with or without cosFormer's re-weighting.
pub(super) struct Elementwise {
    pub(super) activation: FeatureActivation,
    pub(super) turn: Option<Turn>,
    pub(super) head_dim: usize,
    pub(super) mask: Mask,
}

impl Elementwise {
    fn weights<'a>(&'a self, at: At, count: usize, mask: Option<&'a [f32]>) -> Weights<'a> {
        let turn = self.turn.as_ref().map(|turn| {
            let part = at.first..at.first + count;
            (&turn.sin[part.clone()], &turn.cos[part])
        });
        Weights { turn, mask }
    }
}

impl Map for Elementwise {
    fn width(&self) -> usize {
        if self.turn.is_some() { 2 * self.head_dim } else { self.head_dim }
    }

    fn queries(&self, at: At, x: Rows, f: &mut [f32], _: &mut Vec<f32>) {
        activate(self.activation, x, self.weights(at, x.count, None), f);
    }

    fn keys(&self, at: At, x: Rows, f: &mut [f32], _: &mut Vec<f32>, _: &mut Peak, _: bool) {
        activate(self.activation, x, self.weights(at, x.count, self.mask.of(at, x.count)), f);
    }

    fn back(&self, side: Side, at: At, tile: Tile, dx: RowsMut, _: &mut [f32]) -> f64 {
        let mask = if side == Side::Key { self.mask.of(at, tile.x.count) } else { None };
        derive(self.activation, tile.x, self.weights(at, tile.x.count, mask), tile.df, dx);
        0.0
    }
}

/// Factors per row.
#[derive(Clone, Copy)]
struct Weights<'a> {
    turn: Option<(&'a [f32], &'a [f32])>,
    mask: Option<&'a [f32]>,
}

impl Weights<'_> {
    fn hidden(&self, row: usize) -> bool {
        self.mask.is_some_and(|mask| mask[row] == 0.0)
    }
}

/// An activation on vectors. A type per activation: closures of this size are not always inlined, and outside
/// of the caller they lose its vector instructions.
trait Phi<S: Simd>: Copy {
    /// phi(x).
    fn value(self, simd: S, x: S::f32s) -> S::f32s;
    /// g phi'(x).
    fn slope(self, simd: S, x: S::f32s, g: S::f32s) -> S::f32s;
}

#[derive(Clone, Copy)]
struct Identity;

impl<S: Simd> Phi<S> for Identity {
    #[inline(always)]
    fn value(self, _: S, x: S::f32s) -> S::f32s {
        x
    }

    #[inline(always)]
    fn slope(self, _: S, _: S::f32s, g: S::f32s) -> S::f32s {
        g
    }
}

/// x where x > 0, else slope x.
#[derive(Clone, Copy)]
struct Leaky(f32);

impl<S: Simd> Phi<S> for Leaky {
    #[inline(always)]
    fn value(self, simd: S, x: S::f32s) -> S::f32s {
        self.slope(simd, x, x)
    }

    #[inline(always)]
    fn slope(self, simd: S, x: S::f32s, g: S::f32s) -> S::f32s {
        let above = simd.greater_than_f32s(x, simd.splat_f32s(0.0));
        simd.select_f32s(above, g, simd.mul_f32s(g, simd.splat_f32s(self.0)))
    }
}

/// elu(x) + 1 = max(x, 0) + exp(min(x, 0)).
#[derive(Clone, Copy)]
struct Elu1;

impl<S: Simd> Phi<S> for Elu1 {
    #[inline(always)]
    fn value(self, simd: S, x: S::f32s) -> S::f32s {
        let zero = simd.splat_f32s(0.0);
        simd.add_f32s(simd.max_f32s(x, zero), exp(simd, simd.min_f32s(x, zero)))
    }

    #[inline(always)]
    fn slope(self, simd: S, x: S::f32s, g: S::f32s) -> S::f32s {
        simd.mul_f32s(g, exp(simd, simd.min_f32s(x, simd.splat_f32s(0.0))))
    }
}

/// Features of one row: phi(x), or with sine and cosine of an angle [phi(x) sin, phi(x) cos].
pub(super) fn features_of(activation: FeatureActivation, turn: Option<(f64, f64)>, x: &[f32], f: &mut [f32]) {
    let turn = turn.map(|(sin, cos)| ([sin as f32], [cos as f32]));
    let turn = turn.as_ref().map(|(sin, cos)| (&sin[..], &cos[..]));
    activate(activation, Rows::packed(x, x.len()), Weights { turn, mask: None }, f);
}

crate::simd_fn! {
    /// f = [phi(x) sin, phi(x) cos] or phi(x), row by row.
    fn activate<S>(simd, activation: FeatureActivation, x: Rows<'a>, weights: Weights<'a>, f: &'a mut [f32]) {
        match activation {
            FeatureActivation::Relu => forward(simd, x, weights, f, Leaky(0.0)),
            FeatureActivation::Identity => forward(simd, x, weights, f, Identity),
            FeatureActivation::LeakyRelu(slope) => forward(simd, x, weights, f, Leaky(slope as f32)),
            FeatureActivation::Elu1 => forward(simd, x, weights, f, Elu1),
        }
    }
}

crate::simd_fn! {
    /// dx = phi'(x) (df_sin sin + df_cos cos) or phi'(x) df, row by row; zero where hidden.
    fn derive<S>(
        simd,
        activation: FeatureActivation,
        x: Rows<'a>,
        weights: Weights<'a>,
        df: &'a [f32],
        dx: RowsMut<'a>,
    ) {
        match activation {
            FeatureActivation::Relu => backward(simd, x, weights, df, dx, Leaky(0.0)),
            FeatureActivation::Identity => backward(simd, x, weights, df, dx, Identity),
            FeatureActivation::LeakyRelu(slope) => backward(simd, x, weights, df, dx, Leaky(slope as f32)),
            FeatureActivation::Elu1 => backward(simd, x, weights, df, dx, Elu1),
        }
    }
}

#[inline(always)]
fn forward<S: Simd>(simd: S, x: Rows, weights: Weights, f: &mut [f32], phi: impl Phi<S>) {
    let width = x.width * if weights.turn.is_some() { 2 } else { 1 };
    for (row, f) in f.chunks_exact_mut(width).take(x.count).enumerate() {
        if weights.hidden(row) {
            f.fill(0.0);
            continue;
        }
        let x = x.row(row);
        let Some((sin, cos)) = weights.turn else {
            plain(simd, x, f, phi);
            continue;
        };
        let (sin, cos) = (simd.splat_f32s(sin[row]), simd.splat_f32s(cos[row]));
        let (a, b) = f.split_at_mut(x.len());
        let (x, x_tail) = S::as_simd_f32s(x);
        let (a, a_tail) = S::as_mut_simd_f32s(a);
        let (b, b_tail) = S::as_mut_simd_f32s(b);
        for ((&x, a), b) in x.iter().zip(a).zip(b) {
            let y = phi.value(simd, x);
            (*a, *b) = (simd.mul_f32s(y, sin), simd.mul_f32s(y, cos));
        }
        if !x_tail.is_empty() {
            let y = phi.value(simd, simd.partial_load_f32s(x_tail));
            simd.partial_store_f32s(a_tail, simd.mul_f32s(y, sin));
            simd.partial_store_f32s(b_tail, simd.mul_f32s(y, cos));
        }
    }
}

/// f = phi(x).
#[inline(always)]
fn plain<S: Simd>(simd: S, x: &[f32], f: &mut [f32], phi: impl Phi<S>) {
    let (x, x_tail) = S::as_simd_f32s(x);
    let (f, f_tail) = S::as_mut_simd_f32s(f);
    for (&x, f) in x.iter().zip(f) {
        *f = phi.value(simd, x);
    }
    if !x_tail.is_empty() {
        simd.partial_store_f32s(f_tail, phi.value(simd, simd.partial_load_f32s(x_tail)));
    }
}

#[inline(always)]
fn backward<S: Simd>(simd: S, x: Rows, weights: Weights, df: &[f32], mut dx: RowsMut, phi: impl Phi<S>) {
    let width = x.width * if weights.turn.is_some() { 2 } else { 1 };
    for (row, df) in df.chunks_exact(width).take(x.count).enumerate() {
        let dx = dx.row(row);
        if weights.hidden(row) {
            dx.fill(0.0);
            continue;
        }
        let (one, nothing) = (simd.splat_f32s(1.0), simd.splat_f32s(0.0));
        let (sin, cos) = match weights.turn {
            Some((sin, cos)) => (simd.splat_f32s(sin[row]), simd.splat_f32s(cos[row])),
            None => (one, nothing),
        };
        let x = x.row(row);
        let (a, b) = df.split_at(x.len());
        let b = if weights.turn.is_some() { b } else { a };
        let gather = |a, b| simd.mul_add_e_f32s(a, sin, simd.mul_f32s(b, cos));
        let (x, x_tail) = S::as_simd_f32s(x);
        let (a, a_tail) = S::as_simd_f32s(a);
        let (b, b_tail) = S::as_simd_f32s(b);
        let (dx, dx_tail) = S::as_mut_simd_f32s(dx);
        for (((&x, &a), &b), dx) in x.iter().zip(a).zip(b).zip(dx) {
            *dx = phi.slope(simd, x, gather(a, b));
        }
        if !x_tail.is_empty() {
            let load = |tail| simd.partial_load_f32s(tail);
            let slope = phi.slope(simd, load(x_tail), gather(load(a_tail), load(b_tail)));
            simd.partial_store_f32s(dx_tail, slope);
        }
    }
}
