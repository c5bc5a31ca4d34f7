//! Published language models, as data.

use super::Backbone;
use super::char_lm::{CharLmConfig, LmVariant, language_knobs};
use crate::attention::MechanismEntry;
use crate::attention::knobs::KnobError;

/// A named language model.
#[derive(Debug)]
pub struct CharLmPreset {
    /// Name on the command line and in suites.
    pub name: &'static str,
    /// What it is, in a line.
    pub title: &'static str,
    /// What it takes from its source and what it does not.
    pub description: &'static str,
    /// Where its values come from.
    pub source: &'static str,
    /// Sizes and options.
    pub backbone: Backbone,
    /// Inputs per segment and cached positions in the first training phase.
    pub block: usize,
}

const fn backbone(layers: usize, dropout: f64) -> Backbone {
    let mut backbone = Backbone::new(layers, 512, 8, 2048);
    backbone.bias = false;
    backbone.dropout = dropout;
    backbone
}

const DESCRIPTION: &str = "No biases in the attention, no absolute positions, no LayerNorm behind the last block, output tied \
                           to the embedding. ls runs with window 512, segments of 16 and rank 1, relative positions and \
                           raw projected inputs. Paper's form (pre-norm, nothing in front of a stream) unless the \
                           variant says compat=code. A mechanism without cached positions runs without a cache.";

/// Every language preset.
pub static TABLE: &[CharLmPreset] = &[
    CharLmPreset {
        name: "charlm-small",
        title: "Transformer-LS Table 4, small: 12 layers, d 512, 8 heads, FFN 2048",
        description: DESCRIPTION,
        source: "Transformer-LS, Table 4; its released code, folder autoregressive",
        backbone: backbone(12, 0.2),
        block: 2048,
    },
    CharLmPreset {
        name: "charlm-large",
        title: "Transformer-LS Table 4, large: 30 layers, d 512, 8 heads, FFN 2048",
        description: DESCRIPTION,
        source: "Transformer-LS, Table 4; its released code, folder autoregressive",
        backbone: backbone(30, 0.4),
        block: 2048,
    },
];

impl CharLmPreset {
    /// The preset called `name`.
    pub fn find(name: &str) -> Option<&'static Self> {
        TABLE.iter().find(|preset| preset.name == name)
    }

    /// The model of `entry` over `vocab` symbols, with `given` settings as on the command line. Block and cache
    /// are those of the first training phase.
    pub fn model<'a>(
        &self,
        entry: &'static MechanismEntry,
        given: impl IntoIterator<Item = (&'a str, &'a str)>,
        vocab: usize,
    ) -> Result<CharLmConfig, KnobError> {
        let knobs = language_knobs(entry, given)?;
        let form = LmVariant::of(entry, &knobs);
        let mem = if entry.support.memory { self.block } else { 0 };
        let backbone = self.backbone.clone();
        Ok(CharLmConfig { entry, knobs, backbone, vocab, block: self.block, mem, form })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::find;
    use crate::family::Architecture;

    #[test]
    fn the_published_models_have_their_exact_parameter_counts() {
        let cases = [
            ("charlm-small", "ls", 208, 44_294_448),
            ("charlm-small", "ls", 32, 44_204_160),
            ("charlm-large", "ls", 208, 110_576_064),
            ("charlm-small", "transformer-xl", 208, 41_068_752),
        ];
        for (preset, mechanism, vocab, parameters) in cases {
            let preset = CharLmPreset::find(preset).unwrap();
            for given in [vec![], vec![("compat", "code")]] {
                if mechanism != "ls" && !given.is_empty() {
                    continue;
                }
                let model = preset.model(find(mechanism).unwrap(), given, vocab).unwrap();
                assert_eq!(model.parameters().unwrap(), parameters, "{} {mechanism} {vocab}", preset.name);
            }
        }
    }
}
