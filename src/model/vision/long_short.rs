//! Long-short attention over a grid (`SPEC-vision.md` section 2): a window of the grid, slots that a dynamic projection
//! makes of all image tokens, and global tokens in front, in one softmax; DualLN; the released code's relative bias.

use candle_core::{D, Result, Tensor, bail};

use super::{Flops, Norm, merge, split};
use crate::kernel::norm::EPS;
use crate::kernel::window_2d::{Keys, Window2d, bias_rows, biased, key_side, window_2d};
use crate::nn::params::{Builder, Init};
use crate::pattern::Grid;

/// Sizes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongShort2dConfig {
    /// Rows and columns of the image tokens.
    pub grid: Grid,
    /// Side of a square of queries; 0: no window.
    pub w: usize,
    /// Slots per head; 0: none.
    pub r: usize,
    /// Global tokens in front.
    pub g: usize,
    /// Heads.
    pub heads: usize,
    /// Width of all heads.
    pub width: usize,
    /// Whether keys and values are normalised (DualLN).
    pub dual_ln: bool,
    /// Whether the window has a relative bias.
    pub rel_pos: bool,
}

/// Names of the parameters.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// LayerNorm of keys and values at positions.
    pub local: &'static str,
    /// LayerNorm of slots.
    pub global: &'static str,
    /// Table of the relative bias.
    pub bias: &'static str,
}

impl LongShort2dConfig {
    /// # Errors
    /// Settings that leave nothing to attend to, or a bias without a window.
    pub fn validate(&self) -> std::result::Result<(), String> {
        if self.grid.is_empty() {
            return Err("an image without tokens; choose a larger image".to_owned());
        }
        if self.w == 0 && self.r == 0 {
            return Err("w=0,r=0 leaves nothing to attend to; set w or r".to_owned());
        }
        if self.rel_pos && self.w < 2 {
            return Err(format!("a relative bias needs a window of 2 or more, not {}", self.w));
        }
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            return Err(format!("{} heads do not divide a width of {}", self.heads, self.width));
        }
        Ok(())
    }

    /// Cost for one image: the golden files' `macs` (the scores of the dynamic projection included) and DualLN.
    pub fn flops(&self) -> Flops {
        let (n, e, r, g) = (self.grid.len(), self.width, self.r, self.g);
        let up = |len: usize| len.div_ceil(self.w.max(1)) * self.w;
        let window = if self.w == 0 {
            0
        } else {
            2 * up(self.grid.rows) * up(self.grid.cols) * key_side(self.w).pow(2)
        };
        let macs = n * e * self.heads * r + 4 * n * r * e + window * e + g * (3 * n + 2 * g) * e;
        let norm = if self.dual_ln { 2 * (n + g) * e + 2 * r * e } else { 0 };
        Flops { macs: macs as u64, layer_norm: norm as u64, batch_norm: 0 }
    }
}

/// One attention layer without its projections.
pub struct LongShort2d {
    config: LongShort2dConfig,
    local: Option<Norm>,
    global: Option<Norm>,
    bias: Option<Tensor>,
}

impl LongShort2d {
    /// Parameters below `builder` as `names` says.
    ///
    /// # Errors
    /// A configuration that cannot be built, given parameters that do not fit.
    pub fn new(config: LongShort2dConfig, names: Names, builder: &Builder) -> Result<Self> {
        config.validate().map_err(candle_core::Error::msg)?;
        let norm = |name: &str, wanted: bool| {
            (config.dual_ln && wanted).then(|| Norm::new(builder, name, config.width, EPS)).transpose()
        };
        let table = [bias_rows(config.w.max(1)), config.heads];
        let bias =
            config.rel_pos.then(|| builder.param(names.bias, &table, Init::normal(0.02))).transpose()?;
        Ok(Self { config, local: norm(names.local, true)?, global: norm(names.global, config.r > 0)?, bias })
    }

    /// Results [b, h, g + n, d] of unscaled queries, keys and values [b, h, g + n, d], global tokens in front. `scores`
    /// [b, n, heads * slots] are what the dynamic projection says of the image tokens.
    ///
    /// # Errors
    /// Shapes that do not fit; slots without scores.
    pub fn forward(&self, [q, k, v]: [&Tensor; 3], scores: Option<&Tensor>) -> Result<Tensor> {
        let LongShort2dConfig { grid, w, r, g, heads, .. } = self.config;
        let (b, _, total, d) = q.dims4()?;
        let n = grid.len();
        if total != g + n {
            bail!("{total} tokens are not {g} global ones and a grid of {} x {}", grid.rows, grid.cols);
        }
        let q = (q / (d as f64).sqrt())?;
        let [k, v] = [self.normal(&self.local, k)?, self.normal(&self.local, v)?];
        let image = |x: &Tensor| x.narrow(2, g, n)?.contiguous();
        let (own_k, own_v) = (image(&k)?, image(&v)?);
        let (global_k, global_v) = (k.narrow(2, 0, g)?, v.narrow(2, 0, g)?);
        let slots = match (r, scores) {
            (0, _) => None,
            (_, None) => bail!("slots need the scores of the dynamic projection"),
            (_, Some(scores)) => {
                let p = scores.reshape((b, n, heads, r))?.permute((0, 2, 3, 1))?.contiguous()?; // [b, h, r, n]
                let p = p.broadcast_sub(&p.max_keepdim(D::Minus1)?.detach())?.exp()?;
                let p = p.broadcast_div(&p.sum_keepdim(D::Minus1)?)?;
                let slots = |x: &Tensor| self.normal(&self.global, &p.matmul(x)?);
                Some((slots(&own_k)?, slots(&own_v)?))
            }
        };
        let mut everywhere = Vec::new();
        everywhere.extend(slots.as_ref().map(|(k, v)| Keys { k, v }));
        if g > 0 {
            everywhere.push(Keys { k: &global_k, v: &global_v });
        }
        let call = Window2d { grid, w, bias: self.bias.as_ref(), everywhere };
        let out = window_2d(&image(&q)?, Keys { k: &own_k, v: &own_v }, &call)?;
        if g == 0 {
            return Ok(out);
        }
        // a global token reads what the image tokens have become
        let k = Tensor::cat(&[&global_k, &out], 2)?;
        let v = Tensor::cat(&[&global_v, &out], 2)?;
        let global = biased(&q.narrow(2, 0, g)?, Keys { k: &k, v: &v }, None)?;
        Tensor::cat(&[&global, &out], 2)
    }

    /// `x` [b, h, m, d] with its concatenated heads normalised.
    fn normal(&self, norm: &Option<Norm>, x: &Tensor) -> Result<Tensor> {
        match norm {
            Some(norm) => split(&norm.forward(&merge(x)?)?, self.config.heads),
            None => x.contiguous(),
        }
    }
}
