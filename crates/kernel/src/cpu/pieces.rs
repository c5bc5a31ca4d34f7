//! Pieces of work given to threads.

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

/// What runs jobs by their number.
pub(super) type Worker<'a> = Box<dyn FnMut(usize) + 'a>;

/// Runs jobs `0..count` in parallel, on workers that `make` gives to threads as they take a share of the jobs.
///
/// Not generic, so that rayon's machinery is compiled once and not for every kernel.
pub(super) fn share<'a>(count: usize, make: &'a (dyn Fn() -> Worker<'a> + Sync)) {
    (0..count).into_par_iter().for_each_init(make, |run, job| run(job));
}

/// Gives every piece to `f(index, piece)`, in parallel.
pub fn each_piece<P: Send>(pieces: impl Iterator<Item = P>, f: impl Fn(usize, P) + Sync) {
    each_piece_with(pieces, || (), |(), index, piece| f(index, piece));
}

/// [`each_piece`] with scratch space made by `init` for each worker.
pub fn each_piece_with<P: Send, T>(
    pieces: impl Iterator<Item = P>,
    init: impl Fn() -> T + Sync,
    f: impl Fn(&mut T, usize, P) + Sync,
) {
    let pieces: Vec<_> = pieces.map(|piece| Mutex::new(Some(piece))).collect();
    share(pieces.len(), &|| {
        let mut scratch = init();
        let (pieces, f) = (&pieces, &f);
        Box::new(move |index| {
            let piece = pieces[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(piece) = piece {
                f(&mut scratch, index, piece);
            }
        })
    });
}

/// [`each_piece`] that returns the results, in the order of the pieces.
pub fn map_pieces<P: Send, R: Send>(
    pieces: impl Iterator<Item = P>,
    f: impl Fn(usize, P) -> R + Sync,
) -> Vec<R> {
    map_pieces_with(pieces, || (), |(), index, piece| f(index, piece))
}

/// [`map_pieces`] with scratch space made by `init` for each worker.
pub fn map_pieces_with<P: Send, T, R: Send>(
    pieces: impl Iterator<Item = P>,
    init: impl Fn() -> T + Sync,
    f: impl Fn(&mut T, usize, P) -> R + Sync,
) -> Vec<R> {
    let pieces: Vec<P> = pieces.collect();
    let mut results: Vec<Option<R>> = pieces.iter().map(|_| None).collect();
    let both = pieces.into_iter().zip(&mut results);
    each_piece_with(both, init, |scratch, index, (piece, result)| *result = Some(f(scratch, index, piece)));
    results.into_iter().flatten().collect()
}
