//! What the plans of training runs share.

use crate::protocol::grid::PlanError;
use crate::protocol::model_spec::ModelSpec;
use crate::run::plan::PublishedMatch;
use effattn_record::config::lists::{Batches, Lengths};
use effattn_record::config::settings::{DtypeName, Settings};
use effattn_record::departures::leaves_share;
use effattn_record::{Row, departures};

/// Length and batch size of `settings`, where they are said: `protocol` trains with one of each.
pub fn one_of_each(settings: &Settings, protocol: &str) -> Result<(Option<u64>, Option<u64>), PlanError> {
    let one = |list: Option<&Vec<u64>>| match list.map(Vec::as_slice) {
        None => Ok(None),
        Some([value]) => Ok(Some(*value)),
        Some(_) => {
            Err(PlanError(format!("{protocol} trains at one length and one batch size; give one of each")))
        }
    };
    let len = one(settings.len.as_ref().map(|Lengths(list)| list))?;
    Ok((len, one(settings.batch.as_ref().map(|Batches(list)| list))?))
}

/// Parts that an update of `batch` examples is cut into; `usual` where nothing is said.
pub fn micro_batches(settings: &Settings, batch: u64, usual: u64) -> Result<u64, PlanError> {
    let parts = settings.accumulate.unwrap_or(usual);
    if batch.is_multiple_of(parts) {
        return Ok(parts);
    }
    Err(PlanError(format!("--accumulate {parts} does not divide the batch of {batch}; choose a divisor")))
}

/// What differs from the protocol in a run, and which share of the protocol's steps it makes.
#[derive(Clone, Debug, PartialEq)]
pub struct ProtocolDiff {
    /// Settings that are not the protocol's, in words: with any of them there is no share.
    pub settings: Vec<String>,
    /// Steps made, and those of the protocol.
    pub steps: (u64, u64),
}

impl ProtocolDiff {
    /// Notes `name` where the values differ.
    pub fn note<T: PartialEq + std::fmt::Display>(&mut self, name: &str, here: T, there: T) {
        if here != there {
            self.settings.push(format!("{name} {here} ({there})"));
        }
    }

    /// Notes the highest rate where it is not the protocol's.
    pub fn rate(&mut self, here: f64, there: f64) {
        if here != there {
            self.settings.push(format!("rate {here:e} ({there:e})"));
        }
    }

    /// Notes sizes that are not the preset's, and products of another format.
    pub fn model(&mut self, spec: &ModelSpec) {
        self.settings.extend(spec.sizes.words());
        if spec.dtype != DtypeName::F32 {
            self.settings.push(format!("{} products", spec.dtype));
        }
    }

    /// Says in `row` what differs, also from what the number `beside` it belongs to.
    pub fn write_to(mut self, beside: Option<PublishedMatch>, row: &mut Row) {
        self.settings.extend(beside.into_iter().flat_map(|beside| beside.foreign));
        (row.fraction, row.differs) = (self.fraction(), self.words());
        departures::complete(std::slice::from_mut(row), &Default::default());
    }

    /// The share of the protocol; none where it trains nothing.
    pub fn fraction(&self) -> Option<f64> {
        let (steps, whole) = self.steps;
        let whole_protocol = whole > 0 && self.settings.iter().all(|words| leaves_share(words));
        whole_protocol.then(|| (steps as f64 / whole as f64).min(1.0))
    }

    /// Everything in words: what is here, and in parentheses what the protocol has.
    pub fn words(&self) -> Option<String> {
        let (steps, whole) = self.steps;
        let steps = (steps != whole).then(|| format!("steps {steps} ({whole})"));
        let words: Vec<String> = steps.into_iter().chain(self.settings.iter().cloned()).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}
