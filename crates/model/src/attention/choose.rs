//! From what a user wrote (`ls:w=16,r=2,'lin*'`) to mechanisms of the table with their settings.

use super::knobs::{KnobError, Knobs};
use super::{MechanismEntry, entries};
use effattn_record::config::lists::{MechanismSpec, Models};
use effattn_record::config::unknown;

/// A mechanism with its settings.
#[derive(Clone)]
pub struct MechanismChoice {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// Every knob.
    pub knobs: Knobs,
    /// The settings that differ from the defaults, `w=16,r=2`; none for the defaults.
    pub variant: Option<String>,
    /// Knobs that were named with their default value: where a preset sets another one, the named one holds.
    pub named: Vec<&'static str>,
}

/// A list of mechanisms that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChooseError {
    /// A name or pattern that no mechanism has.
    #[error("{0}")]
    Name(String),
    /// A knob.
    #[error(transparent)]
    Knob(#[from] KnobError),
}

impl MechanismChoice {
    /// A mechanism with its defaults.
    pub fn default_of(entry: &'static MechanismEntry) -> Self {
        Self { entry, knobs: Knobs::defaults(entry.knobs), variant: None, named: Vec::new() }
    }

    /// The settings that were given: those that differ from the defaults, and named ones, as text.
    pub fn given(&self) -> Vec<(&'static str, String)> {
        let defaults = Knobs::defaults(self.entry.knobs);
        let settings = self.knobs.iter().zip(defaults.iter());
        let given = settings.filter(|(now, before)| now != before || self.named.contains(&now.0));
        given.map(|((name, value), _)| (name, value.to_string())).collect()
    }

    /// Name and settings as on the command line.
    pub fn label(&self) -> String {
        self.label_under(&[])
    }

    /// The same under a preset that sets the knobs `set`: those of them that were named belong to the name, default or not.
    pub fn label_under(&self, set: &[&str]) -> String {
        let also: Vec<&str> = self.named.iter().copied().filter(|name| set.contains(name)).collect();
        let variant = match (&self.variant, also.as_slice()) {
            (variant, []) => variant.clone(),
            (_, also) => Some(self.knobs.changes_and(self.entry.knobs, also)),
        };
        variant.map_or_else(|| self.entry.name.to_owned(), |variant| format!("{}:{variant}", self.entry.name))
    }
}

/// The choices of `models`, patterns in the order of the table, repetitions dropped.
pub fn choose(models: &Models) -> Result<Vec<MechanismChoice>, ChooseError> {
    let mut choices: Vec<MechanismChoice> = Vec::new();
    for variant in &models.0 {
        for choice in choose_one(variant)? {
            if choices.iter().all(|known| (known.label(), &known.named) != (choice.label(), &choice.named)) {
                choices.push(choice);
            }
        }
    }
    Ok(choices)
}

fn choose_one(variant: &MechanismSpec) -> Result<Vec<MechanismChoice>, ChooseError> {
    let entries = entries();
    if variant.is_pattern() {
        let matching = entries.iter().filter(|entry| variant.matches(entry.name));
        let choices: Vec<MechanismChoice> =
            matching.map(|entry| MechanismChoice::default_of(entry)).collect();
        if choices.is_empty() {
            let names = entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
            return Err(ChooseError::Name(format!(
                "no mechanism matches {:?}; known: {names}",
                variant.name
            )));
        }
        return Ok(choices);
    }
    let names = entries.iter().map(|entry| entry.name);
    let entry = entries.iter().find(|entry| entry.name == variant.name);
    let entry = entry.ok_or_else(|| ChooseError::Name(unknown("mechanism", &variant.name, names)))?;
    let given = variant.knobs.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let knobs = Knobs::parse(entry.name, entry.knobs, given)?;
    let changes = knobs.changes(entry.knobs);
    // compat stands for other knobs, which are set and differ
    let said = |name: &str| name != "compat" && variant.knobs.iter().any(|(said, _)| said == name);
    let named = entry.knobs.iter().map(|knob| knob.name);
    let named: Vec<_> = named.filter(|name| said(name) && !knobs.differs(entry.knobs, name)).collect();
    let knobs = knobs.naming(named.iter().copied());
    Ok(vec![MechanismChoice { entry, knobs, variant: (!changes.is_empty()).then_some(changes), named }])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::TABLE;

    fn labels(text: &str) -> Result<String, String> {
        let choices = choose(&text.parse().unwrap()).map_err(|error| error.to_string())?;
        Ok(choices.iter().map(MechanismChoice::label).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn names_knobs_and_patterns() {
        assert_eq!(labels("ls:w=16,r=2,full"), Ok("ls:w=16,r=2 full".into()));
        assert_eq!(labels("ls:w=8"), Ok("ls".into()), "the default is no variant");
        let named = &choose(&"ls:w=8,r=2".parse().unwrap()).unwrap()[0];
        assert_eq!((named.label().as_str(), named.named.as_slice()), ("ls:r=2", ["w"].as_slice()));
        assert_eq!(named.label_under(&["w", "l"]), "ls:w=8,r=2", "a preset that sets w does not win");
        assert_eq!(labels("full,fu*,full"), Ok("full".into()));
        assert_eq!(labels("all").unwrap().split(' ').count(), TABLE.len());
    }

    #[test]
    fn a_knob_that_is_named_without_effect_is_refused_though_its_value_is_the_default() {
        let shape = crate::attention::Shape { queries: 64, keys: 64, ..Default::default() };
        let admits = |text: &str| {
            let choice = choose(&text.parse().unwrap()).unwrap().remove(0);
            choice.entry.admits(&choice.knobs, &shape)
        };
        let default = MechanismChoice::default_of(choose(&"sinkhorn".parse().unwrap()).unwrap()[0].entry);
        let knob = |name: &str| default.knobs.iter().find(|(own, _)| *own == name).unwrap().1.to_string();
        for name in ["sort_activation", "temperature", "iters"] {
            let set = format!("{name}={}", knob(name));
            assert_eq!(admits(&format!("sinkhorn:{set}")), Ok(()), "{set} alone is what it says");
            let error = admits(&format!("sinkhorn:compat=lra,{set}")).unwrap_err();
            assert!(error.contains(&set) && error.contains(&format!("{name} has no effect")), "{error}");
        }
        assert_eq!(admits("sinkhorn:compat=lra"), Ok(()));
    }

    #[test]
    fn mistakes_name_the_nearest() {
        assert!(labels("cosfomer").unwrap_err().contains("did you mean cosformer?"));
        assert!(labels("x*").unwrap_err().starts_with("no mechanism matches \"x*\"; known: full"));
        assert!(labels("ls:ww=3").unwrap_err().contains("no knob"));
        assert!(labels("ls:w=-1").unwrap_err().contains("w=-1 is not allowed"));
    }
}
