//! Launching the kernels, on whatever runs them.

use candle_core::Result;

use crate::cuda::{Arg, BufferView, KernelDevice, Launch, Module, THREADS};
use crate::linear_attention::{Guard, TINY};

/// Rows of a chunk and columns of a tile; CHUNK, COLUMNS and DEPTH of the source.
const CHUNK: usize = 64;
const COLUMNS: usize = 64;
const DEPTH: usize = 32;

/// Threads of a warp; WARP of the source.
const WARP: usize = 32;

/// Most parts of a sequence whose sums do not depend on the position, so that they take constant memory.
const PARTS: usize = 64;

/// How rows become features within a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// They are features.
    Identity,
    /// x where x > 0, else this times x.
    Leaky(f32),
    /// elu(x) + 1.
    Elu1,
}

/// Numbers per position in a decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayWidth {
    /// Nothing decays.
    None,
    /// One.
    Row,
    /// One per feature.
    Channel,
}

/// A call, whatever its operands.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub samples: usize,
    pub heads: usize,
    /// Groups of heads that share queries and keys.
    pub groups: usize,
    pub queries: usize,
    pub keys: usize,
    /// Width of a query.
    pub width: usize,
    pub values: usize,
    pub activation: Activation,
    /// Features are turned by cosFormer's angles: two per channel.
    pub turned: bool,
    pub guard: Option<Guard>,
    /// Added to every entry of the denominator's sums.
    pub den_eps: f32,
    pub causal: bool,
    pub decay: DecayWidth,
    /// Decays get gradients.
    pub learned: bool,
    pub masked: bool,
}

/// Where rows lie in a buffer: row `i` of head `h` of sample `b` starts at `start + b * batch + h * head + i * row`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    pub start: usize,
    pub batch: usize,
    pub head: usize,
    pub row: usize,
    /// Heads of the operand: those of a call that share one are neighbours.
    pub heads: usize,
}

impl Place {
    /// [samples, heads, rows, width], contiguous.
    pub fn split(heads: usize, rows: usize, width: usize) -> Self {
        Self { start: 0, batch: heads * rows * width, head: rows * width, row: width, heads }
    }

    /// [samples, rows, heads * width], contiguous.
    pub fn merged(heads: usize, rows: usize, width: usize) -> Self {
        Self { start: 0, batch: rows * heads * width, head: width, row: heads * width, heads }
    }
}

/// What a pass reads; anything in place of what does not exist.
pub struct Inputs<'a, M: KernelDevice> {
    /// Queries, keys, values.
    pub operands: [(BufferView<'a, M>, Place); 3],
    /// [samples, keys]: 0 hides a key.
    pub keep: BufferView<'a, M>,
    /// Sine and cosine of each position.
    pub angles: BufferView<'a, M>,
    /// Logarithms of decays, [samples, heads, keys, 1 or features]: of keys before the query, and of those behind it.
    pub logs: [BufferView<'a, M>; 2],
}

/// What a backward pass reads besides: the output and its gradient [samples, queries, heads * values], and the denominators.
pub struct Outputs<'a, M: KernelDevice> {
    pub out: BufferView<'a, M>,
    pub grad: BufferView<'a, M>,
    pub dens: BufferView<'a, M>,
}

/// Where gradients of queries, keys and values go: numbers of buffers of these lengths, and places.
pub struct Targets {
    pub lengths: Vec<usize>,
    pub operands: [(usize, Place); 3],
    /// Whether some elements of the buffers are no operand's.
    pub gaps: bool,
}

/// Gradients: the buffers of the operands, and those of the decays.
pub struct Gradients<M: KernelDevice> {
    pub operands: Vec<M::Floats>,
    pub logs: Vec<M::Floats>,
}

/// What all kernels of a pass in one direction are given.
struct Pass<'a, M: KernelDevice> {
    header: &'a M::Longs,
    inputs: &'a Inputs<'a, M>,
    /// Gradients of numerators and denominators.
    grad: BufferView<'a, M>,
    /// Number of the direction: 1 are keys behind the query.
    direction: usize,
}

/// Bytes of a block's working memory; Memory of the source.
pub fn memory_bytes(decay: DecayWidth) -> usize {
    let tile = CHUNK * (COLUMNS + 1);
    let sides = (2 * CHUNK * (DEPTH + 1)).max(tile);
    let steps = if decay == DecayWidth::Channel { tile } else { 0 };
    4 * (sides + tile + DEPTH * (COLUMNS + 1) + 3 * CHUNK + steps)
}

/// What the source is compiled with.
pub fn defines(activation: Activation, turned: bool, decay: DecayWidth) -> [(&'static str, usize); 4] {
    let activation = match activation {
        Activation::Identity => 0,
        Activation::Leaky(_) => 1,
        Activation::Elu1 => 2,
    };
    let memory = memory_bytes(decay);
    [("ACTIVATION", activation), ("TURN", turned.into()), ("DECAY", decay as usize), ("MEMORY", memory)]
}

impl Call {
    fn features(&self) -> usize {
        if self.turned { 2 * self.width } else { self.width }
    }

    /// Columns of values with the one that sums up the denominator.
    fn columns(&self) -> usize {
        self.values + usize::from(self.guard.is_some())
    }

    /// Whether rows see their chunk up to themselves, and not the sums of all keys.
    fn within(&self) -> bool {
        self.causal || self.decay != DecayWidth::None
    }

    /// Directions of the sums: keys up to the query, and those behind it where they decay in another way.
    fn directions(&self) -> usize {
        if self.within() && !self.causal { 2 } else { 1 }
    }

    /// Rows of a part of a sequence.
    fn span(&self) -> usize {
        if self.within() {
            return CHUNK;
        }
        self.queries.max(self.keys).div_ceil(PARTS).max(1).next_multiple_of(CHUNK)
    }

    fn parts(&self) -> usize {
        self.queries.max(self.keys).div_ceil(self.span())
    }

    fn log_width(&self) -> usize {
        if self.decay == DecayWidth::Channel { self.features() } else { 1 }
    }

    fn guard(&self) -> (usize, f32) {
        match self.guard {
            None => (0, 0.0),
            Some(Guard::ClampMin(eps)) => (1, eps as f32),
            Some(Guard::SignedClamp(eps)) => (2, eps as f32),
            Some(Guard::AbsClampMin(eps)) => (3, eps as f32),
            Some(Guard::Add(eps)) => (4, eps as f32),
            Some(Guard::NonZero) => (5, TINY as f32),
        }
    }

    /// Sizes and places, in the order of Header in the source.
    fn header<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: &Inputs<M>,
        grad: Place,
        to: [Place; 3],
    ) -> Result<M::Longs> {
        let sizes = [
            self.heads,
            self.queries,
            self.keys,
            self.features(),
            self.values,
            self.columns(),
            self.parts(),
            self.masked.into(),
            self.guard().0,
        ];
        let [q, k, v] = inputs.operands.each_ref().map(|(_, place)| *place);
        let [d_q, d_k, d_v] = to;
        let places = [q, k, v, self.merged(), grad, d_q, d_k, d_v];
        let places =
            places.iter().flat_map(|place| [place.start, place.batch, place.head, place.row, place.heads]);
        let words: Vec<i64> = sizes.into_iter().chain(places).map(|word| word as i64).collect();
        machine.longs(&words)
    }

    /// Where the output and its gradient have their rows.
    fn merged(&self) -> Place {
        Place::merged(self.heads, self.queries, self.values)
    }

    fn launch<M: KernelDevice>(
        &self,
        machine: &M,
        kernel: &str,
        blocks: usize,
        arguments: Vec<Arg<M>>,
    ) -> Result<()> {
        let defines = defines(self.activation, self.turned, self.decay);
        let module = Module { name: super::NAME, source: super::SOURCE, defines: &defines };
        let shared =
            if matches!(kernel, "linear_out" | "linear_slopes") { memory_bytes(self.decay) } else { 0 };
        machine
            .launch(&Launch { module, kernel, grid: [blocks, self.heads, self.samples], shared }, arguments)
    }

    /// What most kernels read first.
    fn arguments<'a, M: KernelDevice>(&self, pass: &Pass<'a, M>) -> Vec<Arg<'a, M>> {
        let Pass { header, inputs, grad, direction } = pass;
        let lean = if let Activation::Leaky(lean) = self.activation { lean } else { 0.0 };
        let mut arguments = vec![Arg::Longs(*header)];
        arguments.extend(inputs.operands.iter().map(|(view, _)| Arg::In(*view)));
        arguments.extend([*grad, inputs.keep, inputs.angles, inputs.logs[*direction]].map(Arg::In));
        arguments.extend([Arg::Float(lean), Arg::Int(*direction)]);
        arguments
    }

    /// What keys before each chunk add up, or if `later` queries behind it.
    fn states<M: KernelDevice>(&self, machine: &M, pass: &Pass<M>, later: bool) -> Result<M::Floats> {
        let (parts, all) = (self.parts(), self.samples * self.heads * self.parts());
        let size = self.features() * self.columns();
        let mut totals = machine.fresh(all * self.log_width())?;
        let mut states = machine.fresh(all * size)?;
        let mut arguments = self.arguments(pass);
        arguments.extend([Arg::Int(later.into()), Arg::Int(self.span())]);
        arguments.extend([Arg::Out(&mut totals), Arg::Out(&mut states)]);
        let tiles = self.features().div_ceil(COLUMNS) * self.columns().div_ceil(COLUMNS);
        self.launch(machine, "linear_states", parts * tiles, arguments)?;
        let arguments = vec![
            Arg::Longs(pass.header),
            Arg::In(BufferView::all(&totals)),
            Arg::Int(later.into()),
            Arg::Int((!self.within()).into()),
            Arg::Out(&mut states),
        ];
        self.launch(machine, "linear_scan", size.div_ceil(THREADS), arguments)?;
        Ok(states)
    }

    /// How rows of a pass see their chunk: within it or not, themselves or not, and whether they add to what is there.
    fn sight<'a, M: KernelDevice>(&self, later: bool, direction: usize) -> [Arg<'a, M>; 4] {
        let flags = [later, self.within(), direction == 0, direction > 0];
        flags.map(|flag| Arg::Int(flag.into()))
    }

    /// What the denominator's sums get on top: once.
    fn extra(&self, direction: usize) -> f32 {
        if direction == 0 { self.den_eps } else { 0.0 }
    }

    /// The output [samples, queries, heads * values] and the denominators [samples, heads, queries].
    pub fn forward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: &Inputs<M>,
    ) -> Result<(M::Floats, M::Floats)> {
        let rows = self.samples * self.heads * self.queries;
        let header = &self.header(machine, inputs, Place::default(), [Place::default(); 3])?;
        let mut out = machine.fresh(rows * self.values)?;
        let mut dens = machine.fresh(1)?;
        for direction in 0..self.directions() {
            let pass = Pass { header, inputs, grad: inputs.operands[0].0, direction };
            let states = self.states(machine, &pass, false)?;
            let divide = self.guard.is_some() && direction + 1 == self.directions();
            let mut after = machine.fresh(if self.guard.is_some() { rows } else { 1 })?;
            let mut arguments = self.arguments(&pass);
            arguments.extend(self.sight(false, direction));
            arguments.extend([
                Arg::Int(divide.into()),
                Arg::Float(self.extra(direction)),
                Arg::Float(self.guard().1),
            ]);
            arguments.extend([&states, &dens].map(|floats| Arg::In(BufferView::all(floats))));
            arguments.extend([Arg::Out(&mut after), Arg::Out(&mut out)]);
            let tiles = self.values.div_ceil(COLUMNS);
            self.launch(machine, "linear_out", self.queries.div_ceil(CHUNK) * tiles, arguments)?;
            dens = after;
        }
        Ok((out, dens))
    }

    /// The gradients of all operands.
    pub fn backward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: &Inputs<M>,
        outputs: &Outputs<M>,
        targets: &Targets,
    ) -> Result<Gradients<M>> {
        let mut grads = Vec::with_capacity(3);
        for &length in &targets.lengths {
            grads.push(if targets.gaps { machine.zeros(length)? } else { machine.fresh(length)? });
        }
        let to = targets.operands.map(|(_, place)| place);
        let (columns, is_guarded) = (self.columns(), self.guard.is_some());
        let place = if is_guarded { Place::split(self.heads, self.queries, columns) } else { self.merged() };
        let header = &self.header(machine, inputs, place, to)?;
        let rows = self.samples * self.heads * self.queries;
        let mut divided = machine.fresh(if is_guarded { rows * columns } else { 1 })?;
        if is_guarded {
            let mut arguments = vec![Arg::Longs(header)];
            arguments.extend([outputs.out, outputs.grad, outputs.dens].map(Arg::In));
            arguments.extend([Arg::Float(self.guard().1), Arg::Out(&mut divided)]);
            self.launch(machine, "linear_undivide", self.queries.div_ceil(THREADS / WARP), arguments)?;
        }
        let grad = if is_guarded { BufferView::all(&divided) } else { outputs.grad };
        let mut logs = Vec::new();
        for direction in 0..self.directions() {
            let pass = Pass { header, inputs, grad, direction };
            logs.extend(self.back(machine, &pass, targets, &mut grads)?);
        }
        Ok(Gradients { operands: grads, logs })
    }

    /// Adds the gradients of one direction; gives that of its decays.
    fn back<M: KernelDevice>(
        &self,
        machine: &M,
        pass: &Pass<M>,
        targets: &Targets,
        grads: &mut [M::Floats],
    ) -> Result<Option<M::Floats>> {
        let states = [self.states(machine, pass, false)?, self.states(machine, pass, true)?];
        let learned = self.learned && self.decay != DecayWidth::None;
        let per_log = self.samples * self.heads * self.keys * self.log_width();
        let mut dots = Vec::with_capacity(2);
        for (later, rows) in [(false, self.queries), (true, self.keys)] {
            let mut own = machine.fresh(if learned { per_log } else { 1 })?;
            let mut arguments = self.arguments(pass);
            arguments.extend(self.sight(later, pass.direction));
            let extra = if later { 0.0 } else { self.extra(pass.direction) };
            arguments.extend([Arg::Int(learned.into()), Arg::Float(extra)]);
            arguments.extend([Arg::In(BufferView::all(&states[usize::from(later)])), Arg::Out(&mut own)]);
            arguments.push(Arg::Out(&mut grads[targets.operands[usize::from(later)].0]));
            self.launch(machine, "linear_slopes", rows.div_ceil(CHUNK), arguments)?;
            dots.push(own);
        }
        let mut unused = machine.fresh(1)?;
        let mut arguments = self.arguments(pass);
        arguments.extend(self.sight(true, pass.direction));
        arguments.extend([Arg::Int(0), Arg::Float(0.0), Arg::Float(0.0)]);
        arguments.extend([&states[1], &states[1]].map(|floats| Arg::In(BufferView::all(floats))));
        arguments.extend([Arg::Out(&mut unused), Arg::Out(&mut grads[targets.operands[2].0])]);
        let blocks = self.keys.div_ceil(CHUNK) * self.values.div_ceil(COLUMNS);
        self.launch(machine, "linear_out", blocks, arguments)?;
        if !learned {
            return Ok(None);
        }
        let mut slopes = machine.fresh(per_log)?;
        let mut arguments = vec![Arg::Longs(pass.header)];
        arguments.extend(states.iter().chain(&dots).map(|floats| Arg::In(BufferView::all(floats))));
        arguments.extend([Arg::Int(pass.direction), Arg::Out(&mut slopes)]);
        self.launch(machine, "linear_log_slopes", self.parts(), arguments)?;
        Ok(Some(slopes))
    }

    /// The sums of gradients [samples, heads, rows * width] over heads that share a group.
    pub fn shared<M: KernelDevice>(&self, machine: &M, grad: &M::Floats, rows: usize) -> Result<M::Floats> {
        let size = rows * self.width;
        let mut sums = machine.fresh(self.samples * self.groups * size)?;
        let arguments = vec![
            Arg::In(BufferView::all(grad)),
            Arg::Int(self.heads / self.groups),
            Arg::Long(size),
            Arg::Out(&mut sums),
        ];
        let shared = Self { heads: self.groups, ..*self };
        shared.launch(machine, "linear_shared", size.div_ceil(THREADS), arguments)?;
        Ok(sums)
    }
}
