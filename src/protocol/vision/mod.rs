//! `vision`: image classifiers trained and evaluated (Transformer-LS Tables 5 and 6, Figure 6; `SPEC-vision.md`).
//!
//! One worker trains one cell (backbone, mechanism, images, seed), or only evaluates stored weights (`--weights`). Images
//! are decoded and augmented on threads of their own while a step is computed.

pub mod loader;
pub mod plan;
pub mod recipe;
pub mod request;
mod stored_input;
pub mod test_only;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use effattn_model::family::vision;
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, TRAINING};
use effattn_record::config::settings::word;
use effattn_record::own_setting;

own_setting! {
    /// Evaluate these weights instead of training: a checkpoint, or safetensors with public tensor names
    pub WEIGHTS: String = "weights", "Evaluation", "FILE", word;
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&WEIGHTS.setting],
    settings: &[
        TRAINING,
        MACHINE,
        &[
            "preset",
            "timeout",
            "steps",
            "rate",
            "limit",
            "every",
            "accumulate",
            "weights",
            "also",
            "similarity",
            "allow_partial",
        ],
    ],
    help: &[
        ("len", "Side length of the images in pixels, instead of the preset's"),
        ("batch", "Batch size: images per step, instead of the recipe's"),
        ("limit", "Use at most N images per split"),
        ("allow_partial", "Accept incomplete data and skip damaged images; the rows are marked as such"),
    ],
    presets: || vision::FAMILY.names(),
    tasks: Some(Tasks { called: "Images", names: plan::names }),
    quick: Some(Quick {
        help: "Train a few steps on generated images, to try the command without data (not the paper's protocol)",
        said: "at most 160 steps on generated images of 16 x 16, unless flags say otherwise: says nothing about real images",
    }),
    metrics: &[
        Metric { name: "accuracy", title: "Top-1 accuracy", unit: "accuracy %", lower_is_better: false },
        Metric { name: "mce", title: "Mean corruption error", unit: "%, AlexNet 100", lower_is_better: true },
        Metric {
            name: "relative_mce",
            title: "Relative mean corruption error",
            unit: "%, AlexNet 100",
            lower_is_better: true,
        },
        Metric { name: "top5", title: "Top-5 accuracy", unit: "accuracy %", lower_is_better: false },
    ],
    needs_golden_check: true,
    ..ProtocolInfo::new(
        "vision",
        "Train and evaluate image classifiers (Transformer-LS, Tables 5 and 6, Figure 6)",
    )
};

pub struct Vision;

const EXAMPLES: &str = "\
Examples:
  # Generated images: less than a minute, no data needed
  effattn vision --quick
  # CIFAR-10, two mechanisms
  effattn vision --task cifar10 --model full,ls2d --data-dir ~/data
  # What a table of the paper would take on this machine
  effattn vision --suite ls-table5-small --dry-run
  # Evaluate public weights
  effattn vision --task imagenet --preset resnet-50 \\
      --weights resnet50.safetensors --data-dir ~/data
  # Corrupted images and other test-only sets
  effattn vision --task imagenet-c,imagenet-a --preset resnet-50 \\
      --weights resnet50.safetensors --data-dir ~/data
  effattn vision --task cifar10 --also cifar10-c --data-dir ~/data
  # ImageNet's validation images by other labels, and new images of its classes
  effattn vision --task imagenet-real,imagenet-v2 --preset resnet-50 \\
      --weights resnet50.safetensors --data-dir ~/data
  # Image folders, one per class, with the memory of an eighth of a batch
  effattn vision --task folder --preset cvt-13 --batch 64 --accumulate 8 \\
      --data-dir ~/photos

imagenet-c, imagenet-a, imagenet-r, imagenet-9, imagenet-real, imagenet-v2, cifar10-c and folder-c are for testing only: with --weights, or after training with --also. Weights are checkpoints of this program, or safetensors with the tensor names of timm, torchvision or the paper's release. A run that was stopped or killed resumes from its last checkpoint when the same command is given again, with bit-identical results. Accuracy is that of the evaluated images (val, or CIFAR-10's test batch) with the weights of the best evaluation, in percent.";
