//! Norms with their parameters.

use candle_core::{Result, Tensor};

use super::params::{Init, ParamBuilder};
use effattn_kernel::norm::{layer_norm, rms_norm};

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

/// Which norm stands in front of the halves of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum NormForm {
    /// LayerNorm with bias, epsilon 1e-5.
    #[default]
    Layer,
    /// RMSNorm without bias.
    Rms {
        /// Added to the mean square.
        eps: f64,
    },
}

/// An RMSNorm.
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// `<name>.weight` of `width`, which starts at 1.
    ///
    /// # Errors
    /// Given parameters of another shape.
    pub fn new(builder: &ParamBuilder, name: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: builder.param(&format!("{name}.weight"), &[width], Init::ONE)?, eps })
    }

    /// `x` [..., width] to the same shape.
    ///
    /// # Errors
    /// Another width.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight, self.eps)
    }
}
