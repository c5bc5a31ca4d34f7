//! Small drawings: dashes, their footprints and markers, drawn large and reduced.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};

use super::settings::Settings;

/// Drawings are made this many times larger and then reduced.
const SCALE: usize = 2;

/// A square of values with odd side; its centre goes where it is stamped.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    pub(super) side: usize,
    pub(super) values: Vec<f64>,
}

/// A dash and the room it takes, for one direction.
pub(super) struct Dash {
    pub(super) line: Stamp,
    pub(super) footprint: Stamp,
    /// Where the footprint is full, as offsets of row and column from its centre.
    pub(super) solid: Vec<(i32, i32)>,
}

/// The drawings of one image size and margin; dashes are drawn once per direction.
pub(super) struct Stamps {
    pub(super) dash: usize,
    pub(super) margin: usize,
    pub(super) marker: Stamp,
    thickness: f64,
    dashes: Mutex<HashMap<u64, Arc<Dash>>>,
}

impl Stamps {
    pub(super) fn new(settings: &Settings, margin: usize) -> Self {
        Self {
            dash: settings.dash,
            margin,
            marker: disc(settings.marker),
            thickness: settings.thickness,
            dashes: Mutex::new(HashMap::new()),
        }
    }

    /// The dash that starts at a stamp's centre and runs in direction `angle` (radians).
    pub(super) fn dash(&self, angle: f64) -> Arc<Dash> {
        let mut dashes = self.dashes.lock().unwrap_or_else(PoisonError::into_inner);
        dashes.entry(angle.to_bits()).or_insert_with(|| Arc::new(self.draw(angle))).clone()
    }

    fn draw(&self, angle: f64) -> Dash {
        let radius = self.dash + self.thickness.ceil() as usize + self.margin;
        let side = radius * 2 * SCALE + 1;
        let centre = ((side / 2) as i32, (side / 2) as i32);
        let end = step(centre, angle, (self.dash * SCALE) as f64);
        let width = (self.thickness * SCALE as f64).round().max(1.0);
        let line = line(side, centre, end, width);
        let wide = dilate(&line, side, (self.margin * SCALE) as i32);
        let reduced = radius * 2 + 1;
        let footprint = reduce(&wide, side, reduced);
        let full = (0..footprint.values.len()).filter(|&at| footprint.values[at] >= 1.0);
        let solid =
            full.map(|at| ((at / reduced) as i32 - radius as i32, (at % reduced) as i32 - radius as i32));
        Dash { line: reduce(&line, side, reduced), solid: solid.collect(), footprint }
    }
}

/// Moves `distance` from `from` in direction `angle`, rounding each coordinate up.
pub(super) fn step(from: (i32, i32), angle: f64, distance: f64) -> (i32, i32) {
    let up = |at: i32, by: f64| (f64::from(at) + by - 1e-9).ceil() as i32;
    (up(from.0, distance * angle.sin()), up(from.1, distance * angle.cos()))
}

/// A line of the given width: pixels whose centre is within half the width, and the one-pixel line itself.
fn line(side: usize, from: (i32, i32), to: (i32, i32), width: f64) -> Vec<f64> {
    let mut values = vec![0.0; side * side];
    let (dy, dx) = (to.0 - from.0, to.1 - from.1);
    let steps = dy.abs().max(dx.abs()).max(1);
    for index in 0..=steps {
        let at = |start: i32, delta: i32| {
            (f64::from(start) + f64::from(delta * index) / f64::from(steps)).round() as i32
        };
        let (y, x) = (at(from.0, dy), at(from.1, dx));
        let reach = ((width - 1.0) / 2.0).max(0.0);
        let around = reach.ceil() as i32;
        for oy in -around..=around {
            for ox in -around..=around {
                let inside = f64::from(oy * oy + ox * ox) <= reach * reach + 1e-9;
                if let (true, Some(at)) = (inside, index_of(side, y + oy, x + ox)) {
                    values[at] = 255.0;
                }
            }
        }
    }
    values
}

pub(super) fn index_of(side: usize, y: i32, x: i32) -> Option<usize> {
    let range = 0..side as i32;
    (range.contains(&y) && range.contains(&x)).then(|| y as usize * side + x as usize)
}

/// Grayscale dilation by a disc.
fn dilate(values: &[f64], side: usize, radius: i32) -> Vec<f64> {
    let mut out = vec![0f64; values.len()];
    for y in 0..side as i32 {
        for x in 0..side as i32 {
            let mut best = 0f64;
            for oy in -radius..=radius {
                for ox in -radius..=radius {
                    if oy * oy + ox * ox > radius * radius {
                        continue;
                    }
                    if let Some(at) = index_of(side, y + oy, x + ox) {
                        best = best.max(values[at]);
                    }
                }
            }
            out[y as usize * side + x as usize] = best;
        }
    }
    out
}

/// A filled disc of intensity 1.
fn disc(radius: f64) -> Stamp {
    let reach = radius.ceil() as usize + 1;
    let side = reach * 2 * SCALE + 1;
    let centre = (side / 2) as f64;
    let large = radius * SCALE as f64;
    let inside = |at: usize| {
        let (y, x) = ((at / side) as f64 - centre, (at % side) as f64 - centre);
        if y * y + x * x <= large * large { 255.0 } else { 0.0 }
    };
    let values: Vec<f64> = (0..side * side).map(inside).collect();
    reduce(&values, side, reach * 2 + 1)
}

/// Lanczos reduction of an 8-bit square, scaled to 0..1.
fn reduce(values: &[f64], from: usize, to: usize) -> Stamp {
    let weights = lanczos(from, to);
    let byte = |x: f64| x.round().clamp(0.0, 255.0);
    let mut rows = vec![0.0; from * to]; // [from, to]
    for y in 0..from {
        for (x, weight) in weights.iter().enumerate() {
            let sum: f64 = weight.iter().map(|&(at, weight)| weight * values[y * from + at]).sum();
            rows[y * to + x] = byte(sum);
        }
    }
    let mut out = vec![0.0; to * to];
    for (y, weight) in weights.iter().enumerate() {
        for x in 0..to {
            let sum: f64 = weight.iter().map(|&(at, weight)| weight * rows[at * to + x]).sum();
            out[y * to + x] = byte(sum) / 255.0;
        }
    }
    Stamp { side: to, values: out }
}

/// For every output sample the input samples it reads and their weights (which sum to 1).
fn lanczos(from: usize, to: usize) -> Vec<Vec<(usize, f64)>> {
    const LOBES: f64 = 3.0;
    let sinc = |x: f64| {
        let x = x * std::f64::consts::PI;
        if x == 0.0 { 1.0 } else { x.sin() / x }
    };
    let scale = from as f64 / to as f64;
    let weights = (0..to).map(|out| {
        let centre = (out as f64 + 0.5) * scale;
        let taps: Vec<(usize, f64)> = (0..from)
            .filter_map(|at| {
                let x = (at as f64 + 0.5 - centre) / scale;
                (x.abs() < LOBES).then(|| (at, sinc(x) * sinc(x / LOBES)))
            })
            .collect();
        let total: f64 = taps.iter().map(|(_, weight)| weight).sum();
        taps.into_iter().map(|(at, weight)| (at, weight / total)).collect()
    });
    weights.collect()
}

/// A square image of real values.
#[derive(Clone, Debug)]
pub(super) struct Canvas {
    pub(super) side: usize,
    pub(super) values: Vec<f64>,
}

impl Canvas {
    pub(super) fn new(side: usize) -> Self {
        Self { side, values: vec![0.0; side * side] }
    }

    /// Calls `visit` with every pixel index under `stamp` at (y, x) and the stamp's value there.
    pub(super) fn under(&self, stamp: &Stamp, y: i32, x: i32, mut visit: impl FnMut(usize, f64)) {
        let half = (stamp.side / 2) as i32;
        for (at, &value) in stamp.values.iter().enumerate() {
            let (sy, sx) = ((at / stamp.side) as i32, (at % stamp.side) as i32);
            if let Some(at) = index_of(self.side, y + sy - half, x + sx - half) {
                visit(at, value);
            }
        }
    }

    /// Combines `stamp` times `factor` at (y, x) by maximum.
    pub(super) fn stamp(&mut self, stamp: &Stamp, y: i32, x: i32, factor: f64) {
        let mut values = std::mem::take(&mut self.values);
        self.under(stamp, y, x, |at, value| values[at] = values[at].max(value * factor));
        self.values = values;
    }

    /// Combines by maximum.
    pub(super) fn max(&mut self, other: &Self) {
        for (value, other) in self.values.iter_mut().zip(&other.values) {
            *value = value.max(*other);
        }
    }

    /// 8-bit gray values, stretched from the smallest to the largest.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let low = self.values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scale = if high > low { 255.0 / (high - low) } else { 0.0 };
        self.values.iter().map(|value| ((value - low) * scale + 0.5) as u8).collect()
    }
}
