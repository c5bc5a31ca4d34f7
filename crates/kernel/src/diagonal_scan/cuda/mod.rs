//! The CUDA kernels, and the operation that runs them.

#[cfg(test)]
pub(crate) mod tests;

use candle_core::{Layout, Result, Shape, Tensor};

use super::Direction;
use crate::cuda::tensor_device::{DeviceOp, OnDevice, TensorDevice};
use crate::cuda::{Arg, BufferView, KernelDevice, Launch, Module, THREADS, rows};
use crate::op::{self, SavedOutput};
use crate::tape;

/// The kernels.
const MODULE: Module = Module { name: "diagonal-scan", source: include_str!("scan.cu"), defines: &[] };

/// Rows of a chunk; CHUNK of the source.
const CHUNK: usize = 64;

/// Runs the kernels on f32 tensors `u` [b, n, 2 p] and `a` [2, p].
pub(super) fn fused(u: &Tensor, a: &Tensor, direction: Direction) -> Result<Tensor> {
    let (samples, len, width) = u.dims3()?;
    let scan = Scan { samples, len, states: width / 2, direction };
    tape::apply(&[&u.contiguous()?, &a.contiguous()?], OnDevice(scan))
}

struct Scan {
    samples: usize,
    len: usize,
    /// p.
    states: usize,
    direction: Direction,
}

/// Numbers of a row, and the first of them that are meant.
#[derive(Clone, Copy, Default)]
struct Columns {
    row: usize,
    at: usize,
}

/// One recurrence.
#[derive(Clone, Copy, Default)]
struct Pass {
    reversed: bool,
    conjugate: bool,
    x: Columns,
    y: Columns,
    /// Where the parts of a gradient begin.
    part: usize,
}

impl Scan {
    fn chunks(&self) -> usize {
        self.len.div_ceil(CHUNK)
    }

    /// Numbers of a state and its sums in all chunks.
    fn per_chunks(&self) -> usize {
        self.samples * self.chunks() * 2 * self.states
    }

    /// Columns of one direction of the result.
    fn of_result(&self, index: usize) -> Columns {
        Columns { row: self.direction.count() * 2 * self.states, at: index * 2 * self.states }
    }

    /// Sizes and places, in the order of Header in the source.
    fn header<M: KernelDevice>(&self, machine: &M, pass: Pass) -> Result<M::Longs> {
        let Pass { reversed, conjugate, x, y, part } = pass;
        let flags = [reversed, conjugate].map(usize::from);
        let words =
            [self.len, self.states, self.chunks(), flags[0], flags[1], x.row, x.at, y.row, y.at, part];
        machine.longs(&words.map(|word| word as i64))
    }

    fn launch<M: KernelDevice>(&self, machine: &M, kernel: &str, arguments: Vec<Arg<M>>) -> Result<()> {
        let chunks = if kernel == "scan_carry" { 1 } else { self.chunks() };
        let grid = [self.states.div_ceil(THREADS), chunks, self.samples];
        machine.launch(&Launch { module: MODULE, kernel, grid, shared: 0 }, arguments)
    }

    /// Writes the states of one recurrence over `x` to `y`.
    fn run<M: KernelDevice>(
        &self,
        machine: &M,
        pass: Pass,
        [x, a]: [BufferView<M>; 2],
        y: &mut M::Floats,
    ) -> Result<()> {
        let header = &self.header(machine, pass)?;
        let mut ends = machine.fresh(self.per_chunks())?;
        let arguments = vec![Arg::Longs(header), Arg::In(x), Arg::In(a), Arg::Out(&mut ends)];
        self.launch(machine, "scan_ends", arguments)?;
        self.launch(machine, "scan_carry", vec![Arg::Longs(header), Arg::In(a), Arg::Out(&mut ends)])?;
        let arguments = vec![Arg::Longs(header), Arg::In(x), Arg::In(a), Arg::Out(&mut ends), Arg::Out(y)];
        self.launch(machine, "scan_rows", arguments)
    }
}

impl DeviceOp for Scan {
    fn name(&self) -> &'static str {
        "diagonal-scan"
    }

    fn shape(&self) -> Shape {
        (self.samples, self.len, self.of_result(0).row).into()
    }

    fn needs_output(&self) -> bool {
        true
    }

    fn forward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[(&M::Floats, &Layout)],
    ) -> Result<M::Floats> {
        let view = |index: usize| {
            let (floats, layout) = operands[index];
            BufferView::<M> { floats, start: layout.start_offset() }
        };
        let mut out = machine.fresh(self.samples * self.len * self.of_result(0).row)?;
        for (index, &reversed) in self.direction.reversed().iter().enumerate() {
            let x = Columns { row: 2 * self.states, at: 0 };
            let pass = Pass { reversed, x, y: self.of_result(index), ..Pass::default() };
            self.run(machine, pass, [view(0), view(1)], &mut out)?;
        }
        Ok(out)
    }

    /// The gradients of the states, which are those of `u`, are the recurrence with the conjugate of a, the other way round.
    fn backward_on<M: TensorDevice>(
        &self,
        machine: &M,
        operands: &[&Tensor],
        out: SavedOutput,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let tensors = [operands[1], &op::result(out)?.contiguous()?, &grad.contiguous()?];
        let guards = tensors.map(Tensor::storage_and_layout);
        let mut views = Vec::with_capacity(3);
        for (storage, layout) in &guards {
            views.push(BufferView::<M> { floats: M::floats(storage)?, start: layout.start_offset() });
        }
        let (a, out, grad) = (views[0], views[1], views[2]);
        let count = self.samples * self.len * 2 * self.states;
        let own = Columns { row: 2 * self.states, at: 0 };
        let mut parts = machine.fresh(self.direction.count() * self.per_chunks())?;
        let mut sums: Option<M::Floats> = None;
        for (index, &reversed) in self.direction.reversed().iter().enumerate() {
            let mut slopes = machine.fresh(count)?;
            let from = self.of_result(index);
            let pass = Pass { reversed: !reversed, conjugate: true, x: from, y: own, part: 0 };
            self.run(machine, pass, [grad, a], &mut slopes)?;
            let part = index * self.per_chunks();
            let header = &self.header(machine, Pass { reversed, conjugate: false, x: own, y: from, part })?;
            let slopes_view = BufferView::all(&slopes);
            let arguments =
                vec![Arg::Longs(header), Arg::In(slopes_view), Arg::In(out), Arg::Out(&mut parts)];
            self.launch(machine, "scan_slopes", arguments)?;
            match &mut sums {
                None => sums = Some(slopes),
                Some(sums) => rows::add(machine, BufferView::all(&slopes), count, sums, 0)?,
            }
        }
        let part_rows = self.direction.count() * self.samples * self.chunks();
        let da = rows::column_sums(machine, BufferView::all(&parts), [part_rows, 2 * self.states])?;
        let du = sums.map(|sums| machine.tensor(sums, operands[0].shape().clone())).transpose()?;
        Ok(vec![du, Some(machine.tensor(da, operands[1].shape().clone())?)])
    }
}
