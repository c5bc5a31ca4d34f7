//! Growing dashed curves that keep clear of each other.

use std::f64::consts::{FRAC_PI_2, PI, TAU};
use std::sync::Arc;

use rand::Rng;

use super::raster::{Canvas, Dash, Stamps, index_of, step};

/// Tries to place the next dash.
const EXTEND_TRIES: usize = 3;
/// Occupancy and footprint together stay below this. The description says 1.8, with which its own statistics are not
/// met (too many distractors, too bright); 1.3 with one try per distractor meets them.
const CROWDED: f64 = 1.3;
/// A pixel counts as free for a seed up to this occupancy.
const NEARLY_FREE: f64 = 0.3;

/// Which pixels are taken.
#[derive(Clone)]
pub(super) struct Field(Canvas);

/// A stamped footprint.
#[derive(Clone)]
pub(super) struct Footprint {
    dash: Arc<Dash>,
    at: (i32, i32),
}

/// Places where a dash in direction `angle` may start.
pub(super) struct StartPoints {
    pub(super) angle: f64,
    free: Vec<(i32, i32)>,
    pixels: usize,
}

impl StartPoints {
    pub(super) fn pick(&self, rng: &mut impl Rng) -> Option<(i32, i32)> {
        (!self.free.is_empty()).then(|| self.free[rng.random_range(0..self.free.len())])
    }

    /// Share of the image that is free.
    pub(super) fn share(&self) -> f64 {
        self.free.len() as f64 / self.pixels as f64
    }
}

/// A whole number of degrees, as radians.
pub(super) fn random_angle(rng: &mut impl Rng) -> f64 {
    f64::from(rng.random_range(-180..180)) * PI / 180.0
}

/// A place at `distance` from `from` in a random direction.
pub(super) fn beside(from: (i32, i32), distance: usize, rng: &mut impl Rng) -> (i32, i32) {
    let angle = random_angle(rng);
    let round = |at: i32, by: f64| (f64::from(at) + distance as f64 * by).round() as i32;
    (round(from.0, angle.sin()), round(from.1, angle.cos()))
}

impl Field {
    /// An empty field whose outermost pixels are taken.
    pub(super) fn new(size: usize) -> Self {
        let mut field = Canvas::new(size);
        frame(&mut field, 1);
        Self(field)
    }

    /// Takes the pixels of a footprint.
    pub(super) fn cover(&mut self, footprint: &Footprint) {
        self.0.stamp(&footprint.dash.footprint, footprint.at.0, footprint.at.1, 1.0);
    }

    /// Free starts for a random direction, `border` pixels away from the edge.
    pub(super) fn free_seeds(&self, stamps: &Stamps, border: usize, rng: &mut impl Rng) -> StartPoints {
        let angle = random_angle(rng);
        let mut field = self.0.clone();
        frame(&mut field, border);
        let side = field.side as i32;
        let dash = stamps.dash(angle);
        let taken: Vec<bool> = field.values.iter().map(|value| *value > NEARLY_FREE).collect();
        let is_taken = |y: i32, x: i32| index_of(field.side, y, x).is_some_and(|at| taken[at]);
        let mut free = Vec::new();
        for y in 0..side {
            for x in 0..side {
                if !is_taken(y, x) && !dash.solid.iter().any(|(dy, dx)| is_taken(y + dy, x + dx)) {
                    free.push((y, x));
                }
            }
        }
        StartPoints { angle, free, pixels: field.values.len() }
    }

    fn contains(&self, (y, x): (i32, i32)) -> bool {
        let range = 0..self.0.side as i32;
        range.contains(&y) && range.contains(&x)
    }

    /// Largest occupancy under `dash` at `at`, both added.
    fn crowding(&self, dash: &Dash, at: (i32, i32)) -> f64 {
        let mut most = 0f64;
        let values = &self.0.values;
        self.0.under(&dash.footprint, at.0, at.1, |pixel, value| most = most.max(values[pixel] + value));
        most
    }
}

fn frame(field: &mut Canvas, width: usize) {
    let side = field.side;
    for (y, row) in field.values.chunks_mut(side).enumerate() {
        if y < width || y + width >= side {
            row.fill(1.0);
        } else {
            row[..width].fill(1.0);
            row[side - width..].fill(1.0);
        }
    }
}

/// A curve being grown.
pub(super) struct Curve {
    /// Its dashes.
    pub(super) image: Canvas,
    /// Where it began.
    pub(super) tail: (i32, i32),
    /// Where its last dash ends.
    pub(super) end: (i32, i32),
    /// Room of its last dash, which is not yet taken in the field.
    pub(super) footprint: Footprint,
    angle: f64,
    pivot: (i32, i32),
}

impl Curve {
    /// A first dash; nothing if it leaves the image.
    pub(super) fn seed(
        stamps: &Stamps,
        field: &Field,
        tail: (i32, i32),
        angle: f64,
        contrast: f64,
    ) -> Option<Self> {
        let length = stamps.dash as f64;
        let end = step(tail, angle, length);
        let pivot = step(end, angle + PI, length + stamps.margin as f64);
        if !field.contains(tail) || !field.contains(end) || !field.contains(pivot) {
            return None;
        }
        let dash = stamps.dash(angle);
        let mut image = Canvas::new(field.0.side);
        image.stamp(&dash.line, tail.0, tail.1, contrast);
        Some(Self { image, tail, end, footprint: Footprint { dash, at: tail }, angle, pivot })
    }

    /// One more dash; nothing if there is no room.
    pub(super) fn extend(
        &mut self,
        stamps: &Stamps,
        field: &mut Field,
        continuity: f64,
        contrast: f64,
        rng: &mut impl Rng,
    ) -> Option<()> {
        let reach = (stamps.dash + stamps.margin) as f64;
        let pivot = step(self.pivot, self.angle, (stamps.dash + 2 * stamps.margin) as f64);
        let places = self.candidates(field, pivot, reach, continuity, stamps.margin as i32);
        let total: f64 = places.iter().map(|place| place.2).sum();
        if total < 1e-4 {
            return None;
        }
        for _ in 0..EXTEND_TRIES {
            let mut left = rng.random::<f64>() * total;
            let chosen = places.iter().find(|place| {
                left -= place.2;
                left < 0.0
            });
            let &(head, angle, _) = chosen.or(places.last())?;
            let dash = stamps.dash(angle + PI);
            if field.crowding(&dash, head) >= CROWDED {
                continue;
            }
            self.image.stamp(&dash.line, head.0, head.1, contrast);
            field.cover(&self.footprint);
            self.footprint = Footprint { dash, at: head };
            (self.angle, self.pivot, self.end) = (angle, pivot, head);
            return Some(());
        }
        None
    }

    /// Possible outer ends of the next dash, with direction and weight.
    fn candidates(
        &self,
        field: &Field,
        pivot: (i32, i32),
        reach: f64,
        continuity: f64,
        margin: i32,
    ) -> Vec<((i32, i32), f64, f64)> {
        let side = field.0.side;
        let count = (TAU * reach).ceil() as usize;
        let mut heads: Vec<(i32, i32)> = (0..count)
            .map(|index| {
                let angle = index as f64 / reach;
                let at = |from: i32, by: f64| f64::from(from) + reach * by;
                (at(pivot.0, angle.sin()), at(pivot.1, angle.cos()))
            })
            .filter(|&(y, x)| y >= 0.0 && x >= 0.0 && y < side as f64 && x < side as f64)
            .map(|(y, x)| (y as i32, x as i32))
            .collect();
        heads.sort_unstable();
        heads.dedup();
        let near = Neighbourhood { field, margin };
        let weigh = |head: (i32, i32)| {
            let angle = f64::from(head.0 - pivot.0).atan2(f64::from(head.1 - pivot.1));
            let turn = (angle - self.angle).rem_euclid(TAU);
            let turn = (continuity * turn.min(TAU - turn)).min(FRAC_PI_2);
            let free = (1.0 - near.occupancy(head)).max(0.0);
            (head, angle, turn.cos().powi(2) * free)
        };
        heads.into_iter().map(weigh).collect()
    }
}

/// The largest occupancy within `margin` of a pixel.
struct Neighbourhood<'a> {
    field: &'a Field,
    margin: i32,
}

impl Neighbourhood<'_> {
    fn occupancy(&self, (y, x): (i32, i32)) -> f64 {
        let (canvas, m) = (&self.field.0, self.margin);
        let side = canvas.side as i32;
        let mut most = 0f64;
        for oy in -m..=m {
            for ox in -m..=m {
                let (py, px) = (y + oy, x + ox);
                if oy * oy + ox * ox <= m * m && (0..side).contains(&py) && (0..side).contains(&px) {
                    most = most.max(canvas.values[(py * side + px) as usize]);
                }
            }
        }
        most
    }
}
