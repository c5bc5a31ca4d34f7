//! Decays within one chunk.

use std::ops::Range;

use super::{CHUNK, Inputs, Logs, Place};
use crate::cpu::math;

/// Whose sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Keys before the query.
    Forward,
    /// Keys after it. Between query i and key j > i lie the steps i..j; counted one position later, as i + 1..=j, they are
    /// those of forward sums in which keys take the part of queries. So only the readers change.
    Backward,
}

/// Decays of one chunk in one direction, `width` (1 or the channels) per position.
///
/// The reader of forward sums is the query, that of backward sums the key.
pub(super) struct Factors {
    pub(super) width: usize,
    pub(super) count: usize,
    /// exp(log_t).
    pub(super) steps: Vec<f32>,
    /// What the state before the chunk is worth at a reader: the product of steps up to its own.
    pub(super) up: Vec<f32>,
    /// What is written at a position is worth behind the chunk: the product of steps after its own.
    pub(super) down: Vec<f32>,
}

impl Factors {
    pub(super) fn new(width: usize) -> Self {
        let room = || vec![1.0; CHUNK * width];
        Self { width, count: 0, steps: room(), up: room(), down: room() }
    }

    /// Reads the decays of the positions `rows`.
    pub(super) fn load(&mut self, inputs: &Inputs, direction: Direction, place: Place, rows: Range<usize>) {
        self.count = rows.len();
        if let Logs::Constant(powers) = &inputs.plan.logs {
            let powers = &powers[place.head];
            self.steps[..self.count].fill(powers[1]);
            self.up[..self.count].copy_from_slice(&powers[1..=self.count]);
            let ends = self.down[..self.count].iter_mut().rev();
            ends.zip(powers).for_each(|(down, power)| *down = *power);
            return;
        }
        self.read(inputs, direction, place, rows);
        self.multiply_up();
    }

    /// [`Self::load`] of backward decays that are the `forward` ones: the steps are known but for the first.
    pub(super) fn load_later(&mut self, inputs: &Inputs, forward: &Self, place: Place, rows: Range<usize>) {
        if matches!(inputs.plan.logs, Logs::Constant(_)) {
            return self.load(inputs, Direction::Backward, place, rows);
        }
        self.count = rows.len();
        self.read(inputs, Direction::Backward, place, rows.start..rows.start + 1);
        let known = (self.count - 1) * self.width;
        self.steps[self.width..][..known].copy_from_slice(&forward.steps[..known]);
        self.multiply_up();
    }

    /// Reads the steps of the positions `rows`, from the first on.
    fn read(&mut self, inputs: &Inputs, direction: Direction, place: Place, rows: Range<usize>) {
        let late = usize::from(direction == Direction::Backward);
        let (logs, used) = (inputs.logs[late], rows.len() * self.width);
        for (row, position) in rows.enumerate() {
            let step = &mut self.steps[row * self.width..][..self.width];
            let hidden = |position: usize| inputs.plan.mask.hides(place.sample, position);
            match position.checked_sub(late).filter(|&position| !hidden(position)) {
                Some(position) => {
                    let log = logs.rows(place.sample, place.head, position..position + 1, &mut []);
                    step.copy_from_slice(log.row(0));
                }
                None => step.fill(0.0),
            }
        }
        exponentials(&mut self.steps[..used]);
    }

    fn multiply_up(&mut self) {
        let used = self.count * self.width;
        products(&self.steps[..used], self.width, &mut self.up[..used], &mut self.down[..used]);
    }

    /// What the state before the chunk is worth behind it.
    pub(super) fn total(&self) -> &[f32] {
        &self.up[(self.count - 1) * self.width..][..self.width]
    }
}

crate::simd_fn! {
    fn exponentials<S>(simd, x: &'a mut [f32]) {
        math::exp_in_place(simd, 0.0, x);
    }
}

crate::simd_fn! {
    /// Products of steps up to each row, and of those behind it.
    pub(super) fn products<S>(simd, steps: &'a [f32], width: usize, up: &'a mut [f32], down: &'a mut [f32]) {
        let last = steps.len() - width;
        up[..width].copy_from_slice(&steps[..width]);
        for at in (width..=last).step_by(width) {
            let (before, row) = up.split_at_mut(at);
            product(simd, &before[at - width..], &steps[at..at + width], &mut row[..width]);
        }
        down[last..].fill(1.0);
        for at in (0..last).step_by(width).rev() {
            let (row, after) = down[at..].split_at_mut(width);
            product(simd, &after[..width], &steps[at + width..at + 2 * width], row);
        }
    }
}

/// z = x y.
#[inline(always)]
pub(super) fn product<S: pulp::Simd>(simd: S, x: &[f32], y: &[f32], z: &mut [f32]) {
    let ((x, x_tail), (y, y_tail)) = (S::as_simd_f32s(&x[..z.len()]), S::as_simd_f32s(&y[..z.len()]));
    let (z, z_tail) = S::as_mut_simd_f32s(z);
    for ((z, &x), &y) in z.iter_mut().zip(x).zip(y) {
        *z = simd.mul_f32s(x, y);
    }
    if !z_tail.is_empty() {
        let last = simd.mul_f32s(simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail));
        simd.partial_store_f32s(z_tail, last);
    }
}

/// y *= x.
#[inline(always)]
pub(super) fn multiply<S: pulp::Simd>(simd: S, x: &[f32], y: &mut [f32]) {
    math::update(
        simd,
        x,
        y,
        #[inline(always)]
        |x, y| simd.mul_f32s(x, y),
    );
}

/// Weights of the pairs of a chunk, row i column j: forward decays where j < i, backward ones (if there are any) where
/// j > i, else 0 there; 1 on the diagonal.
pub(super) fn weigh_pairs(
    forward: &Factors,
    backward: Option<&Factors>,
    constant: Option<&[f32]>,
    w: &mut [f32],
) {
    let count = forward.count;
    if let Some(powers) = constant {
        for (i, row) in w.chunks_exact_mut(count).enumerate() {
            row[..=i].iter_mut().rev().zip(powers).for_each(|(weight, power)| *weight = *power);
            match backward {
                Some(_) => row[i..].copy_from_slice(&powers[..count - i]),
                None => row[i + 1..].fill(0.0),
            }
        }
        return;
    }
    spread(&forward.steps[..count], backward.map_or(&[], |backward| &backward.steps[..count]), w);
}

crate::simd_fn! {
    fn spread<S>(simd, forward: &'a [f32], backward: &'a [f32], w: &'a mut [f32]) {
        let count = forward.len();
        for i in 0..count {
            let (before, row) = w.split_at_mut(i * count);
            if i > 0 {
                row[..i].copy_from_slice(&before[(i - 1) * count..][..i]);
                math::scale(simd, forward[i], &mut row[..i]);
            }
            row[i] = 1.0;
            row[i + 1..count].fill(0.0);
        }
        if backward.is_empty() {
            return;
        }
        for i in (0..count - 1).rev() {
            let (row, after) = w[i * count..].split_at_mut(count);
            row[i + 1..].copy_from_slice(&after[i + 1..count]);
            math::scale(simd, backward[i + 1], &mut row[i + 1..]);
        }
    }
}

crate::simd_fn! {
    /// Rows of `x` times the factors of each, `factors` [rows] or [rows, width of x]; row r goes to `y[r * stride..]`.
    pub(super) fn weigh<S>(
        simd, x: super::super::rows::Rows<'a>, factors: &'a [f32], y: &'a mut [f32], stride: usize,
    ) {
        let by_row = factors.len() == x.count && x.width != 1;
        for row in 0..x.count {
            let y = &mut y[row * stride..][..x.width];
            if by_row {
                let factor = simd.splat_f32s(factors[row]);
                math::map(simd, x.row(row), y, #[inline(always)] |x| simd.mul_f32s(x, factor));
            } else {
                product(simd, x.row(row), &factors[row * x.width..][..x.width], y);
            }
        }
    }
}
