//! The fused CPU kernel: tiles of features that are computed, used and forgotten.

mod bidirectional;
mod causal;
mod favor;
mod guard;
mod map;
mod op;
mod random;
mod recurrence;
mod rows;
mod taylor;
mod token;

pub(super) use op::fused;
pub(super) use token::Token;

use super::Guard;
use crate::cpu::elements::scale;
use crate::cpu::rows::axpy;
use map::{At, Map, Mask};
use rows::{Columns, Operand, Rows};

/// One call, without its operands.
struct Call {
    map: Box<dyn Map>,
    guard: Option<Guard>,
    /// Added to every exponential feature.
    feature_eps: f32,
    /// Added to every entry of z.
    den_eps: f32,
    /// The gradient flows through the peak of the keys.
    through: bool,
    /// Hidden values are zero, and hidden keys count.
    zero_values: bool,
    mask: Mask,
    /// Gates of a causal call, [samples, heads, keys].
    gates: Option<Vec<causal::Gate>>,
    /// What gates are given by, which gets their gradient.
    gates_by: GatesBy,
    samples: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    value_width: usize,
}

/// What gates are given by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatesBy {
    /// Logits of g; 1 - g weighs what is written.
    Logit,
    /// Logarithms of g; everything is written.
    Log,
    /// Constants, which get no gradient.
    Constant,
}

impl Call {
    /// The gates of a tile.
    fn gates(&self, at: At, count: usize) -> Option<&[causal::Gate]> {
        let start = (at.sample * self.heads + at.head) * self.keys + at.first;
        self.gates.as_ref().map(|gates| &gates[start..][..count])
    }

    /// The values of a tile; where they wait, or hidden ones must be zero, in `space`.
    fn values<'a>(&self, v: Operand<'a>, at: At, count: usize, space: &'a mut [f32]) -> Rows<'a> {
        let (mask, width) = (self.mask.of(at, count).filter(|_| self.zero_values), v.place.width);
        let range = at.first..at.first + count;
        let Some(mask) = mask else { return v.rows(at.sample, at.head, range, space) };
        v.copy(at.sample, at.head, range, space);
        let hidden = space.chunks_exact_mut(width).zip(mask).filter(|(_, keep)| **keep == 0.0);
        hidden.for_each(|(row, _)| row.fill(0.0));
        Rows { data: space, stride: width, count, width }
    }
}

/// Everything that backward reads.
struct Inputs<'a, S> {
    call: &'a Call,
    /// Queries, keys, values.
    operands: (Operand<'a>, Operand<'a>, Operand<'a>),
    saved: &'a S,
    out: Operand<'a>,
    dout: Operand<'a>,
}

impl<'a, S> Inputs<'a, S> {
    /// The results of a tile, in `room` if they wait, and their gradients.
    fn results<'b>(&self, at: At, count: usize, room: &'b mut [f32]) -> (Rows<'b>, Rows<'b>)
    where
        'a: 'b,
    {
        let rows = at.first..at.first + count;
        let dout = self.dout.rows(at.sample, at.head, rows.clone(), &mut []);
        (self.out.rows(at.sample, at.head, rows, room), dout)
    }
}

/// Where gradients go: columns of the query rows and of the key rows.
#[derive(Clone, Copy, Debug)]
struct Targets {
    q: Columns,
    k: Columns,
    v: Columns,
    /// Query rows and key rows are the same.
    shared: bool,
}

/// Gradients of all operands.
struct Gradients {
    query_rows: Vec<f32>,
    /// Absent where shared.
    key_rows: Option<Vec<f32>>,
    /// Of the map's parameters, [heads, params].
    params: Vec<f32>,
    /// Of the gates' logits, [samples, heads, keys].
    gates: Option<Vec<f32>>,
}
