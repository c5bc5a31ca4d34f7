//! `--from`: the pretrained encoders that fine-tuning and further masked training start from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::grid::{GridEntry, PlanError};
use crate::train::pretrained::Pretrained;
use effattn_model::Backbone;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_model::family::{ResolveError, SizeOverrides, masked_lm};
use effattn_model::roberta::RobertaConfig;
use effattn_record::config::lists::Words;

/// An encoder to start from.
pub struct StartEncoder {
    pub encoder: Pretrained,
    /// SHA-256 of its files.
    pub hash: String,
    /// The setting that its weights keep, as on the command line: `num_buckets=4`; empty for most mechanisms.
    pub kept: String,
}

/// The same in the request of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartRequest {
    pub folder: String,
    /// SHA-256 of its files.
    pub encoder: String,
    /// Number of ids.
    pub vocab: u64,
    pub positions: u64,
    /// Epsilon of LayerNorm.
    pub eps: f64,
    /// The setting that its weights keep.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kept: String,
}

impl From<&StartEncoder> for StartRequest {
    fn from(start: &StartEncoder) -> Self {
        let StartEncoder { encoder, hash, kept } = start;
        Self {
            folder: encoder.folder.display().to_string(),
            encoder: hash.clone(),
            vocab: encoder.vocab as u64,
            positions: encoder.positions as u64,
            eps: encoder.eps,
            kept: kept.clone(),
        }
    }
}

impl StartRequest {
    /// No encoder, in the same folder: where an encoder lies does not matter to what is trained.
    pub fn elsewhere(&self) -> Self {
        let Self { folder, kept, .. } = self.clone();
        Self { folder, kept, encoder: String::new(), vocab: 0, positions: 0, eps: 0.0 }
    }
}

/// The setting of `choice` that the weights of `encoder` keep, as in the model that they were trained in; empty where there is none,
/// or `choice` says another.
fn kept(encoder: &Pretrained, choice: &MechanismChoice) -> String {
    let own = (encoder.attention.entry.name == choice.entry.name).then_some(choice.entry);
    let setting = own.and_then(|entry| entry.in_models.kept_by_weights);
    let setting = setting.and_then(|setting| setting(&encoder.attention.knobs, encoder.positions));
    let free = setting.filter(|(name, _)| !choice.knobs.differs(choice.entry.knobs, name));
    free.map_or_else(String::new, |(name, value)| format!("{name}={value}"))
}

/// Fits the weights of `encoder` to `model`; what is to be said of them: `reformer with num_buckets=4`.
pub fn fit(encoder: &Pretrained, model: &RobertaConfig, kept: &str) -> anyhow::Result<String> {
    let weights = encoder.weights()?;
    let drawn = weights.redrawn(model)?;
    weights.fit(model)?;
    let kept = if kept.is_empty() { String::new() } else { format!(" with {kept}") };
    let drawn = if drawn.is_empty() {
        String::new()
    } else {
        format!(", whose {} is drawn anew", drawn.join(" and "))
    };
    Ok(format!("{}{kept}{drawn}", encoder.attention.label()))
}

/// In words, that `encoder` was trained with other settings of its mechanism than `choice`, but for those that follow the length.
pub fn other_encoder(encoder: &Pretrained, choice: &MechanismChoice) -> Option<String> {
    let models = &choice.entry.in_models;
    let kept = models.kept_by_weights.and_then(|kept| kept(&encoder.attention.knobs, encoder.positions));
    let by_length = [models.follows_length.map(|knob| knob.name()), kept.map(|(name, _)| name)];
    let mut settings = choice.knobs.iter().filter(|(name, _)| !by_length.contains(&Some(name)));
    let other = settings.any(|(name, value)| {
        encoder.attention.knobs.iter().any(|(known, own)| known == name && own != value)
    });
    other.then(|| format!("encoder of {}", encoder.attention.label()))
}

/// `choice` with the setting that weights keep.
pub fn keeping(choice: &MechanismChoice, kept: &str) -> Result<MechanismChoice, ResolveError> {
    if kept.is_empty() {
        return Ok(choice.clone());
    }
    let label = choice.label();
    let between = if label.contains(':') { ',' } else { ':' };
    let models = format!("{label}{between}{kept}").parse().map_err(ResolveError::wrong)?;
    let choices = choose(&models).map_err(ResolveError::wrong)?;
    choices.into_iter().next().ok_or_else(|| ResolveError::wrong(format!("{label} does not take {kept}")))
}

/// Name under which the checksum of the tokenizer of the encoder with the checksum `hash` stands in a plan.
pub fn tokenizer_name(hash: &str) -> String {
    format!("tokenizer of encoder {}", hash.get(..12).unwrap_or(hash))
}

/// The encoder in `folder`, which must still be the one with the checksum `hash`.
pub fn unchanged(folder: &str, hash: &str) -> Result<Pretrained, String> {
    let start = Pretrained::open(Path::new(folder)).map_err(|error| error.to_string())?;
    match start.hash() {
        Ok(found) if found == hash => Ok(start),
        Ok(_) => Err(format!("{folder} changed since the plan was made; run the command again")),
        Err(error) => Err(error.to_string()),
    }
}

/// The encoder that the line of `pick` starts from: the first one with the sizes of its preset and trained with its mechanism,
/// as far as there is one. Hashes of files that were read before are in `hashes`.
pub fn of(
    pick: &GridEntry,
    hashes: &mut BTreeMap<PathBuf, String>,
) -> Result<Option<StartEncoder>, PlanError> {
    let (Some(Words(folders)), Ok(choice)) = (&pick.settings.from, &pick.choice) else { return Ok(None) };
    let fits = |one: &Pretrained| {
        let preset = masked_lm::preset_of(&one.backbone, one.vocab);
        let sized = pick.settings.preset.as_deref().is_none_or(|wanted| preset == Some(wanted));
        (sized, one.attention.entry.name == choice.entry.name)
    };
    let mut found: Option<Pretrained> = None;
    for folder in folders {
        let Some(one) = Pretrained::find(Path::new(folder), choice).map_err(PlanError::new)? else {
            continue;
        };
        if found.as_ref().is_none_or(|found| fits(&one) > fits(found)) {
            found = Some(one);
        }
    }
    let Some(found) = found else {
        let (folders, name) = (folders.join(", "), &pick.model);
        return Err(PlanError(format!(
            "--from {folders}: no encoder there starts {name}; train one with effattn mlm --model {name}"
        )));
    };
    found.becomes(choice).map_err(PlanError::new)?;
    let hash = match hashes.get(&found.folder) {
        Some(hash) => hash.clone(),
        None => found.hash().map_err(PlanError::new)?,
    };
    hashes.insert(found.folder.clone(), hash.clone());
    let kept = kept(&found, choice);
    Ok(Some(StartEncoder { encoder: found, hash, kept }))
}

/// Preset and sizes of the line of `pick`: those of the encoder, where there is one; `usual` where nothing says the preset.
pub fn sizes(
    pick: &GridEntry,
    start: Option<&Pretrained>,
    usual: &str,
) -> Result<(String, SizeOverrides), PlanError> {
    let said = SizeOverrides::of(&pick.settings);
    let Some(start) = start else {
        return Ok((pick.settings.preset.clone().unwrap_or_else(|| usual.to_owned()), said));
    };
    if let Some(size) =
        (SizeOverrides { dropout: None, attention_dropout: None, ..said.clone() }).words().first()
    {
        return Err(PlanError(format!("--from brings the encoder's sizes; leave {size} out")));
    }
    let own = masked_lm::preset_of(&start.backbone, start.vocab);
    let preset =
        pick.settings.preset.clone().or_else(|| own.map(str::to_owned)).unwrap_or_else(|| usual.to_owned());
    let there = masked_lm::preset(&preset).map(|(backbone, ..)| backbone);
    let other =
        |size: usize, of: fn(&Backbone) -> usize| (there.map(of) != Some(size)).then_some(size as u64);
    let backbone = &start.backbone;
    let rate = |of: fn(&Backbone) -> f64| (there.map(of) != Some(of(backbone))).then(|| of(backbone));
    Ok((
        preset,
        SizeOverrides {
            layers: other(backbone.layers, |of| of.layers),
            width: other(backbone.width, |of| of.width),
            heads: other(backbone.heads, |of| of.heads),
            ffn: other(backbone.ffn, |of| of.ffn),
            pooling: None,
            dropout: said.dropout.or_else(|| rate(|of| of.dropout)),
            attention_dropout: said.attention_dropout.or_else(|| rate(|of| of.attention_dropout)),
        },
    ))
}
