//! What a finished run leaves for fine-tuning and for other programs: weights, configuration and tokenizer as Hugging Face
//! has them.

use std::path::Path;

use serde_json::{Value, json};

use crate::train::checkpoint::Checkpoint;
use crate::train::pretrained::{MODEL_KEY, TOKENIZER_KEY};
use effattn_data::tokenizer::Tokenizer;
use effattn_kernel::embedding::PADDING;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::roberta::RobertaConfig;
use effattn_record::file;

/// The file of the weights.
pub const WEIGHTS: &str = "model.safetensors";
/// The file of the configuration.
pub const CONFIG: &str = "config.json";
/// The file of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// Writes the three files into `folder`. Its weights come last: a folder that has them has everything.
pub fn write(
    folder: &Path,
    weights: &Checkpoint,
    (config, tokenizer): (&RobertaConfig, &Tokenizer),
) -> anyhow::Result<()> {
    file::write(&folder.join(TOKENIZER), tokenizer.json().as_bytes())?;
    let text = serde_json::to_string_pretty(&describe(config, tokenizer))?;
    file::write(&folder.join(CONFIG), format!("{text}\n").as_bytes())?;
    // also beside the tensors: other programs keep only the keys of config.json that they know
    let about = [(MODEL_KEY, mechanism(config)), (TOKENIZER_KEY, tokenizer.hash().to_owned())];
    let about = about.map(|(key, value)| (key.to_owned(), value));
    weights.export(&folder.join(WEIGHTS), about.into_iter().collect())?;
    Ok(())
}

/// The mechanism as on the command line, with every setting that is not the default: those too that the block length gave
/// (cosFormer's M), so that the model stays the same at other lengths.
fn mechanism(config: &RobertaConfig) -> String {
    let choice = MechanismChoice {
        entry: config.entry,
        knobs: config.knobs.clone(),
        variant: None,
        named: Vec::new(),
    };
    let given: Vec<String> = choice.given().iter().map(|(name, value)| format!("{name}={value}")).collect();
    let between = if given.is_empty() { "" } else { ":" };
    format!("{}{between}{}", config.entry.name, given.join(","))
}

/// `config.json`: Hugging Face's keys, and in `effattn` what it has none for: the mechanism, and the checksum of the
/// tokenizer.
fn describe(config: &RobertaConfig, tokenizer: &Tokenizer) -> Value {
    let (backbone, specials) = (&config.backbone, tokenizer.specials());
    json!({
        "architectures": ["RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": config.vocab,
        "hidden_size": backbone.width,
        "num_hidden_layers": backbone.layers,
        "num_attention_heads": backbone.heads,
        "intermediate_size": backbone.ffn,
        "hidden_act": "gelu",
        "hidden_dropout_prob": backbone.dropout,
        "attention_probs_dropout_prob": backbone.attention_dropout,
        "max_position_embeddings": config.positions + 2,
        "type_vocab_size": 1,
        "initializer_range": 0.02,
        "layer_norm_eps": config.eps,
        "bos_token_id": specials.start,
        "pad_token_id": PADDING,
        "eos_token_id": specials.end,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "effattn": { "model": mechanism(config), "tokenizer": tokenizer.hash(), "version": env!("CARGO_PKG_VERSION") },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::choose::choose;
    use effattn_model::family::{ModelRequest, SizeOverrides, masked_lm};

    #[test]
    fn the_mechanism_is_named_with_what_the_block_length_gave() {
        let named = |model: &str| {
            let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
            let sizes = SizeOverrides::default();
            let asked = ModelRequest { len: Some(64), ..ModelRequest::new("roberta-small", &choice, &sizes) };
            mechanism(&masked_lm::config(&asked).unwrap())
        };
        assert_eq!((named("full"), named("cosformer")), ("full".to_owned(), "cosformer:m=64".to_owned()));
        for name in [named("cosformer"), named("ls:w=16,r=2")] {
            assert_eq!(choose(&name.parse().unwrap()).unwrap().len(), 1, "{name} can be read again");
        }
    }
}
