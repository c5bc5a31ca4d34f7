//! What this machine reaches: the rates that a profile is read against.

use std::time::Instant;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::gemm::{Mat, MatMut, Threads, gemm};

/// What this machine reaches at most, on all threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Floating point operations per second of square products in the format that is set; a multiply-add is two.
    pub products: f64,
    /// Bytes per second that a copy reads and writes.
    pub copies: f64,
}

/// Measures them for some tenths of a second: the fastest of a few rounds.
pub fn rates() -> Rates {
    const SIDE: usize = 1024;
    const ROUNDS: usize = 4;
    const WORDS: usize = 1 << 24;
    let threads = rayon::current_num_threads();
    let numbers: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 19) as f32 - 9.0).collect();
    let factor = Mat::new(&numbers, SIDE, SIDE);
    let mut results = vec![vec![0.0; SIDE * SIDE]; threads];
    // as the kernels do: every thread its own products
    let products = fastest(ROUNDS, || {
        let each = |c: &mut Vec<f32>| gemm(MatMut::new(c, SIDE, SIDE), factor, factor, 1.0, Threads::One);
        results.par_iter_mut().for_each(each);
    });
    drop(results);
    let (from, mut to) = (vec![1.0f32; WORDS], vec![0.0f32; WORDS]);
    let copies = fastest(ROUNDS, || {
        let chunk = WORDS / (4 * threads);
        to.par_chunks_mut(chunk).zip(from.par_chunks(chunk)).for_each(|(to, from)| to.copy_from_slice(from));
    });
    let work = 2.0 * (SIDE * SIDE * SIDE * threads) as f64;
    Rates { products: work / products, copies: (2 * WORDS * size_of::<f32>()) as f64 / copies }
}

/// Seconds of the fastest of some rounds, behind one that warms up.
fn fastest(rounds: usize, mut f: impl FnMut()) -> f64 {
    f();
    let times = (0..rounds).map(|_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min).max(1e-9)
}
