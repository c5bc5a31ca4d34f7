//! Attention matrices of a model that `lra` trained, for one input: a matrix for every head of every layer.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};

use super::attention_matrix::{ProbeConfig, implied};
use super::lra::request::LraRequest;
use super::lra::stored::{StoredCell, finished};
use super::lra::tasks;
use crate::train::checkpoint::Checkpoint;
use effattn_data::{self as data, Split};
use effattn_kernel::heads;
use effattn_kernel::linear::linear;
use effattn_kernel::norm::{self, layer_norm};
use effattn_model::attention::HeadShape;
use effattn_model::batch::InputKind;
use effattn_model::family::DataShape;
use effattn_model::nn::params::Params;
use effattn_model::preset::ClassifierPreset;
use effattn_model::{Classifier, ClassifierConfig};
use effattn_record::matrix::Matrix;

/// What a trained model reads.
#[derive(Clone, Debug)]
pub enum Input<'a> {
    /// A text, read as the training texts were.
    Text(&'a str),
    /// An example of the test split, with the folder of data sets.
    Example(usize, &'a Path),
}

/// The matrices of a trained model.
pub struct TrainedMatrices {
    /// Layer by layer, head by head.
    pub matrices: Vec<Matrix>,
    /// Number of heads.
    pub heads: usize,
    /// The model and what it was trained on, in words.
    pub source: String,
}

/// The matrices of the first finished cell in the folder `run` for `input`, cut to `most` positions.
pub fn matrices(run: &Path, input: &Input, most: usize) -> Result<TrainedMatrices> {
    let all = finished(run).map_err(|reason| anyhow::anyhow!("--weights {}: {reason}", run.display()))?;
    let cell = all.into_iter().next().context("a run has at least one cell")?;
    let request = &cell.request;
    let weights = Checkpoint::load(&cell.file)?;
    let mut ids = ids(&cell, input)?;
    ids.truncate(most.min(request.keep.min(request.spec.len) as usize));
    let tokens = tokens(&cell, &ids);
    ensure!(!ids.is_empty(), "the input is empty; give --text with at least one character");
    let config = config(&cell)?;
    let (heads, head_dim) = (config.backbone.heads, config.backbone.head_dim());
    let choice = request.spec.choice()?;
    let tensors = weights.builder(&Device::Cpu, false)?;
    let model = Classifier::new(&config, &tensors)?;
    let ids = Tensor::from_vec(ids.clone(), (1, ids.len()), &Device::Cpu)?;
    let hidden = model.trace(&ids, None)?.hidden;
    let params = tensors.finish();
    let mut matrices = Vec::new();
    for (layer, x) in hidden.iter().enumerate() {
        let given = layer_inputs(&params, (layer, x), &config)?;
        for head in 0..heads {
            let given = given.clone();
            let probe =
                ProbeConfig { len: x.dim(1)?, heads, head_dim, head, given, ..ProbeConfig::default() };
            let matrix = implied(&choice, &probe).context(
                "the weights of this model cannot be drawn; train one of another mechanism, as in effattn lra --quick --model full, and name its run",
            )?;
            let place = (layer + 1, head + 1);
            let label = format!("layer {}, head {}", place.0, place.1);
            matrices.push(Matrix { label, head: Some(place), tokens: tokens.clone(), ..matrix });
        }
    }
    let source = format!("{} of {}, trained on {}", choice.label(), request.spec.preset, request.task);
    Ok(TrainedMatrices { matrices, heads, source })
}

fn ids(cell: &StoredCell, input: &Input) -> Result<Vec<u32>> {
    match input {
        Input::Text(text) => {
            let reading = cell.reading().map_err(anyhow::Error::msg)?;
            ensure!(!reading.pairs, "the model reads two texts at a time; one-text models are drawn");
            Ok(reading.document(text)?)
        }
        Input::Example(index, dir) => {
            let LraRequest { task, reading, keep, .. } = &cell.request;
            let set = tasks::load(task, dir, *reading)?;
            let count = set.len(Split::Test);
            ensure!(
                *index < count,
                "--example {index}: the test split of {task} has {count} examples, from 0"
            );
            let example = set.example(Split::Test, *index, *keep as usize);
            ensure!(example.second.is_none(), "{task} has pairs; models of one document are drawn");
            Ok(example.tokens)
        }
    }
}

/// What `ids` stand for; nothing where they are no text.
fn tokens(cell: &StoredCell, ids: &[u32]) -> Vec<String> {
    if cell.request.task == data::listops::SET.name {
        return ids.iter().map(|id| data::listops::token_text(*id)).collect();
    }
    cell.reading().map_or_else(|_| Vec::new(), |reading| reading.tokens(ids))
}

/// The model of `cell`, as its weights have it.
fn config(cell: &StoredCell) -> Result<ClassifierConfig> {
    let LraRequest { spec, task, .. } = &cell.request;
    let preset = ClassifierPreset::find(&spec.preset);
    let preset = preset.with_context(|| format!("models of preset {} are not drawn", spec.preset))?;
    let choice = spec.choice()?;
    let mut form = match preset.form(Some(task.as_str()), choice.entry.name) {
        Ok(form) => form,
        Err(_) => {
            let (vocab, classes) = match cell.reading() {
                Ok(reading) => (reading.vocabulary()?, reading.classes.len()),
                Err(_) => {
                    let (_, examples) = data::task(task)?;
                    (examples.vocabulary, examples.classes)
                }
            };
            preset.form_for(&DataShape { input: InputKind::Tokens, vocab, classes, len: spec.len as usize })
        }
    };
    spec.sizes.apply(&mut form.backbone);
    if let Some(name) = &spec.sizes.pooling {
        form.pooling = effattn_model::Pooling::find(name);
    }
    ensure!(form.towers == 1, "{task} has pairs; models of one document are drawn");
    Ok(form.model(choice.entry, choice.knobs.clone(), spec.len as usize))
}

/// Queries and keys [1, h, n, d] of layer `layer` for its input `x` [1, n, width], what else its mechanism reads, and the
/// mechanism's parameters.
fn layer_inputs(
    params: &Params,
    (layer, x): (usize, &Tensor),
    config: &ClassifierConfig,
) -> Result<HashMap<String, Tensor>> {
    let needs = (config.entry.needs)(&config.knobs);
    if needs.conv.is_some() || needs.stream.is_some() {
        bail!("{} convolves what it projects, or has a second stream: it is not drawn", config.entry.name);
    }
    let prefix = format!("layers.{layer}.");
    let get = |name: &str| -> Result<Tensor> {
        let name = format!("{prefix}{name}");
        params.value(&name).with_context(|| format!("the weights have no tensor {name}"))
    };
    let normal = layer_norm(x, &get("norm1.weight")?, &get("norm1.bias")?, norm::EPS)?;
    let (heads, head_dim) = (config.backbone.heads, config.backbone.head_dim());
    let projected = |part: &str, shape: HeadShape| -> Result<Tensor> {
        let bias = if config.backbone.bias { Some(get(&format!("attn.{part}.bias"))?) } else { None };
        let rows = linear(&normal, &get(&format!("attn.{part}.weight"))?, bias.as_ref())?;
        Ok(heads::split(&rows, shape.of(heads, head_dim).0)?.contiguous()?)
    };
    let mut given = HashMap::new();
    for (part, shape) in needs.projections.read().filter(|(part, _)| *part != "v") {
        given.insert(part.to_owned(), projected(part, shape)?);
    }
    if needs.global {
        for part in ["q_global", "k_global"] {
            given.insert(part.to_owned(), projected(part, HeadShape::default())?);
        }
    }
    if needs.x {
        given.insert("x".to_owned(), normal.clone());
    }
    let own = format!("{prefix}attn.");
    let constants = params.constants().iter().map(|(name, tensor)| (name.as_str(), Some(tensor.clone())));
    let names = params.names().map(|name| (name, params.value(name).ok()));
    for (name, tensor) in names.chain(constants) {
        let (Some(name), Some(tensor)) = (name.strip_prefix(&own), tensor) else { continue };
        given.entry(name.to_owned()).or_insert(tensor);
    }
    Ok(given)
}
