//! One block of a transformer: the multi-head layer around a mechanism, then the feed-forward half.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};
use candle_nn::ops::sigmoid;

use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::attention::{
    AttentionInput, AttentionOutput, HeadShape, Mechanism, MechanismConfig, MechanismEntry, Needs,
    OutputForm, Projections,
};
use crate::nn::dropout::Dropout;
use crate::nn::ffn::{Ffn, FfnConfig};
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use crate::nn::short_conv::{ConvPast, ShortConv};
use effattn_kernel::activation::gelu;
use effattn_kernel::block::{self, Projection, Residual};
use effattn_kernel::heads::{self, Heads, PackedLayout, Qkv};
use effattn_kernel::linear::linear;
use effattn_kernel::nan_trace;
use effattn_kernel::norm;
use effattn_kernel::tape;

/// What a block is built for.
#[derive(Clone)]
pub struct BlockConfig {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Its settings in this layer.
    pub knobs: Knobs,
    /// Width of the layer's input and output.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Hidden width of the feed-forward half.
    pub ffn: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Longest sequence, cached positions included.
    pub max_len: usize,
    /// Whether the causal form runs.
    pub causal: bool,
    /// Number of the layer.
    pub layer: usize,
    /// What the skip path carries, and the form of the feed-forward half.
    pub form: FfnConfig,
}

/// What one forward of a block needs besides its input.
#[derive(Clone, Copy, Default)]
pub struct ForwardArgs<'a> {
    /// [b, n]: 1 keep, 0 padding; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Cached inputs of this layer [b, m, width] that stand in front; they are normalised like its input.
    pub memory: Option<&'a Tensor>,
    /// The second stream [b, rows, width], for mechanisms with [`Needs::stream`].
    pub stream: Option<&'a Tensor>,
    /// What the convolution of the projections saw before, where one token comes after another.
    pub past: Option<&'a RefCell<ConvPast>>,
    /// What is dropped.
    pub dropout: Dropout,
}

impl ForwardArgs<'_> {
    fn branch(&self, number: u64) -> Self {
        Self { dropout: self.dropout.branch(number), ..*self }
    }
}

/// Attention with its LayerNorm, projections and residual.
pub struct AttentionLayer {
    mechanism: Box<dyn Mechanism>,
    needs: Needs,
    /// Heads and head width of the layer.
    heads: (usize, usize),
    residual: Residual,
    spec: Projection,
    projection: ParamGroup,     // [norm1.weight, norm1.bias, q.weight, q.bias, ...]
    global: Option<ParamGroup>, // [q_global.weight, ...]
    conv: Option<ShortConv>,    // of the projections side by side
    output: Option<ParamGroup>, // [o.weight, o.bias, o_gate.weight, ...]
    stream: Option<ParamGroup>, // [norm_p.weight, norm_p.bias]
}

pub(super) fn linear_specs(names: &[&str], out: usize, width: usize, bias: bool) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    for name in names {
        specs.push(ParamSpec::new(&format!("{name}.weight"), &[out, width], Init::fan_in(width)));
        if bias {
            specs.push(ParamSpec::new(&format!("{name}.bias"), &[out], Init::fan_in(width)));
        }
    }
    specs
}

impl AttentionLayer {
    /// Parameters `norm1.*`, `attn.q.*`, ... and the mechanism's own below `attn`.
    pub fn new(config: &BlockConfig, builder: &ParamBuilder) -> Result<Self> {
        let needs = (config.entry.needs)(&config.knobs);
        let heads = (config.heads, config.head_dim);
        let (width, inner) = (config.width, config.heads * config.head_dim);
        let norm = |name: &str| {
            let part = |part: &str, init| ParamSpec::new(&format!("{name}.{part}"), &[width], init);
            vec![part("weight", Init::ONE), part("bias", Init::ZERO)]
        };
        let read: Vec<_> = needs.projections.read().collect();
        let mut specs = norm("norm1");
        for (name, shape) in &read {
            let (heads, dim) = shape.of(heads.0, heads.1);
            specs.extend(linear_specs(&[&format!("attn.{name}")], heads * dim, width, config.bias));
        }
        let projection = builder.group(&specs)?;
        let global = if needs.global {
            let names = ["attn.q_global", "attn.k_global", "attn.v_global"];
            Some(builder.group(&linear_specs(&names, inner, width, config.bias))?)
        } else {
            None
        };
        if needs.projections == Projections::QKV {
            // the released language model compresses cached inputs with the layer's own projections
            builder.alias("attn.w_k.weight", "attn.k.weight")?;
            builder.alias("attn.w_v.weight", "attn.v.weight")?;
        }
        let conv = needs.conv.map(|form| {
            let channels = read.iter().map(|(name, shape)| {
                let (heads, dim) = shape.of(heads.0, heads.1);
                (format!("attn.conv_{name}"), heads * dim)
            });
            ShortConv::new(&channels.collect::<Vec<_>>(), form, builder)
        });
        let mechanism = (config.entry.build)(
            &MechanismConfig {
                knobs: config.knobs.clone(),
                heads: config.heads,
                head_dim: config.head_dim,
                width,
                max_len: config.max_len,
                causal: config.causal,
                layer: config.layer,
            },
            &builder.pp("attn"),
        )?;
        let result = needs.result_width(width, config.heads, config.head_dim);
        if result != width && (needs.output != OutputForm::Linear || needs.stream.is_some()) {
            bail!("{} gives rows of width {result}; its layer needs {width}", config.entry.name);
        }
        let outputs = |names: &[&str]| builder.group(&linear_specs(names, width, result, config.bias));
        let output = match needs.output {
            OutputForm::Linear | OutputForm::HalfGlu => Some(outputs(&["attn.o"])?),
            OutputForm::Glu => Some(outputs(&["attn.o", "attn.o_gate"])?),
            OutputForm::Plain | OutputForm::Whole => None,
        };
        let stream = needs.stream.map(|_| builder.group(&norm("norm_p"))).transpose()?;
        let spec = Projection { norm: true, outputs: read.len(), bias: config.bias };
        let (residual, conv) = (config.form.residual, conv.transpose()?);
        Ok(Self { mechanism, needs, heads, residual, spec, projection, global, conv, output, stream })
    }

    /// x + Attn(LN(x)) for `x` [b, n, width]; with the normed residual LN(x) + Attn(LN(x)).
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        Ok(self.run(x, call, |input| self.mechanism.forward(input))?.0)
    }

    /// [`Self::forward`] with what `attend` makes of the mechanism's input; also the next layer's second stream.
    fn run(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        attend: impl FnOnce(&AttentionInput) -> Result<AttentionOutput>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (attended, residual) = self.with_input(x, call, |input, normal| {
            let residual = match (self.residual, normal) {
                (Residual::Normed, Some(normal)) => {
                    normal.narrow(1, input.memory, x.dim(1)?)?.contiguous()?
                }
                _ => x.clone(),
            };
            Ok((attend(input)?, residual))
        })?;
        let stream = match (call.stream, &attended.stream) {
            (Some(stream), Some(change)) => Some((stream + change)?),
            _ => None,
        };
        Ok((self.finish(&attended.out, &residual, call.dropout)?, stream))
    }

    /// Calls `then` with what the mechanism reads and the normalised input, where something reads it.
    fn with_input<T>(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        then: impl FnOnce(&AttentionInput, Option<&Tensor>) -> Result<T>,
    ) -> Result<T> {
        let ForwardArgs { mask, memory, stream, dropout, past } = *call;
        let held = memory.map_or(Ok(0), |memory| memory.dim(1))?;
        let normal = match memory {
            Some(memory) => Some(self.normalise(&Tensor::cat(&[memory, x], 1)?)?),
            None if self.reads_normal() || self.residual == Residual::Normed => Some(self.normalise(x)?),
            None => None,
        };
        let qkv = match &normal {
            None => self.project(x, true, mask, past)?,
            Some(normal) if held == 0 => self.project(normal, false, mask, past)?,
            Some(normal) => self.separate(normal, held)?,
        };
        let global = self.global(normal.as_ref())?;
        let residual = match (self.residual, &normal) {
            (Residual::Normed, Some(normal)) => normal,
            _ => x,
        };
        let stream = self.stream(stream)?;
        let input = AttentionInput {
            x: normal.as_ref(),
            mask,
            global: global.as_ref(),
            residual: self.needs.residual.then_some(residual),
            stream: stream.as_ref(),
            memory: held,
            dropout: dropout.weights(1)?,
            ..AttentionInput::new(&qkv)
        };
        then(&input, normal.as_ref())
    }

    /// The layer's output from the mechanism's result, with dropout of what is added.
    fn finish(&self, out: &Heads, residual: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let out = out.merged()?;
        let change = match (self.needs.output, &self.output) {
            (OutputForm::Whole, _) => return Ok(out),
            (OutputForm::Linear, Some(group)) if dropout.is_none() => {
                return block::output(&out, residual, group, None);
            }
            (OutputForm::Linear, Some(_)) => self.linear_out(&out, 0)?,
            (OutputForm::HalfGlu, Some(_)) => {
                let out = gelu(&out)?;
                (&out * sigmoid(&self.linear_out(&out, 0)?)?)?
            }
            (OutputForm::Glu, Some(_)) => {
                let out = gelu(&out)?;
                (self.linear_out(&out, 0)? * sigmoid(&self.linear_out(&out, 1)?)?)?
            }
            (_, None) | (OutputForm::Plain, _) => out,
        };
        residual + dropout.apply(&change, 0)?
    }

    /// Output projection number `index` of `y`.
    fn linear_out(&self, y: &Tensor, index: usize) -> Result<Tensor> {
        let Some(group) = &self.output else { bail!("this layer has no output projection") };
        let at = if self.spec.bias { 2 * index } else { index };
        let bias = if self.spec.bias { Some(group.part(at + 1)?) } else { None };
        linear(y, &group.part(at)?, bias.as_ref())
    }

    /// The class token's row: cls + Linear_o(attention of cls), `cls` [b, 1, width] un-normalised. The rows
    /// of `x` are not needed behind the last layer and are not computed.
    pub fn forward_cls(&self, x: &Tensor, cls: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let normal = if self.reads_normal() { Some(self.normalise(x)?) } else { None };
        let qkv = match &normal {
            None => self.project(x, true, call.mask, None)?,
            Some(normal) => self.project(normal, false, call.mask, None)?,
        };
        let cls_qkv = self.project(cls, false, None, None)?;
        let global = self.global(normal.as_ref())?;
        let input = AttentionInput {
            x: normal.as_ref(),
            mask: call.mask,
            cls: Some(&cls_qkv),
            global: global.as_ref(),
            dropout: call.dropout.weights(1)?,
            ..AttentionInput::new(&qkv)
        };
        let Some(out) = self.mechanism.forward(&input)?.cls else {
            bail!("this mechanism has no class token; choose another pooling");
        };
        self.finish(&out, cls, call.dropout)
    }

    fn reads_normal(&self) -> bool {
        let packable = self.needs.projections.packable(self.heads.0, self.heads.1);
        self.needs.x || self.needs.global || !packable
    }

    fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        norm::layer_norm(x, &self.projection.part(0)?, &self.projection.part(1)?, norm::EPS)
    }

    /// The second stream as the mechanism reads it.
    fn stream(&self, stream: Option<&Tensor>) -> Result<Option<Tensor>> {
        match (&self.stream, stream) {
            (Some(group), Some(stream)) => {
                norm::layer_norm(stream, &group.part(0)?, &group.part(1)?, norm::EPS).map(Some)
            }
            (Some(_), None) => bail!("this model carries no second stream; choose a classifier's preset"),
            (None, _) => Ok(None),
        }
    }

    /// Projections of `x`: side by side where all have the layer's heads, else tensors of their own.
    fn project(
        &self,
        x: &Tensor,
        normalise: bool,
        mask: Option<&Tensor>,
        past: Option<&RefCell<ConvPast>>,
    ) -> Result<Qkv> {
        let projections = self.needs.projections;
        let (heads, head_dim) = self.heads;
        let convolve = |rows: Tensor, which: Range<usize>| match (&self.conv, past) {
            (Some(conv), Some(past)) => conv.step(&rows, which, &mut past.borrow_mut()),
            (Some(conv), None) => conv.forward(&rows, which, mask),
            (None, _) => Ok(rows),
        };
        if projections.packable(heads, head_dim) {
            let rows = block::project(x, &self.projection, self.spec, normalise)?;
            let rows = convolve(rows, 0..self.spec.outputs)?;
            return Ok(Qkv::Packed { rows, heads, parts: projections.layout() });
        }
        let mut number = 0;
        let mut part = |shape: Option<HeadShape>| {
            let Some(shape) = shape else { return Ok(None) };
            let rows = convolve(self.outputs(x, number..number + 1)?, number..number + 1)?;
            number += 1;
            heads::split(&rows, shape.of(heads, head_dim).0).map(Some)
        };
        Ok(Qkv::Separate { q: part(projections.q)?, k: part(projections.k)?, v: part(projections.v)? })
    }

    /// Some of the projections of the normalised `normal`, side by side.
    fn outputs(&self, normal: &Tensor, which: Range<usize>) -> Result<Tensor> {
        let stride = if self.spec.bias { 2 } else { 1 };
        let outputs = which.len();
        let group = self.projection.slice(2 + which.start * stride..2 + which.end * stride)?;
        block::project(normal, &group, Projection { norm: false, outputs, ..self.spec }, false)
    }

    /// Queries of the positions from `held` on, keys and values of all.
    fn separate(&self, normal: &Tensor, held: usize) -> Result<Qkv> {
        if self.needs.projections != Projections::QKV || self.conv.is_some() {
            bail!("a mechanism without plain queries, keys and values cannot read a cache");
        }
        let own = normal.narrow(1, held, normal.dim(1)? - held)?.contiguous()?;
        let q = heads::split(&self.outputs(&own, 0..1)?, self.heads.0)?;
        let (rows, parts) = (self.outputs(normal, 1..3)?, PackedLayout::KV);
        let keys = Qkv::Packed { rows, heads: self.heads.0, parts };
        Ok(Qkv::separate(q, keys.k()?, keys.v()?))
    }

    fn global(&self, normal: Option<&Tensor>) -> Result<Option<Qkv>> {
        let (Some(group), Some(normal)) = (&self.global, normal) else { return Ok(None) };
        let spec = Projection { norm: false, outputs: 3, ..self.spec };
        let rows = block::project(normal, group, spec, false)?;
        Ok(Some(Qkv::Packed { rows, heads: self.heads.0, parts: PackedLayout::QKV }))
    }
}

/// The state of a mechanism behind a convolution.
struct ConvolvedState {
    inner: Box<dyn DecodeState>,
    past: RefCell<ConvPast>,
}

impl DecodeState for ConvolvedState {
    fn position(&self) -> usize {
        self.inner.position()
    }

    fn set_position(&mut self, position: usize) {
        self.inner.set_position(position);
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn bytes(&self) -> usize {
        self.inner.bytes() + self.past.borrow().bytes()
    }
}

/// Attention and feed-forward half.
pub struct Block {
    attention: AttentionLayer,
    ffn: Ffn,
    /// `layer 3 (ls)`.
    name: String,
}

impl Block {
    /// Parameters below `builder` (prefix `layers.<i>`).
    pub fn new(config: &BlockConfig, builder: &ParamBuilder) -> Result<Self> {
        let attention = AttentionLayer::new(config, builder)?;
        let ffn = Ffn::new(builder, config.width, config.ffn, config.form)?;
        let name = format!("layer {} ({})", config.layer + 1, config.entry.name);
        Ok(Self { attention, ffn, name })
    }

    /// [b, n, width] to [b, n, width].
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let x = self.half("attention", &[], || self.attention.forward(x, &call.branch(0)))?;
        self.half("feed-forward half", &[&x], || self.ffn.forward(&x, call.dropout.branch(1)))
    }

    /// [`Self::forward`] of a mechanism with a second stream [b, rows, width], and the stream of the next block.
    pub fn forward_with_stream(
        &self,
        x: &Tensor,
        stream: &Tensor,
        call: &ForwardArgs,
    ) -> Result<(Tensor, Tensor)> {
        let mut next = None;
        let attention = &self.attention;
        let call = ForwardArgs { stream: Some(stream), ..*call };
        // not as bf16 activations: the stream is read by the blocks behind this one
        let run = || -> Result<Tensor> {
            let (x, stream) =
                attention.run(x, &call.branch(0), |input| attention.mechanism.forward(input))?;
            next = stream;
            Ok(x)
        };
        let x = nan_trace::in_scope(|| format!("{}, attention", self.name), run)?;
        let Some(next) = next else { bail!("{} has no second stream", self.name) };
        let half = || self.ffn.forward(&x, call.dropout.branch(1));
        Ok((self.half("feed-forward half", &[&x], half)?, next))
    }

    /// [`Mechanism::init_decode`] of this block.
    pub fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        let state = self.attention.mechanism.init_decode(batch, room, device)?;
        Ok(match (state, &self.attention.conv) {
            (Some(inner), Some(conv)) => {
                let past = RefCell::new(conv.start(batch, device)?);
                Some(Box::new(ConvolvedState { inner, past }))
            }
            (state, _) => state,
        })
    }

    /// The next token [b, 1, width] of sequences behind `state`: [`Self::forward`] at its position.
    pub fn decode_step(&self, x: &Tensor, state: &mut dyn DecodeState) -> Result<Tensor> {
        let mechanism = &self.attention.mechanism;
        let (x, _) = if self.attention.conv.is_some() {
            let ConvolvedState { inner, past } = state.downcast::<ConvolvedState>()?;
            let call = ForwardArgs { past: Some(past), ..ForwardArgs::default() };
            self.attention.run(x, &call, |input| mechanism.decode_step(input, inner.as_mut()))?
        } else {
            self.attention.run(x, &ForwardArgs::default(), |input| mechanism.decode_step(input, state))?
        };
        self.ffn.forward(&x, Dropout::NONE)
    }

    /// [`Mechanism::softmax_inputs`] for this block's input.
    pub fn softmax_inputs(&self, x: &Tensor, call: &ForwardArgs) -> Result<Option<(Tensor, Tensor)>> {
        self.attention.with_input(x, call, |input, _| self.attention.mechanism.softmax_inputs(input))
    }

    /// The class token's row behind this block, [b, 1, width].
    pub fn forward_cls(&self, x: &Tensor, cls: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let cls = self.half("attention", &[], || self.attention.forward_cls(x, cls, &call.branch(0)))?;
        self.half("feed-forward half", &[&cls], || self.ffn.forward(&cls, call.dropout.branch(1)))
    }

    /// Runs one half of the block, the last to read `inputs`; names it where something is not finite.
    fn half(&self, half: &str, inputs: &[&Tensor], run: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        nan_trace::in_scope(
            || format!("{}, {half}", self.name),
            || {
                let out = tape::with_bf16_activations(inputs, run)?;
                nan_trace::check("sum with its input", &out)?;
                Ok(out)
            },
        )
    }
}

#[cfg(test)]
mod tests;
