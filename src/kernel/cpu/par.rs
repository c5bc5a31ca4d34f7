//! Partitions fixed by shape, and outputs built in parallel.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

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
        (0..self.count()).into_par_iter().for_each_init(init, |scratch, i| f(scratch, self.range(i)));
    }

    /// Maps every chunk in parallel and returns the results in index order.
    pub fn map<R: Send>(&self, f: impl Fn(Range<usize>) -> R + Sync + Send) -> Vec<R> {
        (0..self.count()).into_par_iter().map(|i| f(self.range(i))).collect()
    }
}

/// A vector of `len` elements filled in parallel: `f(index, chunk)` writes elements
/// `index * chunk_len..` and finds zeros there. Zeroing happens chunk by chunk, when the chunk is about to be
/// in the cache anyway.
pub fn build(len: usize, chunk_len: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) -> Vec<f32> {
    build_with(len, chunk_len, || (), |(), index, chunk| f(index, chunk))
}

/// [`build`] with scratch space made by `init` for each worker.
pub fn build_with<T>(
    len: usize,
    chunk_len: usize,
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [f32]) + Sync + Send,
) -> Vec<f32> {
    let mut data = Vec::with_capacity(len);
    data.spare_capacity_mut()[..len]
        .par_chunks_mut(chunk_len.max(1))
        .enumerate()
        .for_each_init(&init, |scratch, (index, chunk)| f(scratch, index, zeroed(chunk)));
    // SAFETY: `zeroed` initialised every chunk, and the chunks cover `len` elements.
    unsafe { data.set_len(len) };
    data
}

/// Two vectors filled together: chunk `index` of one and of the other go to the same call. Both must have the
/// same number of chunks.
pub fn build_two<T>(
    (len, chunk_len): (usize, usize),
    (other_len, other_chunk_len): (usize, usize),
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, &mut [f32], &mut [f32]) + Sync + Send,
) -> (Vec<f32>, Vec<f32>) {
    let (chunk_len, other_chunk_len) = (chunk_len.max(1), other_chunk_len.max(1));
    assert_eq!(
        len.div_ceil(chunk_len),
        other_len.div_ceil(other_chunk_len),
        "outputs have as many chunks each"
    );
    let (mut data, mut other) = (Vec::with_capacity(len), Vec::with_capacity(other_len));
    let chunks = data.spare_capacity_mut()[..len].par_chunks_mut(chunk_len);
    let others = other.spare_capacity_mut()[..other_len].par_chunks_mut(other_chunk_len);
    chunks.zip(others).enumerate().for_each_init(&init, |scratch, (index, (chunk, other))| {
        f(scratch, index, zeroed(chunk), zeroed(other));
    });
    // SAFETY: `zeroed` initialised every chunk of both (there are as many of each, so `zip` dropped none), and
    // the chunks cover the lengths.
    unsafe {
        data.set_len(len);
        other.set_len(other_len);
    }
    (data, other)
}

fn zeroed(chunk: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    chunk.fill(MaybeUninit::new(0.0));
    // SAFETY: every element was just written, and MaybeUninit<f32> has the layout of f32.
    unsafe { &mut *(std::ptr::from_mut(chunk) as *mut [f32]) }
}

/// total += every part, in index order; columns are cut between threads.
pub fn add_parts(total: &mut [f32], parts: &[Vec<f32>]) {
    total.par_chunks_mut(4096).enumerate().for_each(|(index, total)| {
        for part in parts {
            add(&part[index * 4096..][..total.len()], total);
        }
    });
}

crate::simd_fn! {
    fn add<S>(simd, x: &'a [f32], y: &'a mut [f32]) { super::math::add(simd, x, y) }
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
        assert_eq!(build(0, 4, |_, _| ()), Vec::<f32>::new());
    }

    #[test]
    fn parts_are_added_in_order() {
        let big = 16_777_216.0; // 2^24: adding 1 to it is lost
        let mut total = vec![1.0; 5000];
        add_parts(&mut total, &[vec![1.0; 5000], vec![big; 5000], vec![-big; 5000]]);
        assert!(total.iter().all(|&x| x == 2.0));
    }
}
