//! What a finished run leaves for fine-tuning and for other programs: weights, configuration and tokenizer as Hugging Face
//! has them.

use std::path::Path;

use serde_json::{Value, json};

use crate::data::tokenizer::Tokenizer;
use crate::model::roberta::RobertaConfig;
use crate::nn::PADDING;
use crate::record::file;
use crate::train::checkpoint::Checkpoint;

/// The file of the weights.
pub const WEIGHTS: &str = "model.safetensors";
/// The file of the configuration.
pub const CONFIG: &str = "config.json";
/// The file of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// Writes the three files into `folder`. `model` is the mechanism with its knobs, as on the command line. Its weights come
/// last: a folder that has them has everything.
///
/// # Errors
/// A folder that cannot be written, a full disk.
pub fn write(
    folder: &Path,
    weights: &Checkpoint,
    (config, model, tokenizer): (&RobertaConfig, &str, &Tokenizer),
) -> anyhow::Result<()> {
    file::write(&folder.join(TOKENIZER), tokenizer.json().as_bytes())?;
    let text = serde_json::to_string_pretty(&describe(config, model, tokenizer))?;
    file::write(&folder.join(CONFIG), format!("{text}\n").as_bytes())?;
    weights.export(&folder.join(WEIGHTS), &[("model", model), ("tokenizer", tokenizer.hash())])?;
    Ok(())
}

/// `config.json`: Hugging Face's keys, and in `effattn` what it has none for: the mechanism, and the checksum of the
/// tokenizer.
fn describe(config: &RobertaConfig, model: &str, tokenizer: &Tokenizer) -> Value {
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
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": config.positions + 2,
        "type_vocab_size": 1,
        "initializer_range": 0.02,
        "layer_norm_eps": config.eps,
        "bos_token_id": specials.start,
        "pad_token_id": PADDING,
        "eos_token_id": specials.end,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "effattn": { "model": model, "tokenizer": tokenizer.hash(), "version": env!("CARGO_PKG_VERSION") },
    })
}
