//! Sparse Sinkhorn attention: a block sees itself and a learned mixture of all blocks.
//!
//! Tay et al. 2020 (arXiv:2002.11296), X_S = U(R B(X)) with R doubly stochastic: see
//! [`effattn_kernel::sinkhorn`].

use candle_core::{Result, bail};

use super::knobs::{Kind, Knob, Knobs, Value};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, Idle, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support,
};
use crate::nn::params::{Init, ParamBuilder, ParamSpec};
use effattn_kernel::group::ParamGroup;
use effattn_kernel::sinkhorn::{Sinkhorn, SortNorm, Sorting, sinkhorn};

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
    support: Support {
        bidirectional: true,
        causal: false,
        cross: false,
        memory: false,
        cls: false,
        dropout: true,
    },
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
        applies: |knobs, _| released(knobs),
        reason: "SPEC-cos 4: in the released code the length must divide by the block.",
    }],
    idle: &[
        Idle { knob: "sort_activation", when: |knobs, _| released(knobs), why: RELEASED },
        Idle { knob: "temperature", when: |knobs, _| released(knobs), why: RELEASED },
        Idle { knob: "iters", when: |knobs, _| released(knobs), why: RELEASED },
        Idle { knob: "sort_net", when: |knobs, _| released(knobs), why: RELEASED },
        Idle { knob: "hidden", when: |knobs, _| released(knobs), why: RELEASED },
        Idle { knob: "max_blocks", when: |knobs, _| released(knobs), why: RELEASED },
        Idle {
            knob: "iters",
            when: |knobs, _| knobs.word("sort_activation") == "softmax",
            why: "with sort_activation=softmax",
        },
        Idle {
            knob: "hidden",
            when: |knobs, _| knobs.word("sort_net") == "linear",
            why: "with sort_net=linear",
        },
    ],
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |_, _| None,
    build,
};

const KNOBS: &[Knob] = &[
    Knob {
        name: "block",
        kind: Kind::Int { min: 1, max: 1 << 30 },
        default: Value::Int(64),
        doc: "length of a block b",
        source: "Long Range Arena (64 for images, 50 for text)",
    },
    Knob {
        name: "max_blocks",
        kind: Kind::AutoInt { min: 1, max: 1 << 20 },
        default: Value::Auto,
        doc: "blocks the sorting network scores; auto: as many as the longest sequence has",
        source: "Long Range Arena has 25",
    },
    Knob {
        name: "sort_net",
        kind: Kind::Word(&["linear", "mlp2"]),
        default: Value::Word("linear"),
        doc: "sorting network: linear, or two layers with ReLU",
        source: "Sparse Sinkhorn Attention sec. 3.1",
    },
    Knob {
        name: "hidden",
        kind: Kind::AutoInt { min: 1, max: 1 << 20 },
        default: Value::Auto,
        doc: "hidden width of mlp2; auto: the width of a head",
        source: "our choice",
    },
    Knob {
        name: "sort_activation",
        kind: Kind::Word(&["sinkhorn", "softmax"]),
        default: Value::Word("sinkhorn"),
        doc: "doubly stochastic weights, or a softmax over the source blocks",
        source: "Sparse Sinkhorn Attention sec. 3.1 (the Long Range Arena code runs softmax)",
    },
    Knob {
        name: "temperature",
        kind: Kind::Float { min: 1e-3, max: 1e6 },
        default: Value::Float(0.75),
        doc: "divides the scores of the sorting network",
        source: "Sparse Sinkhorn Attention sec. 4",
    },
    Knob {
        name: "iters",
        kind: Kind::Int { min: 0, max: 1000 },
        default: Value::Int(7),
        doc: "normalisations of rows and columns",
        source: "Sparse Sinkhorn Attention sec. 4 (5 to 10)",
    },
    Knob {
        name: "combine",
        kind: Kind::Word(&["sum", "concat"]),
        default: Value::Word("sum"),
        doc: "two softmaxes added, or one over block and mixture",
        source: "Long Range Arena code (the common PyTorch port concatenates)",
    },
    Knob {
        name: "layout",
        kind: Kind::Word(&["blocks", "released-lra"]),
        default: Value::Word("blocks"),
        doc: "released-lra (compat=lra): the Long Range Arena code, for replication; its sorting network has no effect",
        source: "the published mechanism",
    },
];

/// Why nothing that belongs to the sorting network changes what the released code computes.
const RELEASED: &str = "with compat=lra, whose sorted block is the plain sum of all blocks";

fn released(knobs: &Knobs) -> bool {
    knobs.word("layout") == "released-lra"
}

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let (block, n) = (knobs.int("block"), shape.keys);
    let blocks = n.div_ceil(block);
    if released(knobs) && n % block != 0 {
        return Err(format!(
            "sinkhorn: with compat=lra the length must be a multiple of block={block}, not {n}"
        ));
    }
    match knobs.opt_int("max_blocks") {
        Some(most) if most < blocks => Err(format!(
            "sinkhorn: length {n} has {blocks} blocks of {block}, above max_blocks={most}; raise it, or use auto"
        )),
        _ => Ok(()),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (d, block) = (shape.head_dim, knobs.int("block"));
    let blocks = shape.queries.div_ceil(block);
    let padded = blocks * block;
    let most = knobs.opt_int("max_blocks").unwrap_or(blocks);
    let net = match knobs.word("sort_net") {
        "mlp2" => knobs.opt_int("hidden").unwrap_or(d) * (d + most),
        _ => d * most,
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
    let (block, d) = (knobs.int("block"), config.head_dim);
    let released = released(knobs);
    let heads = if released { 1 } else { config.heads };
    let most = knobs.opt_int("max_blocks").unwrap_or(config.max_len.div_ceil(block));
    let affine = |suffix: &str, inputs: usize, outputs: usize| {
        // lecun normal, as in the Long Range Arena code
        let init = Init::normal(1.0 / (inputs as f64).sqrt());
        [
            ParamSpec::new(&format!("sort_w{suffix}"), &[heads, inputs, outputs], init),
            ParamSpec::new(&format!("sort_b{suffix}"), &[heads, outputs], Init::ZERO),
        ]
    };
    let hidden = knobs.opt_int("hidden").unwrap_or(d);
    let specs = match knobs.word("sort_net") {
        "mlp2" => [affine("1", d, hidden), affine("", hidden, most)].concat(),
        _ => affine("", d, most).to_vec(),
    };
    let group = builder.group(&specs)?;
    let activation = match knobs.word("sort_activation") {
        "softmax" => SortNorm::Softmax,
        _ => SortNorm::Sinkhorn(knobs.int("iters")),
    };
    let (temperature, concat) = (knobs.float("temperature"), knobs.word("combine") == "concat");
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
