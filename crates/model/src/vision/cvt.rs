//! CvT and CvT*-LS (`SPEC-vision.md` section 5): stages of overlapping convolutions and blocks whose queries, keys and
//! values come from separable convolutions with batch normalisation; a class token joins in the last stage.

use candle_core::{Result, Tensor};

use super::{ClassifierOutput, Dense, Depth, Flops, ForwardOptions, Mlp, output_layer};
use crate::attention::ls2d::{LongShort2d, LongShort2dConfig, Names};
use crate::attention::observe::note_full;
use crate::nn::conv::{BatchNorm, Conv, Depthwise, tokens};
use crate::nn::norm::Norm;
use crate::nn::params::{Init, ParamBuilder, ParamGroup};
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::conv::ConvGeometry;
use effattn_kernel::heads::{Qkv, split};
use effattn_kernel::linear::linear;
use effattn_kernel::norm::EPS;
use effattn_record::pattern::{Grid2d, Pattern};

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The embedding's convolution.
    pub window: ConvGeometry,
    /// Width.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Blocks.
    pub depth: usize,
    /// Window and slots of long-short attention; none: full attention.
    pub long_short: Option<(usize, usize)>,
}

/// A CvT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CvtConfig {
    /// Side of the images.
    pub size: usize,
    /// The stages; the class token joins in the last.
    pub stages: Vec<Stage>,
    /// Whether keys and values of long-short attention are normalised (DualLN).
    pub dual_ln: bool,
    /// Classes.
    pub classes: usize,
}

impl CvtConfig {
    /// The published models: `depth` blocks in the second and third stage, with long-short attention where `windows`
    /// (one per stage) are given.
    pub fn published(size: usize, depth: [usize; 2], windows: Option<[usize; 3]>) -> Self {
        let stage = |index: usize, size, stride, pad, width, heads, depth| Stage {
            window: ConvGeometry { size, stride, pad },
            width,
            heads,
            depth,
            long_short: windows.map(|w| (w[index], [16, 16, 8][index])),
        };
        let stages = vec![
            stage(0, 7, 4, 2, 64, 1, 1),
            stage(1, 3, 2, 1, 192, 3, depth[0]),
            stage(2, 3, 2, 1, 384, 6, depth[1]),
        ];
        Self { size, stages, dual_ln: true, classes: 1000 }
    }

    /// Every stage with its grid and its number of class tokens.
    fn places(&self) -> Vec<(Stage, Grid2d, usize)> {
        let mut grid = Grid2d { rows: self.size, cols: self.size };
        let last = self.stages.len().saturating_sub(1);
        let place = |(index, stage): (usize, &Stage)| {
            grid = stage.window.over(grid);
            (*stage, grid, usize::from(index == last))
        };
        self.stages.iter().enumerate().map(place).collect()
    }

    /// # Errors
    /// Stages that cannot attend.
    pub fn validate(&self) -> std::result::Result<(), String> {
        let attentions =
            self.places().into_iter().filter_map(|(stage, grid, g)| self.attention(&stage, grid, g));
        attentions.into_iter().try_for_each(|config| config.validate())
    }

    fn attention(&self, stage: &Stage, grid: Grid2d, g: usize) -> Option<LongShort2dConfig> {
        let (w, r) = stage.long_short?;
        let Stage { heads, width, .. } = *stage;
        Some(LongShort2dConfig { grid, w, r, g, heads, width, dual_ln: self.dual_ln, rel_pos: false })
    }

    /// Cost of one forward of one image.
    pub fn flops(&self) -> Flops {
        let (mut all, mut inputs) = (Flops::default(), 3);
        for (index, (stage, grid, g)) in self.places().into_iter().enumerate() {
            let (n, e) = (grid.len(), stage.width);
            let tokens = n + g;
            let taps = stage.window.size * stage.window.size;
            all.add(Flops {
                macs: (taps * inputs * e * n) as u64,
                layer_norm: (n * e) as u64,
                ..Flops::default()
            });
            // three separable convolutions, with a fourth for the dynamic projection
            let separable = if stage.long_short.is_some_and(|(_, r)| r > 0) { 4 } else { 3 };
            let projections = separable * 9 * e * n + 3 * e * e * n;
            let output = if index == 0 { 0 } else { tokens * e * e };
            let core = match self.attention(&stage, grid, g) {
                Some(config) => Flops::core(config.macs(), config.normed()),
                None => Flops::core((2 * tokens * tokens * e) as u64, 0),
            };
            let block = Flops {
                macs: (projections + output + 8 * tokens * e * e) as u64,
                layer_norm: (2 * tokens * e) as u64,
                batch_norm: (separable * n * e) as u64,
                core: 0,
            };
            for _ in 0..stage.depth {
                all.add(core);
                all.add(block);
            }
            inputs = e;
        }
        all.add(Flops {
            macs: (inputs * self.classes) as u64,
            layer_norm: inputs as u64,
            ..Flops::default()
        });
        all
    }
}

/// Depthwise convolution, batch normalisation, pointwise convolution.
struct Separable {
    depthwise: Depthwise,
    norm: BatchNorm,
    weight: Tensor,
    bias: Tensor,
}

impl Separable {
    fn new(builder: &ParamBuilder, (inputs, outputs): (usize, usize)) -> Result<Self> {
        Ok(Self {
            depthwise: Depthwise::new(builder, "depthwise", inputs)?,
            norm: BatchNorm::new(&builder.pp("bn"), inputs)?,
            weight: builder
                .param("pointwise.weight", &[outputs, inputs, 1, 1], Init::fan_in(inputs))?
                .flatten_from(1)?,
            bias: builder.param("pointwise.bias", &[outputs], Init::fan_in(inputs))?,
        })
    }

    fn forward(&self, x: &Tensor, grid: Grid2d, train: bool) -> Result<Tensor> {
        let x = self.norm.forward(&self.depthwise.forward(x, grid)?, train)?;
        linear(&x, &self.weight, Some(&self.bias))
    }
}

struct Block {
    norm: Norm,
    projections: [Separable; 3],
    long_short: Option<(LongShort2d, Option<Separable>)>,
    out: Option<ParamGroup>,
    mlp: Mlp,
    heads: usize,
    grid: Grid2d,
    g: usize,
    depth: Depth,
}

const NAMES: Names = Names { local: "dual_ln_full", global: "dual_ln_dp", bias: "rel_bias" };

impl Block {
    fn new(
        config: &CvtConfig,
        builder: &ParamBuilder,
        (index, stage, grid, g): (usize, &Stage, Grid2d, usize),
        depth: Depth,
    ) -> Result<Self> {
        let (Stage { width, heads, .. }, first) = (*stage, index == 0);
        let (half, other) = (builder.pp("0"), builder.pp("1"));
        let inner = half.pp("fn");
        let separable = |name: &str, outputs| Separable::new(&inner.pp(name), (width, outputs));
        let long_short = config.attention(stage, grid, g);
        let long_short = long_short
            .map(|config| -> Result<_> {
                let slots = heads * config.r;
                let scores = (slots > 0).then(|| separable("to_dynamic_projection", slots)).transpose()?;
                Ok((LongShort2d::new(config, NAMES, &inner)?, scores))
            })
            .transpose()?;
        Ok(Self {
            norm: Norm::new(&half, "norm", width, EPS)?,
            projections: [separable("to_q", width)?, separable("to_k", width)?, separable("to_v", width)?],
            long_short,
            out: (!first).then(|| output_layer(&inner, "to_out.0", width)).transpose()?,
            mlp: Mlp::new(&other, ["norm", "fn.net.0", "fn.net.3"], width, EPS)?,
            heads,
            grid,
            g,
            depth,
        })
    }

    fn forward(&self, x: &Tensor, run: &ForwardOptions) -> Result<Tensor> {
        self.depth.residual(x, run, |x| self.attend(x, run.train), (self.out.as_ref(), &self.mlp))
    }

    fn attend(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let normal = self.norm.forward(x)?;
        let (g, n) = (self.g, self.grid.len());
        let (class, image) = (normal.narrow(1, 0, g)?, normal.narrow(1, g, n)?.contiguous()?);
        // the class token bypasses the convolutions
        let project = |separable: &Separable| -> Result<Tensor> {
            let rows = separable.forward(&image, self.grid, train)?;
            let rows = if g > 0 { Tensor::cat(&[&class, &rows], 1)? } else { rows };
            split(&rows, self.heads)
        };
        let [q, k, v] = &self.projections;
        let (q, k, v) = (project(q)?, project(k)?, project(v)?);
        match &self.long_short {
            Some((attention, scores)) => {
                let scores =
                    scores.as_ref().map(|scores| scores.forward(&image, self.grid, train)).transpose()?;
                attention.forward([&q, &k, &v], scores.as_ref())
            }
            None => {
                let (_, _, tokens, head_dim) = q.dims4()?;
                let pattern = Pattern::full(tokens, tokens, false);
                let qkv = Qkv::separate(q, k, v);
                note_full(&qkv, (self.heads, head_dim))?;
                attend(&qkv, &Attend::plain(&pattern, None, head_dim))?.merged()
            }
        }
    }
}

struct BuiltStage {
    conv: Conv,
    norm: Norm,
    blocks: Vec<Block>,
}

/// Images to classes.
pub struct Cvt {
    stages: Vec<BuiltStage>,
    class_token: Tensor,
    norm: Norm,
    head: Dense,
}

impl Cvt {
    /// Parameters and running statistics under the backbone's public names.
    pub fn new(config: &CvtConfig, builder: &ParamBuilder) -> Result<Self> {
        let (mut stages, mut inputs, mut before) = (Vec::new(), 3, 0);
        let last = config.stages.len().saturating_sub(1);
        for (index, (stage, grid, g)) in config.places().into_iter().enumerate() {
            let embed = builder.pp(format!("stage{}_conv_embed", index + 1));
            let conv = Conv::new(&embed, "0", (inputs, stage.width), stage.window, true)?;
            let norm = Norm::new(&embed, "2", stage.width, EPS)?;
            let block = |number: usize| {
                let below = builder.pp(format!("stage{}_transformer.0.layers.{number}", index + 1));
                // stochastic depth is for the last stage only
                let depth = Depth::of(if index == last { number } else { 0 }, stage.depth);
                let depth = Depth { number: before + number, ..depth };
                Block::new(config, &below, (index, &stage, grid, g), depth)
            };
            let blocks = (0..stage.depth).map(block).collect::<Result<_>>()?;
            stages.push(BuiltStage { conv, norm, blocks });
            (inputs, before) = (stage.width, before + stage.depth);
        }
        Ok(Self {
            stages,
            class_token: builder.param("cls_token", &[1, 1, inputs], Init::normal(1.0))?,
            norm: Norm::new(builder, "mlp_head.0", inputs, EPS)?,
            head: Dense::new(builder, "mlp_head.1", (inputs, config.classes))?,
        })
    }

    /// `images` [b, 3, s, s] to logits and block outputs.
    pub fn forward(&self, images: &Tensor, run: &ForwardOptions) -> Result<ClassifierOutput> {
        let (mut x, mut grid) = tokens(images)?;
        let mut blocks = Vec::new();
        for (index, stage) in self.stages.iter().enumerate() {
            let (patches, next) = stage.conv.forward(&x, grid)?;
            (x, grid) = (stage.norm.forward(&patches)?, next);
            let g = usize::from(index + 1 == self.stages.len());
            if g > 0 {
                let class = self.class_token.broadcast_as((x.dim(0)?, 1, x.dim(2)?))?.contiguous()?;
                x = Tensor::cat(&[&class, &x], 1)?;
            }
            for block in &stage.blocks {
                x = block.forward(&x, run)?;
                if run.keep {
                    blocks.push((x.clone(), g));
                }
            }
        }
        let class = self.norm.forward(&x.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?)?;
        Ok(ClassifierOutput { logits: self.head.forward(&class)?, blocks })
    }
}
