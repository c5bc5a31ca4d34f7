//! One row: one metric of one cell, in long form.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a cell ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Measured.
    Ok,
    /// Asked for more memory than the limit.
    Oom,
    /// Loss or output became NaN or infinite.
    Diverged,
    /// Ran past its time limit.
    Timeout,
    /// The mechanism cannot do this, or is not built.
    Unsupported,
    /// Broke.
    Failed,
    /// Stopped by the user; the same command continues it.
    Interrupted,
    /// Not run, because a shorter one already ran out of memory or time.
    Implied,
    /// Only planned (`--dry-run`).
    Planned,
}

impl Outcome {
    /// The word in CSV and JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Oom => "oom",
            Self::Diverged => "diverged",
            Self::Timeout => "timeout",
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::Implied => "implied",
            Self::Planned => "planned",
        }
    }

    /// Whether a cell that ended so need not run again.
    pub const fn is_final(self) -> bool {
        !matches!(self, Self::Failed | Self::Interrupted | Self::Planned)
    }

    /// Whether the command that met it should exit with 1. Running out of memory or time is an answer.
    pub const fn is_failure(self) -> bool {
        match self {
            Self::Failed | Self::Diverged => true,
            Self::Ok
            | Self::Oom
            | Self::Timeout
            | Self::Unsupported
            | Self::Interrupted
            | Self::Implied
            | Self::Planned => false,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.word())
    }
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Forward.
    Infer,
    /// Forward, backward and optimizer.
    Train,
    /// The next token of every sequence, behind a state.
    Decode,
}

impl Pass {
    /// The word in CSV and on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Infer => "infer",
            Self::Train => "train",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.word())
    }
}

/// What a paper printed in the place of this row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Published {
    /// A number, in the row's unit.
    Value(f64),
    /// A mark such as `x` for out of memory.
    Outcome(Outcome),
}

impl Published {
    /// The number, where there is one.
    pub const fn value(self) -> Option<f64> {
        match self {
            Self::Value(value) => Some(value),
            Self::Outcome(_) => None,
        }
    }
}

/// One metric of one cell. `None` means not measured or not applicable, never 0 or NaN.
///
/// Columns are only added, at the end. Bytes are bytes, times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Suite, such as `cos-table5`; none for a plain command.
    pub suite: Option<String>,
    /// Command that measured it: `speed`, `memory`, `lra`, ...
    pub protocol: String,
    /// Task or corpus.
    pub task: Option<String>,
    /// Mechanism.
    pub model: String,
    /// Knobs that differ from the defaults, `w=16,r=2`; the file stem in `check`; none for the defaults.
    pub variant: Option<String>,
    /// Preset of the backbone.
    pub preset: Option<String>,
    /// `cpu`, `cuda:0`, `metal`.
    pub device: String,
    /// `f32`, `bf16`, `f16`.
    pub dtype: String,
    /// `fused` or `composed`.
    pub kernel: String,
    /// CPU threads.
    pub threads: Option<u64>,
    /// Samples per step.
    pub batch: Option<u64>,
    /// Sequence length.
    pub len: Option<u64>,
    /// Inference or training step.
    pub pass: Option<Pass>,
    /// Seed of weights and data order.
    pub seed: Option<u64>,
    /// What `value` is: `step_time`, `steps_per_second`, `peak_memory`, `accuracy`, ...
    pub metric: String,
    /// Its unit: `s`, `1/s`, `B`, `%`, ...
    pub unit: String,
    /// The value: for times the median over `n` runs.
    pub value: Option<f64>,
    /// Standard deviation over the runs.
    pub std: Option<f64>,
    /// Number of runs (or seeds) behind the value.
    pub n: Option<u64>,
    /// Lower end of the 95 % interval of the value.
    pub ci_low: Option<f64>,
    /// Upper end of the 95 % interval of the value.
    pub ci_high: Option<f64>,
    /// How the cell ended.
    pub outcome: Outcome,
    /// What went wrong, or a remark on how it ended.
    pub error: Option<String>,
    /// Trained numbers of the model.
    pub params: Option<u64>,
    /// Multiply-adds counted once, LayerNorm 5 per element: whole model, one forward, one sample.
    pub flops: Option<u64>,
    /// The usual count: a multiply-add is 2.
    pub flops_2x: Option<u64>,
    /// Multiply-adds of the attention cores of all layers, whole batch, one forward.
    pub core_macs: Option<u64>,
    /// Bytes that are there before the step: weights, and in training the optimizer's moments.
    pub bytes: Option<u64>,
    /// What a causal decoder would keep per sequence at this length, all layers.
    pub state_bytes: Option<u64>,
    /// Highest live bytes of the worker above what it held before the model was built.
    pub peak_bytes: Option<u64>,
    /// Whether the mechanism masks a dense matrix, so that its speed says nothing about it.
    pub simulated: Option<bool>,
    /// What the paper printed.
    pub published: Option<Published>,
    /// Share of the protocol that was run (steps x data), where every other setting is the protocol's.
    pub fraction: Option<f64>,
    /// Version of effattn.
    pub version: String,
    /// Commit it was built from.
    pub commit: Option<String>,
    /// In words, what differs from the protocol that the published number belongs to; none where nothing is known to.
    #[serde(default)]
    pub differs: Option<String>,
    /// Settings of the cell that are not the protocol's usual ones: `layers=8 runs=200`.
    #[serde(default)]
    pub settings: Option<String>,
    /// Start of the checksum of the words that texts were cut into (a tokenizer): losses of different ones do not compare.
    #[serde(default)]
    pub words: Option<String>,
    /// Host name of the machine that computed it.
    #[serde(default)]
    pub machine: Option<String>,
    /// Operation and part of the step that the row is about, `ffn backward`; none for the whole cell.
    #[serde(default)]
    pub operation: Option<String>,
    /// Program that computed it, in runs with `--program`: `effattn` or a program's name; none: effattn.
    #[serde(default)]
    pub program: Option<String>,
}

/// The columns in order.
pub const COLUMNS: [&str; 41] = [
    "suite",
    "protocol",
    "task",
    "model",
    "variant",
    "preset",
    "device",
    "dtype",
    "kernel",
    "threads",
    "batch",
    "len",
    "pass",
    "seed",
    "metric",
    "unit",
    "value",
    "std",
    "n",
    "ci_low",
    "ci_high",
    "outcome",
    "error",
    "params",
    "flops",
    "flops_2x",
    "core_macs",
    "bytes",
    "state_bytes",
    "peak_bytes",
    "simulated",
    "published",
    "fraction",
    "version",
    "commit",
    "differs",
    "settings",
    "words",
    "machine",
    "operation",
    "program",
];

/// Settings that make no other cell: what has a column of its own, which says it for every row; what is measured or tested
/// besides; and where files lie.
const BESIDE: [&str; 17] = [
    "device",
    "dtype",
    "kernel",
    "threads",
    "preset",
    "batch",
    "len",
    "profile",
    "accumulate",
    "allow_partial",
    "also",
    "similarity",
    "insertions",
    "evaluation",
    "from",
    "folder",
    "encoder",
];
/// Settings that say how often and how long steps are measured. (The `warmup` of a training is one of its learning rate.)
const HOW_OFTEN: [&str; 5] = ["warmup", "runs", "min_runs", "max_time", "timeout"];

/// So many columns have always been there; the ones behind them may be absent in older files.
pub const FIRST_COLUMNS: usize = 35;

/// `value` to twelve significant digits, none if it is not finite: short in CSV, and read back from JSON
/// to the same bits (from 1e-10 on).
pub fn rounded(value: f64) -> Option<f64> {
    if !value.is_finite() {
        return None;
    }
    format!("{value:.11e}").parse().ok()
}

impl Row {
    /// The ends of the 95 % interval; rows that others wrote may have some that are no numbers.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.ci_low.zip(self.ci_high).filter(|(low, high)| low.is_finite() && high.is_finite())
    }

    /// What [`Self::settings`] says, setting by setting: `layers=8`.
    pub fn each_setting(&self) -> impl Iterator<Item = &str> {
        self.settings.as_deref().unwrap_or_default().split(' ').filter(|setting| !setting.is_empty())
    }

    /// The value of the setting `key`, if the row says it.
    pub fn setting(&self, key: &str) -> Option<&str> {
        self.each_setting().find_map(|setting| setting.strip_prefix(key)?.strip_prefix('='))
    }

    /// Those of [`Self::each_setting`] that make it another cell than one without them, in a fixed order: `layers=8`, and not how
    /// often it was measured.
    pub fn defining_settings(&self) -> Vec<&str> {
        let beside = |setting: &str| {
            let key = setting.split_once('=').map_or(setting, |(key, _)| key);
            BESIDE.contains(&key) || self.is_measured() && HOW_OFTEN.contains(&key)
        };
        let mut settings: Vec<&str> = self.each_setting().filter(|setting| !beside(setting)).collect();
        settings.sort_unstable();
        settings
    }

    /// A row of `protocol` for `model` with this build's version and nothing measured yet.
    pub fn new(protocol: &str, model: &str) -> Self {
        Self {
            suite: None,
            protocol: protocol.to_owned(),
            task: None,
            model: model.to_owned(),
            variant: None,
            preset: None,
            device: "cpu".to_owned(),
            dtype: "f32".to_owned(),
            kernel: "fused".to_owned(),
            threads: None,
            batch: None,
            len: None,
            pass: None,
            seed: None,
            metric: String::new(),
            unit: String::new(),
            value: None,
            std: None,
            n: None,
            ci_low: None,
            ci_high: None,
            outcome: Outcome::Planned,
            error: None,
            params: None,
            flops: None,
            flops_2x: None,
            core_macs: None,
            bytes: None,
            state_bytes: None,
            peak_bytes: None,
            simulated: None,
            published: None,
            fraction: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: crate::build_commit().map(str::to_owned),
            differs: None,
            settings: None,
            words: None,
            machine: None,
            operation: None,
            program: None,
        }
    }

    /// The same cell with another metric; the value is [`rounded`], and none if it is not finite.
    #[must_use]
    pub fn with(&self, metric: &str, unit: &str, value: Option<f64>) -> Self {
        let value = value.and_then(rounded);
        Self { metric: metric.to_owned(), unit: unit.to_owned(), value, ..self.clone() }
    }

    /// The same cell with how it ended.
    #[must_use]
    pub fn with_outcome(&self, outcome: Outcome, error: Option<String>) -> Self {
        Self { outcome, error, ..self.clone() }
    }

    /// Mechanism and knobs, and the program where it is not effattn: `ls:w=16,r=2`, `linear (torch)`.
    pub fn label(&self) -> String {
        match self.other_program() {
            Some(program) => format!("{} ({program})", self.choice()),
            None => self.choice(),
        }
    }

    /// The program that computed it, where it is not effattn.
    pub fn other_program(&self) -> Option<&str> {
        self.program.as_deref().filter(|program| !matches!(*program, "" | "effattn"))
    }

    /// Whether it says how fast or how large something is, which belongs to the device; what was trained does not.
    pub fn is_measured(&self) -> bool {
        matches!(self.protocol.as_str(), "speed" | "memory")
    }

    /// Mechanism and knobs as on the command line: `ls:w=16,r=2`.
    pub fn choice(&self) -> String {
        match self.variant.as_deref() {
            None | Some("") => self.model.clone(),
            Some(variant) => format!("{}:{variant}", self.model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_the_fields_in_order() {
        let json = serde_json::to_value(Row::new("speed", "ls")).unwrap();
        let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, COLUMNS);
    }

    #[test]
    fn rounded_values_survive_json() {
        for (index, value) in
            [1.0 / 3.0, 2e-10 / 3.0, 1e9 / 7.0, -0.1, 0.0, 5.588_055_000_000_001e-4].iter().enumerate()
        {
            let value = rounded(*value).unwrap();
            let text = serde_json::to_string(&value).unwrap();
            assert_eq!(
                serde_json::from_str::<f64>(&text).unwrap().to_bits(),
                value.to_bits(),
                "{index} {text}"
            );
            assert!(text.len() < 20, "{text}");
        }
        assert_eq!((rounded(f64::INFINITY), rounded(2.0)), (None, Some(2.0)));
    }

    #[test]
    fn how_often_a_cell_is_measured_makes_no_other_cell() {
        let of = |protocol: &str, settings: &str| {
            let row = Row { settings: Some(settings.to_owned()), ..Row::new(protocol, "ls") };
            row.defining_settings().join(" ")
        };
        assert_eq!(of("speed", "max_time=1.0 runs=9 width=16 preset=ls-lra layers=1"), "layers=1 width=16");
        assert_eq!(of("charlm", "warmup=20 from=a"), "warmup=20", "a learning rate's");
        assert!(Row::new("speed", "ls").defining_settings().is_empty());
    }

    #[test]
    fn a_value_that_is_not_finite_is_not_a_value() {
        assert_eq!(Row::new("speed", "ls").with("loss", "nat", Some(f64::NAN)).value, None);
    }
}
