//! Which tensors an attention call hands to the custom operation, and where in them its operands lie.

use candle_core::{DType, Layout, Result, Tensor, bail};

use super::dims::{Dims, RowLayout};
use super::{Attend, Relative};
use crate::heads::Qkv;

/// Sizes of a call, all shapes checked against each other.
pub fn dims(qkv: &Qkv, call: &Attend) -> Result<Dims> {
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
    if let Some(bias) = call.bias {
        if call.relative.is_some() {
            bail!("logits take a bias or relative positions, not both");
        }
        if bias.dims() != [heads, queries, dims.keys] {
            bail!(
                "a bias {:?} does not fit {heads} heads, {queries} queries, {} keys",
                bias.dims(),
                dims.keys
            );
        }
    }
    Ok(dims)
}

/// Hidden keys and slots of every sample; empty if none is hidden.
pub fn hidden(call: &Attend, dims: &Dims) -> Result<Vec<bool>> {
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
    /// [h, n, keys], shared by all samples.
    Bias,
}

/// An operand: its argument and how it lies there.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Number of the argument.
    pub argument: usize,
    form: Form,
}

impl Operand {
    /// Stands for an operand that a call does not have.
    #[cfg(feature = "cuda")]
    pub const NONE: Self = Self { argument: 0, form: Form::Split };

    /// Merged heads [b, n, h d], the only operand of argument `argument`.
    pub fn merged(argument: usize, heads: usize) -> Self {
        Self { argument, form: Form::Packed { heads, parts: 1, part: 0 } }
    }

    /// Where its rows lie in an argument of this layout.
    pub fn place(&self, layout: &Layout) -> Result<RowLayout> {
        let (stride, offset) = (layout.stride(), layout.start_offset());
        Ok(match (self.form, stride) {
            (Form::Packed { heads, parts, part }, &[batch, row, 1]) => {
                let head = layout.dims()[2] / parts / heads;
                RowLayout { start: offset + part * heads * head, batch, head, row }
            }
            (Form::Split, &[batch, head, row, 1]) => RowLayout { start: offset, batch, head, row },
            (Form::Flat { start, heads, rows, width }, &[1]) => {
                let head = rows * width;
                RowLayout { start: offset + start, batch: heads * head, head, row: width }
            }
            (Form::Bias, &[head, row, 1]) => RowLayout { start: offset, batch: 0, head, row },
            (form, stride) => bail!("an operand of form {form:?} has strides {stride:?}"),
        })
    }
}

/// All operands of a call.
pub struct Operands {
    /// Queries, keys, values.
    pub main: [Operand; 3],
    /// Keys and values of the slots.
    pub slots: Option<[Operand; 2]>,
    /// Position-dependent operands.
    pub relative: Option<RelativeForm>,
    /// Added to logits.
    pub bias: Option<Operand>,
}

impl Operands {
    /// The tensors that go into the operation (at most three), and the operands in them.
    pub fn gather(qkv: &Qkv, call: &Attend) -> Result<(Vec<Tensor>, Self)> {
        let mut arguments = Arguments(Vec::new());
        let others = call.slots.is_some() || call.relative.is_some() || call.bias.is_some();
        let main = arguments.main(qkv, others)?;
        let slots = call.slots.map(|slots| arguments.slots(slots)).transpose()?;
        let relative = call.relative.map(|relative| arguments.relative(relative)).transpose()?;
        let bias = call.bias.map(|bias| arguments.push(bias)).transpose()?;
        let bias = bias.map(|argument| Operand { argument, form: Form::Bias });
        Ok((arguments.0, Self { main, slots, relative, bias }))
    }
}

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

    fn slots(&mut self, slots: &Qkv) -> Result<[Operand; 2]> {
        let operands = match slots {
            Qkv::Packed { rows, heads, parts } => match (parts.k, parts.v) {
                (Some(k), Some(v)) => self.packed(rows, *heads, parts.count, &[k, v])?,
                _ => bail!("slots of {parts:?} lack keys or values"),
            },
            Qkv::Separate { .. } => self.flat(&[slots.k()?, slots.v()?])?,
        };
        Ok([operands[0], operands[1]])
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
pub struct RelativeForm {
    /// Number of the argument.
    pub argument: usize,
    /// Rows of the table.
    pub distances: usize,
    /// Distances of the slot table, length of a segment, slots per segment.
    pub slots: Option<(usize, usize, usize)>,
}

impl RelativeForm {
    /// Starts of the four pieces, and the end.
    pub(super) fn bounds(&self, dims: &Dims) -> [usize; 5] {
        let row = dims.heads * dims.width;
        let table = self.distances * row;
        let slots = self.slots.map_or(0, |(distances, ..)| distances * row);
        [0, table, table + row, table + 2 * row, table + 2 * row + slots]
    }
}
