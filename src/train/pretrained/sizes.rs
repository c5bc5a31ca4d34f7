//! The sizes that `config.json` states against the tensors of the weights beside it.

use std::collections::HashMap;

use candle_core::Tensor;

use super::weights::{POSITIONS, TYPES};
use super::{Pretrained, Result, unfit};

const WORDS: &str = "roberta.embeddings.word_embeddings.weight";
const LAYER: &str = "roberta.encoder.layer.";

impl Pretrained {
    /// Refuses a size of `config.json` that `tensors` do not have. A tensor that is missing or has no such dimension is named
    /// when the model is built.
    pub(super) fn compare_sizes(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let config = self.folder.join("config.json");
        let mut names: Vec<&String> = tensors.keys().collect();
        names.sort();
        let stated = |key: &'static str, stated: usize, name: &str, dim: usize| {
            let dims = tensors.get(name).map_or(&[][..], |tensor| tensor.dims());
            match dims.get(dim) {
                Some(found) if *found != stated => Err(unfit(
                    &config,
                    format!(
                        "{key} is {stated}, and {name} of the weights has shape {dims:?}: it should be {found}"
                    ),
                )),
                _ => Ok(()),
            }
        };
        stated("vocab_size", self.vocab, WORDS, 0)?;
        stated("hidden_size", self.backbone.width, WORDS, 1)?;
        stated("max_position_embeddings", self.positions + 2, POSITIONS, 0)?;
        if let Some(types) = self.types {
            stated("type_vocab_size", types, TYPES, 0)?;
        }
        for name in names.iter().filter(|name| name.ends_with(".intermediate.dense.weight")) {
            stated("intermediate_size", self.backbone.ffn, name, 0)?;
        }
        let number = |name: &str| name.strip_prefix(LAYER)?.split('.').next()?.parse::<usize>().ok();
        let last = names.iter().filter_map(|name| Some((number(name)?, *name))).max();
        match last.filter(|(number, _)| number.saturating_add(1) != self.backbone.layers) {
            Some((number, name)) => Err(unfit(
                &config,
                format!(
                    "num_hidden_layers is {}, and the weights have {}: {name} is of their last",
                    self.backbone.layers,
                    number.saturating_add(1)
                ),
            )),
            None => Ok(()),
        }
    }
}
