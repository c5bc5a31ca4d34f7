//! Image classifiers (`SPEC-vision.md` sections 4 to 7): hierarchical transformers with long-short attention, their
//! baselines, and what is measured of them.
//!
//! | module | holds |
//! |---|---|
//! | [`long_short`] | long-short attention over a grid of image tokens |
//! | [`vil`] | ViL-LS |
//! | [`cvt`] | CvT and CvT*-LS |
//! | [`vit`] | ViT and DeiT |
//! | [`resnet`] | ResNet |
//! | [`similarity`] | cosine between the patches of a block's output (Figure 6) |

pub mod cvt;
pub mod long_short;
pub mod resnet;
pub mod similarity;
pub mod vil;
pub mod vit;

#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

use crate::kernel::activation::gelu;
use crate::kernel::heads::Qkv;
use crate::kernel::linear::linear;
use crate::kernel::norm::layer_norm;
use crate::nn::params::{Builder, Init};

/// What one forward of `batch` images costs, in the convention of the papers' tables: a multiply-add is 1, LayerNorm 5
/// per element, batch normalisation 2 (by running statistics) or 5 (by the batch's).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// Multiply-adds of convolutions, linear layers and matrix products.
    pub macs: u64,
    /// Elements that LayerNorms normalise.
    pub layer_norm: u64,
    /// Elements that batch normalisations normalise.
    pub batch_norm: u64,
}

impl Flops {
    /// FLOPs of inference, or with `train` of a forward in training.
    pub fn total(self, train: bool) -> u64 {
        self.macs + 5 * self.layer_norm + if train { 5 } else { 2 } * self.batch_norm
    }

    /// Adds `other`.
    pub fn add(&mut self, other: Self) {
        self.macs += other.macs;
        self.layer_norm += other.layer_norm;
        self.batch_norm += other.batch_norm;
    }
}

/// What an image classifier gives.
pub struct Classified {
    /// Logits [b, classes].
    pub logits: Tensor,
    /// Output of every block [b, n, c], and how many tokens in front are no patches.
    pub blocks: Vec<(Tensor, usize)>,
}

/// A LayerNorm.
pub(crate) struct Norm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl Norm {
    pub(crate) fn new(builder: &Builder, name: &str, width: usize, eps: f64) -> Result<Self> {
        let param = |part: &str, init| builder.param(&format!("{name}.{part}"), &[width], init);
        Ok(Self { weight: param("weight", Init::ONE)?, bias: param("bias", Init::ZERO)?, eps })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// A linear layer with bias.
pub(crate) struct Dense {
    weight: Tensor,
    bias: Tensor,
}

impl Dense {
    pub(crate) fn new(builder: &Builder, name: &str, (inputs, outputs): (usize, usize)) -> Result<Self> {
        let weight = builder.param(&format!("{name}.weight"), &[outputs, inputs], Init::normal(0.02))?;
        Ok(Self { weight, bias: builder.param(&format!("{name}.bias"), &[outputs], Init::ZERO)? })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, Some(&self.bias))
    }
}

/// x + fc2(GELU(fc1(LN(x)))).
pub(crate) struct Mlp {
    norm: Norm,
    fc1: Dense,
    fc2: Dense,
}

impl Mlp {
    /// Parameters below `builder` under the names `norm`, `fc1` and `fc2` that are given, hidden width 4 `width`.
    pub(crate) fn new(builder: &Builder, names: [&str; 3], width: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            norm: Norm::new(builder, names[0], width, eps)?,
            fc1: Dense::new(builder, names[1], (width, 4 * width))?,
            fc2: Dense::new(builder, names[2], (4 * width, width))?,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.fc2.forward(&gelu(&self.fc1.forward(&self.norm.forward(x)?)?)?)?
    }
}

/// Queries, keys and values [b, h, n, d] of packed rows [b, n, 3 e] in the order q, k, v.
pub(crate) fn unpack(rows: Tensor, heads: usize) -> Result<[Tensor; 3]> {
    let qkv = Qkv::Packed { rows, heads, parts: crate::kernel::heads::Parts::QKV };
    Ok([qkv.q()?, qkv.k()?, qkv.v()?])
}

/// Heads [b, h, n, d] of rows [b, n, e].
pub(crate) fn split(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, n, e) = x.dims3()?;
    x.reshape((b, n, heads, e / heads))?.transpose(1, 2)?.contiguous()
}

/// Rows [b, n, e] of heads [b, h, n, d].
pub(crate) fn merge(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()?.flatten_from(2)
}
