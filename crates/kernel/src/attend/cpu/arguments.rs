//! The operands of a call in the buffers of its arguments.

use candle_core::{Layout, Result};

use super::lanes;
use super::operands::Rows;
use super::problem::{Table, Tables};
use super::relative::TableGrads;
use crate::attend::arguments::{Operand, RelativeForm};
use crate::attend::dims::Dims;
use crate::cpu::compact::Elements;

/// An argument's elements and how they lie.
pub type Argument<'a> = (Elements<'a>, &'a Layout);

impl Operand {
    /// Its rows.
    pub fn rows<'a>(&self, arguments: &[Argument<'a>]) -> Result<Rows<'a>> {
        let (data, layout) = arguments[self.argument];
        Ok(Rows { data, place: self.place(layout)? })
    }
}

impl RelativeForm {
    /// The pieces of the slab.
    pub fn tables<'a>(&self, slab: &'a [f32], dims: &Dims) -> Tables<'a> {
        let [a, b, c, d, e] = self.bounds(dims);
        Tables {
            keys: Table { data: &slab[a..b], distances: self.distances },
            content_bias: &slab[b..c],
            position_bias: &slab[c..d],
            slots: self
                .slots
                .map(|(distances, segment, rank)| (Table { data: &slab[d..e], distances }, segment, rank)),
        }
    }

    /// The slab of gradients from those of every sample and head, summed over samples in order.
    pub fn collect(&self, grads: &[TableGrads], dims: &Dims) -> Vec<f32> {
        let [a, b, c, d, e] = self.bounds(dims);
        let mut slab = vec![0.0; e];
        for (index, grads) in grads.iter().enumerate() {
            let head = index % dims.heads;
            let pieces =
                [(a, &grads.keys), (b, &grads.content_bias), (c, &grads.position_bias), (d, &grads.slots)];
            for (start, piece) in pieces {
                let to = &mut slab[start + head * piece.len()..][..piece.len()];
                lanes::add_row(piece, to);
            }
        }
        slab
    }
}
