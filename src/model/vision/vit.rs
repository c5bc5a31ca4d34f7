//! ViT and DeiT (`SPEC-vision.md` section 6): a class token, learned positions, pre-norm blocks. timm's names.

use candle_core::{Result, Tensor};

use super::{Classified, Dense, Depth, Flops, Mlp, Run, unpack};
use crate::kernel::conv::Window;
use crate::kernel::heads::merge;
use crate::kernel::window_2d::{Keys, biased};
use crate::nn::conv::{Conv, tokens};
use crate::nn::norm::Norm;
use crate::nn::params::{Builder, Init};

/// Epsilon of every LayerNorm.
const EPS: f64 = 1e-6;

/// A ViT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VitConfig {
    /// Side of the images.
    pub size: usize,
    /// Side of a patch.
    pub patch: usize,
    /// Width.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Blocks.
    pub depth: usize,
    /// Classes.
    pub classes: usize,
}

impl VitConfig {
    fn patches(&self) -> usize {
        (self.size / self.patch).pow(2)
    }

    /// Cost of one forward of one image.
    pub fn flops(&self) -> Flops {
        let (n, e) = (self.patches() + 1, self.width);
        let core = 2 * n * n * e;
        let block = 12 * n * e * e + core;
        let ends = self.patch * self.patch * 3 * e * (n - 1) + e * self.classes;
        let norms = (2 * self.depth + 1) * n * e;
        Flops {
            macs: (self.depth * block + ends) as u64,
            layer_norm: norms as u64,
            core: (self.depth * core) as u64,
            batch_norm: 0,
        }
    }
}

struct Block {
    norm: Norm,
    qkv: Dense,
    out: Dense,
    mlp: Mlp,
    heads: usize,
    depth: Depth,
}

impl Block {
    fn forward(&self, x: &Tensor, run: &Run) -> Result<Tensor> {
        self.depth.residual(x, run, |x| self.attend(x), &self.mlp)
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let [q, k, v] = unpack(self.qkv.forward(&self.norm.forward(x)?)?, self.heads)?;
        let out = biased(&(&q / (q.dim(3)? as f64).sqrt())?, Keys { k: &k, v: &v }, None)?;
        self.out.forward(&merge(&out)?)
    }
}

/// Images to classes.
pub struct Vit {
    patches: Conv,
    class_token: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    head: Dense,
}

impl Vit {
    /// Parameters under timm's names.
    ///
    /// # Errors
    /// Given parameters that do not fit.
    pub fn new(config: &VitConfig, builder: &Builder) -> Result<Self> {
        let VitConfig { patch, width, heads, .. } = *config;
        let block = |index: usize| {
            let below = builder.pp(format!("blocks.{index}"));
            Ok(Block {
                norm: Norm::new(&below, "norm1", width, EPS)?,
                qkv: Dense::new(&below, "attn.qkv", (width, 3 * width))?,
                out: Dense::new(&below, "attn.proj", (width, width))?,
                mlp: Mlp::new(&below, ["norm2", "mlp.fc1", "mlp.fc2"], width, EPS)?,
                heads,
                depth: Depth::of(index, config.depth),
            })
        };
        let small = Init::normal(0.02);
        let window = Window { size: patch, stride: patch, pad: 0 };
        Ok(Self {
            patches: Conv::new(builder, "patch_embed.proj", (3, width), window, true)?,
            class_token: builder.param("cls_token", &[1, 1, width], small)?,
            positions: builder.param("pos_embed", &[1, 1 + config.patches(), width], small)?,
            blocks: (0..config.depth).map(block).collect::<Result<_>>()?,
            norm: Norm::new(builder, "norm", width, EPS)?,
            head: Dense::new(builder, "head", (width, config.classes))?,
        })
    }

    /// `images` [b, 3, s, s] to logits and block outputs.
    ///
    /// # Errors
    /// Images of another size.
    pub fn forward(&self, images: &Tensor, run: &Run) -> Result<Classified> {
        let (pixels, grid) = tokens(images)?;
        let (x, _) = self.patches.forward(&pixels, grid)?;
        let (b, _, width) = x.dims3()?;
        let class = self.class_token.broadcast_as((b, 1, width))?.contiguous()?;
        let mut x = Tensor::cat(&[&class, &x], 1)?.broadcast_add(&self.positions)?;
        let mut blocks = Vec::new();
        for block in &self.blocks {
            x = block.forward(&x, run)?;
            if run.keep {
                blocks.push((x.clone(), 1));
            }
        }
        let class = self.norm.forward(&x)?.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?;
        Ok(Classified { logits: self.head.forward(&class)?, blocks })
    }
}
