//! The custom operation: where operands and gradients lie in candle's tensors.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail,
};

use super::backward::{Given, Grads, backward};
use super::forward::{Problem, forward};
use super::operands::{Dims, Place, Rows, Shared, Target};
use super::plan::Plan;
use super::relative::{Table, TableGrads, Tables};
use crate::kernel::attend::{Attend, Relative};
use crate::kernel::heads::{Heads, Qkv};

/// Softmax attention over the visible pairs, f32 on the CPU.
///
/// # Errors
/// Shapes that do not fit the pattern.
pub fn attend(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let mut arguments = Arguments(Vec::new());
    let [q, k, v] = arguments.main(qkv, call.slots.is_some() || call.relative.is_some())?;
    let slots = call.slots.map(|slots| arguments.slots(slots)).transpose()?;
    let relative = call.relative.map(|relative| arguments.relative(relative)).transpose()?;
    let dims = dims(qkv, call)?;
    let op = Op {
        plan: Plan::new(call.pattern, dims.heads)?,
        dims,
        scale: call.scale as f32,
        q,
        k,
        v,
        slots,
        hidden: hidden(call, &dims)?,
        relative,
        save: arguments.0.iter().any(Tensor::track_op),
        stats: OnceLock::new(),
    };
    let rows = match arguments.0.as_slice() {
        [a] => a.apply_op1(op)?,
        [a, b] => a.apply_op2(b, op)?,
        [a, b, c] => a.apply_op3(b, c, op)?,
        _ => bail!("attention over {} tensors", arguments.0.len()),
    };
    Ok(Heads::Merged { rows, heads: dims.heads })
}

/// Checks all shapes against each other.
fn dims(qkv: &Qkv, call: &Attend) -> Result<Dims> {
    let (batch, heads, queries, width) = qkv.q()?.dims4()?;
    let (keys, values) = (qkv.k()?, qkv.v()?);
    let slots = match call.slots {
        Some(slots) => {
            let (k, v) = (slots.k()?, slots.v()?);
            let count = k.dim(2)?;
            if k.dims() != [batch, heads, count, width] || v.dims() != k.dims() {
                bail!(
                    "slots of shapes {:?} and {:?} do not fit {batch} x {heads} heads of width {width}",
                    k.dims(),
                    v.dims()
                );
            }
            count
        }
        None => 0,
    };
    let dims = Dims { batch, heads, width, queries, keys: keys.dim(2)?, slots };
    if keys.dims() != [batch, heads, dims.keys, width] || values.dims() != keys.dims() {
        bail!(
            "keys {:?} and values {:?} do not fit queries {:?}",
            keys.dims(),
            values.dims(),
            qkv.q()?.dims()
        );
    }
    let pattern = call.pattern;
    if (queries, dims.keys, slots) != (pattern.queries, pattern.keys, pattern.slots) {
        bail!(
            "a pattern of {} queries, {} keys, {} slots does not fit {queries}, {}, {slots}",
            pattern.queries,
            pattern.keys,
            pattern.slots,
            dims.keys
        );
    }
    if let Some(relative) = call.relative {
        let table = |table: &Tensor| {
            let (h, _, d) = table.dims3()?;
            if (h, d) == (heads, width) {
                Ok(())
            } else {
                bail!("a table of distances {:?} does not fit {heads} heads of width {width}", table.dims())
            }
        };
        table(&relative.table)?;
        relative.slots.as_ref().map(|slots| table(&slots.table)).transpose()?;
        for bias in [&relative.content_bias, &relative.position_bias] {
            if bias.dims() != [heads, width] {
                bail!("a bias {:?} does not fit {heads} heads of width {width}", bias.dims());
            }
        }
    }
    Ok(dims)
}

/// Hidden keys and slots of every sample; empty if none is hidden.
fn hidden(call: &Attend, dims: &Dims) -> Result<Vec<bool>> {
    let Some(mask) = call.mask else { return Ok(Vec::new()) };
    let (batch, given) = mask.dims2()?;
    let all = dims.keys + dims.slots;
    if batch != dims.batch || given < dims.keys || given > all {
        bail!(
            "a mask {:?} does not fit {} samples of {} keys and {} slots",
            mask.dims(),
            dims.batch,
            dims.keys,
            dims.slots
        );
    }
    let mask = mask.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let mut hidden = vec![false; batch * all];
    for (row, mask) in hidden.chunks_exact_mut(all.max(1)).zip(&mask) {
        row.iter_mut().zip(mask).for_each(|(hidden, &keep)| *hidden = keep == 0.0);
    }
    Ok(if hidden.contains(&true) { hidden } else { Vec::new() })
}

/// How an operand lies in its argument.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// One part of packed rows [b, n, parts * h * d].
    Packed { heads: usize, parts: usize, part: usize },
    /// [b, h, n, d].
    Split,
    /// [b, h, n, d], contiguous from `start` on in one dimension.
    Flat { start: usize, heads: usize, rows: usize, width: usize },
}

/// An operand: the number of its argument and how it lies there.
#[derive(Clone, Copy, Debug)]
struct Operand {
    argument: usize,
    form: Form,
}

impl Operand {
    fn place(&self, layout: &Layout) -> Result<Place> {
        let (stride, offset) = (layout.stride(), layout.start_offset());
        Ok(match (self.form, stride) {
            (Form::Packed { heads, parts, part }, &[batch, row, 1]) => {
                let head = layout.dims()[2] / parts / heads;
                Place { start: offset + part * heads * head, batch, head, row }
            }
            (Form::Split, &[batch, head, row, 1]) => Place { start: offset, batch, head, row },
            (Form::Flat { start, heads, rows, width }, &[1]) => {
                let head = rows * width;
                Place { start: offset + start, batch: heads * head, head, row: width }
            }
            (form, stride) => bail!("an operand of form {form:?} has strides {stride:?}"),
        })
    }
}

/// An argument's elements and how they lie.
type Argument<'a> = (&'a [f32], &'a Layout);

impl Operand {
    fn rows<'a>(&self, arguments: &[Argument<'a>]) -> Result<Rows<'a>> {
        let (data, layout) = arguments[self.argument];
        Ok(Rows { data, place: self.place(layout)? })
    }
}

/// The tensors that go into the operation.
struct Arguments(Vec<Tensor>);

impl Arguments {
    fn push(&mut self, tensor: &Tensor) -> Result<usize> {
        let unit = tensor.stride().last().is_none_or(|&step| step == 1);
        self.0.push(if unit { tensor.clone() } else { tensor.contiguous()? });
        Ok(self.0.len() - 1)
    }

    fn packed(&mut self, rows: &Tensor, heads: usize, parts: usize, which: &[usize]) -> Result<Vec<Operand>> {
        let argument = self.push(rows)?;
        let form = |&part: &usize| Form::Packed { heads, parts, part };
        Ok(which.iter().map(|part| Operand { argument, form: form(part) }).collect())
    }

    /// Several tensors [b, h, n, d] in one argument.
    fn flat(&mut self, tensors: &[Tensor]) -> Result<Vec<Operand>> {
        let argument = self.0.len();
        let mut start = 0;
        let mut operands = Vec::new();
        for tensor in tensors {
            let (_, heads, rows, width) = tensor.dims4()?;
            operands.push(Operand { argument, form: Form::Flat { start, heads, rows, width } });
            start += tensor.elem_count();
        }
        self.0.push(join(tensors)?);
        Ok(operands)
    }

    /// Queries, keys and values, in one argument if `one`.
    fn main(&mut self, qkv: &Qkv, one: bool) -> Result<[Operand; 3]> {
        let tensors = [qkv.q()?, qkv.k()?, qkv.v()?];
        let operands = match qkv {
            Qkv::Packed { rows, heads, parts } => match (parts.q, parts.k, parts.v) {
                (Some(q), Some(k), Some(v)) => self.packed(rows, *heads, parts.count, &[q, k, v])?,
                _ => bail!("rows of {parts:?} lack queries, keys or values"),
            },
            Qkv::Separate { .. } if one => self.flat(&tensors)?,
            Qkv::Separate { .. } => {
                let operand = |tensor| Ok(Operand { argument: self.push(tensor)?, form: Form::Split });
                tensors.iter().map(operand).collect::<Result<Vec<_>>>()?
            }
        };
        Ok([operands[0], operands[1], operands[2]])
    }

    fn slots(&mut self, slots: &Qkv) -> Result<(Operand, Operand)> {
        let operands = match slots {
            Qkv::Packed { rows, heads, parts } => match (parts.k, parts.v) {
                (Some(k), Some(v)) => self.packed(rows, *heads, parts.count, &[k, v])?,
                _ => bail!("slots of {parts:?} lack keys or values"),
            },
            Qkv::Separate { .. } => self.flat(&[slots.k()?, slots.v()?])?,
        };
        Ok((operands[0], operands[1]))
    }

    fn relative(&mut self, relative: &Relative) -> Result<RelativeForm> {
        let argument = self.0.len();
        let mut tensors =
            vec![relative.table.clone(), relative.content_bias.clone(), relative.position_bias.clone()];
        let mut slots = None;
        if let Some(table) = &relative.slots {
            tensors.push(table.table.clone());
            slots = Some((table.table.dim(1)?, table.segment, table.rank));
        }
        self.0.push(join(&tensors)?);
        Ok(RelativeForm { argument, distances: relative.table.dim(1)?, slots })
    }
}

/// All elements of some tensors, one after another.
fn join(tensors: &[Tensor]) -> Result<Tensor> {
    Tensor::cat(&tensors.iter().map(Tensor::flatten_all).collect::<Result<Vec<_>>>()?, 0)
}

/// `[table | u | v | slot table]`.
#[derive(Clone, Copy, Debug)]
struct RelativeForm {
    argument: usize,
    distances: usize,
    /// Distances of the slot table, length of a segment, slots per segment.
    slots: Option<(usize, usize, usize)>,
}

impl RelativeForm {
    /// Starts of the four pieces, and the end.
    fn bounds(&self, dims: &Dims) -> [usize; 5] {
        let row = dims.heads * dims.width;
        let table = self.distances * row;
        let slots = self.slots.map_or(0, |(distances, ..)| distances * row);
        [0, table, table + row, table + 2 * row, table + 2 * row + slots]
    }

    fn tables<'a>(&self, slab: &'a [f32], dims: &Dims) -> Tables<'a> {
        let [a, b, c, d, e] = self.bounds(dims);
        Tables {
            keys: Table { data: &slab[a..b], distances: self.distances },
            content_bias: &slab[b..c],
            position_bias: &slab[c..d],
            slots: self
                .slots
                .map(|(distances, segment, rank)| (Table { data: &slab[d..e], distances }, segment, rank)),
        }
    }

    /// The slab of gradients from those of every sample and head, summed over samples in order.
    fn collect(&self, grads: &[TableGrads], dims: &Dims) -> Vec<f32> {
        let [a, b, c, d, e] = self.bounds(dims);
        let mut slab = vec![0.0; e];
        for (index, grads) in grads.iter().enumerate() {
            let head = index % dims.heads;
            let pieces =
                [(a, &grads.keys), (b, &grads.content_bias), (c, &grads.position_bias), (d, &grads.slots)];
            for (start, piece) in pieces {
                let to = &mut slab[start + head * piece.len()..][..piece.len()];
                super::lanes::add_row(piece, to);
            }
        }
        slab
    }
}

struct Op {
    plan: Plan,
    dims: Dims,
    scale: f32,
    q: Operand,
    k: Operand,
    v: Operand,
    slots: Option<(Operand, Operand)>,
    hidden: Vec<bool>,
    relative: Option<RelativeForm>,
    /// Whether there will be a backward pass.
    save: bool,
    /// Largest logit and reciprocal sum of every query.
    stats: OnceLock<Vec<f32>>,
}

impl Op {
    fn problem<'a>(&'a self, arguments: &[Argument<'a>]) -> Result<Problem<'a>> {
        let rows = |operand: &Operand| operand.rows(arguments);
        let relative = match &self.relative {
            Some(form) => {
                let (data, layout) = arguments[form.argument];
                Some(form.tables(&data[layout.start_offset()..], &self.dims))
            }
            None => None,
        };
        Ok(Problem {
            plan: &self.plan,
            dims: self.dims,
            scale: self.scale,
            q: rows(&self.q)?,
            k: rows(&self.k)?,
            v: rows(&self.v)?,
            slots: match &self.slots {
                Some((k, v)) => Some((rows(k)?, rows(v)?)),
                None => None,
            },
            hidden: &self.hidden,
            relative,
        })
    }

    /// How the output lies: merged heads [b, n, h d].
    fn merged(&self) -> Form {
        Form::Packed { heads: self.dims.heads, parts: 1, part: 0 }
    }

    fn forward(&self, arguments: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        let arguments = arguments
            .iter()
            .map(|(storage, layout)| Ok((storage.as_slice::<f32>()?, *layout)))
            .collect::<Result<Vec<Argument>>>()?;
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let shape = Shape::from((batch, queries, heads * width));
        let place = Operand { argument: 0, form: self.merged() }.place(&Layout::contiguous(&shape))?;
        let mut out = vec![0.0; shape.elem_count()];
        let mut stats = vec![0.0; if self.save { 2 * batch * heads * queries } else { 0 }];
        let saved = self.save.then_some(stats.as_mut_slice());
        forward(&self.problem(&arguments)?, &mut out, place, saved);
        if self.save {
            self.stats.get_or_init(|| stats);
        }
        Ok((CpuStorage::F32(out), shape))
    }

    fn backward(&self, tensors: &[&Tensor], out: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let Some(stats) = self.stats.get() else {
            bail!("attention was run without a backward pass in view")
        };
        let (out, grad) = (out.contiguous()?, grad.contiguous()?);
        let guards: Vec<_> =
            tensors.iter().chain([&&out, &&grad]).map(|tensor| tensor.storage_and_layout()).collect();
        let slices = guards
            .iter()
            .map(|(storage, layout)| match &**storage {
                Storage::Cpu(storage) => Ok((storage.as_slice::<f32>()?, *layout)),
                _ => bail!("an operand of a CPU kernel left the CPU"),
            })
            .collect::<Result<Vec<Argument>>>()?;
        let mut buffers: Vec<Vec<f32>> =
            tensors.iter().map(|tensor| vec![0.0; tensor.elem_count()]).collect();
        let tables = {
            let shared: Vec<Shared> = buffers.iter_mut().map(|buffer| Shared::new(buffer)).collect();
            let target = |operand: &Operand| -> Result<Target> {
                let layout = Layout::contiguous(tensors[operand.argument].shape());
                Ok(Target { data: &shared[operand.argument], place: operand.place(&layout)? })
            };
            let merged = |argument| Operand { argument, form: self.merged() }.rows(&slices);
            let (out, grad) = (merged(tensors.len())?, merged(tensors.len() + 1)?);
            let given = Given { out, grad, stats };
            let grads = Grads {
                q: target(&self.q)?,
                k: target(&self.k)?,
                v: target(&self.v)?,
                slots: match &self.slots {
                    Some((k, v)) => Some((target(k)?, target(v)?)),
                    None => None,
                },
            };
            backward(&self.problem(&slices)?, &given, &grads)
        };
        if let Some(form) = &self.relative {
            buffers[form.argument] = form.collect(&tables, &self.dims);
        }
        let device = tensors[0].device();
        let tensor =
            |(buffer, like): (Vec<f32>, &&Tensor)| Tensor::from_vec(buffer, like.shape(), device).map(Some);
        buffers.into_iter().zip(tensors).map(tensor).collect()
    }
}

const NAME: &str = "pattern-attention";

impl CustomOp1 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1)])
    }

    fn bwd(&self, a: &Tensor, res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.backward(&[a], res, grad)?.swap_remove(0))
    }
}

impl CustomOp2 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1), (s2, l2)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[a, b], res, grad)?.into_iter();
        Ok((grads.next().flatten(), grads.next().flatten()))
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward(&[(s1, l1), (s2, l2), (s3, l3)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut grads = self.backward(&[a, b, c], res, grad)?.into_iter();
        Ok((grads.next().flatten(), grads.next().flatten(), grads.next().flatten()))
    }
}
