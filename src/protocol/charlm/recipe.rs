//! Phases, batches and rates of Transformer-LS's character models (its appendix and launch scripts).

use serde::{Deserialize, Serialize};

use crate::train::optim::AdamW;
use crate::train::schedule::Schedule;

/// Symbols per segment of the last phase; the cache of the evaluation is four times as long.
pub const LAST_LEN: u64 = 8192;

/// One phase of training: it starts from the weights of the phase before with a fresh optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Symbols per segment, and cached positions where the mechanism has a cache.
    pub len: u64,
    /// Sequences per update.
    pub batch: u64,
    /// Updates.
    pub steps: u64,
    /// Updates until the rate is full.
    pub warmup: u64,
    pub rate: f64,
    /// Whether the phase before hands over its best weights, or its last.
    pub from_best: bool,
}

/// The phases of `preset` on `corpus`; a corpus without published ones is trained as enwik8 is.
pub fn phases(preset: &str, corpus: &str) -> [Phase; 3] {
    let large = preset == "charlm-large";
    let text8 = corpus == "text8";
    let rate = if text8 { 5e-4 } else { 2.5e-4 };
    let batches = match (large, text8) {
        (true, _) => [32, 64, 32],
        (_, true) => [32, 32, 16],
        _ => [32, 32, 32],
    };
    let phase = |index: usize, len, steps, warmup, from_best| Phase {
        len,
        batch: batches[index],
        steps,
        warmup,
        rate: rate / f64::from(1 << index),
        from_best,
    };
    [
        phase(0, 2048, 430_000, 10_000, false),
        phase(1, 4096, 50_000, 5000, large),
        phase(2, LAST_LEN, 50_000, 5000, true),
    ]
}

/// Updates between evaluations.
pub const EVERY: u64 = 1000;
/// Seed of the launch scripts.
pub const SEED: u64 = 2;

/// fairseq's Adam with decoupled decay.
pub fn optimizer(preset: &str) -> AdamW {
    let weight_decay = if preset == "charlm-large" { 0.1 } else { 0.01 };
    AdamW { beta2: 0.999, eps: 1e-8, weight_decay, clip: None }
}

impl Phase {
    /// Linear warm-up, then constant.
    pub fn schedule(&self) -> Schedule {
        Schedule::WarmupConstant { peak_lr: self.rate, warmup: self.warmup.max(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_phases_of_the_launch_scripts() {
        let presets = effattn_model::family::character_lm::FAMILY.names();
        assert_eq!(presets, ["charlm-small", "charlm-large"], "another preset needs phases of its own");
        let small = phases("charlm-small", "enwik8");
        assert_eq!(small.map(|phase| phase.len), [2048, 4096, 8192]);
        assert_eq!(small.map(|phase| phase.rate), [2.5e-4, 1.25e-4, 6.25e-5]);
        assert_eq!(small.map(|phase| phase.steps), [430_000, 50_000, 50_000]);
        assert_eq!(phases("charlm-small", "text8").map(|phase| phase.batch), [32, 32, 16]);
        assert_eq!(phases("charlm-large", "enwik8").map(|phase| phase.batch), [32, 64, 32]);
        // the small models' second phase starts from the last weights, whatever the corpus
        assert!(
            !phases("charlm-small", "text8")[1].from_best && phases("charlm-small", "text8")[2].from_best
        );
        assert_eq!((small[1].from_best, phases("charlm-large", "enwik8")[1].from_best), (false, true));
        assert!((small[0].schedule().at(9999).lr - 2.5e-4).abs() < 1e-12);
    }
}
