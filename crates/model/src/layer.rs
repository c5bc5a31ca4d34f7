//! One block of a transformer: the multi-head layer around a mechanism, then the feed-forward half.

mod config;
mod decode;
mod forward_args;
mod whole;

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use crate::attention::{
    AttentionInput, AttentionOutput, HeadShape, Mechanism, MechanismConfig, Needs, OutputForm, Projections,
    observe,
};
use crate::nn::dropout::Dropout;
use crate::nn::norm::{NormForm, RmsNorm};
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use crate::nn::short_conv::ShortConv;
use effattn_kernel::activation::{gelu, glu};
use effattn_kernel::block::{self, Projection, Residual};
use effattn_kernel::gating::add;
use effattn_kernel::heads::{self, PackedLayout, Qkv};
use effattn_kernel::linear::linear;
use effattn_kernel::norm;
use effattn_kernel::rotary::Rotary;
use effattn_kernel::tape::{recompute_in_backward, split_heads};

pub use config::{BlockConfig, BlockStyle, RotaryForm};
pub use forward_args::ForwardArgs;
pub use whole::Block;

/// Attention with its LayerNorm, projections and residual.
pub struct AttentionLayer {
    mechanism: Box<dyn Mechanism>,
    needs: Needs,
    /// Heads and head width of the layer.
    heads: (usize, usize),
    /// Those of `needs`, with the layer's shared heads.
    projections: Projections,
    rotary: Option<Rotary>,
    residual: Residual,
    spec: Projection,
    output_bias: bool,
    rms: Option<RmsNorm>,       // in the place of norm1
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
        let BlockStyle { norm, rotary, kv_heads, output_bias, name } = config.style;
        let layer_norm = |name: String| {
            let part = |part: &str, init| ParamSpec::new(&format!("{name}.{part}"), &[width], init);
            vec![part("weight", Init::ONE), part("bias", Init::ZERO)]
        };
        let shared = kv_heads.filter(|heads| *heads != config.heads);
        let projections = shared.map_or(needs.projections, |heads| needs.projections.sharing(heads));
        let read: Vec<_> = projections.read().collect();
        let (mut specs, rms) = match norm {
            NormForm::Layer => (layer_norm(name("norm1")), None),
            NormForm::Rms { eps } => (Vec::new(), Some(RmsNorm::new(builder, &name("norm1"), width, eps)?)),
        };
        for (part, shape) in &read {
            let (heads, dim) = shape.of(heads.0, heads.1);
            specs.extend(linear_specs(&[&name(&format!("attn.{part}"))], heads * dim, width, config.bias));
        }
        let projection = match specs.is_empty() {
            true => ParamGroup { flat: Tensor::zeros(1, DType::F32, &builder.device())?, parts: Vec::new() },
            false => builder.group(&specs)?,
        };
        let global = if needs.global {
            let names = ["attn.q_global", "attn.k_global", "attn.v_global"].map(name);
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Some(builder.group(&linear_specs(&names, inner, width, config.bias))?)
        } else {
            None
        };
        if needs.projections == Projections::QKV {
            // the released language model compresses cached inputs with the layer's own projections
            for part in ["k", "v"] {
                let target = format!("{}.weight", name(&format!("attn.{part}")));
                builder.alias(&format!("{}.w_{part}.weight", name("attn")), &target)?;
            }
        }
        let conv = needs.conv.map(|form| {
            let channels = read.iter().map(|(part, shape)| {
                let (heads, dim) = shape.of(heads.0, heads.1);
                (name(&format!("attn.conv_{part}")), heads * dim)
            });
            ShortConv::new(&channels.collect::<Vec<_>>(), form, builder)
        });
        let mechanism = observe::build(
            config.entry,
            &MechanismConfig {
                knobs: config.knobs.clone(),
                heads: config.heads,
                head_dim: config.head_dim,
                width,
                max_len: config.max_len,
                causal: config.causal,
                layer: config.layer,
            },
            &builder.pp(name("attn")),
        )?;
        let result = needs.result_width(width, config.heads, config.head_dim);
        if result != width && (needs.output != OutputForm::Linear || needs.stream.is_some()) {
            bail!("{} gives rows of width {result}; its layer needs {width}", config.entry.name);
        }
        let output_bias = output_bias.unwrap_or(config.bias);
        let outputs = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|part| name(part)).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            builder.group(&linear_specs(&names, width, result, output_bias))
        };
        let output = match needs.output {
            OutputForm::Linear | OutputForm::HalfGlu => Some(outputs(&["attn.o"])?),
            OutputForm::Glu => Some(outputs(&["attn.o", "attn.o_gate"])?),
            OutputForm::Plain | OutputForm::Whole => None,
        };
        let stream = needs.stream.map(|_| builder.group(&layer_norm(name("norm_p")))).transpose()?;
        let rotary = rotary.filter(|_| config.entry.in_models.rotary);
        let rotary = rotary.map(|form| Rotary::new(form.pairing, config.head_dim, form.base)).transpose()?;
        Ok(Self {
            mechanism,
            needs,
            heads,
            projections,
            rotary,
            residual: config.form.residual,
            spec: Projection { norm: rms.is_none(), outputs: read.len(), bias: config.bias },
            output_bias,
            rms,
            projection,
            global,
            conv: conv.transpose()?,
            output,
            stream,
        })
    }

    /// x + Attn(LN(x)) for `x` [b, n, width]; with the normed residual LN(x) + Attn(LN(x)).
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        Ok(self.run(x, call, false, |input| self.mechanism.forward(input))?.0)
    }

    /// [`Self::forward`] with what `attend` makes of the mechanism's input; also the next layer's second stream.
    fn run(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        decoding: bool,
        attend: impl FnOnce(&AttentionInput) -> Result<AttentionOutput>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (attended, residual, read) = self.with_input(x, call, decoding, |input, normal| {
            let residual = match (self.residual, normal) {
                (Residual::Normed, Some(normal)) => {
                    normal.narrow(1, input.memory, x.dim(1)?)?.contiguous()?
                }
                _ => x.clone(),
            };
            let read = [normal, input.x].map(Option::<&Tensor>::cloned);
            Ok((attend(input)?, residual, read))
        })?;
        let stream = match (call.stream, &attended.stream) {
            (Some(stream), Some(change)) => Some(add(stream, change)?),
            _ => None,
        };
        let (out, residual) = (call.behind(attended.out.merged()?)?, call.residual_behind(residual)?);
        let out = self.finish(out, &residual, call.dropout_behind())?;
        if self.residual != Residual::Normed && self.needs.output != OutputForm::Whole {
            read.iter().flatten().try_for_each(recompute_in_backward)?;
        }
        Ok((out, stream))
    }

    /// Calls `then` with what the mechanism reads and the normalised input, where something reads it.
    fn with_input<T>(
        &self,
        x: &Tensor,
        call: &ForwardArgs,
        decoding: bool,
        then: impl FnOnce(&AttentionInput, Option<&Tensor>) -> Result<T>,
    ) -> Result<T> {
        let ForwardArgs { mask, memory, stream, position, dropout, .. } = *call;
        let held = memory.map_or(Ok(0), |memory| memory.dim(1))?;
        let normal = match memory {
            Some(memory) => Some(self.normalise(&Tensor::cat(&[memory, x], 1)?)?),
            None if self.reads_normal() || self.residual == Residual::Normed => Some(self.normalise(x)?),
            None => None,
        };
        let qkv = match &normal {
            None => self.project(x, true, call)?,
            Some(normal) if held == 0 => self.project(normal, false, call)?,
            Some(normal) => self.separate(normal, held)?,
        };
        let qkv = match &self.rotary {
            Some(rotary) => rotary.rotate_qk(&qkv, position)?,
            None => qkv,
        };
        let qkv = self.spread(qkv, decoding)?;
        let wide = normal.clone().filter(|_| self.reads_normal() || held > 0);
        let wide = wide.map(|normal| call.unpack(normal)).transpose()?;
        let global = self.global(wide.as_ref())?;
        let residual = match (self.residual, &normal) {
            _ if !self.needs.residual => None,
            (Residual::Normed, Some(normal)) => Some(call.unpack(normal.clone())?),
            _ => Some(call.unpack(x.clone())?),
        };
        let stream = self.stream(stream)?;
        let input = AttentionInput {
            x: wide.as_ref(),
            mask,
            global: global.as_ref(),
            residual: residual.as_ref(),
            stream: stream.as_ref(),
            memory: held,
            dropout: dropout.weights(1)?,
            first_row: call.only.is_some(),
            ..AttentionInput::new(&qkv)
        };
        then(&input, normal.as_ref())
    }

    /// The layer's output from the mechanism's result [b, n, e], with dropout of what is added.
    fn finish(&self, out: Tensor, residual: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let change = match (self.needs.output, &self.output) {
            (OutputForm::Whole, _) => return Ok(out),
            (OutputForm::Linear, Some(group)) if dropout.is_none() => {
                return block::output(&out, residual, group, None);
            }
            (OutputForm::Linear, Some(_)) => self.linear_out(&out, 0)?,
            (OutputForm::HalfGlu, Some(_)) => {
                let out = gelu(&out)?;
                glu(&self.linear_out(&out, 0)?, &out)?
            }
            (OutputForm::Glu, Some(_)) => {
                let out = gelu(&out)?;
                glu(&self.linear_out(&out, 1)?, &self.linear_out(&out, 0)?)?
            }
            (_, None) | (OutputForm::Plain, _) => out,
        };
        residual + dropout.apply(&change, 0)?
    }

    /// Output projection number `index` of `y`.
    fn linear_out(&self, y: &Tensor, index: usize) -> Result<Tensor> {
        let Some(group) = &self.output else { bail!("this layer has no output projection") };
        let at = if self.output_bias { 2 * index } else { index };
        let bias = if self.output_bias { Some(group.part(at + 1)?) } else { None };
        linear(y, &group.part(at)?, bias.as_ref())
    }

    /// The class token's row: cls + Linear_o(attention of cls), `cls` [b, 1, width] un-normalised. The rows
    /// of `x` are not needed behind the last layer and are not computed.
    pub fn forward_cls(&self, x: &Tensor, cls: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let normal = if self.reads_normal() { Some(self.normalise(x)?) } else { None };
        let qkv = match &normal {
            None => self.project(x, true, call)?,
            Some(normal) => self.project(normal, false, call)?,
        };
        let normal = normal.map(|normal| call.unpack(normal)).transpose()?;
        let cls_qkv = self.project(cls, false, &ForwardArgs::default())?;
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
        let out = self.finish(out.merged()?, cls, call.dropout)?;
        normal.iter().try_for_each(recompute_in_backward)?;
        Ok(out)
    }

    fn reads_normal(&self) -> bool {
        let packable = self.projections.packable(self.heads.0, self.heads.1);
        self.rms.is_some() || self.needs.x || self.needs.global || !packable
    }

    fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        match &self.rms {
            Some(norm) => norm.forward(x),
            None => norm::layer_norm(x, &self.projection.part(0)?, &self.projection.part(1)?, norm::EPS),
        }
    }

    /// Keys and values that heads share, repeated for every head of the queries, where the mechanism does not read them as they are.
    fn spread(&self, qkv: Qkv, decoding: bool) -> Result<Qkv> {
        if self.projections == self.needs.projections || decoding && self.needs.decodes_groups {
            return Ok(qkv);
        }
        let (q, k, v) = (qkv.q()?, qkv.k()?, qkv.v()?);
        let times = q.dim(1)? / k.dim(1)?.max(1);
        Ok(Qkv::separate(q, heads::repeat(&k, times)?, heads::repeat(&v, times)?))
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

    /// Projections [b, n, ..] of `x`: side by side where all have the layer's heads, else tensors of their own.
    fn project(&self, x: &Tensor, normalise: bool, call: &ForwardArgs) -> Result<Qkv> {
        let projections = self.projections;
        let (heads, head_dim) = self.heads;
        let convolve = |rows: Tensor, which: Range<usize>| match (&self.conv, call.past) {
            (Some(conv), Some(past)) => conv.step(&rows, which, &mut past.borrow_mut()),
            (Some(conv), None) => conv.forward(&call.unpack(rows)?, which, call.mask),
            (None, _) => call.unpack(rows),
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
            split_heads(&rows, shape.of(heads, head_dim).0, (0, 1)).map(Some)
        };
        Ok(Qkv::Separate { q: part(projections.q)?, k: part(projections.k)?, v: part(projections.v)? })
    }

    /// Some of the projections of the normalised `normal`, side by side.
    fn outputs(&self, normal: &Tensor, which: Range<usize>) -> Result<Tensor> {
        let (first, stride) = (if self.spec.norm { 2 } else { 0 }, if self.spec.bias { 2 } else { 1 });
        let outputs = which.len();
        let group = self.projection.slice(first + which.start * stride..first + which.end * stride)?;
        block::project(normal, &group, Projection { norm: false, outputs, ..self.spec }, false)
    }

    /// Queries of the positions from `held` on, keys and values of all.
    fn separate(&self, normal: &Tensor, held: usize) -> Result<Qkv> {
        if self.needs.projections != Projections::QKV || self.conv.is_some() {
            bail!("a mechanism without plain queries, keys and values cannot read a cache");
        }
        let shared = self.projections.k.unwrap_or_default().of(self.heads.0, self.heads.1).0;
        let own = normal.narrow(1, held, normal.dim(1)? - held)?.contiguous()?;
        let q = heads::split(&self.outputs(&own, 0..1)?, self.heads.0)?;
        let (rows, parts) = (self.outputs(normal, 1..3)?, PackedLayout::KV);
        let keys = Qkv::Packed { rows, heads: shared, parts };
        Ok(Qkv::separate(q, keys.k()?, keys.v()?))
    }

    fn global(&self, normal: Option<&Tensor>) -> Result<Option<Qkv>> {
        let (Some(group), Some(normal)) = (&self.global, normal) else { return Ok(None) };
        let spec = Projection { norm: false, outputs: 3, ..self.spec };
        let rows = block::project(normal, group, spec, false)?;
        Ok(Some(Qkv::Packed { rows, heads: self.heads.0, parts: PackedLayout::QKV }))
    }
}

#[cfg(test)]
mod tests;
