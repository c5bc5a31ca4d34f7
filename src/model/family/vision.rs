//! Images to classes: the models of [`crate::model::vision`] (Transformer-LS Tables 5 and 6, Figure 6).
//!
//! A preset is a backbone. Where it has two forms, the mechanism chooses: `cvt-13` with `full` is CvT-13, with `ls2d`
//! CvT*-LS-13. The length is the side of the images.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};

use super::{About, Asked, Family, Loss, Metric, Net, Resolved, SpecError, StageCost, Usual};
use crate::attention::knobs::Knobs;
use crate::config::unknown;
use crate::device::rng::Stream;
use crate::kernel::conv::Window;
use crate::kernel::loss::cross_entropy;
use crate::model::batch::{Batch, Input, InputKind, MadeUp};
use crate::model::vision::cvt::{self, Cvt, CvtConfig};
use crate::model::vision::resnet::{ResNet, ResNetConfig};
use crate::model::vision::vil::{self, Vil, VilConfig};
use crate::model::vision::vit::{Vit, VitConfig, resized_positions};
use crate::model::vision::{Classified, Flops, Run};
use crate::nn::dropout::Noise;
use crate::nn::params::Builder;

/// The table line.
pub static FAMILY: Family = Family {
    name: "vision",
    title: "images to classes",
    input: InputKind::Pixels,
    sample: "images",
    presets: || PRESETS.iter().map(|preset| preset.about.clone()).collect(),
    serves: |preset, _| find(preset).is_some(),
    usual_task: |_, _| None,
    usual: |preset| find(preset).map(|preset| Usual { models: preset.models[0], len: preset.size }),
    resolve: |asked| Ok(Box::new(classifier(asked)?)),
};

/// Depths of the second and third stage, or what a backbone is made of.
#[derive(Clone, Copy)]
enum Form {
    Vil([usize; 2]),
    Cvt([usize; 2]),
    Vit { width: usize, heads: usize, depth: usize },
    ResNet,
    SmallVil,
    SmallCvt,
}

/// A named backbone.
struct Preset {
    about: About,
    form: Form,
    /// Mechanisms that make a model of it, the usual one first.
    models: &'static [&'static str],
    /// Side of its images where nothing is said.
    size: usize,
    classes: usize,
    /// Highest rate of stochastic depth, by size of the images where the source says so.
    path: fn(usize) -> f64,
}

const LS: &str = "Zhu et al. 2021, Table 5; docs/spec/SPEC-vision.md, sections 4 and 5";
const OTHERS: &str = "docs/spec/SPEC-vision.md, section 6";
const OURS: &str = "our choice, for images of 32 x 32";

const fn about(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    source: &'static str,
) -> About {
    About { name, title, description, source, tasks: Vec::new(), knobs: Vec::new() }
}

const VIL: &str = "Four stages; long-short attention with a relative bias in the first two, full attention in the last two. \
                   The length is the side of the images: 224 (window 7) or 384 (window 8).";
const CVT: &str = "Three stages of overlapping convolutions; queries, keys and values from separable convolutions. \
                   full: CvT; ls2d: CvT*-LS, whose windows grow with the images (224, 384, 448) and are a fit to the paper's \
                   parameters and FLOPs.";
const VIT: &str = "Patches of 16, a class token, learned positions.";

static PRESETS: &[Preset] = &[
    Preset {
        about: about("vil-ls-medium", "ViL-LS-Medium: 22 blocks, d 96 to 768, 39.8 M parameters", VIL, LS),
        form: Form::Vil([4, 16]),
        models: &["ls2d"],
        size: 224,
        classes: 1000,
        path: |size| if size >= 384 { 0.2 } else { 0.3 },
    },
    Preset {
        about: about("vil-ls-base", "ViL-LS-Base: 34 blocks, d 96 to 768, 55.8 M parameters", VIL, LS),
        form: Form::Vil([8, 24]),
        models: &["ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.5,
    },
    Preset {
        about: about("cvt-13", "CvT-13 and CvT*-LS-13: 13 blocks, d 64 to 384, 20 M parameters", CVT, LS),
        form: Form::Cvt([2, 10]),
        models: &["full", "ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    Preset {
        about: about("cvt-21", "CvT-21 and CvT*-LS-21: 21 blocks, d 64 to 384, 32 M parameters", CVT, LS),
        form: Form::Cvt([4, 16]),
        models: &["full", "ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    Preset {
        about: about("deit-s", "DeiT-S: 12 blocks, d 384, 22 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 384, heads: 6, depth: 12 },
        models: &["full"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    Preset {
        about: about("deit-b", "DeiT-B and ViT-B: 12 blocks, d 768, 86 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 768, heads: 12, depth: 12 },
        models: &["full"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    Preset {
        about: about("vit-l", "ViT-L: 24 blocks, d 1024, 305 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 1024, heads: 16, depth: 24 },
        models: &["full"],
        size: 384,
        classes: 1000,
        path: |_| 0.1,
    },
    Preset {
        about: about(
            "resnet-50",
            "ResNet-50: 16 bottlenecks, 25.6 M parameters",
            "Convolutions only: it has no attention, and full is the only mechanism that it goes by.",
            OTHERS,
        ),
        form: Form::ResNet,
        models: &["full"],
        size: 224,
        classes: 1000,
        path: |_| 0.0,
    },
    Preset {
        about: about(
            "vil-ls-small",
            "ViL-LS for small images: 6 blocks, d 64 to 256",
            "Three stages on grids of 16, 8 and 4 at 32 x 32; long-short attention in the first two.",
            OURS,
        ),
        form: Form::SmallVil,
        models: &["ls2d"],
        size: 32,
        classes: 10,
        path: |_| 0.1,
    },
    Preset {
        about: about(
            "cvt-small",
            "CvT and CvT*-LS for small images: 6 blocks, d 64 to 256",
            "Three stages on grids of 16, 8 and 4 at 32 x 32. full: CvT; ls2d: CvT*-LS.",
            OURS,
        ),
        form: Form::SmallCvt,
        models: &["full", "ls2d"],
        size: 32,
        classes: 10,
        path: |_| 0.1,
    },
];

fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}

/// Windows of the three stages of CvT*-LS by side of the images: a fit (SPEC-vision section 5).
const CVT_WINDOWS: [(usize, [usize; 3]); 3] = [(448, [16, 8, 4]), (384, [12, 6, 3]), (0, [8, 4, 2])];
const CVT_SLOTS: [usize; 3] = [16, 16, 8];

/// A small CvT: a stage is kernel, stride, padding, width, heads, blocks.
fn small_cvt(size: usize, classes: usize) -> CvtConfig {
    let stage = |kernel, width, heads, depth| cvt::Stage {
        window: Window { size: kernel, stride: 2, pad: kernel / 2 },
        width,
        heads,
        depth,
        long_short: None,
    };
    let stages = vec![stage(5, 64, 1, 1), stage(3, 128, 2, 2), stage(3, 256, 4, 3)];
    CvtConfig { size, stages, dual_ln: true, classes }
}

fn small_vil(size: usize, classes: usize) -> VilConfig {
    let stage = |width, heads, depth, global, long_short| vil::Stage {
        patch: 2,
        width,
        heads,
        depth,
        global,
        long_short,
    };
    let stages = vec![stage(64, 2, 1, 1, true), stage(128, 4, 2, 1, true), stage(256, 8, 3, 0, false)];
    VilConfig { size, stages, w: 4, r: 8, dual_ln: true, classes }
}

/// A resolved model.
#[derive(Clone, Debug)]
enum Model {
    Vil(VilConfig),
    Cvt(CvtConfig),
    Vit(VitConfig),
    ResNet(ResNetConfig),
}

/// A request, resolved.
#[derive(Clone, Debug)]
pub struct ImageClassifier {
    model: Model,
    size: usize,
    classes: usize,
    path: f64,
}

/// What a request for an image classifier means.
///
/// # Errors
/// An unknown preset, a mechanism that it is not built with, images that are too small.
pub fn classifier(asked: &Asked) -> std::result::Result<ImageClassifier, SpecError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset =
        find(asked.preset).ok_or_else(|| SpecError::Wrong(unknown("preset", asked.preset, names)))?;
    let (name, entry, knobs) = (preset.about.name, asked.choice.entry, &asked.choice.knobs);
    if let Some(word) = asked.sizes.words().first() {
        return Err(SpecError::Wrong(format!(
            "preset {name} has stages with sizes of their own; leave {word} out"
        )));
    }
    if !preset.models.contains(&entry.name) {
        let models = preset.models.join(" or ");
        return Err(SpecError::Unsupported(format!(
            "preset {name} is built with {models}, not with {}",
            entry.name
        )));
    }
    let size = asked.len.unwrap_or(preset.size);
    let classes = asked.examples.map_or(preset.classes, |examples| examples.classes);
    let long_short = entry.name == "ls2d";
    let model = match preset.form {
        Form::Vil(depth) => {
            let published = VilConfig::published(size, if size >= 384 { 8 } else { 7 }, depth);
            Model::Vil(with_knobs(VilConfig { classes, ..published }, knobs))
        }
        Form::SmallVil => Model::Vil(with_knobs(small_vil(size, classes), knobs)),
        Form::Cvt(depth) => {
            let windows = CVT_WINDOWS.iter().find(|(from, _)| size >= *from).map(|(_, windows)| *windows);
            let windows = windows.filter(|_| long_short).map(|windows| (windows, CVT_SLOTS));
            let published = CvtConfig::published(size, depth, None);
            Model::Cvt(long_short_stages(CvtConfig { classes, ..published }, windows, knobs))
        }
        Form::SmallCvt => {
            let windows = long_short.then_some(([4, 2, 2], [8, 8, 4]));
            Model::Cvt(long_short_stages(small_cvt(size, classes), windows, knobs))
        }
        Form::Vit { width, heads, depth } => {
            Model::Vit(VitConfig { size, patch: 16, width, heads, depth, classes })
        }
        Form::ResNet => Model::ResNet(ResNetConfig { classes, ..ResNetConfig::resnet_50(size) }),
    };
    Ok(ImageClassifier { model, size, classes, path: (preset.path)(size) })
}

fn with_knobs(config: VilConfig, knobs: &Knobs) -> VilConfig {
    let (w, r) = (knobs.opt_int("w").unwrap_or(config.w), knobs.opt_int("r").unwrap_or(config.r));
    VilConfig { w, r, dual_ln: knobs.bool("dual_ln"), ..config }
}

fn long_short_stages(
    mut config: CvtConfig,
    windows: Option<([usize; 3], [usize; 3])>,
    knobs: &Knobs,
) -> CvtConfig {
    let Some((w, r)) = windows else { return config };
    config.dual_ln = knobs.bool("dual_ln");
    for (stage, (w, r)) in config.stages.iter_mut().zip(w.into_iter().zip(r)) {
        stage.long_short = Some((knobs.opt_int("w").unwrap_or(w), knobs.opt_int("r").unwrap_or(r)));
    }
    config
}

impl ImageClassifier {
    fn flops(&self) -> Flops {
        match &self.model {
            Model::Vil(config) => config.flops(),
            Model::Cvt(config) => config.flops(),
            Model::Vit(config) => config.flops(),
            Model::ResNet(config) => config.flops(),
        }
    }

    /// Makes `stored` weights of images of another size fit, where that is usual: the learned positions of ViT are resized.
    /// What was done, in words.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn fit(&self, stored: &mut HashMap<String, Tensor>) -> Result<Option<String>> {
        let (Model::Vit(config), Some(positions)) = (&self.model, stored.get_mut("pos_embed")) else {
            return Ok(None);
        };
        let Some(resized) = resized_positions(positions, config.size / config.patch)? else {
            return Ok(None);
        };
        let side = |positions: &Tensor| positions.dim(1).map(|tokens| tokens.saturating_sub(1).isqrt());
        let (from, to) = (side(positions)?, side(&resized)?);
        *positions = resized;
        Ok(Some(format!("position embedding resized from {from} x {from} to {to} x {to}")))
    }

    /// The model with its parameters, and what else it can be asked.
    ///
    /// # Errors
    /// A configuration that cannot be built, given parameters that do not fit.
    pub fn built(&self, builder: &Builder) -> Result<ImageNet> {
        let model = match &self.model {
            Model::Vil(config) => Built::Vil(Vil::new(config, builder)?),
            Model::Cvt(config) => Built::Cvt(Cvt::new(config, builder)?),
            Model::Vit(config) => Built::Vit(Vit::new(config, builder)?),
            Model::ResNet(config) => Built::ResNet(ResNet::new(config, builder)?),
        };
        Ok(ImageNet { model, path: self.path })
    }
}

/// Smallest side of an image, in patches or strides: below it a stage would have nothing left.
fn least(model: &Model) -> usize {
    match model {
        Model::Vil(config) => config.stages.iter().map(|stage| stage.patch).product(),
        Model::Vit(config) => config.patch,
        Model::Cvt(_) | Model::ResNet(_) => 8,
    }
}

impl Resolved for ImageClassifier {
    fn longest(&self) -> usize {
        self.size
    }

    fn validate(&self) -> std::result::Result<(), SpecError> {
        let (size, least) = (self.size, least(&self.model));
        if size < least || size > 4096 {
            return Err(SpecError::Wrong(format!(
                "images of {size} x {size}: this model takes sides from {least} to 4096 (--len)"
            )));
        }
        if let Model::Vit(VitConfig { patch, .. }) = &self.model
            && !size.is_multiple_of(*patch)
        {
            return Err(SpecError::Wrong(format!(
                "images of {size} x {size}: the side must be a multiple of {patch}"
            )));
        }
        let admits = match &self.model {
            Model::Vil(config) => config.validate(),
            Model::Cvt(config) => config.validate(),
            Model::Vit(_) | Model::ResNet(_) => Ok(()),
        };
        admits.map_err(SpecError::Unsupported)
    }

    /// One line for the whole model; what it costs follows from the configuration, not from `len`.
    fn stages(&self, batch: usize, _: usize) -> Vec<StageCost> {
        let flops = self.flops();
        let core_macs = batch as u64 * flops.core;
        vec![StageCost { name: "model".to_owned(), flops: flops.total(false), core_macs, state_bytes: 0 }]
    }

    fn build(&self, builder: &Builder) -> Result<Box<dyn Net>> {
        Ok(Box::new(self.built(builder)?))
    }

    /// What the released recipes leave out (SPEC-vision section 8).
    fn decays(&self, name: &str) -> bool {
        let holds = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        match &self.model {
            Model::Vil(_) => !holds(&[
                "cls_token",
                "norm.weight",
                "norm.bias",
                "norm_embed",
                "head.bias",
                "relative_position",
            ]),
            Model::Cvt(_) | Model::Vit(_) | Model::ResNet(_) => {
                let norm = holds(&[
                    "norm",
                    "bn",
                    "dual_ln",
                    "downsample.1",
                    "mlp_head.0",
                    "conv_embed.2",
                    "cls_token",
                    "pos_embed",
                ]);
                !norm && !name.ends_with(".bias")
            }
        }
    }

    fn own_name(&self, name: &str) -> Option<String> {
        let name = name.strip_prefix("module.").unwrap_or(name);
        let useless = name.ends_with("num_batches_tracked") || name.ends_with("relative_position_index");
        (!useless).then(|| name.to_owned())
    }

    fn made_up(&self, wanted: &MadeUp, device: &Device) -> Result<Vec<Batch>> {
        let batches = (0..MadeUp::BATCHES).map(|number| {
            let mut stream = Stream::new(wanted.seed, &format!("images/{number}"));
            let shape = (wanted.batch, 3, self.size, self.size);
            let pixels = stream.normal_tensor(shape, 0.0, 1.0, device)?;
            Ok(Batch { input: Input::Pixels(pixels), labels: wanted.classes(self.classes, device)? })
        });
        batches.collect()
    }
}

enum Built {
    Vil(Vil),
    Cvt(Cvt),
    Vit(Vit),
    ResNet(ResNet),
}

/// An image classifier with its parameters.
pub struct ImageNet {
    model: Built,
    path: f64,
}

impl ImageNet {
    /// Logits, and block outputs where `run` keeps them, of `images` [b, 3, s, s].
    ///
    /// # Errors
    /// Images of another size.
    pub fn classify(&self, images: &Tensor, run: &Run) -> Result<Classified> {
        match &self.model {
            Built::Vil(model) => model.forward(images, run),
            Built::Cvt(model) => model.forward(images, run),
            Built::Vit(model) => model.forward(images, run),
            Built::ResNet(model) => model.forward(images, run),
        }
    }
}

/// Cross entropy of every row of `logits` [b, classes] with `labels`: classes `[b]` (u32), or shares of classes
/// [b, classes].
fn losses(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    if labels.dtype() == DType::U32 {
        return cross_entropy(logits, labels);
    }
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (labels * log_sum.broadcast_sub(&shifted)?)?.sum(D::Minus1)
}

impl Net for ImageNet {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        Ok(self.classify(batch.pixels()?, &Run::INFER)?.logits)
    }

    fn loss(&mut self, batch: &Batch, noise: Noise) -> Result<Loss> {
        let run = Run { train: true, keep: false, path: Some((noise, self.path)) };
        let losses = losses(&self.classify(batch.pixels()?, &run)?.logits, &batch.labels)?;
        Ok(Loss { sum: losses.sum_all()?, count: losses.elem_count() as f64 })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let logits = self.forward(batch)?.detach();
        let rows = logits.to_vec2::<f32>()?;
        let labels = batch.labels.to_vec1::<u32>()?;
        let count = rows.len() as f64;
        let loss = f64::from(cross_entropy(&logits, &batch.labels)?.sum_all()?.to_scalar::<f32>()?);
        let within = |best: usize| {
            let right = rows.iter().zip(&labels).filter(|(row, label)| rank(row, **label as usize) < best);
            right.count() as f64
        };
        Ok(vec![
            Metric { name: "loss", sum: loss, count },
            Metric { name: "accuracy", sum: within(1), count },
            Metric { name: "top5", sum: within(5), count },
        ])
    }
}

/// How many classes stand before `label`: those with a larger logit, and among equals those with a smaller number.
pub fn rank(logits: &[f32], label: usize) -> usize {
    let own = logits.get(label).copied().unwrap_or(f32::NEG_INFINITY);
    let before = |(class, logit): (usize, &f32)| *logit > own || (*logit == own && class < label);
    logits.iter().enumerate().filter(|&(class, logit)| before((class, logit))).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::choose::choose;
    use crate::model::family::Sizes;

    fn resolved(
        preset: &str,
        model: &str,
        len: Option<usize>,
    ) -> std::result::Result<ImageClassifier, SpecError> {
        let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
        let sizes = Sizes::default();
        let asked = Asked {
            preset,
            task: None,
            choice: &choice,
            sizes: &sizes,
            len,
            cached: None,
            vocab: None,
            examples: None,
        };
        let resolved = classifier(&asked)?;
        resolved.validate()?;
        Ok(resolved)
    }

    #[test]
    fn presets_are_the_rows_of_the_specification() {
        for (preset, model, len, parameters, flops) in [
            ("vil-ls-medium", "ls2d", None, 39_799_423, 8_721_554_496),
            ("vil-ls-medium", "ls2d", Some(384), 39_947_653, 28_742_795_328),
            ("vil-ls-base", "ls2d", None, 55_834_363, 13_394_931_264),
            ("cvt-13", "full", None, 20_006_184, 6_648_049_024),
            ("cvt-13", "ls2d", None, 20_279_160, 4_923_515_776),
            ("cvt-21", "ls2d", Some(384), 32_084_856, 23_834_532_736),
            ("cvt-21", "ls2d", Some(448), 32_084_856, 34_067_899_264),
            ("deit-s", "full", None, 22_050_664, 4_608_338_304),
            ("deit-b", "full", Some(384), 86_859_496, 55_539_742_464),
            ("vit-l", "full", None, 304_715_752, 191_211_058_176),
            ("resnet-50", "full", None, 25_557_032, 4_111_412_224),
        ] {
            let model = resolved(preset, model, len).unwrap();
            let got = (model.parameters().unwrap(), Resolved::flops(&model, 0));
            assert_eq!(got, (parameters, flops), "{preset} {len:?}");
            assert!(model.core_macs(2, 0) < 2 * flops);
        }
    }

    #[test]
    fn what_a_preset_is_not_built_with_is_said() {
        let says = |preset, model, len| resolved(preset, model, len).unwrap_err().to_string();
        assert!(says("vil-ls-medium", "cosformer", None).contains("built with ls2d, not with cosformer"));
        assert!(says("deit-s", "full", Some(225)).contains("multiple of 16"));
        assert!(says("vil-ls-medium", "ls2d", Some(16)).contains("sides from 32"));
        assert!(says("cvt-13", "ls2d:w=0,r=0", None).contains("nothing to attend to"));
    }

    #[test]
    fn small_models_train_and_score() {
        for (preset, model) in [
            ("vil-ls-small", "ls2d"),
            ("cvt-small", "full"),
            ("cvt-small", "ls2d"),
            ("cvt-small", "ls2d:dual_ln=false"),
        ] {
            let model = resolved(preset, model, None).unwrap();
            let builder = Builder::seeded(1, &Device::Cpu, true);
            let mut net = model.build(&builder).unwrap();
            let params = builder.finish();
            let wanted = MadeUp { text: b"", batch: 2, len: 32, seed: 3 };
            let batch = model.made_up(&wanted, &Device::Cpu).unwrap().remove(0);
            let loss = net.loss(&batch, Noise::new(1)).unwrap();
            let grads = (loss.sum / loss.count).unwrap().backward().unwrap();
            for name in params.names() {
                let grad = params.grad(&grads, name).unwrap().sqr().unwrap().sum_all().unwrap();
                let zero = grad.to_scalar::<f32>().unwrap() == 0.0;
                // a shift of all scores changes no softmax over positions
                let idle =
                    name.ends_with("dynamic_projection.bias") || name.ends_with("projection.pointwise.bias");
                // the head reads the class token of the last block alone
                let last = name.starts_with("stage3_transformer.0.layers.2.0.fn.to_q.");
                assert!(!zero || idle || last, "{preset}: {name} has no gradient");
            }
            let metrics = net.metrics(&batch).unwrap();
            assert_eq!(
                metrics.iter().map(|metric| metric.name).collect::<Vec<_>>(),
                ["loss", "accuracy", "top5"]
            );
            assert!(metrics[2].sum >= metrics[1].sum);
        }
    }

    #[test]
    fn shares_of_one_class_are_that_class() {
        let logits = Tensor::new(&[[0.3f32, -1.0, 2.0], [0.0, 0.5, 0.1]], &Device::Cpu).unwrap();
        let hard = losses(&logits, &Tensor::new(&[2u32, 0], &Device::Cpu).unwrap()).unwrap();
        let shares = Tensor::new(&[[0f32, 0.0, 1.0], [1.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let soft = losses(&logits, &shares).unwrap().to_vec1::<f32>().unwrap();
        let hard = hard.to_vec1::<f32>().unwrap();
        assert!(hard.iter().zip(&soft).all(|(a, b)| (a - b).abs() < 1e-6), "{hard:?} {soft:?}");
    }

    #[test]
    fn weights_of_another_resolution_are_made_to_fit() {
        let small = resolved("deit-s", "full", None).unwrap();
        let mut stored = HashMap::new();
        let positions = Tensor::zeros((1, 197, 384), DType::F32, &Device::Cpu).unwrap();
        stored.insert("pos_embed".to_owned(), positions.clone());
        assert_eq!(small.fit(&mut stored).unwrap(), None);
        let large = resolved("deit-s", "full", Some(384)).unwrap();
        let said = large.fit(&mut stored).unwrap().unwrap();
        assert_eq!(said, "position embedding resized from 14 x 14 to 24 x 24");
        assert_eq!(stored["pos_embed"].dims(), [1, 577, 384]);
    }

    #[test]
    fn ranks_count_what_stands_before() {
        assert_eq!([0, 1, 2].map(|label| rank(&[1.0, 3.0, 1.0], label)), [1, 0, 2]);
    }

    #[test]
    fn the_released_names_decay_as_in_the_released_code() {
        let vil = resolved("vil-ls-medium", "ls2d", None).unwrap();
        let decays = |name: &str| vil.decays(name);
        assert!(!decays("layer1.0.cls_token") && !decays("layer2.1.norm.weight") && !decays("head.bias"));
        assert!(!decays("layer1.1.attn.local_relative_position_bias_table") && !decays("norm.bias"));
        assert!(decays("layer1.1.attn.dual_ln_full.weight") && decays("layer1.1.attn.qkv.bias"));
        assert_eq!(vil.own_name("module.norm.weight").as_deref(), Some("norm.weight"));
        assert_eq!(vil.own_name("layer1.1.attn.relative_position_index"), None);
    }
}
