//! Which of the operations that a computation on the CPU calls have a CUDA kernel.
//!
//! Every operation asks `fused` (a kernel for the CPU and one for CUDA) or `fused_cpu` (composed
//! operations elsewhere) before it runs; what they are asked is noted here, so that the answer is what would be dispatched.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::Location;

/// Operations by their modules, such as `linear_attention`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaCoverage {
    /// Those that run a kernel of this program on CUDA.
    pub kernels: BTreeSet<&'static str>,
    /// Those that run candle's operations there.
    pub composed: BTreeSet<&'static str>,
}

thread_local! {
    static NOTED: RefCell<Option<CudaCoverage>> = const { RefCell::new(None) };
}

/// The result of `f`, which computes on the CPU in f32, and the operations that it called on this thread.
pub fn observe<T>(f: impl FnOnce() -> T) -> (T, CudaCoverage) {
    let before = NOTED.replace(Some(CudaCoverage::default()));
    let result = f();
    (result, NOTED.replace(before).unwrap_or_default())
}

/// Notes the operation whose module calls the function that calls this.
#[track_caller]
pub(crate) fn note(on_cuda: bool) {
    let caller = Location::caller();
    NOTED.with_borrow_mut(|noted| {
        if let Some(noted) = noted {
            let place = caller.file().rsplit_once("src").map_or("", |(_, place)| place);
            let name =
                place.trim_start_matches(['/', '\\']).split(['/', '\\', '.']).next().unwrap_or_default();
            if on_cuda {
                noted.kernels.insert(name)
            } else {
                noted.composed.insert(name)
            };
        }
    });
}
