//! Where the time of a step goes: seconds, multiply-adds and bytes of every fused operation.
//!
//! While [`record`] runs, [`time()`] adds up what an operation took without what ran inside it, and products count their
//! multiply-adds with [`count`]; while [`products`] runs, they are counted by their shapes. Otherwise an operation costs one look
//! at a thread's flag, a product one at a flag of the process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

/// What products count, as bits: their multiply-adds, their shapes. They run on the threads of the pool.
static COUNTS: AtomicU8 = AtomicU8::new(0);
const MULTIPLY_ADDS: u8 = 1;
const SHAPES: u8 = 2;
static MACS: AtomicU64 = AtomicU64::new(0);
static CALLS: Mutex<Option<HashMap<Product, u64>>> = Mutex::new(None);

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// In which part of a step an operation ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepPart {
    /// From inputs to outputs or the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
    /// From gradients to new weights.
    Update,
}

impl StepPart {
    /// The word in rows.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Update => "update",
        }
    }
}

/// What all calls of an operation in one part of the step took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// The operation.
    pub operation: String,
    /// Where it ran.
    pub part: StepPart,
    /// Seconds, without operations inside it.
    pub seconds: f64,
    /// Multiply-adds of its matrix products.
    pub macs: u64,
    /// Bytes of its operands and results, each counted once: the least that it moves.
    pub bytes: u64,
}

#[derive(Default)]
struct Recording {
    /// What computes, if it goes on while this thread does other things: it is waited for around every operation.
    device: Option<Device>,
    spent: Vec<Spent>,
    /// Seconds and multiply-adds inside each operation that is open.
    open: Vec<(f64, u64)>,
}

/// Runs `f` and says what the operations on this thread took on `device`. One thread of a process at a time.
pub fn record<T>(device: &Device, f: impl FnOnce() -> T) -> (T, Vec<Spent>) {
    /// Puts back what was there before, also when `f` panics.
    struct Restore(Option<Recording>);
    impl Drop for Restore {
        fn drop(&mut self) {
            RECORDING.set(self.0.take());
            COUNTS.fetch_and(!MULTIPLY_ADDS, Relaxed);
        }
    }
    let _restore = Restore(RECORDING.replace(Some(Recording::on(device))));
    COUNTS.fetch_or(MULTIPLY_ADDS, Relaxed);
    let result = f();
    (result, RECORDING.take().unwrap_or_default().spent)
}

/// Whether this thread records.
pub fn is_on() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// Runs `f`, which is `operation` in `part`; `bytes` says what it moved.
pub fn time<T>(operation: &str, part: StepPart, bytes: impl FnOnce(&T) -> u64, f: impl FnOnce() -> T) -> T {
    if !is_on() {
        return f();
    }
    RECORDING.with_borrow_mut(|recording| recording.iter_mut().for_each(|it| it.open.push((0.0, 0))));
    wait_for_device();
    let (start, before) = (Instant::now(), MACS.load(Relaxed));
    let result = f();
    wait_for_device();
    let (seconds, macs) = (start.elapsed().as_secs_f64(), MACS.load(Relaxed) - before);
    let bytes = bytes(&result);
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        let (inner, inner_macs) = recording.open.pop().unwrap_or_default();
        if let Some((outer, outer_macs)) = recording.open.last_mut() {
            *outer += seconds;
            *outer_macs += macs;
        }
        recording.add(operation, part, (seconds - inner).max(0.0), macs - inner_macs, bytes);
    });
    result
}

/// Waits until the recorded device has done all that it was given. What went wrong there is said by the operation that reads it.
fn wait_for_device() {
    let device = RECORDING.with_borrow(|recording| recording.as_ref().and_then(|it| it.device.clone()));
    if let Some(device) = device {
        let _ = device.synchronize();
    }
}

impl Recording {
    fn on(device: &Device) -> Self {
        Self { device: (!device.is_cpu()).then(|| device.clone()), ..Self::default() }
    }

    fn add(&mut self, operation: &str, part: StepPart, seconds: f64, macs: u64, bytes: u64) {
        match self.spent.iter_mut().find(|spent| spent.operation == operation && spent.part == part) {
            Some(spent) => {
                spent.seconds += seconds;
                spent.macs += macs;
                spent.bytes += bytes;
            }
            None => self.spent.push(Spent { operation: operation.to_owned(), part, seconds, macs, bytes }),
        }
    }
}

/// What is said of the bytes of a whole part of a step.
pub fn none<T>(_: &T) -> u64 {
    0
}

/// What a part of a step does between its operations: views, copies, plain operations of candle.
pub const OTHER: &str = "other";

/// The kernel that computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProductKernel {
    /// Any matrices, in f32.
    Gemm,
    /// Matrices whose right factor is packed, in f32.
    Panel,
    /// Tiles of softmax attention, in f32.
    Tile,
    /// Packed pairs of bf16.
    Pairs,
}

/// A product [m, k] x [k, n] that one thread computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Product {
    /// Its kernel.
    pub kernel: ProductKernel,
    /// Rows of the result.
    pub m: usize,
    /// Summed elements.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
}

impl Product {
    /// Its multiply-adds.
    pub const fn macs(&self) -> u64 {
        (self.m * self.k * self.n) as u64
    }
}

/// Room for the shapes of a step, kept so that counting needs no memory of the step that is measured.
const ROOM: usize = 2048;

/// Makes room for what [`products`] counts: call it before bytes are counted.
pub fn reserve_products() {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| HashMap::with_capacity(ROOM));
}

/// Runs `f` and says which products it made, and how often, the most work first. One thread of a process at a time.
pub fn products<T>(f: impl FnOnce() -> T) -> (T, Vec<(Product, u64)>) {
    /// Stops counting, also when `f` panics.
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            COUNTS.fetch_and(!SHAPES, Relaxed);
        }
    }
    reserve_products();
    let stop = Stop;
    COUNTS.fetch_or(SHAPES, Relaxed);
    let result = f();
    drop(stop);
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut counted: Vec<(Product, u64)> = calls.iter_mut().flat_map(HashMap::drain).collect();
    counted.sort_by_key(|(product, calls)| (std::cmp::Reverse(product.macs() * calls), *product));
    (result, counted)
}

/// Counts a product [m, k] x [k, n] by `kernel`, wherever it runs.
#[inline]
pub fn count(kernel: ProductKernel, m: usize, k: usize, n: usize) {
    let counts = COUNTS.load(Relaxed);
    if counts != 0 {
        add(counts, Product { kernel, m, k, n });
    }
}

#[cold]
fn add(counts: u8, product: Product) {
    if counts & MULTIPLY_ADDS != 0 {
        MACS.fetch_add(product.macs(), Relaxed);
    }
    if counts & SHAPES != 0
        && let Some(calls) = CALLS.lock().unwrap_or_else(PoisonError::into_inner).as_mut()
    {
        *calls.entry(product).or_insert(0) += 1;
    }
}

/// Bytes of the elements of `tensors`.
pub fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn wait(milliseconds: u64) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }

    #[test]
    fn an_operation_is_charged_without_what_runs_inside_it() {
        let start = Instant::now();
        let ((), spent) = record(&Device::Cpu, || {
            time(
                "outer",
                StepPart::Forward,
                |()| 8,
                || {
                    wait(2);
                    time("inner", StepPart::Backward, |()| 4, || wait(20));
                    time("inner", StepPart::Backward, |()| 4, || wait(20));
                },
            );
        });
        let whole = start.elapsed().as_secs_f64();
        let names: Vec<_> = spent.iter().map(|spent| (spent.operation.as_str(), spent.part)).collect();
        assert_eq!(names, [("inner", StepPart::Backward), ("outer", StepPart::Forward)]);
        assert_eq!((spent[0].bytes, spent[1].bytes), (8, 8));
        assert!(spent[0].seconds >= 0.04 && spent[1].seconds >= 0.002, "{spent:?}");
        // what is inside is not counted twice, however busy the machine is
        assert!(spent[0].seconds + spent[1].seconds <= whole, "{spent:?} of {whole} s");
    }

    #[test]
    fn nothing_is_recorded_outside() {
        assert!(!is_on());
        assert_eq!(time("alone", StepPart::Forward, |_| unreachable!(), || 3), 3);
        assert!(record(&Device::Cpu, || ()).1.is_empty() && !is_on());
    }

    #[test]
    fn products_are_counted_by_their_shapes() {
        use crate::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};
        let numbers = vec![1.0; 64];
        let (_, counted) = products(|| {
            for _ in 0..3 {
                let (a, b) = (Mat::new(&numbers, 5, 11), Mat::new(&numbers, 11, 3));
                gemm_exact(MatMut::new(&mut [0.0; 15], 5, 3), a, b, 1.0, None, Threads::One);
            }
        });
        // other tests of this process may count theirs
        let product = Product { kernel: ProductKernel::Gemm, m: 5, k: 11, n: 3 };
        let calls = counted.iter().find(|(counted, _)| *counted == product);
        assert_eq!((calls.map(|(_, calls)| *calls), product.macs()), (Some(3), 165), "{counted:?}");
    }

    #[test]
    fn operations_of_the_tape_are_found_with_their_products() {
        use candle_core::Var;

        use crate::testing::randn;
        use crate::{linear::linear, tape};
        let [x, w] = [randn("x", &[7, 3]), randn("w", &[5, 3])].map(|x| Var::from_tensor(&x).unwrap());
        let step = || {
            let run = || linear(x.as_tensor(), w.as_tensor(), None)?.sqr()?.sum_all();
            let (loss, tape) = tape::record(run).unwrap();
            tape.backward(&loss).unwrap();
        };
        let ((), spent) = record(&Device::Cpu, step);
        let of = |part| spent.iter().find(|spent| spent.operation == "linear" && spent.part == part).unwrap();
        let (forward, backward) = (of(StepPart::Forward), of(StepPart::Backward));
        // other tests of this process may count their products too
        assert!(forward.macs >= 7 * 3 * 5 && backward.macs >= 2 * 7 * 3 * 5, "{spent:?}");
        assert_eq!(forward.bytes, 4 * (7 * 3 + 5 * 3 + 7 * 5));
        assert_eq!(backward.bytes, 4 * (2 * (7 * 3 + 5 * 3) + 7 * 5));
    }
}
