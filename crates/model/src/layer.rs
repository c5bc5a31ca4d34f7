//! One block of a transformer: the multi-head layer around a mechanism, then the feed-forward half.

use candle_core::{Device, Result, Tensor, bail};

use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::attention::{
    AttentionInput, AttentionOutput, Mechanism, MechanismConfig, MechanismEntry, Needs, Projections,
};
use crate::nn::dropout::Dropout;
use crate::nn::ffn::{Ffn, FfnConfig};
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
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
#[derive(Clone, Copy)]
pub struct ForwardArgs<'a> {
    /// [b, n]: 1 keep, 0 padding; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Cached inputs of this layer [b, m, width] that stand in front; they are normalised like its input.
    pub memory: Option<&'a Tensor>,
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
    heads: usize,
    residual: Residual,
    spec: Projection,
    projection: ParamGroup,     // [norm1.weight, norm1.bias, q.weight, q.bias, ...]
    global: Option<ParamGroup>, // [q_global.weight, ...]
    output: ParamGroup,         // [o.weight, o.bias]
}

/// Names of the projections a mechanism reads, and how their outputs lie in a row.
pub(super) fn layout(projections: Projections) -> (&'static [&'static str], PackedLayout) {
    match projections {
        Projections::Qkv => (&["attn.q", "attn.k", "attn.v"], PackedLayout::QKV),
        Projections::SharedQk => (&["attn.q", "attn.v"], PackedLayout::QV),
        Projections::V => (&["attn.v"], PackedLayout::V),
    }
}

/// Which part of a packed row is which under `projections`.
pub fn parts(projections: Projections) -> PackedLayout {
    layout(projections).1
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
    ///
    /// # Errors
    /// Given parameters that are missing or have another shape; a configuration the mechanism refuses.
    pub fn new(config: &BlockConfig, builder: &ParamBuilder) -> Result<Self> {
        let needs = (config.entry.needs)(&config.knobs);
        let (width, inner) = (config.width, config.heads * config.head_dim);
        let (names, _) = layout(needs.projections);
        let mut specs = vec![
            ParamSpec::new("norm1.weight", &[width], Init::ONE),
            ParamSpec::new("norm1.bias", &[width], Init::ZERO),
        ];
        specs.extend(linear_specs(names, inner, width, config.bias));
        let projection = builder.group(&specs)?;
        let global = if needs.global {
            let names = ["attn.q_global", "attn.k_global", "attn.v_global"];
            Some(builder.group(&linear_specs(&names, inner, width, config.bias))?)
        } else {
            None
        };
        if needs.projections == Projections::Qkv {
            // the released language model compresses cached inputs with the layer's own projections
            builder.alias("attn.w_k.weight", "attn.k.weight")?;
            builder.alias("attn.w_v.weight", "attn.v.weight")?;
        }
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
        let output = builder.group(&linear_specs(&["attn.o"], width, inner, config.bias))?;
        let spec = Projection { norm: true, outputs: names.len(), bias: config.bias };
        let (heads, residual) = (config.heads, config.form.residual);
        Ok(Self { mechanism, needs, heads, residual, spec, projection, global, output })
    }

    /// x + Attn(LN(x)) for `x` [b, n, width]; with the normed residual LN(x) + Attn(LN(x)).
    ///
    /// # Errors
    /// Shapes that do not fit the configuration.
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        self.run(x, call, |input| self.mechanism.forward(input))
    }

    /// [`Self::forward`] with what `attend` makes of the mechanism's input.
    fn run(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        attend: impl FnOnce(&AttentionInput) -> Result<AttentionOutput>,
    ) -> Result<Tensor> {
        let (out, residual) = self.with_input(x, call, |input, normal| {
            let out = attend(input)?.out;
            let residual = match (self.residual, normal) {
                (Residual::Normed, Some(normal)) => {
                    normal.narrow(1, input.memory, x.dim(1)?)?.contiguous()?
                }
                _ => x.clone(),
            };
            Ok((out, residual))
        })?;
        self.finish(&out, &residual, call.dropout)
    }

    /// Calls `then` with what the mechanism reads and the normalised input, where something reads it.
    fn with_input<T>(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        then: impl FnOnce(&AttentionInput, Option<&Tensor>) -> Result<T>,
    ) -> Result<T> {
        let ForwardArgs { mask, memory, dropout } = *call;
        let held = memory.map_or(Ok(0), |memory| memory.dim(1))?;
        let normal = match memory {
            Some(memory) => Some(self.normalise(&Tensor::cat(&[memory, x], 1)?)?),
            None if self.reads_normal() || self.residual == Residual::Normed => Some(self.normalise(x)?),
            None => None,
        };
        let qkv = match &normal {
            None => self.pack(x, true)?,
            Some(normal) if held == 0 => self.pack(normal, false)?,
            Some(normal) => self.separate(normal, held)?,
        };
        let global = self.global(normal.as_ref())?;
        let input = AttentionInput {
            qkv: &qkv,
            x: normal.as_ref(),
            mask,
            cls: None,
            global: global.as_ref(),
            memory: held,
            dropout: dropout.weights(1)?,
        };
        then(&input, normal.as_ref())
    }

    /// residual + Linear_o(out), with dropout of what is added.
    fn finish(&self, out: &Heads, residual: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let out = out.merged()?;
        if dropout.is_none() {
            return block::output(&out, residual, &self.output, None);
        }
        let bias = if self.spec.bias { Some(self.output.part(1)?) } else { None };
        residual + dropout.apply(&linear(&out, &self.output.part(0)?, bias.as_ref())?, 0)?
    }

    /// The class token's row: cls + Linear_o(attention of cls), `cls` [b, 1, width] un-normalised. The rows
    /// of `x` are not needed behind the last layer and are not computed.
    ///
    /// # Errors
    /// A mechanism without a class token.
    pub fn forward_cls(&self, x: &Tensor, cls: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let normal = if self.reads_normal() { Some(self.normalise(x)?) } else { None };
        let qkv = match &normal {
            None => self.pack(x, true)?,
            Some(normal) => self.pack(normal, false)?,
        };
        let cls_qkv = self.pack(cls, false)?;
        let global = self.global(normal.as_ref())?;
        let input = AttentionInput {
            qkv: &qkv,
            x: normal.as_ref(),
            mask: call.mask,
            cls: Some(&cls_qkv),
            global: global.as_ref(),
            memory: 0,
            dropout: call.dropout.weights(1)?,
        };
        let Some(out) = self.mechanism.forward(&input)?.cls else {
            bail!("this mechanism has no class token; choose another pooling");
        };
        self.finish(&out, cls, call.dropout)
    }

    fn reads_normal(&self) -> bool {
        self.needs.x || self.needs.global
    }

    fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        norm::layer_norm(x, &self.projection.part(0)?, &self.projection.part(1)?, norm::EPS)
    }

    /// Projections of `x`, side by side.
    fn pack(&self, x: &Tensor, normalise: bool) -> Result<Qkv> {
        let rows = block::project(x, &self.projection, self.spec, normalise)?;
        let (_, parts) = layout(self.needs.projections);
        Ok(Qkv::Packed { rows, heads: self.heads, parts })
    }

    /// Queries of the positions from `held` on, keys and values of all.
    fn separate(&self, normal: &Tensor, held: usize) -> Result<Qkv> {
        if self.needs.projections != Projections::Qkv {
            bail!("a mechanism without separate queries and keys cannot read a cache");
        }
        let stride = if self.spec.bias { 2 } else { 1 };
        let project = |x: &Tensor, from: usize, outputs: usize| {
            let group = self.projection.slice(2 + from * stride..2 + (from + outputs) * stride)?;
            block::project(x, &group, Projection { norm: false, outputs, ..self.spec }, false)
        };
        let own = normal.narrow(1, held, normal.dim(1)? - held)?.contiguous()?;
        let q = heads::split(&project(&own, 0, 1)?, self.heads)?;
        let keys = Qkv::Packed { rows: project(normal, 1, 2)?, heads: self.heads, parts: PackedLayout::KV };
        Ok(Qkv::separate(q, keys.k()?, keys.v()?))
    }

    fn global(&self, normal: Option<&Tensor>) -> Result<Option<Qkv>> {
        let (Some(group), Some(normal)) = (&self.global, normal) else { return Ok(None) };
        let spec = Projection { norm: false, outputs: 3, ..self.spec };
        let rows = block::project(normal, group, spec, false)?;
        Ok(Some(Qkv::Packed { rows, heads: self.heads, parts: PackedLayout::QKV }))
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
    ///
    /// # Errors
    /// As [`AttentionLayer::new`].
    pub fn new(config: &BlockConfig, builder: &ParamBuilder) -> Result<Self> {
        let attention = AttentionLayer::new(config, builder)?;
        let ffn = Ffn::new(builder, config.width, config.ffn, config.form)?;
        let name = format!("layer {} ({})", config.layer + 1, config.entry.name);
        Ok(Self { attention, ffn, name })
    }

    /// [b, n, width] to [b, n, width].
    ///
    /// # Errors
    /// Shapes that do not fit the configuration.
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let x = self.half("attention", &[], || self.attention.forward(x, &call.branch(0)))?;
        self.half("feed-forward half", &[&x], || self.ffn.forward(&x, call.dropout.branch(1)))
    }

    /// [`Mechanism::init_decode`] of this block.
    pub fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        self.attention.mechanism.init_decode(batch, room, device)
    }

    /// The next token [b, 1, width] of sequences behind `state`: [`Self::forward`] at its position.
    ///
    /// # Errors
    /// As [`Mechanism::decode_step`].
    pub fn decode_step(&self, x: &Tensor, state: &mut dyn DecodeState) -> Result<Tensor> {
        let call = ForwardArgs { mask: None, memory: None, dropout: Dropout::NONE };
        let x = self.attention.run(x, &call, |input| self.attention.mechanism.decode_step(input, state))?;
        self.ffn.forward(&x, Dropout::NONE)
    }

    /// [`Mechanism::softmax_inputs`] for this block's input.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn softmax_inputs(&self, x: &Tensor, call: &ForwardArgs) -> Result<Option<(Tensor, Tensor)>> {
        self.attention.with_input(x, call, |input, _| self.attention.mechanism.softmax_inputs(input))
    }

    /// The class token's row behind this block, [b, 1, width].
    ///
    /// # Errors
    /// A mechanism without a class token.
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
