//! Parameters that one fused operation reads together: a flat tensor and its named parts.

use candle_core::{Result, Tensor, bail};

use super::tape;

/// One named part of a group.
#[derive(Clone, Debug)]
pub struct ParamPart {
    /// Full name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First element within the group.
    pub offset: usize,
}

impl ParamPart {
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
pub struct ParamGroup {
    /// All parts, one after another.
    pub flat: Tensor,
    /// The parts, in the order of the specifications.
    pub parts: Vec<ParamPart>,
}

impl ParamGroup {
    /// Neighbouring parts as a group of their own (a view).
    pub fn slice(&self, range: std::ops::Range<usize>) -> Result<Self> {
        let Some(parts) = self.parts.get(range).filter(|parts| !parts.is_empty()) else {
            bail!("a group of {} parts has no such slice", self.parts.len());
        };
        let start = parts[0].offset;
        let len = parts.iter().map(ParamPart::len).sum();
        let parts =
            parts.iter().map(|part| ParamPart { offset: part.offset - start, ..part.clone() }).collect();
        Ok(Self { flat: tape::columns(&self.flat, start, len)?, parts })
    }

    /// Part number `index` in its own shape: a view, for composed code.
    pub fn part(&self, index: usize) -> Result<Tensor> {
        let part = &self.parts[index];
        tape::reshape(&tape::columns(&self.flat, part.offset, part.len())?, part.shape.as_slice())
    }
}
