//! ResNet with bottlenecks (`SPEC-vision.md` section 6). torchvision's names; the stride is in the 3 x 3 convolution.

use candle_core::{Result, Tensor};

use super::{ClassifierOutput, Dense, Flops, ForwardOptions};
use crate::nn::conv::{BatchNorm, Conv, max_pool, tokens};
use crate::nn::params::ParamBuilder;
use effattn_kernel::activation::relu;
use effattn_kernel::conv::ConvGeometry;
use effattn_record::pattern::Grid2d;

/// A ResNet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNetConfig {
    /// Side of the images.
    pub size: usize,
    /// Channels behind the first convolution.
    pub base: usize,
    /// Bottlenecks per stage.
    pub layers: Vec<usize>,
    /// Classes.
    pub classes: usize,
}

/// Outputs of a bottleneck per inner channel.
const EXPANSION: usize = 4;

const FIRST: ConvGeometry = ConvGeometry { size: 7, stride: 2, pad: 3 };
const POOL: ConvGeometry = ConvGeometry { size: 3, stride: 2, pad: 1 };
const POINT: ConvGeometry = ConvGeometry { size: 1, stride: 1, pad: 0 };

/// Inputs, inner channels, stride of one bottleneck.
type Shape = (usize, usize, usize);

impl ResNetConfig {
    /// ResNet-50.
    pub fn resnet_50(size: usize) -> Self {
        Self { size, base: 64, layers: vec![3, 4, 6, 3], classes: 1000 }
    }

    /// Every bottleneck with its stage and number.
    fn bottlenecks(&self) -> Vec<(usize, usize, Shape)> {
        let mut inputs = self.base;
        let mut all = Vec::new();
        for (stage, &count) in self.layers.iter().enumerate() {
            let inner = self.base << stage;
            for number in 0..count {
                let stride = if stage > 0 && number == 0 { 2 } else { 1 };
                all.push((stage, number, (inputs, inner, stride)));
                inputs = inner * EXPANSION;
            }
        }
        all
    }

    /// Cost of one forward of one image.
    pub fn flops(&self) -> Flops {
        let mut all = Flops::default();
        let mut conv = |window: ConvGeometry, grid: Grid2d, inputs: usize, outputs: usize| {
            let out = window.over(grid);
            let elements = (out.len() * outputs) as u64;
            let macs = elements * (window.size * window.size * inputs) as u64;
            all.add(Flops { macs, batch_norm: elements, ..Flops::default() });
            out
        };
        let image = Grid2d { rows: self.size, cols: self.size };
        let mut grid = POOL.over(conv(FIRST, image, 3, self.base));
        let mut width = self.base;
        for (_, number, (inputs, inner, stride)) in self.bottlenecks() {
            width = inner * EXPANSION;
            conv(POINT, grid, inputs, inner);
            let next = conv(ConvGeometry { size: 3, stride, pad: 1 }, grid, inner, inner);
            conv(POINT, next, inner, width);
            if number == 0 {
                conv(ConvGeometry { size: 1, stride, pad: 0 }, grid, inputs, width);
            }
            grid = next;
        }
        all.add(Flops { macs: (width * self.classes) as u64, ..Flops::default() });
        all
    }
}

/// A convolution without bias and its batch normalisation.
struct Step {
    conv: Conv,
    norm: BatchNorm,
}

impl Step {
    fn new(
        builder: &ParamBuilder,
        [conv, norm]: [&str; 2],
        channels: (usize, usize),
        window: ConvGeometry,
    ) -> Result<Self> {
        Ok(Self {
            conv: Conv::new(builder, conv, channels, window, false)?,
            norm: BatchNorm::new(&builder.pp(norm), channels.1)?,
        })
    }

    fn forward(&self, x: &Tensor, grid: Grid2d, train: bool) -> Result<(Tensor, Grid2d)> {
        let (x, grid) = self.conv.forward(x, grid)?;
        Ok((self.norm.forward(&x, train)?, grid))
    }
}

struct Bottleneck {
    steps: [Step; 3],
    shortcut: Option<Step>,
}

impl Bottleneck {
    fn new(builder: &ParamBuilder, first: bool, shape: Shape) -> Result<Self> {
        let (inputs, inner, stride) = shape;
        let step = |names, channels, window| Step::new(builder, names, channels, window);
        let across = ConvGeometry { size: 3, stride, pad: 1 };
        let past = ConvGeometry { size: 1, stride, pad: 0 };
        Ok(Self {
            steps: [
                step(["conv1", "bn1"], (inputs, inner), POINT)?,
                step(["conv2", "bn2"], (inner, inner), across)?,
                step(["conv3", "bn3"], (inner, inner * EXPANSION), POINT)?,
            ],
            shortcut: first
                .then(|| step(["downsample.0", "downsample.1"], (inputs, inner * EXPANSION), past))
                .transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, grid: Grid2d, train: bool) -> Result<(Tensor, Grid2d)> {
        let [first, second, third] = &self.steps;
        let (y, _) = first.forward(x, grid, train)?;
        let (y, out) = second.forward(&relu(&y)?, grid, train)?;
        let (y, _) = third.forward(&relu(&y)?, out, train)?;
        let past = match &self.shortcut {
            Some(step) => step.forward(x, grid, train)?.0,
            None => x.clone(),
        };
        Ok((relu(&(y + past)?)?, out))
    }
}

/// Images to classes.
pub struct ResNet {
    first: Step,
    bottlenecks: Vec<Bottleneck>,
    head: Dense,
}

impl ResNet {
    /// Parameters and running statistics under torchvision's names.
    pub fn new(config: &ResNetConfig, builder: &ParamBuilder) -> Result<Self> {
        let first = Step::new(builder, ["conv1", "bn1"], (3, config.base), FIRST)?;
        let bottleneck = |(stage, number, shape): (usize, usize, Shape)| {
            Bottleneck::new(&builder.pp(format!("layer{}.{number}", stage + 1)), number == 0, shape)
        };
        let bottlenecks = config.bottlenecks().into_iter().map(bottleneck).collect::<Result<_>>()?;
        let width = (config.base << config.layers.len().saturating_sub(1)) * EXPANSION;
        Ok(Self { first, bottlenecks, head: Dense::new(builder, "fc", (width, config.classes))? })
    }

    /// `images` [b, 3, s, s] to logits and the outputs of all bottlenecks.
    pub fn forward(&self, images: &Tensor, run: &ForwardOptions) -> Result<ClassifierOutput> {
        let train = run.train;
        let (pixels, grid) = tokens(images)?;
        let (x, grid) = self.first.forward(&pixels, grid, train)?;
        let (mut x, mut grid) = max_pool(&relu(&x)?, grid)?;
        let mut blocks = Vec::new();
        for bottleneck in &self.bottlenecks {
            (x, grid) = bottleneck.forward(&x, grid, train)?;
            if run.keep {
                blocks.push((x.clone(), 0));
            }
        }
        Ok(ClassifierOutput { logits: self.head.forward(&x.mean(1)?)?, blocks })
    }
}
