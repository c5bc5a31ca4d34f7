//! How a word language model is trained: updates, blocks, rates (`docs/spec/SPEC-text.md` sections 3 and 10).

use crate::protocol::training::experiment::WeightChoice;
use crate::train::optim::{Nesterov, OptimizerConfig};
use crate::train::schedule::Schedule;

/// The protocol of one corpus.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    pub corpus: &'static str,
    /// The preset whose model it trains.
    pub preset: &'static str,
    /// Updates.
    pub steps: u64,
    /// Words per block, and of an evaluation window.
    pub len: u64,
    /// Blocks per update.
    pub batch: u64,
    /// Parts that an update is computed in.
    pub accumulate: u64,
    /// Highest rate.
    pub rate: f64,
    /// Updates of the warm-up.
    warmup: u64,
    /// Updates of the first cosine.
    cycle: u64,
    /// Rate at its end.
    min_rate: f64,
    /// Updates between evaluations.
    pub every: u64,
    /// Which weights are tested.
    pub select: WeightChoice,
    /// Whether it is a source's.
    pub published: bool,
    /// What differs from every source, in words; empty for a source's own.
    pub note: &'static str,
}

/// Words per update of `wikitext103` are those of the recipe that the paper names (Baevski and Auli: 3,072 words x 3 x 8
/// devices), the cosine's length that of a public script that bears the first author's name; the paper states the block, the
/// number of devices and of updates.
const RECIPES: &[Recipe] = &[
    Recipe {
        corpus: "wikitext103",
        preset: "wikitext103",
        steps: 150_000,
        len: 512,
        batch: 144, // 73,728 words
        accumulate: 24,
        rate: 1.0,
        warmup: 500,
        cycle: 60_000,
        min_rate: 1e-4,
        every: 1400, // an epoch
        select: WeightChoice::Best,
        published: true,
        note: "",
    },
    Recipe {
        corpus: "wikitext103-small",
        preset: "wikitext103-small",
        steps: 1500,
        len: 256,
        batch: 8,
        accumulate: 1,
        rate: 1.0,
        warmup: 100,
        cycle: 1400,
        min_rate: 0.0,
        every: 300,
        select: WeightChoice::Last,
        published: false,
        note: "small: trained on the test text (245,569 words), tested on the validation text; 4 layers, d 256",
    },
    Recipe { corpus: "sample-words", ..SHORT },
];

/// A training that takes minutes: of the sample, and of corpora that no source trains on.
const SHORT: Recipe = Recipe {
    corpus: "",
    preset: "wikitext103-small",
    steps: 300,
    len: 64,
    batch: 16,
    accumulate: 1,
    rate: 1.0,
    warmup: 30,
    cycle: 270,
    min_rate: 0.0,
    every: 60,
    select: WeightChoice::Last,
    published: false,
    note: "a corpus that no source trains on",
};

/// The recipe of `corpus`; of one that was registered at run time a short one.
pub fn find(corpus: &'static str) -> Recipe {
    let known = RECIPES.iter().find(|recipe| recipe.corpus == corpus);
    known.copied().unwrap_or(Recipe { corpus, ..SHORT })
}

impl Recipe {
    /// Words of an evaluation window that are only read: 400 of 512.
    pub fn context(len: u64) -> u64 {
        len * 400 / 512
    }

    /// Updates between evaluations of a run of `steps`: a short one has five at least, so that its curve is one.
    pub fn every_of(&self, steps: u64) -> u64 {
        self.every.min(steps.div_ceil(5)).max(1)
    }

    /// Optimizer and schedule over `steps` updates with rate `rate`: warm-up and cycle keep their shares of the run.
    pub fn training(&self, steps: u64, rate: f64) -> (OptimizerConfig, Schedule) {
        let share = |part: u64| (part as f64 * steps as f64 / self.steps as f64).round().max(1.0) as u64;
        let schedule = Schedule::CosineRestarts {
            peak_lr: rate,
            start_lr: 1e-7,
            min_lr: self.min_rate,
            warmup: share(self.warmup),
            cycle: share(self.cycle),
            growth: 2.0,
            shrink: 0.75,
        };
        (OptimizerConfig::Nesterov(Nesterov { momentum: 0.99, weight_decay: 0.0, clip: Some(0.1) }), schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_data as data;

    #[test]
    fn the_rates_of_the_script() {
        let (_, schedule) = find("wikitext103").training(150_000, 1.0);
        for (step, rate) in
            [(8000, 0.961_944), (60_499, 1e-4), (60_500, 0.75), (100_000, 0.566_753), (149_999, 0.113_399)]
        {
            assert!((schedule.at(step).lr - rate).abs() < 2e-6, "{step}: {}", schedule.at(step).lr);
        }
    }

    #[test]
    fn the_small_run_is_one_cosine_however_long() {
        for steps in [1500, 60] {
            let (_, schedule) = find("wikitext103-small").training(steps, 1.0);
            assert_eq!(schedule.at(steps / 15).lr, 1.0);
            assert!(schedule.at(steps - 1).lr < 4e-3 && schedule.at(steps / 2).lr > 0.4);
        }
    }

    #[test]
    fn every_corpus_of_words_has_a_recipe() {
        for set in data::TABLE.iter().filter(|set| set.words().is_some()) {
            assert!(RECIPES.iter().any(|recipe| recipe.corpus == set.name), "{}", set.name);
            let recipe = find(set.name);
            assert_eq!(recipe.batch % recipe.accumulate, 0);
            assert_eq!(recipe.published, set.words().unwrap().complete.is_some());
        }
        let registered = find("registered");
        assert_eq!((registered.corpus, registered.published, registered.steps), ("registered", false, 300));
        assert_eq!((Recipe::context(512), Recipe::context(256)), (400, 200));
    }
}
