//! Conformance: outputs and gradients of every mechanism and model against golden files.
//!
//! A golden file is a safetensors file whose metadata choose mechanism, variant and knobs and give a
//! tolerance per tensor (`docs/spec/SPEC-*.md`). One verdict per file, with its worst tensor.

pub mod builtin;
mod classifier;
mod golden;
mod language;
mod mechanism;
mod short_conv;
mod train;
mod vision;
mod whole;
mod words;

use candle_core::Device;

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
    /// What is wrong besides numbers (a wrong multiply-add count, a number that is not finite).
    pub problem: Option<String>,
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
        }
    }

    /// Notes a problem that is no number; the first one stays.
    pub(crate) fn complain(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }
}

/// Checks one golden file given as bytes; `file` is what messages call it.
pub fn check_bytes(file: &str, bytes: &[u8], device: &Device) -> Result<FileVerdict, CheckError> {
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
        "train" => train::compute(&golden, device)?.verdict(&golden),
        level => Err(CheckError::UnknownMechanism { file: file.into(), mechanism: format!("level {level}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_that_asks_for_more_than_a_golden_file_has_is_refused_before_anything_is_allocated() {
        let (name, bytes) =
            builtin::BUILTIN_FILES.iter().find(|(name, _)| name.starts_with("local-lraquirk")).unwrap();
        assert!(check_bytes(name, bytes, &Device::Cpu).unwrap().passed());
        let front = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..front]).unwrap();
        let config = header["__metadata__"]["config"].as_str().unwrap();
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config["block"] = 65_536.into();
        header["__metadata__"]["config"] = config.to_string().into();
        let header = header.to_string().into_bytes();
        let changed = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[front..]].concat();
        let error = check_bytes(name, &changed, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("multiply-adds of attention; a golden file has at most"), "{error}");
    }
}
