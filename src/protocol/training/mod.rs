//! Training runs as cells: a worker trains, its parent draws curves and keeps rows. What is trained is the
//! business of [`Job`]s: the Long Range Arena's tasks, character language models.

mod conduct;
pub mod work;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Task;
use crate::record::{Outcome, Published};
use crate::run::outcome::Ending;
use crate::train::session::{Point, Score};

pub use conduct::{Curve, conduct, curve_file};

/// What is asked of a worker that trains.
pub trait Job: Clone {
    /// The message to the worker.
    fn task(&self, memory_limit: u64, place: Place) -> Task;
    /// The chart that its curve belongs in.
    fn group(&self) -> &str;
    /// Optimizer steps in all.
    fn steps(&self) -> u64;
    /// Seed.
    fn seed(&self) -> u64;
    /// Most seconds.
    fn timeout(&self) -> Option<f64>;
    /// What is shown of an evaluation.
    fn shown(&self) -> Shown;
    /// What the papers print for `task`, where it is not the cell's.
    fn published(&self, _task: &str) -> Option<Published> {
        None
    }
}

/// What is shown of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// Column in `curve.csv`.
    pub name: &'static str,
    /// Unit in messages.
    pub unit: &'static str,
    /// The number.
    pub value: fn(&Score) -> f64,
    /// Whether less is better.
    pub less: bool,
}

impl Shown {
    /// The best of `points`.
    pub fn best(&self, points: &[Point]) -> Option<f64> {
        let values = points.iter().map(|point| (self.value)(&point.score));
        if self.less { values.reduce(f64::min) } else { values.reduce(f64::max) }
    }
}

/// What the worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum Answer {
    /// It goes on behind `step` with this curve.
    Started {
        /// Steps made before.
        step: u64,
        /// Evaluations made before.
        curve: Vec<Point>,
    },
    /// A step was made.
    Step {
        /// Number of steps made.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Seconds per step since the last message.
        seconds: f64,
    },
    /// An evaluation was made.
    Evaluated(Point),
    /// What it does when it does not train.
    Doing {
        /// In words.
        what: String,
    },
    /// All is done.
    Done(Done),
    /// It ended otherwise.
    Ended {
        /// How.
        outcome: Outcome,
        /// Why.
        reason: String,
    },
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// What was measured; the first is what the papers print.
    pub measures: Vec<Measure>,
    /// Share of the protocol's training data that was there.
    pub data_share: f64,
    /// Where that is not all of them: in words.
    pub differs: Option<String>,
    /// Highest live bytes.
    pub peak_bytes: Option<u64>,
}

/// One number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Metric, as in rows.
    pub metric: String,
    /// Unit.
    pub unit: String,
    /// Value.
    pub value: f64,
    /// Task, where it is not the cell's.
    pub task: Option<String>,
    /// Deviation and number of repetitions behind the value.
    pub spread: Option<(f64, u64)>,
}

impl Measure {
    /// `value` of `metric`.
    pub fn new(metric: &str, unit: &str, value: f64) -> Self {
        Self { metric: metric.to_owned(), unit: unit.to_owned(), value, task: None, spread: None }
    }
}

/// What differs from the protocol in a run, and which share of the protocol's steps it makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Differences {
    /// Settings that are not the protocol's, in words: with any of them there is no share.
    pub settings: Vec<String>,
    /// Steps made, and those of the protocol.
    pub steps: (u64, u64),
}

impl Differences {
    /// Notes `name` where the values differ.
    pub fn note<T: PartialEq + std::fmt::Display>(&mut self, name: &str, here: T, there: T) {
        if here != there {
            self.settings.push(format!("{name} {here} ({there})"));
        }
    }

    /// The share of the protocol.
    pub fn fraction(&self) -> Option<f64> {
        let (steps, whole) = self.steps;
        self.settings.is_empty().then(|| (steps as f64 / whole as f64).min(1.0))
    }

    /// Everything in words: what is here, and in parentheses what the protocol has.
    pub fn words(&self) -> Option<String> {
        let (steps, whole) = self.steps;
        let steps = (steps != whole).then(|| format!("steps {steps} ({whole})"));
        let words: Vec<String> = steps.into_iter().chain(self.settings.iter().cloned()).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// Where a run finds and keeps things; not part of what it computes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Place {
    /// Folder of the cell: checkpoints.
    pub folder: PathBuf,
    /// Folder of data sets.
    pub data: PathBuf,
    /// What the plan was made with: the checksum of every data set, by name.
    pub planned: BTreeMap<String, String>,
    /// Seconds between checkpoints.
    pub save: f64,
    /// Whether the first operation whose result is not finite is looked for in every step.
    pub detect_anomaly: bool,
}

impl Place {
    /// Makes sure that the data which were read are those of the plan: the rows say that they are.
    ///
    /// # Errors
    /// The cell ends: its data are others, or the plan knows nothing of them.
    pub fn same(&self, name: &str, read: &str) -> Result<(), Ending> {
        if self.planned.get(name).is_some_and(|planned| planned == read) {
            return Ok(());
        }
        let dir = self.data.display();
        let reason =
            format!("{name}: the data in {dir} changed since the plan was made; run the command again");
        Err(Ending::new(Outcome::Failed, reason))
    }

    /// Time between checkpoints.
    pub fn save(&self) -> Duration {
        Duration::try_from_secs_f64(self.save).unwrap_or(Duration::MAX)
    }
}

/// The folder of the cell called `key` in the folder of its run.
pub fn folder(run: &Path, key: &str) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.=".contains(c) { c } else { '_' };
    run.join("cells").join(key.chars().map(plain).collect::<String>())
}
