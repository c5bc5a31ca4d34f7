//! Attention of every mechanism, fused kernel beside its composed twin, by length: `cargo bench --bench mechanisms`.
//!
//! One sample, 4 heads of 64, knobs at their defaults, without the projections around. `train` is forward and backward.
//! A part of it: `cargo bench --bench mechanisms -- infer/ls/1024`.

#![allow(missing_docs)] // the functions of criterion's macros have none

use std::time::Duration;

use candle_core::{Device, Result, Tensor, Var};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use effattn::attention::knobs::Knobs;
use effattn::attention::{AttentionInput, Mechanism, MechanismConfig, MechanismEntry, Shape, TABLE};
use effattn::device::rng::RngStream;
use effattn::device::{alloc, threads};
use effattn::kernel::heads::{PackedLayout, Qkv};
use effattn::kernel::{KernelMode, with_mode};
use effattn::nn::params::ParamBuilder;

#[global_allocator]
static ALLOCATOR: alloc::CountingAllocator = alloc::CountingAllocator;

const HEADS: usize = 4;
const WIDTH: usize = 256;

/// A mechanism with its inputs.
struct Subject {
    mechanism: Box<dyn Mechanism>,
    rows: Var,
    parts: PackedLayout,
    x: Option<Tensor>,
    global: Option<Qkv>,
}

impl Subject {
    /// `entry` at length `len`; none if it does not take it.
    fn new(entry: &MechanismEntry, len: usize) -> Result<Option<Self>> {
        let knobs = Knobs::defaults(entry.knobs);
        let (head_dim, causal) = (WIDTH / HEADS, !entry.support.bidirectional);
        let (heads, width) = (HEADS, WIDTH);
        let shape = Shape {
            batch: 1,
            heads,
            head_dim,
            width,
            queries: len,
            keys: len,
            causal,
            cls: false,
            grid: None,
        };
        if (entry.validate)(&knobs, &shape).is_err() {
            return Ok(None);
        }
        let needs = (entry.needs)(&knobs);
        if needs.beyond_plain(heads, head_dim).is_some() {
            return Ok(None); // `speed --kernel-only` measures these
        }
        let parts = needs.projections.layout();
        let config = MechanismConfig { knobs, heads, head_dim, width, max_len: len, causal, layer: 0 };
        let mechanism = (entry.build)(&config, &ParamBuilder::seeded(0, &Device::Cpu, true))?;
        let draw = |name: &str, width: usize| {
            RngStream::new(1, name).normal_tensor((1, len, width), 0.0, 1.0, &Device::Cpu)
        };
        let rows = Var::from_tensor(&draw("rows", parts.count * WIDTH)?)?;
        let x = if needs.x { Some(draw("x", WIDTH)?) } else { None };
        let global = match needs.global {
            true => Some(Qkv::Packed { rows: draw("global", 3 * WIDTH)?, heads, parts: PackedLayout::QKV }),
            false => None,
        };
        Ok(Some(Self { mechanism, rows, parts, x, global }))
    }

    fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        let qkv = Qkv::Packed { rows: rows.clone(), heads: HEADS, parts: self.parts };
        let input =
            AttentionInput { x: self.x.as_ref(), global: self.global.as_ref(), ..AttentionInput::new(&qkv) };
        self.mechanism.forward(&input)?.out.merged()
    }

    fn run(&self, train: bool) -> Result<()> {
        if !train {
            self.forward(&self.rows.as_tensor().detach())?;
            return Ok(());
        }
        self.forward(self.rows.as_tensor())?.sum_all()?.backward()?;
        Ok(())
    }
}

fn mechanisms(criterion: &mut Criterion) {
    alloc::keep_pages();
    threads::set(threads::available(), threads::PlainOperations::InPool);
    for (pass, train) in [("infer", false), ("train", true)] {
        for entry in TABLE {
            let mut group = criterion.benchmark_group(format!("{pass}/{}", entry.name));
            for len in [256, 1024] {
                let Some(subject) = Subject::new(entry, len).expect("a subject") else { continue };
                for (name, mode) in [("fused", KernelMode::Fused), ("composed", KernelMode::Composed)] {
                    group.bench_function(BenchmarkId::new(name, len), |bencher| {
                        with_mode(mode, || bencher.iter(|| subject.run(train).expect("a step")));
                    });
                }
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(500));
    targets = mechanisms
}
criterion_main!(benches);
