//! Square matrix products on one thread and on all, in f32 and of bf16 operands: what a step can reach at most on this
//! machine. `cargo bench --bench products`; "elem" are floating point operations.

#![allow(missing_docs)] // the functions of criterion's macros have none

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use effattn::device::threads;
use effattn::kernel::cpu::bf16;
use effattn::kernel::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};
use rayon::prelude::*;

const SIZE: usize = 1024;

fn products(criterion: &mut Criterion) {
    threads::set(threads::available());
    let all = threads::available();
    let numbers: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 19) as f32 - 9.0).collect();
    let factor = Mat::new(&numbers, SIZE, SIZE);
    let mut group = criterion.benchmark_group("products");
    for count in [1, all] {
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

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(2));
    targets = products
}
criterion_main!(benches);
