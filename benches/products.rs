//! Matrix products: what a step can reach at most on this machine. `cargo bench --bench products`; "elem" are floating point
//! operations.
//!
//! `products` are square ones on one thread and on all, in f32 and of bf16 operands. `shapes` are those of a step: rows of a
//! document times the weights of a layer forward, the gradient of its input, and that of its weight; `own` is our kernel for
//! f32 (weights packed in the call), `gemm` the crate, which chooses its vector instructions for itself. benches/peer/products.py
//! prints the same shapes for NumPy (OpenBLAS) and PyTorch (MKL).
//!
//! Others that use the machine make single numbers worthless: pin the process to a core, alternate, and take the least time.

#![allow(missing_docs)] // the functions of criterion's macros have none

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use effattn::device::threads;
use effattn::kernel::cpu::bf16;
use effattn::kernel::cpu::dense;
use effattn::kernel::cpu::gemm::{Mat, MatMut, Threads, by_crate, gemm_exact};
use effattn::kernel::cpu::panel::{self, Panels};
use rayon::prelude::*;

const SIZE: usize = 1024;

/// Rows, and inputs and outputs of layers: those of `lra-repo` (width 256) and of `ls-lra` (width 64).
const ROWS: [usize; 2] = [1024, 4096];
const LAYERS: [[usize; 2]; 5] = [[256, 256], [256, 1024], [1024, 256], [64, 64], [64, 128]];

/// One thread, and all that the process has.
fn counts() -> Vec<usize> {
    let all = threads::available();
    if all > 1 { vec![1, all] } else { vec![1] }
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 19) as f32 - 9.0).collect()
}

fn products(criterion: &mut Criterion) {
    threads::set(threads::available(), threads::PlainOperations::OnCaller);
    let numbers = numbers(SIZE * SIZE);
    let factor = Mat::new(&numbers, SIZE, SIZE);
    let mut group = criterion.benchmark_group("products");
    for count in counts() {
        let mut results = vec![vec![0.0; SIZE * SIZE]; count];
        group.throughput(Throughput::Elements((2 * SIZE * SIZE * SIZE * count) as u64));
        type Multiply = fn(MatMut, Mat, Mat);
        let kinds: [(&str, Multiply); 2] = [
            ("f32", |c, a, b| gemm_exact(c, a, b, 1.0, None, Threads::One)),
            ("bf16", |c, a, b| bf16::gemm(c, a, b, 1.0, None)),
        ];
        for (name, multiply) in kinds {
            // as the kernels do: every thread its own products
            group.bench_function(BenchmarkId::new(name, format!("{count} threads")), |bencher| {
                bencher.iter(|| {
                    results.par_iter_mut().for_each(|c| multiply(MatMut::new(c, SIZE, SIZE), factor, factor));
                });
            });
        }
    }
}

/// One layer on some rows.
struct Layer {
    rows: usize,
    inp: usize,
    out: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    result: Vec<f32>,
}

impl Layer {
    fn new(rows: usize, [inp, out]: [usize; 2]) -> Self {
        let result = vec![0.0; (rows * inp.max(out)).max(inp * out)];
        Self {
            rows,
            inp,
            out,
            x: numbers(rows * inp),
            w: numbers(inp * out),
            dy: numbers(rows * out),
            result,
        }
    }

    /// y = x W^T, dx = dy W, dW = dy^T x.
    fn factors(&self, part: &str) -> [Mat<'_>; 2] {
        let x = Mat::new(&self.x, self.rows, self.inp);
        let w = Mat::new(&self.w, self.out, self.inp);
        let dy = Mat::new(&self.dy, self.rows, self.out);
        match part {
            "forward" => [x, w.t()],
            "input gradient" => [dy, w],
            _ => [dy.t(), x],
        }
    }

    fn by_crate(&mut self, part: &str, threads: Threads) {
        let mut result = std::mem::take(&mut self.result);
        let [a, b] = self.factors(part);
        let c = MatMut::new(&mut result, a.rows(), b.cols());
        by_crate(c, a, b, 1.0, None, threads);
        self.result = result;
    }

    /// As kernels do: chunks of rows by all threads.
    fn by_own(&mut self, part: &str) {
        let mut result = std::mem::take(&mut self.result);
        let [a, b] = self.factors(part);
        let (rows, width) = (a.rows(), b.cols());
        let c = &mut result[..rows * width];
        if part == "weight gradient" {
            panel::add_outer(c, a.t(), b, false, false);
        } else {
            let panels = Panels::new(b, false);
            let chunks = dense::chunks(rows, self.inp + self.out);
            c.par_chunks_mut(chunks.size * width).enumerate().for_each(|(index, c)| {
                panels.multiply(a.lines(chunks.range(index)), c, width, false);
            });
        }
        self.result = result;
    }
}

fn shapes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("shapes");
    for count in counts() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build().expect("threads");
        for (rows, sizes) in ROWS.iter().flat_map(|&rows| LAYERS.map(|sizes| (rows, sizes))) {
            let mut layer = Layer::new(rows, sizes);
            group.throughput(Throughput::Elements(2 * (rows * sizes[0] * sizes[1]) as u64));
            for part in ["forward", "input gradient", "weight gradient"] {
                let name = format!("{part}, {rows} rows, {} to {}, {count} threads", sizes[0], sizes[1]);
                let threads = if count > 1 { Threads::All } else { Threads::One };
                group.bench_function(BenchmarkId::new("gemm", &name), |bencher| {
                    pool.install(|| bencher.iter(|| layer.by_crate(part, threads)));
                });
                group.bench_function(BenchmarkId::new("own", &name), |bencher| {
                    pool.install(|| bencher.iter(|| layer.by_own(part)));
                });
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(2));
    targets = products
}
criterion_group! {
    name = shapes_of_a_step;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(400));
    targets = shapes
}
criterion_main!(benches, shapes_of_a_step);
