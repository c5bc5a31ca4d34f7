//! LayerNorm with its parameters.

use candle_core::{Result, Tensor};

use super::params::{Init, ParamBuilder};
use effattn_kernel::norm::layer_norm;

/// A LayerNorm.
pub struct Norm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl Norm {
    /// `<name>.weight` and `<name>.bias` of `width`, which start at 1 and 0.
    pub fn new(builder: &ParamBuilder, name: &str, width: usize, eps: f64) -> Result<Self> {
        let param = |part: &str, init| builder.param(&format!("{name}.{part}"), &[width], init);
        Ok(Self { weight: param("weight", Init::ONE)?, bias: param("bias", Init::ZERO)?, eps })
    }

    /// `x` [..., width] to the same shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}
