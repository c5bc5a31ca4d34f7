//! The presets of [`super::FAMILY`]: named backbones.

use crate::family::PresetInfo;

/// Depths of the second and third stage, or what a backbone is made of.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Vil([usize; 2]),
    Cvt([usize; 2]),
    Vit { width: usize, heads: usize, depth: usize },
    ResNet,
    SmallVil,
    SmallCvt,
}

/// A named backbone.
pub(super) struct VisionPreset {
    pub(super) about: PresetInfo,
    pub(super) form: Form,
    /// Mechanisms that make a model of it, the usual one first.
    pub(super) models: &'static [&'static str],
    /// Side of its images where nothing is said.
    pub(super) size: usize,
    pub(super) classes: usize,
    /// Highest rate of stochastic depth, by size of the images where the source says so.
    pub(super) path: fn(usize) -> f64,
}

const LS: &str = "Zhu et al. 2021, Table 5; docs/spec/SPEC-vision.md, sections 4 and 5";
const OTHERS: &str = "docs/spec/SPEC-vision.md, section 6";
const OURS: &str = "our choice, for images of 32 x 32";

const fn about(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    source: &'static str,
) -> PresetInfo {
    PresetInfo { name, title, description, source, tasks: Vec::new(), knobs: Vec::new() }
}

const VIL: &str = "Four stages; long-short attention with a relative bias in the first two, full attention in the last two. \
                   The length is the side of the images: 224 (window 7) or 384 (window 8).";
const CVT: &str = "Three stages of overlapping convolutions; queries, keys and values from separable convolutions. \
                   full: CvT; ls2d: CvT*-LS, whose windows grow with the images (224, 384, 448) and are a fit to the paper's \
                   parameters and FLOPs.";
const VIT: &str = "Patches of 16, a class token, learned positions.";

pub(super) static PRESETS: &[VisionPreset] = &[
    VisionPreset {
        about: about("vil-ls-medium", "ViL-LS-Medium: 22 blocks, d 96 to 768, 39.8 M parameters", VIL, LS),
        form: Form::Vil([4, 16]),
        models: &["ls2d"],
        size: 224,
        classes: 1000,
        path: |size| if size >= 384 { 0.2 } else { 0.3 },
    },
    VisionPreset {
        about: about("vil-ls-base", "ViL-LS-Base: 34 blocks, d 96 to 768, 55.8 M parameters", VIL, LS),
        form: Form::Vil([8, 24]),
        models: &["ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.5,
    },
    VisionPreset {
        about: about("cvt-13", "CvT-13 and CvT*-LS-13: 13 blocks, d 64 to 384, 20 M parameters", CVT, LS),
        form: Form::Cvt([2, 10]),
        models: &["full", "ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    VisionPreset {
        about: about("cvt-21", "CvT-21 and CvT*-LS-21: 21 blocks, d 64 to 384, 32 M parameters", CVT, LS),
        form: Form::Cvt([4, 16]),
        models: &["full", "ls2d"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    VisionPreset {
        about: about("deit-s", "DeiT-S: 12 blocks, d 384, 22 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 384, heads: 6, depth: 12 },
        models: &["full"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    VisionPreset {
        about: about("deit-b", "DeiT-B and ViT-B: 12 blocks, d 768, 86 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 768, heads: 12, depth: 12 },
        models: &["full"],
        size: 224,
        classes: 1000,
        path: |_| 0.1,
    },
    VisionPreset {
        about: about("vit-l", "ViT-L: 24 blocks, d 1024, 305 M parameters", VIT, OTHERS),
        form: Form::Vit { width: 1024, heads: 16, depth: 24 },
        models: &["full"],
        size: 384,
        classes: 1000,
        path: |_| 0.1,
    },
    VisionPreset {
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
    VisionPreset {
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
    VisionPreset {
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

pub(super) fn find(name: &str) -> Option<&'static VisionPreset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}
