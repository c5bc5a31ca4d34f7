//! How long kernels should take on a device: what the emulation counts at short lengths, at a long one, over what a device can do.
//! Writes the table of docs/building-for-gpus.md.

use std::fmt::Write;
use std::path::Path;

use super::counts::{Counted, by_kernel};
use super::emulated::{Emulated, with_machine};
use super::rows::tests as rows;
use crate::attend::cuda::tests as attention;
use crate::cpu::matmul_format::MatmulFormat;
use crate::delta_rule::cuda::tests as delta;
use crate::diagonal_scan::cuda::tests as scan;
use crate::linear_attention::cuda::tests as linear;

/// An H100 (SXM): NVIDIA's data sheet, and for the cache what others measured.
mod h100 {
    /// Streaming multiprocessors.
    pub const MULTIPROCESSORS: f64 = 132.0;
    /// Bytes per second of its memory, and of the cache in front of it.
    pub const MEMORY: f64 = 3.35e12;
    pub const CACHE: f64 = 5.5e12;
    /// Multiply-adds per second: half of 67 TFLOP/s in f32 and of 989 TFLOP/s of bf16 in tensor cores.
    pub const PRODUCTS: f64 = 33.5e12;
    pub const FRAGMENTS: f64 = 494.5e12;
    /// Bytes per second of all shared memories: 128 per clock, as many as there are multiply-adds of f32.
    pub const INSIDE: f64 = 33.5e12;
    /// Bytes per second between the cache and all multiprocessors, 64 per clock each, where few of them have blocks.
    pub const PORTS: f64 = INSIDE / 2.0;
    /// Bytes of shared memory of a multiprocessor, and what a block takes besides its own; threads.
    pub const SHARED: f64 = 228.0 * 1024.0;
    pub const RESERVED: f64 = 1024.0;
    pub const THREADS: usize = 2048;
}

/// A call whose kernels are counted, on the machine of this thread.
struct Call {
    name: &'static str,
    /// Length of what is counted first.
    unit: usize,
    /// Heads, of which one is counted.
    heads: f64,
    run: fn(usize),
}

/// Positions of the calls in the table.
const LENGTH: usize = 4096;

const fn call(name: &'static str, unit: usize, run: fn(usize)) -> Call {
    Call { name, unit, heads: 8.0, run }
}

const CALLS: &[Call] = &[
    call("softmax attention", 128, |len| attention::pass(len, MatmulFormat::F32, false)),
    call("softmax attention, bf16", 128, |len| attention::pass(len, MatmulFormat::Bf16, false)),
    call("relative positions, causal", 128, |len| attention::pass(len, MatmulFormat::F32, true)),
    call("linear attention", 256, |len| linear::pass(len, linear::Sums::Whole, false)),
    call("linear attention, causal", 64, |len| linear::pass(len, linear::Sums::Whole, true)),
    call("decay per head, causal", 64, |len| linear::pass(len, linear::Sums::PerHead, true)),
    call("decay per channel, causal", 64, |len| {
        linear::pass(len, linear::Sums::PerChannel { separate: false }, true);
    }),
    call("delta rule with decays", 32, delta::pass),
    Call { heads: 4.0, ..call("diagonal scan, 512 states", 64, scan::pass) },
    Call { heads: 1.0, ..call("rows of 512", 64, rows::pass) },
];

impl Call {
    /// Its kernels at a length.
    fn count(&self, len: usize) -> Vec<Counted> {
        by_kernel(with_machine(Emulated::counting(), || (self.run)(len)).counted())
    }

    /// Its kernels at LENGTH.
    fn predict(&self) -> Vec<Counted> {
        let counted = [1, 2, 3, 4].map(|units| self.count(units * self.unit));
        let kernels = 0..counted[0].len();
        let at = |kernel: usize, units: f64| {
            Counted::at_length([0, 1, 2].map(|index| &counted[index][kernel]), units)
        };
        for kernel in kernels.clone() {
            let (said, found) = (at(kernel, 4.0), &counted[3][kernel]);
            assert!(
                said.gap(found) < 0.02,
                "{} at four units: {said:?} from one to three, {found:?}",
                self.name
            );
        }
        let units = LENGTH as f64 / self.unit as f64;
        kernels.map(|kernel| at(kernel, units).times(self.heads)).collect()
    }
}

/// What a kernel takes on the device.
struct Time {
    /// Blocks that a multiprocessor has shared memory and threads for.
    resident: f64,
    seconds: f64,
    /// What its memory and its multiply-adds alone would take, whichever is longer, over `seconds`.
    share: f64,
    bound: String,
}

impl Time {
    fn of(kernel: &Counted) -> Self {
        use h100::*;
        let resident =
            (SHARED / (kernel.shared + RESERVED)).floor().min((THREADS / crate::cuda::THREADS) as f64);
        // the multiprocessor with the most blocks is the last
        let blocks = kernel.blocks / kernel.launches;
        let uneven = (blocks / MULTIPROCESSORS).ceil() * MULTIPROCESSORS / blocks;
        let sum = |[read, written]: [f64; 2]| read + written;
        let within = [
            (sum(kernel.cache) / PORTS, "cache"),
            (kernel.products / PRODUCTS, "multiply-adds"),
            (kernel.fragments / FRAGMENTS, "tensor cores"),
            (sum(kernel.inside) / INSIDE, "shared memory"),
        ];
        let busiest = within.into_iter().fold((0.0, ""), |a, b| if b.0 > a.0 { b } else { a });
        let (memory, cache) = (sum(kernel.memory) / MEMORY, sum(kernel.cache) / CACHE);
        let mut bound = (uneven * busiest.0, busiest.1.to_owned());
        if uneven > 1.1 {
            let _ = write!(bound.1, ", {blocks:.0} blocks");
        }
        for (seconds, name) in [(cache, "cache"), (memory, "memory")] {
            if seconds >= bound.0 {
                bound = (seconds, name.to_owned());
            }
        }
        let limit = within[1].0.max(within[2].0).max(memory);
        Self { resident, seconds: bound.0, share: limit / bound.0, bound: bound.1 }
    }
}

/// Three digits.
fn short(number: f64) -> String {
    let digits = if number == 0.0 { 0 } else { (2 - number.log10().floor() as i32).clamp(0, 4) };
    format!("{number:.*}", digits as usize)
}

fn table() -> String {
    let mut text = String::from(
        "| call | kernel | memory, MB | cache, MB | multiply-adds, 10⁹ | blocks | resident | ms | share | bound by |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for call in CALLS {
        for kernel in call.predict() {
            let Time { resident, seconds, share, bound } = Time::of(&kernel);
            let sum = |[read, written]: [f64; 2]| short((read + written) / 1e6);
            let _ = writeln!(
                text,
                "| {} | `{}` | {} | {} | {} | {:.0} | {resident} | {} | {:.0} % | {bound} |",
                call.name,
                kernel.kernel,
                sum(kernel.memory),
                sum(kernel.cache),
                short((kernel.products + kernel.fragments) / 1e9),
                kernel.blocks / kernel.launches,
                short(1e3 * seconds),
                100.0 * share,
            );
        }
    }
    text
}

const BEGIN: &str = "<!-- expected times: written by a test, as said below them -->\n";
const END: &str = "<!-- end of expected times -->\n";

#[test]
#[ignore = "the emulation takes minutes; with EFFATTN_BLESS=1 it writes the table of docs/building-for-gpus.md"]
fn the_table_of_expected_times_is_what_is_counted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/building-for-gpus.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("a table of expected times");
    let (_, behind) = rest.split_once(END).expect("its end");
    let renewed = [before, BEGIN, "\n", &table(), "\n", END, behind].concat();
    if std::env::var_os("EFFATTN_BLESS").is_some() {
        std::fs::write(&path, &renewed).unwrap();
    }
    assert!(
        page == renewed || std::env::var_os("EFFATTN_BLESS").is_some(),
        "EFFATTN_BLESS=1 renews {path:?}"
    );
}

/// Formulas of a few kernels, one head of 64 columns: bytes that must be read and written, and multiply-adds.
#[test]
fn counts_are_those_of_formulas() {
    if !super::emulated::TRACED {
        return;
    }
    let n = 128.0;
    let (row, square) = (4.0 * 64.0 * n, 64.0 * n * n);
    let of = |call: &Call, kernel: &str| {
        let kernels = call.count(n as usize);
        kernels.into_iter().find(|counted| counted.kernel == kernel).expect("the kernel")
    };
    // queries, keys, values and the output; largest logit and sum of every query
    let forward = of(&CALLS[0], "attend_forward");
    // a product of f32 is three of tf32, which take as long as six of bf16
    assert_eq!((forward.fragments, forward.memory[1], forward.blocks), (12.0 * square, row + 8.0 * n, 2.0));
    assert!(forward.memory[0] >= 3.0 * row && forward.memory[0] < 3.0 * row + 16.0 * n, "{forward:?}");
    // every tile of 64 queries reads all keys and values
    assert!(
        forward.cache[0] >= row + n / 64.0 * 2.0 * row
            && forward.cache[0] < 1.1 * (row + n / 64.0 * 2.0 * row)
    );
    let fragments = of(&CALLS[1], "attend_back_keys");
    assert_eq!((fragments.fragments, fragments.memory[1]), (4.0 * square, 2.0 * row));
    // q . k within a chunk of 64 and times values there, and q times the state; once more for the gradients of values
    let out = of(&CALLS[4], "linear_out");
    let products = out.launches * 3.0 * 64.0 * 64.0 * n;
    assert!((out.products - products).abs() < 0.01 * products, "{out:?}");
}
