//! Column blocks of row-major matrices, for kernels that walk along the rows of a block and run blocks in parallel.

use std::marker::PhantomData;
use std::ops::Range;

/// A column block of a matrix that is read.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    data: &'a [f32],
    stride: usize,
    first: usize,
    width: usize,
}

impl<'a> Columns<'a> {
    /// The `columns` of `data`, whose rows are `stride` long.
    pub fn new(data: &'a [f32], stride: usize, columns: Range<usize>) -> Self {
        Self { data, stride, first: columns.start, width: columns.len() }
    }

    /// Number of columns.
    pub fn width(self) -> usize {
        self.width
    }

    /// The block's part of row `row`. Panics like indexing if there is no such row.
    #[inline(always)]
    pub fn row(self, row: usize) -> &'a [f32] {
        &self.data[row * self.stride + self.first..][..self.width]
    }
}

/// A column block of a matrix that is written, made by [`cut`].
pub struct ColumnsMut<'a> {
    data: *mut f32, // first element of the block
    rows: usize,
    stride: usize,
    width: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a block stands for the exclusive borrow of its elements, which may move to another thread.
unsafe impl Send for ColumnsMut<'_> {}

impl ColumnsMut<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The block's part of row `row`. Panics like indexing if there is no such row.
    #[inline(always)]
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: `cut` checked that these elements are inside of the matrix and in no other block; `self` is borrowed
        // for as long as they are.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.width) }
    }

    /// The block for a shorter time.
    pub fn reborrow(&mut self) -> ColumnsMut<'_> {
        ColumnsMut { matrix: PhantomData, ..*self }
    }
}

/// The given ranges of columns of `data`, whose rows are `stride` long. Panics if the ranges overlap, do not ascend, or leave
/// the matrix.
pub fn cut<'a>(
    data: &'a mut [f32],
    stride: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> Vec<ColumnsMut<'a>> {
    let rows = data.len() / stride.max(1);
    let base = data.as_mut_ptr();
    let mut free = 0;
    let block = |range: Range<usize>| {
        assert!(free <= range.start && range.start <= range.end && range.end <= stride, "columns {range:?}");
        free = range.end;
        let rows = if range.is_empty() { 0 } else { rows };
        // SAFETY: `range.start` is at most `stride`, and is inside of `data` or, if there are no rows, never used.
        let data = if rows == 0 { base } else { unsafe { base.add(range.start) } };
        ColumnsMut { data, rows, stride, width: range.len(), matrix: PhantomData }
    };
    ranges.into_iter().map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::par;

    #[test]
    fn blocks_are_written_in_parallel() {
        let mut data = vec![0.0; 3 * 7];
        let blocks = cut(&mut data, 7, [0..2, 2..3, 4..7]);
        assert_eq!(blocks.iter().map(|block| (block.rows(), block.width())).max(), Some((3, 3)));
        par::each_piece(blocks.into_iter(), |index, mut block| {
            for row in 0..block.rows() {
                block.reborrow().row(row).fill((10 * index + row + 1) as f32);
            }
        });
        for row in 0..3 {
            let value = |block: usize| (10 * block + row + 1) as f32;
            let want = [value(0), value(0), value(1), 0.0, value(2), value(2), value(2)];
            assert_eq!(data[row * 7..][..7], want);
            assert_eq!(Columns::new(&data, 7, 1..3).row(row), [value(0), value(1)]);
        }
        assert!(cut(&mut [], 3, [0..1, 1..3]).iter().all(|block| block.rows() == 0));
    }

    #[test]
    #[should_panic(expected = "columns 1..3")]
    fn overlapping_blocks_are_refused() {
        cut(&mut [0.0; 6], 3, [0..2, 1..3]);
    }
}
