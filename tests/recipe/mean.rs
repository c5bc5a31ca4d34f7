//! Mean attention: every query takes the mean of the values it sees.
//!
//! out_i = scale_h mean_j v_j over visible j. Visible: not padded and, when causal, j <= i.

use candle_core::{Device, Result, Tensor, bail};
use effattn::attention::decode::{DecodeState, bytes};
use effattn::attention::knobs::{Knob, Knobs};
use effattn::attention::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Projections, Shape, Support,
};
use effattn::kernel::heads::Heads;
use effattn::nn::params::{Init, ParamBuilder};
use effattn::pattern::Pattern;

const LEARNED: Knob<bool> = Knob::bool("learned", true)
    .doc("whether every head scales its means by a parameter")
    .source("our choice");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "mean",
    title: "Mean attention",
    paper: Paper { authors: "You", title: "A recipe", year: 2026, locator: "docs/adding-a-mechanism.md" },
    support: Support {
        bidirectional: true,
        causal: true,
        cross: false,
        memory: false,
        cls: false,
        dropout: false,
    },
    knobs: &[LEARNED.spec()],
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Quadratic,
    equations: "out_i = scale_h mean_j v_j over keys j that are not padded and, when causal, j <= i.",
    deviations: &[],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: |_, shape| match shape.queries == shape.keys {
        true => Ok(()),
        false => Err(format!("{} queries and {} keys; give as many of each", shape.queries, shape.keys)),
    },
    needs: |_| Needs { projections: Projections::V, ..Needs::default() },
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build,
};

fn cost(_: &Knobs, shape: &Shape) -> Cost {
    let macs = shape.heads * shape.queries * shape.keys * shape.head_dim;
    Cost {
        core_macs: (shape.batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * shape.heads * shape.head_dim) as u64, // a running sum
    }
}

struct Mean {
    scale: Option<Tensor>, // [h]
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let scale = match config.knobs.get(&LEARNED) {
        true => Some(builder.param("scale", &[config.heads], Init::ONE)?),
        false => None,
    };
    Ok(Box::new(Mean { scale, causal: config.causal }))
}

impl Mechanism for Mean {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let v = input.qkv.v()?.contiguous()?;
        let (b, h, n, _) = v.dims4()?;
        if input.memory > 0 {
            bail!("mean attention has no cached positions");
        }
        let mut visible = match self.causal {
            true => Tensor::tril2(n, v.dtype(), v.device())?.unsqueeze(0)?,
            false => Tensor::ones((1, n, n), v.dtype(), v.device())?,
        };
        if let Some(mask) = input.mask {
            visible = visible.broadcast_mul(&mask.reshape((b, 1, n))?)?;
        }
        let count = visible.sum_keepdim(2)?.maximum(1f32)?; // a query that sees nothing gives 0
        let weights = visible.broadcast_div(&count)?.unsqueeze(1)?; // [b or 1, 1, n, n]
        let mut out = weights.broadcast_matmul(&v)?;
        if let Some(scale) = &self.scale {
            out = out.broadcast_mul(&scale.reshape((1, h, 1, 1))?)?;
        }
        Ok(Heads::Split(out).into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self
            .causal
            .then(|| -> Box<dyn DecodeState> { Box::new(RunningSum { batch, position: 0, sum: None }) }))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<RunningSum>()?;
        let v = input.qkv.v()?.contiguous()?;
        let sum = match state.sum.take() {
            Some(sum) => (sum + v)?,
            None => v,
        };
        state.position += 1;
        let mut out = (&sum / state.position as f64)?;
        state.sum = Some(sum);
        if let Some(scale) = &self.scale {
            out = out.broadcast_mul(&scale.unsqueeze(1)?.unsqueeze(2)?)?;
        }
        Ok(Heads::Split(out).into())
    }
}

/// What a decoder carries: the sum of the values so far.
struct RunningSum {
    batch: usize,
    position: usize,
    sum: Option<Tensor>, // [b, h, 1, d]
}

impl DecodeState for RunningSum {
    fn position(&self) -> usize {
        self.position
    }

    fn set_position(&mut self, position: usize) {
        self.position = position;
    }

    fn batch(&self) -> usize {
        self.batch
    }

    fn bytes(&self) -> usize {
        self.sum.as_ref().map_or(0, bytes)
    }
}
