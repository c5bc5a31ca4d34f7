//! Rows of several samples built in parallel, cut within samples.

use std::ops::Range;

use super::jobs::zeroed;
use super::par::{Chunks, map_pieces_with};

/// `samples * rows.len` rows of `width` elements, built in parallel: `f(scratch, sample, range, chunk)` fills the
/// rows `range` of a sample and finds zeros there. Returns the rows and what the calls returned, in index order.
pub fn build_rows<T, R: Send>(
    samples: usize,
    rows: Chunks,
    width: usize,
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, Range<usize>, &mut [f32]) -> R + Sync + Send,
) -> (Vec<f32>, Vec<R>) {
    let len = samples * rows.len * width;
    let mut data = Vec::with_capacity(len);
    let chunks = split_rows(&mut data.spare_capacity_mut()[..len], samples, rows, width);
    let results = map_pieces_with(chunks.into_iter(), init, |scratch, _, (sample, range, chunk)| {
        f(scratch, sample, range, zeroed(chunk))
    });
    // SAFETY: `zeroed` initialised every chunk, and `split_rows` covers all of `len`.
    unsafe { data.set_len(len) };
    (data, results)
}

/// [`build_rows`] over rows that exist.
pub fn update_rows<T, R: Send>(
    data: &mut [f32],
    samples: usize,
    rows: Chunks,
    width: usize,
    init: impl Fn() -> T + Sync + Send,
    f: impl Fn(&mut T, usize, Range<usize>, &mut [f32]) -> R + Sync + Send,
) -> Vec<R> {
    assert_eq!(data.len(), samples * rows.len * width, "rows of another shape");
    let chunks = split_rows(data, samples, rows, width);
    map_pieces_with(chunks.into_iter(), init, |scratch, _, (sample, range, chunk)| {
        f(scratch, sample, range, chunk)
    })
}

/// Cuts `samples * rows.len` rows into (sample, range of rows, elements).
fn split_rows<T>(
    mut data: &mut [T],
    samples: usize,
    rows: Chunks,
    width: usize,
) -> Vec<(usize, Range<usize>, &mut [T])> {
    let mut chunks = Vec::with_capacity(samples * rows.count());
    for sample in 0..samples {
        for index in 0..rows.count() {
            let range = rows.range(index);
            let (chunk, rest) = data.split_at_mut(range.len() * width);
            chunks.push((sample, range, chunk));
            data = rest;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_within_samples() {
        let rows = Chunks::of(3, 2);
        let fill = |(): &mut (), sample: usize, range: Range<usize>, chunk: &mut [f32]| {
            assert_eq!(chunk.len(), range.len() * 2);
            chunk.iter_mut().for_each(|x| *x += (10 * sample + range.start) as f32);
            (sample, range.start)
        };
        let (mut data, results) = build_rows(2, rows, 2, || (), fill);
        assert_eq!(results, [(0, 0), (0, 2), (1, 0), (1, 2)]);
        assert_eq!(data, [0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 10.0, 10.0, 10.0, 10.0, 12.0, 12.0]);
        update_rows(&mut data, 2, rows, 2, || (), fill);
        assert_eq!(data[4..8], [4.0, 4.0, 20.0, 20.0]);
    }
}
