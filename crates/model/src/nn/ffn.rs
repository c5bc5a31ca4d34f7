//! The feed-forward half of a block: FFN(x) = fc2(GELU(fc1(x))), or with another activation, with its LayerNorm and residual.

use candle_core::{Result, Tensor};

use super::dropout::Dropout;
use super::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::activation::{gelu, gelu_tanh, relu};
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
    group: ParamGroup,
    form: FfnConfig,
}

impl Ffn {
    /// Parameters `norm2.*`, `ffn.fc1.*` [hidden, width] and `ffn.fc2.*` [width, hidden] below `builder`.
    pub fn new(builder: &ParamBuilder, width: usize, hidden: usize, form: FfnConfig) -> Result<Self> {
        let group = builder.group(&[
            ParamSpec::new("norm2.weight", &[width], Init::ONE),
            ParamSpec::new("norm2.bias", &[width], Init::ZERO),
            ParamSpec::new("ffn.fc1.weight", &[hidden, width], Init::fan_in(width)),
            ParamSpec::new("ffn.fc1.bias", &[hidden], Init::fan_in(width)),
            ParamSpec::new("ffn.fc2.weight", &[width, hidden], Init::fan_in(hidden)),
            ParamSpec::new("ffn.fc2.bias", &[width], Init::fan_in(hidden)),
        ])?;
        Ok(Self { group, form })
    }

    /// x + FFN(LN(x)), or with the normed residual y + FFN(y), y = LN(x); `x` [b, n, width]. Dropout applies to
    /// the hidden activations and to the output of FFN.
    pub fn forward(&self, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let FfnConfig { residual, activation, hidden_dropout } = self.form;
        if dropout.is_none() && activation == FfnActivation::Gelu {
            return block::ffn(x, &self.group, FfnCall::new(residual, EPS));
        }
        let part = |index| self.group.part(index);
        let normal = layer_norm(x, &part(0)?, &part(1)?, EPS)?;
        let hidden = linear(&normal, &part(2)?, Some(&part(3)?))?;
        let hidden = match activation {
            FfnActivation::Gelu => gelu(&hidden)?,
            FfnActivation::GeluTanh => gelu_tanh(&hidden)?,
            FfnActivation::Relu => relu(&hidden)?,
        };
        let inner = hidden_dropout.map_or(dropout, |rate| dropout.with_rate(rate));
        let change = linear(&inner.apply(&hidden, 0)?, &part(4)?, Some(&part(5)?))?;
        let change = dropout.apply(&change, 1)?;
        match residual {
            Residual::Raw => x + change,
            Residual::Normed => normal + change,
        }
    }
}
