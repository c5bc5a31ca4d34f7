//! Nystromformer: softmax attention approximated through landmarks.
//!
//! out = F Z (B v) + conv(v), Xiong et al. 2021 eq. 13-14: see [`effattn_kernel::nystrom`]. Sequences that are
//! not longer than the number of landmarks take exact softmax attention.

use candle_core::{Result, Tensor, bail};

use super::knobs::{Knob, KnobSpec, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::heads::{Heads, merge};
use effattn_kernel::masking::zero_hidden_rows;
use effattn_kernel::nystrom::{InverseInit, Landmarks, nystrom};
use effattn_record::pattern::Pattern;

const LANDMARKS: Knob<usize> = Knob::int("landmarks", 128, 1..=usize::MAX)
    .doc("number of landmarks m")
    .source("Transformer-LS Table 1 (the LRA code's README has 64)");
const N_ITER: Knob<usize> =
    Knob::int("n_iter", 6, 0..=64).doc("iterations of the pseudo-inverse").source("Nystromformer sec. 4.1");
const INIT: Knob<InverseInit> =
    Knob::words("init", &[("per-matrix", InverseInit::PerMatrix), ("original", InverseInit::Original)])
    .doc("start of the pseudo-inverse: scaled per matrix, or by one maximum over the batch as in the released code")
    .source("Nystromformer eq. 14");
const CONV_KERNEL: Knob<usize> = Knob::int("conv_kernel", 0, 0..=1 << 16)
    .doc("taps of the depthwise convolution added to the result (odd), 0 for none")
    .source("Transformer-LS Table 1 ran without it; the LRA code's configuration has 35");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "nystrom",
    title: "Nystromformer",
    paper: Paper {
        authors: "Xiong et al.",
        title: "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention",
        year: 2021,
        locator: "arXiv:2102.03902",
    },
    support: Support { bidirectional: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n m d + m^3) with m landmarks",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "q' = q D^(-1/4), k' = k D^(-1/4); landmarks Ql, Kl: means of m segments.\n\
        F = softmax(q' Kl^T), A = softmax(Ql Kl^T), B = softmax(Ql k'^T).\n\
        Z_0 = A^T / c; Y = A Z; Z <- Z (13 I - Y (15 I - Y (7 I - Y))) / 4.\n\
        out = F Z (B v) [+ depthwise convolution of v]; n <= m: softmax attention.",
    deviations: &[
        "The released code divides the start of the pseudo-inverse by one maximum over the whole batch \
         (init=original); the default is the paper's, per matrix.",
        "The released code needs a length that is a multiple of the number of landmarks; here zero rows are \
         appended and counted in the means, as that code does with padding.",
    ],
    exceptions: &[
        Exception {
            property: Property::BatchIndependent,
            applies: |knobs, _| knobs.get(&INIT) == InverseInit::Original,
            reason: "SPEC-ls 9.3: c is the largest column sum over all matrices of the batch and heads.",
        },
        Exception {
            property: Property::HeadsIndependent,
            applies: |knobs, _| knobs.get(&INIT) == InverseInit::Original,
            reason: "SPEC-ls 9.3: c is the largest column sum over all matrices of the batch and heads.",
        },
    ],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |_, _| None,
    build,
};

const KNOBS: &[KnobSpec] = &[LANDMARKS.spec(), N_ITER.spec(), INIT.spec(), CONV_KERNEL.spec()];

fn validate(knobs: &Knobs, _: &Shape) -> std::result::Result<(), String> {
    match knobs.get(&CONV_KERNEL) {
        taps if taps > 0 && taps % 2 == 0 => Err(format!(
            "nystrom: conv_kernel={taps} must be odd (or 0 for no convolution); try {}",
            taps + 1
        )),
        _ => Ok(()),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (n, d, m) = (shape.queries, shape.head_dim, knobs.get(&LANDMARKS));
    let padded = n.next_multiple_of(m);
    let core = if n <= m {
        2 * n * n * d
    } else {
        4 * padded * m * d + m * m * d + padded * m * m + 4 * knobs.get(&N_ITER) * m * m * m
    };
    let sample = shape.heads * (core + n * d * knobs.get(&CONV_KERNEL));
    Cost { core_macs: (shape.batch * sample) as u64, flops: sample as u64, state_bytes: 0 }
}

struct Nystrom {
    spec: Landmarks,
    conv: Option<Tensor>, // [h, taps]
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    if config.causal {
        bail!("nystrom has no causal form");
    }
    let knobs = &config.knobs;
    let spec =
        Landmarks { count: knobs.get(&LANDMARKS), iterations: knobs.get(&N_ITER), start: knobs.get(&INIT) };
    let conv = match knobs.get(&CONV_KERNEL) {
        0 => None,
        taps => {
            // PyTorch's default for a convolution with `taps` inputs per output
            let weight = builder.param("conv.weight", &[config.heads, 1, taps, 1], Init::fan_in(taps))?;
            Some(weight.reshape((config.heads, taps))?)
        }
    };
    Ok(Box::new(Nystrom { spec, conv }))
}

impl Mechanism for Nystrom {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let n = input.qkv.value_dims()?.2;
        let queries = input.qkv.q()?.dim(2)?;
        if queries != n {
            bail!("nystrom needs as many queries as keys, not {queries} and {n}");
        }
        let out = if n <= self.spec.count {
            let pattern = Pattern::full(n, n, false);
            attend(input.qkv, &Attend::plain(&pattern, input.mask, input.qkv.value_dims()?.3))?
        } else {
            nystrom(input.qkv, input.mask, self.spec)?
        };
        let Some(weight) = &self.conv else { return Ok(out.into()) };
        let conv = depthwise(&zero_hidden_rows(&input.qkv.v()?.contiguous()?, input.mask)?, weight)?;
        let heads = input.qkv.value_dims()?.1;
        Ok(Heads::Merged { rows: (out.merged()? + merge(&conv)?)?, heads }.into())
    }
}

/// `out[i]` = sum_t weight[h, t] v[i + t - taps / 2] for `v` [b, h, n, d], 0 outside the sequence, and `weight`
/// [h, taps] with an odd number of taps: a sum of shifted copies (candle's own convolution has wrong gradients
/// for grouped kernels).
fn depthwise(v: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (heads, taps) = weight.dims2()?;
    let (n, half) = (v.dim(2)?, taps / 2);
    let padded = v.pad_with_zeros(2, half, half)?;
    let mut out = v.zeros_like()?;
    for tap in 0..taps {
        let factor = weight.narrow(1, tap, 1)?.reshape((1, heads, 1, 1))?;
        out = (out + padded.narrow(2, tap, n)?.broadcast_mul(&factor)?)?;
    }
    Ok(out)
}
