//! Values and gradients against a dense f64 evaluation of [`Pattern::visible`].

pub(super) mod naive;

use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::{Attend, attend};
use crate::KernelMode;
use crate::heads::Qkv;
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};
use naive::{Case, Form, Operands, check, evaluate, operands};

fn group(queries: Span, keys: &[(Span, Rule)]) -> QueryGroup {
    QueryGroup { queries, keys: keys.iter().map(|&(span, rule)| KeySpan { span, rule }).collect() }
}

/// Groups that share nothing: strided queries, strided and far keys, a query in no group, a group
/// without keys, slots in two spans.
fn scattered() -> Pattern {
    let every = |start, len, step| Span { start, len, step };
    let band = |left, right, skip| Rule::Band { left, right, skip };
    let groups = vec![
        group(every(0, 4, 3), &[(every(1, 5, 4), Rule::All), (every(23, 2, 2), Rule::All)]),
        group(every(1, 3, 3), &[(Span::range(2, 19), band(Some(4), Some(3), Some(2)))]),
        group(every(2, 2, 3), &[]),
        group(Span::range(12, 19), &[(Span::range(0, 9), Rule::CAUSAL), (Span::range(22, 23), Rule::All)]),
    ];
    Pattern::shared(20, 20, 6, 0, groups)
}

/// Queries and keys of a group far from each other: no tile has neighbours only.
fn far_apart() -> Pattern {
    let every = |start, len, step| Span { start, len, step };
    let band = Rule::Band { left: Some(150), right: Some(0), skip: Some(3) };
    let groups = vec![
        group(every(0, 50, 4), &[(Span::range(0, 120), Rule::CAUSAL), (every(121, 20, 5), Rule::CAUSAL)]),
        group(every(1, 50, 4), &[(every(2, 110, 2), band)]),
    ];
    Pattern::shared(200, 230, 0, 30, groups)
}

/// Groups of one tile, each of which sees little where the other sees most: more candidates than there are keys.
fn uneven() -> Pattern {
    let keys = |start, end| (Span::range(start, end), Rule::All);
    let groups = vec![
        group(Span::range(0, 8), &[keys(0, 1), keys(1, 60)]),
        group(Span::range(8, 16), &[keys(0, 59), keys(59, 60)]),
    ];
    Pattern::shared(16, 60, 0, 0, groups)
}

pub(super) fn cases() -> Vec<Case> {
    let segments = |segment, rank| Rule::EarlierSegments { segment, rank };
    let mut cases = Vec::new();
    for (n, t, causal, d) in [
        (1, 1, false, 1),
        (2, 2, true, 3),
        (5, 9, false, 8),
        (37, 37, true, 20),
        (70, 131, true, 64),
        (65, 65, false, 33),
    ] {
        cases.push(Case::new(Pattern::full(n, t, causal), 2, 3, d));
        cases.push(Case::new(Pattern::full(n, t, causal), 2, 1, d).hidden(0.5));
    }
    for (n, w, causal) in [(13, 1, false), (50, 8, false), (97, 16, true), (33, 3, true), (3, 32, true)] {
        cases.push(Case::new(Pattern::window(n, n, w, causal), 1, 2, 16).hidden(0.3));
        cases.push(Case::new(Pattern::window(n, n, w, causal).with_slots(5, Rule::All), 2, 2, 12));
    }
    cases
        .push(Case::new(Pattern::window(50, 66, 8, true).with_slots(8, segments(8, 1)), 2, 2, 9).hidden(0.4));
    cases.push(Case::new(Pattern::blind(19, 19, false).with_slots(3, Rule::All), 1, 2, 8));
    cases.push(Case::new(uneven(), 1, 2, 8));
    cases.push(Case::new(scattered(), 2, 2, 8));
    cases.push(Case::new(scattered(), 2, 2, 8).hidden(0.6));
    let (mut a, b) = (scattered(), Pattern::full(20, 20, true).with_slots(6, Rule::All));
    a.heads.extend(b.heads);
    cases.push(Case::new(a, 2, 2, 8).hidden(0.2));
    for (n, t, w) in [(1, 1, 4), (9, 15, 4), (70, 90, 100), (70, 134, 24)] {
        let pattern = Pattern::window(n, t, w, true);
        cases.push(Case::new(pattern, 2, 2, 8).relative(None));
        let pattern = Pattern::window(n, t, w, true).with_slots(t.div_ceil(4) * 2, segments(4, 2));
        cases.push(Case::new(pattern, 2, 2, 8).relative(Some((4, 2))).hidden(0.2));
    }
    cases.push(Case::new(Pattern::full(40, 60, true), 2, 2, 8).relative(None));
    cases.push(Case::new(far_apart(), 2, 2, 8).relative(None).hidden(0.2));
    let mut a = far_apart();
    a.heads.extend(Pattern::full(200, 230, true).heads);
    cases.push(Case::new(a, 2, 2, 8).relative(None));
    cases.push(Case::new(Pattern::full(70, 131, true), 3, 2, 20).biased());
    cases.push(Case::new(Pattern::full(150, 150, false), 2, 1, 33).biased().hidden(0.3));
    cases.push(Case::new(scattered(), 2, 2, 8).biased());
    let pattern = Pattern::window(97, 97, 16, true).with_slots(5, Rule::All);
    cases.push(Case::new(pattern, 2, 2, 12).biased().padding(60));
    cases.push(Case::new(Pattern::full(300, 300, false), 2, 2, 20).padding(230));
    cases.push(Case::new(Pattern::full(150, 220, true), 2, 1, 8).padding(140).relative(None));
    let pattern = Pattern::window(260, 260, 16, false).with_slots(5, Rule::All);
    cases.push(Case::new(pattern, 2, 2, 12).padding(180).hidden(0.3));
    cases
}

/// Patterns of all kinds with weights dropped.
pub(crate) fn dropped() -> Vec<Case> {
    let segments = Rule::EarlierSegments { segment: 4, rank: 2 };
    let mut mixed = scattered();
    mixed.heads.extend(Pattern::full(20, 20, true).with_slots(6, Rule::All).heads);
    vec![
        Case::new(Pattern::full(70, 131, true), 2, 3, 20).dropout(0.4),
        Case::new(Pattern::window(97, 97, 16, false).with_slots(5, Rule::All), 2, 2, 12)
            .hidden(0.3)
            .dropout(0.1),
        Case::new(mixed, 2, 2, 8).hidden(0.2).dropout(0.5),
        Case::new(far_apart(), 1, 2, 8).dropout(0.9),
        Case::new(Pattern::full(70, 70, false), 2, 2, 8).dropout(0.4).biased(),
        Case::new(Pattern::window(70, 134, 24, true).with_slots(68, segments), 2, 2, 8)
            .relative(Some((4, 2)))
            .dropout(0.3),
    ]
}

#[test]
fn the_twin_is_the_definition() {
    for (seed, case) in cases().iter().chain(&dropped()).enumerate() {
        check(case, seed as u64, KernelMode::Composed, 1e-5);
    }
}

#[test]
fn the_fused_kernel_is_the_definition() {
    for (seed, case) in cases().iter().chain(&dropped()).enumerate() {
        check(case, seed as u64, KernelMode::Fused, 1e-5);
    }
}

/// Bits of all results.
fn bits(case: &Case, seed: u64, form: Form) -> Vec<Vec<u32>> {
    let results = evaluate(case, seed, form, KernelMode::Fused).unwrap();
    let flat = results.iter().map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    flat.map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn threads_do_not_change_the_bits() {
    let mut cases = vec![
        Case::new(Pattern::full(200, 200, true), 1, 1, 20).hidden(0.1),
        Case::new(Pattern::full(300, 300, true), 3, 1, 20).biased(),
        Case::new(Pattern::full(300, 400, false), 1, 3, 33),
        Case::new(Pattern::window(300, 300, 8, false).with_slots(70, Rule::All), 1, 1, 16),
        Case::new(scattered(), 1, 1, 8),
    ];
    cases.extend(self::cases());
    cases.extend(dropped());
    for (seed, case) in cases.iter().enumerate() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bits(case, seed as u64, Form::Separate))
        };
        let one = run(1);
        for threads in [1, 2, 5] {
            assert_eq!(one, run(threads), "{threads} threads: {:?}", case.pattern);
        }
    }
}

#[test]
fn extreme_inputs_give_finite_results() {
    for size in [0.0, 1e4, 1e12] {
        for pattern in
            [Pattern::window(70, 70, 4, false), Pattern::full(70, 70, true).with_slots(3, Rule::All)]
        {
            let case = Case::new(pattern, 1, 2, 8).hidden(0.5).size(size);
            for mode in [KernelMode::Fused, KernelMode::Composed] {
                for x in evaluate(&case, 1, Form::Packed, mode).unwrap() {
                    let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert!(x.iter().all(|x| x.is_finite()), "{mode:?} {size}");
                }
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zeros_and_no_gradient() {
    let case = Case::new(Pattern::window(70, 70, 2, false), 1, 2, 8).hidden(1.0);
    for mode in [KernelMode::Fused, KernelMode::Composed] {
        for x in evaluate(&case, 1, Form::Packed, mode).unwrap() {
            assert!(x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|&x| x == 0.0), "{mode:?}");
        }
    }
}

#[test]
fn logits_of_ten_thousands_keep_their_ties() {
    // two equal keys whose logit leaves no digit for the sum of weights
    let row = |x: f32| Tensor::full(x, (1, 1, 2, 4), &Device::Cpu).unwrap();
    let v = Var::from_tensor(
        &Tensor::new(&[[[[1f32, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 0.0]]]], &Device::Cpu).unwrap(),
    );
    let (v, pattern) = (v.unwrap(), Pattern::full(2, 2, false));
    let qkv = Qkv::separate(row(1e4), row(1e4), v.as_tensor().clone());
    let out = attend(&qkv, &Attend::plain(&pattern, None, 4)).unwrap().split().unwrap();
    assert_eq!(out.contiguous().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2.0; 8]);
    let grads = out.sum_all().unwrap().backward().unwrap();
    assert_eq!(grads.get(&v).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [1.0; 8]);
}

#[test]
fn garbage_at_hidden_keys_changes_nothing() {
    let case = Case::new(Pattern::window(40, 40, 4, false), 1, 1, 8);
    let Operands { named, grad_out, .. } = operands(&case, 1).unwrap();
    let keep: Vec<f32> = (0..40).map(|i| f32::from(i % 3 != 1)).collect();
    let mask = Tensor::new(keep.as_slice(), &Device::Cpu).unwrap();
    let run = |garbage: f32| {
        let spoil =
            mask.reshape((1, 1, 40, 1)).unwrap().broadcast_as((1, 1, 40, 8)).unwrap().eq(0f32).unwrap();
        let bad = Tensor::full(garbage, (1, 1, 40, 8), &Device::Cpu).unwrap();
        let vars: Vec<Var> = named
            .iter()
            .map(|(name, x)| if *name == "q" { x.clone() } else { spoil.where_cond(&bad, x).unwrap() })
            .map(|x| Var::from_tensor(&x).unwrap())
            .collect();
        let tensor = |at: usize| vars[at].as_tensor().clone();
        let mask = mask.reshape((1, 40)).unwrap();
        let call = Attend::plain(&case.pattern, Some(&mask), 8);
        let out = attend(&Qkv::separate(tensor(0), tensor(1), tensor(2)), &call).unwrap().split().unwrap();
        let grads = (&out * &grad_out).unwrap().sum_all().unwrap().backward().unwrap();
        let all = std::iter::once(out).chain(vars.iter().map(|var| grads.get(var).unwrap().clone()));
        all.map(|x| x.contiguous().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
            .collect::<Vec<_>>()
    };
    let clean = run(0.0);
    for garbage in [1.0, f32::MAX, f32::INFINITY, f32::NAN] {
        assert_eq!(clean, run(garbage), "{garbage}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let zeros = |n: usize| Tensor::zeros((1, 2, n, 4), DType::F32, &Device::Cpu).unwrap();
    let (short, long) = (Pattern::full(3, 3, false), Pattern::full(4, 4, false));
    let mask = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
    let qkv = Qkv::separate(zeros(4), zeros(4), zeros(4));
    let uneven = Qkv::separate(zeros(4), zeros(4), zeros(3));
    assert!(attend(&qkv, &Attend::plain(&short, None, 4)).is_err());
    assert!(attend(&qkv, &Attend::plain(&long, Some(&mask), 4)).is_err());
    assert!(attend(&uneven, &Attend::plain(&long, None, 4)).is_err());
    assert!(attend(&qkv, &Attend::plain(&long, None, 4)).is_ok());
}

/// Any pattern over 1..=40 queries: groups of strided queries, spans that share no key within a group.
fn patterns() -> impl Strategy<Value = Pattern> {
    let rule = prop_oneof![
        Just(Rule::All),
        (proptest::option::of(0usize..30), proptest::option::of(0usize..30), proptest::option::of(1usize..5))
            .prop_map(|(left, right, skip)| Rule::Band { left, right, skip }),
    ];
    let slots = prop_oneof![
        Just(Rule::All),
        (1usize..6, 1usize..3).prop_map(|(segment, rank)| Rule::EarlierSegments { segment, rank }),
    ];
    let spans = proptest::collection::vec((0usize..4, 0usize..12, 1usize..4, rule), 0..4);
    let groups = proptest::collection::vec(
        (0usize..3, 1usize..9, 1usize..4, spans, proptest::option::of(slots)),
        0..7,
    );
    (1usize..40, 0usize..60, 0usize..6, 0usize..30, groups).prop_map(
        |(queries, keys, slots, offset, drawn)| {
            let mut next = 0;
            let mut groups = Vec::new();
            for (gap, len, step, spans, rule) in drawn {
                let start = next + gap;
                let fit = queries.saturating_sub(start).div_ceil(step).min(len);
                let seen = Span { start, len: fit, step };
                next = start + fit.max(1) * step;
                let mut key = 0;
                let mut all = Vec::new();
                for (gap, len, step, rule) in spans {
                    let start = key + gap;
                    let fit = keys.saturating_sub(start).div_ceil(step).min(len);
                    key = start + fit.max(1) * step;
                    all.push((Span { start, len: fit, step }, rule));
                }
                all.extend(rule.map(|rule| (Span::range(keys, keys + slots), rule)));
                groups.push(group(seen, &all));
            }
            Pattern::shared(queries, keys, slots, offset, groups)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_pattern_is_computed_as_defined(pattern in patterns(), d in 1usize..20, seed in 0u64..1000, holes: bool) {
        let hidden = if holes { 0.4 } else { 0.0 };
        let case = Case::new(pattern, 1, 2, d).hidden(hidden);
        check(&case, seed, KernelMode::Fused, 1e-5);
        check(&case, seed, KernelMode::Composed, 1e-5);
    }
}
