//! Bits per character of trained weights.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use effattn_model::evaluate::{bits_per_symbol, nats, overlap, stream};
use effattn_model::family::causal::CausalModel;

/// How a model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "evaluation", rename_all = "snake_case")]
pub enum Evaluation {
    /// Blocks with the cache carried along (the released code).
    Stream {
        /// Symbols per block.
        block: u64,
        /// Cached positions.
        cache: u64,
    },
    /// Windows that are encoded alone, of which the last symbols are scored (the paper).
    Overlap {
        /// Symbols per window.
        window: u64,
        /// Symbols that are scored of each.
        step: u64,
    },
}

impl Evaluation {
    /// The metric in rows.
    pub fn metric(&self) -> &'static str {
        match self {
            Self::Stream { .. } => "bpc_stream",
            Self::Overlap { .. } => "bpc_overlap",
        }
    }

    pub fn words(&self) -> String {
        match self {
            Self::Stream { block, cache } => format!("blocks of {block} with a cache of {cache}"),
            Self::Overlap { window, step } => format!("windows of {window}, the last {step} scored"),
        }
    }

    /// Positions that the model must have cached.
    pub fn cache(&self) -> u64 {
        match self {
            Self::Stream { cache, .. } => *cache,
            Self::Overlap { .. } => 0,
        }
    }

    /// Bits per character of `ids` over every symbol but the first; `progress` hears how many symbols are predicted.
    pub fn bpc(&self, model: &dyn CausalModel, ids: &[u32], mut progress: impl FnMut(usize)) -> Result<Bits> {
        let nll = match *self {
            Self::Stream { block, .. } => stream(model, ids, block as usize, &mut progress)?,
            Self::Overlap { window, step } => {
                overlap(model, ids, window as usize, step as usize, &mut progress)?
            }
        };
        let skipping = match *self {
            Self::Stream { block, .. } => bits_behind_first(&nll, block as usize),
            Self::Overlap { .. } => None,
        };
        Ok(Bits { every: bits_per_symbol(&nll), skipping })
    }
}

/// Bits per character.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bits {
    /// Over every symbol that has one in front.
    pub every: f64,
    /// Without the first symbol of every block, as the released script counts.
    pub skipping: Option<f64>,
}

/// Bits per symbol of `nll`, a loss per symbol, without the first of every `block` symbols.
fn bits_behind_first(nll: &[f32], block: usize) -> Option<f64> {
    let counted: Vec<f32> =
        nll.iter().enumerate().filter(|(at, _)| !at.is_multiple_of(block)).map(|(_, loss)| *loss).collect();
    (!counted.is_empty()).then(|| nats(&counted) / counted.len() as f64 / std::f64::consts::LN_2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_released_script_skips_the_first_symbol_of_every_block() {
        let ln2 = std::f32::consts::LN_2;
        let nll = [0.0, ln2, ln2, 7.0 * ln2, 2.0 * ln2, 2.0 * ln2, 7.0 * ln2];
        assert!((bits_behind_first(&nll, 3).unwrap() - 1.5).abs() < 1e-6);
        assert!((bits_per_symbol(&nll) - 20.0 / 6.0).abs() < 1e-6);
        assert_eq!(bits_behind_first(&[0.0, 1.0], 1), None);
    }
}
