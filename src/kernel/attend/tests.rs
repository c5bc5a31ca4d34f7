//! Values and gradients against a dense f64 evaluation of [`Pattern::visible`].

use candle_core::{DType, Device, Result, Tensor, Var};
use proptest::prelude::*;

use super::{Attend, Relative, SlotTable, attend};
use crate::device::rng::Stream;
use crate::kernel::heads::{Heads, Parts, Qkv, merge, split};
use crate::kernel::{Mode, with_mode};
use crate::pattern::{Group, KeySpan, Pattern, Rule, Span};

/// Slots under relative positions: length of a segment, slots per segment.
type Segments = Option<(usize, usize)>;

/// One attention call with random operands.
pub(super) struct Case {
    pub pattern: Pattern,
    pub batch: usize,
    pub heads: usize,
    pub d: usize,
    /// Share of hidden keys; whether hidden ones are the last.
    pub hidden: f64,
    pub scale: f64,
    pub relative: Option<Segments>,
    /// Standard deviation of queries and keys.
    pub size: f64,
}

impl Case {
    pub fn new(pattern: Pattern, batch: usize, heads: usize, d: usize) -> Self {
        let scale = 1.0 / (d as f64).sqrt();
        Self { pattern, batch, heads, d, hidden: 0.0, scale, relative: None, size: 1.0 }
    }

    pub fn hidden(self, hidden: f64) -> Self {
        Self { hidden, ..self }
    }

    pub fn relative(self, segments: Segments) -> Self {
        Self { relative: Some(segments), ..self }
    }

    pub fn size(self, size: f64) -> Self {
        Self { size, ..self }
    }
}

/// Names and shapes of the operands of a case, in the order of all results.
fn shapes(case: &Case) -> Vec<(&'static str, Vec<usize>)> {
    let Case { pattern, batch: b, heads: h, d, .. } = case;
    let (b, h, d) = (*b, *h, *d);
    let Pattern { queries, keys, slots, offset, .. } = *pattern;
    let mut shapes =
        vec![("q", vec![b, h, queries, d]), ("k", vec![b, h, keys, d]), ("v", vec![b, h, keys, d])];
    if slots > 0 {
        shapes.extend([("slot_k", vec![b, h, slots, d]), ("slot_v", vec![b, h, slots, d])]);
    }
    if let Some(segments) = case.relative {
        // a few rows short of the furthest distance: distances without a row have no term
        let rows = (offset + queries).saturating_sub(2).max(1);
        shapes.extend([("table", vec![h, rows, d]), ("u", vec![h, d]), ("w", vec![h, d])]);
        if segments.is_some() {
            shapes.push(("slot_table", vec![h, slots.max(2) - 1, d]));
        }
    }
    shapes
}

struct Operands {
    named: Vec<(&'static str, Tensor)>,
    mask: Option<Tensor>,
    grad_out: Tensor,
}

fn operands(case: &Case, seed: u64) -> Result<Operands> {
    let device = &Device::Cpu;
    let named = shapes(case)
        .into_iter()
        .map(|(name, shape)| {
            let size = if matches!(name, "q" | "k" | "slot_k") { case.size } else { 1.0 };
            Ok((name, Stream::new(seed, name).normal_tensor(shape, 0.0, size, device)?))
        })
        .collect::<Result<_>>()?;
    let (b, keys) = (case.batch, case.pattern.keys);
    let mask = (case.hidden > 0.0).then(|| {
        let mut stream = Stream::new(seed, "mask");
        let keep: Vec<f32> =
            (0..b * keys).map(|_| f32::from(stream.uniform(0.0, 1.0) >= case.hidden)).collect();
        Tensor::from_vec(keep, (b, keys), device)
    });
    let shape = (b, case.heads, case.pattern.queries, case.d);
    let grad_out = Stream::new(seed, "grad").normal_tensor(shape, 0.0, 1.0, device)?;
    Ok(Operands { named, mask: mask.transpose()?, grad_out })
}

/// How queries, keys and values reach the call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    Separate,
    Packed,
}

/// The output and the gradients of all operands, [b, h, n, d] where they have heads.
pub(super) fn evaluate(case: &Case, seed: u64, form: Form, mode: Mode) -> Result<Vec<Tensor>> {
    let Operands { named, mask, grad_out } = operands(case, seed)?;
    let get = |name: &str| named.iter().find(|(key, _)| *key == name).map(|(_, tensor)| tensor.clone());
    let var = |name: &str| get(name).map(|tensor| Var::from_tensor(&tensor)).transpose();
    let packed = |names: &[&str]| {
        let parts = names.iter().map(|name| merge(&get(name).unwrap())).collect::<Result<Vec<_>>>()?;
        Var::from_tensor(&Tensor::cat(&parts, 2)?)
    };
    // Every leaf with the operands that lie in it.
    let mut leaves: Vec<(Vec<&str>, Var)> = Vec::new();
    let mut qkv = |names: [&'static str; 3], parts: Parts| -> Result<Qkv> {
        let names = names.into_iter().filter(|name| !name.is_empty()).collect::<Vec<_>>();
        if form == Form::Packed {
            let rows = packed(&names)?;
            leaves.push((names, rows.clone()));
            return Ok(Qkv::Packed { rows: rows.as_tensor().clone(), heads: case.heads, parts });
        }
        let mut tensors = Vec::new();
        for name in names {
            let var = var(name)?.unwrap();
            tensors.push(var.as_tensor().clone());
            leaves.push((vec![name], var));
        }
        let mut tensors = tensors.into_iter();
        let q = parts.q.and_then(|_| tensors.next());
        Ok(Qkv::Separate { q, k: tensors.next(), v: tensors.next() })
    };
    let main = qkv(["q", "k", "v"], Parts::QKV)?;
    let slots = if case.pattern.slots > 0 { Some(qkv(["slot_k", "slot_v", ""], Parts::KV)?) } else { None };
    let mut shared = |name: &'static str| -> Result<Option<Tensor>> {
        let Some(var) = var(name)? else { return Ok(None) };
        leaves.push((vec![name], var.clone()));
        Ok(Some(var.as_tensor().clone()))
    };
    let relative = match case.relative {
        Some(segments) => Some(Relative {
            table: shared("table")?.unwrap(),
            content_bias: shared("u")?.unwrap(),
            position_bias: shared("w")?.unwrap(),
            slots: match (segments, shared("slot_table")?) {
                (Some((segment, rank)), Some(table)) => Some(SlotTable { table, segment, rank }),
                _ => None,
            },
        }),
        None => None,
    };
    let call = Attend {
        pattern: &case.pattern,
        mask: mask.as_ref(),
        scale: case.scale,
        slots: slots.as_ref(),
        relative: relative.as_ref(),
    };
    let out = with_mode(mode, || attend(&main, &call))?;
    if mode == Mode::Fused {
        assert!(matches!(out, Heads::Merged { .. }), "the fused kernel did not run");
    }
    let out = out.split()?.contiguous()?;
    let grads = (&out * &grad_out)?.sum_all()?.backward()?;
    let mut results = vec![out];
    for (names, leaf) in &leaves {
        let zeros = leaf.zeros_like()?;
        let grad = grads.get(leaf).unwrap_or(&zeros);
        if names.len() == 1 {
            results.push(grad.clone());
            continue;
        }
        let width = case.heads * case.d;
        for part in 0..names.len() {
            results
                .push(split(&grad.narrow(2, part * width, width)?.contiguous()?, case.heads)?.contiguous()?);
        }
    }
    Ok(results)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// One logit: factor times (query + bias) . row, by operand and row number.
struct Term {
    bias: Option<(usize, usize)>,
    row: (usize, usize),
}

fn terms(case: &Case, head: usize, sample: usize, query: usize, key: usize) -> Vec<Term> {
    let Case { pattern, heads, .. } = case;
    let index = |name: &str| shapes(case).iter().position(|(key, _)| *key == name);
    let lane = sample * heads + head;
    let t = pattern.offset + query;
    let rows =
        |name: &str| shapes(case).iter().find(|(key, _)| *key == name).map_or(0, |(_, shape)| shape[1]);
    let mut terms = Vec::new();
    if key < pattern.keys {
        let bias = |name| index(name).map(|at| (at, head));
        terms.push(Term { bias: bias("u"), row: (1, lane * pattern.keys + key) });
        if let Some(table) = index("table")
            && key <= t
            && t - key < rows("table")
        {
            terms.push(Term { bias: bias("w"), row: (table, head * rows("table") + t - key) });
        }
    } else {
        let slot = key - pattern.keys;
        terms.push(Term { bias: None, row: (3, lane * pattern.slots + slot) });
        if let (Some(table), Some(Some((segment, rank)))) = (index("slot_table"), case.relative) {
            let newest = t / segment * rank;
            if newest > slot && newest - 1 - slot < rows("slot_table") {
                terms.push(Term { bias: None, row: (table, head * rows("slot_table") + newest - 1 - slot) });
            }
        }
    }
    terms
}

/// The same results in f64 from [`Pattern::visible`].
fn reference(case: &Case, seed: u64) -> Result<Vec<Vec<f64>>> {
    let Operands { named, mask, grad_out } = operands(case, seed)?;
    let flat = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let x = named.iter().map(|(_, tensor)| flat(tensor)).collect::<Result<Vec<_>>>()?;
    let mask = mask.map(|mask| flat(&mask)).transpose()?;
    let grad_out = flat(&grad_out)?;
    let mut grads: Vec<Vec<f64>> = x.iter().map(|x| vec![0.0; x.len()]).collect();
    let mut out = vec![0.0; grad_out.len()];
    let Case { pattern, batch, heads, d, scale, .. } = case;
    let (d, scale) = (*d, *scale);
    let row = |number: usize| number * d..(number + 1) * d;
    for (sample, head) in (0..*batch).flat_map(|sample| (0..*heads).map(move |head| (sample, head))) {
        let lane = sample * heads + head;
        for query in 0..pattern.queries {
            let at = lane * pattern.queries + query;
            let mut seen = pattern.visible(head, query);
            seen.retain(|&j| {
                mask.as_ref().is_none_or(|mask| j >= pattern.keys || mask[sample * pattern.keys + j] != 0.0)
            });
            let all_terms: Vec<_> = seen.iter().map(|&j| terms(case, head, sample, query, j)).collect();
            let side = |term: &Term| {
                let mut q = x[0][row(at)].to_vec();
                if let Some((bias, number)) = term.bias {
                    add(&mut q, 1.0, &x[bias][row(number)]);
                }
                q
            };
            let logit = |terms: &Vec<Term>| {
                terms.iter().map(|t| dot(&side(t), &x[t.row.0][row(t.row.1)])).sum::<f64>()
            };
            let logits: Vec<f64> = all_terms.iter().map(|terms| scale * logit(terms)).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value = |j: usize| {
                if j < pattern.keys {
                    (2, lane * pattern.keys + j)
                } else {
                    (4, lane * pattern.slots + j - pattern.keys)
                }
            };
            for (&j, weight) in seen.iter().zip(&weights) {
                let (operand, number) = value(j);
                add(&mut out[row(at)], weight / sum, &x[operand][row(number)]);
            }
            let g = &grad_out[row(at)];
            let mean = dot(g, &out[row(at)]);
            for ((&j, weight), terms) in seen.iter().zip(&weights).zip(&all_terms) {
                let p = weight / sum;
                let (operand, number) = value(j);
                let slope = p * (dot(g, &x[operand][row(number)]) - mean) * scale;
                add(&mut grads[operand][row(number)], p, g);
                for term in terms {
                    let side = side(term);
                    let other = x[term.row.0][row(term.row.1)].to_vec();
                    add(&mut grads[0][row(at)], slope, &other);
                    add(&mut grads[term.row.0][row(term.row.1)], slope, &side);
                    if let Some((bias, number)) = term.bias {
                        add(&mut grads[bias][row(number)], slope, &other);
                    }
                }
            }
        }
    }
    Ok(std::iter::once(out).chain(grads).collect())
}

/// Every entry within `tolerance` of the largest one of its tensor (or of 1 where all are small).
pub(super) fn check(case: &Case, seed: u64, mode: Mode, tolerance: f64) {
    let want = reference(case, seed).unwrap();
    let mut names = vec!["out"];
    names.extend(shapes(case).iter().map(|(name, _)| *name));
    let forms: &[Form] = if case.pattern.queries == case.pattern.keys {
        &[Form::Separate, Form::Packed]
    } else {
        &[Form::Separate]
    };
    for &form in forms {
        let got = evaluate(case, seed, form, mode).unwrap();
        assert_eq!(got.len(), want.len());
        for ((name, got), want) in names.iter().zip(&got).zip(&want) {
            let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = want.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
            assert_eq!(got.len(), want.len(), "{name}");
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error <= tolerance * largest,
                    "{mode:?} {form:?} {name}[{at}] is {got}, expected {want} (d {}, {:?})",
                    case.d,
                    case.pattern
                );
            }
        }
    }
}

fn group(queries: Span, keys: &[(Span, Rule)]) -> Group {
    Group { queries, keys: keys.iter().map(|&(span, rule)| KeySpan { span, rule }).collect() }
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
    cases
}

#[test]
fn the_twin_is_the_definition() {
    for (seed, case) in cases().iter().enumerate() {
        check(case, seed as u64, Mode::Composed, 1e-5);
    }
}

#[test]
fn the_fused_kernel_is_the_definition() {
    for (seed, case) in cases().iter().enumerate() {
        check(case, seed as u64, Mode::Fused, 1e-5);
    }
}

/// Bits of all results.
fn bits(case: &Case, seed: u64, form: Form) -> Vec<Vec<u32>> {
    let results = evaluate(case, seed, form, Mode::Fused).unwrap();
    let flat = results.iter().map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    flat.map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn threads_do_not_change_the_bits() {
    let mut cases = vec![
        Case::new(Pattern::full(200, 200, true), 1, 1, 20).hidden(0.1),
        Case::new(Pattern::full(300, 400, false), 1, 3, 33),
        Case::new(Pattern::window(300, 300, 8, false).with_slots(70, Rule::All), 1, 1, 16),
        Case::new(scattered(), 1, 1, 8),
    ];
    cases.extend(self::cases());
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
            for mode in [Mode::Fused, Mode::Composed] {
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
    for mode in [Mode::Fused, Mode::Composed] {
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
        check(&case, seed, Mode::Fused, 1e-5);
        check(&case, seed, Mode::Composed, 1e-5);
    }
}
