//! Text drawn from a checkpoint, so that a person sees what was learned.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::recipe::Phase;
use super::request::CharLmRequest;
use crate::train::checkpoint::Checkpoint;
use effattn_data::corpus::CharCorpus;
use effattn_kernel::device::rng::RngStream;
use effattn_model::family::causal::{Cache, CausalArchitecture, CausalModel, block_within};
use effattn_record::config::settings::Settings;

/// What a checkpoint says about its model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    pub request: CharLmRequest,
    /// The byte that each symbol stands for.
    pub alphabet: Vec<u8>,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Number of the phase, from 0.
    pub phase: usize,
}

impl Description {
    /// The description in `stored`, which was read from `file`.
    pub fn read(stored: &Checkpoint, file: &Path) -> Result<Self> {
        serde_json::from_value(stored.model.clone()).with_context(|| {
            format!(
                "{} contains no language model; name a run or a checkpoint of effattn charlm",
                file.display()
            )
        })
    }

    pub fn phase(&self) -> Result<&Phase> {
        self.request.phases.get(self.phase).context("the checkpoint has no phase")
    }

    /// The model, for segments and a cache as long as those of its phase.
    pub fn model(&self) -> Result<Box<dyn CausalArchitecture>> {
        let len = self.phase()?.len as usize;
        Ok(self.request.model(self.vocab)?.resized(len, len))
    }

    /// Makes sure that `corpus` has the symbols that the model was trained on.
    pub fn check_corpus(&self, corpus: &CharCorpus) -> Result<()> {
        ensure!(
            corpus.alphabet == self.alphabet,
            "the model was trained on {}, which has other symbols than this text",
            self.request.corpus
        );
        Ok(())
    }

    fn id(&self, byte: u8) -> Option<u32> {
        self.alphabet.iter().position(|&known| known == byte).map(|id| id as u32)
    }

    /// The symbols of `text`, which messages call `what`.
    pub fn ids(&self, what: &str, text: &str) -> Result<Vec<u32>> {
        let new = |letter: &char| !letter.to_string().bytes().all(|byte| self.id(byte).is_some());
        let new: BTreeSet<char> = text.chars().filter(new).collect();
        ensure!(
            new.is_empty(),
            "{what} has {:?}, which the model has never seen; its corpus is {}",
            new.into_iter().collect::<String>(),
            self.request.corpus
        );
        Ok(text.bytes().filter_map(|byte| self.id(byte)).collect())
    }
}

/// What is drawn.
#[derive(Clone, Debug)]
pub struct Draw {
    /// Text that stands before.
    pub prompt: String,
    /// Symbols to draw.
    pub symbols: usize,
    /// Divides the logits; 0 takes the likeliest symbol.
    pub temperature: f64,
    pub seed: u64,
}

/// What `--generate` does: draws text from its checkpoint.
pub fn generate(flags: &BTreeMap<&'static str, String>, said: &Settings, out: &mut dyn Write) -> Result<()> {
    // a model is what it was trained as
    if let Some(key) = said.set_keys().into_iter().find(|key| *key != "seeds") {
        let flag = key.replace('_', "-");
        bail!("--generate does not read --{flag}; it takes the stored model as it is: leave --{flag} out");
    }
    let value = |name: &str| flags.get(name).map_or("", String::as_str);
    let number = |name: &str| format!("--{name} {:?} is not a number", value(name));
    let draw = Draw {
        prompt: value("prompt").to_owned(),
        symbols: value("symbols").parse().with_context(|| number("symbols"))?,
        temperature: value("temperature").parse().with_context(|| number("temperature"))?,
        seed: said.seeds.as_ref().and_then(|seeds| seeds.0.first().copied()).unwrap_or(0),
    };
    sample(&checkpoint(Path::new(value("generate")))?, &draw, |bytes| {
        out.write_all(bytes)?;
        out.flush()
    })?;
    Ok(writeln!(out)?)
}

/// The checkpoint that `path` is or has: of a run folder the best one of the last phase of its first cell.
pub fn checkpoint(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        let missing = || {
            format!(
                "{}: cannot be read; name a run of effattn charlm (effattn status lists them) or a checkpoint",
                path.display()
            )
        };
        path.metadata().with_context(missing)?;
        return Ok(path.to_owned());
    }
    let below = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        let mut all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        all.sort();
        all
    };
    let cells = below(&path.join("cells"));
    let folders = cells.iter().map(PathBuf::as_path).chain([path]);
    let best = |folder: &Path| {
        below(folder).into_iter().rfind(|file| file.to_string_lossy().ends_with("-best.safetensors"))
    };
    folders.into_iter().find_map(best).with_context(|| {
        format!(
            "{} has no cells/*/phase*-best.safetensors; name a run of effattn charlm, or a checkpoint",
            path.display()
        )
    })
}

/// Draws symbol after symbol from the model in `checkpoint`, with its cache; `write` gets bytes as they come, the
/// prompt first.
pub fn sample(
    checkpoint: &Path,
    draw: &Draw,
    mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> Result<()> {
    let stored = Checkpoint::load(checkpoint)?;
    let description = Description::read(&stored, checkpoint)?;
    if let Some(name) = stored.not_finite() {
        bail!("{} cannot generate text: {name} has values that are not finite", checkpoint.display());
    }
    let config = description.model()?;
    let net = config.build_causal(&stored.builder(&Device::Cpu, false)?)?;
    drop(stored);
    let mut ids = description.ids("the prompt", &draw.prompt)?;
    if ids.is_empty() {
        ids.push(description.id(b'\n').or_else(|| description.id(b' ')).unwrap_or(0));
    }
    write(draw.prompt.as_bytes())?;
    ensure!(draw.temperature >= 0.0, "the temperature must not be negative; choose 0 or more");
    let mut state = SymbolFeed::start(net.as_ref(), config.as_ref())?;
    let mut stream = RngStream::new(draw.seed, "sample");
    let mut logits = state.feed(&ids)?;
    for _ in 0..draw.symbols {
        let known = logits.narrow(0, 0, description.alphabet.len())?.to_vec1::<f32>()?;
        let id = choose(&known, draw.temperature, stream.uniform(0.0, 1.0));
        write(&description.alphabet[id..=id])?;
        logits = state.feed(&[id as u32])?;
    }
    Ok(())
}

/// Feeds symbols with the cache carried along. A mechanism that compresses whole segments may only be handed over
/// where a segment ends, so what stands behind the last full block is kept and encoded again.
struct SymbolFeed<'a> {
    model: &'a dyn CausalModel,
    cache: Cache,
    pending: Vec<u32>,
    block: usize,
    cached: bool,
}

impl<'a> SymbolFeed<'a> {
    fn start(model: &'a dyn CausalModel, config: &dyn CausalArchitecture) -> Result<Self> {
        let cached = config.cached() > 0;
        // short blocks make every symbol cheap
        let block = if cached { block_within(config, 64) } else { config.max_len() };
        Ok(Self { model, cache: model.start(1)?, pending: Vec::new(), block, cached })
    }

    /// Logits behind `ids`.
    fn feed(&mut self, ids: &[u32]) -> Result<Tensor> {
        for &id in ids {
            if self.pending.len() == self.block {
                if self.cached {
                    self.cache = self.run()?.1;
                    self.pending.clear();
                } else {
                    self.pending.drain(..self.block / 2);
                }
            }
            self.pending.push(id);
        }
        Ok(self.run()?.0)
    }

    fn run(&self) -> Result<(Tensor, Cache)> {
        let ids = Tensor::new(self.pending.as_slice(), self.model.device())?.unsqueeze(0)?;
        let (logits, next) = self.model.segment(&ids, &self.cache, None)?;
        let last = logits.dim(1)? - 1;
        Ok((logits.narrow(1, last, 1)?.flatten_all()?.detach(), next))
    }
}

/// The symbol at `u` in [0, 1) of softmax(logits / temperature).
fn choose(logits: &[f32], temperature: f64, u: f64) -> usize {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let likeliest = logits.iter().position(|&logit| logit == top).unwrap_or(0);
    if temperature == 0.0 {
        return likeliest;
    }
    let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x - top) / temperature).exp()).collect();
    let mut left = u * weights.iter().sum::<f64>();
    for (id, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return id;
        }
    }
    likeliest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_drawn_by_their_weight() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY];
        assert_eq!([0.0, 0.32, 0.34, 0.999].map(|u| choose(&logits, 1.0, u)), [0, 0, 1, 1]);
        assert_eq!(choose(&logits, 0.0, 0.0), 1);
        assert_eq!(choose(&[f32::NEG_INFINITY, 0.0], 5.0, 0.0), 1);
    }

    #[test]
    fn settings_that_are_not_read_are_refused() {
        let told = |said: Settings| {
            let flags = [("generate", "none"), ("symbols", "1"), ("temperature", "1")];
            let flags = flags.map(|(name, value)| (name, value.to_owned())).into();
            generate(&flags, &said, &mut Vec::new()).unwrap_err().to_string()
        };
        let error = told(Settings { steps: Some(3), ..Settings::NONE });
        assert!(error.starts_with("--generate does not read --steps; "), "{error}");
        let error = told(Settings { seeds: Some("2".parse().unwrap()), ..Settings::NONE });
        assert!(error.starts_with("none: cannot be read"), "{error}");
    }

    #[test]
    fn a_run_folder_stands_for_its_last_best_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let cell = folder.path().join("cells/enwik8_ls");
        std::fs::create_dir_all(&cell).unwrap();
        let error = checkpoint(folder.path()).unwrap_err().to_string();
        assert!(error.contains("name a run of effattn charlm"), "{error}");
        for name in
            ["phase1-best.safetensors", "phase2-best.safetensors", "phase2-last.safetensors", "curve.csv"]
        {
            std::fs::write(cell.join(name), b"x").unwrap();
        }
        let best = cell.join("phase2-best.safetensors");
        assert_eq!(checkpoint(folder.path()).unwrap(), best);
        assert_eq!(checkpoint(&cell).unwrap(), best);
        assert_eq!(checkpoint(&best).unwrap(), best);
    }
}
