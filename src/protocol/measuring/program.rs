//! Cells of other programs: the same cells, weights and inputs as ours, asked over their pipe.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::input_text;
use super::worker::{Answer, time_limit};
use crate::program::abilities::Abilities;
use crate::program::description::Description;
use crate::program::wire::{Message, Tensors};
use crate::program::{Conditions, Program};
use crate::protocol::model_spec::{ModelSpec, compute_as};
use crate::run::outcome::{self, CellFailure};
use crate::run::plan::Cell;
use crate::run::session::Session;
use crate::run::worker::TICK;
use crate::run::{CancelToken, RunError};
use effattn_model::attention::OutputForm;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::batch::{ModelInput, SyntheticInput};
use effattn_model::family::{Architecture, ResolveError};
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::embedding::Positions;
use effattn_model::nn::ffn::FfnActivation;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::preset::ClassifierPreset;
use effattn_model::{ClassifierConfig, Pooling};
use effattn_record::config::settings::{DtypeName, KernelName};
use effattn_record::{Outcome, Pass, Row, file};

/// The name of effattn in the column `program`.
pub const OURS: &str = "effattn";
/// How far a result of the first step may be from ours, as a share of the largest: whole models in f32, and in fewer bits.
const SAME_MODEL: f64 = 1e-3;
const SAME_MODEL_COARSE: f64 = 0.1;
/// How much longer a turn may take than its steps say, as a share, before it is remarked.
const CLOCKS: f64 = 0.05;

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
        limit: u64,
        session: &Session,
    ) -> Answer<Self> {
        let description =
            Description::find(word).map_err(|error| RunError::Internal(format!("{error:#}")))?;
        let threads = session.launcher.threads;
        let conditions = Conditions { time: None, resident_limit: limit, stop: &session.stop };
        let left = time_limit(timeout).unwrap_or(Duration::MAX);
        let mut program = told!(Program::start(&description, threads, &conditions));
        let abilities = told!(Abilities::of(&mut program, &description, &conditions));
        if let Err(reason) = able(&abilities, spec) {
            return Ok(Err(CellFailure::new(Outcome::Unsupported, reason)));
        }
        let prepared = told!(prepare(&description, spec, threads, (left, session)));
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

/// The model of `spec`, if the contract has words for it.
fn model(spec: &ModelSpec, choice: &MechanismChoice) -> Result<ClassifierConfig, String> {
    let form =
        ClassifierPreset::find(&spec.preset).and_then(|preset| preset.form(None, choice.entry.name).ok());
    let form = form.filter(|form| form.towers == 1 && spec.pass != Pass::Decode);
    let Some(mut form) = form else {
        return Err(format!(
            "programs infer and train a classifier of documents, not {} {}; choose --preset lra-repo",
            spec.preset, spec.pass
        ));
    };
    spec.sizes.apply(&mut form.backbone);
    if let Some(name) = &spec.sizes.pooling {
        form.pooling = Pooling::find(name);
    }
    let config = form.model(choice.entry, choice.knobs.clone(), spec.len as usize);
    let backbone = &config.backbone;
    let plain = backbone.positions == Positions::Learned
        && backbone.activation == FfnActivation::Gelu
        && backbone.dropout == 0.0
        && backbone.attention_dropout == 0.0
        && matches!(config.pooling, Pooling::Mean | Pooling::First | Pooling::ClsFront);
    match plain && (choice.entry.needs)(&config.knobs).conv.is_none() {
        true => Ok(config),
        false => Err(
            "programs have learned positions, exact GELU, no dropout, no convolution, and pooling mean, first or \
             cls-front; choose --preset lra-repo, or --set pooling=mean"
                .to_owned(),
        ),
    }
}

/// What the program is given. Our own first step may take as long as the cell may.
fn prepare(
    description: &Description,
    spec: &ModelSpec,
    threads: usize,
    (most, session): (Duration, &Session),
) -> Answer<PreparedCell> {
    let unsupported = |reason: String| CellFailure::new(Outcome::Unsupported, reason);
    let wrong = |error: ResolveError| CellFailure::new(Outcome::Failed, error.to_string());
    let asked = || -> Result<_, CellFailure> {
        let choice = spec.choice().map_err(wrong)?;
        let config = model(spec, &choice).map_err(unsupported)?;
        let text = match session.text() {
            Some(path) => file::read(path)?,
            None => input_text::embedded().bytes,
        };
        Ok((choice, config, text))
    };
    let (choice, config, text) = told!(Ok::<_, RunError>(asked()));
    let given = told!(own_step(spec, &config, text, (most, &session.stop)));
    Ok(message(description, spec, threads, (&choice, &config), given))
}

/// [`tensors`], on a thread that is left behind on Ctrl-C: nothing else ends a step. One that took longer than `most` is waited for,
/// so that nothing is measured beside it, and does not count.
fn own_step(
    spec: &ModelSpec,
    config: &ClassifierConfig,
    text: Vec<u8>,
    (most, stop): (Duration, &CancelToken),
) -> Answer<OwnStep> {
    let (spec, config, start) = (spec.clone(), config.clone(), Instant::now());
    let (done, made) = mpsc::channel();
    std::thread::spawn(move || {
        compute_as(KernelName::Fused, DtypeName::F32);
        let _ = done.send(tensors(&spec, &config, &text)); // nobody may be waiting any more
    });
    loop {
        match made.recv_timeout(TICK) {
            Ok(_) if start.elapsed() > most => {
                let (took, most) = (start.elapsed().as_secs_f64(), most.as_secs_f64());
                let reason = format!(
                    "effattn's own first step, which the program's is held against, took {took:.1} s, more than {most:.1} s"
                );
                return Ok(Err(CellFailure::new(Outcome::Timeout, reason)));
            }
            Ok(step) => return Ok(step.map_err(|error| outcome::of_error(&error))),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(CellFailure::new(Outcome::Failed, "effattn's own first step panicked")));
            }
            Err(RecvTimeoutError::Timeout) if stop.is_cancelled() => return Err(RunError::Stopped),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The request that gives a program the model `config` of `spec`, with what our own step began with and gave.
fn message(
    description: &Description,
    spec: &ModelSpec,
    threads: usize,
    (choice, config): (&MechanismChoice, &ClassifierConfig),
    (tensors, constants, result): OwnStep,
) -> Result<PreparedCell, CellFailure> {
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
        .with("constants", constants)
        .with(
            "optimizer",
            json!({"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.1}),
        )
        .with_tensors(&tensors)
        .map_err(|error| outcome::of_error(&error))?;
    Ok(PreparedCell { message, result })
}

/// Weights, constants and batches; names of the constants; and logits or loss of the first batch.
type OwnStep = (Tensors, Vec<String>, Vec<f64>);

fn tensors(spec: &ModelSpec, config: &ClassifierConfig, text: &[u8]) -> candle_core::Result<OwnStep> {
    let builder = ParamBuilder::seeded(spec.seed, &Device::Cpu, false);
    let batch = spec.batch as usize;
    let mut net = config.build_measured(&builder, batch)?;
    let params = builder.finish();
    let mut tensors = Tensors::new();
    for name in params.names() {
        tensors.insert(name.to_owned(), params.value(name)?);
    }
    let constants: Vec<String> = params.constants().keys().cloned().collect();
    tensors.extend(params.constants().iter().map(|(name, tensor)| (name.clone(), tensor.clone())));
    let wanted = SyntheticInput { text, batch, len: spec.len as usize, seed: spec.seed };
    let batches = config.synthetic_batches(&wanted, &Device::Cpu)?;
    let (mut ids, mut labels) = (Vec::new(), Vec::new());
    for batch in &batches {
        if let ModelInput::Tokens(tokens) = &batch.input {
            ids.push(tokens.ids.clone());
            labels.push(batch.labels.clone());
        }
    }
    tensors.insert("ids".to_owned(), Tensor::stack(&ids, 0)?);
    tensors.insert("labels".to_owned(), Tensor::stack(&labels, 0)?);
    let Some(first) = batches.first() else { candle_core::bail!("there is no batch") };
    let result = match spec.pass {
        Pass::Train => {
            let loss = net.loss(first, DropoutRng::new(spec.seed))?;
            vec![f64::from(loss.sum.to_scalar::<f32>()?) / loss.count]
        }
        Pass::Infer | Pass::Decode => {
            let logits = net.forward(first)?.flatten_all()?.to_vec1::<f32>()?;
            logits.into_iter().map(f64::from).collect()
        }
    };
    Ok((tensors, constants, result))
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
