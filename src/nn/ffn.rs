//! The feed-forward half of a block: FFN(x) = fc2(GELU(fc1(x))) with its LayerNorm and residual.

use candle_core::{Result, Tensor};

use super::dropout::Dropout;
use super::params::{Builder, Group, Init, Spec};
use crate::kernel::activation::gelu;
use crate::kernel::block::{self, Residual};
use crate::kernel::linear::linear;
use crate::kernel::norm::{EPS, layer_norm};

/// The feed-forward half of a block.
pub struct Ffn {
    group: Group,
    residual: Residual,
}

impl Ffn {
    /// Parameters `norm2.*`, `ffn.fc1.*` [hidden, width] and `ffn.fc2.*` [width, hidden] below `builder`.
    ///
    /// # Errors
    /// Given parameters that are missing or have another shape.
    pub fn new(builder: &Builder, width: usize, hidden: usize, residual: Residual) -> Result<Self> {
        let group = builder.group(&[
            Spec::new("norm2.weight", &[width], Init::ONE),
            Spec::new("norm2.bias", &[width], Init::ZERO),
            Spec::new("ffn.fc1.weight", &[hidden, width], Init::fan_in(width)),
            Spec::new("ffn.fc1.bias", &[hidden], Init::fan_in(width)),
            Spec::new("ffn.fc2.weight", &[width, hidden], Init::fan_in(hidden)),
            Spec::new("ffn.fc2.bias", &[width], Init::fan_in(hidden)),
        ])?;
        Ok(Self { group, residual })
    }

    /// x + FFN(LN(x)), or with the normed residual y + FFN(y), y = LN(x); `x` [b, n, width]. Dropout applies to
    /// the hidden activations and to the output of FFN.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        if dropout.is_none() {
            return block::ffn(x, &self.group, self.residual);
        }
        let part = |index| self.group.part(index);
        let normal = layer_norm(x, &part(0)?, &part(1)?, EPS)?;
        let hidden = gelu(&linear(&normal, &part(2)?, Some(&part(3)?))?)?;
        let change = linear(&dropout.apply(&hidden, 0)?, &part(4)?, Some(&part(5)?))?;
        let change = dropout.apply(&change, 1)?;
        match self.residual {
            Residual::Raw => x + change,
            Residual::Normed => normal + change,
        }
    }
}
