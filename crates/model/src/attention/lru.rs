//! LRU (Orvieto et al. 2023): a linear recurrence over a complex diagonal state whose eigenvalues start on a ring.

use candle_core::{DType, Result};

use super::knobs::{Knob, Knobs};
use super::state_space::{self, Complex, Discrete, P, StateSpace};
use super::{
    Growth, InModels, Mechanism, MechanismConfig, MechanismEntry, Needs, OutputForm, Paper, Projections,
    Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};

const R_MIN: Knob<f64> = Knob::float("r_min", 0.0, 0.0..=0.9999)
    .doc("inner radius of the ring that eigenvalues start on")
    .source("LRU sec. 3.2");
const R_MAX: Knob<f64> =
    Knob::float("r_max", 1.0, 0.0001..=1.0).doc("outer radius of the ring").source("LRU sec. 3.2");
#[expect(clippy::approx_constant, reason = "three digits of a full turn, as in the paper")]
const MAX_PHASE: Knob<f64> = Knob::float("max_phase", 6.28, 1e-4..=std::f64::consts::TAU)
    .doc("largest phase of an eigenvalue at the start, in radians")
    .source("LRU appendix A");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "lru",
    title: "LRU",
    paper: Paper {
        authors: "Orvieto et al.",
        title: "Resurrecting Recurrent Neural Networks for Long Sequences",
        year: 2023,
        locator: "arXiv:2303.06349",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[
        P.doc("complex states").source("our choice; the paper tunes it").spec(),
        R_MIN.spec(),
        R_MAX.spec(),
        MAX_PHASE.spec(),
    ],
    complexity: "O(n d P)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
a = exp(-exp(nu) + i exp(theta)), b = exp(gamma) (B_re + i B_im)
h_t = a h_{t-1} + b x_t, y_t = Re(C h_t) + D x_t; bidirectional: + Re(C_bwd h'_t), h' from the end
in a layer: x + (W_1 g) sigmoid(W_2 g), g = GELU(y)",
    deviations: &[
        "The paper is causal; the bidirectional form has the same a and b and its own C for the other direction.",
        "x is 0 at masked positions and time goes on.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs { projections: Projections::NONE, x: true, output: OutputForm::Glu, ..Needs::default() },
    cost: |knobs, shape| state_space::cost(knobs.get(&P), shape),
    pattern: |_, _| None, // weights depend on the distance and the channel
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let (min, max) = (knobs.get(&R_MIN), knobs.get(&R_MAX));
    if min >= max {
        return Err(format!("r_min={min} is not below r_max={max}; give the inner radius as r_min"));
    }
    mixer::validate(knobs, shape)
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, width, causal, .. } = config;
    let (p, e) = (knobs.get(&P), *width);
    let (min, max, phase) = (knobs.get(&R_MIN), knobs.get(&R_MAX), knobs.get(&MAX_PHASE));
    // uniform in (0, 1], so that every logarithm is finite
    let nu = builder.drawn("nu_log", &[p], |stream| {
        let square = |u: f64| (u * (max * max - min * min) + min * min).min(1.0 - 1e-7);
        (0..p).map(|_| (-0.5 * square(1.0 - stream.uniform(0.0, 1.0)).ln()).ln() as f32).collect()
    })?;
    let theta = builder.drawn("theta_log", &[p], |stream| {
        (0..p).map(|_| (phase * (1.0 - stream.uniform(0.0, 1.0))).ln() as f32).collect()
    })?;
    let radii = nu.detach().contiguous()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let gamma = builder.drawn("gamma_log", &[p], |_| {
        let log = |nu: &f32| 0.5 * (-(-2.0 * f64::from(*nu).exp()).exp_m1()).ln(); // ln sqrt(1 - |a|^2)
        radii.iter().map(|nu| log(nu) as f32).collect()
    })?;
    let complex = |names: [&str; 2], shape: [usize; 2], std: f64| -> Result<Complex> {
        let param = |name| builder.param(name, &shape, Init::normal(std));
        Ok(Complex { re: param(names[0])?, im: param(names[1])? })
    };
    let b = complex(["B_re", "B_im"], [p, e], (2.0 * e as f64).powf(-0.5))?;
    let mut outputs = vec![complex(["C_re", "C_im"], [e, p], (p as f64).powf(-0.5))?];
    if !causal {
        outputs.push(complex(["C_re_bwd", "C_im_bwd"], [e, p], (p as f64).powf(-0.5))?);
    }
    let skip = builder.param("D", &[e], Init::normal(1.0))?;
    let discretize = move || {
        let (size, angle) = (nu.exp()?.neg()?.exp()?, theta.exp()?);
        let a = Complex { re: (&size * angle.cos()?)?, im: (&size * angle.sin()?)? };
        Ok(Discrete { a, b: b.scaled(&gamma.exp()?.unsqueeze(1)?)? })
    };
    Ok(Box::new(StateSpace { discretize, outputs, scale: 1.0, skip }))
}
