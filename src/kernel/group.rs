//! Parameters that one fused operation reads together: a flat tensor and its named parts.

use candle_core::{Result, Tensor};

/// One named part of a group.
#[derive(Clone, Debug)]
pub struct Part {
    /// Full name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First element within the group.
    pub offset: usize,
}

impl Part {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the part has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A group as a module sees it: the flat tensor (tracked when training) and its parts in order.
#[derive(Clone, Debug)]
pub struct Group {
    /// All parts, one after another.
    pub flat: Tensor,
    /// The parts, in the order of the specifications.
    pub parts: Vec<Part>,
}

impl Group {
    /// Part number `index` in its own shape: a view, for composed code.
    pub fn part(&self, index: usize) -> Result<Tensor> {
        let part = &self.parts[index];
        self.flat.narrow(0, part.offset, part.len())?.reshape(part.shape.as_slice())
    }
}
