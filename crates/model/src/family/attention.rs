//! One attention call and nothing around it: what `speed --kernel-only` measures.
//!
//! Queries, keys and values lie side by side in rows, as projections leave them. An inference step attends; a training step
//! goes back to the rows too, and updates what parameters the mechanism has of its own.

use candle_core::{DType, Device, Result, Tensor, Var, bail};

use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetDefaults, PresetInfo,
    ResolveError, SizeOverrides, StageCost,
};
use crate::attention::knobs::Knobs;
use crate::attention::{
    AttentionInput as Call, HeadShape, Mechanism, MechanismConfig, MechanismEntry, Projections, Shape,
};
use crate::batch::{Batch, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::{PackedLayout, Qkv};

/// The table line.
pub static FAMILY: Family = Family {
    name: "attention",
    title: "one attention call, without a model",
    input: InputKind::Tokens,
    objective: Objective::Other,
    sample: "random numbers",
    presets,
    serves: |preset, task| task.is_none() && causal(preset).is_some(),
    usual_task: |_, _| None,
    usual: |preset| causal(preset).map(|_| PresetDefaults { models: "full,linear,cosformer,ls", len: 1024 }),
    resolve,
};

/// The preset of `--kernel-only`.
pub const PRESET: &str = "attention";
const CAUSAL: &str = "attention-causal";
/// Width of all heads together and number of heads where nothing is said: heads of 64.
const SIZES: (usize, usize) = (512, 8);

fn presets() -> Vec<PresetInfo> {
    let about = |name, title| PresetInfo {
        name,
        title,
        description: "8 heads of width 64 (--set heads=, --set width=), no projections, no feed-forward half",
        source: "this program",
        tasks: Vec::new(),
        knobs: Vec::new(),
    };
    vec![
        about(PRESET, "attention alone, every position sees all"),
        about(CAUSAL, "attention alone, no position sees its future"),
    ]
}

/// Whether the attention of `preset` is causal, where it is one of these.
fn causal(preset: &str) -> Option<bool> {
    match preset {
        PRESET => Some(false),
        CAUSAL => Some(true),
        _ => None,
    }
}

/// One call.
#[derive(Clone)]
struct Alone {
    entry: &'static MechanismEntry,
    knobs: Knobs,
    width: usize,
    heads: usize,
    len: usize,
    causal: bool,
}

fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    let preset = request.preset;
    super::tasks_of(request, preset)?;
    let Some(causal) = causal(preset) else {
        return Err(ResolveError::Invalid(format!("unknown preset {preset}")));
    };
    let foreign = SizeOverrides { width: None, heads: None, ..request.sizes.clone() }.words();
    if let Some(word) = foreign.first() {
        return Err(ResolveError::Invalid(format!("preset {preset} is attention alone; leave {word} out")));
    }
    let size = |said: Option<u64>, usual: usize| said.map_or(usual, |said| said as usize);
    Ok(Box::new(Alone {
        entry: request.choice.entry,
        knobs: request.choice.knobs.clone(),
        width: size(request.sizes.width, SIZES.0),
        heads: size(request.sizes.heads, SIZES.1),
        len: request.len.unwrap_or(1024),
        causal,
    }))
}

impl Alone {
    fn shape(&self, batch: usize, len: usize) -> Shape {
        Shape {
            batch,
            heads: self.heads,
            head_dim: self.width / self.heads.max(1),
            width: self.width,
            queries: len,
            keys: len,
            causal: self.causal,
            cls: false,
            grid: None,
        }
    }

    fn mechanism(&self, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
        let Shape { heads, head_dim, width, causal, .. } = self.shape(1, self.len);
        let knobs = self.knobs.clone();
        (self.entry.build)(
            &MechanismConfig { knobs, heads, head_dim, width, max_len: self.len, causal, layer: 0 },
            builder,
        )
    }

    fn built(&self, builder: &ParamBuilder, batch: usize) -> Result<Box<dyn Model>> {
        let needs = (self.entry.needs)(&self.knobs);
        let (device, width) = (builder.device(), self.width);
        let random = |name: &str, count: usize| {
            let mut stream = RngStream::new(0, name);
            let rows = stream.normal_tensor((batch, self.len, count * width), 0.0, 1.0, &device)?;
            Var::from_tensor(&rows)
        };
        let head_dim = self.width / self.heads.max(1);
        let packable = needs.projections.packable(self.heads, head_dim);
        let part = |name: &str, shape: Option<HeadShape>| -> Result<Option<Var>> {
            let Some((heads, dim)) = shape.map(|shape| shape.of(self.heads, head_dim)) else {
                return Ok(None);
            };
            let mut stream = RngStream::new(0, name);
            let x = stream.normal_tensor((batch, heads, self.len, dim), 0.0, 1.0, &device)?;
            Var::from_tensor(&x).map(Some)
        };
        let main = if packable {
            let parts = needs.projections.layout();
            MainInputs::Packed { rows: random("rows", parts.count)?, parts }
        } else {
            let Projections { q, k, v } = needs.projections;
            MainInputs::Separate { q: part("q", q)?, k: part("k", k)?, v: part("v", v)? }
        };
        let stream = needs.stream.map(|rows| {
            let mut stream = RngStream::new(0, "stream");
            Var::from_tensor(&stream.normal_tensor((batch, rows, width), 0.0, 1.0, &device)?)
        });
        Ok(Box::new(Rows {
            mechanism: self.mechanism(builder)?,
            heads: self.heads,
            main,
            x: needs.x.then(|| random("x", 1)).transpose()?,
            residual: needs.residual.then(|| random("residual", 1)).transpose()?,
            stream: stream.transpose()?,
            global: needs.global.then(|| random("global", 3)).transpose()?,
        }))
    }
}

impl Architecture for Alone {
    fn max_len(&self) -> usize {
        self.len
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        let (support, name) = (self.entry.support, self.entry.name);
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            let (width, heads) = (self.width, self.heads);
            return Err(ResolveError::Invalid(format!("{heads} heads do not divide a width of {width}")));
        }
        if self.causal && !support.causal {
            return Err(ResolveError::Unsupported(format!(
                "{name} has no causal form; take --preset {PRESET}"
            )));
        }
        if !self.causal && !support.bidirectional {
            return Err(ResolveError::Unsupported(format!("{name} is causal only; take --preset {CAUSAL}")));
        }
        self.entry.admits(&self.knobs, &self.shape(1, self.len)).map_err(ResolveError::Unsupported)
    }

    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let cost = |batch| (self.entry.cost)(&self.knobs, &self.shape(batch, len));
        let (one, all) = (cost(1), cost(batch));
        let name = "attention".to_owned();
        vec![StageCost { name, flops: one.flops, core_macs: all.core_macs, state_bytes: one.state_bytes }]
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        self.built(builder, 1)
    }

    fn build_measured(&self, builder: &ParamBuilder, batch: usize) -> Result<Box<dyn Model>> {
        self.built(builder, batch)
    }

    fn parameters(&self) -> Result<usize> {
        let builder = ParamBuilder::counting();
        self.mechanism(&builder)?;
        Ok(builder.finish().count())
    }

    /// The numbers belong to the call; nothing else is read.
    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let ids = Tensor::zeros((wanted.batch, 1), DType::U32, device)?;
        let labels = Tensor::zeros(wanted.batch, DType::U32, device)?;
        Ok(vec![Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels }])
    }
}

/// A mechanism and what it attends.
struct Rows {
    mechanism: Box<dyn Mechanism>,
    heads: usize,
    main: MainInputs,
    x: Option<Var>,
    residual: Option<Var>,
    stream: Option<Var>,
    global: Option<Var>,
}

/// Queries, keys and values: in packed rows where all have the same heads.
enum MainInputs {
    Packed { rows: Var, parts: PackedLayout },
    Separate { q: Option<Var>, k: Option<Var>, v: Option<Var> },
}

impl Rows {
    fn attend(&self, of: fn(&Var) -> Tensor) -> Result<Tensor> {
        let optional = |var: &Option<Var>| var.as_ref().map(of);
        let qkv = match &self.main {
            MainInputs::Packed { rows, parts } => {
                Qkv::Packed { rows: of(rows), heads: self.heads, parts: *parts }
            }
            MainInputs::Separate { q, k, v } => {
                Qkv::Separate { q: optional(q), k: optional(k), v: optional(v) }
            }
        };
        let (x, residual, stream) = (optional(&self.x), optional(&self.residual), optional(&self.stream));
        let global = self.global.as_ref().map(|rows| Qkv::Packed {
            rows: of(rows),
            heads: self.heads,
            parts: PackedLayout::QKV,
        });
        let call = Call {
            x: x.as_ref(),
            global: global.as_ref(),
            residual: residual.as_ref(),
            stream: stream.as_ref(),
            ..Call::new(&qkv)
        };
        self.mechanism.forward(&call)?.out.merged()
    }
}

impl Model for Rows {
    fn forward(&mut self, _: &Batch) -> Result<Tensor> {
        self.attend(Var::as_detached_tensor)
    }

    fn loss(&mut self, _: &Batch, _: DropoutRng) -> Result<Loss> {
        Ok(Loss::mean(self.attend(|rows| rows.as_tensor().clone())?.mean_all()?))
    }

    fn metrics(&mut self, _: &Batch) -> Result<Vec<Metric>> {
        bail!("attention alone has no score")
    }
}
