//! Launching the kernels, on whatever runs them.

use candle_core::Result;

use super::Kernels;
use super::tables::{Distances, Places, Tables, Visits, block, header, key_block, memory_bytes, tile_bytes};
use crate::attend::CUDA_WIDEST_TENSOR_CORES;
use crate::attend::dims::{Dims, RowLayout};
use crate::attend::tile_plan::{TILE, TilePlan};
use crate::cpu::matmul_format::MatmulFormat;
use crate::cuda::{Arg, BufferView, KernelDevice, Launch, Module, THREADS};
use crate::dropout::AttentionDropout;

/// A call, whatever its operands.
pub struct Call<'a> {
    pub plan: &'a TilePlan,
    pub dims: Dims,
    pub scale: f32,
    /// Hidden keys and slots of every sample; empty if none is.
    pub hidden: &'a [bool],
    /// Tables of distances, if logits depend on them: then products are f32.
    pub relative: Option<Distances>,
    /// Dropout of the weights; only by tensor cores.
    pub dropout: Option<AttentionDropout>,
    /// Number format of the factors of products.
    pub format: MatmulFormat,
}

/// What a forward pass leaves for the backward pass.
pub struct Saved<M: KernelDevice> {
    /// Every query's largest logit and reciprocal sum, [b, h, n, 2].
    stats: M::Floats,
    given: DeviceTables<M>,
}

/// Tables on a machine.
struct DeviceTables<M: KernelDevice> {
    tiles: M::Ints,
    head_tiles: M::Ints,
    streams: M::Ints,
    bounds: M::Ints,
    queries: M::Ints,
    hidden: M::Ints,
    keys: Visited<M>,
    distances: Visited<M>,
    most_tiles: usize,
    shared: bool,
}

/// [`Visits`] on a machine.
struct Visited<M: KernelDevice> {
    blocks: M::Ints,
    entries: M::Ints,
    count: usize,
}

impl<M: KernelDevice> Visited<M> {
    fn new(machine: &M, visits: &Visits) -> Result<Self> {
        let (blocks, entries) = (machine.ints(&visits.blocks)?, machine.ints(&visits.entries)?);
        Ok(Self { blocks, entries, count: visits.count })
    }
}

impl<M: KernelDevice> DeviceTables<M> {
    fn new(machine: &M, call: &Call) -> Result<Self> {
        let tables =
            Tables::new(call.plan, &call.dims, call.relative, key_block(call.dims.width, call.kernels()))?;
        let hidden: Vec<i32> = call.hidden.iter().map(|&hidden| hidden.into()).collect();
        Ok(Self {
            tiles: machine.ints(&tables.tiles)?,
            head_tiles: machine.ints(&tables.head_tiles)?,
            streams: machine.ints(&tables.streams)?,
            bounds: machine.ints(&tables.bounds)?,
            queries: machine.ints(&tables.queries)?,
            hidden: machine.ints(&hidden)?,
            keys: Visited::new(machine, &tables.keys)?,
            distances: Visited::new(machine, &tables.distances)?,
            most_tiles: tables.most_tiles,
            shared: tables.shared,
        })
    }

    /// What all kernels but one read first; `between` is what lists the tiles that a block is for.
    fn arguments<'a>(&'a self, header: &'a M::Longs, between: Vec<&'a M::Ints>) -> Vec<Arg<'a, M>> {
        let mut arguments = vec![Arg::Longs(header), Arg::Ints(&self.tiles)];
        let rest = [&self.streams, &self.bounds, &self.queries, &self.hidden];
        arguments.extend(between.into_iter().chain(rest).map(Arg::Ints));
        arguments
    }
}

/// Queries, keys, values, keys and values of the slots, `[table | u | v | slot table]`: anything in place of what does not
/// exist.
pub type Inputs<'a, M> = [BufferView<'a, M>; 6];

/// The output [b, n, h d] and its gradient.
pub struct Outputs<'a, M: KernelDevice> {
    pub out: BufferView<'a, M>,
    pub grad: BufferView<'a, M>,
}

impl Call<'_> {
    fn kernels(&self) -> Kernels {
        match self.relative {
            Some(_) => Kernels::Relative,
            None if self.dims.width <= CUDA_WIDEST_TENSOR_CORES => Kernels::TensorCores(self.format),
            None => Kernels::Plain,
        }
    }

    fn launch<M: KernelDevice>(
        &self,
        machine: &M,
        kernel: &str,
        blocks: usize,
        arguments: Vec<Arg<M>>,
    ) -> Result<()> {
        let Dims { batch, heads, width, .. } = self.dims;
        let kernels = self.kernels();
        let defines = defines(width, kernels);
        let (name, source) = kernels.source();
        let module = Module { name, source, defines: &defines };
        let shared = match (kernel, kernels) {
            ("attend_means", Kernels::Plain | Kernels::Relative) | ("attend_back_biases", _) => 0,
            ("attend_forward" | "attend_means", Kernels::TensorCores(_)) => {
                memory_bytes(width, kernels) - tile_bytes(width)
            }
            _ => memory_bytes(width, kernels),
        };
        let samples = if is_summing(kernel) { 1 } else { batch };
        machine.launch(&Launch { module, kernel, grid: [blocks, heads, samples], shared }, arguments)
    }

    /// Where the output and its gradient have their rows: merged heads, [b, n, h d].
    pub fn merged(&self) -> RowLayout {
        let Dims { heads, width, queries, .. } = self.dims;
        let row = heads * width;
        RowLayout { start: 0, batch: queries * row, head: width, row }
    }

    fn header(&self, places: &Places) -> Vec<i64> {
        let places = Places { out: Some(self.merged()), ..*places };
        header(&self.dims, self.plan.offset, !self.hidden.is_empty(), self.relative, self.dropout, &places)
    }

    fn factor(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// The output and what its backward pass needs. Queries that see nothing give zeros.
    pub fn forward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: Inputs<M>,
        places: &Places,
    ) -> Result<(M::Floats, Saved<M>)> {
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let given = DeviceTables::new(machine, self)?;
        let header = machine.longs(&self.header(places))?;
        let mut out = machine.zeros(batch * queries * heads * width)?;
        let mut stats = machine.zeros(2 * batch * heads * queries)?;
        let mut arguments = given.arguments(&header, vec![&given.head_tiles]);
        arguments.extend(inputs.map(Arg::In));
        arguments.extend([Arg::Float(self.factor()), Arg::Out(&mut out), Arg::Out(&mut stats)]);
        self.launch(machine, "attend_forward", given.most_tiles, arguments)?;
        Ok((out, Saved { stats, given }))
    }

    /// The gradients of all operands in one buffer of `total` floats, at the places that `places` names.
    pub fn backward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: Inputs<M>,
        outputs: Outputs<M>,
        saved: &Saved<M>,
        places: &Places,
        total: usize,
    ) -> Result<M::Floats> {
        let Dims { batch, heads, width, queries, .. } = self.dims;
        let Outputs { out, grad } = outputs;
        let Saved { stats, given } = saved;
        let header = &machine.longs(&self.header(places))?;
        let mut means = machine.fresh(batch * heads * queries)?;
        let mut grads = machine.zeros(total)?;
        let arguments = vec![Arg::Longs(header), Arg::In(out), Arg::In(grad), Arg::Out(&mut means)];
        let at_once = if let Kernels::TensorCores(_) = self.kernels() { TILE } else { THREADS };
        self.launch(machine, "attend_means", queries.div_ceil(at_once), arguments)?;
        let back =
            Back { header, given, inputs, outputs: [grad, BufferView::all(stats), BufferView::all(&means)] };
        let mut arguments = self.back(&back, vec![&given.head_tiles]);
        arguments.push(Arg::Out(&mut grads));
        self.launch(machine, "attend_back_queries", given.most_tiles, arguments)?;
        let is_relative = self.relative.is_some();
        let parts = if is_relative { batch * heads * given.keys.count * width } else { 1 };
        let mut parts = machine.fresh(parts)?;
        let mut arguments = self.back(&back, vec![&given.keys.blocks, &given.keys.entries]);
        arguments.extend([Arg::Int(given.shared.into()), Arg::Out(&mut parts), Arg::Out(&mut grads)]);
        self.launch(machine, "attend_back_keys", given.keys.count, arguments)?;
        if is_relative {
            self.back_relative(machine, &back, &parts, &mut grads)?;
        }
        Ok(grads)
    }

    /// What the kernels of the backward pass read first.
    fn back<'a, M: KernelDevice>(&self, back: &Back<'a, M>, between: Vec<&'a M::Ints>) -> Vec<Arg<'a, M>> {
        let mut arguments = back.given.arguments(back.header, between);
        arguments.extend(back.inputs.map(Arg::In));
        arguments.extend(back.outputs.map(Arg::In));
        arguments.extend([Arg::Float(self.factor()), Arg::Float(self.scale)]);
        arguments
    }

    /// The gradients of the tables of distances and of both biases; `key_parts` are those of blocks of keys in the gradient
    /// of u.
    fn back_relative<M: KernelDevice>(
        &self,
        machine: &M,
        back: &Back<M>,
        key_parts: &M::Floats,
        grads: &mut M::Floats,
    ) -> Result<()> {
        let Dims { batch, heads, width, .. } = self.dims;
        let DeviceTables { keys, distances, shared, .. } = back.given;
        let mut parts = machine.fresh(heads * distances.count * width)?;
        let mut arguments = self.back(back, vec![&distances.blocks, &distances.entries]);
        arguments.extend([
            Arg::Int((*shared).into()),
            Arg::Int(batch),
            Arg::Out(&mut parts),
            Arg::Out(grads),
        ]);
        self.launch(machine, "attend_back_distances", distances.count, arguments)?;
        let mut arguments = vec![Arg::Longs(back.header), Arg::In(BufferView::all(key_parts))];
        arguments.extend([Arg::Int(keys.count), Arg::Int(batch), Arg::In(BufferView::all(&parts))]);
        arguments.extend([Arg::Int(distances.count), Arg::Out(grads)]);
        self.launch(machine, "attend_back_biases", 1, arguments)
    }
}

/// What a backward pass reads.
struct Back<'a, M: KernelDevice> {
    header: &'a M::Longs,
    given: &'a DeviceTables<M>,
    inputs: Inputs<'a, M>,
    /// The gradient of the output, what the forward pass saved, the products of output and gradient.
    outputs: [BufferView<'a, M>; 3],
}

/// Whether one block of a kernel sums over all samples.
fn is_summing(kernel: &str) -> bool {
    matches!(kernel, "attend_back_distances" | "attend_back_biases")
}

/// What the source is compiled with for heads of this width.
pub fn defines(width: usize, kernels: Kernels) -> [(&'static str, usize); 5] {
    let (keys, memory) = (block(width, kernels), memory_bytes(width, kernels));
    let [relative, bf16] =
        [Kernels::Relative, Kernels::TensorCores(MatmulFormat::Bf16)].map(|of| usize::from(kernels == of));
    [("WIDTH", width), ("BLOCK", keys), ("RELATIVE", relative), ("BF16", bf16), ("MEMORY", memory)]
}
