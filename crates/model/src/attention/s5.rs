//! S5 (Smith et al. 2023): one state space with many inputs and outputs, diagonal, started from HiPPO.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::hippo::Hippo;
use super::knobs::{Knob, Knobs};
use super::state_space::{self, Complex, Discrete, P, StateSpace};
use super::{
    Growth, InModels, Mechanism, MechanismConfig, MechanismEntry, Needs, OutputForm, Paper, Projections,
    Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::device::rng::RngStream;

/// From a continuous system to one with steps.
#[derive(Clone, Copy, PartialEq)]
enum Discretization {
    ZeroOrderHold,
    Bilinear,
}

const DISCRETIZATION: Knob<Discretization> = Knob::words(
    "discretization",
    &[("zoh", Discretization::ZeroOrderHold), ("bilinear", Discretization::Bilinear)],
)
.doc("zoh: zero-order hold; bilinear: the trapezoidal rule")
.source("S5 sec. 3.2");
const CONJ_SYM: Knob<bool> = Knob::bool("conj_sym", true)
    .doc("the P states stand for themselves and their conjugates: outputs count twice")
    .source("S5 sec. 3.2");
const CLIP_EIGS: Knob<bool> = Knob::bool("clip_eigs", false)
    .doc("real parts of eigenvalues are at most -1e-4; no gradient where that acts")
    .source("released code");
const STEP_RESCALE: Knob<f64> = Knob::float("step_rescale", 1.0, 1e-4..=1e4)
    .doc("factor on all time steps, for another sampling rate")
    .source("released code");
const BLOCKS: Knob<Option<usize>> = Knob::auto_int("blocks", 1..=1 << 14)
    .doc("HiPPO matrices that the eigenvalues start from; auto: the largest divisor of P up to 8")
    .source("S5 sec. 4.3 and released code");
const DT_MIN: Knob<f64> =
    Knob::float("dt_min", 0.001, 1e-6..=10.0).doc("smallest time step at the start").source("released code");
const DT_MAX: Knob<f64> =
    Knob::float("dt_max", 0.1, 1e-6..=10.0).doc("largest time step at the start").source("released code");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "s5",
    title: "S5",
    paper: Paper {
        authors: "Smith et al.",
        title: "Simplified State Space Layers for Sequence Modeling",
        year: 2023,
        locator: "arXiv:2208.04933",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[
        P.doc("complex states: half the state size with conj_sym").source("released code (ssm_size_base 256)").spec(),
        DISCRETIZATION.spec(),
        CONJ_SYM.spec(),
        CLIP_EIGS.spec(),
        STEP_RESCALE.spec(),
        BLOCKS.spec(),
        DT_MIN.spec(),
        DT_MAX.spec(),
    ],
    complexity: "O(n d P)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
h_t = a h_{t-1} + b x_t, y_t = 2 Re(C h_t) + D x_t (1 without conj_sym); bidirectional: + 2 Re(C_bwd h'_t), h' from the end
zoh: a = exp(Lambda dt), b = (a - 1) / Lambda B; bilinear: a = (1 + dt Lambda/2) / (1 - dt Lambda/2), b = dt / (1 - dt Lambda/2) B
in a layer: x + g sigmoid(W g), g = GELU(y)",
    deviations: &[
        "The released LRA runs do not hide padding from the states; here x is 0 at masked positions and time goes on.",
        "The released code normalises by batch; the layers here have their LayerNorm.",
        "Both directions of the bidirectional form count the current position, as in the released code.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels { without_decay: &["Lambda_re", "Lambda_im", "log_step"], ..InModels::PLAIN },
    validate,
    needs: |_| Needs { projections: Projections::NONE, x: true, output: OutputForm::HalfGlu, ..Needs::default() },
    cost: |knobs, shape| state_space::cost(knobs.get(&P), shape),
    pattern: |_, _| None, // weights depend on the distance and the channel
    build,
};

fn blocks(knobs: &Knobs) -> usize {
    let p = knobs.get(&P);
    let auto = || (1..=8).rev().find(|blocks| p.is_multiple_of(*blocks)).unwrap_or(1);
    knobs.get(&BLOCKS).unwrap_or_else(auto)
}

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let (p, blocks) = (knobs.get(&P), blocks(knobs));
    if !p.is_multiple_of(blocks) {
        return Err(format!(
            "P={p} states do not fall into blocks={blocks} equal blocks; take a divisor of {p}"
        ));
    }
    let (min, max) = (knobs.get(&DT_MIN), knobs.get(&DT_MAX));
    if min > max {
        return Err(format!("dt_min={min} is above dt_max={max}; give the smaller one as dt_min"));
    }
    mixer::validate(knobs, shape)
}

/// Normal numbers within two deviations, scaled to variance 1 / fan (JAX's lecun_normal).
fn lecun(stream: &mut RngStream, fan: usize) -> f64 {
    let scale = 1.0 / (fan as f64).sqrt() / 0.879_625_661_034_239_8;
    loop {
        let x = stream.normal();
        if x.abs() < 2.0 {
            return x * scale;
        }
    }
}

/// Start of the parameters: eigenvalues and eigenvectors of one HiPPO matrix per block.
struct Start {
    hippo: Arc<Hippo>,
    blocks: usize,
    /// Size of a block's matrix.
    size: usize,
}

impl Start {
    fn new(knobs: &Knobs) -> Self {
        let (blocks, halved) = (blocks(knobs), knobs.get(&CONJ_SYM));
        let size = knobs.get(&P) / blocks * if halved { 2 } else { 1 };
        Self { hippo: Hippo::of(size, halved), blocks, size }
    }

    /// V^-1 X [p, e, 2] with X [size of all blocks, e] real.
    fn inputs(&self, stream: &mut RngStream, width: usize) -> Vec<f32> {
        let rows = self.blocks * self.size;
        let x: Vec<f64> = (0..rows * width).map(|_| lecun(stream, rows)).collect();
        let mut out = Vec::new();
        for block in 0..self.blocks {
            for vector in &self.hippo.vectors {
                for channel in 0..width {
                    let entry = |i: usize| x[(block * self.size + i) * width + channel];
                    let sum =
                        |part: usize| vector.iter().enumerate().map(|(i, v)| v[part] * entry(i)).sum::<f64>();
                    out.extend([sum(0) as f32, -sum(1) as f32]); // the inverse of V is its conjugate transpose
                }
            }
        }
        out
    }

    /// Y V [e, p, 2] with Y [e, size of all blocks] complex.
    fn outputs(&self, stream: &mut RngStream, width: usize) -> Vec<f32> {
        let rows = self.blocks * self.size;
        let mut out = Vec::new();
        for _ in 0..width {
            let y: Vec<[f64; 2]> = (0..rows).map(|_| [lecun(stream, rows), lecun(stream, rows)]).collect();
            for block in y.chunks_exact(self.size) {
                for vector in &self.hippo.vectors {
                    let pairs = || block.iter().zip(vector);
                    let re: f64 = pairs().map(|(y, v)| y[0] * v[0] - y[1] * v[1]).sum();
                    let im: f64 = pairs().map(|(y, v)| y[0] * v[1] + y[1] * v[0]).sum();
                    out.extend([re as f32, im as f32]);
                }
            }
        }
        out
    }
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, width, causal, .. } = config;
    let (p, e) = (knobs.get(&P), *width);
    let start = std::cell::LazyCell::new(|| Start::new(knobs));
    let lambda_re = builder.param("Lambda_re", &[p], Init::Const(-0.5))?;
    let lambda_im = builder.drawn("Lambda_im", &[p], |_| {
        let block: Vec<f32> = start.hippo.frequencies.iter().map(|x| *x as f32).collect();
        block.repeat(start.blocks)
    })?;
    let (low, high) = (knobs.get(&DT_MIN).ln(), knobs.get(&DT_MAX).ln());
    let log_step = builder
        .drawn("log_step", &[p], |stream| (0..p).map(|_| stream.uniform(low, high) as f32).collect())?;
    let b = builder.drawn("B", &[p, e, 2], |stream| start.inputs(stream, e))?;
    let mut outputs = Vec::new();
    for name in if *causal { &["C"][..] } else { &["C", "C_bwd"] } {
        outputs
            .push(Complex::of_pairs(&builder.drawn(name, &[e, p, 2], |stream| start.outputs(stream, e))?)?);
    }
    let skip = builder.param("D", &[e], Init::normal(1.0))?;
    let (clip, rescale, rule) = (knobs.get(&CLIP_EIGS), knobs.get(&STEP_RESCALE), knobs.get(&DISCRETIZATION));
    let scale = if knobs.get(&CONJ_SYM) { 2.0 } else { 1.0 };
    let discretize = move || {
        let re = if clip { clipped(&lambda_re)? } else { lambda_re.clone() };
        let lambda = Complex { re, im: lambda_im.clone() };
        let step = log_step.exp()?.affine(rescale, 0.0)?;
        let (a, factor) = match rule {
            Discretization::ZeroOrderHold => hold(&lambda, &step)?,
            Discretization::Bilinear => bilinear(&lambda, &step)?,
        };
        let factor = Complex { re: factor.re.unsqueeze(1)?, im: factor.im.unsqueeze(1)? };
        Ok(Discrete { a, b: factor.times(&Complex::of_pairs(&b)?)? })
    };
    Ok(Box::new(StateSpace { discretize, outputs, scale, skip }))
}

/// min(x, -1e-4), without a gradient where that is less than x.
fn clipped(x: &Tensor) -> Result<Tensor> {
    let most = Tensor::full(-1e-4f32, x.shape(), x.device())?;
    x.le(&most)?.where_cond(x, &most)
}

/// exp(Lambda dt) and (exp(Lambda dt) - 1) / Lambda; the difference keeps its digits for small steps.
fn hold(lambda: &Complex, step: &Tensor) -> Result<(Complex, Complex)> {
    let z = lambda.scaled(step)?;
    let tanh = (&z.re * 0.5)?.tanh()?;
    let growth = ((&tanh * 2.0)? / (1.0 - &tanh)?)?; // exp(re) - 1
    let size = (&growth + 1.0)?;
    let (sine, half) = (z.im.sin()?, (&z.im * 0.5)?.sin()?);
    let less = (half.sqr()? * 2.0)?; // 1 - cos(im)
    let below = Complex { re: (&growth - (&size * &less)?)?, im: (&size * &sine)? };
    Ok((below.affine(1.0, 1.0)?, below.times(&lambda.inverse()?)?))
}

/// (1 + dt Lambda / 2) / (1 - dt Lambda / 2) and dt / (1 - dt Lambda / 2).
fn bilinear(lambda: &Complex, step: &Tensor) -> Result<(Complex, Complex)> {
    let half = lambda.scaled(&(step * 0.5)?)?;
    let inverse = half.affine(-1.0, 1.0)?.inverse()?;
    Ok((half.affine(1.0, 1.0)?.times(&inverse)?, inverse.scaled(step)?))
}
