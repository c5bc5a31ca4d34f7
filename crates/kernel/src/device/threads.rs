//! The number of CPU threads, set in-process.
//!
//! candle and gemm read it from the environment; unset, every matrix product counts the processors anew
//! (28 us each).

/// The variables that candle, gemm and rayon read.
pub const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// Processors this process may use.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Lets every pool of this process have `count` threads. Call before the first operation and before any
/// other thread is started.
pub fn set(count: usize) {
    for name in VARIABLES {
        // SAFETY: the caller promises that no other thread runs that could read the environment.
        unsafe { std::env::set_var(name, count.to_string()) };
    }
    // A pool that exists already keeps its size; the variables were set in time for it in workers.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(count).build_global();
}

/// Stack of a thread of the pool: candle walks the graph of a composed model by recursion.
const STACK: usize = 64 << 20;

/// Runs `f` on a thread of the pool, so that kernels start without waiting for one to wake up. The pool must not exist yet,
/// or its threads have the usual stack.
pub fn inside<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _ = rayon::ThreadPoolBuilder::new().stack_size(STACK).build_global();
    rayon::scope(|_| f())
}
