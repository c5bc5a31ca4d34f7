//! The kernels as an operation on candle's tensors.

use std::ops::Deref;
use std::sync::OnceLock;

use candle_core::{DType, Layout, Result, Shape, Storage, Tensor, bail};

use super::launch::{Activation, Call, DecayWidth, Inputs, Outputs, Place, Targets};
use crate::cuda::BufferView;
use crate::cuda::tensor_device::{DeviceOp, OnDevice, TensorDevice};
use crate::heads::{Heads, PackedLayout, Qkv};
use crate::linear_attention::composed::of_heads;
use crate::linear_attention::features::{angles, map};
use crate::linear_attention::{Decay, FeatureActivation, Features, LinearAttention};
use crate::op::{self, SavedOutput};
use crate::tape;

/// Runs the kernels on f32 tensors. Elementwise features, with or without cosFormer's weights, are made within them; others, and
/// gates, by candle's operations before. `None` where only the twin can: FAVOR+ whose denominator has an eps, with decays.
pub(in crate::linear_attention) fn fused(qkv: &Qkv, call: &LinearAttention) -> Result<Option<Heads>> {
    let mask = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.contiguous()?),
        None => None,
    };
    let given = match (&call.features, call.decay) {
        (_, Decay::Gate(_)) => mapped(qkv, call, mask.as_ref())?,
        (Features::Elementwise { activation, reweight }, _) => raw(qkv, *activation, *reweight, mask)?,
        _ => mapped(qkv, call, mask.as_ref())?,
    };
    let (logs, decay) = logs(call, given.own_log.as_ref(), &qkv.v()?)?;
    let den_eps = den_eps(call)?;
    if den_eps != 0.0 && decay != DecayWidth::None {
        return Ok(None);
    }
    let (queries, width) = given.queries;
    let inner = Call {
        samples: given.values[0],
        heads: given.values[1],
        groups: given.groups,
        queries,
        keys: given.values[2],
        width,
        values: given.values[3],
        activation: given.activation,
        turned: given.angles.is_some(),
        guard: call.guard,
        den_eps,
        causal: call.causal,
        decay,
        learned: logs.iter().any(Tensor::track_op),
        masked: given.keep.is_some(),
    };
    let operands: Vec<&Tensor> = given.tensors.iter().chain(&logs).collect();
    let Given { packed, keep, angles, .. } = given;
    let op = Sums { call: inner, packed, keep, angles, dens: OnceLock::new() };
    let rows = tape::apply(&operands, OnDevice(op))?;
    Ok(Some(Heads::Merged { rows, heads: inner.heads }))
}

/// Queries, keys and values as the kernels read them.
struct Given {
    tensors: Vec<Tensor>,
    packed: Option<Packed>,
    groups: usize,
    /// Length and width.
    queries: (usize, usize),
    /// Shape [b, h, n, e] of the values.
    values: [usize; 4],
    activation: Activation,
    keep: Option<Tensor>,
    angles: Option<Tensor>,
    /// Logarithms of decays that come with the features.
    own_log: Option<Tensor>,
}

impl Given {
    fn new(qkv: &Qkv, activation: Activation) -> Result<Self> {
        let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
        let ((_, groups, n, width), (b, h, t, e)) = (q.dims4()?, v.dims4()?);
        let (tensors, packed) = match qkv {
            Qkv::Packed {
                rows, parts: PackedLayout { q: Some(q), k: Some(k), v: Some(v), count }, ..
            } if q != k && k != v && v != q => {
                (vec![rows.contiguous()?], Some(Packed { parts: [*q, *k, *v], count: *count }))
            }
            _ => ([q, k, v].iter().map(rows_of).collect::<Result<_>>()?, None),
        };
        Ok(Self {
            tensors,
            packed,
            groups,
            queries: (n, width),
            values: [b, h, t, e],
            activation,
            keep: None,
            angles: None,
            own_log: None,
        })
    }
}

/// A tensor whose rows lie in one piece each.
fn rows_of(x: &Tensor) -> Result<Tensor> {
    if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() }
}

/// Features that the kernels make.
fn raw(
    qkv: &Qkv,
    activation: FeatureActivation,
    reweight: Option<usize>,
    keep: Option<Tensor>,
) -> Result<Given> {
    let activation = match activation {
        FeatureActivation::Identity => Activation::Identity,
        FeatureActivation::Relu => Activation::Leaky(0.0),
        FeatureActivation::LeakyRelu(slope) => Activation::Leaky(slope as f32),
        FeatureActivation::Elu1 => Activation::Elu1,
    };
    let given = Given::new(qkv, activation)?;
    let angles = match reweight {
        Some(m) => {
            let len = given.queries.0.max(given.values[2]);
            let turns = angles(len, m).into_iter().flat_map(|(sin, cos)| [sin as f32, cos as f32]);
            Some(Tensor::from_vec(turns.collect(), (len, 2), &qkv.device()?)?)
        }
        None => None,
    };
    Ok(Given { keep, angles, ..given })
}

/// Features by candle's operations, which hide keys too.
fn mapped(qkv: &Qkv, call: &LinearAttention, mask: Option<&Tensor>) -> Result<Given> {
    let v = qkv.v()?.contiguous()?;
    let (b, heads, t, _) = v.dims4()?;
    let mask = mask.map(|mask| mask.reshape((b, 1, t, 1))).transpose()?;
    let (q, k) = (of_heads(&qkv.q()?.contiguous()?, heads)?, of_heads(&qkv.k()?.contiguous()?, heads)?);
    let features = map(call, &q, &k, mask.as_ref())?.gated(call, mask.as_ref())?;
    let v = match (&call.features, &mask) {
        (Features::Favor(favor), Some(mask)) if favor.masked_as_zero => v.broadcast_mul(mask)?,
        _ => v,
    };
    let own_log = features.log_decay;
    let given = Given::new(&Qkv::separate(features.q, features.k, v), Activation::Identity)?;
    Ok(Given { own_log, ..given })
}

/// Logarithms of decays [b, h, n] or [b, h, n, f] as operands, those of keys behind the query last.
fn logs(call: &LinearAttention, own: Option<&Tensor>, values: &Tensor) -> Result<(Vec<Tensor>, DecayWidth)> {
    let (b, _, t, _) = values.dims4()?;
    let mask = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.reshape((b, 1, t, 1))?),
        None => None,
    };
    let Some((forward, backward)) = call.decay.logs(values, mask.as_ref())? else {
        let logs: Vec<Tensor> = own.map(Tensor::contiguous).transpose()?.into_iter().collect();
        let width = if logs.is_empty() { DecayWidth::None } else { DecayWidth::Row };
        return Ok((logs, width));
    };
    let width = if forward.rank() == 4 { DecayWidth::Channel } else { DecayWidth::Row };
    let forward = match (own, width) {
        (Some(own), DecayWidth::Channel) => forward.broadcast_add(&own.unsqueeze(3)?)?,
        (Some(own), _) => (forward + own)?,
        (None, _) => forward,
    };
    let mut logs = vec![forward.contiguous()?];
    if !call.causal {
        logs.push(backward.contiguous()?);
    }
    Ok((logs, width))
}

/// What the denominator's sums get on top.
fn den_eps(call: &LinearAttention) -> Result<f32> {
    Ok(match &call.features {
        Features::Favor(favor) => (favor.den_eps * (favor.omega.dim(0)? as f64).sqrt()) as f32,
        _ => 0.0,
    })
}

/// Which part of packed rows is which, and how many there are.
#[derive(Clone, Copy)]
struct Packed {
    parts: [usize; 3],
    count: usize,
}

struct Sums {
    call: Call,
    packed: Option<Packed>,
    keep: Option<Tensor>,
    angles: Option<Tensor>,
    /// The denominators.
    dens: OnceLock<Tensor>,
}

/// The elements of a tensor that is no operand; those of `other`, unread, if there is none.
fn constant<'a, M: TensorDevice>(
    given: &'a Option<(impl Deref<Target = Storage>, &Layout)>,
    other: BufferView<'a, M>,
) -> Result<BufferView<'a, M>> {
    match given {
        Some((storage, layout)) => {
            Ok(BufferView { floats: M::floats(storage)?, start: layout.start_offset() })
        }
        None => Ok(other),
    }
}

/// A place for the rows of a tensor [b, heads, n, d] whose last stride is 1.
fn strided(layout: &Layout) -> Result<Place> {
    match layout.stride() {
        &[batch, head, row, 1] => {
            Ok(Place { start: layout.start_offset(), batch, head, row, heads: layout.dims()[1] })
        }
        other => bail!("an operand of linear attention has strides {other:?}"),
    }
}

impl Sums {
    /// Places of queries, keys and values in packed rows from `start` on.
    fn in_rows(&self, Packed { parts, count }: Packed, start: usize) -> [Place; 3] {
        let Call { heads, queries, values, .. } = self.call;
        let row = count * heads * values;
        parts.map(|part| {
            let start = start + part * heads * values;
            Place { start, batch: queries * row, head: values, row, heads }
        })
    }

    /// Operands as the kernels read them.
    fn inputs<'a, M: TensorDevice>(
        &self,
        all: &[(&'a M::Floats, &Layout)],
        [keep, angles]: [&'a Option<(impl Deref<Target = Storage>, &Layout)>; 2],
    ) -> Result<Inputs<'a, M>> {
        let view = |index: usize| BufferView::<M>::all(all[index].0);
        let (operands, others) = match self.packed {
            Some(packed) => (self.in_rows(packed, all[0].1.start_offset()).map(|place| (view(0), place)), 1),
            None => {
                let [q, k, v] = [0, 1, 2].map(|index| strided(all[index].1));
                ([(view(0), q?), (view(1), k?), (view(2), v?)], 3)
            }
        };
        let log = |index: usize| match all.get(index) {
            Some((floats, layout)) => BufferView::<M> { floats, start: layout.start_offset() },
            None => view(0),
        };
        Ok(Inputs {
            operands,
            keep: constant(keep, view(0))?,
            angles: constant(angles, view(0))?,
            logs: [log(others), log(others + 1)],
        })
    }

    /// Where gradients go: buffers in the order of the operands.
    fn targets(&self) -> Targets {
        let Call { samples, heads, queries, keys, width, values, .. } = self.call;
        if let Some(packed) = self.packed {
            let length = samples * queries * packed.count * heads * values;
            let operands = self.in_rows(packed, 0).map(|place| (0, place));
            return Targets { lengths: vec![length], operands, gaps: packed.count > 3 };
        }
        let sizes = [(queries, width), (keys, width), (keys, values)];
        let lengths = sizes.map(|(rows, width)| samples * heads * rows * width).to_vec();
        let [q, k, v] = sizes.map(|(rows, width)| Place::split(heads, rows, width));
        Targets { lengths, operands: [(0, q), (1, k), (2, v)], gaps: false }
    }
}

impl DeviceOp for Sums {
    fn name(&self) -> &'static str {
        "linear-attention"
    }

    fn needs_output(&self) -> bool {
        self.call.guard.is_some()
    }

    fn forward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[(&M::Floats, &Layout)],
    ) -> Result<M::Floats> {
        let constants = [&self.keep, &self.angles].map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let inputs = self.inputs(operands, constants.each_ref())?;
        let Call { samples, heads, queries, guard, .. } = self.call;
        let (out, dens) = self.call.forward(machine, &inputs)?;
        if guard.is_some() && self.dens.set(machine.tensor(dens, (samples, heads, queries).into())?).is_err()
        {
            bail!("a linear attention operation ran twice");
        }
        Ok(out)
    }

    fn backward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let saved = if self.needs_output() { Some(op::result(out)?.contiguous()?) } else { None };
        let guards: Vec<_> = operands.iter().map(|x| x.storage_and_layout()).collect();
        let all = guards.iter().map(|(storage, layout)| Ok((M::floats(storage)?, *layout)));
        let all = all.collect::<Result<Vec<_>>>()?;
        let constants = [&self.keep, &self.angles].map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let inputs = self.inputs(&all, constants.each_ref())?;
        let outputs =
            [saved.as_ref(), Some(grad), self.dens.get()].map(|x| x.map(Tensor::storage_and_layout));
        let grad = constant(&outputs[1], inputs.keep)?;
        let outputs = Outputs { out: constant(&outputs[0], grad)?, grad, dens: constant(&outputs[2], grad)? };
        let targets = self.targets();
        let grads = self.call.backward(machine, &inputs, &outputs, &targets)?;
        let Call { groups, heads, queries, keys, .. } = self.call;
        let mut tensors = Vec::with_capacity(operands.len());
        for (index, mut floats) in grads.operands.into_iter().enumerate() {
            if groups < heads && index < 2 {
                floats = self.call.shared(machine, &floats, [queries, keys][index])?;
            }
            tensors.push(Some(machine.tensor(floats, operands[index].shape().clone())?));
        }
        for floats in grads.logs {
            let shape = operands[tensors.len()].shape().clone();
            tensors.push(Some(machine.tensor(floats, shape)?));
        }
        tensors.resize(operands.len(), None); // decays that are constants
        Ok(tensors)
    }

    fn shape(&self) -> Shape {
        let Call { samples, heads, queries, values, .. } = self.call;
        (samples, queries, heads * values).into()
    }
}
