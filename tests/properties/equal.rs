//! Results that must be equal: fused and composed, packed and separate, a full pattern and full attention.

use effattn::attention::knobs::Knobs;
use effattn::attention::{self, Property};
use effattn::kernel::KernelMode;

use super::run::{Findings, Inputs, MODES, Results, Run, differs, masks, row_counts};
use super::zoo::{Case, HEAD_DIM, HEADS, cases};

fn rows_that_count<'a>(case: &'a Case, mask: Option<&'a [f32]>) -> impl Fn(usize, usize, usize) -> f32 + 'a {
    move |sample, _, query| f32::from(u8::from(row_counts(case, mask, sample, query)))
}

/// The first output or gradient that differs by more than `tolerance` of its largest entry (but at least of
/// 0.1: a gradient that is rounding alone has no digits to compare).
fn compare(case: &Case, mask: Option<&[f32]>, a: &Results, b: &Results, tolerance: f32) -> Option<String> {
    let counts = |sample, _, query| row_counts(case, mask, sample, query);
    if let Some(row) = differs(case, (&a.out, &b.out), tolerance, counts) {
        return Some(format!("out {row:?}"));
    }
    let grads = a.grads.iter().map(|(name, grad)| (name.as_str(), grad, &b.grads[name]));
    for (name, a, b) in grads.chain([("out_cls", &a.cls, &b.cls)]) {
        let largest = a.iter().fold(0.1f32, |m, x| m.max(x.abs()));
        if a.iter().zip(b).any(|(a, b)| (a - b).abs() > tolerance * largest) {
            return Some(name.to_string());
        }
    }
    None
}

#[test]
fn fused_and_composed_agree() {
    let mut findings = Findings::default();
    let (mut compared, mut ill_conditioned) = (0usize, 0usize);
    for n in [2, 9, 21, 65] {
        // with one key every weight is 1 and the gradient of q and k is rounding only: nothing to compare
        for case in cases(n).into_iter().filter(|case| case.keys > 1) {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(&case, 8);
            for mask in masks(&case) {
                compared += 1;
                let mask = mask.as_deref();
                let weigh = rows_that_count(&case, mask);
                let [fused, composed] = MODES.map(|mode| {
                    Run { mask, weigh: &weigh, ..Run::new(&case, &params, &inputs, mode) }.results()
                });
                let shift = |from: &Results, to: &Results| compare(&case, mask, from, to, 2e-4);
                let Some(what) = shift(&composed, &fused) else { continue };
                // quotients whose denominators nearly cancel have no digits: rounding the inputs moves them too
                let rounded = inputs.rounded();
                let ill_posed = MODES.iter().any(|&mode| {
                    let run = Run { mask, weigh: &weigh, ..Run::new(&case, &params, &rounded, mode) };
                    shift(&composed, &run.results()).is_some()
                });
                ill_conditioned += usize::from(ill_posed);
                if !ill_posed {
                    findings.add(format!("{case} mask={}: {what}", mask.is_some()));
                }
            }
        }
    }
    assert!(
        ill_conditioned * 50 < compared,
        "{ill_conditioned} of {compared} comparisons were ill-conditioned"
    );
    findings.finish();
}

#[test]
fn packed_rows_and_separate_tensors_agree() {
    let mut findings = Findings::default();
    for n in [2, 9, 21] {
        let packable = |case: &&Case| {
            let projections = (case.entry.needs)(&case.knobs).projections;
            case.keys == case.queries && projections.packable(HEADS, HEAD_DIM)
        };
        for case in cases(n).iter().filter(packable) {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(case, 9);
            for mask in masks(case) {
                let mask = mask.as_deref();
                let weigh = rows_that_count(case, mask);
                for mode in MODES {
                    let [separate, packed] = [false, true].map(|packed| {
                        Run { mask, packed, weigh: &weigh, ..Run::new(case, &params, &inputs, mode) }
                            .results()
                    });
                    if let Some(what) = compare(case, mask, &separate, &packed, 2e-4) {
                        findings.add(format!("{case} {mode:?} mask={}: {what}", mask.is_some()));
                    }
                }
            }
        }
    }
    findings.finish();
}

/// Settings under which a mechanism is full attention at length 12.
const FULL: &[(&str, bool, &str)] = &[
    ("window", false, "w=12"),
    ("window", false, "w=200"),
    ("window", true, "w=12"),
    ("window", true, "w=200"),
    ("ls", false, "w=12,r=0,dual_ln=false"),
    ("ls", true, "w=64,r=0,dual_ln=false"),
    ("local", false, "block=12"),
    ("local", false, "block=512"),
    ("local", true, "block=12"),
    ("longformer", false, "left=11,right=11,global="),
    ("longformer", false, "left=100,right=100,global="),
    ("longformer", true, "left=11,right=0,global="),
    ("bigbird", false, "block=3"),
    ("bigbird", false, "block=64"),
    ("sparse", false, "block=12,c=2"),
    ("sparse", true, "block=12,c=2"),
    ("sparse", false, "block=4,c=4"),
    ("sparse", true, "block=1,c=0"),
    ("nystrom", false, "landmarks=12"),
    ("nystrom", false, "landmarks=128"),
    ("sinkhorn", false, "block=12,combine=concat"),
    ("sinkhorn", false, "block=64,combine=concat"),
];

#[test]
fn a_full_pattern_through_every_sparse_path_is_full_attention() {
    let n = 12;
    let full = Case {
        entry: attention::find("full").expect("full attention"),
        knobs: Knobs::defaults(&[]),
        causal: false,
        queries: n,
        keys: n,
        cls: false,
    };
    let mut findings = Findings::default();
    for &(name, causal, knobs) in FULL {
        let Some(entry) = attention::find(name) else { continue };
        let pairs = knobs.split(',').filter_map(|pair| pair.split_once('='));
        let knobs = Knobs::parse(name, entry.knobs, pairs).unwrap_or_else(|error| panic!("{error}"));
        let case = Case { entry, knobs, causal, ..full.clone() };
        let full = Case { causal, ..full.clone() };
        let inputs = Inputs::random(&full, 10);
        let mut own = Inputs::random(&case, 10);
        own.0.extend(inputs.0.clone());
        let (params, none) = (case.params().expect("parameters"), full.params().expect("parameters"));
        for mask in masks(&full) {
            let mask = mask.as_deref();
            let weigh = rows_that_count(&full, mask);
            let want = Run { mask, weigh: &weigh, ..Run::new(&full, &none, &inputs, KernelMode::Composed) }
                .results();
            for mode in MODES {
                let got = Run { mask, weigh: &weigh, ..Run::new(&case, &params, &own, mode) }.results();
                if let Some(what) = compare(&full, mask, &want, &got, 1e-5) {
                    findings.add(format!("{case} {mode:?} mask={}: {what} is not full's", mask.is_some()));
                }
            }
        }
    }
    findings.finish();
}

#[test]
fn every_sparse_mechanism_is_compared_with_full_attention() {
    // whose output is no softmax over the plain keys, whatever the knobs
    let others = [
        "full",
        "dp",
        "linformer",
        "linformer-window",
        "performer",
        "reformer",
        "transformer-xl",
        "ls2d",
        "cosformer",
        "relu-linear",
        "identity-linear",
        "leakyrelu-linear",
        "linear",
        "rfa",
        "synthesizer",
        "rope",
        "gqa",
        "streaming",
        "luna",
        "retention",
        "gla",
        "mamba2",
        "based",
        "deltanet",
        "gated-deltanet",
        "s5",
        "lru",
        "mega",
        "mega-ema",
        "aft-simple",
        "aft-local",
        "fnet",
    ];
    for entry in attention::TABLE {
        let named = FULL.iter().any(|line| line.0 == entry.name) || others.contains(&entry.name);
        assert!(named, "{} is neither compared with full attention nor listed as something else", entry.name);
    }
}

#[test]
fn exceptions_name_a_line_of_the_specification() {
    for entry in attention::entries() {
        for exception in entry.exceptions {
            let property: Property = exception.property;
            assert!(exception.reason.contains("SPEC-"), "{} {property:?}: {}", entry.name, exception.reason);
        }
    }
}
