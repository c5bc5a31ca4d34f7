//! Performer: FAVOR+, positive orthogonal random features of the softmax kernel (Choromanski et al. 2021).
//!
//! With x' = x D^(-1/4): phi(q_i) = (exp(omega q'_i - |q'_i|^2 / 2 - c_i) + feature_eps) / sqrt(m), keys
//! alike. c_i is the maximum of omega q'_i over the features; for keys c is the maximum over features and
//! visible positions of the sample and head.

use candle_core::{Device, Result, Tensor, bail};

use super::decode::{DecodeState, LinearSums};
use super::knobs::{Knob, KnobSpec, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support, feature,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::linear_attention::decode::recurrent;
use effattn_kernel::linear_attention::{Decay, Favor, Features, Guard, LinearAttention, linear_attention};

const M: Knob<usize> = Knob::int("m", 256, 1..=1 << 16).doc("random features").source("LRA code");
const FEATURE_EPS: Knob<Option<f64>> = Knob::auto_float("feature_eps", 0.0..=1.0)
    .doc("added to every exponential; auto: 1e-4, causal 0")
    .source("performer-pytorch 1.1.4");
const DEN_EPS: Knob<f64> = Knob::float("den_eps", 0.0, 0.0..=1.0)
    .doc("weight of sum phi(q) in the denominator")
    .source("performer-pytorch 1.1.4");
const LRA_COMPAT: Knob<bool> = Knob::bool("lra_compat", false)
    .doc("the LRA code's double scaling and masking (compat=lra)")
    .source("our choice");
const DETACH: Knob<bool> = Knob::bool("detach", true)
    .doc("whether the maxima c are constants for the gradient")
    .source("performer-pytorch 1.1.4");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "performer",
    title: "Performer",
    paper: Paper {
        authors: "Choromanski et al.",
        title: "Rethinking Attention with Performers",
        year: 2021,
        locator: "arXiv:2009.14794",
    },
    support: Support { bidirectional: true, causal: true, cross: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n m d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
q' = q D^(-1/4), k' = k D^(-1/4), omega [m, D] orthogonal in blocks of D rows, norms as of normal vectors
phi(q_i) = (exp(omega q'_i - |q'_i|^2 / 2 - c_i) + feature_eps) / sqrt(m), c_i = max over features of omega q'_i
phi(k_j) = (exp(omega k'_j - |k'_j|^2 / 2 - c) + feature_eps) / sqrt(m), c = max over features and visible j of omega k'_j
out_i = sum_j <phi(q_i), phi(k_j)> v_j / (sum_j <phi(q_i), phi(k_j)> + den_eps sum phi(q_i)), over keys j that are not padded and, when causal, j <= i",
    deviations: &[
        "compat=lra: the LRA code scales queries and keys by D^(-1/4) once more, and turns masked keys and values into zero vectors that stay in the denominator and in c.",
        "performer-pytorch 0.7 to 1.0 take c over the whole batch and all heads and let gradients through; here c is per sample and head and detached (detach=false: the JAX code of Long Range Arena).",
        "The library's causal default (feature_eps=1e-4, den_eps=1e-6) lets c carry the future; causal here means both eps are 0 unless set.",
        "The library never redraws omega during a run; nor is it redrawn here.",
        "A denominator below 1e-18 (underflow, only possible without feature_eps) gives 0.",
    ],
    exceptions: &[Exception {
        property: Property::IgnoresFuture,
        applies: |knobs, causal| causal && (feature_eps(knobs, true) > 0.0 || knobs.get(&DEN_EPS) > 0.0),
        reason: "SPEC-ls 8: performer-causal-eps leaks the future, c depends on later keys while eps does not",
    }],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: feature::validate,
    needs: |_| Needs::default(),
    cost,
    pattern: feature::pattern,
    build,
};

static KNOBS: &[KnobSpec] = &[M.spec(), FEATURE_EPS.spec(), DEN_EPS.spec(), LRA_COMPAT.spec(), DETACH.spec()];

fn feature_eps(knobs: &Knobs, causal: bool) -> f64 {
    knobs.get(&FEATURE_EPS).unwrap_or(if causal { 0.0 } else { 1e-4 })
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, heads, head_dim, queries, keys, .. } = *shape;
    let m = knobs.get(&M);
    let macs = heads * m * (2 * head_dim * (queries + keys) + queries);
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        // sums of values and features, and the running maximum
        state_bytes: (4 * heads * (m * (head_dim + 1) + 1)) as u64,
    }
}

struct Performer {
    favor: Favor,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let (knobs, d) = (&config.knobs, config.head_dim);
    let m = knobs.get(&M);
    let omega = builder.constant("omega", |stream, device| orthogonal(stream, m, d, device))?;
    if omega.dims() != [m, d] {
        bail!("omega has shape {:?}, expected [{m}, {d}]", omega.dims());
    }
    let lra = knobs.get(&LRA_COMPAT);
    let favor = Favor {
        omega,
        scale: (d as f64).powf(if lra { -0.5 } else { -0.25 }),
        feature_eps: feature_eps(knobs, config.causal),
        den_eps: knobs.get(&DEN_EPS),
        through: !knobs.get(&DETACH),
        masked_as_zero: lra,
    };
    Ok(Box::new(Performer { favor, causal: config.causal }))
}

impl Mechanism for Performer {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        Ok(linear_attention(input.qkv, &self.call(input.mask))?.into())
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok(recurrent(&self.call(None)).then(|| LinearSums::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        Ok(state.downcast::<LinearSums>()?.attend(input.qkv, &self.call(None))?.into())
    }
}

impl Performer {
    fn call<'a>(&self, mask: Option<&'a Tensor>) -> LinearAttention<'a> {
        LinearAttention {
            features: Features::Favor(self.favor.clone()),
            guard: Some(Guard::NonZero),
            mask,
            causal: self.causal,
            decay: Decay::None,
        }
    }
}

/// `m` directions in `d` dimensions: blocks of `d` orthogonal rows (Gram-Schmidt on normal vectors), each row
/// as long as an independent normal vector.
fn orthogonal(stream: &mut RngStream, m: usize, d: usize, device: &Device) -> Result<Tensor> {
    let mut rows: Vec<f32> = Vec::with_capacity(m * d);
    let normal = |stream: &mut RngStream| (0..d).map(|_| stream.normal()).collect::<Vec<f64>>();
    let mut block: Vec<Vec<f64>> = Vec::new();
    for _ in 0..m {
        if block.len() == d {
            block.clear();
        }
        let mut row = normal(stream);
        for _ in 0..2 {
            // twice, so that rounding leaves nothing of the earlier rows
            for other in &block {
                let dot: f64 = row.iter().zip(other).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(other).for_each(|(a, b)| *a -= dot * b);
            }
        }
        let length = |row: &[f64]| row.iter().map(|a| a * a).sum::<f64>().sqrt();
        let own = length(&row).max(f64::MIN_POSITIVE);
        row.iter_mut().for_each(|a| *a /= own);
        let drawn = length(&normal(stream));
        rows.extend(row.iter().map(|a| (a * drawn) as f32));
        block.push(row);
    }
    Tensor::from_vec(rows, (m, d), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors() {
        let (m, d) = (21, 8);
        let rows = orthogonal(&mut RngStream::new(1, "omega"), m, d, &Device::Cpu).unwrap();
        let gram = rows.matmul(&rows.t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
        for (i, line) in gram.iter().enumerate() {
            for (j, dot) in line.iter().enumerate() {
                if i != j && i / d == j / d {
                    assert!(dot.abs() < 1e-4 * (gram[i][i] * gram[j][j]).sqrt(), "{i} {j} {dot}");
                }
            }
        }
        let many = orthogonal(&mut RngStream::new(1, "omega"), 4000, d, &Device::Cpu).unwrap();
        let square = many.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
        assert!((square - 1.0).abs() < 0.05, "{square}");
    }
}
