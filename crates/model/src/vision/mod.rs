//! Image classifiers (`SPEC-vision.md` sections 4 to 7): hierarchical transformers with long-short attention, their
//! baselines, and what is measured of them.
//!
//! | module | holds |
//! |---|---|
//! | [`vil`] | ViL-LS |
//! | [`cvt`] | CvT and CvT*-LS |
//! | [`vit`] | ViT and DeiT |
//! | [`resnet`] | ResNet |
//! | [`similarity`] | cosine between the patches of a block's output (Figure 6) |

pub mod cvt;
pub mod resnet;
pub mod similarity;
pub mod vil;
pub mod vit;

#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::block::{FfnCall, Residual, ffn, output, scaled};
use effattn_kernel::heads::Qkv;
use effattn_kernel::linear::linear;

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
    /// Of the multiply-adds those of attention cores.
    pub core: u64,
}

impl Flops {
    /// FLOPs of inference, or with `train` of a forward in training.
    pub fn total(self, train: bool) -> u64 {
        self.macs + 5 * self.layer_norm + if train { 5 } else { 2 } * self.batch_norm
    }

    /// An attention core.
    fn core(macs: u64, layer_norm: u64) -> Self {
        Self { macs, layer_norm, core: macs, batch_norm: 0 }
    }

    /// Adds `other`.
    pub fn add(&mut self, other: Self) {
        self.macs += other.macs;
        self.layer_norm += other.layer_norm;
        self.batch_norm += other.batch_norm;
        self.core += other.core;
    }
}

/// How a forward pass runs.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOptions {
    /// Whether batch normalisation uses the batch.
    pub train: bool,
    /// Whether the outputs of all blocks are kept.
    pub keep: bool,
    /// Stochastic depth: the random stream, and the highest rate at which a sample passes a branch by.
    pub path: Option<(DropoutRng, f64)>,
}

impl ForwardOptions {
    /// Running statistics, every branch, logits only.
    pub const INFER: Self = Self { train: false, keep: false, path: None };
    /// The same with the outputs of all blocks.
    pub const LOOK: Self = Self { keep: true, ..Self::INFER };

    /// What the branch of every sample of `x` is multiplied by: 0 at `share` of the highest rate, and the others are
    /// scaled up; `place` is another one for every branch of a model. Nothing where nothing is dropped.
    fn scales(&self, x: &Tensor, share: f64, place: usize) -> Result<Option<Vec<f32>>> {
        let dropout = self.path.map_or(Dropout::NONE, |(noise, rate)| noise.at(rate * share));
        if dropout.is_none() {
            return Ok(None);
        }
        let ones = Tensor::ones(x.dim(0)?, x.dtype(), x.device())?;
        dropout.apply(&ones, place as u64)?.to_dtype(DType::F32)?.to_vec1().map(Some)
    }
}

/// Where a block stands: its number, and the share of the highest rate of stochastic depth.
#[derive(Clone, Copy, Debug)]
struct Depth {
    number: usize,
    share: f64,
}

impl Depth {
    /// Block `number` of `count`, whose rates rise linearly from 0.
    fn of(number: usize, count: usize) -> Self {
        Self { number, share: number as f64 / (count.max(2) - 1) as f64 }
    }

    /// x + out(attention), without `out` as it is, then + MLP.
    fn residual(
        self,
        x: &Tensor,
        run: &ForwardOptions,
        attention: impl FnOnce(&Tensor) -> Result<Tensor>,
        (out, mlp): (Option<&ParamGroup>, &Mlp),
    ) -> Result<Tensor> {
        let rows = attention(x)?;
        let scales = |branch| run.scales(x, self.share, 2 * self.number + branch);
        let x = match out {
            Some(out) => output(&rows, x, out, scales(0)?.as_deref())?,
            None => (x + scaled(rows, scales(0)?.as_deref())?)?,
        };
        let kept = scales(1)?;
        ffn(&x, &mlp.group, FfnCall { residual: Residual::Raw, eps: mlp.eps, scales: kept.as_deref() })
    }
}

/// What an image classifier gives.
pub struct ClassifierOutput {
    /// Logits [b, classes].
    pub logits: Tensor,
    /// Output of every block [b, n, c], and how many tokens in front are no patches; empty unless [`ForwardOptions::keep`].
    pub blocks: Vec<(Tensor, usize)>,
}

/// A linear layer with bias.
pub(crate) struct Dense {
    weight: Tensor,
    bias: Tensor,
}

impl Dense {
    pub(crate) fn new(builder: &ParamBuilder, name: &str, sizes: (usize, usize)) -> Result<Self> {
        let [weight, bias] = linear_specs(name, sizes);
        let param = |spec: ParamSpec| builder.param(&spec.name, &spec.shape, spec.init);
        Ok(Self { weight: param(weight)?, bias: param(bias)? })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, Some(&self.bias))
    }
}

/// The linear layer behind attention.
pub(crate) fn output_layer(builder: &ParamBuilder, name: &str, width: usize) -> Result<ParamGroup> {
    builder.group(&linear_specs(name, (width, width)))
}

/// fc2(GELU(fc1(LN(x)))).
pub(crate) struct Mlp {
    group: ParamGroup,
    eps: f64,
}

impl Mlp {
    /// Parameters below `builder` under the names `norm`, `fc1` and `fc2` that are given, hidden width 4 `width`.
    pub(crate) fn new(
        builder: &ParamBuilder,
        [norm, fc1, fc2]: [&str; 3],
        width: usize,
        eps: f64,
    ) -> Result<Self> {
        let [weight1, bias1] = linear_specs(fc1, (width, 4 * width));
        let [weight2, bias2] = linear_specs(fc2, (4 * width, width));
        let group = builder.group(&[
            ParamSpec::new(&format!("{norm}.weight"), &[width], Init::ONE),
            ParamSpec::new(&format!("{norm}.bias"), &[width], Init::ZERO),
            weight1,
            bias1,
            weight2,
            bias2,
        ])?;
        Ok(Self { group, eps })
    }
}

/// Weight and bias of a linear layer called `name`.
fn linear_specs(name: &str, (inputs, outputs): (usize, usize)) -> [ParamSpec; 2] {
    [
        ParamSpec::new(&format!("{name}.weight"), &[outputs, inputs], Init::normal(0.02)),
        ParamSpec::new(&format!("{name}.bias"), &[outputs], Init::ZERO),
    ]
}

/// Queries, keys and values [b, h, n, d] of packed rows [b, n, 3 e] in the order q, k, v.
pub(crate) fn unpack(rows: Tensor, heads: usize) -> Result<[Tensor; 3]> {
    let qkv = Qkv::Packed { rows, heads, parts: effattn_kernel::heads::PackedLayout::QKV };
    Ok([qkv.q()?, qkv.k()?, qkv.v()?])
}
