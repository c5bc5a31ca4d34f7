//! What a program says that it can do, and what it is therefore not asked.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::description::Description;
use super::process::{Conditions, Program};
use super::wire::Message;
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use effattn_record::Pass;

/// Its answer to `describe`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Abilities {
    /// What it can do with every mechanism, by our names.
    pub mechanisms: BTreeMap<String, Ability>,
    /// Number formats that it computes in.
    #[serde(default = "f32_only")]
    pub dtypes: Vec<String>,
    /// Devices, without their numbers.
    #[serde(default = "cpu_only")]
    pub devices: Vec<String>,
}

/// What it can do with a mechanism.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ability {
    /// `train` where it has gradients. Words that are new to us are passed over.
    #[serde(deserialize_with = "known_passes")]
    pub passes: Vec<Pass>,
    /// Values of knobs that it computes; a knob without entry may have any.
    #[serde(default)]
    pub knobs: BTreeMap<String, Vec<Value>>,
    /// Whether it has a causal and a bidirectional form.
    #[serde(default = "both")]
    pub causal: Vec<bool>,
}

fn known_passes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Pass>, D::Error> {
    let words = Vec::<String>::deserialize(from)?;
    Ok([Pass::Infer, Pass::Train]
        .into_iter()
        .filter(|pass| words.iter().any(|word| word == pass.word()))
        .collect())
}

fn f32_only() -> Vec<String> {
    vec!["f32".to_owned()]
}

fn cpu_only() -> Vec<String> {
    vec!["cpu".to_owned()]
}

fn both() -> Vec<bool> {
    vec![false, true]
}

impl Abilities {
    /// Asks `program`, started from `description`.
    pub fn of(
        program: &mut Program,
        description: &Description,
        conditions: &Conditions,
    ) -> Result<Result<Self, CellFailure>, RunError> {
        let answer = program.ask(Message::request("describe"), conditions)?;
        Ok(answer.and_then(|answer| answer.read::<Self>()).map(|said| {
            let ours = |(name, ability): (String, Ability)| (description.ours(&name).to_owned(), ability);
            Self { mechanisms: said.mechanisms.into_iter().map(ours).collect(), ..said }
        }))
    }

    /// What it can do with `mechanism`, with these knobs; else why it is not asked.
    pub fn ability(
        &self,
        mechanism: &str,
        knobs: &Map<String, Value>,
        causal: bool,
    ) -> Result<&Ability, String> {
        let Some(ability) = self.mechanisms.get(mechanism) else {
            let names: Vec<&str> = self.mechanisms.keys().map(String::as_str).collect();
            return Err(format!("it does not do {mechanism}; it does {}", names.join(", ")));
        };
        if !ability.causal.contains(&causal) {
            let form = if causal { "causal" } else { "bidirectional" };
            return Err(format!("it has no {form} form of {mechanism}"));
        }
        for (knob, allowed) in &ability.knobs {
            let Some(value) = knobs.get(knob) else { continue };
            if !allowed.iter().any(|one| same(one, value)) {
                let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
                return Err(format!("{knob}={value} is none of what it does: {}", allowed.join(", ")));
            }
        }
        Ok(ability)
    }

    /// Why it cannot compute in `dtype` on `device`.
    pub fn elsewhere(&self, dtype: &str, device: &str) -> Option<String> {
        let kind = device.split(':').next().unwrap_or_default();
        if !self.dtypes.iter().any(|one| one == dtype) {
            return Some(format!("it computes {}, not {dtype}; choose with --dtype", self.dtypes.join(", ")));
        }
        let absent = !self.devices.iter().any(|one| one == kind);
        absent.then(|| {
            format!("it computes on {}, not on {device}; choose with --device", self.devices.join(", "))
        })
    }
}

/// Whether two values are one number or equal: programs write 1 for 1.0.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64())
}
