//! What a request for an image classifier means: the sizes of its backbone, what it costs, and the weights that fit it.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};

use super::net::{Built, ImageModel};
use super::presets::{Form, PRESETS, find};
use crate::attention::knobs::Knobs;
use crate::attention::ls2d;
use crate::batch::{Batch, ModelInput, SyntheticInput};
use crate::family::{Architecture, Model, ModelRequest, ResolveError, StageCost};
use crate::nn::params::ParamBuilder;
use crate::vision::Flops;
use crate::vision::cvt::{self, Cvt, CvtConfig};
use crate::vision::resnet::{ResNet, ResNetConfig};
use crate::vision::vil::{self, Vil, VilConfig};
use crate::vision::vit::{Vit, VitConfig, resized_positions};
use effattn_kernel::conv::ConvGeometry;
use effattn_kernel::device::rng::RngStream;
use effattn_record::config::unknown;

/// Windows of the three stages of CvT*-LS by side of the images: a fit (SPEC-vision section 5).
const CVT_WINDOWS: [(usize, [usize; 3]); 3] = [(448, [16, 8, 4]), (384, [12, 6, 3]), (0, [8, 4, 2])];
const CVT_SLOTS: [usize; 3] = [16, 16, 8];

/// A small CvT: a stage is kernel, stride, padding, width, heads, blocks.
fn small_cvt(size: usize, classes: usize) -> CvtConfig {
    let stage = |kernel, width, heads, depth| cvt::Stage {
        window: ConvGeometry { size: kernel, stride: 2, pad: kernel / 2 },
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
enum VisionConfig {
    Vil(VilConfig),
    Cvt(CvtConfig),
    Vit(VitConfig),
    ResNet(ResNetConfig),
}

/// A request, resolved.
#[derive(Clone, Debug)]
pub struct ImageClassifier {
    model: VisionConfig,
    size: usize,
    classes: usize,
    path: f64,
}

/// What a request for an image classifier means.
pub fn classifier(request: &ModelRequest) -> std::result::Result<ImageClassifier, ResolveError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset = find(request.preset)
        .ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    let (name, entry, knobs) = (preset.about.name, request.choice.entry, &request.choice.knobs);
    if let Some(word) = request.sizes.words().first() {
        return Err(ResolveError::Invalid(format!(
            "preset {name} has stages with sizes of their own; leave {word} out"
        )));
    }
    if !preset.models.contains(&entry.name) {
        let models = preset.models.join(" or ");
        return Err(ResolveError::Unsupported(format!(
            "preset {name} is built with {models}, not with {}",
            entry.name
        )));
    }
    let size = request.len.unwrap_or(preset.size);
    let classes = request.examples.map_or(preset.classes, |examples| examples.classes);
    let long_short = entry.name == ls2d::ENTRY.name;
    let model = match preset.form {
        Form::Vil(depth) => {
            let published = VilConfig::published(size, if size >= 384 { 8 } else { 7 }, depth);
            VisionConfig::Vil(with_knobs(VilConfig { classes, ..published }, knobs))
        }
        Form::SmallVil => VisionConfig::Vil(with_knobs(small_vil(size, classes), knobs)),
        Form::Cvt(depth) => {
            let windows = CVT_WINDOWS.iter().find(|(from, _)| size >= *from).map(|(_, windows)| *windows);
            let windows = windows.filter(|_| long_short).map(|windows| (windows, CVT_SLOTS));
            let published = CvtConfig::published(size, depth, None);
            VisionConfig::Cvt(long_short_stages(CvtConfig { classes, ..published }, windows, knobs))
        }
        Form::SmallCvt => {
            let windows = long_short.then_some(([4, 2, 2], [8, 8, 4]));
            VisionConfig::Cvt(long_short_stages(small_cvt(size, classes), windows, knobs))
        }
        Form::Vit { width, heads, depth } => {
            VisionConfig::Vit(VitConfig { size, patch: 16, width, heads, depth, classes })
        }
        Form::ResNet => VisionConfig::ResNet(ResNetConfig { classes, ..ResNetConfig::resnet_50(size) }),
    };
    Ok(ImageClassifier { model, size, classes, path: (preset.path)(size) })
}

fn with_knobs(config: VilConfig, knobs: &Knobs) -> VilConfig {
    let (w, r) = (knobs.get(&ls2d::W).unwrap_or(config.w), knobs.get(&ls2d::R).unwrap_or(config.r));
    VilConfig { w, r, dual_ln: knobs.get(&ls2d::DUAL_LN), ..config }
}

fn long_short_stages(
    mut config: CvtConfig,
    windows: Option<([usize; 3], [usize; 3])>,
    knobs: &Knobs,
) -> CvtConfig {
    let Some((w, r)) = windows else { return config };
    config.dual_ln = knobs.get(&ls2d::DUAL_LN);
    for (stage, (w, r)) in config.stages.iter_mut().zip(w.into_iter().zip(r)) {
        stage.long_short = Some((knobs.get(&ls2d::W).unwrap_or(w), knobs.get(&ls2d::R).unwrap_or(r)));
    }
    config
}

impl ImageClassifier {
    fn flops(&self) -> Flops {
        match &self.model {
            VisionConfig::Vil(config) => config.flops(),
            VisionConfig::Cvt(config) => config.flops(),
            VisionConfig::Vit(config) => config.flops(),
            VisionConfig::ResNet(config) => config.flops(),
        }
    }

    /// Makes `stored` weights of images of another size fit, where that is usual: the learned positions of ViT are resized.
    /// What was done, in words.
    pub fn fit(&self, stored: &mut HashMap<String, Tensor>) -> Result<Option<String>> {
        let (VisionConfig::Vit(config), Some(positions)) = (&self.model, stored.get_mut("pos_embed")) else {
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
    pub fn built(&self, builder: &ParamBuilder) -> Result<ImageModel> {
        let model = match &self.model {
            VisionConfig::Vil(config) => Built::Vil(Vil::new(config, builder)?),
            VisionConfig::Cvt(config) => Built::Cvt(Cvt::new(config, builder)?),
            VisionConfig::Vit(config) => Built::Vit(Vit::new(config, builder)?),
            VisionConfig::ResNet(config) => Built::ResNet(ResNet::new(config, builder)?),
        };
        Ok(ImageModel { model, path: self.path })
    }
}

/// Smallest side of an image, in patches or strides: below it a stage would have nothing left.
fn least(model: &VisionConfig) -> usize {
    match model {
        VisionConfig::Vil(config) => config.stages.iter().map(|stage| stage.patch).product(),
        VisionConfig::Vit(config) => config.patch,
        VisionConfig::Cvt(_) | VisionConfig::ResNet(_) => 8,
    }
}

impl Architecture for ImageClassifier {
    fn max_len(&self) -> usize {
        self.size
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        let (size, least) = (self.size, least(&self.model));
        if size < least || size > 4096 {
            return Err(ResolveError::Invalid(format!(
                "images of {size} x {size}: this model takes sides from {least} to 4096 (--len)"
            )));
        }
        if let VisionConfig::Vit(VitConfig { patch, .. }) = &self.model
            && !size.is_multiple_of(*patch)
        {
            return Err(ResolveError::Invalid(format!(
                "images of {size} x {size}: the side must be a multiple of {patch}"
            )));
        }
        let admits = match &self.model {
            VisionConfig::Vil(config) => config.validate(),
            VisionConfig::Cvt(config) => config.validate(),
            VisionConfig::Vit(_) | VisionConfig::ResNet(_) => Ok(()),
        };
        admits.map_err(ResolveError::Unsupported)
    }

    /// One line for the whole model; what it costs follows from the configuration, not from `len`.
    fn stages(&self, batch: usize, _: usize) -> Vec<StageCost> {
        let flops = self.flops();
        let core_macs = batch as u64 * flops.core;
        vec![StageCost { name: "model".to_owned(), flops: flops.total(false), core_macs, state_bytes: 0 }]
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(self.built(builder)?))
    }

    /// What the released recipes leave out (SPEC-vision section 8).
    fn decays(&self, name: &str) -> bool {
        let holds = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        match &self.model {
            VisionConfig::Vil(_) => !holds(&[
                "cls_token",
                "norm.weight",
                "norm.bias",
                "norm_embed",
                "head.bias",
                "relative_position",
            ]),
            VisionConfig::Cvt(_) | VisionConfig::Vit(_) | VisionConfig::ResNet(_) => {
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

    fn map_tensor_name(&self, name: &str) -> Option<String> {
        let name = name.strip_prefix("module.").unwrap_or(name);
        let useless = name.ends_with("num_batches_tracked") || name.ends_with("relative_position_index");
        (!useless).then(|| name.to_owned())
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let batches = (0..SyntheticInput::BATCHES).map(|number| {
            let mut stream = RngStream::new(wanted.seed, &format!("images/{number}"));
            let shape = (wanted.batch, 3, self.size, self.size);
            let pixels = stream.normal_tensor(shape, 0.0, 1.0, device)?;
            Ok(Batch { input: ModelInput::Pixels(pixels), labels: wanted.classes(self.classes, device)? })
        });
        batches.collect()
    }
}
