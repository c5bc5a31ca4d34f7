//! The fused CPU kernel: tiles of features that are computed, used and forgotten.

mod bidirectional;
mod causal;
mod favor;
mod guard;
mod map;
mod op;
mod random;
mod rows;

pub(super) use op::fused;

use super::Guard;
use crate::kernel::cpu::math;
use crate::kernel::cpu::rows::axpy;
use map::{At, Map, Mask};
use rows::{Columns, Operand, Rows};

/// One call, without its operands.
struct Call {
    map: Box<dyn Map>,
    guard: Guard,
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
    samples: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    value_width: usize,
}

impl Call {
    /// The gates of a tile.
    fn gates(&self, at: At, count: usize) -> Option<&[causal::Gate]> {
        let start = (at.sample * self.heads + at.head) * self.keys + at.first;
        self.gates.as_ref().map(|gates| &gates[start..][..count])
    }

    /// The values of a tile; where hidden ones must be zero, copied to `space`.
    fn values<'a>(&self, v: Operand<'a>, at: At, count: usize, space: &'a mut [f32]) -> Rows<'a> {
        let rows = v.rows(at.sample, at.head, at.first..at.first + count);
        let Some(mask) = self.mask.of(at, count).filter(|_| self.zero_values) else { return rows };
        for (row, (space, keep)) in space.chunks_exact_mut(rows.width).zip(mask).enumerate() {
            if *keep == 0.0 {
                space.fill(0.0);
            } else {
                space.copy_from_slice(rows.row(row));
            }
        }
        Rows { data: space, stride: rows.width, ..rows }
    }
}

/// Everything that backward reads.
struct Inputs<'a, S> {
    call: &'a Call,
    /// Queries, keys, values.
    operands: (Operand<'a>, Operand<'a>, Operand<'a>),
    saved: &'a S,
    out: &'a [f32],
    dout: &'a [f32],
}

impl<'a, S> Inputs<'a, S> {
    /// The results of a tile and their gradients.
    fn results(&self, at: At, count: usize) -> (Rows<'a>, Rows<'a>) {
        let width = self.call.value_width;
        let stride = self.call.heads * width;
        let start = (at.sample * self.call.queries + at.first) * stride + at.head * width;
        let rows = |data: &'a [f32]| Rows { data: &data[start..], stride, count, width };
        (rows(self.out), rows(self.dout))
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

crate::simd_fn! {
    /// y *= a
    fn scale<S>(simd, a: f32, y: &'a mut [f32]) {
        math::scale(simd, a, y);
    }
}
