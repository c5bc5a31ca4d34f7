//! The short causal convolution in front of recurrences (Mamba-2, DeltaNet): every channel alone, over positions.
//!
//! ```text
//! y_t[c] = sum_{i<K} w[c, i] x_{t-K+1+i}[c] + b[c];  SiLU of it where so set
//! ```

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use crate::attention::ConvForm;

/// Convolutions of several projections, with their parameters side by side.
pub struct ShortConv {
    weights: ParamGroup, // [c, taps] each
    biases: Option<ParamGroup>,
    form: ConvForm,
}

impl ShortConv {
    /// Parameters `<name>.weight` [c, taps] and, if so set, `<name>.bias` `[c]` for every name and number of channels, uniform
    /// within 1 / sqrt(taps).
    ///
    /// # Errors
    /// Given parameters that are missing or have another shape.
    pub fn new(parts: &[(String, usize)], form: ConvForm, builder: &ParamBuilder) -> Result<Self> {
        let init = Init::fan_in(form.taps);
        let weight =
            |(name, c): &(String, usize)| ParamSpec::new(&format!("{name}.weight"), &[*c, form.taps], init);
        let bias = |(name, c): &(String, usize)| ParamSpec::new(&format!("{name}.bias"), &[*c], init);
        let weights = builder.group(&parts.iter().map(weight).collect::<Vec<_>>())?;
        let biases = match form.bias {
            true => Some(builder.group(&parts.iter().map(bias).collect::<Vec<_>>())?),
            false => None,
        };
        Ok(Self { weights, biases, form })
    }

    /// Convolves `x` [b, n, c], the channels of the parts numbered `which` side by side, with zeros in front of the start and
    /// at positions that `mask` [b, n] hides.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, x: &Tensor, which: Range<usize>, mask: Option<&Tensor>) -> Result<Tensor> {
        let weight = self.weights.slice(which.clone())?.flat;
        let weight = weight.reshape((weight.elem_count() / self.form.taps, self.form.taps))?;
        let bias = match &self.biases {
            Some(biases) => Some(biases.slice(which)?.flat.flatten_all()?),
            None => None,
        };
        let x = match mask {
            Some(mask) => x.broadcast_mul(&mask.to_dtype(x.dtype())?.unsqueeze(2)?)?,
            None => x.clone(),
        };
        let y = convolve(&x, &weight, bias.as_ref())?;
        if self.form.silu { y.silu() } else { Ok(y) }
    }
}

/// One shifted product per tap.
fn convolve(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, taps) = (x.dim(1)?, weight.dim(1)?);
    let padded = x.pad_with_zeros(1, taps - 1, 0)?;
    let mut sum = None;
    for tap in 0..taps {
        let weight = weight.narrow(1, tap, 1)?.flatten_all()?;
        let product = padded.narrow(1, tap, n)?.broadcast_mul(&weight)?;
        sum = Some(match sum {
            None => product,
            Some(sum) => (sum + product)?,
        });
    }
    let Some(sum) = sum else { candle_core::bail!("a convolution without taps") };
    match bias {
        Some(bias) => sum.broadcast_add(bias),
        None => Ok(sum),
    }
}
