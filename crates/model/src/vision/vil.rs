//! ViL-LS (`SPEC-vision.md` section 4): stages of patch embedding and pre-norm blocks; long-short attention in the first
//! stages, full attention with a relative bias in the last. Parameters under the released names.

use candle_core::{Result, Tensor};

use super::{ClassifierOutput, Dense, Depth, Flops, ForwardOptions, Mlp, output_layer, unpack};
use crate::attention::ls2d::{LongShort2d, LongShort2dConfig, Names};
use crate::nn::conv::{Conv, tokens};
use crate::nn::norm::Norm;
use crate::nn::params::{Init, ParamBuilder, ParamGroup};
use effattn_kernel::conv::ConvGeometry;
use effattn_kernel::heads::merge;
use effattn_kernel::window_2d::{Keys, biased, grid_bias};
use effattn_record::pattern::Grid2d;

/// Epsilon of every LayerNorm outside DualLN.
const EPS: f64 = 1e-6;

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Side of a patch.
    pub patch: usize,
    /// Width.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Blocks.
    pub depth: usize,
    /// Global tokens.
    pub global: usize,
    /// Slots and window of long-short attention, or full attention.
    pub long_short: bool,
}

/// A ViL-LS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VilConfig {
    /// Side of the images.
    pub size: usize,
    /// The stages.
    pub stages: Vec<Stage>,
    /// Side of a square of queries.
    pub w: usize,
    /// Slots per head.
    pub r: usize,
    /// Whether keys and values of long-short attention are normalised (DualLN).
    pub dual_ln: bool,
    /// Classes.
    pub classes: usize,
}

impl VilConfig {
    /// The published models: `depth` blocks in the second and third stage.
    pub fn published(size: usize, w: usize, depth: [usize; 2]) -> Self {
        let stage = |patch, width, heads, depth, global, long_short| Stage {
            patch,
            width,
            heads,
            depth,
            global,
            long_short,
        };
        let stages = vec![
            stage(4, 96, 3, 1, 1, true),
            stage(2, 192, 3, depth[0], 1, true),
            stage(2, 384, 6, depth[1], 1, false),
            stage(2, 768, 12, 1, 0, false),
        ];
        Self { size, stages, w, r: 8, dual_ln: true, classes: 1000 }
    }

    /// The grid of every stage.
    fn grids(&self) -> Vec<Grid2d> {
        let mut side = self.size;
        let next = |stage: &Stage| {
            side /= stage.patch.max(1);
            Grid2d { rows: side, cols: side }
        };
        self.stages.iter().map(next).collect()
    }

    /// # Errors
    /// Stages that cannot attend.
    pub fn validate(&self) -> std::result::Result<(), String> {
        let stages = self.stages.iter().zip(self.grids()).filter(|(stage, _)| stage.long_short);
        stages.map(|(stage, grid)| self.attention(stage, grid)).try_for_each(|config| config.validate())
    }

    fn attention(&self, stage: &Stage, grid: Grid2d) -> LongShort2dConfig {
        let Stage { width, heads, global, .. } = *stage;
        LongShort2dConfig {
            grid,
            w: self.w,
            r: self.r,
            g: global,
            heads,
            width,
            dual_ln: self.dual_ln,
            rel_pos: self.w > 1,
        }
    }

    /// Cost of one forward of one image.
    pub fn flops(&self) -> Flops {
        let (mut all, mut inputs) = (Flops::default(), 3);
        let mut last = (0, 0);
        for (stage, grid) in self.stages.iter().zip(self.grids()) {
            let (n, e) = (grid.len(), stage.width);
            let tokens = n + stage.global;
            all.add(Flops {
                macs: (stage.patch * stage.patch * inputs * e * n) as u64,
                layer_norm: (n * e) as u64,
                ..Flops::default()
            });
            let core = match stage.long_short {
                true => Flops::core(self.attention(stage, grid).macs(), self.attention(stage, grid).normed()),
                false => Flops::core((2 * tokens * tokens * e) as u64, 0),
            };
            for _ in 0..stage.depth {
                all.add(core);
                all.add(Flops {
                    macs: (12 * tokens * e * e) as u64,
                    layer_norm: (2 * tokens * e) as u64,
                    ..Flops::default()
                });
            }
            (inputs, last) = (e, (tokens, e));
        }
        all.add(Flops {
            macs: (last.1 * self.classes) as u64,
            layer_norm: (last.0 * last.1) as u64,
            ..Flops::default()
        });
        all
    }
}

enum Core {
    LongShort { attention: LongShort2d, scores: Option<Dense> },
    Full { table: Tensor, global: Option<(Tensor, Tensor)>, grid: Grid2d },
}

struct Block {
    norm: Norm,
    qkv: Dense,
    out: ParamGroup,
    core: Core,
    heads: usize,
    global: usize,
    mlp: Mlp,
    depth: Depth,
}

const NAMES: Names =
    Names { local: "dual_ln_full", global: "dual_ln_dp", bias: "local_relative_position_bias_table" };

impl Block {
    fn new(
        config: &VilConfig,
        (stage, grid, depth): (&Stage, Grid2d, Depth),
        [attention, mlp]: [&ParamBuilder; 2],
    ) -> Result<Self> {
        let Stage { width, heads, global, .. } = *stage;
        let below = attention.pp("attn");
        let core = if stage.long_short {
            let scores = (config.r > 0)
                .then(|| Dense::new(&below, "to_dynamic_projection", (width, heads * config.r)))
                .transpose()?;
            let attention = LongShort2d::new(config.attention(stage, grid), NAMES, &below)?;
            Core::LongShort { attention, scores }
        } else {
            let rows = (2 * grid.rows - 1) * (2 * grid.cols - 1);
            let small = Init::normal(0.02);
            let table = below.param("local_relative_position_bias_table", &[rows, heads], small)?;
            let pair = || -> Result<_> {
                let lines = below.param("g2l_relative_position_bias", &[2, heads, global], small)?;
                Ok((lines, below.param("g2g_relative_position_bias", &[heads, global, global], small)?))
            };
            Core::Full { table, global: (global > 0).then(pair).transpose()?, grid }
        };
        Ok(Self {
            norm: Norm::new(attention, "norm", width, EPS)?,
            qkv: Dense::new(&below, "qkv", (width, 3 * width))?,
            out: output_layer(&below, "proj", width)?,
            core,
            heads,
            global,
            mlp: Mlp::new(mlp, ["norm", "mlp.fc1", "mlp.fc2"], width, EPS)?,
            depth,
        })
    }

    fn forward(&self, x: &Tensor, run: &ForwardOptions) -> Result<Tensor> {
        self.depth.residual(x, run, |x| self.attend(x), (Some(&self.out), &self.mlp))
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let normal = self.norm.forward(x)?;
        let [q, k, v] = unpack(self.qkv.forward(&normal)?, self.heads)?;
        match &self.core {
            Core::LongShort { attention, scores } => {
                let image = normal.narrow(1, self.global, normal.dim(1)? - self.global)?.contiguous()?;
                let scores = scores.as_ref().map(|scores| scores.forward(&image)).transpose()?;
                attention.forward([&q, &k, &v], scores.as_ref())
            }
            Core::Full { table, global, grid } => {
                let global = global.as_ref().map(|(lines, corner)| (lines, corner));
                merge(&full_2d([&q, &k, &v], table, global, *grid)?)
            }
        }
    }
}

/// Full attention with a relative bias (`SPEC-vision.md` section 3): [b, h, g + n, d] of unscaled queries, keys and
/// values, `table` [(2 rows - 1)(2 cols - 1), h]; `global` [2, h, g] (global query, global key) and [h, g, g].
pub fn full_2d(
    [q, k, v]: [&Tensor; 3],
    table: &Tensor,
    global: Option<(&Tensor, &Tensor)>,
    grid: Grid2d,
) -> Result<Tensor> {
    let d = q.dim(3)?;
    let image = grid_bias(table, grid)?;
    let bias = match global {
        None => image,
        Some((lines, corner)) => {
            let (h, g, n) = (lines.dim(1)?, lines.dim(2)?, grid.len());
            let to_image = lines.get(0)?.unsqueeze(2)?.broadcast_as((h, g, n))?;
            let to_global = lines.get(1)?.unsqueeze(1)?.broadcast_as((h, n, g))?;
            let above = Tensor::cat(&[corner, &to_image.contiguous()?], 2)?;
            Tensor::cat(&[&above, &Tensor::cat(&[&to_global.contiguous()?, &image], 2)?], 1)?
        }
    };
    biased(&(q / (d as f64).sqrt())?, Keys { k, v }, &bias)
}

struct BuiltStage {
    patches: Conv,
    norm: Norm,
    global: Option<Tensor>,
    blocks: Vec<Block>,
}

/// Images to classes.
pub struct Vil {
    stages: Vec<BuiltStage>,
    norm: Norm,
    head: Dense,
}

impl Vil {
    /// Parameters under the released names.
    pub fn new(config: &VilConfig, builder: &ParamBuilder) -> Result<Self> {
        let count = config.stages.iter().map(|stage| stage.depth).sum();
        let (mut stages, mut inputs, mut blocks_before) = (Vec::new(), 3, 0);
        for (index, (stage, grid)) in config.stages.iter().zip(config.grids()).enumerate() {
            let layer = builder.pp(format!("layer{}", index + 1));
            let first = layer.pp("0");
            let window = ConvGeometry { size: stage.patch, stride: stage.patch, pad: 0 };
            let patches = Conv::new(&first, "proj", (inputs, stage.width), window, true)?;
            let norm = Norm::new(&first, "norm_embed", stage.width, EPS)?;
            let shape = [1, stage.global, stage.width];
            let global = (stage.global > 0)
                .then(|| first.param("cls_token", &shape, Init::normal(0.02)))
                .transpose()?;
            let block = |b: usize| {
                let halves = [layer.pp(2 * b + 1), layer.pp(2 * b + 2)];
                let depth = Depth::of(blocks_before + b, count);
                Block::new(config, (stage, grid, depth), [&halves[0], &halves[1]])
            };
            let blocks = (0..stage.depth).map(block).collect::<Result<_>>()?;
            stages.push(BuiltStage { patches, norm, global, blocks });
            (inputs, blocks_before) = (stage.width, blocks_before + stage.depth);
        }
        let norm = Norm::new(builder, "norm", inputs, EPS)?;
        Ok(Self { stages, norm, head: Dense::new(builder, "head", (inputs, config.classes))? })
    }

    /// `images` [b, 3, s, s] to logits and block outputs.
    pub fn forward(&self, images: &Tensor, run: &ForwardOptions) -> Result<ClassifierOutput> {
        let (mut x, mut grid) = tokens(images)?;
        let (mut blocks, mut last) = (Vec::new(), 0);
        for stage in &self.stages {
            let (patches, next) = stage.patches.forward(&x, grid)?;
            (x, grid) = (stage.norm.forward(&patches)?, next);
            let mut front = 0;
            if let Some(global) = &stage.global {
                front = global.dim(1)?;
                let global = global.broadcast_as((x.dim(0)?, front, x.dim(2)?))?.contiguous()?;
                x = Tensor::cat(&[&global, &x], 1)?;
            }
            for block in &stage.blocks {
                x = block.forward(&x, run)?;
                if run.keep {
                    blocks.push((x.clone(), front));
                }
            }
            last = front;
            // the next stage has global tokens of its own
            if front > 0 && !std::ptr::eq(stage, self.stages.last().unwrap_or(stage)) {
                x = x.narrow(1, front, grid.len())?.contiguous()?;
            }
        }
        let normal = self.norm.forward(&x)?;
        let pooled = if last > 0 { normal.narrow(1, 0, 1)?.squeeze(1)? } else { normal.mean(1)? };
        Ok(ClassifierOutput { logits: self.head.forward(&pooled.contiguous()?)?, blocks })
    }
}
