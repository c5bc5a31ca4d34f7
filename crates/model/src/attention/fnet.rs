//! FNet (Lee-Thorp et al. 2022): a Fourier transform over positions and channels in the place of attention.

use candle_core::Result;

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismEntry, Needs, OutputForm,
    Paper, Projections, Shape, Support, mixer,
};
use effattn_kernel::fourier::{Norm, fourier_mix};

const FFT_NORM: Knob<Norm> = Knob::words("fft_norm", &[("none", Norm::None), ("ortho", Norm::Ortho)])
    .doc("none, or ortho: divided by sqrt(n d)")
    .source("FNet eq. 3");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "fnet",
    title: "FNet",
    paper: Paper {
        authors: "Lee-Thorp et al.",
        title: "FNet: Mixing Tokens with Fourier Transforms",
        year: 2022,
        locator: "arXiv:2105.03824",
    },
    support: Support { bidirectional: true, ..Support::NONE },
    knobs: &[FFT_NORM.spec()],
    complexity: "O(n d log(n d))",
    time: Growth::Linearithmic,
    memory: Growth::Linear,
    equations: "out = Re(F_n x F_d): out_ie = sum_{j,f} cos(2 pi (i j / n + e f / d)) x_jf; the layer adds x, without a projection",
    deviations: &[
        "n is the padded length and x is 0 at masked positions: results depend on the length that a batch is padded to. The released models have no mask.",
        "The multiply-adds are those of two products with dense matrices; the transform itself takes about 2.5 n d log2(n d) operations.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs {
        projections: Projections::NONE,
        x: true,
        output: OutputForm::Plain,
        ..Needs::default()
    },
    cost: |_, shape| {
        let Shape { batch, width, queries, .. } = *shape;
        let macs = 2 * queries * width * (queries + width);
        let points = (queries * width) as f64;
        let flops = 2.5 * points * points.max(2.0).log2();
        Cost { core_macs: (batch * macs) as u64, flops: flops as u64, state_bytes: 0 }
    },
    pattern: |_, _| None, // every position enters every other with another sign in every channel
    build: |config, _| Ok(Box::new(Fourier { norm: config.knobs.get(&FFT_NORM) })),
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if shape.causal {
        return Err(
            "a Fourier transform reads the whole sequence: fnet has no causal form; choose another mechanism"
                .into(),
        );
    }
    mixer::validate(knobs, shape)
}

struct Fourier {
    norm: Norm,
}

impl Mechanism for Fourier {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        fourier_mix(&mixer::visible(input)?, self.norm).map(AttentionOutput::rows)
    }
}
