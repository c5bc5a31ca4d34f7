//! ViT and DeiT (`SPEC-vision.md` section 6): a class token, learned positions, pre-norm blocks. timm's names.

use candle_core::{Result, Tensor};

use super::{ClassifierOutput, Dense, Depth, Flops, ForwardOptions, Mlp, output_layer};
use crate::attention::observe::note_full;
use crate::nn::conv::{Conv, tokens};
use crate::nn::norm::Norm;
use crate::nn::params::{Init, ParamBuilder, ParamGroup};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::conv::ConvGeometry;
use effattn_kernel::heads::{PackedLayout, Qkv};
use effattn_record::pattern::Pattern;

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

/// Weights [`to`, `from`] of cubic interpolation (a = -0.75, edges repeated, middles of pixels), as PyTorch's bicubic.
fn cubic(from: usize, to: usize) -> Vec<f32> {
    const A: f64 = -0.75;
    let near = |x: f64| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let mut weights = vec![0.0; to * from];
    for (at, row) in weights.chunks_mut(from).enumerate() {
        let place = (at as f64 + 0.5) * from as f64 / to as f64 - 0.5;
        let (left, part) = (place.floor(), place - place.floor());
        let parts = [far(1.0 + part), near(part), near(1.0 - part), far(2.0 - part)];
        for (step, weight) in parts.into_iter().enumerate() {
            row[(left as i64 + step as i64 - 1).clamp(0, from as i64 - 1) as usize] += weight as f32;
        }
    }
    weights
}

/// The position embedding `stored` [1, 1 + m m, e] for a grid of `side` x `side` patches: the class token's as it is, the
/// others resized bicubically (`SPEC-vision.md` section 6). None where it fits already, or is that of no square.
pub fn resized_positions(stored: &Tensor, side: usize) -> Result<Option<Tensor>> {
    let Ok((1, tokens, width)) = stored.dims3() else { return Ok(None) };
    let old = tokens.saturating_sub(1).isqrt();
    if old == 0 || old * old + 1 != tokens || old == side {
        return Ok(None);
    }
    let weights = Tensor::from_vec(cubic(old, side), (side, old), stored.device())?;
    let patches = stored.narrow(1, 1, old * old)?.reshape((old, old * width))?;
    let rows = weights.matmul(&patches)?.reshape((side, old, width))?;
    let all = weights.broadcast_left(side)?.contiguous()?.matmul(&rows.contiguous()?)?;
    let class = stored.narrow(1, 0, 1)?;
    Ok(Some(Tensor::cat(&[&class, &all.reshape((1, side * side, width))?], 1)?))
}

struct Block {
    norm: Norm,
    qkv: Dense,
    out: ParamGroup,
    mlp: Mlp,
    heads: usize,
    depth: Depth,
}

impl Block {
    fn forward(&self, x: &Tensor, run: &ForwardOptions) -> Result<Tensor> {
        self.depth.residual(x, run, |x| self.attend(x), (Some(&self.out), &self.mlp))
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let rows = self.qkv.forward(&self.norm.forward(x)?)?;
        let (_, tokens, width) = x.dims3()?;
        let pattern = Pattern::full(tokens, tokens, false);
        let qkv = Qkv::Packed { rows, heads: self.heads, parts: PackedLayout::QKV };
        note_full(&qkv, (self.heads, width / self.heads))?;
        attend(&qkv, &Attend::plain(&pattern, None, width / self.heads))?.merged()
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
    pub fn new(config: &VitConfig, builder: &ParamBuilder) -> Result<Self> {
        let VitConfig { patch, width, heads, .. } = *config;
        let block = |index: usize| {
            let below = builder.pp(format!("blocks.{index}"));
            Ok(Block {
                norm: Norm::new(&below, "norm1", width, EPS)?,
                qkv: Dense::new(&below, "attn.qkv", (width, 3 * width))?,
                out: output_layer(&below, "attn.proj", width)?,
                mlp: Mlp::new(&below, ["norm2", "mlp.fc1", "mlp.fc2"], width, EPS)?,
                heads,
                depth: Depth::of(index, config.depth),
            })
        };
        let small = Init::normal(0.02);
        let window = ConvGeometry { size: patch, stride: patch, pad: 0 };
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
    pub fn forward(&self, images: &Tensor, run: &ForwardOptions) -> Result<ClassifierOutput> {
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
        Ok(ClassifierOutput { logits: self.head.forward(&class)?, blocks })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Against torch.nn.functional.interpolate(mode="bicubic", align_corners=False) of PyTorch 2.15.
    #[test]
    fn positions_are_resized_as_pytorch_does() {
        let old: Vec<f32> = (0..9u8).map(|x| f32::from(x).powf(1.5)).collect();
        let stored = Tensor::from_vec([vec![77.0], old].concat(), (1, 10, 1), &Device::Cpu).unwrap();
        let of = |side| resized_positions(&stored, side).unwrap().unwrap().flatten_all().unwrap();
        let large = of(5).to_vec1::<f32>().unwrap();
        let expected = [
            77.0, -0.578206, -0.300322, 0.328, 1.427103, 2.189714, 1.175911, 1.798524, 2.958545, 4.474831,
            5.464264, 4.926983, 6.055062, 8.0, 10.148245, 11.485654, 11.043223, 12.488291, 14.9424,
            17.551622, 19.156403, 15.232583, 16.828316, 19.530209, 22.380566, 24.129171,
        ];
        assert!(large.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-4), "{large:?}");
        let small = of(2).to_vec1::<f32>().unwrap();
        let expected = [77.0, 1.080373, 3.890219, 13.416672, 19.56236];
        assert!(small.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-4), "{small:?}");
        assert!(resized_positions(&stored, 3).unwrap().is_none());
        let odd = Tensor::zeros((1, 8, 1), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(resized_positions(&odd, 3).unwrap().is_none(), "7 patches are no square");
    }
}
