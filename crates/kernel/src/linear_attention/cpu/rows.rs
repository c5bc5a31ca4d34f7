//! Rows of heads inside larger buffers.

use std::ops::Range;

use crate::cpu::compact::Elements;
use crate::cpu::gemm::{Mat, MatMut};

/// `count` rows of `width` elements, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) width: usize,
}

impl<'a> Rows<'a> {
    /// Rows one after another.
    pub(super) fn packed(data: &'a [f32], width: usize) -> Self {
        Self { data, stride: width, count: data.len() / width, width }
    }

    /// Row `index`.
    pub(super) fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..self.width]
    }

    /// As a matrix [count, width].
    pub(super) fn mat(&self) -> Mat<'a> {
        Mat::strided(self.data, self.count, self.width, self.stride)
    }
}

/// Rows to write to.
pub(super) struct RowsMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) width: usize,
}

impl RowsMut<'_> {
    /// Row `index`.
    pub(super) fn row(&mut self, index: usize) -> &mut [f32] {
        &mut self.data[index * self.stride..][..self.width]
    }

    /// As a matrix [count, width].
    pub(super) fn mat(&mut self) -> MatMut<'_> {
        MatMut::strided(self.data, self.count, self.width, self.stride)
    }

    /// The same rows for a callee.
    pub(super) fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { data: self.data, stride: self.stride, count: self.count, width: self.width }
    }
}

/// How an operand [sample, head, position, width] lies in its buffer; elements of a row are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowLayout {
    pub(super) offset: usize,
    pub(super) sample: usize,
    pub(super) head: usize,
    pub(super) row: usize,
    pub(super) width: usize,
}

/// An operand in its buffer.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) data: Elements<'a>,
    pub(super) place: RowLayout,
}

impl<'a> Operand<'a> {
    /// The rows `range` of one head, in `room` if they wait.
    pub(super) fn rows<'b>(
        &self,
        sample: usize,
        head: usize,
        range: Range<usize>,
        room: &'b mut [f32],
    ) -> Rows<'b>
    where
        'a: 'b,
    {
        let (RowLayout { row, width, .. }, count) = (self.place, range.len());
        match self.data {
            Elements::F32(data) => {
                Rows { data: &data[self.start(sample, head, &range)..], stride: row, count, width }
            }
            Elements::Bf16(_) => {
                self.copy(sample, head, range, room);
                Rows { data: room, stride: width, count, width }
            }
        }
    }

    /// Copies the rows `range` of one head to `to`.
    pub(super) fn copy(&self, sample: usize, head: usize, range: Range<usize>, to: &mut [f32]) {
        let (start, RowLayout { row, width, .. }) = (self.start(sample, head, &range), self.place);
        self.data.copy_rows((start, row), width, &mut to[..range.len() * width], width);
    }

    fn start(&self, sample: usize, head: usize, range: &Range<usize>) -> usize {
        let RowLayout { offset, sample: samples, head: heads, row, .. } = self.place;
        offset + sample * samples + head * heads + range.start * row
    }

    /// Room for `count` rows that wait.
    pub(super) fn room(&self, count: usize) -> Vec<f32> {
        vec![0.0; self.data.room(count * self.place.width)]
    }
}

/// Columns of one head in rows [.., stride] that a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// First column of head 0.
    pub(super) first: usize,
    /// Columns per head.
    pub(super) width: usize,
    /// Columns in all.
    pub(super) stride: usize,
}

impl Columns {
    /// The rows `range` of `head`, counted within `chunk`.
    pub(super) fn of<'a>(&self, chunk: &'a mut [f32], head: usize, range: Range<usize>) -> RowsMut<'a> {
        let start = range.start * self.stride + self.first + head * self.width;
        RowsMut { data: &mut chunk[start..], stride: self.stride, count: range.len(), width: self.width }
    }
}
