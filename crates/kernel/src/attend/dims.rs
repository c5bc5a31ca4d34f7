//! Sizes of a call, and where rows lie in a buffer.

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Samples.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub width: usize,
    /// Queries.
    pub queries: usize,
    /// Keys at positions.
    pub keys: usize,
    /// Slots.
    pub slots: usize,
}

/// Rows of one operand in a flat buffer: row `i` of head `h` of sample `b` starts at
/// `start + b * batch + h * head + i * row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Row 0 of head 0 of sample 0.
    pub start: usize,
    /// Distance of two samples.
    pub batch: usize,
    /// Distance of two heads.
    pub head: usize,
    /// Distance of two rows.
    pub row: usize,
}

impl RowLayout {
    /// Start of row `i`.
    pub fn at(&self, batch: usize, head: usize, i: usize) -> usize {
        self.start + batch * self.batch + head * self.head + i * self.row
    }
}
