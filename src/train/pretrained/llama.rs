//! A pretrained Llama, Qwen2 or Mistral in the files of Hugging Face (`docs/spec/SPEC-llama.md`): `config.json` and
//! `model.safetensors` or its parts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde::Deserialize;
use serde_json::Value as Json;

use super::{Result, unfit, weight_files};
use crate::train::warm_start::{self, WarmStartError};
use effattn_model::Backbone;
use effattn_model::attention::MechanismEntry;
use effattn_model::attention::knobs::Knobs;
use effattn_model::family::llama::LlamaConfig;
use effattn_model::nn::ffn::FfnActivation;

/// Kinds of models that are read, by the names of `config.json`.
const MODEL_TYPES: [&str; 3] = ["llama", "qwen2", "mistral"];

/// What is read of `config.json`.
#[derive(Deserialize)]
struct Config {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    #[serde(default = "usual_eps")]
    rms_norm_eps: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "usual_act")]
    hidden_act: String,
    rope_theta: Option<f64>,
    rope_scaling: Option<Json>,
    rope_parameters: Option<RopeParameters>,
    sliding_window: Option<usize>,
    #[serde(default)]
    use_sliding_window: Option<bool>,
}

/// Since version 5 of the library.
#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

fn usual_eps() -> f64 {
    1e-6
}

fn usual_act() -> String {
    "silu".to_owned()
}

/// A pretrained model in a folder; its weights are read by [`Self::weights`].
pub struct LlamaFolder {
    folder: PathBuf,
    config: Config,
    theta: f64,
}

impl LlamaFolder {
    /// Reads the description of the model in `folder`.
    ///
    /// # Errors
    /// No `config.json`, another kind of model, scaled positions, biases that the model does not have.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = effattn_record::file::read_to_string(&path).map_err(|error| {
            unfit(
                &path,
                format!("cannot be read ({error}); expected a folder with config.json and model.safetensors"),
            )
        })?;
        let config: Config = serde_json::from_str(&text).map_err(|error| unfit(&path, error.to_string()))?;
        if !MODEL_TYPES.contains(&config.model_type.as_str()) {
            let known = MODEL_TYPES.join(", ");
            return Err(unfit(
                &path,
                format!("model_type {:?} is not known; known are {known}", config.model_type),
            ));
        }
        let rope = config.rope_parameters.as_ref();
        let kind = rope.and_then(|rope| rope.rope_type.as_deref()).unwrap_or("default");
        let sliding = config.sliding_window.is_some() && config.use_sliding_window.unwrap_or(true);
        let refused = [
            (config.hidden_act != "silu", "hidden_act is not silu"),
            (config.attention_bias, "attention_bias is true"),
            (config.mlp_bias, "mlp_bias is true"),
            (kind != "default" || config.rope_scaling.is_some(), "the rotary positions are scaled"),
            (sliding && config.model_type == "qwen2", "use_sliding_window is true"),
            (config.num_attention_heads == 0, "num_attention_heads is 0"),
        ];
        if let Some((_, what)) = refused.iter().find(|(refused, _)| *refused) {
            return Err(unfit(&path, format!("{what}; such a model is not implemented")));
        }
        let theta = rope.and_then(|rope| rope.rope_theta).or(config.rope_theta).unwrap_or(10_000.0);
        Ok(Self { folder: folder.to_owned(), config, theta })
    }

    /// Keys that a token sees with its own, where they are not all: the `w` of the mechanism `window`.
    pub fn window(&self) -> Option<usize> {
        self.config.sliding_window.filter(|_| self.config.model_type == "mistral")
    }

    /// The model around `entry` for inputs of up to `block` tokens.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn config(&self, entry: &'static MechanismEntry, knobs: Knobs, block: usize) -> Result<LlamaConfig> {
        let of = &self.config;
        let heads = of.num_attention_heads;
        let head_dim = of.head_dim.unwrap_or(of.hidden_size / heads);
        let config = LlamaConfig {
            entry,
            knobs,
            backbone: Backbone {
                inner: heads * head_dim,
                bias: of.model_type == "qwen2",
                activation: FfnActivation::SwiGlu,
                ..Backbone::new(of.num_hidden_layers, of.hidden_size, heads, of.intermediate_size)
            },
            kv_heads: of.num_key_value_heads.unwrap_or(heads),
            vocab: of.vocab_size,
            block,
            theta: self.theta,
            eps: of.rms_norm_eps,
            tied: of.tie_word_embeddings,
        };
        config.validate().map_err(|error| unfit(&self.folder.join("config.json"), error.to_string()))?;
        Ok(config)
    }

    /// Its weights in f32 under their own names, without those that `config` has no use for.
    ///
    /// # Errors
    /// Files that cannot be read, a tensor that two files have or that no model of this form has.
    pub fn weights(&self, config: &LlamaConfig) -> Result<HashMap<String, Tensor>> {
        let mut tensors = HashMap::new();
        for path in weight_files(&self.folder)? {
            let (more, _) = warm_start::read(&path).map_err(|error| match error {
                WarmStartError::Unfit { path, reason } => unfit(&path, reason),
                error => unfit(&path, error.to_string()),
            })?;
            for (name, tensor) in more {
                // old checkpoints have the frequencies, tied ones may have the embedding twice
                let idle = name.ends_with("rotary_emb.inv_freq") || config.tied && name == "lm_head.weight";
                if !idle && tensors.insert(name.clone(), tensor).is_some() {
                    return Err(unfit(&path, format!("{name} occurs twice")));
                }
            }
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use effattn_model::attention::full;
    use effattn_model::family::llama::Llama;
    use effattn_model::nn::params::ParamBuilder;

    fn shipped(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints").join(name)
    }

    /// The message for the shipped checkpoint after `change` of its description.
    fn refused(change: &dyn Fn(&mut Json)) -> String {
        let folder = tempfile::tempdir().unwrap();
        let shipped = shipped("tiny-checkpoint");
        let mut config: Json =
            serde_json::from_slice(&std::fs::read(shipped.join("config.json")).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        std::fs::copy(shipped.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let built = LlamaFolder::open(folder.path()).and_then(|opened| {
            let config = opened.config(&full::ENTRY, Knobs::defaults(full::ENTRY.knobs), 16)?;
            let weights = opened.weights(&config)?;
            let builder = ParamBuilder::given(weights, &Device::Cpu, false);
            Llama::new(&config, &builder).map_err(|error| unfit(folder.path(), error.to_string()))
        });
        built.err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn descriptions_of_other_models_are_refused_with_the_key() {
        assert_eq!(refused(&|_| ()), "");
        for (key, value, said) in [
            ("model_type", Json::from("gpt2"), "\"gpt2\" is not known; known are llama, qwen2, mistral"),
            ("attention_bias", Json::from(true), "attention_bias is true"),
            ("mlp_bias", Json::from(true), "mlp_bias is true"),
            ("hidden_act", Json::from("gelu"), "hidden_act is not silu"),
            ("rope_scaling", serde_json::json!({ "rope_type": "llama3" }), "positions are scaled"),
            ("rope_parameters", serde_json::json!({ "rope_type": "yarn" }), "positions are scaled"),
            ("num_attention_heads", Json::from(0), "num_attention_heads is 0"),
            ("num_key_value_heads", Json::from(3), "cannot share 3 heads"),
            ("tie_word_embeddings", Json::from(false), "lm_head.weight"),
            ("vocab_size", Json::from(65), "model.embed_tokens.weight"),
            ("intermediate_size", Json::from(63), "mlp.gate_proj.weight"),
            ("num_hidden_layers", Json::from(3), "model.layers.2."),
        ] {
            let error = refused(&|config| config[key] = value.clone());
            assert!(error.contains(said), "{key}: {error}");
        }
    }

    #[test]
    fn both_ways_to_write_the_base_of_the_angles_are_read() {
        let theta = |name: &str| LlamaFolder::open(&shipped(name)).unwrap().theta;
        assert_eq!([theta("tiny-checkpoint"), theta("tiny-checkpoint-bf16")], [10_000.0, 500_000.0]);
    }
}
