//! The kernel as a candle operation.

use std::sync::OnceLock;

use candle_core::{CpuStorage, D, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::favor::FavorMap;
use super::map::{Elementwise, Map, Mask, Turn};
use super::random::RandomMap;
use super::rows::{Columns, Operand, RowLayout};
use super::taylor::TaylorMap;
use super::{Call, GatesBy, Gradients, Inputs, Targets, bidirectional, causal, recurrence};
use crate::cpu::compact::{self, Elements};
use crate::heads::{Heads, PackedLayout, Qkv, merge};
use crate::linear_attention::{Decay, Features, LinearAttention};
use crate::op::{self, FusedOp, SavedOutput};
use crate::tape;
use causal::Gate;

/// Runs the fused kernel; `None` where only the twin can: other types than f32, projections that are shared or
/// absent, causal FAVOR+ with an eps, learned features or gates over separate tensors of different lengths, heads that share keys,
/// decays of features or with a normaliser that are per channel or bidirectional.
pub(in crate::linear_attention) fn fused(qkv: &Qkv, call: &LinearAttention) -> Result<Option<Heads>> {
    let plain = call.features.is_identity() && call.guard.is_none();
    match call.decay {
        Decay::None | Decay::Gate(_) => {}
        Decay::PerHead(_) | Decay::PerToken { .. } if call.causal && !plain => {}
        Decay::PerHead(_) | Decay::PerToken { .. } | Decay::PerChannel { .. } => {
            return recurrence::fused(qkv, call);
        }
    }
    let decays = call.decay.tensors();
    if decays.iter().any(|x| x.dtype() != DType::F32) {
        return Ok(None);
    }
    let learned = matches!(call.features, Features::Random { .. }) || !decays.is_empty();
    let packed = if learned { pack(qkv)? } else { None };
    let Some(operands) = Operands::new(packed.as_ref().unwrap_or(qkv))? else { return Ok(None) };
    let Some(inner) = plan(&operands, call)? else { return Ok(None) };
    let mut arguments: Vec<&Tensor> = operands.tensors.iter().collect();
    if let Features::Random { weight, .. } = &call.features {
        arguments.push(weight);
    }
    arguments.extend(decays);
    if arguments.len() > 3 {
        return Ok(None);
    }
    let heads = inner.call.heads;
    let rows = tape::apply(&arguments, Attention { inner, saved: OnceLock::new() })?;
    Ok(Some(Heads::Merged { rows, heads }))
}

/// Separate tensors as packed rows, where their shapes are equal: an operation takes three tensors at most.
fn pack(qkv: &Qkv) -> Result<Option<Qkv>> {
    let Qkv::Separate { q: Some(q), k: Some(k), v: Some(v) } = qkv else { return Ok(None) };
    if q.dims() != v.dims() {
        return Ok(None);
    }
    let rows = Tensor::cat(&[merge(q)?, merge(k)?, merge(v)?], 2)?;
    Ok(Some(Qkv::Packed { rows, heads: q.dim(1)?, parts: PackedLayout::QKV }))
}

/// Queries, keys and values as the kernel reads them.
struct Operands {
    tensors: Vec<Tensor>,
    places: [RowLayout; 3],
    targets: Targets,
    samples: usize,
    heads: usize,
    lengths: (usize, usize),
}

impl Operands {
    fn new(qkv: &Qkv) -> Result<Option<Self>> {
        match qkv {
            Qkv::Packed {
                rows,
                heads,
                parts: PackedLayout { q: Some(q), k: Some(k), v: Some(v), count },
            } => {
                if rows.dtype() != DType::F32 {
                    return Ok(None);
                }
                let (samples, n, width) = rows.dims3()?;
                let (heads, d) = (*heads, width / count / heads);
                let columns = |part: usize| Columns { first: part * heads * d, width: d, stride: width };
                let targets = Targets { q: columns(*q), k: columns(*k), v: columns(*v), shared: true };
                let place = |part: &usize| RowLayout {
                    offset: part * heads * d,
                    sample: n * width,
                    head: d,
                    row: width,
                    width: d,
                };
                let places = [place(q), place(k), place(v)];
                let tensors = vec![rows.contiguous()?];
                Ok(Some(Self { tensors, places, targets, samples, heads, lengths: (n, n) }))
            }
            Qkv::Separate { q: Some(q), k: Some(k), v: Some(v) } => {
                if [q, k, v].iter().any(|x| x.dtype() != DType::F32) || q.dim(1)? != v.dim(1)? {
                    return Ok(None);
                }
                let ((samples, heads, n, d), (_, _, t, e)) = (q.dims4()?, v.dims4()?);
                let targets = Targets {
                    q: Columns { first: 0, width: d, stride: heads * d },
                    k: Columns { first: 0, width: d, stride: heads * (d + e) },
                    v: Columns { first: heads * d, width: e, stride: heads * (d + e) },
                    shared: false,
                };
                let mut tensors = Vec::with_capacity(3);
                let mut places = Vec::with_capacity(3);
                for x in [q, k, v] {
                    let x = if x.stride()[3] == 1 { x.clone() } else { x.contiguous()? };
                    let (stride, width) = (x.stride(), x.dim(D::Minus1)?);
                    let [sample, head, row] = [stride[0], stride[1], stride[2]];
                    places.push(RowLayout { offset: 0, sample, head, row, width });
                    tensors.push(x);
                }
                let places = [places[0], places[1], places[2]];
                Ok(Some(Self { tensors, places, targets, samples, heads, lengths: (n, t) }))
            }
            _ => Ok(None),
        }
    }
}

/// The call as the kernel sees it.
fn plan(operands: &Operands, call: &LinearAttention) -> Result<Option<Inner>> {
    let (queries, keys) = operands.lengths;
    let keep = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?.into()),
        None => None,
    };
    let mask = Mask { keep, keys };
    let head_dim = operands.places[0].width;
    let (mut feature_eps, mut den_eps, mut through, mut zero_values) = (0.0, 0.0, false, false);
    let map: Box<dyn Map> = match &call.features {
        Features::Elementwise { activation, reweight } => Box::new(Elementwise {
            activation: *activation,
            turn: reweight.map(|m| Turn::new(queries.max(keys), m)),
            head_dim,
            mask: mask.clone(),
        }),
        Features::Favor(favor) if call.causal && !favor.stable() => return Ok(None),
        Features::Favor(favor) if favor.masked_as_zero && !matches!(call.decay, Decay::None) => {
            return Ok(None);
        }
        Features::Favor(favor) => {
            let omega = (favor.omega.to_dtype(DType::F32)? * favor.scale)?.flatten_all()?.to_vec1()?;
            feature_eps = favor.feature_eps as f32;
            den_eps = (favor.den_eps * (favor.omega.dim(0)? as f64).sqrt()) as f32;
            through = favor.through && !favor.stable();
            zero_values = favor.masked_as_zero;
            Box::new(FavorMap {
                omega,
                head_dim,
                square: (favor.scale * favor.scale) as f32,
                stable: favor.stable(),
                through,
                masked_as_zero: zero_values,
                mask: mask.clone(),
            })
        }
        Features::Taylor => Box::new(TaylorMap { head_dim, mask: mask.clone() }),
        Features::Random { weight, kernel, norm_eps, scale } => Box::new(RandomMap {
            projections: weight.dim(1)?,
            weight: weight.flatten_all()?.to_vec1()?,
            head_dim,
            kernel: *kernel,
            norm_eps: *norm_eps as f32,
            scale: *scale as f32,
            mask: mask.clone(),
        }),
    };
    let (gates, gates_by) = match call.decay {
        Decay::Gate(logits) => (Some(read_gates(logits, &mask)?), GatesBy::Logit),
        Decay::PerToken { log, .. } => (Some(read_logs(log, &mask)?), GatesBy::Log),
        Decay::PerHead(logs) => (Some(repeat_logs(logs, operands.samples, &mask)), GatesBy::Constant),
        Decay::None | Decay::PerChannel { .. } => (None, GatesBy::Constant),
    };
    let causal = call.causal;
    let call = Call {
        map,
        guard: call.guard,
        feature_eps,
        den_eps,
        through,
        zero_values,
        mask,
        gates,
        gates_by,
        samples: operands.samples,
        heads: operands.heads,
        queries,
        keys,
        value_width: operands.places[2].width,
    };
    Ok(Some(Inner { call, causal, places: operands.places, targets: operands.targets }))
}

/// The gates of logits [b, h, t].
fn read_gates(logits: &Tensor, mask: &Mask) -> Result<Vec<Gate>> {
    let (_, heads, keys) = logits.dims3()?;
    let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let gates = logits.flatten_all()?.to_vec1::<f32>()?.into_iter().enumerate();
    let gates = gates.map(|(index, logit)| match mask.hides(index / keys / heads, index % keys) {
        true => Gate { log_keep: 0.0, open: 0.0 },
        false => Gate { log_keep: -softplus(-logit), open: (-softplus(logit)).exp() },
    });
    Ok(gates.collect())
}

/// The gates of logarithms [b, h, t]; a hidden step changes nothing.
fn read_logs(logs: &Tensor, mask: &Mask) -> Result<Vec<Gate>> {
    let (_, heads, keys) = logs.dims3()?;
    let logs = logs.flatten_all()?.to_vec1::<f32>()?.into_iter().enumerate();
    let gates = logs.map(|(index, log)| match mask.hides(index / keys / heads, index % keys) {
        true => Gate { log_keep: 0.0, open: 0.0 },
        false => Gate { log_keep: log, open: 1.0 },
    });
    Ok(gates.collect())
}

/// The gates of a logarithm per head; a hidden step is not written.
fn repeat_logs(logs: &[f64], samples: usize, mask: &Mask) -> Vec<Gate> {
    let (heads, keys) = (logs.len(), mask.keys);
    let gates = (0..samples * heads * keys).map(|index| {
        let hidden = mask.hides(index / keys / heads, index % keys);
        Gate { log_keep: logs[index / keys % heads] as f32, open: if hidden { 0.0 } else { 1.0 } }
    });
    gates.collect()
}

struct Inner {
    call: Call,
    causal: bool,
    places: [RowLayout; 3],
    targets: Targets,
}

struct Attention {
    inner: Inner,
    saved: OnceLock<Saved>,
}

/// What forward leaves for backward.
enum Saved {
    Bidirectional(bidirectional::Saved),
    Causal(causal::Saved),
}

/// Elements from the layout's start on.
fn from_start<'a>(data: Elements<'a>, layout: &Layout) -> Elements<'a> {
    data.slice(layout.start_offset()..data.count())
}

impl Attention {
    fn operands<'a>(&self, data: &[Elements<'a>]) -> [Operand<'a>; 3] {
        let of = |index: usize| {
            let place = self.inner.places[index];
            Operand { data: data[if self.inner.targets.shared { 0 } else { index }], place }
        };
        [of(0), of(1), of(2)]
    }

    /// Gradients in the order and shapes of the arguments.
    fn tensors(&self, grads: Gradients) -> Result<Vec<Tensor>> {
        let Inner { call, targets, .. } = &self.inner;
        let (b, h) = (call.samples, call.heads);
        let Some(key_rows) = grads.key_rows else {
            let cpu = &Device::Cpu;
            let rows = Tensor::from_vec(grads.query_rows, (b, call.queries, targets.q.stride), cpu)?;
            let mut tensors = vec![rows];
            if call.map.params() > 0 {
                let d = targets.q.width;
                tensors.push(Tensor::from_vec(grads.params, (h, call.map.params() / d, d), cpu)?);
            }
            if let Some(gates) = grads.gates {
                tensors.push(Tensor::from_vec(gates, (b, h, call.keys), cpu)?);
            }
            return Ok(tensors);
        };
        let (d, e) = (targets.q.width, targets.v.width);
        let q = Tensor::from_vec(grads.query_rows, (b, call.queries, h, d), &Device::Cpu)?;
        let keys = Tensor::from_vec(key_rows, (b, call.keys, h * (d + e)), &Device::Cpu)?;
        let part = |start: usize, width: usize| {
            let part = keys.narrow(2, start, h * width)?.contiguous()?;
            part.reshape((b, call.keys, h, width))?.transpose(1, 2)
        };
        Ok(vec![q.transpose(1, 2)?, part(0, d)?, part(h * d, e)?])
    }
}

impl FusedOp for Attention {
    fn name(&self) -> &'static str {
        "linear-attention"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let data = operands
            .iter()
            .map(|(storage, layout)| Ok(from_start(Elements::F32(storage.as_slice()?), layout)))
            .collect::<Result<Vec<_>>>()?;
        let [q, k, v] = self.operands(&data);
        let call = &self.inner.call;
        let (out, saved) = if self.inner.causal {
            let (out, saved) = causal::forward(call, q, k, v);
            (out, Saved::Causal(saved))
        } else {
            let (out, saved) = bidirectional::forward(call, q, k, v);
            (out, Saved::Bidirectional(saved))
        };
        if self.saved.set(saved).is_err() {
            bail!("a linear attention operation ran twice");
        }
        Ok((out, (call.samples, call.queries, call.heads * call.value_width).into()))
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn backward(&self, args: &[&Tensor], res: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(saved) = self.saved.get() else { bail!("linear attention runs backward before forward") };
        let res = op::result(res)?.contiguous()?;
        let all = || args.iter().copied().chain([&res, grad]);
        if self.inner.causal {
            all().try_for_each(compact::expand)?;
        }
        let guards: Vec<_> = all().map(Tensor::storage_and_layout).collect();
        let slices =
            guards.iter().map(|(storage, layout)| Ok(from_start(compact::elements(storage)?, layout)));
        let slices = slices.collect::<Result<Vec<_>>>()?;
        let (inputs, results) = slices.split_at(args.len());
        let [q, k, v] = self.operands(inputs);
        let Inner { call, targets, .. } = &self.inner;
        let (width, operands) = (call.heads * call.value_width, (q, k, v));
        let place = RowLayout {
            offset: 0,
            sample: call.queries * width,
            head: call.value_width,
            row: width,
            width: call.value_width,
        };
        let [out, dout] = [0, 1].map(|index: usize| Operand { data: results[index], place });
        let tensors = self.tensors(match saved {
            Saved::Bidirectional(saved) => {
                bidirectional::backward(&Inputs { call, operands, saved, out, dout }, targets)
            }
            Saved::Causal(saved) => causal::backward(&Inputs { call, operands, saved, out, dout }, targets),
        })?;
        Ok(tensors.into_iter().map(Some).collect())
    }
}
