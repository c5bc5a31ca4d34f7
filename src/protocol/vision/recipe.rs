//! How image models are trained and evaluated (`SPEC-vision.md` section 8).

use crate::train::optim::{AdamW, OptimizerConfig};
use crate::train::schedule::Schedule;
use effattn_data::images::augment::Augment;
use effattn_data::images::transform::Interpolation;
use effattn_record::config::unknown;

/// A protocol of training and evaluation.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Passes over the training images.
    pub epochs: u64,
    /// Images per update.
    pub batch: u64,
    /// Highest rate.
    pub rate: f64,
    /// Rate of the first step, as a share of the highest.
    start: f64,
    /// Rate at the end.
    least: f64,
    /// Passes until the highest rate.
    warmup: u64,
    decay: f64,
    /// Whether decay comes behind the update, as in ViL-LS's released code.
    late: bool,
    /// What is drawn of training images.
    pub augment: Augment,
    /// Share of the shorter side that evaluation keeps, and how it is resized.
    pub evaluated: (f64, Interpolation),
    /// What the source does and this does not, or that there is no source.
    pub gaps: &'static [&'static str],
}

const PRECISION: &str = "f32 (mixed precision)";
const NO_SOURCE: &str = "a recipe that no source prints for this model";

const VIL: Recipe = Recipe {
    epochs: 300,
    batch: 1024,
    rate: 8e-4,
    start: 0.002,
    least: 1e-6,
    warmup: 5,
    decay: 0.1,
    augment: Augment::IMAGENET,
    evaluated: (0.875, Interpolation::Bicubic),
    late: true,
    gaps: &[PRECISION],
};
/// Official CvT's, with ViL-LS's batch.
const CVT: Recipe = Recipe {
    rate: 2.5e-4,
    start: 4e-3,
    least: 1e-5,
    decay: 0.05,
    late: false,
    gaps: &[PRECISION, NO_SOURCE],
    ..VIL
};
const OTHERS: Recipe = Recipe { rate: 1e-3, start: 1e-3, ..CVT };
const SMALL: Recipe = Recipe {
    epochs: 20,
    batch: 128,
    rate: 1e-3,
    start: 0.01,
    least: 1e-6,
    warmup: 1,
    decay: 0.05,
    late: false,
    augment: Augment::SMALL,
    evaluated: (1.0, Interpolation::Bicubic),
    gaps: &["our small recipe: no source trains this model"],
};

/// The recipe of every preset.
const PRESETS: &[(&str, Recipe)] = &[
    ("vil-ls-small", SMALL),
    ("cvt-small", SMALL),
    ("vil-ls-medium", VIL),
    ("vil-ls-base", VIL),
    ("cvt-13", CVT),
    ("cvt-21", CVT),
    ("deit-s", OTHERS),
    ("deit-b", OTHERS),
    ("vit-l", OTHERS),
    ("resnet-50", OTHERS),
];

/// The recipe of `preset`.
pub fn find(preset: &str) -> Result<Recipe, String> {
    let found = PRESETS.iter().find(|(name, _)| *name == preset).map(|(_, recipe)| *recipe);
    found.ok_or_else(|| unknown("preset", preset, PRESETS.iter().map(|(name, _)| *name)))
}

impl Recipe {
    /// Updates for `images` training images.
    pub fn steps(&self, images: u64, batch: u64) -> u64 {
        (images / batch.max(1)).max(1) * self.epochs
    }

    /// Updates between evaluations of a run of `steps`.
    pub fn every_of(&self, steps: u64) -> u64 {
        (steps / self.epochs).max(steps / 50).max(1)
    }

    /// Optimizer and schedule over `steps` updates with rate `rate`: the warm-up keeps its share of the run.
    pub fn training(&self, steps: u64, rate: f64) -> (OptimizerConfig, Schedule) {
        let warmup = (steps * self.warmup / self.epochs).max(1);
        let optimizer = AdamW { beta2: 0.999, eps: 1e-8, weight_decay: self.decay, clip: None };
        let (start_lr, min_lr) = (self.start * rate, self.least);
        let optimizer =
            if self.late { OptimizerConfig::Late(optimizer) } else { OptimizerConfig::AdamW(optimizer) };
        (optimizer, Schedule::WarmupCosine { peak_lr: rate, start_lr, min_lr, warmup, steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::family::vision::FAMILY;

    #[test]
    fn every_preset_has_a_recipe() {
        assert!(FAMILY.names().iter().all(|preset| find(preset).is_ok()));
        assert!(find("cvt-14").err().unwrap().contains("did you mean cvt-13"));
    }

    #[test]
    fn the_rates_of_vil_ls() {
        let recipe = find("vil-ls-medium").unwrap();
        let steps = recipe.steps(1_281_167, 1024);
        assert_eq!(steps, 1251 * 300);
        let (optimizer, schedule) = recipe.training(steps, recipe.rate);
        let OptimizerConfig::Late(optimizer) = optimizer else { panic!("decay comes behind the update") };
        assert_eq!(optimizer.weight_decay, 0.1);
        assert!(matches!(find("cvt-13").unwrap().training(9, 1.0).0, OptimizerConfig::AdamW(_)));
        let warm = 5 * 1251;
        assert!((schedule.at(0).lr - 1.6e-6).abs() < 1e-12);
        assert!(
            (schedule.at(warm / 2).lr - 8e-4 * (0.002 + 0.998 * (warm / 2) as f64 / warm as f64)).abs()
                < 1e-12
        );
        // the cosine counts from the first step, not from the end of the warm-up
        assert!((schedule.at(steps / 2).lr - (1e-6 + (8e-4 - 1e-6) / 2.0)).abs() < 1e-9);
        assert!(schedule.at(warm).lr < 8e-4 && schedule.at(steps).lr < 1.1e-6);
    }
}
