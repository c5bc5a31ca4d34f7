//! The short causal convolution in front of recurrences (Mamba-2, DeltaNet): every channel alone, over positions.
//!
//! ```text
//! y_t[c] = sum_{i<K} w[c, i] x_{t-K+1+i}[c] + b[c];  SiLU of it where so set
//! ```

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use super::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::short_conv::{self as kernel, short_conv};

/// A causal depthwise convolution of the projected q, k and v, in front of the mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvForm {
    /// Taps; the last one is the current position.
    pub taps: usize,
    /// Whether every channel has a bias.
    pub bias: bool,
    /// Whether SiLU follows.
    pub silu: bool,
}

/// Convolutions of several projections, with their parameters side by side.
pub struct ShortConv {
    weights: ParamGroup, // [c, taps] each
    biases: Option<ParamGroup>,
    form: ConvForm,
}

impl ShortConv {
    /// Parameters `<name>.weight` [c, taps] and, if so set, `<name>.bias` `[c]` for every name and number of channels, uniform
    /// within 1 / sqrt(taps).
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
    pub fn forward(&self, x: &Tensor, which: Range<usize>, mask: Option<&Tensor>) -> Result<Tensor> {
        let (weight, bias) = self.parameters(which)?;
        let x = match mask {
            Some(mask) => x.broadcast_mul(&mask.to_dtype(x.dtype())?.unsqueeze(2)?)?,
            None => x.clone(),
        };
        short_conv(&x, kernel::ShortConv { weight: &weight, bias: bias.as_ref(), silu: self.form.silu })
    }

    /// What stands before the first of the tokens of `batch` sequences.
    pub fn start(&self, batch: usize, device: &Device) -> Result<ConvPast> {
        let parts = 0..self.parts();
        let rows = |part: usize| {
            let channels = self.weights.slice(part..part + 1)?.flat.elem_count() / self.form.taps;
            Tensor::zeros((batch, self.form.taps - 1, channels), DType::F32, device)
        };
        Ok(ConvPast(parts.map(rows).collect::<Result<_>>()?))
    }

    fn parts(&self) -> usize {
        self.weights.parts.len()
    }

    /// [`Self::forward`] of the next token `x` [b, 1, c], which becomes part of the past.
    pub fn step(&self, x: &Tensor, which: Range<usize>, past: &mut ConvPast) -> Result<Tensor> {
        let (weight, bias) = self.parameters(which.clone())?;
        let before: Vec<&Tensor> = past.0[which.clone()].iter().collect();
        let mut state = Some(Tensor::cat(&before, 2)?);
        let conv = kernel::ShortConv { weight: &weight, bias: bias.as_ref(), silu: self.form.silu };
        let y = kernel::step(x, conv, &mut state)?;
        if let Some(state) = state {
            let mut from = 0;
            for rows in &mut past.0[which] {
                let channels = rows.dim(2)?;
                *rows = state.narrow(2, from, channels)?.contiguous()?;
                from += channels;
            }
        }
        Ok(y)
    }

    /// Weight [c, taps] and bias `[c]` of the parts numbered `which`.
    fn parameters(&self, which: Range<usize>) -> Result<(Tensor, Option<Tensor>)> {
        let weight = self.weights.slice(which.clone())?.flat;
        let weight = weight.reshape((weight.elem_count() / self.form.taps, self.form.taps))?;
        let bias = match &self.biases {
            Some(biases) => Some(biases.slice(which)?.flat.flatten_all()?),
            None => None,
        };
        Ok((weight, bias))
    }
}

/// The last inputs of a convolution, one tensor [b, taps - 1, c] for each projection.
pub struct ConvPast(Vec<Tensor>);

impl ConvPast {
    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|rows| rows.elem_count() * rows.dtype().size_in_bytes()).sum()
    }
}
