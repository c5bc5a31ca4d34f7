//! The moving average of Mega (Ma et al. 2023, section 3.2) alone: every channel is filtered by a sum of damped exponentials.

use candle_core::{Device, Result, Tensor};
use candle_nn::ops::sigmoid;

use super::decode::{Carried, DecodeState, Held, bytes};
use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Projections, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::diagonal_scan::Direction;
use effattn_kernel::ema::{self, EmaState, ema};
use effattn_kernel::gating::skip;

pub(super) const NDIM: Knob<usize> = Knob::int("ndim", 16, 1..=1 << 10)
    .doc("exponentials per channel")
    .source("Mega sec. 3.2 and released code for LRA");
pub(super) const TRUNCATION: Knob<Option<usize>> = Knob::auto_int("truncation", 1..=1 << 30)
    .doc("distance from which on the filter is 0; auto: none")
    .source("Mega released code");

pub(super) const PAPER: Paper = Paper {
    authors: "Ma et al.",
    title: "Mega: Moving Average Equipped Gated Attention",
    year: 2023,
    locator: "arXiv:2209.10655",
};

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "mega-ema",
    title: "Mega's moving average",
    paper: PAPER,
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[NDIM.spec(), TRUNCATION.spec()],
    complexity: "O(n d ndim)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
p = sigmoid(delta), c = 1 - p sigmoid(alpha), k_t = sum_ndim p beta gamma / sqrt(ndim) c^t per channel
y_i = sum_{j<=i} k_{i-j} x_j; bidirectional: + sum_{j>=i} k'_{j-i} x_j with parameters of its own; out = silu(y + omega x)",
    deviations: &[
        "Both directions of the bidirectional form count the current position, as in the released code.",
        "x is 0 at masked positions and time goes on.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: mixer::validate,
    needs: |_| Needs { projections: Projections::NONE, x: true, ..Needs::default() },
    cost: |knobs, shape| {
        let macs = macs(knobs, shape);
        Cost {
            core_macs: (shape.batch * macs) as u64,
            flops: macs as u64,
            state_bytes: if shape.causal { (4 * shape.width * knobs.get(&NDIM)) as u64 } else { 0 },
        }
    },
    pattern: |_, _| None, // weights depend on the distance and the channel
    build: |config, builder| Ok(Box::new(Average::new(config, builder)?)),
};

/// Multiply-adds for one sample.
pub(super) fn macs(knobs: &Knobs, shape: &Shape) -> usize {
    let directions = if shape.causal { 1 } else { 2 };
    2 * directions * shape.queries * shape.width * knobs.get(&NDIM)
}

/// The moving average with its parameters `ema_*`.
pub(super) struct Average {
    // [k, ndim]: rows of the channels, forward, then backward
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    /// [e].
    omega: Tensor,
    truncation: Option<usize>,
    direction: Direction,
}

impl Average {
    pub fn new(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Self> {
        let ndim = config.knobs.get(&NDIM);
        let direction = if config.causal { Direction::Forward } else { Direction::Both };
        let shape = [direction.count() * config.width, ndim];
        let param = |name: &str, std: f64| builder.param(name, &shape, Init::normal(std));
        let (delta, alpha) = (param("ema_delta", 0.2)?, param("ema_alpha", 0.2)?);
        let beta = builder.drawn("ema_beta", &shape, |stream| {
            let alternating = |at: usize| if (at % ndim).is_multiple_of(2) { 1.0 } else { -1.0 };
            (0..shape[0] * ndim).map(|at| (alternating(at) + 0.02 * stream.normal()) as f32).collect()
        })?;
        let gamma = param("ema_gamma", 1.0)?;
        let omega = builder.param("ema_omega", &[config.width], Init::normal(1.0))?;
        Ok(Self { delta, alpha, beta, gamma, omega, truncation: config.knobs.get(&TRUNCATION), direction })
    }

    /// silu(y + omega x) [b, n, e].
    pub fn forward(&self, input: &AttentionInput) -> Result<Tensor> {
        let (coefficient, decay) = self.filter()?;
        let y = ema(&mixer::visible(input)?, &coefficient, &decay, self.direction, self.truncation)?;
        self.finish(y, input)
    }

    /// [`Self::forward`] of the next token.
    pub fn step(&self, input: &AttentionInput, state: &mut EmaState) -> Result<Tensor> {
        let (coefficient, decay) = self.filter()?;
        let y = ema::step(input.layer_input()?, &coefficient, &decay, self.truncation, state)?;
        self.finish(y, input)
    }

    /// Whether the state of a decoder has the size that is counted: the latest inputs of a truncated filter are not.
    pub fn decodes(&self) -> bool {
        self.direction == Direction::Forward && self.truncation.is_none()
    }

    /// Factors and bases of the exponentials.
    fn filter(&self) -> Result<(Tensor, Tensor)> {
        let p = sigmoid(&self.delta)?;
        let decay = (1.0 - (&p * sigmoid(&self.alpha)?)?)?;
        let scale = (self.delta.dim(1)? as f64).powf(-0.5);
        Ok((((p * &self.beta)? * &self.gamma)?.affine(scale, 0.0)?, decay))
    }

    fn finish(&self, y: Tensor, input: &AttentionInput) -> Result<Tensor> {
        skip(&y, input.layer_input()?, &self.omega, true)
    }
}

impl Held for EmaState {
    fn bytes(&self) -> usize {
        self.tensors().map(bytes).sum()
    }
}

type State = Carried<EmaState>;

impl Mechanism for Average {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        self.forward(input).map(AttentionOutput::rows)
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(self.decodes().then(|| State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<State>()?;
        state.advance(|held, _| self.step(input, held)).map(AttentionOutput::rows)
    }
}
