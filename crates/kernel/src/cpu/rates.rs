//! What this machine reaches: the rates that a profile is read against, and a calibration that
//! tells whether the machine is as fast as it was before.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::gemm::{Mat, MatMut, Threads, gemm, gemm_exact};

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
    let numbers = whole_numbers(SIDE * SIDE);
    let factor = Mat::new(&numbers, SIDE, SIDE);
    let mut results = vec![vec![0.0; SIDE * SIDE]; threads];
    // as the kernels do: every thread its own products
    let products = fastest(ROUNDS, || {
        let each = |c: &mut Vec<f32>| gemm(MatMut::new(c, SIDE, SIDE), factor, factor, 1.0, Threads::One);
        results.par_iter_mut().for_each(each);
    });
    drop(results);
    let (from, mut to) = (vec![1.0f32; WORDS], vec![0.0f32; WORDS]);
    let copies = fastest(ROUNDS, || copy(&from, &mut to));
    let work = 2.0 * (SIDE * SIDE * SIDE * threads) as f64;
    Rates { products: work / products, copies: (2 * WORDS * size_of::<f32>()) as f64 / copies }
}

/// Copies on all threads.
fn copy(from: &[f32], to: &mut [f32]) {
    let chunk = from.len() / (4 * rayon::current_num_threads());
    to.par_chunks_mut(chunk).zip(from.par_chunks(chunk)).for_each(|(to, from)| to.copy_from_slice(from));
}

pub(crate) fn whole_numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 19) as f32 - 9.0).collect()
}

/// Seconds of the fastest of some rounds, behind one that warms up.
fn fastest(rounds: usize, mut f: impl FnMut()) -> f64 {
    f();
    let times = (0..rounds).map(|_| timed(&mut f));
    times.fold(f64::INFINITY, f64::min).max(1e-9)
}

pub(crate) fn timed(mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Side of the products of a calibration, in which every thread makes one.
const SIDE: usize = 256;
/// Elements that a calibration copies.
const WORDS: usize = 1 << 20;
/// Seconds that one takes about.
const LENGTH: f64 = 3e-3;
/// Most rounds in it.
const MOST: usize = 12;

/// Products and copies of fixed size on all threads, timed again and again to see whether the machine is as fast as before.
/// It takes about three milliseconds.
pub struct Calibration {
    factor: Vec<f32>,
    threads: Vec<Mutex<Thread>>,
    rounds: usize,
}

/// What a thread of a calibration computes on.
struct Thread {
    result: Vec<f32>,
    from: Vec<f32>,
    to: Vec<f32>,
}

/// Seconds of a round: a product of 256 x 256 matrices in f32 and a copy of a thread's part of 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationTime {
    /// The fastest round of each thread, of the threads the slowest: waiting for another thread or for a processor says nothing
    /// about the speed of the machine.
    pub fastest: f64,
    /// Mean of all rounds by the clock, with what threads waited.
    pub mean: f64,
}

impl Calibration {
    /// One on the threads of the pool.
    pub fn new() -> Self {
        let count = rayon::current_num_threads();
        let words = |value| vec![value; WORDS / count];
        let thread = || Thread { result: vec![0.0; SIDE * SIDE], from: words(1.0), to: words(0.0) };
        let threads = (0..count).map(|_| Mutex::new(thread())).collect();
        let mut new = Self { factor: whole_numbers(SIDE * SIDE), threads, rounds: 1 };
        // the first one touches the memory
        let most = (0..4).map(|_| (LENGTH / new.take().mean) as usize).max().unwrap_or(1);
        new.rounds = most.clamp(1, MOST);
        new
    }

    /// Seconds of a round now.
    pub fn take(&self) -> CalibrationTime {
        let start = Instant::now();
        let fastest = rayon::broadcast(|thread| self.round(thread.index()));
        let mean = start.elapsed().as_secs_f64() / (self.rounds + 1) as f64;
        CalibrationTime { fastest: fastest.into_iter().fold(0.0, f64::max), mean }
    }

    /// Seconds of the fastest round of thread `index`.
    fn round(&self, index: usize) -> f64 {
        let mut thread = self.threads[index].lock().unwrap_or_else(PoisonError::into_inner);
        let Thread { result, from, to } = &mut *thread;
        let factor = Mat::new(&self.factor, SIDE, SIDE);
        let products = fastest(self.rounds, || {
            gemm_exact(MatMut::new(result, SIDE, SIDE), factor, factor, 1.0, None, Threads::One);
        });
        products + fastest(self.rounds, || to.copy_from_slice(from))
    }
}

impl Default for Calibration {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_is_of_every_thread_and_short() {
        let calibration = Calibration::new();
        let time = calibration.take();
        assert_eq!(calibration.threads.len(), rayon::current_num_threads());
        for thread in &calibration.threads {
            let thread = thread.lock().unwrap();
            assert!(thread.result[0] != 0.0 && thread.to[0] == 1.0);
        }
        assert!(time.fastest > 0.0 && time.fastest <= 1.01 * time.mean && time.fastest < 0.5, "{time:?}");
    }
}
