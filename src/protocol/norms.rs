//! Norms of the window's keys and values against those of the slots, at initialisation and in trained models
//! (Transformer-LS, Figure 2 and section 3.4): DualLN is there because they differ without it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor};

use super::charlm::generate::Description;
use super::model_spec::ModelSpec;
use super::stored_input::StoredInput;
use crate::train::checkpoint::Checkpoint;
use effattn_data::corpus::CharCorpus;
use effattn_model::attention::observe::MechanismCall;
use effattn_model::char_lm::CharLm;
use effattn_model::family::{ModelRequest, SizeOverrides, character_lm};
use effattn_model::nn::params::ParamBuilder;
use effattn_record::Pass;
#[cfg(test)]
use effattn_record::config::lists::Layers;
use effattn_record::config::settings::{DeviceName, DtypeName, KernelName, Settings};
use effattn_record::norms::Norm;

/// What is looked at.
pub struct Probe<'a> {
    /// Text.
    pub corpus: &'a CharCorpus,
    /// Backbone.
    pub preset: &'a str,
    /// What differs from it.
    pub settings: &'a Settings,
    /// Positions of the segment, and as many cached ones.
    pub len: u64,
    /// Seed of the weights.
    pub seed: u64,
}

/// Norms in every layer of `model` (as on the command line) for the second segment of the validation text, behind a
/// cache of the first: positions and slots of the segment itself, heads side by side and one by one.
pub fn norms(model: &str, probe: &Probe) -> Result<Vec<Norm>> {
    let spec = ModelSpec {
        model: model.to_owned(),
        preset: probe.preset.to_owned(),
        sizes: SizeOverrides::of(probe.settings),
        batch: 1,
        len: probe.len,
        pass: Pass::Infer,
        seed: probe.seed,
        device: DeviceName::Cpu,
        dtype: DtypeName::F32,
        kernel: KernelName::Fused,
    };
    let choice = spec.choice()?;
    let vocab = Some(probe.corpus.vocabulary);
    let config = character_lm::config(&ModelRequest { vocab, ..spec.model_request(&choice) })?;
    config.validate()?;
    let net = CharLm::new(&config, &ParamBuilder::seeded(probe.seed, &Device::Cpu, false))?;
    of_net(model, (&net, config.backbone.heads), probe.corpus, probe.len)
}

/// The corpus that the checkpoint `file` of `charlm` was trained on, and the segment length of its phase.
pub fn trained_on(file: &Path) -> Result<(String, u64)> {
    let description = Description::read(&Checkpoint::load(file)?, file)?;
    let len = description.phase()?.len;
    Ok((description.request.corpus, len))
}

/// [`norms`] of the model in the checkpoint `file` of `charlm`, in segments of `len`.
pub fn trained_norms(file: &Path, corpus: &CharCorpus, len: u64) -> Result<Vec<Norm>> {
    let stored = Checkpoint::load(file)?;
    let description = Description::read(&stored, file)?;
    description.check_corpus(corpus)?;
    let spec = ModelSpec { len, batch: 1, ..description.request.spec.clone() };
    let choice = spec.choice()?;
    let asked = ModelRequest { vocab: Some(description.vocab), ..spec.model_request(&choice) };
    let config = character_lm::config(&asked)?;
    let net = CharLm::new(&config, &stored.builder(&Device::Cpu, false)?)?;
    of_net(&spec.model, (&net, config.backbone.heads), corpus, len)
}

/// Norms in every layer of `net`, which is called `model` and has so many heads.
fn of_net(model: &str, (net, heads): (&CharLm, usize), corpus: &CharCorpus, len: u64) -> Result<Vec<Norm>> {
    let len = len as usize;
    let text = &corpus.symbols[corpus.parts[1].clone()];
    ensure!(
        text.len() >= 2 * len,
        "the validation text has {} symbols; two segments of {len} are read: take --len {} or shorter",
        text.len(),
        text.len() / 2
    );
    let ids = |from: usize| {
        let ids: Vec<u32> = text[from..from + len].iter().map(|&id| u32::from(id)).collect();
        Tensor::from_vec(ids, (1, len), &Device::Cpu)
    };
    let (_, cache) = net.forward(&ids(0)?, &net.start(1)?)?;
    let layers = net.softmax_inputs(&ids(len)?, &cache)?;
    let layers = layers.with_context(|| without_slots(model))?;
    let mut norms = Vec::new();
    for (layer, (positions, slots)) in layers.iter().enumerate() {
        let rows = (second_half(positions, len)?, second_half(slots, len)?);
        norms.extend(of_layer(model, layer, heads, &rows)?);
    }
    Ok(norms)
}

/// Norms in every layer of `stored` on its input, which has no cache before it.
pub fn of_input(stored: &StoredInput) -> Result<Vec<Norm>> {
    let mut norms = Vec::new();
    for MechanismCall { entry, config, softmax_inputs, .. } in stored.calls()? {
        let rows = softmax_inputs.with_context(|| without_slots(entry.name))?;
        norms.extend(of_layer(entry.name, config.layer, config.heads, &rows)?);
    }
    ensure!(!norms.is_empty(), "{}", without_slots(&stored.source));
    Ok(norms)
}

fn without_slots(model: &str) -> String {
    format!(
        "{model} has no window beside slots; ls has: give --model ls, or with --weights a run that trained it"
    )
}

/// Norms of keys and of values, of all heads and of each: `rows` [1, t, 2 e] of positions and [1, s, 2 e] of slots.
fn of_layer(model: &str, layer: usize, heads: usize, rows: &(Tensor, Tensor)) -> Result<Vec<Norm>> {
    let mut norms = Vec::new();
    for (index, kind) in ["key", "value"].into_iter().enumerate() {
        let (window, slots) = (means(&rows.0, index, heads)?, means(&rows.1, index, heads)?);
        for (head, (window, slots)) in window.into_iter().zip(slots).enumerate() {
            norms.push(Norm {
                model: model.to_owned(),
                layer: layer as u64 + 1,
                kind: kind.to_owned(),
                head: head as u64,
                window,
                slots,
                ratio: window / slots,
            });
        }
    }
    Ok(norms)
}

/// The half of `rows` [1, t, 2 e] of two segments of `len` that belongs to the second.
fn second_half(rows: &Tensor, len: usize) -> Result<Tensor> {
    let count = rows.dim(1)?;
    ensure!(count.is_multiple_of(2), "{count} rows do not belong to two segments of {len}");
    Ok(rows.narrow(1, count / 2, count / 2)?)
}

/// Mean norms of part `index` of `rows` [1, t, 2 e], of all heads and of each.
fn means(rows: &Tensor, index: usize, heads: usize) -> Result<Vec<f64>> {
    let twice = rows.dim(2)?;
    let rows = rows.narrow(2, index * twice / 2, twice / 2)?.squeeze(0)?;
    let mean = |rows: &Tensor| -> Result<f64> {
        Ok(f64::from(rows.sqr()?.sum(D::Minus1)?.sqrt()?.mean_all()?.to_scalar::<f32>()?))
    };
    let mut all = vec![mean(&rows)?];
    for head in rows.chunk(heads, 1)? {
        all.push(mean(&head)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(model: &str, len: u64) -> Result<Vec<Norm>> {
        let text: Vec<u8> = (0..4000u32).map(|i| b'a' + (i * i / 7 % 23) as u8).collect();
        let corpus = CharCorpus::new(text, 0);
        let settings = Settings {
            layers: Some(Layers::Count(2)),
            width: Some(64),
            heads: Some(4),
            ffn: Some(64),
            ..Settings::NONE
        };
        norms(model, &Probe { corpus: &corpus, preset: "charlm-small", settings: &settings, len, seed: 1 })
    }

    #[test]
    fn dual_ln_makes_norms_equal_and_its_absence_does_not() {
        let with = probe("ls:w=16", 64).unwrap();
        assert_eq!(with.len(), 2 * 2 * 5, "layers x kinds x (all heads and four)");
        let whole = |norms: &[Norm]| -> Vec<f64> {
            norms.iter().filter(|norm| norm.head == 0).map(|norm| norm.ratio).collect()
        };
        assert!(whole(&with).iter().all(|ratio| (ratio - 1.0).abs() < 0.01), "{with:?}");
        let without = probe("ls:w=16,dual_ln=false", 64).unwrap();
        assert!(whole(&without).iter().all(|ratio| *ratio > 1.2), "{without:?}");
    }

    #[test]
    fn mistakes_are_named() {
        let says = |model: &str, len: u64| format!("{:#}", probe(model, len).unwrap_err());
        assert!(
            says("transformer-xl", 16).contains("no window beside slots"),
            "{}",
            says("transformer-xl", 16)
        );
        assert!(says("ls:w=16", 128).contains("take --len 100"), "{}", says("ls:w=16", 128));
        assert!(says("nystrom", 16).contains("no causal form"));
    }
}
