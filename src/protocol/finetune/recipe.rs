//! How a task is fine-tuned: RoBERTa's recipe, Longformer's for long inputs, and the small stand-in of this program.

use crate::protocol::training::experiment::WeightChoice;
use crate::train::optim::{AdamW, OptimizerConfig};
use crate::train::schedule::Schedule;
use effattn_data as data;
use effattn_data::DataError;

/// The protocol of one task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Most ids of an input.
    pub len: u64,
    /// Texts per update.
    pub batch: u64,
    /// Updates.
    pub steps: u64,
    /// Updates until the rate is full.
    pub warmup: u64,
    /// Highest rate.
    pub rate: f64,
    /// Which weights are tested.
    pub select: WeightChoice,
    /// Whether a source has it.
    pub published: bool,
}

/// Updates and warm-up of RoBERTa's recipe; Amazon's are of this program (one epoch, 6 %).
const PUBLISHED: &[(&str, u64, u64)] = &[
    ("qqp", 113_272, 28_318),
    ("sst-2", 20_935, 1256),
    ("mnli", 123_873, 7432),
    ("imdb", 7812, 469),
    ("amazon", 94_775, 5687),
];
/// Epochs of the small stand-in, and ids of an input; other tasks have five epochs of 128 ids.
const SMALL: &[(&str, u64, u64)] = &[("sst-2", 2, 128), ("imdb", 2, 256), ("qqp", 2, 128), ("mnli", 2, 128)];
/// The preset with the small stand-in.
pub const SMALL_PRESET: &str = "roberta-small";
/// Longest input of RoBERTa.
const SHORT: u64 = 512;
/// Texts per update, everywhere.
const BATCH: u64 = 32;

/// Six per cent.
const fn warmup(steps: u64) -> u64 {
    steps * 6 / 100
}

/// The recipe of `preset` for `task`, with inputs of `len` ids where something is said.
pub fn find(preset: &str, task: &str, len: Option<u64>) -> Result<Recipe, DataError> {
    let epoch = (data::text_task(task)?.1.train as u64 / BATCH).max(1);
    let base = Recipe {
        len: SHORT,
        batch: BATCH,
        steps: 10 * epoch,
        warmup: warmup(10 * epoch),
        rate: 1e-5,
        select: WeightChoice::Best,
        published: false,
    };
    if preset == SMALL_PRESET {
        let known = SMALL.iter().find(|(name, ..)| *name == task);
        let (epochs, len) = known.map_or((5, 128), |(_, epochs, len)| (*epochs, *len));
        let steps = epochs * epoch;
        return Ok(Recipe {
            len,
            steps,
            warmup: warmup(steps),
            rate: 3e-4,
            select: WeightChoice::Last,
            ..base
        });
    }
    if let ("imdb", Some(len)) = (task, len.filter(|len| *len > SHORT)) {
        // ten epochs of nine tenths of the reviews
        return Ok(Recipe { len, steps: 7030, warmup: 703, rate: 3e-5, published: true, ..base });
    }
    let known = PUBLISHED.iter().find(|(name, ..)| *name == task);
    Ok(known.map_or(base, |(_, steps, warmup)| Recipe {
        steps: *steps,
        warmup: *warmup,
        published: true,
        ..base
    }))
}

impl Recipe {
    /// Optimizer and schedule over `steps` updates with rate `rate`: the warm-up keeps its share of the run.
    pub fn training(&self, steps: u64, rate: f64) -> (OptimizerConfig, Schedule) {
        let adam = AdamW { beta2: 0.98, eps: 1e-6, weight_decay: 0.1, clip: None };
        let warmup = if steps == self.steps {
            self.warmup
        } else {
            (self.warmup as f64 / self.steps as f64 * steps as f64).round().max(1.0) as u64
        };
        let schedule = Schedule::Polynomial { peak_lr: rate, warmup, total: steps, power: 1.0, end_lr: 0.0 };
        (OptimizerConfig::Adam(adam), schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn robertas_recipe_has_its_updates_and_rates() {
        let sst = find("roberta-base", "sst-2", None).unwrap();
        assert_eq!(
            (sst.steps, sst.warmup, sst.len, sst.rate, sst.select),
            (20_935, 1256, 512, 1e-5, WeightChoice::Best)
        );
        let (_, schedule) = sst.training(sst.steps, sst.rate);
        assert_eq!((schedule.at(0).lr, schedule.at(1256).lr), (0.0, 1e-5));
        assert!(schedule.at(20_934).lr < 1e-9);
        let amazon = find("roberta-base", "amazon", None).unwrap();
        assert_eq!((amazon.steps, amazon.warmup), (94_775, 5687));
        let long = find("roberta-base", "imdb", Some(4096)).unwrap();
        assert_eq!((long.len, long.steps, long.rate), (4096, 7030, 3e-5));
    }

    #[test]
    fn the_small_stand_in_is_no_protocol_of_a_paper() {
        let presets = effattn_model::family::masked_lm::FAMILY.names();
        assert_eq!(
            presets.len(),
            3,
            "a preset beside RoBERTa's two and the small one needs a recipe: {presets:?}"
        );
        let small = |task| find("roberta-small", task, None).unwrap();
        assert_eq!(
            [small("sst-2").steps, small("qqp-sample").steps, small("imdb").steps],
            [4208, 1405, 1562]
        );
        assert_eq!((small("imdb").len, small("mnli-sample").len), (256, 128));
        assert!(!small("sst-2").published && small("sst-2").select == WeightChoice::Last);
        assert!(find("roberta-small", "sst2", None).unwrap_err().to_string().contains("did you mean sst-2"));
        let (_, short) = small("sst-2").training(100, 3e-4);
        assert_eq!(short.at(6).lr, 3e-4);
    }
}
