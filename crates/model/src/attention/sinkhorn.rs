//! Sparse Sinkhorn attention: a block sees itself and a learned mixture of all blocks.
//!
//! Tay et al. 2020 (arXiv:2002.11296), X_S = U(R B(X)) with R doubly stochastic: see
//! [`effattn_kernel::sinkhorn`].

use candle_core::{Result, bail};

use super::knobs::{Knob, KnobSpec, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support,
};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use effattn_kernel::group::ParamGroup;
use effattn_kernel::sinkhorn::{Sinkhorn, SortNorm, Sorting, sinkhorn};

const BLOCK: Knob<usize> = Knob::int("block", 64, 1..=1 << 30)
    .doc("length of a block b")
    .source("Long Range Arena (64 for images, 50 for text)");
const MAX_BLOCKS: Knob<Option<usize>> = Knob::auto_int("max_blocks", 1..=1 << 20)
    .doc("blocks the sorting network scores; auto: as many as the longest sequence has")
    .source("Long Range Arena has 25");
const SORT_NET: Knob<SortNet> =
    Knob::words("sort_net", &[("linear", SortNet::Linear), ("mlp2", SortNet::Mlp2)])
        .doc("sorting network: linear, or two layers with ReLU")
        .source("Sparse Sinkhorn Attention sec. 3.1");
const HIDDEN: Knob<Option<usize>> = Knob::auto_int("hidden", 1..=1 << 20)
    .doc("hidden width of mlp2; auto: the width of a head")
    .source("our choice");
const SORT_SOFTMAX: Knob<bool> = Knob::words("sort_activation", &[("sinkhorn", false), ("softmax", true)])
    .doc("doubly stochastic weights, or a softmax over the source blocks")
    .source("Sparse Sinkhorn Attention sec. 3.1 (the Long Range Arena code runs softmax)");
const TEMPERATURE: Knob<f64> = Knob::float("temperature", 0.75, 1e-3..=1e6)
    .doc("divides the scores of the sorting network")
    .source("Sparse Sinkhorn Attention sec. 4");
const ITERS: Knob<usize> = Knob::int("iters", 7, 0..=1000)
    .doc("normalisations of rows and columns")
    .source("Sparse Sinkhorn Attention sec. 4 (5 to 10)");
const CONCAT: Knob<bool> = Knob::words("combine", &[("sum", false), ("concat", true)])
    .doc("two softmaxes added, or one over block and mixture")
    .source("Long Range Arena code (the common PyTorch port concatenates)");
const RELEASED: Knob<bool> = Knob::words("layout", &[("blocks", false), ("released-lra", true)])
    .doc("released-lra (compat=lra): the Long Range Arena code, for replication; its sorting network has no effect")
    .source("the published mechanism");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "sinkhorn",
    title: "Sinkhorn Transformer",
    paper: Paper {
        authors: "Tay et al.",
        title: "Sparse Sinkhorn Attention",
        year: 2020,
        locator: "arXiv:2002.11296",
    },
    support: Support { bidirectional: true, dropout: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n b d + n^2 d / b) with blocks of b",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "pooled_u = sum of the kept keys of block u; L = (pooled sort_w + sort_b) / temperature.\n\
        iters times: rows of exp(L) to sum 1, columns to sum 1; R = exp(L).\n\
        sk_u[t] = sum_w R[u,w] k_w[t], sv_u[t] = sum_w R[u,w] v_w[t].\n\
        combine=sum: out = softmax(q k) v + softmax(q sk) sv; combine=concat: one softmax over both.",
    deviations: &[
        "The Long Range Arena code normalises rows only (a softmax), takes every n/b-th position as a block, and \
         its sorted block is the plain sum of all blocks, so that its sorting network has no effect: compat=lra.",
        "lucidrains' port mixes the keys where values are meant and adds noise at evaluation; not followed.",
    ],
    exceptions: &[Exception {
        property: Property::AnyLength,
        applies: |knobs, _| knobs.get(&RELEASED),
        reason: "SPEC-cos 4: in the released code the length must divide by the block.",
    }],
    idle: &[
        Idle { knob: SORT_SOFTMAX.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle { knob: TEMPERATURE.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle { knob: ITERS.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle { knob: SORT_NET.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle { knob: HIDDEN.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle { knob: MAX_BLOCKS.name(), when: |knobs, _| knobs.get(&RELEASED), why: PLAIN_SUM },
        Idle {
            knob: ITERS.name(),
            when: |knobs, _| knobs.get(&SORT_SOFTMAX),
            why: "with sort_activation=softmax",
        },
        Idle {
            knob: HIDDEN.name(),
            when: |knobs, _| knobs.get(&SORT_NET) == SortNet::Linear,
            why: "with sort_net=linear",
        },
    ],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |_, _| None,
    build,
};

const KNOBS: &[KnobSpec] = &[
    BLOCK.spec(),
    MAX_BLOCKS.spec(),
    SORT_NET.spec(),
    HIDDEN.spec(),
    SORT_SOFTMAX.spec(),
    TEMPERATURE.spec(),
    ITERS.spec(),
    CONCAT.spec(),
    RELEASED.spec(),
];

/// The network that scores source blocks.
#[derive(Clone, Copy, PartialEq)]
enum SortNet {
    Linear,
    Mlp2,
}

/// Why nothing that belongs to the sorting network changes what the released code computes.
const PLAIN_SUM: &str = "with compat=lra, whose sorted block is the plain sum of all blocks";

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let (block, n) = (knobs.get(&BLOCK), shape.keys);
    let blocks = n.div_ceil(block);
    if knobs.get(&RELEASED) && n % block != 0 {
        return Err(format!(
            "sinkhorn: with compat=lra the length must be a multiple of block={block}, not {n}"
        ));
    }
    match knobs.get(&MAX_BLOCKS) {
        Some(most) if most < blocks => Err(format!(
            "sinkhorn: length {n} has {blocks} blocks of {block}, above max_blocks={most}; raise it, or use auto"
        )),
        _ => Ok(()),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (d, block) = (shape.head_dim, knobs.get(&BLOCK));
    let blocks = shape.queries.div_ceil(block);
    let padded = blocks * block;
    let most = knobs.get(&MAX_BLOCKS).unwrap_or(blocks);
    let net = match knobs.get(&SORT_NET) {
        SortNet::Mlp2 => knobs.get(&HIDDEN).unwrap_or(d) * (d + most),
        SortNet::Linear => d * most,
    };
    let sample = shape.heads * (4 * padded * block * d + 2 * blocks * padded * d + blocks * net);
    Cost { core_macs: (shape.batch * sample) as u64, flops: sample as u64, state_bytes: 0 }
}

struct Layer {
    block: usize,
    temperature: f64,
    activation: SortNorm,
    concat: bool,
    released: bool,
    group: ParamGroup,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    if config.causal {
        bail!("sinkhorn has no causal form");
    }
    let knobs = &config.knobs;
    let (block, d) = (knobs.get(&BLOCK), config.head_dim);
    let released = knobs.get(&RELEASED);
    let heads = if released { 1 } else { config.heads };
    let most = knobs.get(&MAX_BLOCKS).unwrap_or(config.max_len.div_ceil(block));
    let affine = |suffix: &str, inputs: usize, outputs: usize| {
        // lecun normal, as in the Long Range Arena code
        let init = Init::normal(1.0 / (inputs as f64).sqrt());
        [
            ParamSpec::new(&format!("sort_w{suffix}"), &[heads, inputs, outputs], init),
            ParamSpec::new(&format!("sort_b{suffix}"), &[heads, outputs], Init::ZERO),
        ]
    };
    let hidden = knobs.get(&HIDDEN).unwrap_or(d);
    let specs = match knobs.get(&SORT_NET) {
        SortNet::Mlp2 => [affine("1", d, hidden), affine("", hidden, most)].concat(),
        SortNet::Linear => affine("", d, most).to_vec(),
    };
    let group = builder.group(&specs)?;
    let activation =
        if knobs.get(&SORT_SOFTMAX) { SortNorm::Softmax } else { SortNorm::Sinkhorn(knobs.get(&ITERS)) };
    let (temperature, concat) = (knobs.get(&TEMPERATURE), knobs.get(&CONCAT));
    Ok(Box::new(Layer { block, temperature, activation, concat, released, group }))
}

impl Mechanism for Layer {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (n, queries) = (input.qkv.value_dims()?.2, input.qkv.q()?.dim(2)?);
        if queries != n {
            bail!("sinkhorn needs as many queries as keys, not {queries} and {n}");
        }
        let sorting = if self.released {
            Sorting::Released
        } else {
            let Self { group, temperature, activation, .. } = self;
            Sorting::Net { group, temperature: *temperature, activation: *activation }
        };
        let call = Sinkhorn { block: self.block, sorting, concat: self.concat, dropout: input.dropout };
        Ok(sinkhorn(input.qkv, input.mask, &call)?.into())
    }
}
