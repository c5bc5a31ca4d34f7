//! The same call in fused or composed operations, and as loops over [`Pattern::visible`] in f64.

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::attend::{Attend, Relative, SlotTable, attend};
use crate::device::rng::RngStream;
use crate::dropout::AttentionDropout;
use crate::heads::{Heads, PackedLayout, Qkv, merge, split};
use crate::{KernelMode, with_mode};
use effattn_record::pattern::Pattern;

/// Slots under relative positions: length of a segment, slots per segment.
type Segments = Option<(usize, usize)>;

/// One attention call with random operands.
pub(crate) struct Case {
    pub pattern: Pattern,
    pub batch: usize,
    pub heads: usize,
    pub d: usize,
    /// Share of hidden keys.
    pub hidden: f64,
    /// Last keys that are hidden in the first sample (half of it in the second, ...); no gradient reaches the outputs of
    /// the last queries.
    pub padding: usize,
    pub scale: f64,
    pub relative: Option<Segments>,
    /// Whether logits take a bias.
    pub bias: bool,
    /// Standard deviation of queries and keys.
    pub size: f64,
    /// Dropout of the weights.
    pub dropout: Option<AttentionDropout>,
}

impl Case {
    pub fn new(pattern: Pattern, batch: usize, heads: usize, d: usize) -> Self {
        let scale = 1.0 / (d as f64).sqrt();
        Self {
            pattern,
            batch,
            heads,
            d,
            hidden: 0.0,
            padding: 0,
            scale,
            relative: None,
            bias: false,
            size: 1.0,
            dropout: None,
        }
    }

    pub fn hidden(self, hidden: f64) -> Self {
        Self { hidden, ..self }
    }

    pub fn padding(self, padding: usize) -> Self {
        Self { padding, ..self }
    }

    pub fn relative(self, segments: Segments) -> Self {
        Self { relative: Some(segments), ..self }
    }

    pub fn biased(self) -> Self {
        Self { bias: true, ..self }
    }

    pub fn dropout(self, rate: f64) -> Self {
        Self { dropout: AttentionDropout::new(rate, 3).unwrap(), ..self }
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
    if case.bias {
        shapes.push(("bias", vec![h, queries, keys]));
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

/// The operands of a case.
pub(crate) struct Operands {
    /// By name.
    pub named: Vec<(&'static str, Tensor)>,
    mask: Option<Tensor>,
    /// Gradient of the output.
    pub grad_out: Tensor,
}

impl Operands {
    /// Which of `all` keys and slots of every sample are hidden; empty if none is.
    pub fn hidden(&self, all: usize) -> Vec<bool> {
        let Some(mask) = &self.mask else { return Vec::new() };
        let mask = mask.to_vec2::<f32>().unwrap();
        let hidden = |keep: &Vec<f32>| {
            let mut hidden: Vec<bool> = keep.iter().map(|&keep| keep == 0.0).collect();
            hidden.resize(all, false);
            hidden
        };
        mask.iter().flat_map(hidden).collect()
    }
}

pub(crate) fn operands(case: &Case, seed: u64) -> Result<Operands> {
    let device = &Device::Cpu;
    let named = shapes(case)
        .into_iter()
        .map(|(name, shape)| {
            let size = if matches!(name, "q" | "k" | "slot_k") { case.size } else { 1.0 };
            Ok((name, RngStream::new(seed, name).normal_tensor(shape, 0.0, size, device)?))
        })
        .collect::<Result<_>>()?;
    let (b, keys) = (case.batch, case.pattern.keys);
    let padded =
        |sample: usize, at: usize, all: usize| at + case.padding / (sample + 1) >= all && case.padding > 0;
    let mask = (case.hidden > 0.0 || case.padding > 0).then(|| {
        let mut stream = RngStream::new(seed, "mask");
        let mut keep = |at| stream.uniform(0.0, 1.0) >= case.hidden && !padded(at / keys, at % keys, keys);
        Tensor::from_vec((0..b * keys).map(|at| f32::from(keep(at))).collect(), (b, keys), device)
    });
    let queries = case.pattern.queries;
    let used = (0..b * queries).map(|at| f32::from(!padded(at / queries, at % queries, queries))).collect();
    let used = Tensor::from_vec(used, (b, 1, queries, 1), device)?;
    let shape = (b, case.heads, queries, case.d);
    let grad_out =
        RngStream::new(seed, "grad").normal_tensor(shape, 0.0, 1.0, device)?.broadcast_mul(&used)?;
    Ok(Operands { named, mask: mask.transpose()?, grad_out })
}

/// How queries, keys and values reach the call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Form {
    Separate,
    Packed,
}

/// The output and the gradients of all operands, [b, h, n, d] where they have heads.
pub(crate) fn evaluate(case: &Case, seed: u64, form: Form, mode: KernelMode) -> Result<Vec<Tensor>> {
    let Operands { named, mask, grad_out } = operands(case, seed)?;
    let get = |name: &str| named.iter().find(|(key, _)| *key == name).map(|(_, tensor)| tensor.clone());
    let var = |name: &str| get(name).map(|tensor| Var::from_tensor(&tensor)).transpose();
    let packed = |names: &[&str]| {
        let parts = names.iter().map(|name| merge(&get(name).unwrap())).collect::<Result<Vec<_>>>()?;
        Var::from_tensor(&Tensor::cat(&parts, 2)?)
    };
    // Every leaf with the operands that lie in it.
    let mut leaves: Vec<(Vec<&str>, Var)> = Vec::new();
    let mut qkv = |names: [&'static str; 3], parts: PackedLayout| -> Result<Qkv> {
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
    let main = qkv(["q", "k", "v"], PackedLayout::QKV)?;
    let slots =
        if case.pattern.slots > 0 { Some(qkv(["slot_k", "slot_v", ""], PackedLayout::KV)?) } else { None };
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
    let bias = if case.bias { shared("bias")? } else { None };
    let call = Attend {
        bias: bias.as_ref(),
        pattern: &case.pattern,
        mask: mask.as_ref(),
        scale: case.scale,
        slots: slots.as_ref(),
        relative: relative.as_ref(),
        dropout: case.dropout,
    };
    let out = with_mode(mode, || attend(&main, &call))?;
    if mode == KernelMode::Fused {
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
            let bias = shapes(case).iter().position(|(name, _)| *name == "bias");
            let bias_at = |j: usize| {
                let at = (head * pattern.queries + query) * pattern.keys + j;
                bias.filter(|_| j < pattern.keys).map(|operand| (operand, at))
            };
            let added = |j: usize| bias_at(j).map_or(0.0, |(operand, at)| x[operand][at]);
            let logits: Vec<f64> =
                seen.iter().zip(&all_terms).map(|(&j, terms)| scale * logit(terms) + added(j)).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let kept: Vec<f64> = match case.dropout {
                Some(dropout) => dropout.factors(at, seen.iter().copied()).map(f64::from).collect(),
                None => vec![1.0; seen.len()],
            };
            let value = |j: usize| {
                if j < pattern.keys {
                    (2, lane * pattern.keys + j)
                } else {
                    (4, lane * pattern.slots + j - pattern.keys)
                }
            };
            for ((&j, weight), kept) in seen.iter().zip(&weights).zip(&kept) {
                let (operand, number) = value(j);
                add(&mut out[row(at)], kept * weight / sum, &x[operand][row(number)]);
            }
            let g = &grad_out[row(at)];
            let mean = dot(g, &out[row(at)]);
            for (((&j, weight), kept), terms) in seen.iter().zip(&weights).zip(&kept).zip(&all_terms) {
                let p = weight / sum;
                let (operand, number) = value(j);
                let slope = p * (kept * dot(g, &x[operand][row(number)]) - mean);
                if let Some((operand, at)) = bias_at(j) {
                    grads[operand][at] += slope;
                }
                let slope = slope * scale;
                add(&mut grads[operand][row(number)], kept * p, g);
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
pub(super) fn check(case: &Case, seed: u64, mode: KernelMode, tolerance: f64) {
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
