//! A pretrained encoder in the files of Hugging Face's RoBERTa (`config.json`, a tokenizer, `model.safetensors` or its parts),
//! and what becomes of its weights where a model reads longer inputs or attends otherwise (`docs/spec/SPEC-text.md` sections
//! 5 and 8).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result as Candle, Tensor};
use serde::Deserialize;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::warm_start;
use crate::attention::choose::{Choice, choose};
use crate::data::DataError;
use crate::data::tokenizer::Tokenizer;
use crate::kernel::linear::linear;
use crate::model::Backbone;
use crate::model::roberta::{Roberta, RobertaConfig, Top};
use crate::nn::PADDING;
use crate::nn::params::Builder;

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
/// Mechanisms that full attention's weights serve.
const FROM_FULL: [&str; 3] = ["window", "longformer", "ls"];
/// Batches that DualLN is calibrated on.
pub const CALIBRATION: usize = 64;

/// What is read of `config.json`.
#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    /// Hugging Face's own default.
    #[serde(default = "bare_eps")]
    layer_norm_eps: f64,
    #[serde(default = "usual_dropout")]
    hidden_dropout_prob: f64,
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
    /// Epsilon of LayerNorm.
    pub eps: f64,
    /// The mechanism that it was trained with.
    pub attention: Choice,
    /// SHA-256 of the tokenizer it was trained with, where the folder says it.
    tokenizer: Option<String>,
}

impl Pretrained {
    /// Reads the description of the encoder in `folder`.
    ///
    /// # Errors
    /// No `config.json`, another architecture, sizes that are missing.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = crate::record::file::read_to_string(&path).map_err(|error| {
            unfit(&path, format!("cannot be read ({error}); expected a folder with config.json, a tokenizer and model.safetensors"))
        })?;
        let json: Json = serde_json::from_str(&text).map_err(|error| unfit(&path, error.to_string()))?;
        let word = |key: &str, usual: &str| json[key].as_str().unwrap_or(usual).to_owned();
        let named = json["architectures"].as_array().into_iter().flatten().filter_map(Json::as_str);
        if let Some(other) = named.clone().find(|name| !ARCHITECTURES.contains(name)) {
            return Err(unfit(
                &path,
                format!("architecture {other:?} is not known; known are {}", ARCHITECTURES.join(", ")),
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
        let config: Config = serde_json::from_value(json).map_err(|error| unfit(&path, error.to_string()))?;
        let sizes = [
            ("hidden_size", config.hidden_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("intermediate_size", config.intermediate_size),
            ("max_position_embeddings", config.max_position_embeddings.saturating_sub(2)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, size)| !(1..1 << 24).contains(size)) {
            return Err(unfit(&path, format!("{key} is no size that a model has")));
        }
        let [width, layers, heads, ffn, positions] = sizes.map(|(_, size)| size);
        let (attention, tokenizer) = match config.effattn {
            Some(own) => (own.model, Some(own.tokenizer)),
            None => ("full".to_owned(), None),
        };
        let mut backbone = Backbone::new(layers, width, heads, ffn);
        backbone.dropout = config.hidden_dropout_prob;
        backbone.validate().map_err(|error| unfit(&path, error.to_string()))?;
        let attention = one(&attention).map_err(|reason| unfit(&path, reason))?;
        Ok(Self {
            folder: folder.to_owned(),
            backbone,
            vocab: config.vocab_size,
            positions,
            eps: config.layer_norm_eps,
            attention,
            tokenizer,
        })
    }

    /// The encoder in `folder`, or where that is a run folder the one of its cells that `choice` can start from: of the same
    /// mechanism if there is one, else of full attention.
    ///
    /// # Errors
    /// As [`Self::open`]; no such encoder, or several.
    pub fn find(folder: &Path, choice: &Choice) -> Result<Option<Self>> {
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
            match one.attention.entry.name {
                name if name == choice.entry.name => own.push(one),
                "full" => full.push(one),
                _ => {}
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
    ///
    /// # Errors
    /// Another mechanism's weights.
    pub fn becomes(&self, choice: &Choice) -> Result<()> {
        let (here, there) = (choice.entry.name, self.attention.entry.name);
        if here == there || (there == "full" && FROM_FULL.contains(&here)) {
            return Ok(());
        }
        let reason = format!(
            "was trained with {there}; only weights of full attention serve others ({}), and {here} starts from weights of its own",
            FROM_FULL.join(", ")
        );
        Err(unfit(&self.folder, reason))
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// A tokenizer that cannot be read, or that the encoder was not trained with.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::load(&self.folder)?;
        let config = self.folder.join("config.json");
        // where the checksum is known, a small text may have given fewer words than there is room for
        if tokenizer.len() > self.vocab || (tokenizer.len() < self.vocab && self.tokenizer.is_none()) {
            let reason = format!(
                "vocab_size is {} and the tokenizer beside it has {} words; give the tokenizer that it was trained with",
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

    /// `ids` [b, n] as far as the encoder has positions for them.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn known(&self, ids: &Tensor) -> Candle<Tensor> {
        ids.narrow(1, 0, ids.dim(1)?.min(self.positions))?.contiguous()
    }

    /// The files with weights.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let whole = self.folder.join("model.safetensors");
        let index = self.folder.join("model.safetensors.index.json");
        if whole.is_file() || !index.is_file() {
            return Ok(vec![whole]);
        }
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text =
            crate::record::file::read_to_string(&index).map_err(|error| unfit(&index, error.to_string()))?;
        let Index { weight_map } =
            serde_json::from_str(&text).map_err(|error| unfit(&index, error.to_string()))?;
        let names: BTreeSet<String> = weight_map.into_values().collect();
        if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
            return Err(unfit(&index, format!("{name:?} is no file beside it")));
        }
        Ok(names.into_iter().map(|name| self.folder.join(name)).collect())
    }

    /// SHA-256 of description, tokenizer and weights.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn hash(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let own = ["config.json", "tokenizer.json", "vocab.json", "merges.txt"];
        let own = own.iter().map(|name| self.folder.join(name)).filter(|path| path.is_file());
        for path in own.chain(self.files()?) {
            let read = crate::record::file::open(&path).and_then(|mut file| {
                hash.update(file.metadata()?.len().to_le_bytes());
                io::copy(&mut file, &mut hash)
            });
            read.map_err(|error| unfit(&path, format!("cannot be read ({error})")))?;
        }
        Ok(format!("{:x}", hash.finalize()))
    }

    /// Its weights under the names of `RobertaForMaskedLM`.
    ///
    /// # Errors
    /// Files that cannot be read, a tensor that two files have.
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
                    return Err(unfit(&path, format!("{name} stands twice")));
                }
            }
        }
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

/// The one mechanism that `text` names.
fn one(text: &str) -> std::result::Result<Choice, String> {
    let models = text.parse().map_err(|error: crate::config::SayError| error.to_string())?;
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

/// Weights on their way into a model.
pub struct Weights<'a> {
    of: &'a Pretrained,
    tensors: HashMap<String, Tensor>,
}

const POSITIONS: &str = "roberta.embeddings.position_embeddings.weight";
const TYPES: &str = "roberta.embeddings.token_type_embeddings.weight";

impl Weights<'_> {
    /// Starts DualLN of `target` where the weights have none, so that keys and values keep their usual size: weight, the
    /// mean over positions of the deviation across channels; bias, the mean of the mean; over keys and values together, in
    /// the model that the weights come from, on `batches` of ids [b, n]. Does nothing for other models.
    ///
    /// # Errors
    /// Failures of the device, ids that the encoder does not have.
    pub fn calibrate(
        &mut self,
        target: &RobertaConfig,
        batches: impl Iterator<Item = Candle<Tensor>>,
    ) -> Candle<()> {
        let norm = |layer: usize, name: &str| layer_name(layer, &format!("ls.{name}"));
        if !self.wants_calibration(target) {
            return Ok(());
        }
        let source =
            Roberta::new(&self.of.source(), &Builder::warm(0, self.tensors.clone(), &Device::Cpu, false))?;
        let mut sums = vec![(0.0, 0.0); self.of.backbone.layers];
        let mut count = 0.0;
        for ids in batches.take(CALIBRATION) {
            let ids = ids?.to_device(&Device::Cpu)?;
            let keep = ids.ne(PADDING)?.to_dtype(DType::F64)?;
            count += 2.0 * keep.sum_all()?.to_scalar::<f64>()?;
            let inputs = source.trace(&ids)?;
            for (layer, (sum, x)) in sums.iter_mut().zip(&inputs).enumerate() {
                for part in ["key", "value"] {
                    let tensor = |kind: &str| {
                        let name = layer_name(layer, &format!("{part}.{kind}"));
                        self.tensors
                            .get(&name)
                            .ok_or_else(|| candle_core::Error::Msg(format!("{name} is missing")))
                    };
                    let rows = linear(x, tensor("weight")?, Some(tensor("bias")?))?.to_dtype(DType::F64)?;
                    let mean = rows.mean_keepdim(2)?;
                    let deviation = rows.broadcast_sub(&mean)?.sqr()?.mean(2)?.sqrt()?;
                    let kept = |values: Tensor| (values * &keep)?.sum_all()?.to_scalar::<f64>();
                    sum.0 += kept(deviation)?;
                    sum.1 += kept(mean.squeeze(2)?)?;
                }
            }
        }
        for (layer, (deviation, mean)) in sums.into_iter().enumerate() {
            for name in ["ln_local", "ln_global"] {
                for (part, sum) in [("weight", deviation), ("bias", mean)] {
                    let value = (sum / f64::max(count, 1.0)) as f32;
                    let value = Tensor::full(value, self.of.backbone.inner, &Device::Cpu)?;
                    self.tensors.insert(norm(layer, &format!("{name}.{part}")), value);
                }
            }
        }
        Ok(())
    }

    /// Whether [`Self::calibrate`] has something to do.
    pub fn wants_calibration(&self, target: &RobertaConfig) -> bool {
        let dual = target.entry.name == "ls" && target.knobs.bool("dual_ln");
        dual && !self.tensors.contains_key(&layer_name(0, "ls.ln_local.weight"))
    }

    /// The weights as `target` takes them: positions repeated up to its length, global projections of Longformer copied.
    /// What they lack (the head of a classifier, the projection of `ls`) the model draws.
    ///
    /// # Errors
    /// A tensor that is missing, has another shape, or that the model has no place for.
    pub fn fit(mut self, target: &RobertaConfig) -> Result<HashMap<String, Tensor>> {
        let folder = &self.of.folder;
        let device = |error: candle_core::Error| unfit(folder, error.to_string());
        self.lengthen(target.positions).map_err(device)?;
        if !self.tensors.contains_key(TYPES) {
            // fairseq has none
            let zeros =
                Tensor::zeros((1, self.of.backbone.width), DType::F32, &Device::Cpu).map_err(device)?;
            self.tensors.insert(TYPES.to_owned(), zeros);
        }
        if (target.entry.needs)(&target.knobs).global {
            for layer in 0..self.of.backbone.layers {
                for (part, kind) in
                    ["query", "key", "value"].iter().flat_map(|part| [(part, "weight"), (part, "bias")])
                {
                    let own = self.tensors.get(&layer_name(layer, &format!("{part}.{kind}"))).cloned();
                    let name = layer_name(layer, &format!("{part}_global.{kind}"));
                    if let (Some(own), false) = (own, self.tensors.contains_key(&name)) {
                        self.tensors.insert(name, own);
                    }
                }
            }
        }
        self.check(target)?;
        Ok(self.tensors)
    }

    /// Row 2 + p of the positions is row 2 + (p modulo the old number); rows 0 and 1 stay.
    fn lengthen(&mut self, positions: usize) -> Candle<()> {
        let Some(table) = self.tensors.get(POSITIONS) else { return Ok(()) };
        let Ok((rows, _)) = table.dims2() else { return Ok(()) };
        if rows <= 2 || positions + 2 <= rows {
            return Ok(());
        }
        let old = rows - 2;
        let wanted = (0..positions + 2).map(|row| if row < 2 { row } else { 2 + (row - 2) % old } as u32);
        let wanted = Tensor::from_iter(wanted, &Device::Cpu)?;
        let longer = table.index_select(&wanted, 0)?;
        self.tensors.insert(POSITIONS.to_owned(), longer);
        Ok(())
    }

    /// Compares names and shapes with those of `target`.
    fn check(&self, target: &RobertaConfig) -> Result<()> {
        let folder = &self.of.folder;
        let builder = Builder::warm(0, self.tensors.clone(), &Device::Cpu, false);
        Roberta::new(target, &builder).map_err(|error| unfit(folder, error.to_string()))?;
        let params = builder.finish();
        let known: BTreeSet<&str> =
            params.names().chain(params.constants().keys().map(String::as_str)).collect();
        let own = format!("attention.self.{}.", target.entry.name);
        let trained = self.of.attention.entry.name == target.entry.name;
        let drawn = |name: &str| name.starts_with("classifier.") || (!trained && name.contains(&own));
        // random features belong to the weights that were trained with them
        let constants = params.constants().keys().map(String::as_str);
        if let Some(missing) = constants.filter(|_| trained).find(|name| !self.tensors.contains_key(*name)) {
            return Err(unfit(folder, format!("the weights have no tensor {missing}")));
        }
        if let Some(missing) = params.names().find(|name| !self.tensors.contains_key(*name) && !drawn(name)) {
            return Err(unfit(
                folder,
                format!("the weights have no tensor {missing}, which config.json asks for"),
            ));
        }
        let heads = |name: &str| name.starts_with("classifier.") || name.starts_with("lm_head.");
        let mut left: Vec<&String> =
            self.tensors.keys().filter(|name| !known.contains(name.as_str()) && !heads(name)).collect();
        left.sort();
        match left.first() {
            Some(name) => {
                Err(unfit(folder, format!("the tensor {name} has no place in the model of config.json")))
            }
            None => Ok(()),
        }
    }
}

fn layer_name(layer: usize, name: &str) -> String {
    format!("roberta.encoder.layer.{layer}.attention.self.{name}")
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;
    use crate::nn::dropout::Dropout;

    /// A small encoder of full attention for `positions` words.
    fn config(tokenizer: &Tokenizer, positions: usize) -> RobertaConfig {
        let attention = one("full").unwrap();
        let backbone = Backbone::new(2, 16, 2, 24);
        let (entry, knobs) = (attention.entry, attention.knobs);
        RobertaConfig {
            entry,
            knobs,
            backbone,
            vocab: tokenizer.len(),
            positions,
            eps: 1e-5,
            top: Top::Masked,
        }
    }

    /// The same around another mechanism.
    fn around(model: &RobertaConfig, mechanism: &str) -> RobertaConfig {
        let choice = one(mechanism).unwrap();
        RobertaConfig { entry: choice.entry, knobs: choice.knobs, ..model.clone() }
    }

    /// Writes a small encoder of full attention for 16 words, and gives its model.
    pub(crate) fn small(folder: &Path) -> (RobertaConfig, HashMap<String, Tensor>) {
        let tokenizer =
            Tokenizer::train(["the old lamp the old lamp the bell the bell"].into_iter(), 270).unwrap();
        let model = config(&tokenizer, 16);
        let builder = Builder::seeded(5, &Device::Cpu, false);
        Roberta::new(&model, &builder).unwrap();
        let params = builder.finish();
        // biases and gains that a mistake would show, deviations of a trained model
        let noisy = |name: &str| {
            let value = params.value(name).unwrap();
            let noise = Tensor::arange(0f32, value.elem_count() as f32, &Device::Cpu).unwrap();
            let noise = noise.affine(12.9898, name.len() as f64).unwrap().sin().unwrap();
            (value + (noise * 0.3).unwrap().reshape(params.value(name).unwrap().shape()).unwrap()).unwrap()
        };
        let weights: HashMap<String, Tensor> =
            params.names().map(|name| (name.to_owned(), noisy(name))).collect();
        candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
        std::fs::write(folder.join("tokenizer.json"), tokenizer.json()).unwrap();
        let config = json!({
            "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "hidden_act": "gelu",
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
            "vocab_size": 270, "max_position_embeddings": 18, "layer_norm_eps": 1e-5,
            "effattn": { "model": "full", "tokenizer": tokenizer.hash() },
        });
        std::fs::write(folder.join("config.json"), serde_json::to_string_pretty(&config).unwrap()).unwrap();
        (model, weights)
    }

    fn logits(model: &RobertaConfig, weights: HashMap<String, Tensor>, ids: &Tensor) -> Vec<f32> {
        let net = Roberta::new(model, &Builder::given(weights, &Device::Cpu, false)).unwrap();
        let hidden = net.encode(ids, Dropout::NONE).unwrap();
        let (b, n) = ids.dims2().unwrap();
        let all: Vec<u32> = (0..(b * n) as u32).collect();
        net.masked_logits(&hidden, &all).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn ids(b: usize, n: usize) -> Tensor {
        let id = |at: usize| if at % n + at / n < n { 4 + (at as u32 * 7919) % 250 } else { PADDING };
        Tensor::from_vec((0..b * n).map(id).collect::<Vec<u32>>(), (b, n), &Device::Cpu).unwrap()
    }

    fn largest(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn a_window_over_the_whole_input_is_the_encoder_that_was_stored() {
        let folder = tempfile::tempdir().unwrap();
        let (model, weights) = small(folder.path());
        let start = Pretrained::open(folder.path()).unwrap();
        assert_eq!((start.positions, start.vocab, start.attention.label()), (16, 270, "full".to_owned()));
        start.tokenizer().unwrap();
        let ids = ids(3, 16);
        let expected = logits(&model, weights, &ids);
        for mechanism in
            ["full", "window:w=64", "longformer:left=64,right=64", "longformer:left=3,right=64,global=0"]
        {
            let longer = RobertaConfig { positions: 40, ..around(&model, mechanism) };
            start.becomes(&one(mechanism).unwrap()).unwrap();
            let fitted = start.weights().unwrap().fit(&longer).unwrap();
            let difference = largest(&logits(&longer, fitted, &ids), &expected);
            let narrow = mechanism.contains("left=3");
            assert_eq!(difference > 1e-3, narrow, "{mechanism}: {difference}");
            assert!(narrow || difference <= 2e-5, "{mechanism}: {difference}");
        }
    }

    #[test]
    fn positions_are_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let (model, weights) = small(folder.path());
        let start = Pretrained::open(folder.path()).unwrap();
        let longer = RobertaConfig { positions: 40, ..model };
        let fitted = start.weights().unwrap().fit(&longer).unwrap();
        let rows = |of: &HashMap<String, Tensor>| of[POSITIONS].to_vec2::<f32>().unwrap();
        let (old, new) = (rows(&weights), rows(&fitted));
        assert_eq!(new.len(), 42);
        for (row, values) in new.iter().enumerate() {
            let from = if row < 2 { row } else { 2 + (row - 2) % 16 };
            assert_eq!(*values, old[from], "{row}");
        }
    }

    #[test]
    fn dual_norms_start_at_the_size_of_keys_and_values() {
        let folder = tempfile::tempdir().unwrap();
        let (model, weights) = small(folder.path());
        let start = Pretrained::open(folder.path()).unwrap();
        let long = RobertaConfig { positions: 32, ..around(&model, "ls:w=4,r=2") };
        let ids = ids(2, 16);
        let mut taken = start.weights().unwrap();
        assert!(taken.wants_calibration(&long) && !taken.wants_calibration(&model));
        taken.calibrate(&long, std::iter::once(Ok(ids.clone()))).unwrap();
        let fitted = taken.fit(&long).unwrap();
        // by hand, for the first layer
        let net = Roberta::new(&model, &Builder::given(weights.clone(), &Device::Cpu, false)).unwrap();
        let x = net.trace(&ids).unwrap()[0].to_vec3::<f32>().unwrap();
        let keep = ids.to_vec2::<u32>().unwrap();
        let (mut deviation, mut mean, mut count) = (0.0f64, 0.0f64, 0.0f64);
        for part in ["key", "value"] {
            let tensor = |kind: &str| &weights[&layer_name(0, &format!("{part}.{kind}"))];
            let (weight, bias) =
                (tensor("weight").to_vec2::<f32>().unwrap(), tensor("bias").to_vec1::<f32>().unwrap());
            for (row, id) in x.iter().flatten().zip(keep.iter().flatten()).filter(|(_, id)| **id != PADDING) {
                assert_ne!(*id, PADDING);
                let product =
                    |weights: &Vec<f32>| weights.iter().zip(row).map(|(w, x)| f64::from(w * x)).sum::<f64>();
                let channels: Vec<f64> = weight
                    .iter()
                    .zip(&bias)
                    .map(|(weights, bias)| product(weights) + f64::from(*bias))
                    .collect();
                let own = channels.iter().sum::<f64>() / 16.0;
                let variance = channels.iter().map(|value| (value - own).powi(2)).sum::<f64>() / 16.0;
                (deviation, mean, count) = (deviation + variance.sqrt(), mean + own, count + 1.0);
            }
        }
        for (part, expected) in [("weight", deviation / count), ("bias", mean / count)] {
            for norm in ["ln_local", "ln_global"] {
                let values = fitted[&layer_name(0, &format!("ls.{norm}.{part}"))].to_vec1::<f32>().unwrap();
                assert!(
                    values.iter().all(|value| (f64::from(*value) - expected).abs() < 1e-5),
                    "{norm}.{part}"
                );
            }
        }
        let drawn = Builder::warm(1, fitted, &Device::Cpu, false);
        Roberta::new(&long, &drawn).unwrap();
        let params = drawn.finish();
        let dp = params.value(&layer_name(1, "ls.dp.bias")).unwrap().to_vec1::<f32>().unwrap();
        assert!(dp.iter().all(|bias| *bias == 0.0), "slots start as near-means");
    }

    #[test]
    fn parts_of_a_checkpoint_are_read_by_their_index() {
        let folder = tempfile::tempdir().unwrap();
        let (model, weights) = small(folder.path());
        let whole = Pretrained::open(folder.path()).unwrap().weights().unwrap().fit(&model).unwrap();
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        let mut map = BTreeMap::new();
        let mut sides = [HashMap::new(), HashMap::new()];
        for (name, tensor) in &weights {
            let side = usize::from(name.contains("layer.1"));
            // as RobertaModel alone writes them
            let bare = name.strip_prefix("roberta.").unwrap_or(name).to_owned();
            map.insert(bare.clone(), format!("part-{side}.safetensors"));
            sides[side].insert(bare, tensor.clone());
        }
        for (side, tensors) in sides.iter().enumerate() {
            candle_core::safetensors::save(tensors, folder.path().join(format!("part-{side}.safetensors")))
                .unwrap();
        }
        let index = json!({ "weight_map": map }).to_string();
        std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let parts = Pretrained::open(folder.path()).unwrap();
        let read = parts.weights().unwrap().fit(&model).unwrap();
        let ids = ids(2, 9);
        assert_eq!(logits(&model, read, &ids), logits(&model, whole, &ids));
        assert_eq!(parts.hash().unwrap().len(), 64);
        std::fs::remove_file(folder.path().join("part-1.safetensors")).unwrap();
        assert!(parts.weights().err().unwrap().to_string().contains("part-1.safetensors"));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (model, weights) = small(folder.path());
        let path = folder.path().join("config.json");
        let good = std::fs::read_to_string(&path).unwrap();
        let says = |from: &str, to: &str| {
            std::fs::write(&path, good.replace(from, to)).unwrap();
            let error = Pretrained::open(folder.path()).and_then(|start| start.tokenizer().map(|_| ()));
            std::fs::write(&path, &good).unwrap();
            error.err().unwrap().to_string()
        };
        assert!(
            says("RobertaForMaskedLM", "BertModel")
                .contains("config.json: architecture \"BertModel\" is not known")
        );
        assert!(says("\"roberta\"", "\"bert\"").contains("model_type is \"bert\""));
        assert!(says("\"gelu\"", "\"relu\"").contains("hidden_act is \"relu\""));
        assert!(says("\"hidden_size\"", "\"size\"").contains("missing field `hidden_size`"));
        assert!(says("\"num_attention_heads\": 2", "\"num_attention_heads\": 3").contains("config.json"));
        assert!(
            says("\"vocab_size\": 270", "\"vocab_size\": 269")
                .contains("vocab_size is 269 and the tokenizer beside it has")
        );
        assert!(says("\"tokenizer\": \"", "\"tokenizer\": \"0").contains("was made with tokenizer"));
        let misfit = |name: &str, tensor: Option<Tensor>, top: Top| {
            let mut changed = weights.clone();
            match tensor {
                Some(tensor) => changed.insert(name.to_owned(), tensor),
                None => changed.remove(name),
            };
            candle_core::safetensors::save(&changed, folder.path().join("model.safetensors")).unwrap();
            let start = Pretrained::open(folder.path()).unwrap();
            let target = RobertaConfig { top, ..model.clone() };
            start.weights().unwrap().fit(&target).err().map(|error| error.to_string())
        };
        let some = || Some(Tensor::zeros((3, 3), DType::F32, &Device::Cpu).unwrap());
        let classes = Top::Classes(2);
        let query = layer_name(1, "query.weight");
        assert!(misfit(&query, None, classes).unwrap().contains(&format!("no tensor {query}")));
        assert!(misfit(&query, some(), classes).unwrap().contains("has shape [3, 3], expected [16, 16]"));
        let other = "roberta.encoder.layer.2.output.dense.weight";
        assert!(
            misfit(other, some(), classes).unwrap().contains(&format!("the tensor {other} has no place"))
        );
        assert_eq!(misfit("roberta.pooler.dense.weight", some(), classes), None);
        assert_eq!(misfit("lm_head.bias", None, classes), None);
        assert!(misfit("lm_head.bias", None, Top::Masked).unwrap().contains("no tensor lm_head.bias"));
        assert_eq!(misfit(TYPES, None, classes), None, "fairseq has none");
        std::fs::write(folder.path().join("model.safetensors"), b"no").unwrap();
        let error = Pretrained::open(folder.path()).unwrap().weights().err().unwrap().to_string();
        assert!(error.contains("model.safetensors: not a complete safetensors file"), "{error}");
        let start = Pretrained::open(folder.path()).unwrap();
        let error = start.becomes(&one("cosformer").unwrap()).err().unwrap().to_string();
        assert!(error.contains("was trained with full") && error.contains("weights of its own"), "{error}");
    }

    #[test]
    fn a_run_gives_the_encoder_of_the_mechanism() {
        let run = tempfile::tempdir().unwrap();
        for cell in ["a", "b"] {
            std::fs::create_dir_all(run.path().join("cells").join(cell)).unwrap();
            small(&run.path().join("cells").join(cell));
        }
        let config = run.path().join("cells/b/config.json");
        let text = std::fs::read_to_string(&config).unwrap().replace("\"full\"", "\"cosformer:m=16\"");
        std::fs::write(&config, text).unwrap();
        let found = |mechanism: &str| {
            let start = Pretrained::find(run.path(), &one(mechanism).unwrap()).unwrap();
            start.map(|start| start.folder.file_name().unwrap().to_string_lossy().into_owned())
        };
        assert_eq!([found("full"), found("cosformer"), found("ls")].map(Option::unwrap), ["a", "b", "a"]);
        std::fs::remove_file(run.path().join("cells/a/config.json")).unwrap();
        assert_eq!(found("ls"), None);
    }
}
