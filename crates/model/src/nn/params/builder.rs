//! Makes and records parameters as modules ask for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};

use super::{Init, ParamGroup, ParamPart, ParamSpec, Params, StoredGroup};
use effattn_kernel::device::rng::RngStream;

/// Where parameters come from.
enum Source {
    /// Given by name, or drawn from a stream keyed by seed and full name.
    Seed(u64, HashMap<String, Tensor>),
    /// Given by name (golden files, checkpoints); a missing name or another shape is an error.
    Given(HashMap<String, Tensor>),
    /// Nothing stored: for counting.
    Count,
}

/// How a parameter starts where a model overrides what its modules ask for.
pub type InitRule = fn(&ParamSpec) -> Init;

struct Shared {
    params: Params,
    source: Source,
    device: Device,
    train: bool,
    /// Other names of parameters: group and part.
    aliases: HashMap<String, (usize, usize)>,
    /// Parts of the groups that are counted only.
    counted: Vec<Vec<ParamPart>>,
}

/// Hands out parameters under a name prefix and records them.
#[derive(Clone)]
pub struct ParamBuilder {
    shared: Arc<Mutex<Shared>>,
    prefix: String,
    rule: Option<InitRule>,
}

impl ParamBuilder {
    /// Parameters drawn from `seed`. `train`: modules get tracked variables, else detached tensors.
    pub fn seeded(seed: u64, device: &Device, train: bool) -> Self {
        Self::given_or_seeded(seed, HashMap::new(), device, train)
    }

    /// Parameters and constants given by their full names where they are there, else drawn from `seed`.
    pub fn given_or_seeded(
        seed: u64,
        tensors: HashMap<String, Tensor>,
        device: &Device,
        train: bool,
    ) -> Self {
        Self::new(Source::Seed(seed, tensors), device, train)
    }

    /// Parameters given by their full names.
    pub fn given(tensors: HashMap<String, Tensor>, device: &Device, train: bool) -> Self {
        Self::new(Source::Given(tensors), device, train)
    }

    /// The parameters of another model, not tracked: a second model that always has the first one's current
    /// weights and records no graph.
    pub fn sharing(params: &Params, device: &Device) -> Self {
        let builder = Self::given(HashMap::new(), device, false);
        builder.lock().params = params.clone();
        builder
    }

    /// Parameters that only have shapes: every tensor is one zero, broadcast. [`Self::finish`] then knows
    /// their number and nothing else.
    pub fn counting() -> Self {
        Self::new(Source::Count, &Device::Cpu, false)
    }

    fn new(source: Source, device: &Device, train: bool) -> Self {
        let shared = Shared {
            params: Params::default(),
            source,
            device: device.clone(),
            train,
            aliases: HashMap::new(),
            counted: Vec::new(),
        };
        Self { shared: Arc::new(Mutex::new(shared)), prefix: String::new(), rule: None }
    }

    /// The same builder, with starts chosen by `rule` instead of by the modules.
    #[must_use]
    pub fn with_init(&self, rule: InitRule) -> Self {
        Self { rule: Some(rule), ..self.clone() }
    }

    /// A builder for names below `name`.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// A builder without prefix, for what all layers share.
    pub fn root(&self) -> Self {
        Self { prefix: String::new(), ..self.clone() }
    }

    /// Lets `name` stand for the parameter `target` that exists already (both below this prefix):
    /// [`Self::param`] then returns that one.
    pub fn alias(&self, name: &str, target: &str) -> Result<()> {
        let (name, target) = (format!("{}{name}", self.prefix), format!("{}{target}", self.prefix));
        let mut shared = self.lock();
        let Some(&place) = shared.params.index.get(&target) else {
            bail!("no parameter is called {target:?}")
        };
        shared.aliases.insert(name, place);
        Ok(())
    }

    /// The device parameters live on.
    pub fn device(&self) -> Device {
        self.lock().device.clone()
    }

    /// One parameter in its own shape. A name that is an alias gives the parameter it stands for.
    pub fn param(&self, name: &str, shape: &[usize], init: Init) -> Result<Tensor> {
        {
            let shared = self.lock();
            if let Some(&(group, part)) = shared.aliases.get(&format!("{}{name}", self.prefix)) {
                let part = &shared.parts(group)[part];
                if part.shape != shape {
                    bail!("parameter {:?} has shape {:?}, expected {shape:?}", part.name, part.shape);
                }
                return match shared.source {
                    Source::Count => zeros(shape),
                    _ => shared.flat(group)?.narrow(0, part.offset, part.len())?.reshape(shape),
                };
            }
        }
        let group = self.group(&[ParamSpec::new(name, shape, init)])?;
        // reshaping what is broadcast would fill memory
        if matches!(self.lock().source, Source::Count) { zeros(shape) } else { group.flat.reshape(shape) }
    }

    /// One parameter whose start is what `draw` makes of the stream of its name, where [`Init`] has no such start.
    pub fn drawn(
        &self,
        name: &str,
        shape: &[usize],
        draw: impl FnOnce(&mut RngStream) -> Vec<f32>,
    ) -> Result<Tensor> {
        let full = format!("{}{name}", self.prefix);
        {
            let mut shared = self.lock();
            let Shared { source, params, device, .. } = &mut *shared;
            if let Source::Seed(seed, tensors) = source
                && !tensors.contains_key(&full)
                && !params.index.contains_key(&full)
            {
                let values = draw(&mut RngStream::new(*seed, &full));
                tensors.insert(full, Tensor::from_vec(values, shape, device)?);
            }
        }
        self.param(name, shape, Init::ZERO)
    }

    /// Several parameters in one flat variable. A group whose first name exists already is returned as it
    /// is (layers that share a parameter build it under the same name).
    pub fn group(&self, specs: &[ParamSpec]) -> Result<ParamGroup> {
        let mut shared = self.lock();
        let full: Vec<String> = specs.iter().map(|s| format!("{}{}", self.prefix, s.name)).collect();
        if let Some(&(index, _)) = shared.params.index.get(&full[0]) {
            return Ok(ParamGroup { flat: shared.flat(index)?, parts: shared.parts(index).to_vec() });
        }
        if let Source::Count = shared.source {
            return shared.count(specs, full);
        }
        let mut offset = 0;
        let mut parts = Vec::new();
        let mut pieces = Vec::new();
        for (spec, name) in specs.iter().zip(full) {
            let init = self.rule.map_or(spec.init, |rule| rule(spec));
            let tensor = shared.make(&name, &spec.shape, init)?;
            let len = tensor.elem_count();
            pieces.push(tensor.flatten_all()?);
            parts.push(ParamPart { name, shape: spec.shape.clone(), offset });
            offset += len;
        }
        let var = Var::from_tensor(&Tensor::cat(&pieces, 0)?)?;
        let flat = tracked(&var, shared.train);
        let index = shared.params.groups.len();
        for (position, part) in parts.iter().enumerate() {
            if shared.params.index.insert(part.name.clone(), (index, position)).is_some() {
                bail!("parameter {:?} is built twice in different groups", part.name);
            }
        }
        shared.params.groups.push(StoredGroup { var, parts: parts.clone() });
        Ok(ParamGroup { flat, parts })
    }

    /// A constant: given by name, or drawn by `draw` from the stream of its full name.
    pub fn constant(
        &self,
        name: &str,
        draw: impl FnOnce(&mut RngStream, &Device) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut shared = self.lock();
        // for counting, one constant serves every layer
        let prefix = if matches!(shared.source, Source::Count) { "" } else { &self.prefix };
        let full = format!("{prefix}{name}");
        if let Some(tensor) = shared.params.constants.get(&full) {
            return Ok(tensor.clone());
        }
        let tensor = match &shared.source {
            Source::Seed(seed, tensors) => match tensors.get(&full) {
                Some(tensor) => tensor.to_device(&shared.device)?,
                None => draw(&mut RngStream::new(*seed, &full), &shared.device)?,
            },
            Source::Given(tensors) => match tensors.get(&full) {
                Some(tensor) => tensor.clone(),
                None => bail!("constant {full:?} is missing"),
            },
            Source::Count => draw(&mut RngStream::new(0, &full), &shared.device)?,
        };
        shared.params.constants.insert(full, tensor.clone());
        Ok(tensor)
    }

    /// A tensor that belongs to the model and is not trained, such as a running mean: given by name, or filled with `start`.
    /// What a forward pass writes into it stands in [`Params::constants`], and so in checkpoints.
    pub fn buffer(&self, name: &str, shape: &[usize], start: f64) -> Result<Var> {
        let full = format!("{}{name}", self.prefix);
        let mut shared = self.lock();
        if let Some(tensor) = shared.params.constants.get(&full) {
            return Var::from_tensor(tensor); // the same one where it is a variable
        }
        let filled = || Tensor::full(start as f32, shape, &shared.device);
        let tensor = match &shared.source {
            Source::Count => return Var::from_tensor(&filled()?),
            Source::Seed(_, tensors) | Source::Given(tensors) => match tensors.get(&full) {
                Some(given) if given.dims() == shape => {
                    float(&full, given)?;
                    given.to_device(&shared.device)?.copy()?
                }
                Some(given) => bail!("{full:?} has shape {:?}, expected {shape:?}", given.dims()),
                None if matches!(shared.source, Source::Given(_)) => bail!("{full:?} is missing"),
                None => filled()?,
            },
        };
        let state = Var::from_tensor(&tensor)?;
        shared.params.constants.insert(full, state.as_tensor().clone());
        Ok(state)
    }

    /// Parameters, detached, and constants so far: those below this prefix by their names there, aliases too, and those without any prefix.
    pub fn tensors(&self) -> Result<HashMap<String, Tensor>> {
        let shared = self.lock();
        let own = |full: &str| match full.strip_prefix(&self.prefix) {
            Some(own) => Some(own.to_owned()),
            None => (!full.contains('.')).then(|| full.to_owned()),
        };
        let mut tensors = HashMap::new();
        let names = shared.params.index.keys().map(|name| (name, name));
        let aliases =
            shared.aliases.iter().map(|(name, (group, part))| (name, &shared.parts(*group)[*part].name));
        for (name, target) in names.chain(aliases) {
            if let Some(name) = own(name) {
                tensors.insert(name, shared.params.value(target)?);
            }
        }
        let constants = shared.params.constants.iter();
        tensors.extend(constants.filter_map(|(name, tensor)| Some((own(name)?, tensor.clone()))));
        Ok(tensors)
    }

    /// The constants and states so far, by full name.
    pub fn constants(&self) -> BTreeMap<String, Tensor> {
        self.lock().params.constants.clone()
    }

    /// Ends building: the parameters. Call when no other clone of this builder is used any more.
    pub fn finish(&self) -> Params {
        let mut shared = self.lock();
        let params = std::mem::take(&mut shared.params);
        match shared.source {
            Source::Count => Params { counted: params.counted, ..Params::default() },
            Source::Seed(..) | Source::Given(_) => params,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Refuses whole numbers where a model computes with floats.
fn float(name: &str, given: &Tensor) -> Result<()> {
    match given.dtype() {
        dtype if dtype.is_float() => Ok(()),
        dtype => bail!("{name:?} is {dtype:?}; weights are floats (F32, F16, BF16)"),
    }
}

/// One zero that looks like `shape`.
fn zeros(shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)
}

fn tracked(var: &Var, train: bool) -> Tensor {
    if train { var.as_tensor().clone() } else { var.as_detached_tensor() }
}

impl Shared {
    /// The parts of group `index`.
    fn parts(&self, index: usize) -> &[ParamPart] {
        match self.source {
            Source::Count => &self.counted[index],
            Source::Seed(..) | Source::Given(_) => &self.params.groups[index].parts,
        }
    }

    /// The flat tensor of group `index`.
    fn flat(&self, index: usize) -> Result<Tensor> {
        match self.source {
            Source::Count => zeros(&[self.counted[index].iter().map(ParamPart::len).sum()]),
            Source::Seed(..) | Source::Given(_) => Ok(tracked(&self.params.groups[index].var, self.train)),
        }
    }

    /// Counts a new group.
    fn count(&mut self, specs: &[ParamSpec], names: Vec<String>) -> Result<ParamGroup> {
        let index = self.counted.len();
        let (mut parts, mut offset) = (Vec::new(), 0);
        for (position, (spec, name)) in specs.iter().zip(names).enumerate() {
            self.params.index.insert(name.clone(), (index, position));
            let part = ParamPart { name, shape: spec.shape.clone(), offset };
            offset += part.len();
            parts.push(part);
        }
        self.params.counted += offset;
        self.counted.push(parts.clone());
        Ok(ParamGroup { flat: self.flat(index)?, parts })
    }

    fn make(&self, name: &str, shape: &[usize], init: Init) -> Result<Tensor> {
        match &self.source {
            Source::Given(tensors) | Source::Seed(_, tensors) if tensors.contains_key(name) => {
                let tensor = &tensors[name];
                if tensor.dims() != shape {
                    bail!("parameter {name:?} has shape {:?}, expected {shape:?}", tensor.dims());
                }
                float(name, tensor)?;
                tensor.to_device(&self.device)
            }
            Source::Given(_) => bail!("parameter {name:?} of shape {shape:?} is missing"),
            Source::Count => zeros(shape),
            Source::Seed(seed, _) => {
                let shape = Shape::from(shape);
                let mut stream = RngStream::new(*seed, name);
                match init {
                    Init::Const(value) => Tensor::full(value as f32, shape, &self.device),
                    Init::Normal { mean, std } => stream.normal_tensor(shape, mean, std, &self.device),
                    Init::NormalZeroRow { std, row } => {
                        let rows = shape.dims().first().copied().unwrap_or(1);
                        let keep: Vec<f32> = (0..rows).map(|at| f32::from(u8::from(at != row))).collect();
                        let keep = Tensor::from_vec(keep, (rows, 1), &self.device)?;
                        stream.normal_tensor(shape, 0.0, std, &self.device)?.broadcast_mul(&keep)
                    }
                    Init::Uniform { bound } => stream.uniform_tensor(shape, -bound, bound, &self.device),
                }
            }
        }
    }
}
