//! Bits per character of trained weights.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::model::evaluate::{bits_per_symbol, overlap, stream};
use crate::model::lm::LanguageModel;

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

    /// In words.
    pub fn words(&self) -> String {
        match self {
            Self::Stream { block, cache } => format!("blocks of {block} behind a cache of {cache}"),
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

    /// Bits per character of `ids`; `progress` hears how many symbols are predicted.
    ///
    /// # Errors
    /// Lengths that the mechanism cannot take, failures of the device.
    pub fn bpc(&self, model: &LanguageModel, ids: &[u32], mut progress: impl FnMut(usize)) -> Result<f64> {
        let nll = match *self {
            Self::Stream { block, .. } => stream(model, ids, block as usize, &mut progress)?,
            Self::Overlap { window, step } => {
                overlap(model, ids, window as usize, step as usize, &mut progress)?
            }
        };
        Ok(bits_per_symbol(&nll))
    }
}
