//! How masked language models are trained (`docs/spec/SPEC-text.md` sections 6 and 10).

use crate::train::optim::{AdamW, OptimizerConfig};
use crate::train::schedule::Schedule;
use effattn_data::masked::BlockMode;
use effattn_data::tokenizer::VOCABULARY;

/// Evaluations of a run.
const EVALUATIONS: u64 = 20;

/// The protocol of a preset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    pub preset: &'static str,
    /// The text that it is trained on.
    pub task: &'static str,
    /// Words of a block.
    pub len: u64,
    /// Blocks per update.
    pub batch: u64,
    /// Micro-batches per update: logits of all hidden words of an update would not fit any memory.
    pub accumulate: u64,
    /// Updates.
    pub steps: u64,
    /// Updates until the rate is full.
    pub warmup: u64,
    /// Highest rate.
    pub rate: f64,
    /// How texts become blocks.
    pub cut: BlockMode,
    /// Whether the protocol belongs to a tokenizer of its own, which cannot be trained here.
    pub given_tokenizer: bool,
    /// Whether a paper's numbers belong to it.
    pub published: bool,
}

/// The protocols: `cos-mlm` and `cos-mlm-small` of the specification.
pub static RECIPES: &[Recipe] = &[
    Recipe {
        preset: "roberta-base",
        task: "wikitext-103",
        len: 512,
        batch: 512,
        accumulate: 64,
        steps: 50_000,
        warmup: 3000,
        rate: 3e-4,
        cut: BlockMode::Complete,
        given_tokenizer: true,
        published: true,
    },
    Recipe {
        preset: "roberta-small",
        task: "imdb",
        len: 128,
        batch: 8,
        accumulate: 1,
        steps: 25_000,
        warmup: 200,
        rate: 1e-3,
        cut: BlockMode::Stream,
        given_tokenizer: false,
        published: false,
    },
];

impl Recipe {
    /// The protocol of `preset`.
    pub fn find(preset: &str) -> Result<&'static Self, String> {
        let known = || RECIPES.iter().map(|recipe| recipe.preset);
        let found = RECIPES.iter().find(|recipe| recipe.preset == preset);
        found.ok_or_else(|| {
            effattn_record::config::unknown("preset of masked language models", preset, known())
        })
    }

    /// fairseq's Adam, which every parameter's decay belongs to, and a linear way up and down.
    pub fn training(&self, steps: u64, rate: f64) -> (OptimizerConfig, Schedule) {
        let optimizer = AdamW { beta2: 0.98, eps: 1e-6, weight_decay: 0.01, clip: None };
        let warmup = self.warmup_of(steps);
        let schedule = Schedule::Polynomial { peak_lr: rate, warmup, total: steps, power: 1.0, end_lr: 0.0 };
        (OptimizerConfig::Adam(optimizer), schedule)
    }

    /// Updates until the rate is full in a run of `steps`: the protocol's, but no more than a tenth of a shorter run.
    pub fn warmup_of(&self, steps: u64) -> u64 {
        if steps == self.steps { self.warmup } else { self.warmup.min(steps / 10).max(1) }
    }

    /// Updates between evaluations in a run of `steps`.
    pub fn every_of(&self, steps: u64) -> u64 {
        (steps / EVALUATIONS).max(1)
    }

    /// Ids of a tokenizer that is trained on the text called `task`.
    pub fn vocabulary(task: &str) -> usize {
        if task == "sample" { 1024 } else { VOCABULARY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_update_has_rate_0_and_the_last_nearly() {
        let recipe = Recipe::find("roberta-base").unwrap();
        let (_, schedule) = recipe.training(recipe.steps, recipe.rate);
        assert_eq!(schedule.at(0).lr, 0.0);
        assert!((schedule.at(3000).lr - 3e-4).abs() < 1e-12);
        assert!(schedule.at(49_999).lr < 1e-8);
        assert_eq!((recipe.warmup_of(100), recipe.warmup_of(5), recipe.every_of(50_000)), (10, 1, 2500));
        let error = Recipe::find("roberta-bse").unwrap_err();
        assert!(error.contains("did you mean roberta-base"), "{error}");
    }
}
