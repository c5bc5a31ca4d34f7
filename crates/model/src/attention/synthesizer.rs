//! Synthesizer: attention logits that do not come from comparing queries with keys.
//!
//! `logits = [random] R[h,i,j] + [factorized_random] (R1 R2)[h,i,j] + [dense] (relu(x w1 + b1) w2 + b2)_ij`
//! + `[dot_product]` q_i . k_j / sqrt(D); out = softmax over visible j, times v (Tay et al. 2021; SPEC-cos 5).

use candle_core::{Result, Tensor, bail};

use super::knobs::{Knob, KnobSpec, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Projections, Property, Shape, Support,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::masking::zero_hidden_rows;
use effattn_record::pattern::Pattern;

const MODE: Knob<&[Part]> = Knob::words("mode", MODES)
    .doc("where logits come from; parts joined with + are added")
    .source("Long Range Arena (encoder default)");
const DOT_PRODUCT: Knob<bool> = Knob::bool("dot_product", true)
    .doc("whether q k / sqrt(D) is added")
    .source("Long Range Arena (encoder default)");
const MAX_LEN: Knob<Option<usize>> = Knob::auto_int("max_len", 1..=1 << 20)
    .doc("longest sequence the parameters are for; auto: the model's")
    .source("the task's length");
const K: Knob<usize> = Knob::int("k", 32, 1..=1 << 20)
    .doc("rank of factorized_random")
    .source("Long Range Arena text configuration");
const HIDDEN: Knob<Option<usize>> = Knob::auto_int("hidden", 1..=1 << 20)
    .doc("hidden width of dense; auto: the width of a head")
    .source("Long Range Arena");
const RELEASED: Knob<bool> = Knob::words("layout", &[("heads", false), ("released-lra", true)])
    .doc("released-lra (compat=lra): the Long Range Arena code, whose dense form lacks a transpose")
    .source("the published mechanism");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "synthesizer",
    title: "Synthesizer",
    paper: Paper {
        authors: "Tay et al.",
        title: "Synthesizer: Rethinking Self-Attention for Transformer Models",
        year: 2021,
        locator: "arXiv:2005.00743",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n^2 d)",
    time: Growth::Quadratic,
    memory: Growth::Quadratic,
    equations: "logits_ij = [random] R[h,i,j] + [factorized_random] (R1 R2)[h,i,j] + [dense] (relu(x_i w1 + b1) w2 + b2)_j\n\
        + [dot_product] q_i . k_j / sqrt(D); out_i = sum_j softmax_j(logits_ij) v_j over keys j that are not\n\
        padded and, when causal, j <= i.",
    deviations: &[
        "The paper mixes with learned weights that sum to 1; the Long Range Arena code adds, and is followed.",
        "That code ignores padding where there is no dot product; here padded keys are always hidden.",
        "Its dense form reads [n, h, L] as [h, n, L] without a transpose, which mixes heads and positions: compat=lra.",
    ],
    exceptions: &[
        Exception {
            property: Property::IgnoresFuture,
            applies: |knobs, causal| causal && mixes(knobs),
            reason: "SPEC-cos 5: the released dense form mixes heads and positions.",
        },
        Exception {
            property: Property::PaddingInert,
            applies: |knobs, _| mixes(knobs),
            reason: "SPEC-cos 5: the released dense form mixes heads and positions.",
        },
        Exception {
            property: Property::HeadsIndependent,
            applies: |knobs, _| mixes(knobs),
            reason: "SPEC-cos 5: the released dense form mixes heads and positions.",
        },
    ],
    idle: &[
        Idle {
            knob: K.name(),
            when: |knobs, _| !has(knobs, Part::Factorized),
            why: "without mode=factorized_random",
        },
        Idle { knob: HIDDEN.name(), when: |knobs, _| !has(knobs, Part::Dense), why: "without mode=dense" },
        Idle { knob: RELEASED.name(), when: |knobs, _| !has(knobs, Part::Dense), why: "without mode=dense" },
    ],
    in_models: InModels::PLAIN,
    validate,
    needs: |knobs| Needs {
        projections: if knobs.get(&DOT_PRODUCT) { Projections::QKV } else { Projections::V },
        x: has(knobs, Part::Dense),
        ..Needs::default()
    },
    cost,
    pattern: |_, shape| Some(Pattern::full(shape.queries, shape.keys, shape.causal)),
    build,
};

const KNOBS: &[KnobSpec] =
    &[MODE.spec(), DOT_PRODUCT.spec(), MAX_LEN.spec(), K.spec(), HIDDEN.spec(), RELEASED.spec()];

/// A part of the logits.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Random,
    Factorized,
    Dense,
}

const MODES: &[(&str, &[Part]); 15] = &[
    ("random", &[Part::Random]),
    ("factorized_random", &[Part::Factorized]),
    ("dense", &[Part::Dense]),
    ("dense+random", &[Part::Dense, Part::Random]),
    ("dense+factorized_random", &[Part::Dense, Part::Factorized]),
    ("random+dense", &[Part::Random, Part::Dense]),
    ("random+factorized_random", &[Part::Random, Part::Factorized]),
    ("factorized_random+dense", &[Part::Factorized, Part::Dense]),
    ("factorized_random+random", &[Part::Factorized, Part::Random]),
    ("dense+random+factorized_random", &[Part::Dense, Part::Random, Part::Factorized]),
    ("dense+factorized_random+random", &[Part::Dense, Part::Factorized, Part::Random]),
    ("random+dense+factorized_random", &[Part::Random, Part::Dense, Part::Factorized]),
    ("random+factorized_random+dense", &[Part::Random, Part::Factorized, Part::Dense]),
    ("factorized_random+dense+random", &[Part::Factorized, Part::Dense, Part::Random]),
    ("factorized_random+random+dense", &[Part::Factorized, Part::Random, Part::Dense]),
];

fn has(knobs: &Knobs, part: Part) -> bool {
    knobs.get(&MODE).contains(&part)
}

/// Whether the released code's missing transpose mixes heads and positions.
fn mixes(knobs: &Knobs) -> bool {
    has(knobs, Part::Dense) && knobs.get(&RELEASED)
}

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    match knobs.get(&MAX_LEN) {
        Some(most) if most < shape.keys => {
            Err(format!("synthesizer: length {} is above max_len={most}; raise it, or use auto", shape.keys))
        }
        _ => Ok(()),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (n, d, h) = (shape.queries, shape.head_dim, shape.heads);
    let most = knobs.get(&MAX_LEN).unwrap_or(n);
    let hidden = knobs.get(&HIDDEN).unwrap_or(d);
    let dot = knobs.get(&DOT_PRODUCT);
    let pairs = h * n * n * d * if dot { 2 } else { 1 };
    let shared = if has(knobs, Part::Factorized) { h * n * n * knobs.get(&K) } else { 0 };
    let own = pairs + if has(knobs, Part::Dense) { h * n * hidden * (shape.width + most) } else { 0 };
    Cost {
        core_macs: (shape.batch * own + shared) as u64,
        flops: (own + shared) as u64,
        state_bytes: (4 * h * d * shape.keys * if dot { 2 } else { 1 }) as u64,
    }
}

struct Dense {
    w1: Tensor, // [h, e, hidden]
    b1: Tensor, // [h, hidden]
    w2: Tensor, // [hidden, max_len]
    b2: Tensor, // [max_len]
}

struct Synthesizer {
    random: Option<Tensor>,               // [h, max_len, max_len]
    factorized: Option<(Tensor, Tensor)>, // [h, max_len, k], [h, k, max_len]
    dense: Option<Dense>,
    dot_product: bool,
    causal: bool,
    mixes: bool,
    max_len: usize,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let (knobs, h) = (&config.knobs, config.heads);
    let max_len = knobs.get(&MAX_LEN).unwrap_or(config.max_len);
    let (k, hidden) = (knobs.get(&K), knobs.get(&HIDDEN).unwrap_or(config.head_dim));
    // lecun normal, which counts heads into the fan-in of a [heads, in, out] parameter
    let lecun = |fan_in: usize| Init::normal(1.0 / (fan_in as f64).sqrt());
    let param = |name: &str, shape: &[usize], init| builder.param(name, shape, init);
    let random =
        has(knobs, Part::Random).then(|| param("random", &[h, max_len, max_len], lecun(h * max_len)));
    let factorized = has(knobs, Part::Factorized).then(|| -> Result<_> {
        let left = param("random1", &[h, max_len, k], lecun(h * max_len))?;
        Ok((left, param("random2", &[h, k, max_len], lecun(h * k))?))
    });
    let dense = has(knobs, Part::Dense).then(|| -> Result<_> {
        let e = config.width;
        Ok(Dense {
            w1: param("w1", &[h, e, hidden], Init::xavier(e, hidden))?,
            b1: param("b1", &[h, hidden], Init::ZERO)?,
            w2: param("w2", &[hidden, max_len], Init::xavier(hidden, max_len))?,
            b2: param("b2", &[max_len], Init::ZERO)?,
        })
    });
    Ok(Box::new(Synthesizer {
        random: random.transpose()?,
        factorized: factorized.transpose()?,
        dense: dense.transpose()?,
        dot_product: knobs.get(&DOT_PRODUCT),
        causal: config.causal,
        mixes: mixes(knobs),
        max_len,
    }))
}

impl Dense {
    /// What the columns of `w2` and the entries of `b2` are multiplied by: [b, h, n, hidden + 1].
    fn queries(&self, x: &Tensor, mixes: bool) -> Result<Tensor> {
        let (h, e, hidden) = self.w1.dims3()?;
        let (b, n, _) = x.dims3()?;
        let w1 = self.w1.transpose(0, 1)?.contiguous()?.reshape((e, h * hidden))?;
        let inner = x.contiguous()?.reshape((b * n, e))?.matmul(&w1)?;
        let inner = inner.broadcast_add(&self.b1.flatten_all()?)?.relu()?; // [b n, h hidden]
        let inner = match mixes {
            // the released code's missing transpose: [b, n, h, L] read as [b, h, n, L]
            true => inner.reshape((b, h, n, hidden))?,
            false => inner.reshape((b, n, h, hidden))?.transpose(1, 2)?.contiguous()?,
        };
        let one = Tensor::ones((b, h, n, 1), x.dtype(), x.device())?;
        Tensor::cat(&[inner, one], 3)
    }

    /// The first n columns of `w2`, with `b2`, as keys [b, h, n, hidden + 1].
    fn keys(&self, (b, h, n): (usize, usize, usize)) -> Result<Tensor> {
        let (w2, b2) = (self.w2.narrow(1, 0, n)?.t()?, self.b2.narrow(0, 0, n)?.unsqueeze(1)?);
        let keys = Tensor::cat(&[w2.contiguous()?, b2], 1)?;
        keys.broadcast_left((b, h))
    }
}

impl Synthesizer {
    /// The parts that are the same for all samples, [h, n, n].
    fn bias(&self, n: usize) -> Result<Option<Tensor>> {
        let random = match &self.random {
            Some(random) => Some(random.narrow(1, 0, n)?.narrow(2, 0, n)?),
            None => None,
        };
        let Some((left, right)) = &self.factorized else { return Ok(random) };
        let product = left.narrow(1, 0, n)?.contiguous()?.matmul(&right.narrow(2, 0, n)?.contiguous()?)?;
        Ok(Some(random.map_or_else(|| Ok(product.clone()), |random| random + &product)?))
    }

    /// Queries, keys and values of equal width (zeros behind them) such that q . k is the sum of the other parts.
    fn qkv(&self, input: &AttentionInput, dims: (usize, usize, usize, usize)) -> Result<Qkv> {
        let (b, h, n, d) = dims;
        let v = input.qkv.v()?;
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        if self.dot_product {
            queries.push((input.qkv.q()? * (d as f64).powf(-0.5))?);
            keys.push(input.qkv.k()?.contiguous()?);
        }
        if let Some(dense) = &self.dense {
            let Some(x) = input.x else { bail!("a dense synthesizer needs the layer input x") };
            let x = match input.mask {
                // one head as wide as x
                Some(_) if !self.mixes => zero_hidden_rows(&x.unsqueeze(1)?, input.mask)?.squeeze(1)?,
                _ => x.clone(),
            };
            queries.push(dense.queries(&x, self.mixes)?);
            keys.push(dense.keys((b, h, n))?);
        }
        if queries.is_empty() {
            let nothing = Tensor::zeros(v.shape(), v.dtype(), v.device())?;
            return Ok(Qkv::separate(nothing.clone(), nothing, v));
        }
        let (q, k) = (Tensor::cat(&queries, 3)?, Tensor::cat(&keys, 3)?);
        let width = q.dim(3)?.max(d);
        let widen = |x: &Tensor| x.contiguous()?.pad_with_zeros(3, 0, width - x.dim(3)?);
        Ok(Qkv::separate(widen(&q)?, widen(&k)?, widen(&v)?))
    }
}

impl Mechanism for Synthesizer {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let dims @ (_, _, n, d) = input.qkv.value_dims()?;
        if n > self.max_len {
            bail!("this synthesizer was built for max_len={}, not {n}", self.max_len);
        }
        let pattern = Pattern::full(n, n, self.causal);
        let bias = self.bias(n)?;
        let call = Attend { bias: bias.as_ref(), ..input.over(&pattern, d) };
        if self.dot_product && self.dense.is_none() {
            return Ok(attend(input.qkv, &call)?.into());
        }
        let call = Attend { scale: 1.0, ..call };
        let out = attend(&self.qkv(input, dims)?, &call)?.split()?;
        Ok(Heads::Split(out.narrow(3, 0, d)?).into())
    }
}
