//! The number of CPU threads, set in-process.
//!
//! gemm and rayon read it from one variable of the environment, candle's own operations on elements from another; unset, every matrix
//! product counts the processors anew (28 us each).

const RAYON: &str = "RAYON_NUM_THREADS";
const CANDLE: &str = "CANDLE_NUM_THREADS";

/// The variables that candle, gemm and rayon read.
pub const VARIABLES: [&str; 2] = [RAYON, CANDLE];

/// Where candle's own operations on elements run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainOperations {
    /// On the thread that calls them. In candle's pool the caller would wait in a loop for threads that our kernels keep from the
    /// processors, which took a tenth of a training step, and more on a busy machine.
    OnCaller,
    /// In a pool of candle's, as in a program that has no kernels but candle's.
    InPool,
}

/// The variables of a process of ours with `count` threads.
pub fn variables(count: usize, plain: PlainOperations) -> [(&'static str, String); 2] {
    let candle = match plain {
        PlainOperations::OnCaller => 1,
        PlainOperations::InPool => count,
    };
    [(RAYON, count.to_string()), (CANDLE, candle.to_string())]
}

/// Processors this process may use.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Lets kernels and matrix products of this process have `count` threads. Call before the first operation and before any other
/// thread is started.
pub fn set(count: usize, plain: PlainOperations) {
    for (name, value) in variables(count, plain) {
        // SAFETY: the caller promises that no other thread runs that could read the environment.
        unsafe { std::env::set_var(name, value) };
    }
    // A pool that exists already keeps its size; the variables were set in time for it in workers.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(count).build_global();
}

/// Stack of a thread of the pool: candle walks the graph of a composed model by recursion.
const STACK: usize = 64 << 20;

/// Bytes of address space that a process with `count` threads needs for itself: a limit (`ulimit -v`) below it leaves no room
/// for a model.
pub const fn address_space(count: usize) -> u64 {
    (192 << 20) + (count * STACK) as u64
}

/// Runs `f` on a thread of the pool, so that kernels start without waiting for one to wake up. The pool must not exist yet,
/// or its threads have the usual stack.
///
/// # Panics
/// If the system gives no thread.
pub fn inside<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let built = rayon::ThreadPoolBuilder::new().stack_size(STACK).build_global();
    if let Some(error) = built.as_ref().err().and_then(std::error::Error::source) {
        panic!(
            "no thread with a stack of {STACK} bytes can be started ({error}); see ulimit -v and ulimit -u"
        );
    }
    rayon::scope(|_| f())
}
