//! One token after another: rows of heads, and states that are written where they lie.

use std::cell::Cell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use super::compact;

/// A row per sample and head.
#[derive(Clone, Copy, Default)]
pub struct HeadRows<'a> {
    data: &'a [f32],
    sample: usize,
    head: usize,
    /// Heads, and how many share a row.
    heads: usize,
    shared: usize,
    width: usize,
}

impl<'a> HeadRows<'a> {
    /// Those of [b, groups, 1, width] for `heads` heads.
    fn new(storage: &'a CpuStorage, layout: &Layout, heads: usize) -> Result<Self> {
        let (_, groups, _, width) = layout.shape().dims4()?;
        let &[sample, head, _, element] = layout.stride() else {
            bail!("rows of heads have four dimensions")
        };
        if width > 1 && element != 1 {
            bail!("a kernel was given rows whose elements lie apart: {layout:?}");
        }
        let data = &storage.as_slice::<f32>()?[layout.start_offset()..];
        Ok(Self { data, sample, head, heads, shared: heads / groups.max(1), width })
    }

    /// The row of a head of a sample.
    pub fn at(&self, sample: usize, head: usize) -> &'a [f32] {
        &self.data[sample * self.sample + head / self.shared * self.head..][..self.width]
    }

    /// Heads of a sample.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Runs `f` on the rows of tensors [b, groups, 1, width] of the CPU in f32, whose groups are shared by neighbours of `heads` heads.
/// Rows need not lie beside each other, their elements must.
pub fn with_head_rows<T, const N: usize>(
    tensors: [&Tensor; N],
    heads: usize,
    f: impl FnOnce([HeadRows; N]) -> Result<T>,
) -> Result<T> {
    tensors.iter().try_for_each(|x| compact::expand(x))?;
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut rows = [HeadRows::default(); N];
    for (rows, (storage, layout)) in rows.iter_mut().zip(&guards) {
        match &**storage {
            Storage::Cpu(storage) => *rows = HeadRows::new(storage, layout, heads)?,
            _ => bail!("a kernel of the CPU was given a tensor of another device"),
        }
    }
    f(rows)
}

/// Runs `f` on the elements of `state`, a contiguous tensor of the CPU in f32, which it may change: so may those of other tensors with
/// the same memory.
pub fn in_place<T>(state: &Tensor, f: impl FnOnce(&mut [f32]) -> T) -> Result<T> {
    let call = InPlace { f: Cell::new(Some(f)), result: Cell::new(None) };
    state.inplace_op1(&call)?;
    match call.result.into_inner() {
        Some(result) => Ok(result),
        None => bail!("a state was not written"),
    }
}

struct InPlace<F, T> {
    f: Cell<Option<F>>,
    result: Cell<Option<T>>,
}

impl<T, F: FnOnce(&mut [f32]) -> T> InplaceOp1 for InPlace<F, T> {
    fn name(&self) -> &'static str {
        "in-place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let CpuStorage::F32(data) = storage else { bail!("only f32 is changed in place") };
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("a state lies apart: {layout:?}") };
        self.result.set(self.f.take().map(|f| f(&mut data[start..end])));
        Ok(())
    }
}
