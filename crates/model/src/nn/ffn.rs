//! The feed-forward half of a block with its norm and residual: FFN(x) = fc2(GELU(fc1(x))), or with another activation, or
//! down(SiLU(gate(x)) * up(x)).

use candle_core::{Result, Tensor, bail};

use super::dropout::Dropout;
use super::norm::{NormForm, RmsNorm};
use super::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::activation::{gelu, gelu_tanh, relu, swiglu};
use effattn_kernel::block::{self, FfnCall, Residual};
use effattn_kernel::linear::linear;
use effattn_kernel::norm::{EPS, layer_norm};

/// What stands between the two linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FfnActivation {
    /// Exact GELU.
    #[default]
    Gelu,
    /// GELU with tanh in the place of erf (Flax's).
    GeluTanh,
    /// ReLU (fairseq's language models).
    Relu,
    /// SiLU(gate) * up of two linear layers side by side, all without biases (Llama).
    SwiGlu,
}

/// Form of a feed-forward half.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FfnConfig {
    /// What the skip path carries.
    pub residual: Residual,
    /// Activation.
    pub activation: FfnActivation,
    /// Dropout of the hidden activations where it is not the block's.
    pub hidden_dropout: Option<f64>,
}

/// The feed-forward half of a block.
pub struct Ffn {
    /// `[fc1.weight, fc1.bias, fc2.weight, fc2.bias]` behind the LayerNorm's, or `[gate.weight, up.weight]`.
    group: ParamGroup,
    /// `[down.weight]` of [`FfnActivation::SwiGlu`].
    down: Option<ParamGroup>,
    /// In the place of the LayerNorm.
    rms: Option<RmsNorm>,
    form: FfnConfig,
}

impl Ffn {
    /// Parameters `norm2.*`, `ffn.fc1.*` [hidden, width] and `ffn.fc2.*` [width, hidden] below `builder`; with SwiGLU
    /// `ffn.gate.weight`, `ffn.up.weight` and `ffn.down.weight`. `name` says what they are called.
    pub fn new(
        builder: &ParamBuilder,
        width: usize,
        hidden: usize,
        form: FfnConfig,
        norm: NormForm,
        name: fn(&str) -> String,
    ) -> Result<Self> {
        let weight = |part: &str, out, inp| {
            ParamSpec::new(&format!("{}.weight", name(part)), &[out, inp], Init::fan_in(inp))
        };
        let bias =
            |part: &str, out, inp| ParamSpec::new(&format!("{}.bias", name(part)), &[out], Init::fan_in(inp));
        let mut specs = Vec::new();
        let rms = match norm {
            NormForm::Layer => {
                let norm =
                    |part: &str, init| ParamSpec::new(&format!("{}.{part}", name("norm2")), &[width], init);
                specs.extend([norm("weight", Init::ONE), norm("bias", Init::ZERO)]);
                None
            }
            NormForm::Rms { eps } => Some(RmsNorm::new(builder, &name("norm2"), width, eps)?),
        };
        if form.activation == FfnActivation::SwiGlu {
            if rms.is_none() {
                bail!("SwiGLU stands behind an RMSNorm; choose another activation behind a LayerNorm");
            }
            let group =
                builder.group(&[weight("ffn.gate", hidden, width), weight("ffn.up", hidden, width)])?;
            let down = Some(builder.group(&[weight("ffn.down", width, hidden)])?);
            return Ok(Self { group, down, rms, form });
        }
        specs.extend([
            weight("ffn.fc1", hidden, width),
            bias("ffn.fc1", hidden, width),
            weight("ffn.fc2", width, hidden),
            bias("ffn.fc2", width, hidden),
        ]);
        Ok(Self { group: builder.group(&specs)?, down: None, rms, form })
    }

    /// x + FFN(LN(x)), or with the normed residual y + FFN(y), y = LN(x); `x` [b, n, width]. Dropout applies to
    /// the hidden activations and to the output of FFN.
    pub fn forward(&self, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let FfnConfig { residual, activation, hidden_dropout } = self.form;
        if dropout.is_none() && activation == FfnActivation::Gelu && self.rms.is_none() {
            return block::ffn(x, &self.group, FfnCall::new(residual, EPS));
        }
        let part = |index| self.group.part(index);
        let (normal, first) = match &self.rms {
            Some(norm) => (norm.forward(x)?, 0),
            None => (layer_norm(x, &part(0)?, &part(1)?, EPS)?, 2),
        };
        let dense = || linear(&normal, &part(first)?, Some(&part(first + 1)?));
        let hidden = match activation {
            FfnActivation::Gelu => gelu(&dense()?)?,
            FfnActivation::GeluTanh => gelu_tanh(&dense()?)?,
            FfnActivation::Relu => relu(&dense()?)?,
            FfnActivation::SwiGlu => {
                let projected = |index| linear(&normal, &part(index)?, None);
                swiglu(&projected(0)?, &projected(1)?)?
            }
        };
        let inner = hidden_dropout.map_or(dropout, |rate| dropout.with_rate(rate));
        let hidden = inner.apply(&hidden, 0)?;
        let change = match &self.down {
            Some(down) if dropout.is_none() => {
                let onto = if residual == Residual::Raw { x } else { &normal };
                return block::output(&hidden, onto, down, None);
            }
            Some(down) => linear(&hidden, &down.part(0)?, None)?,
            None => linear(&hidden, &part(first + 2)?, Some(&part(first + 3)?))?,
        };
        let change = dropout.apply(&change, 1)?;
        match residual {
            Residual::Raw => x + change,
            Residual::Normed => normal + change,
        }
    }
}
