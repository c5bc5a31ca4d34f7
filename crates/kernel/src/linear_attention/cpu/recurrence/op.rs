//! The kernel as an operation.

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Tensor};

use super::backward::{Gradients, backward};
use super::forward::forward;
use super::{CHUNK, Inputs, Logs, Plan, Targets};
use crate::cpu::compact::{self, Elements};
use crate::heads::{Heads, PackedLayout, Qkv};
use crate::linear_attention::cpu::map::Mask;
use crate::linear_attention::cpu::rows::{Columns, Operand, RowLayout};
use crate::linear_attention::{Decay, FeatureActivation, Features, LinearAttention};
use crate::op::{FusedOp, SavedOutput};
use crate::tape;

/// Runs the fused kernel; `None` where only the twin can: features, a normaliser, other types than f32, projections that
/// are absent or, in packed rows, shared.
pub(in crate::linear_attention::cpu) fn fused(qkv: &Qkv, call: &LinearAttention) -> Result<Option<Heads>> {
    let plain = call.features.is_identity() && call.guard.is_none();
    let decays = call.decay.tensors();
    let (q, v) = (qkv.q()?, qkv.v()?);
    if !plain || [&q, &v].into_iter().chain(decays.iter().copied()).any(|x| x.dtype() != DType::F32) {
        return Ok(None);
    }
    let Some((mut operands, packed)) = operands(qkv)? else { return Ok(None) };
    let ((samples, groups, len, key_width), (_, heads, _, value_width)) = (q.dims4()?, v.dims4()?);
    let logs = match call.decay {
        Decay::PerHead(logs) => Logs::Constant(logs.iter().map(|&log| powers(log)).collect()),
        Decay::PerChannel { .. } => Logs::PerChannel,
        _ => Logs::PerToken,
    };
    let keep = match call.mask {
        Some(mask) => Some(mask.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?.into()),
        None => None,
    };
    let plan = Plan {
        logs,
        causal: call.causal,
        separate: decays.len() == 2,
        mask: Mask { keep, keys: len },
        samples,
        heads,
        groups,
        len,
        key_width,
        value_width,
    };
    for log in decays {
        operands.push(if log.rank() == 3 { log.unsqueeze(3)? } else { rows_of(log)? });
    }
    let operands: Vec<&Tensor> = operands.iter().collect();
    let rows = tape::apply(&operands, Recurrence { plan, packed })?;
    Ok(Some(Heads::Merged { rows, heads }))
}

/// Powers 0..=[`CHUNK`] of exp(`log`).
fn powers(log: f64) -> Vec<f32> {
    (0..=CHUNK).map(|power| (power as f64 * log).exp() as f32).collect()
}

/// Which part of packed rows is which, and how many there are.
#[derive(Clone, Copy)]
struct Packed {
    parts: [usize; 3],
    count: usize,
}

/// Tensors with queries, keys and values whose last dimension lies in one piece.
fn operands(qkv: &Qkv) -> Result<Option<(Vec<Tensor>, Option<Packed>)>> {
    match qkv {
        Qkv::Packed { rows, parts: PackedLayout { q: Some(q), k: Some(k), v: Some(v), count }, .. } => {
            if q == k || k == v || q == v {
                return Ok(None);
            }
            Ok(Some((vec![rows.contiguous()?], Some(Packed { parts: [*q, *k, *v], count: *count }))))
        }
        Qkv::Separate { q: Some(q), k: Some(k), v: Some(v) } => {
            Ok(Some((vec![rows_of(q)?, rows_of(k)?, rows_of(v)?], None)))
        }
        _ => Ok(None),
    }
}

fn rows_of(x: &Tensor) -> Result<Tensor> {
    if x.stride()[x.rank() - 1] == 1 { Ok(x.clone()) } else { x.contiguous() }
}

struct Recurrence {
    plan: Plan,
    packed: Option<Packed>,
}

impl Recurrence {
    fn inputs<'a>(&'a self, operands: &[(Elements<'a>, &Layout)]) -> Inputs<'a> {
        let plan = &self.plan;
        let strided = |index: usize| {
            let (data, layout) = operands[index];
            let (stride, width) = (layout.stride(), layout.dims()[3]);
            let place = RowLayout {
                offset: layout.start_offset(),
                sample: stride[0],
                head: stride[1],
                row: stride[2],
                width,
            };
            Operand { data, place }
        };
        let ([q, k, v], others) = match self.packed {
            None => ([strided(0), strided(1), strided(2)], 3),
            Some(Packed { parts, count }) => {
                let (data, layout) = operands[0];
                let (d, row) = (plan.value_width, count * plan.heads * plan.value_width);
                let of = |part: usize| {
                    let offset = layout.start_offset() + part * plan.heads * d;
                    Operand {
                        data,
                        place: RowLayout { offset, sample: plan.len * row, head: d, row, width: d },
                    }
                };
                (parts.map(of), 1)
            }
        };
        let log = |index: usize| if index < operands.len() { strided(index) } else { q };
        let logs = [log(others), log(if plan.separate { others + 1 } else { others })];
        Inputs { plan, q, k, v, logs }
    }

    fn targets(&self) -> Targets {
        let plan = &self.plan;
        let (wide, narrow) = (plan.heads * plan.value_width, plan.groups * plan.key_width);
        match self.packed {
            None => {
                let columns = |width, stride| Columns { first: 0, width, stride };
                Targets {
                    q: (0, columns(plan.key_width, narrow)),
                    k: (1, columns(plan.key_width, narrow)),
                    v: (2, columns(plan.value_width, wide)),
                    widths: [narrow, narrow, wide],
                }
            }
            Some(Packed { parts, count }) => {
                let columns =
                    |part| Columns { first: part * wide, width: plan.value_width, stride: count * wide };
                let [q, k, v] = parts.map(|part| (0, columns(part)));
                Targets { q, k, v, widths: [count * wide, 0, 0] }
            }
        }
    }

    /// Gradients in the order and shapes of the operands.
    fn tensors(&self, gradients: Gradients) -> Result<Vec<Option<Tensor>>> {
        let plan = &self.plan;
        let (b, n) = (plan.samples, plan.len);
        let split = |data: Vec<f32>, heads: usize, width: usize| {
            Tensor::from_vec(data, (b, n, heads, width), &Device::Cpu)?.transpose(1, 2)
        };
        let [first, second, third] = gradients.rows;
        let mut tensors = match self.packed {
            Some(Packed { count, .. }) => {
                let width = count * plan.heads * plan.value_width;
                vec![Tensor::from_vec(first, (b, n, width), &Device::Cpu)?]
            }
            None => vec![
                split(first, plan.groups, plan.key_width)?,
                split(second, plan.groups, plan.key_width)?,
                split(third, plan.heads, plan.value_width)?,
            ],
        };
        for logs in gradients.logs {
            tensors.push(split(logs, plan.heads, plan.log_width())?);
        }
        Ok(tensors.into_iter().map(Some).collect())
    }
}

impl FusedOp for Recurrence {
    fn name(&self) -> &'static str {
        "recurrence"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let operands = operands
            .iter()
            .map(|(storage, layout)| Ok((Elements::F32(storage.as_slice()?), *layout)))
            .collect::<Result<Vec<_>>>()?;
        let plan = &self.plan;
        let shape = (plan.samples, plan.len, plan.heads * plan.value_width);
        Ok((forward(&self.inputs(&operands)), shape.into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let all = || operands.iter().copied().chain([grad]);
        all().try_for_each(compact::expand)?;
        let guards: Vec<_> = all().map(Tensor::storage_and_layout).collect();
        let data = guards
            .iter()
            .map(|(storage, layout)| Ok((compact::elements(storage)?, *layout)))
            .collect::<Result<Vec<_>>>()?;
        let plan = &self.plan;
        let (operands, (grad, layout)) = (&data[..data.len() - 1], data[data.len() - 1]);
        let (width, row) = (plan.value_width, plan.heads * plan.value_width);
        let place =
            RowLayout { offset: layout.start_offset(), sample: plan.len * row, head: width, row, width };
        let dout = Operand { data: grad, place };
        self.tensors(backward(&self.inputs(operands), dout, &self.targets()))
    }
}

impl Features {
    /// Whether features are the vectors themselves.
    pub(in crate::linear_attention::cpu) fn is_identity(&self) -> bool {
        matches!(self, Self::Elementwise { activation: FeatureActivation::Identity, reweight: None })
    }
}
