//! Cells of other programs: the same cells, weights and inputs as ours, asked over their pipe.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::first_step::{self, FirstStep};
use super::worker::{Answer, Bounds, time_limit};
use crate::program::abilities::Abilities;
use crate::program::description::Description;
use crate::program::wire::Message;
use crate::program::{Conditions, Program};
use crate::protocol::model_spec::ModelSpec;
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::Cell;
use crate::run::session::Session;
use effattn_model::ClassifierConfig;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::{OutputForm, entries};
use effattn_record::config::settings::DtypeName;
use effattn_record::{Outcome, Row};

/// The name of effattn in the column `program`.
pub const OURS: &str = "effattn";
/// How far a result of the first step may be from ours, as a share of the largest: whole models in f32, and in fewer bits.
const SAME_MODEL: f64 = 1e-3;
const SAME_MODEL_COARSE: f64 = 0.1;
/// How much longer a turn may take than its steps say, as a share, before it is remarked.
const CLOCKS: f64 = 0.05;

/// The program called `word`, whose file renames mechanisms that there are.
pub fn described(word: &str) -> Result<Description> {
    let description = Description::find(word)?;
    let names: Vec<&str> = entries().into_iter().map(|entry| entry.name).collect();
    match description.unknown_mechanism(&names) {
        Some((line, problem)) => bail!("--program {word}:{line}: {problem}"),
        None => Ok(description),
    }
}

/// Every cell of `cells` followed by the same cell of every program.
pub fn with_programs(cells: Vec<Cell>, programs: &[(String, Description)]) -> Vec<Cell> {
    let mut all = Vec::new();
    for mut cell in cells {
        cell.row.program = Some(OURS.to_owned());
        let theirs: Vec<Cell> = programs.iter().map(|(word, one)| theirs(&cell, word, one)).collect();
        all.push(cell);
        all.extend(theirs);
    }
    all
}

/// The cell of a program.
fn theirs(cell: &Cell, word: &str, description: &Description) -> Cell {
    let name = &description.name;
    let words = format!("{} {}", cell.words, crate::run::plan::key_word(name));
    let key = format!("{words}{}", &cell.key[cell.words.len()..]);
    let mut request = cell.request.clone();
    if let Value::Object(entries) = &mut request {
        entries.insert("program".to_owned(), word.into());
        entries.remove("profile");
    }
    let row = Row {
        program: Some(name.clone()),
        kernel: String::new(),
        published: None,
        peak_bytes: None,
        ..cell.row.clone()
    };
    let series = if cell.series.is_empty() { String::new() } else { format!("{name} {}", cell.series) };
    Cell { words, key, request, row, series, memory: None, ..cell.clone() }
}

/// Steps before the clock starts.
#[derive(Clone, Copy)]
pub struct WarmUp {
    /// Most of them; one is made in any case.
    pub steps: u64,
    /// Seconds after which no other begins.
    pub seconds: f64,
}

/// A program with a model, ready to step.
pub struct ProgramCell {
    /// Its process.
    pub program: Program,
    /// How long it may still compute; waiting for others does not count.
    left: Duration,
    /// Bytes that it holds.
    pub held: u64,
    /// Seconds of its turns by our clock and of their steps by its own.
    clocks: (f64, f64),
}

/// What a program leaves behind.
pub struct Finished {
    /// Peak memory by its own account, mostly growth of its resident size.
    pub peak_bytes: Option<u64>,
    /// How long it took.
    pub clocks: Clocks,
    /// What it said to be.
    pub version: String,
}

/// Seconds of the measured turns by our clock, and of their steps by the program's own.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    turns: f64,
    steps: f64,
}

impl Clocks {
    /// How much longer the turns took than their steps, as a share.
    fn apart(self) -> f64 {
        (self.turns - self.steps) / self.steps
    }

    /// Whether that is more than the messages between the two can be.
    pub fn disagree(self) -> bool {
        self.apart().abs() > CLOCKS
    }
}

impl fmt::Display for Clocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { turns, steps } = self;
        let apart = 100.0 * self.apart();
        write!(f, "its turns took {turns:.3} s, its steps {steps:.3} s by its own clock: {apart:.2} % apart")
    }
}

/// An answer to `steps`.
#[derive(Deserialize)]
pub struct Steps {
    /// Seconds of every step.
    pub seconds: Vec<f64>,
    #[serde(default)]
    result: Vec<f64>,
}

/// An answer to `memory`.
#[derive(Deserialize)]
struct Memory {
    peak_bytes: u64,
}

/// Unwraps an [`Answer`], or gives its failure back.
macro_rules! told {
    ($asked:expr) => {
        match $asked? {
            Ok(value) => value,
            Err(failure) => return Ok(Err(failure)),
        }
    };
}

impl ProgramCell {
    /// Starts the program `word`, gives it the model of `spec`, lets it make a step, whose result must be ours, and
    /// warms it up.
    pub fn start(
        word: &str,
        spec: &ModelSpec,
        warmup: WarmUp,
        timeout: Option<f64>,
        bounds: Bounds,
        session: &Session,
    ) -> Answer<Self> {
        let description = described(word).map_err(|error| RunError::Internal(format!("{error:#}")))?;
        told!(Ok(unchanged(&description, session)));
        let limit = bounds.resident_limit;
        let conditions = Conditions { time: None, resident_limit: limit, stop: bounds.stop };
        let left = time_limit(timeout).unwrap_or(Duration::MAX);
        let mut program = told!(Program::start(&description, bounds.launcher.threads, &conditions));
        let abilities = told!(Abilities::of(&mut program, &description, &conditions));
        if let Err(reason) = able(&abilities, spec) {
            return Ok(Err(CellFailure::new(Outcome::Unsupported, reason)));
        }
        let prepared = told!(prepare(&description, spec, left, (bounds, session.path())));
        told!(program.ask(prepared.message, &conditions));
        let mut cell = Self { program, left, held: 0, clocks: (0.0, 0.0) };
        let first = told!(cell.steps(1, f64::MAX, limit, session));
        if let Err(failure) = same(&first.result, &prepared.result, spec.dtype) {
            return Ok(Err(failure));
        }
        if warmup.steps > 1 && first.seconds.iter().sum::<f64>() < warmup.seconds {
            told!(cell.steps(warmup.steps - 1, warmup.seconds, limit, session));
        }
        cell.held = cell.program.resident();
        cell.clocks = (0.0, 0.0);
        Ok(Ok(cell))
    }

    /// Makes `n` steps, and begins none after `seconds`, within `limit` resident bytes.
    pub fn steps(&mut self, n: u64, seconds: f64, limit: u64, session: &Session) -> Answer<Steps> {
        let message = Message::request("steps").with("n", n);
        let message = if seconds.is_finite() && seconds < f64::MAX {
            message.with("seconds", seconds)
        } else {
            message
        };
        let start = Instant::now();
        let conditions = Conditions { time: Some(self.left), resident_limit: limit, stop: &session.stop };
        let answer = told!(self.program.ask(message, &conditions));
        let spent = start.elapsed();
        self.left = self.left.saturating_sub(spent);
        let steps: Steps = match answer.read() {
            Ok(steps) => steps,
            Err(failure) => return Ok(Err(failure)),
        };
        if steps.seconds.len() as u64 > n {
            let reason = format!("it gave times of {} steps and was asked for {n}", steps.seconds.len());
            return Ok(Err(CellFailure::new(Outcome::Failed, reason)));
        }
        if steps.seconds.is_empty()
            || steps.seconds.iter().any(|seconds| !(*seconds > 0.0 && seconds.is_finite()))
        {
            let reason = "it gave no time, or one that is not above 0, for its steps";
            return Ok(Err(CellFailure::new(Outcome::Failed, reason)));
        }
        self.held = self.held.max(self.program.resident());
        self.clocks.0 += spent.as_secs_f64();
        self.clocks.1 += steps.seconds.iter().sum::<f64>();
        Ok(Ok(steps))
    }

    /// Its own account of its memory, its clock and its version; it ends.
    pub fn end(mut self, session: &Session) -> Result<Finished, RunError> {
        let conditions = Conditions { time: None, resident_limit: u64::MAX, stop: &session.stop };
        let peak = match self.program.is_over() {
            true => None,
            false => self.program.ask(Message::request("memory"), &conditions)?.ok(),
        };
        let peak = peak.and_then(|answer| answer.read::<Memory>().ok()).map(|memory| memory.peak_bytes);
        let (turns, steps) = self.clocks;
        let version = self.program.version.clone();
        self.program.finish();
        Ok(Finished { peak_bytes: peak, clocks: Clocks { turns, steps }, version })
    }
}

/// Whether the files of a program are those that the plan was made with.
fn unchanged(description: &Description, session: &Session) -> Result<(), CellFailure> {
    let now = description.hash().map_err(|error| CellFailure::new(Outcome::Failed, format!("{error:#}")))?;
    if session.data(&description.data_name()) == now.as_deref() {
        return Ok(());
    }
    let reason =
        format!("program {} changed since the plan was made; run the command again", description.name);
    Err(CellFailure::new(Outcome::Failed, reason))
}

/// Whether a program can compute the model of `spec`.
fn able(abilities: &Abilities, spec: &ModelSpec) -> Result<(), String> {
    if let Some(reason) = abilities.elsewhere(&spec.dtype.to_string(), &spec.device.to_string()) {
        return Err(reason);
    }
    let choice = spec.choice().map_err(|error| error.to_string())?;
    let ability = abilities.ability(choice.entry.name, &choice.knobs.to_json(), false)?;
    match ability.passes.contains(&spec.pass) {
        true => Ok(()),
        false => Err(format!("it does not {} with {}", spec.pass, choice.entry.name)),
    }
}

/// What a program is given, and what the first step gives here.
struct PreparedCell {
    message: Message,
    result: Vec<f64>,
}

/// What the program is given. Our own first step may take as long as the cell may, and as much memory.
fn prepare(
    description: &Description,
    spec: &ModelSpec,
    most: Duration,
    (bounds, folder): (Bounds, &Path),
) -> Answer<PreparedCell> {
    let failed = |outcome, reason: String| Ok(Err(CellFailure::new(outcome, reason)));
    let choice = match spec.choice() {
        Ok(choice) => choice,
        Err(error) => return failed(Outcome::Failed, error.to_string()),
    };
    let config = match first_step::model(spec, &choice) {
        Ok(config) => config,
        Err(reason) => return failed(Outcome::Unsupported, reason),
    };
    let given = told!(first_step::make(spec, most, bounds, folder));
    Ok(Ok(message(description, spec, bounds.launcher.threads, (&choice, &config), given)))
}

/// The request that gives a program the model `config` of `spec`, with what our own step began with and gave.
fn message(
    description: &Description,
    spec: &ModelSpec,
    threads: usize,
    (choice, config): (&MechanismChoice, &ClassifierConfig),
    given: FirstStep,
) -> PreparedCell {
    let needs = (choice.entry.needs)(&config.knobs);
    let backbone = &config.backbone;
    let projections: Vec<Value> = needs
        .projections
        .read()
        .map(|(name, shape)| {
            let (heads, dim) = shape.of(backbone.heads, backbone.head_dim());
            json!([name, heads, dim])
        })
        .collect();
    let form = match needs.output {
        OutputForm::Linear => "linear",
        OutputForm::Plain => "plain",
        OutputForm::Whole => "whole",
        OutputForm::HalfGlu => "half_glu",
        OutputForm::Glu => "glu",
    };
    let message = Message::request("prepare")
        .with("mechanism", description.theirs(choice.entry.name))
        .with("knobs", choice.knobs.to_json())
        .with("pass", spec.pass.word())
        .with("batch", spec.batch)
        .with("len", spec.len)
        .with("dtype", spec.dtype.to_string())
        .with("device", spec.device.to_string())
        .with("threads", threads)
        .with("layers", backbone.layers)
        .with("width", backbone.width)
        .with("heads", backbone.heads)
        .with("pooling", config.pooling.name())
        .with("class_id", config.vocab - 1)
        .with("projections", projections)
        .with("global", needs.global)
        .with("residual", needs.residual)
        .with("output", form)
        .with("constants", given.constants)
        .with(
            "optimizer",
            json!({"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.1}),
        );
    PreparedCell { message: Message { body: given.tensors, ..message }, result: given.result }
}

/// Whether the result of a program's first step, as much of it as it sent, is `ours`.
fn same(theirs: &[f64], ours: &[f64], dtype: DtypeName) -> Result<(), CellFailure> {
    let share = if dtype == DtypeName::F32 { SAME_MODEL } else { SAME_MODEL_COARSE };
    let largest = ours.iter().fold(f64::MIN_POSITIVE, |a, b| a.max(b.abs()));
    let far = theirs.iter().zip(ours).find(|(theirs, ours)| {
        let near = (*theirs - *ours).abs() <= share * largest;
        !near
    });
    let reason = match (theirs.is_empty(), far) {
        (true, _) => "its answer to its first step has no result to compare".to_owned(),
        (false, None) => return Ok(()),
        (false, Some((theirs, ours))) => {
            format!("its model is not ours: the first step gives {theirs:.6}, ours {ours:.6}")
        }
    };
    Err(CellFailure::new(Outcome::Failed, reason))
}
