//! A mechanism of one's own, from nothing to a measurement: docs/library.md.

use std::process::ExitCode;

use candle_core::{Result, Tensor};
use effattn::attention::knobs::Knobs;
use effattn::attention::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Projections, Shape, Support,
};
use effattn::kernel::heads::Heads;
use effattn::nn::params::ParamBuilder;
use effattn::pattern::Pattern;

/// Every query takes the mean of all values.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "average",
    title: "Average",
    paper: Paper { authors: "You", title: "Yours", year: 2026, locator: "section 1" },
    support: Support {
        bidirectional: true,
        causal: false,
        cross: false,
        memory: false,
        cls: false,
        dropout: false,
    },
    knobs: &[],
    complexity: "O(n d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "out_i = mean_j v_j over keys j that are not padded",
    deviations: &[],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: |_, shape| match shape.queries == shape.keys {
        true => Ok(()),
        false => Err("as many queries as keys are needed".to_owned()),
    },
    needs: |_| Needs { projections: Projections::V, ..Needs::default() },
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build: |_: &MechanismConfig, _: &ParamBuilder| Ok(Box::new(Average)),
};

/// Multiply-adds of one layer, for one batch and for one sample.
fn cost(_: &Knobs, shape: &Shape) -> Cost {
    let macs = shape.heads * shape.keys * shape.head_dim;
    Cost { core_macs: (shape.batch * macs) as u64, flops: macs as u64, state_bytes: 0 }
}

struct Average;

impl Mechanism for Average {
    /// Values are [batch, heads, positions, channels]; the mask is [batch, positions], 0 where a position is padding.
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let v = input.qkv.v()?.contiguous()?;
        let (b, _, n, _) = v.dims4()?;
        let keep = match input.mask {
            Some(mask) => mask.reshape((b, 1, n, 1))?,
            None => Tensor::ones((b, 1, n, 1), v.dtype(), v.device())?,
        };
        let sum = v.broadcast_mul(&keep)?.sum_keepdim(2)?;
        let mean = sum.broadcast_div(&keep.sum_keepdim(2)?.maximum(1f32)?)?;
        Ok(Heads::Split(mean.broadcast_as(v.shape())?.contiguous()?).into())
    }
}

/// Every command of effattn, with the mechanism among its own.
pub fn main() -> ExitCode {
    effattn::attention::register(&ENTRY);
    effattn::cli::main()
}
