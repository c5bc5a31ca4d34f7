//! Launching the kernels, on whatever runs them.

use candle_core::Result;

use super::SOURCE;
use super::tables::{Places, Tables, block, header, memory_bytes};
use crate::kernel::attend::cpu::operands::{Dims, Place};
use crate::kernel::attend::cpu::plan::Plan;
use crate::kernel::cuda::{Arg, Launch, Machine, Module, THREADS, View};

/// A call, whatever its operands.
pub struct Call<'a> {
    pub plan: &'a Plan,
    pub dims: Dims,
    pub scale: f32,
    /// Hidden keys and slots of every sample; empty if none is.
    pub hidden: &'a [bool],
}

/// What a forward pass leaves for the backward pass.
pub struct Saved<M: Machine> {
    /// Every query's largest logit and reciprocal sum, [b, h, n, 2].
    stats: M::Floats,
    given: Given<M>,
}

/// Tables on a machine.
struct Given<M: Machine> {
    tiles: M::Ints,
    head_tiles: M::Ints,
    streams: M::Ints,
    bounds: M::Ints,
    queries: M::Ints,
    hidden: M::Ints,
    blocks: M::Ints,
    visits: M::Ints,
    most_tiles: usize,
    key_blocks: usize,
    shared: bool,
}

impl<M: Machine> Given<M> {
    fn new(machine: &M, call: &Call) -> Result<Self> {
        let tables = Tables::new(call.plan, &call.dims)?;
        let hidden: Vec<i32> = call.hidden.iter().map(|&hidden| hidden.into()).collect();
        Ok(Self {
            tiles: machine.ints(&tables.tiles)?,
            head_tiles: machine.ints(&tables.head_tiles)?,
            streams: machine.ints(&tables.streams)?,
            bounds: machine.ints(&tables.bounds)?,
            queries: machine.ints(&tables.queries)?,
            hidden: machine.ints(&hidden)?,
            blocks: machine.ints(&tables.blocks)?,
            visits: machine.ints(&tables.visits)?,
            most_tiles: tables.most_tiles,
            key_blocks: tables.key_blocks,
            shared: tables.shared,
        })
    }

    /// What all kernels but one read first; `between` is what lists the tiles that a block is for.
    fn arguments<'a, const N: usize>(
        &'a self,
        header: &'a M::Longs,
        between: [&'a M::Ints; N],
    ) -> Vec<Arg<'a, M>> {
        let mut arguments = vec![Arg::Longs(header), Arg::Ints(&self.tiles)];
        let rest = [&self.streams, &self.bounds, &self.queries, &self.hidden];
        arguments.extend(between.into_iter().chain(rest).map(Arg::Ints));
        arguments
    }
}

/// Queries, keys, values, keys and values of the slots: anything in place of what does not exist.
pub type Inputs<'a, M> = [View<'a, M>; 5];

/// The output [b, n, h d] and its gradient.
pub struct Outputs<'a, M: Machine> {
    pub out: View<'a, M>,
    pub grad: View<'a, M>,
}

impl Call<'_> {
    fn launch<M: Machine>(
        &self,
        machine: &M,
        kernel: &str,
        blocks: usize,
        arguments: Vec<Arg<M>>,
    ) -> Result<()> {
        let Dims { batch, heads, width, .. } = self.dims;
        let memory = memory_bytes(width);
        let defines = defines(width);
        let module = Module { name: "attend", source: SOURCE, defines: &defines };
        let shared = if kernel == "attend_means" { 0 } else { memory };
        machine.launch(&Launch { module, kernel, grid: [blocks, heads, batch], shared }, arguments)
    }

    /// Where the output and its gradient have their rows: merged heads, [b, n, h d].
    pub fn merged(&self) -> Place {
        let Dims { heads, width, queries, .. } = self.dims;
        let row = heads * width;
        Place { start: 0, batch: queries * row, head: width, row }
    }

    fn header(&self, places: &Places) -> Vec<i64> {
        let places = Places { out: Some(self.merged()), ..*places };
        header(&self.dims, self.plan.offset, !self.hidden.is_empty(), &places)
    }

    fn factor(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// The output and what its backward pass needs. Queries that see nothing give zeros.
    pub fn forward<M: Machine>(
        &self,
        machine: &M,
        inputs: Inputs<M>,
        places: &Places,
    ) -> Result<(M::Floats, Saved<M>)> {
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let given = Given::new(machine, self)?;
        let header = machine.longs(&self.header(places))?;
        let mut out = machine.zeros(batch * queries * heads * width)?;
        let mut stats = machine.zeros(2 * batch * heads * queries)?;
        let mut arguments = given.arguments(&header, [&given.head_tiles]);
        arguments.extend(inputs.map(Arg::In));
        arguments.extend([Arg::Float(self.factor()), Arg::Out(&mut out), Arg::Out(&mut stats)]);
        self.launch(machine, "attend_forward", given.most_tiles, arguments)?;
        Ok((out, Saved { stats, given }))
    }

    /// The gradients of all operands in one buffer of `total` floats, at the places that `places` names.
    pub fn backward<M: Machine>(
        &self,
        machine: &M,
        inputs: Inputs<M>,
        outputs: Outputs<M>,
        saved: &Saved<M>,
        places: &Places,
        total: usize,
    ) -> Result<M::Floats> {
        let Dims { batch, heads, queries, .. } = self.dims;
        let Outputs { out, grad } = outputs;
        let Saved { stats, given } = saved;
        let header = machine.longs(&self.header(places))?;
        let mut means = machine.fresh(batch * heads * queries)?;
        let mut grads = machine.zeros(total)?;
        let arguments = vec![Arg::Longs(&header), Arg::In(out), Arg::In(grad), Arg::Out(&mut means)];
        self.launch(machine, "attend_means", queries.div_ceil(THREADS), arguments)?;
        let [q, k, v, slot_k, slot_v] = inputs;
        let operands = || [q, k, v, slot_k, slot_v, grad, View::all(stats), View::all(&means)].map(Arg::In);
        let factors = || [Arg::Float(self.factor()), Arg::Float(self.scale)];
        let mut arguments = given.arguments(&header, [&given.head_tiles]);
        arguments.extend(operands());
        arguments.extend(factors());
        arguments.push(Arg::Out(&mut grads));
        self.launch(machine, "attend_back_queries", given.most_tiles, arguments)?;
        let mut arguments = given.arguments(&header, [&given.blocks, &given.visits]);
        arguments.extend(operands());
        arguments.extend(factors());
        arguments.extend([Arg::Int(given.shared.into()), Arg::Out(&mut grads)]);
        self.launch(machine, "attend_back_keys", given.key_blocks, arguments)?;
        Ok(grads)
    }
}

/// What [`SOURCE`] is compiled with for heads of this width.
pub fn defines(width: usize) -> [(&'static str, usize); 3] {
    [("WIDTH", width), ("BLOCK", block(width)), ("MEMORY", memory_bytes(width))]
}
