//! Mega (Ma et al. 2023): gated attention with one head on a moving average of the input.

use candle_core::{Device, Result, Tensor};

use super::decode::{Carried, DecodeState, Held, bytes};
use super::knobs::{Knob, Knobs};
use super::mega_ema::{self, Average, NDIM, TRUNCATION};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, OutputForm, Projections, Shape, Support, mixer,
};
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::activation::{relu, silu, swiglu};
use effattn_kernel::distance_attention::{DistanceAttention, distance_attention};
use effattn_kernel::ema::EmaState;
use effattn_kernel::gating::{gated_residual, silu_affine};
use effattn_kernel::linear::linear_in_out;
use effattn_kernel::softmax::masked_softmax;
use effattn_kernel::tape;

/// Weights of the values from logits.
#[derive(Clone, Copy, PartialEq)]
enum Weights {
    Softmax,
    Laplace,
    SquaredRelu,
}

/// Mean and deviation of the laplace function, as in the released code.
#[expect(clippy::approx_constant, reason = "six digits, not the root of 1/2")]
const LAPLACE_MEAN: f64 = 0.707107;
const LAPLACE_STD: f64 = 0.282095;

/// Bias of the logits.
#[derive(Clone, Copy, PartialEq)]
enum Position {
    Simple,
    Rotary,
}

const ZDIM: Knob<usize> =
    Knob::int("zdim", 64, 1..=1 << 14).doc("width of queries and keys").source("Mega released code for LRA");
const HDIM: Knob<usize> =
    Knob::int("hdim", 256, 1..=1 << 16).doc("width of values").source("Mega released code for LRA (Text)");
const CHUNK: Knob<Option<usize>> = Knob::auto_int("chunk", 1..=1 << 30)
    .doc("length of the chunks that attention does not cross; auto: one chunk")
    .source("Mega sec. 3.4");
const ATTN: Knob<Weights> = Knob::words(
    "attn",
    &[("softmax", Weights::Softmax), ("laplace", Weights::Laplace), ("relu2", Weights::SquaredRelu)],
)
.doc("weights of the values: softmax, laplace (images), or relu2")
.source("Mega released code for LRA (Text)");
const REL_POS: Knob<Position> =
    Knob::words("rel_pos", &[("simple", Position::Simple), ("rotary", Position::Rotary)])
        .doc("bias of the logits: simple, a parameter per distance; rotary, a product of rotated vectors")
        .source("Mega released code");
const MAX_POSITIONS: Knob<Option<usize>> = Knob::auto_int("max_positions", 1..=1 << 30)
    .doc("positions that the simple bias has parameters for; auto: those of a chunk")
    .source("Mega released code");
const RESIDUAL: Knob<bool> = Knob::words("residual", &[("separate", true), ("x", false)])
    .doc("what the output gate mixes with: separate, the layer's skip path; x, the mechanism's own input")
    .source("Mega released code, for layers with the norm first as here");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "mega",
    title: "Mega",
    paper: mega_ema::PAPER,
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: &[
        ZDIM.spec(),
        HDIM.spec(),
        NDIM.spec(),
        TRUNCATION.spec(),
        CHUNK.spec(),
        ATTN.spec(),
        REL_POS.spec(),
        MAX_POSITIONS.spec(),
        RESIDUAL.spec(),
    ],
    complexity: "O(n^2 d), O(n chunk d) with chunk",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "\
m = the output of mega-ema, [u | z | r | h] = m w_mx + b_mx, u = sigmoid(u), z = silu(z), r = silu(r), v = silu(x w_v + b_v)
q = z gamma_0 + beta_0, k = z gamma_1 + beta_1, w = softmax(q k^T / sqrt(zdim) + bias), or f(q k^T / len + bias) with
laplace: f(t) = (1 + erf((t - 0.707107) / (0.282095 sqrt 2))) / 2, relu2: f(t) = max(t, 0)^2, len the keys of the chunk
out = res + u (silu(h + (w v * r) w_h + b_h) - res)",
    deviations: &[
        "fairseq-apollo later replaced erf by a sigmoid, up to 0.0095 off; here it is erf with the first code's six-digit constants.",
        "The released code demands a length that chunks divide; here the last chunk may be short.",
        "The released code's softmax ignores the mask in a chunk that is all padding; here such a row has no weights.",
        "Causal laplace and relu2 divide by the position in the chunk + 1, padding included, as the released code does.",
        "The softmax with the simple bias stores no weights; rel_pos=rotary, laplace and relu2 store them, and with them memory grows as the square of the chunk (of the length without chunks).",
        "Without chunks keys and values grow with the length: the bytes of state count the moving average alone, and decoding token by token needs chunk.",
    ],
    exceptions: &[],
    idle: &[Idle {
        knob: MAX_POSITIONS.name(),
        when: |knobs, _| knobs.get(&REL_POS) == Position::Rotary,
        why: "with rel_pos=rotary",
    }],
    in_models: InModels { follows_length: Some(MAX_POSITIONS), ..InModels::PLAIN },
    validate,
    needs: |knobs| Needs {
        projections: Projections::NONE,
        x: true,
        residual: knobs.get(&RESIDUAL),
        output: OutputForm::Whole,
        ..Needs::default()
    },
    cost,
    pattern: |_, _| None, // the moving average connects all positions
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let longest = knobs.get(&CHUNK).unwrap_or(shape.queries);
    match (knobs.get(&REL_POS), knobs.get(&MAX_POSITIONS)) {
        (Position::Rotary, _) if !knobs.get(&ZDIM).is_multiple_of(2) => Err(format!(
            "zdim={} does not form pairs to rotate; take an even zdim, or rel_pos=simple",
            knobs.get(&ZDIM)
        )),
        (Position::Simple, Some(most)) if most < longest => Err(format!(
            "max_positions={most} is less than the {longest} positions of a chunk; take more, or max_positions=auto"
        )),
        _ => mixer::validate(knobs, shape),
    }
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let Shape { batch, width, queries, causal, .. } = *shape;
    let (z, h) = (knobs.get(&ZDIM), knobs.get(&HDIM));
    let scores = match knobs.get(&CHUNK) {
        Some(chunk) => queries.next_multiple_of(chunk) * chunk,
        None => queries * queries,
    };
    let macs = mega_ema::macs(knobs, shape) + queries * width * (3 * h + z + 2 * width) + scores * (z + h);
    let state = width * knobs.get(&NDIM) + knobs.get(&CHUNK).map_or(0, |chunk| chunk * (z + h));
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        state_bytes: if causal { 4 * state as u64 } else { 0 },
    }
}

/// Parameters of the position bias.
enum Bias {
    /// `rel_bias` [2 max_positions - 1].
    Simple { values: Tensor, max: usize },
    /// `rel_alpha`, `rel_beta` [z].
    Rotary { alpha: Tensor, beta: Tensor },
}

struct Mega {
    average: Average,
    // weights are [in, out]
    value: (Tensor, Tensor),
    mixed: (Tensor, Tensor),
    output: (Tensor, Tensor),
    gamma: Tensor, // [2, z]
    beta: Tensor,  // [2, z]
    bias: Bias,
    weights: Weights,
    chunk: Option<usize>,
    widths: [usize; 4], // of u, z, r and h
    residual: bool,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, width: e, causal, max_len, .. } = config;
    let (e, z, h, chunk) = (*e, knobs.get(&ZDIM), knobs.get(&HDIM), knobs.get(&CHUNK));
    let normal = |name: &str, shape: &[usize]| builder.param(name, shape, Init::normal(0.02));
    let affine = |name: &str, input: usize, output: usize| -> Result<(Tensor, Tensor)> {
        let weight = normal(&format!("w_{name}"), &[input, output])?;
        Ok((weight, builder.param(&format!("b_{name}"), &[output], Init::ZERO)?))
    };
    let average = Average::new(config, builder)?;
    let (value, mixed, output) = (affine("v", e, h)?, affine("mx", e, 2 * e + z + h)?, affine("h", h, e)?);
    let (gamma, beta) = (normal("gamma", &[2, z])?, builder.param("beta", &[2, z], Init::ZERO)?);
    let bias = match knobs.get(&REL_POS) {
        Position::Simple => {
            let max = knobs.get(&MAX_POSITIONS).or(chunk).unwrap_or(*max_len);
            Bias::Simple { values: normal("rel_bias", &[2 * max - 1])?, max }
        }
        Position::Rotary => {
            Bias::Rotary { alpha: normal("rel_alpha", &[z])?, beta: normal("rel_beta", &[z])? }
        }
    };
    let (weights, residual, causal) = (knobs.get(&ATTN), knobs.get(&RESIDUAL), *causal);
    let widths = [e, z, h, e];
    Ok(Box::new(Mega {
        average,
        value,
        mixed,
        output,
        gamma,
        beta,
        bias,
        weights,
        chunk,
        widths,
        residual,
        causal,
    }))
}

fn affine(x: &Tensor, (weight, bias): &(Tensor, Tensor)) -> Result<Tensor> {
    linear_in_out(x, weight, Some(bias))
}

/// What attention and the output read: u and r before they become gates, the part h, and q, k, v; all [b, n, _].
struct Parts {
    u: Tensor,
    r: Tensor,
    h: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Mega {
    fn parts(&self, x: &Tensor, averaged: &Tensor) -> Result<Parts> {
        let base = affine(averaged, &self.mixed)?;
        let [e, z, h, _] = self.widths;
        let part = |start: usize, width: usize| tape::contiguous(&tape::columns(&base, start, width)?);
        let zz = part(e, z)?;
        let side = |index: usize| silu_affine(&zz, &self.gamma.get(index)?, &self.beta.get(index)?);
        Ok(Parts {
            u: part(0, e)?,
            r: part(e + z, h)?,
            h: part(e + z + h, e)?,
            q: side(0)?,
            k: side(1)?,
            v: silu(&affine(x, &self.value)?)?,
        })
    }

    /// Biases of `rows` queries from `first` on and of `keys` keys, positions within a chunk: [rows, keys].
    fn bias(&self, first: usize, rows: usize, keys: usize) -> Result<Tensor> {
        match &self.bias {
            Bias::Simple { values, max } => {
                check_positions(keys.max(first + rows), *max)?;
                let at = (first..first + rows).flat_map(|i| (0..keys).map(move |j| (max - 1 + j - i) as u32));
                let at = Tensor::from_vec(at.collect(), rows * keys, values.device())?;
                values.index_select(&at, 0)?.reshape((rows, keys))
            }
            Bias::Rotary { alpha, beta } => {
                rotated(alpha, first, rows)?.matmul(&rotated(beta, 0, keys)?.t()?)
            }
        }
    }

    /// Factor on products in front of a softmax.
    fn scale(&self) -> f64 {
        (self.widths[1] as f64).powf(-0.5)
    }

    /// Weights from products of queries and keys [.., rows, keys], the bias [rows, keys], `visible` of the same shape up
    /// to broadcasting, and the number of keys to divide by.
    fn weigh(&self, products: &Tensor, bias: &Tensor, visible: &Tensor, count: &Tensor) -> Result<Tensor> {
        if self.weights == Weights::Softmax {
            let logits = (products * self.scale())?.broadcast_add(bias)?;
            return masked_softmax(&logits, visible);
        }
        let t = products.broadcast_div(count)?.broadcast_add(bias)?;
        let weights = match self.weights {
            Weights::Laplace => {
                let scaled =
                    t.affine(1.0 / (LAPLACE_STD * 2f64.sqrt()), -LAPLACE_MEAN / (LAPLACE_STD * 2f64.sqrt()))?;
                (scaled.erf()? + 1.0)?.affine(0.5, 0.0)?
            }
            _ => relu(&t)?.sqr()?,
        };
        let visible = visible.broadcast_as(weights.shape())?;
        visible.ne(0f32)?.where_cond(&weights, &weights.zeros_like()?)
    }

    /// Attended values [b, n, h].
    fn attend(&self, parts: &Parts, mask: Option<&Tensor>) -> Result<Tensor> {
        let (b, n, _) = parts.q.dims3()?;
        let len = self.chunk.unwrap_or(n).min(n);
        let padded = n.next_multiple_of(len);
        let chunks = padded / len;
        let cut = |x: &Tensor| {
            let x = if padded > n { x.pad_with_zeros(1, 0, padded - n)? } else { x.clone() };
            tape::reshape(&x, (b * chunks, len, x.dim(2)?))
        };
        let merged = |x: &Tensor| {
            let x = tape::reshape(x, (b, padded, x.elem_count() / (b * padded)))?;
            if padded > n { x.narrow(1, 0, n)?.contiguous() } else { Ok(x) }
        };
        let device = parts.q.device();
        let keep = match mask {
            Some(mask) => mask.ne(0f32)?.to_dtype(parts.q.dtype())?,
            None => Tensor::ones((b, n), parts.q.dtype(), device)?,
        };
        let keep = cut(&keep.unsqueeze(2)?)?.squeeze(2)?; // [b chunks, len]
        let (q, k, v) = (cut(&parts.q)?, cut(&parts.k)?, cut(&parts.v)?);
        if let (Weights::Softmax, Bias::Simple { values, max }) = (self.weights, &self.bias) {
            check_positions(len, *max)?;
            let call =
                DistanceAttention { scale: self.scale(), bias: values, keep: &keep, causal: self.causal };
            return merged(&distance_attention([&q, &k, &v], &call)?);
        }
        let keep = keep.unsqueeze(1)?;
        let (visible, count) = if self.causal {
            let past = Tensor::tril2(len, keep.dtype(), device)?;
            let count = Tensor::arange(1u32, len as u32 + 1, device)?.to_dtype(keep.dtype())?;
            (keep.broadcast_mul(&past)?, count.reshape((len, 1))?)
        } else {
            let count = keep.sum_keepdim(2)?.maximum(1.0)?;
            (keep, count)
        };
        let products = q.matmul(&k.t()?)?;
        let weights = self.weigh(&products, &self.bias(0, len, len)?, &visible, &count)?;
        merged(&weights.matmul(&v)?)
    }

    fn finish(&self, parts: &Parts, attended: &Tensor, input: &AttentionInput) -> Result<AttentionOutput> {
        let new = affine(&swiglu(&parts.r, attended)?, &self.output)?;
        let residual = match (self.residual, input.residual) {
            (false, _) => input.layer_input()?,
            (true, Some(residual)) => residual,
            (true, None) => {
                candle_core::bail!("residual=separate needs the layer's residual; take residual=x")
            }
        };
        Ok(AttentionOutput::rows(gated_residual(residual, &parts.u, &parts.h, &new)?))
    }
}

fn check_positions(len: usize, max: usize) -> Result<()> {
    if len > max {
        candle_core::bail!("{len} positions and biases for {max}; raise max_positions");
    }
    Ok(())
}

/// `x` [z] rotated for `rows` positions from `first` on: [rows, z].
fn rotated(x: &Tensor, first: usize, rows: usize) -> Result<Tensor> {
    let half = x.dim(0)? / 2;
    let angles = (first..first + rows).flat_map(|position| {
        (0..half).map(move |m| position as f64 * 10_000f64.powf(-(m as f64) / half as f64))
    });
    let angles: Vec<f64> = angles.collect();
    let table = |of: fn(f64) -> f64| {
        let values = angles.iter().map(|angle| of(*angle) as f32).collect();
        Tensor::from_vec(values, (rows, half), x.device())
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let (a, b) = (x.narrow(0, 0, half)?, x.narrow(0, half, half)?);
    let low = (cos.broadcast_mul(&a)? - sin.broadcast_mul(&b)?)?;
    let high = (cos.broadcast_mul(&b)? + sin.broadcast_mul(&a)?)?;
    Tensor::cat(&[low, high], 1)
}

/// What a decoder holds: the moving average, and keys and values of the open chunk, [b, chunk, z] and [b, chunk, h].
#[derive(Default)]
struct MegaState {
    average: EmaState,
    open: Option<[Tensor; 2]>,
    /// Tokens in the open chunk.
    filled: usize,
}

impl Held for MegaState {
    fn bytes(&self) -> usize {
        self.average.bytes() + self.open.iter().flatten().map(bytes).sum::<usize>()
    }
}

type State = Carried<MegaState>;

impl Mechanism for Mega {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let parts = self.parts(input.layer_input()?, &self.average.forward(input)?)?;
        self.finish(&parts, &self.attend(&parts, input.mask)?, input)
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok((self.chunk.is_some() && self.average.decodes()).then(|| State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        state.downcast::<State>()?.advance(|state, _| {
            let parts = self.parts(input.layer_input()?, &self.average.step(input, &mut state.average)?)?;
            let attended = self.attend_next(&parts, state)?;
            self.finish(&parts, &attended, input)
        })
    }
}

impl Mega {
    /// Attended values [b, 1, h] of the next token.
    fn attend_next(&self, parts: &Parts, state: &mut MegaState) -> Result<Tensor> {
        let Some(chunk) = self.chunk else {
            candle_core::bail!("mega decodes token by token with chunk only")
        };
        let [k, v] = match state.open.take() {
            Some(open) => open,
            None => {
                let empty = |x: &Tensor| {
                    let (b, _, width) = x.dims3()?;
                    Tensor::zeros((b, chunk, width), x.dtype(), x.device())
                };
                [empty(&parts.k)?, empty(&parts.v)?]
            }
        };
        let at = state.filled % chunk;
        k.slice_set(&parts.k.contiguous()?, 1, at)?;
        v.slice_set(&parts.v.contiguous()?, 1, at)?;
        let keys = at + 1;
        let products = parts.q.matmul(&k.narrow(1, 0, keys)?.t()?)?; // [b, 1, keys]
        let (visible, count) = (products.ones_like()?, Tensor::full(keys as f32, (1, 1), products.device())?);
        let weights = self.weigh(&products, &self.bias(at, 1, keys)?, &visible, &count)?;
        let attended = weights.matmul(&v.narrow(1, 0, keys)?)?;
        (state.open, state.filled) = (Some([k, v]), keys);
        Ok(attended)
    }
}
