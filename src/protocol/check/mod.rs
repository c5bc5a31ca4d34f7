//! Conformance: outputs and gradients of every mechanism and model against golden files.
//!
//! A golden file is a safetensors file whose metadata choose mechanism, variant and knobs and give a
//! tolerance per tensor (`docs/spec/SPEC-*.md`). One verdict per file, with its worst tensor.

pub mod builtin;
mod classifier;
mod golden;
mod language;
mod llama;
mod mechanism;
pub mod own_case;
pub mod program;
mod short_conv;
mod train;
mod vision;
mod whole;
mod words;

use std::fmt;
use std::path::Path;

use candle_core::Device;
use serde::Serialize;

use effattn_model::attention::knobs::Knobs;
use effattn_model::attention::{Idle, MechanismEntry, Shape};
use effattn_record::Outcome;

pub use golden::Golden;

/// What went wrong before anything could be compared.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// Not a golden file, or one that is cut off or damaged.
    #[error("{file} is not a golden file: {reason}")]
    NotGolden {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A mechanism this build does not have.
    #[error("{file} is about {mechanism:?}, which this version does not have")]
    UnknownMechanism {
        /// The file.
        file: String,
        /// The mechanism.
        mechanism: String,
    },
    /// The mechanism refused the file's settings or inputs.
    #[error("{file}: {reason}")]
    Refused {
        /// The file.
        file: String,
        /// What the mechanism said.
        reason: String,
    },
    /// A program that does not do this.
    #[error("{file}: {reason}")]
    NotAnswered {
        /// The file.
        file: String,
        /// What it said.
        reason: String,
    },
    /// A program that failed at it.
    #[error("{file}: {reason}")]
    Program {
        /// The file.
        file: String,
        /// How it ended.
        outcome: Outcome,
        /// What it said.
        reason: String,
    },
}

/// A number that was compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    /// Its place in the tensor.
    pub index: Vec<usize>,
    /// What was computed.
    pub got: f32,
    /// What the file says.
    pub want: f32,
}

/// The result of one file.
#[derive(Clone, Debug)]
pub struct FileVerdict {
    /// File stem.
    pub name: String,
    /// Mechanism.
    pub mechanism: String,
    /// Largest |a - b| / tolerance over all compared numbers; green up to 1.
    pub error_over_tolerance: f64,
    /// The tensor it belongs to.
    pub worst: String,
    /// Its element that is furthest off, where tensors were compared element by element.
    pub element: Option<Element>,
    /// What is wrong besides numbers (a wrong multiply-add count, a number that is not finite).
    pub problem: Option<String>,
    /// Knobs of its config that change nothing. The file of a single mechanism may name them: its config records every setting
    /// of the reference, and the numbers show whether they had an effect there.
    pub idle: Vec<IdleKnob>,
}

/// A knob that a golden file sets without effect.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdleKnob {
    /// The knob.
    pub knob: &'static str,
    /// Its value in the file.
    pub value: serde_json::Value,
    /// The condition that makes it idle, in words.
    pub why: &'static str,
}

impl IdleKnob {
    /// The idle knobs that the config of `golden` names, each once.
    fn of(golden: &Golden, entry: &MechanismEntry, knobs: &Knobs, shape: &Shape) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for &Idle { knob, why, .. } in entry.without_effect(knobs, shape) {
            let value = golden.config.get(knob).filter(|_| found.iter().all(|idle| idle.knob != knob));
            found.extend(value.map(|value| Self { knob, value: value.clone(), why }));
        }
        found
    }
}

impl fmt::Display for IdleKnob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.value.as_str().map_or_else(|| self.value.to_string(), str::to_owned);
        write!(f, "{}={value} has no effect {}", self.knob, self.why)
    }
}

impl FileVerdict {
    /// Whether the file is reproduced.
    pub fn passed(&self) -> bool {
        self.problem.is_none() && self.error_over_tolerance <= 1.0
    }

    /// Folds one comparison in.
    pub(crate) fn compare(&mut self, tensor: &str, ratio: f64) {
        if ratio.is_nan() {
            self.problem.get_or_insert_with(|| format!("{tensor} is not finite"));
        } else if ratio > self.error_over_tolerance {
            self.error_over_tolerance = ratio;
            tensor.clone_into(&mut self.worst);
            self.element = None;
        }
    }

    /// `grad_q is off by 3.1 times its tolerance at [0, 1, 4, 2]: 0.25 in the place of -0.25`, or the problem.
    pub fn fault(&self) -> String {
        if let Some(problem) = &self.problem {
            return problem.clone();
        }
        let at = self.element.as_ref().map_or_else(String::new, |Element { index, got, want }| {
            format!(" at {index:?}: {got} in the place of {want}")
        });
        format!("{} is off by {:.3} times its tolerance{at}", self.worst, self.error_over_tolerance)
    }

    /// Notes a problem that is no number; the first one stays.
    pub(crate) fn complain(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }
}

/// Checks one golden file given as bytes; `file` is what messages call it.
pub fn check_bytes(file: &str, bytes: &[u8], device: &Device) -> Result<FileVerdict, CheckError> {
    check_bytes_in(None, file, bytes, device)
}

/// [`check_bytes`] of a file in `folder`, beside which the checkpoint lies that it may name.
pub fn check_bytes_in(
    folder: Option<&Path>,
    file: &str,
    bytes: &[u8],
    device: &Device,
) -> Result<FileVerdict, CheckError> {
    let golden = Golden::read(file, bytes)?;
    match golden.meta("level") {
        "" if golden.meta("family") == "vision" => vision::check(&golden, device),
        "" if golden.meta("mechanism") == "shortconv" => short_conv::check(&golden, device),
        "" => mechanism::check(&golden, device),
        "classifier" => classifier::compute(&golden, device)?.verdict(&golden),
        "lm" => language::compute(&golden, device)?.verdict(&golden),
        "eval" => language::evaluate(&golden, device)?.verdict(&golden),
        "adaptive" => words::adaptive(&golden, device)?.verdict(&golden),
        "wordlm" => words::word_lm(&golden, device)?.verdict(&golden),
        "wordlm-eval" => words::word_lm_eval(&golden, device)?.verdict(&golden),
        "mlm" | "cls" => words::roberta(&golden, device)?.verdict(&golden),
        "llama" => llama::compute(&golden, device)?.verdict(&golden),
        "llama-decode" => llama::decode(&golden, device)?.verdict(&golden),
        "llama-checkpoint" => llama::checkpoint(&golden, folder, device)?.verdict(&golden),
        "train" => train::compute(&golden, device)?.verdict(&golden),
        level => Err(CheckError::UnknownMechanism { file: file.into(), mechanism: format!("level {level}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the golden file `name` with its metadata changed.
    fn changed(bytes: &[u8], change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let front = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..front]).unwrap();
        change(&mut header["__metadata__"]);
        let header = header.to_string().into_bytes();
        [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[front..]].concat()
    }

    #[test]
    fn a_config_that_asks_for_more_than_a_golden_file_has_is_refused_before_anything_is_allocated() {
        let (name, bytes) =
            builtin::BUILTIN_FILES.iter().find(|(name, _)| name.starts_with("local-lraquirk")).unwrap();
        assert!(check_bytes(name, bytes, &Device::Cpu).unwrap().passed());
        let changed = changed(bytes, |metadata| {
            let mut config: serde_json::Value =
                serde_json::from_str(metadata["config"].as_str().unwrap()).unwrap();
            config["block"] = 65_536.into();
            metadata["config"] = config.to_string().into();
        });
        let error = check_bytes(name, &changed, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("multiply-adds of attention; a golden file has at most"), "{error}");
    }

    #[test]
    fn what_accepts_every_number_is_no_tolerance() {
        let (name, bytes) = builtin::BUILTIN_FILES[0];
        for rtol in ["-1e9", "inf", "NaN"] {
            let changed = changed(bytes, |metadata| metadata["rtol"] = rtol.into());
            let error = check_bytes(name, &changed, &Device::Cpu).unwrap_err().to_string();
            assert!(error.contains("a tolerance is 0 or above, and finite"), "{error}");
        }
    }
}
