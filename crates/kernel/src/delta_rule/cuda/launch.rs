//! Launching the kernels, on whatever runs them.

use candle_core::Result;

use crate::cuda::{Arg, BufferView, KernelDevice, Launch, Module, THREADS};

/// Rows of a chunk and columns of a tile of values; CHUNK and COLUMNS of the source.
pub const CHUNK: usize = 32;
const COLUMNS: usize = 32;

/// A call, whatever its operands.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub samples: usize,
    pub heads: usize,
    pub len: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub decays: bool,
    pub masked: bool,
}

/// Operands: rows [samples, len, heads * (2 keys + values)], betas and logarithms of decays [samples, heads, len], and which steps
/// are kept, [samples, len]; anything in place of what does not exist.
pub struct Inputs<'a, M: KernelDevice> {
    pub rows: BufferView<'a, M>,
    pub beta: BufferView<'a, M>,
    pub log_decay: BufferView<'a, M>,
    pub keep: BufferView<'a, M>,
}

/// Bytes of a block's working memory for keys of this width; Memory of the source.
pub fn memory_bytes(width: usize) -> usize {
    let (width, square) = (padded(width), CHUNK * (COLUMNS + 1));
    4 * (2 * CHUNK * (width + 1) + 2 * width * (COLUMNS + 1) + 8 * square + 5 * CHUNK)
}

/// What the source is compiled with for keys of this width.
pub fn defines(width: usize) -> [(&'static str, usize); 2] {
    [("WIDTH", padded(width)), ("MEMORY", memory_bytes(width))]
}

/// Whole tiles.
fn padded(width: usize) -> usize {
    width.next_multiple_of(32)
}

impl Call {
    fn row(&self) -> usize {
        self.heads * (2 * self.key_width + self.value_width)
    }

    fn steps(&self) -> usize {
        self.samples * self.heads * self.len
    }

    fn tiles(&self) -> usize {
        self.value_width.div_ceil(COLUMNS)
    }

    fn launch<M: KernelDevice>(&self, machine: &M, kernel: &str, arguments: Vec<Arg<M>>) -> Result<()> {
        let defines = defines(self.key_width);
        let module = Module { name: super::NAME, source: super::SOURCE, defines: &defines };
        let (grid, shared) = ([self.tiles(), self.heads, self.samples], memory_bytes(self.key_width));
        machine.launch(&Launch { module, kernel, grid, shared }, arguments)
    }

    /// Sizes, in the order of Header in the source.
    fn header<M: KernelDevice>(&self, machine: &M) -> Result<M::Longs> {
        let Self { heads, len, key_width, value_width, decays, masked, .. } = *self;
        let words = [heads, len, key_width, value_width, decays.into(), masked.into()];
        machine.longs(&words.map(|word| word as i64))
    }

    fn arguments<'a, M: KernelDevice>(header: &'a M::Longs, inputs: &Inputs<'a, M>) -> Vec<Arg<'a, M>> {
        let mut arguments = vec![Arg::Longs(header)];
        arguments.extend([inputs.rows, inputs.beta, inputs.log_decay, inputs.keep].map(Arg::In));
        arguments
    }

    /// The results [samples, len, heads * values], and if `keep_states` the state before every chunk.
    pub fn forward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: &Inputs<M>,
        keep_states: bool,
    ) -> Result<(M::Floats, M::Floats)> {
        let header = self.header(machine)?;
        let chunks = self.len.div_ceil(CHUNK);
        let states = self.samples * self.heads * chunks * self.key_width * self.value_width;
        let mut states = machine.fresh(if keep_states { states } else { 1 })?;
        let mut out = machine.fresh(self.steps() * self.value_width)?;
        let mut arguments = Self::arguments(&header, inputs);
        arguments.extend([Arg::Int(keep_states.into()), Arg::Out(&mut states), Arg::Out(&mut out)]);
        self.launch(machine, "delta_forward", arguments)?;
        Ok((out, states))
    }

    /// The gradients of rows, betas and, where there are any, logarithms of decays, from those of the results.
    pub fn backward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: &Inputs<M>,
        states: BufferView<M>,
        grad: BufferView<M>,
    ) -> Result<Vec<M::Floats>> {
        let header = self.header(machine)?;
        let (tiles, steps, width) = (self.tiles(), self.steps(), 2 * self.heads * self.key_width);
        let positions = self.samples * self.len;
        let mut rows = machine.fresh(positions * self.row())?;
        let mut parts = machine.fresh(tiles * positions * width)?;
        let mut betas = machine.fresh(tiles * steps)?;
        let mut decays = machine.fresh(if self.decays { tiles * steps } else { 1 })?;
        let mut arguments = Self::arguments(&header, inputs);
        arguments.extend([Arg::In(states), Arg::In(grad)]);
        arguments.extend([&mut parts, &mut betas, &mut decays, &mut rows].map(Arg::Out));
        self.launch(machine, "delta_backward", arguments)?;
        self.sum(machine, &parts, (positions * width, width, self.row()), &mut rows)?;
        let mut grads = vec![rows];
        for parts in [Some(&betas), self.decays.then_some(&decays)].into_iter().flatten() {
            let mut sums = machine.fresh(steps)?;
            self.sum(machine, parts, (steps, self.len, self.len), &mut sums)?;
            grads.push(sums);
        }
        Ok(grads)
    }

    /// Sums what the tiles of values add: `count` elements each, in rows of `inner` that come to lie `stride` apart.
    fn sum<M: KernelDevice>(
        &self,
        machine: &M,
        parts: &M::Floats,
        (count, inner, stride): (usize, usize, usize),
        sums: &mut M::Floats,
    ) -> Result<()> {
        let defines = defines(self.key_width);
        let module = Module { name: super::NAME, source: super::SOURCE, defines: &defines };
        let arguments = vec![
            Arg::In(BufferView::all(parts)),
            Arg::Int(self.tiles()),
            Arg::Long(count),
            Arg::Int(inner),
            Arg::Int(stride),
            Arg::Out(sums),
        ];
        let grid = [count.div_ceil(THREADS), 1, 1];
        machine.launch(&Launch { module, kernel: "delta_sum", grid, shared: 0 }, arguments)
    }
}
