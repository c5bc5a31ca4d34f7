//! Partitions fixed by shape, and outputs built in parallel.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};

use bytemuck::Zeroable;

use super::jobs::{build_jobs, zeroed};
use super::pieces::share;
pub use super::pieces::{each_piece, each_piece_with, map_pieces, map_pieces_with};

/// `0..len` cut into consecutive ranges of `size` (the last may be shorter).
///
/// Choose `size` from the shape, never from the number of threads: then results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Number of items.
    pub len: usize,
    /// Items per chunk, at least 1.
    pub size: usize,
}

impl Chunks {
    /// Chunks of `size` items (at least one).
    pub fn of(len: usize, size: usize) -> Self {
        Self { len, size: size.max(1) }
    }

    /// Chunks of equal size (within one), multiples of `unit`, close to `size`.
    pub fn balanced(len: usize, size: usize, unit: usize) -> Self {
        let count = len.div_ceil(size.max(1)).max(1);
        Self::of(len, len.div_ceil(count).next_multiple_of(unit.max(1)))
    }

    /// Chunks of rows of `width` elements that stay in the cache of one core with what is computed from them.
    pub fn rows(rows: usize, width: usize) -> Self {
        Self::balanced(rows, (32_768 / width.max(1)).max(1), 1)
    }

    /// Ranges of about a million elements for rows of `width`, each a whole number of these chunks: what a backward
    /// pass computes between two sums over rows should stay in the last level of the cache.
    pub fn blocks(self, width: usize) -> Self {
        let size = ((1 << 20) / width.max(1)).max(1).next_multiple_of(self.size);
        Self::of(self.len, size.min(self.len))
    }

    /// Number of chunks.
    pub fn count(&self) -> usize {
        self.len.div_ceil(self.size)
    }

    /// Items of chunk `index`.
    pub fn range(&self, index: usize) -> Range<usize> {
        index * self.size..((index + 1) * self.size).min(self.len)
    }

    /// Runs `f(index, range)` for every chunk, in parallel, on scratch space made by `init` for each worker.
    pub fn for_each<T>(
        &self,
        init: impl Fn() -> T + Sync + Send,
        f: impl Fn(&mut T, Range<usize>) + Sync + Send,
    ) {
        share(self.count(), &|| {
            let (mut scratch, f) = (init(), &f);
            Box::new(move |index| f(&mut scratch, self.range(index)))
        });
    }

    /// Maps every chunk in parallel and returns the results in index order.
    pub fn map<R: Send>(&self, f: impl Fn(Range<usize>) -> R + Sync + Send) -> Vec<R> {
        map_pieces(0..self.count(), |_, index| f(self.range(index)))
    }
}

/// A vector of `len` elements filled in parallel: `f(index, chunk)` writes elements
/// `index * chunk_len..` and finds zeros there. Zeroing happens chunk by chunk, when the chunk is about to be
/// in the cache anyway.
pub fn build(len: usize, chunk_len: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) -> Vec<f32> {
    build_with(len, chunk_len, || (), |(), index, chunk| f(index, chunk))
}

/// `len` zeros, written by all threads.
pub fn zeros(len: usize) -> Vec<f32> {
    build(len, 1 << 16, |_, _| ())
}

/// [`build`] with scratch space made by `init` for each worker.
pub fn build_with<T>(
    len: usize,
    chunk_len: usize,
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [f32]) + Sync + Send,
) -> Vec<f32> {
    build_of(len, chunk_len, init, f)
}

/// [`build`] for elements of 16 bits.
pub fn build_bits(len: usize, chunk_len: usize, f: impl Fn(usize, &mut [u16]) + Sync + Send) -> Vec<u16> {
    build_of(len, chunk_len, || (), |(), index, chunk| f(index, chunk))
}

fn build_of<E: Zeroable + Copy + Send, T>(
    len: usize,
    chunk_len: usize,
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [E]) + Sync + Send,
) -> Vec<E> {
    let mut data = Vec::with_capacity(len);
    let chunks = data.spare_capacity_mut()[..len].chunks_mut(chunk_len.max(1));
    each_piece_with(chunks, init, |scratch, index, chunk| f(scratch, index, zeroed(chunk)));
    // SAFETY: `zeroed` initialised every chunk, and the chunks cover `len` elements.
    unsafe { data.set_len(len) };
    data
}

/// Two vectors filled together: chunk `index` of one and of the other go to the same call. Both are given as
/// (length, chunk length) and must have the same number of chunks; a vector of length 0 gives empty chunks.
pub fn build_two<T>(
    first: (usize, usize),
    second: (usize, usize),
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [f32], &mut [f32]) + Sync + Send,
) -> (Vec<f32>, Vec<f32>) {
    let chunks = |(len, size): (usize, usize)| len.div_ceil(size.max(1));
    let count = chunks(first).max(chunks(second));
    let lens = [first, second].map(|(len, size)| {
        let lens: Vec<usize> = (0..count).map(|i| size.min(len.saturating_sub(i * size))).collect();
        assert!(len == 0 || chunks((len, size)) == count, "outputs have as many chunks each");
        lens
    });
    let [one, two] =
        build_jobs([&lens[0], &lens[1]], init, |scratch, index, [one, two]| f(scratch, index, one, two));
    (one, two)
}

/// Appends `len` elements to `out`, a chunk of `size` at a time, beside buffers that are cut into as many chunks: every
/// buffer comes with its chunk length, an empty one (or `len` 0) gives empty chunks. `f(scratch, index, chunk, chunks)` runs in
/// parallel and finds zeros in the chunk of `out`.
pub fn extend_beside<T, const N: usize>(
    out: &mut Vec<f32>,
    (len, size): (usize, usize),
    buffers: [(&mut [f32], usize); N],
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [f32], [&mut [f32]; N]) + Sync + Send,
) {
    out.reserve_exact(len);
    let chunks = |len: usize, size: usize| len.div_ceil(size.max(1));
    let count =
        buffers.iter().map(|(data, size)| chunks(data.len(), *size)).fold(chunks(len, size), usize::max);
    let fresh = cut(&mut out.spare_capacity_mut()[..len], count, size);
    let mut pieces = buffers.map(|(data, size)| cut(data, count, size).into_iter());
    let calls = fresh
        .into_iter()
        .map(|fresh| (fresh, pieces.each_mut().map(|pieces| pieces.next().unwrap_or_default())));
    each_piece_with(calls, init, |scratch, index, (fresh, call)| f(scratch, index, zeroed(fresh), call));
    // SAFETY: `cut` covered `len` elements behind the old length, and `zeroed` initialised every piece.
    unsafe { out.set_len(out.len() + len) };
}

/// Runs `f(scratch, index, chunks)` in parallel on the chunks of buffers that are cut as [`extend_beside`] cuts them.
pub fn each_beside<T, const N: usize>(
    buffers: [(&mut [f32], usize); N],
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, [&mut [f32]; N]) + Sync + Send,
) {
    extend_beside(&mut Vec::new(), (0, 0), buffers, init, |scratch, index, _, chunks| {
        f(scratch, index, chunks)
    });
}

/// Working memory of a thread, kept for the next kernel. What stands in it at first is unspecified.
pub struct Scratch {
    data: Vec<f32>,
    len: usize,
}

/// Buffers that a thread keeps, and the largest it keeps, in elements: larger ones are few in a step and would take memory from
/// the operations in between.
const KEPT: (usize, usize) = (12, 1 << 18);

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Working memory for `len` elements.
pub fn scratch(len: usize) -> Scratch {
    let kept = POOL.with_borrow_mut(|pool| {
        // the smallest that fits, so that the large ones are left for those who need them
        let fits = (0..pool.len()).filter(|&index| pool[index].len() >= len);
        let best = fits.min_by_key(|&index| pool[index].len());
        best.map(|index| pool.swap_remove(index)).or_else(|| pool.pop())
    });
    let mut data = kept.unwrap_or_default();
    if data.len() < len {
        data = vec![0.0; len];
    }
    Scratch { data, len }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        POOL.with_borrow_mut(|pool| {
            if pool.len() < KEPT.0 && data.len() <= KEPT.1 {
                pool.push(data);
            }
        });
    }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.len]
    }
}

/// Consecutive pieces of `memory` of the given lengths. Panics like indexing if it is too short.
pub fn carve<const N: usize>(mut memory: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    lens.map(|len| {
        let (piece, rest) = std::mem::take(&mut memory).split_at_mut(len);
        memory = rest;
        piece
    })
}

/// `count` consecutive pieces of at most `size` elements. Panics if they do not cover `data`.
fn cut<T>(mut data: &mut [T], count: usize, size: usize) -> Vec<&mut [T]> {
    let pieces = (0..count)
        .map(|_| {
            let size = size.min(data.len());
            let (piece, rest) = std::mem::take(&mut data).split_at_mut(size);
            data = rest;
            piece
        })
        .collect();
    assert!(data.is_empty(), "{count} chunks of {size} leave {} elements", data.len());
    pieces
}

/// Sum of the rows of `parts`, each `width` long, in index order.
pub fn sum_parts(parts: &[f32], width: usize) -> Vec<f32> {
    let mut total = vec![0.0; width];
    super::rows::add_column_sums(parts, &mut total);
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        for len in [0, 1, 2, 17, 64, 100] {
            for size in [1, 3, 64, 200] {
                for chunks in [Chunks::of(len, size), Chunks::balanced(len, size, 4)] {
                    let all: Vec<usize> = (0..chunks.count()).flat_map(|i| chunks.range(i)).collect();
                    assert_eq!(all, (0..len).collect::<Vec<_>>(), "{chunks:?}");
                }
            }
        }
    }

    #[test]
    fn balanced_chunks_leave_no_small_rest() {
        let chunks = Chunks::balanced(1025, 512, 1);
        assert_eq!((chunks.count(), chunks.size), (3, 342));
    }

    #[test]
    fn built_vectors_are_complete() {
        let data = build(10, 4, |index, chunk| {
            assert!(chunk.iter().all(|&x| x == 0.0));
            chunk.fill(index as f32);
        });
        assert_eq!(data, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
        let (a, b) = build_two(
            (5, 2),
            (3, 1),
            || (),
            |(), index, a, b| {
                a.fill(index as f32);
                b.fill(-(index as f32));
            },
        );
        assert_eq!((a, b), (vec![0.0, 0.0, 1.0, 1.0, 2.0], vec![0.0, -1.0, -2.0]));
        assert_eq!(build_two((3, 2), (0, 0), || (), |(), _, a, _| a.fill(1.0)).0, [1.0; 3]);
        assert_eq!(build(0, 4, |_, _| ()), Vec::<f32>::new());
    }

    #[test]
    fn a_vector_grows_beside_other_buffers() {
        let (mut out, mut beside) = (vec![7.0], [0.0; 3]);
        for _ in 0..2 {
            extend_beside(
                &mut out,
                (3, 2),
                [(&mut beside, 2), (&mut [], 0)],
                || (),
                |(), index, out, [beside, none]| {
                    assert!(none.is_empty() && out.iter().all(|&x| x == 0.0));
                    out.fill(index as f32 + 1.0);
                    beside.iter_mut().for_each(|x| *x += 1.0);
                },
            );
        }
        assert_eq!(out, [7.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0]);
        assert_eq!(beside, [2.0; 3]);
    }

    #[test]
    fn working_memory_is_used_again() {
        let first = scratch(100);
        let at = first.as_ptr();
        assert_eq!((first.len(), scratch(0).len()), (100, 0));
        drop(first);
        assert_eq!(scratch(50).as_ptr(), at);
        assert_eq!(scratch(50).len(), 50);
        drop(scratch(KEPT.1 + 1));
        assert!(POOL.with_borrow(|pool| pool.iter().all(|data| data.len() <= KEPT.1)));
    }
}
