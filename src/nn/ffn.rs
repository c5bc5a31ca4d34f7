//! The feed-forward half of a block: FFN(x) = fc2(GELU(fc1(x))) with its LayerNorm and residual.

use candle_core::{Result, Tensor};

use super::params::{Builder, Group, Init, Spec};
use crate::kernel::block::{self, Residual};

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

    /// x + FFN(LN(x)), or with the normed residual y + FFN(y), y = LN(x); `x` [b, n, width].
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        block::ffn(x, &self.group, self.residual)
    }
}
