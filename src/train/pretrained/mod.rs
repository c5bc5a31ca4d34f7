//! A pretrained encoder in the files of Hugging Face's RoBERTa: `config.json`, a tokenizer, `model.safetensors` or its parts
//! (`docs/spec/SPEC-text.md` section 5).

pub mod llama;
mod sizes;
#[cfg(test)]
pub(crate) mod tests;
mod weights;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use candle_core::{Result as Candle, Tensor};
use serde::Deserialize;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::warm_start;
use effattn_data::DataError;
use effattn_data::tokenizer::Tokenizer;
use effattn_kernel::embedding::PADDING;
use effattn_model::Backbone;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_model::attention::{entries, full};
use effattn_model::roberta::{RobertaConfig, Top};
pub use weights::{CALIBRATION, Weights};

/// Why a folder is no pretrained encoder, or none for this model.
#[derive(Debug, thiserror::Error)]
pub enum PretrainedError {
    /// A file or tensor of it.
    #[error("{}: {reason}", .path.display())]
    Unfit {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, what was expected.
        reason: String,
    },
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] DataError),
}

type Result<T> = std::result::Result<T, PretrainedError>;

fn unfit(path: &Path, reason: impl Into<String>) -> PretrainedError {
    PretrainedError::Unfit { path: path.to_owned(), reason: reason.into() }
}

/// Architectures that are read, by the names of `config.json`.
const ARCHITECTURES: [&str; 3] = ["RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaModel"];
/// What is read of `config.json`.
#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    /// Absent: as many as the weights have.
    type_vocab_size: Option<usize>,
    /// Hugging Face's own default.
    #[serde(default = "bare_eps")]
    layer_norm_eps: f64,
    #[serde(default = "usual_dropout")]
    hidden_dropout_prob: f64,
    #[serde(default = "usual_dropout")]
    attention_probs_dropout_prob: f64,
    effattn: Option<Own>,
}

/// What this program adds.
#[derive(Deserialize)]
struct Own {
    model: String,
    tokenizer: String,
}

fn bare_eps() -> f64 {
    1e-12
}

fn usual_dropout() -> f64 {
    0.1
}

/// A pretrained encoder in a folder; its weights are read by [`Self::weights`].
pub struct Pretrained {
    /// The folder.
    pub folder: PathBuf,
    /// Sizes and dropout.
    pub backbone: Backbone,
    /// Number of ids.
    pub vocab: usize,
    /// Words of the longest input.
    pub positions: usize,
    /// Token types that `config.json` states.
    types: Option<usize>,
    /// Epsilon of LayerNorm.
    pub eps: f64,
    /// The mechanism that it was trained with.
    pub attention: MechanismChoice,
    /// SHA-256 of the tokenizer it was trained with, where the folder says it.
    tokenizer: Option<String>,
}

impl Pretrained {
    /// Reads the description of the encoder in `folder`.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = effattn_record::file::read_to_string(&path).map_err(|error| {
            unfit(&path, format!("cannot be read ({error}); expected a folder with config.json, a tokenizer and model.safetensors"))
        })?;
        let json: Json = serde_json::from_str(&text).map_err(|error| unfit(&path, error.to_string()))?;
        let word = |key: &str, usual: &str| json[key].as_str().unwrap_or(usual).to_owned();
        let named = json["architectures"].as_array().into_iter().flatten().filter_map(Json::as_str);
        if let Some(other) = named.clone().find(|name| !ARCHITECTURES.contains(name)) {
            return Err(unfit(
                &path,
                format!(
                    "architecture {other:?} is not known; known are {}: only encoders of RoBERTa's form are read",
                    ARCHITECTURES.join(", ")
                ),
            ));
        }
        for (key, usual, wanted) in [
            ("model_type", if named.count() > 0 { "roberta" } else { "" }, "roberta"),
            ("hidden_act", "gelu", "gelu"),
            ("position_embedding_type", "absolute", "absolute"),
        ] {
            let found = word(key, usual);
            if found != wanted {
                return Err(unfit(&path, format!("{key} is {found:?}, and only {wanted:?} is known")));
            }
        }
        let pad = &json["pad_token_id"];
        if !pad.is_null() && pad.as_u64() != Some(PADDING.into()) {
            return Err(unfit(
                &path,
                format!(
                    "pad_token_id is {pad}, and only {PADDING} is read, as RoBERTa has it: positions begin in row {} of their table, \
                     the one behind it; give an encoder whose pad_token_id is {PADDING}",
                    PADDING + 1
                ),
            ));
        }
        let config: Config = serde_json::from_value(json).map_err(|error| unfit(&path, error.to_string()))?;
        let sizes = [
            ("hidden_size", config.hidden_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("intermediate_size", config.intermediate_size),
            ("max_position_embeddings", config.max_position_embeddings.saturating_sub(PADDING as usize + 1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, size)| !(1..1 << 24).contains(size)) {
            return Err(unfit(&path, format!("{key} is not a valid model size")));
        }
        let [width, layers, heads, ffn, positions] = sizes.map(|(_, size)| size);
        if !width.is_multiple_of(heads) {
            let reason = format!("hidden_size {width} does not divide among num_attention_heads {heads}");
            return Err(unfit(&path, reason));
        }
        let (attention, tokenizer) = match config.effattn.or_else(|| beside_tensors(folder)) {
            Some(own) => (own.model, Some(own.tokenizer)),
            None => (full::ENTRY.name.to_owned(), None),
        };
        let mut backbone = Backbone::new(layers, width, heads, ffn);
        backbone.dropout = config.hidden_dropout_prob;
        backbone.attention_dropout = config.attention_probs_dropout_prob;
        backbone.validate().map_err(|error| unfit(&path, error.to_string()))?;
        let attention = one(&attention).map_err(|reason| unfit(&path, reason))?;
        Ok(Self {
            folder: folder.to_owned(),
            backbone,
            vocab: config.vocab_size,
            positions,
            types: config.type_vocab_size,
            eps: config.layer_norm_eps,
            attention,
            tokenizer,
        })
    }

    /// The encoder in `folder`, or where that is a run folder the one of its cells that `choice` can start from: of the same
    /// mechanism if there is one, else of full attention.
    pub fn find(folder: &Path, choice: &MechanismChoice) -> Result<Option<Self>> {
        if !folder.join("cells").is_dir() {
            return Self::open(folder).map(Some);
        }
        let cells = std::fs::read_dir(folder.join("cells"));
        let cells = cells.map_err(|error| unfit(folder, format!("cannot be read ({error})")))?;
        let mut cells: Vec<PathBuf> = cells.filter_map(|entry| Some(entry.ok()?.path())).collect();
        cells.sort();
        let all = cells.iter().filter(|cell| cell.join("config.json").is_file()).map(|cell| Self::open(cell));
        let all = all.collect::<Result<Vec<_>>>()?;
        let (mut own, mut full) = (Vec::new(), Vec::new());
        for one in all {
            let trained = one.attention.entry.name;
            if trained == choice.entry.name {
                own.push(one);
            } else if trained == full::ENTRY.name {
                full.push(one);
            }
        }
        let same = own.iter().position(|one| one.attention.label() == choice.label());
        let mut fitting = if own.is_empty() { full } else { own };
        match (same, fitting.len()) {
            (Some(at), _) => Ok(Some(fitting.swap_remove(at))),
            (None, 0 | 1) => Ok(fitting.pop()),
            (None, count) => Err(unfit(
                folder,
                format!("{count} cells could start {}; name the folder of one of them", choice.label()),
            )),
        }
    }

    /// Makes sure that its weights mean something to `choice`.
    pub fn becomes(&self, choice: &MechanismChoice) -> Result<()> {
        let (here, there) = (choice.entry.name, self.attention.entry.name);
        if here == there || (there == full::ENTRY.name && choice.entry.in_models.fits_full_weights) {
            return Ok(());
        }
        let fit = entries().into_iter().filter(|entry| entry.in_models.fits_full_weights);
        let fit: Vec<&str> = fit.map(|entry| entry.name).collect();
        let reason = format!(
            "was trained with {there}; only weights of full attention can be converted (to {}), and {here} needs weights trained with it",
            fit.join(", ")
        );
        Err(unfit(&self.folder, reason))
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::load(&self.folder)?;
        let config = self.folder.join("config.json");
        // fewer words than rows are common: tables are padded to a round number, a small text gives few words
        if tokenizer.len() > self.vocab {
            let reason = format!(
                "vocab_size is {}, and the tokenizer next to it has {} words: the last of them have no row in the embedding; give \
                 the tokenizer that the weights were trained with",
                self.vocab,
                tokenizer.len()
            );
            return Err(unfit(&config, reason));
        }
        if let Some(hash) = &self.tokenizer {
            tokenizer.expect(hash, &config)?;
        }
        Ok(tokenizer)
    }

    /// What is to be said where the embedding has rows that no word of `tokenizer` has.
    pub fn padding(&self, tokenizer: &Tokenizer) -> Option<String> {
        let (rows, words) = (self.vocab, tokenizer.len());
        (words < rows).then(|| {
            format!(
                "{}: the embedding has {rows} rows and the tokenizer {words} words; the rest stays unused",
                self.folder.display()
            )
        })
    }

    /// `ids` [b, n] as far as the encoder has positions for them.
    pub fn known(&self, ids: &Tensor) -> Candle<Tensor> {
        ids.narrow(1, 0, ids.dim(1)?.min(self.positions))?.contiguous()
    }

    /// The files with weights.
    fn files(&self) -> Result<Vec<PathBuf>> {
        weight_files(&self.folder)
    }

    /// SHA-256 of description, tokenizer and weights.
    pub fn hash(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let own = ["config.json", "tokenizer.json", "vocab.json", "merges.txt"];
        let own = own.iter().map(|name| self.folder.join(name)).filter(|path| path.is_file());
        for path in own.chain(self.files()?) {
            let read = effattn_record::file::open(&path).and_then(|mut file| {
                hash.update(file.metadata()?.len().to_le_bytes());
                io::copy(&mut file, &mut hash)
            });
            read.map_err(|error| unfit(&path, format!("cannot be read ({error})")))?;
        }
        Ok(format!("{:x}", hash.finalize()))
    }

    /// Its weights under the names of `RobertaForMaskedLM`.
    pub fn weights(&self) -> Result<Weights<'_>> {
        let mut tensors = HashMap::new();
        for path in self.files()? {
            let (more, _) = warm_start::read(&path).map_err(|error| match error {
                warm_start::WarmStartError::Unfit { path, reason } => unfit(&path, reason),
                error => unfit(&path, error.to_string()),
            })?;
            for (name, tensor) in more {
                let Some(name) = public_name(&name) else { continue };
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(unfit(&path, format!("{name} occurs twice")));
                }
            }
        }
        self.compare_sizes(&tensors)?;
        Ok(Weights { of: self, tensors })
    }

    /// The model that the weights were trained in, with a head of one class.
    fn source(&self) -> RobertaConfig {
        RobertaConfig {
            entry: self.attention.entry,
            knobs: self.attention.knobs.clone(),
            backbone: self.backbone.clone(),
            vocab: self.vocab,
            positions: self.positions,
            eps: self.eps,
            top: Top::Classes(1),
        }
    }
}

/// Keys of the metadata of our own weights: what `config.json` says in `effattn`, which other programs may drop.
pub const MODEL_KEY: &str = "effattn.model";
/// The same for the checksum of the tokenizer.
pub const TOKENIZER_KEY: &str = "effattn.tokenizer";
/// Longest description of tensors that is looked at.
const LONGEST_HEADER: u64 = 16 << 20;

/// What this program adds, from the metadata of `model.safetensors` in `folder`.
fn beside_tensors(folder: &Path) -> Option<Own> {
    let mut file = effattn_record::file::open(&folder.join("model.safetensors")).ok()?;
    let mut len = [0; 8];
    io::Read::read_exact(&mut file, &mut len).ok()?;
    let len = u64::from_le_bytes(len);
    let mut header = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, len.min(LONGEST_HEADER)), &mut header).ok()?;
    let header: Json = serde_json::from_slice(&header).ok()?;
    let word = |key: &str| header["__metadata__"][key].as_str().map(str::to_owned);
    Some(Own { model: word(MODEL_KEY)?, tokenizer: word(TOKENIZER_KEY)? })
}

/// The files with weights in `folder`: `model.safetensors`, or those of its index.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let whole = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    if whole.is_file() {
        return Ok(vec![whole]);
    }
    if !index.is_file() {
        let other =
            ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"];
        let there = other.into_iter().find(|name| folder.join(name).is_file());
        let next = there.map_or_else(
            || "expected model.safetensors, or its parts with model.safetensors.index.json".to_owned(),
            |name| format!("there is {name}, which is not read; save the model with safe_serialization=True"),
        );
        return Err(unfit(folder, format!("has no weights: {next}")));
    }
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text =
        effattn_record::file::read_to_string(&index).map_err(|error| unfit(&index, error.to_string()))?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|error| unfit(&index, error.to_string()))?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    if names.is_empty() {
        return Err(unfit(&index, "weight_map is empty; it names the file of every tensor"));
    }
    if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
        return Err(unfit(&index, format!("{name:?} is not a file next to it")));
    }
    let count = names.len();
    let parts: Vec<PathBuf> = names.into_iter().map(|name| folder.join(name)).collect();
    let missing: Vec<&Path> = parts.iter().map(PathBuf::as_path).filter(|part| !part.is_file()).collect();
    if let Some(first) = missing.first() {
        let missing = missing.len();
        return Err(unfit(
            first,
            format!(
                "is missing: {} names {count} parts, and {missing} of them are not there",
                index.display()
            ),
        ));
    }
    Ok(parts)
}

/// The one mechanism that `text` names.
fn one(text: &str) -> std::result::Result<MechanismChoice, String> {
    let models = text.parse().map_err(|error: effattn_record::config::ParseError| error.to_string())?;
    let mut choices = choose(&models).map_err(|error| error.to_string())?;
    let choice = choices.pop().filter(|_| choices.is_empty());
    choice.ok_or_else(|| format!("{text:?} is not one mechanism"))
}

/// What a tensor of a checkpoint is called here; nothing for what the encoder has no use for.
fn public_name(name: &str) -> Option<String> {
    let whole = if name.starts_with("embeddings.") || name.starts_with("encoder.") {
        format!("roberta.{name}") // as RobertaModel alone writes them
    } else {
        name.to_owned()
    };
    let idle = ["roberta.embeddings.position_ids", "roberta.pooler.", "pooler.", "lm_head.decoder."];
    (!idle.iter().any(|idle| whole.starts_with(idle))).then_some(whole)
}
