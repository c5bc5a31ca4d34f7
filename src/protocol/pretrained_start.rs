//! `--from`: the pretrained encoders that fine-tuning and further masked training start from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::grid::{GridEntry, PlanError};
use crate::train::pretrained::Pretrained;
use effattn_model::Backbone;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_model::attention::knobs::Value;
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

/// The setting that the weights of `encoder` keep in a model of `choice`, as in the one that they were trained in.
fn setting_of_weights(encoder: &Pretrained, choice: &MechanismChoice) -> Option<(&'static str, Value)> {
    let own = (encoder.attention.entry.name == choice.entry.name).then_some(choice.entry);
    let kept = own.and_then(|entry| entry.in_models.kept_by_weights)?;
    kept(&encoder.attention.knobs, encoder.positions)
}

/// Whether `choice` says nothing of the knob called `name`.
fn leaves_open(choice: &MechanismChoice, name: &str) -> bool {
    !choice.knobs.differs(choice.entry.knobs, name) && !choice.named.contains(&name)
}

/// The setting that the weights of `encoder` keep, as on the command line; empty where there is none, or `choice` names one.
fn kept(encoder: &Pretrained, choice: &MechanismChoice) -> String {
    let setting = setting_of_weights(encoder, choice).filter(|(name, _)| leaves_open(choice, name));
    setting.map_or_else(String::new, |(name, value)| format!("{name}={value}"))
}

/// Makes sure that the weights of `encoder` fit `model`: what is to be said of them (`reformer with num_buckets=4`), and which
/// constants of the mechanism a longer model draws instead of theirs (`rand_blocks drawn anew`).
pub fn check_fit(
    encoder: &Pretrained,
    model: &RobertaConfig,
    kept: &str,
) -> anyhow::Result<(String, Option<String>)> {
    let weights = encoder.weights()?;
    let drawn = weights.redrawn(model)?;
    weights.fit(model)?;
    let drawn = (!drawn.is_empty()).then(|| format!("{} drawn anew", drawn.join(" and ")));
    let kept = if kept.is_empty() { String::new() } else { format!(" with {kept}") };
    let beside = drawn.as_ref().map_or_else(String::new, |drawn| format!(", {drawn}"));
    Ok((format!("{}{kept}{beside}", encoder.attention.label()), drawn))
}

/// In words, that `encoder` was trained with other settings of its mechanism than `choice`, but for those that follow the length.
pub fn other_encoder(encoder: &Pretrained, choice: &MechanismChoice) -> Option<String> {
    let (own, trained) = (choice, &encoder.attention);
    let follows_length = own.entry.in_models.follows_length.map(|knob| knob.name());
    let kept = setting_of_weights(encoder, choice);
    let is_other = |(name, value): (&'static str, &Value)| {
        if follows_length == Some(name) {
            return false;
        }
        match kept.as_ref().filter(|(kept, _)| *kept == name && leaves_open(trained, name)) {
            // one number and a list of one are the same setting
            Some((_, kept)) => !leaves_open(own, name) && value.to_string() != kept.to_string(),
            None => trained.knobs.iter().any(|(known, there)| known == name && there != value),
        }
    };
    own.knobs.iter().any(is_other).then(|| format!("encoder of {}", trained.label()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::definition::DataDirs;
    use crate::protocol::grid::GridFlags;
    use crate::protocol::mlm::Mlm;
    use crate::protocol::{Protocol, resolve};
    use crate::run::plan::Plan;
    use effattn_record::config::lists::Lengths;
    use effattn_record::config::settings::Settings;

    #[test]
    fn further_training_says_what_it_starts_from_and_what_is_drawn_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (model, _) = crate::train::pretrained::tests::small(folder.path());
        crate::train::pretrained::tests::encoder(folder.path(), &model, "bigbird:block=2");
        let differs = |len: u64| {
            let said = Settings {
                from: Some(Words(vec![folder.path().display().to_string()])),
                task: Some(Words(vec!["sample".to_owned()])),
                len: Some(Lengths(vec![len])),
                ..Settings::NONE
            };
            let flags = GridFlags {
                settings: said,
                model: Some("bigbird:block=2".parse().unwrap()),
                ..GridFlags::default()
            };
            let cells = Protocol::cells(&Mlm, &resolve(&flags, &Mlm).unwrap(), 1).unwrap();
            let mut plan = Plan { cells, ..Plan::default() };
            Protocol::prepare(
                &Mlm,
                &mut plan,
                &DataDirs { data: folder.path().to_owned(), results: folder.path() },
            )
            .unwrap();
            plan.cells[0].row.differs.clone().unwrap()
        };
        let (own, longer) = (differs(16), differs(40));
        assert!(own.contains("; goes on from bigbird:block=2") && !own.contains("anew"), "{own}");
        assert!(longer.ends_with("; rand_blocks drawn anew"), "{longer}");
        for nonsense in ["eps", "vocab", "positions"] {
            assert!(!longer.contains(nonsense), "the encoder's, and said: {longer}");
        }
    }
}
