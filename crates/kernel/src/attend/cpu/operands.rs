//! Rows of queries, keys and values that are read, and of gradients that are written.

use std::marker::PhantomData;

use crate::attend::dims::RowLayout;
use crate::cpu::compact::Elements;

/// An operand to read.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The buffer.
    pub data: Elements<'a>,
    /// Where its rows lie.
    pub place: RowLayout,
}

impl Rows<'_> {
    /// Copies row `i` to `to`.
    pub fn copy(&self, batch: usize, head: usize, i: usize, to: &mut [f32]) {
        let width = to.len();
        self.data.copy_rows((self.place.at(batch, head, i), width), width, to, width);
    }

    /// Copies rows of `width` elements, the first of them row `i` and `step` rows apart, to the rows of `to`, which are `row`
    /// elements apart.
    pub fn copy_every(
        &self,
        (batch, head): (usize, usize),
        (i, step): (usize, usize),
        width: usize,
        to: &mut [f32],
        row: usize,
    ) {
        let start = self.place.at(batch, head, i);
        self.data.copy_rows((start, self.place.row * step), width, to, row);
    }
}

/// A buffer whose rows are written by several threads.
pub struct Shared<'a> {
    data: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer comes from an exclusive borrow that lasts as long as this value, and f32 may be sent;
// `Shared::row` leaves it to its caller that no element is borrowed twice at a time.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    /// Shares `data`.
    pub fn new(data: &'a mut [f32]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), borrow: PhantomData }
    }

    /// `len` elements from `start` on. Panics like indexing.
    ///
    /// # Safety
    /// As long as the slice lives, no other slice over any of its elements is taken, by any thread.
    #[allow(clippy::mut_from_ref)] // that is what sharing is for; see Safety
    pub unsafe fn row(&self, start: usize, len: usize) -> &mut [f32] {
        assert!(start <= self.len && len <= self.len - start, "row {start} + {len} of {}", self.len);
        // SAFETY: the elements lie inside the borrowed slice, and the caller vouches that they are not shared.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

/// An operand's gradient to add to.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The buffer.
    pub data: &'a Shared<'a>,
    /// Where its rows lie.
    pub place: RowLayout,
}

impl Target<'_> {
    /// Row `i` of `width` elements.
    ///
    /// # Safety
    /// As for [`Shared::row`].
    #[allow(clippy::mut_from_ref)] // see Shared::row
    pub unsafe fn row(&self, batch: usize, head: usize, i: usize, width: usize) -> &mut [f32] {
        // SAFETY: passed on to the caller.
        unsafe { self.data.row(self.place.at(batch, head, i), width) }
    }
}
