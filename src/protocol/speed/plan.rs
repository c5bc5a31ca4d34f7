//! From the grid to cells.

use serde::{Deserialize, Serialize};

use super::super::differing::differing_words;
use super::super::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, Point, cells_by_place};
use super::super::model_spec::{ModelSpec, resolve_or_unsupported};
use super::interleave::Budget;
use crate::run::plan::{Cell, unusual_values};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::entries;
use effattn_model::family::{self, Architecture};
use effattn_model::nn::params::ParamBuilder;
use effattn_record::config::lists::{Batches, Lengths, Modes, Seeds};
use effattn_record::config::settings::Settings;
use effattn_record::config::units::Seconds;
use effattn_record::{Pass, Row};

/// Mechanisms of cosFormer Table 5, and Transformer-LS.
const MODELS: &str = "full,local,linformer,reformer,sinkhorn,synthesizer,bigbird,linear,performer,longformer,\
                      sparse,cosformer,ls";
/// The mechanisms of `--quick`.
const QUICK: &str = "full,local,linformer,reformer,linear,performer,cosformer,ls";
/// Its measuring time, and its fewest steps: order statistics have an interval from six on.
const QUICK_TIME: f64 = 0.8;
const QUICK_RUNS: u64 = 6;
/// The command.
pub const NAME: &str = "speed";
/// Preset where nothing is said.
pub const PRESET: &str = "lra-repo";
/// Preset and mechanisms where tokens are made one after another and nothing else is said.
const DECODER: &str = "charlm-small";
const DECODED: &str = "full,window,linear,cosformer,performer,rfa";
/// Steps before the clock starts, fewest and most measured steps, and seconds, where nothing is said.
const USUAL: (u64, u64, u64, f64) = (2, 3, 1000, 2.0);
/// Seconds until a cell ends as `timeout`, where nothing is said.
const TIMEOUT: f64 = 600.0;
/// Seconds of steps that are timed operation by operation, and of measuring what the machine reaches at most.
pub const PROFILE_TIME: f64 = 1.0;
const RATES_TIME: f64 = 0.5;
/// Multiply-adds per second and thread that predictions start from.
const RATE: f64 = 8e9;

/// Seconds of a token, roughly.
const TOKEN: f64 = 2e-3;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpeedRequest {
    /// The model and its step.
    pub spec: ModelSpec,
    /// Steps before the clock starts.
    pub warmup: u64,
    /// Fewest measured steps.
    pub min_runs: u64,
    /// Most measured steps.
    pub runs: u64,
    /// Measuring time in seconds; warming up takes no longer than this either, but at least one step.
    pub max_time: f64,
    /// Whether some steps are timed operation by operation, after the others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub profile: bool,
    /// The program whose cell it is, as on the command line; none: effattn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

impl SpeedRequest {
    /// What the cell may spend.
    pub fn budget(&self) -> Budget {
        Budget {
            seconds: self.max_time,
            min_runs: self.min_runs as usize,
            runs: self.runs.max(self.min_runs) as usize,
            repeats: f64::INFINITY,
        }
    }
}

/// What `speed` does where nothing is said. `--quick`: minutes become seconds.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
    let quick = flags.quick;
    let said = flags.user_settings();
    // only language models make one token after another
    let decodes = said.mode.as_ref().is_some_and(|Modes(passes)| passes.contains(&Pass::Decode));
    let own = if decodes { (DECODER, Some(DECODED)) } else { (PRESET, None) };
    let usual = said.preset.as_deref().and_then(family::usual).filter(|_| !decodes);
    let len = usual.map(|usual| vec![usual.len as u64]);
    let settings = Settings {
        len: Some(Lengths(len.unwrap_or_else(|| match quick {
            true => vec![256, 512, 1024],
            false => vec![1024, 2048, 3072, 4096],
        }))),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some(own.0.to_owned()),
        warmup: Some(if quick { 1 } else { USUAL.0 }),
        runs: Some(USUAL.2),
        min_runs: Some(if quick { QUICK_RUNS } else { USUAL.1 }),
        max_time: Some(Seconds(if quick { QUICK_TIME } else { USUAL.3 })),
        timeout: Some(Seconds(TIMEOUT)),
        ..Settings::NONE
    };
    let models = usual.map(|usual| usual.models).or(own.1);
    GridDefaults { settings, models: models.unwrap_or(if quick { QUICK } else { MODELS }) }
}

/// The cells of `grid`: by length, batch size, pass, so that those that take turns stand together.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    cells_by_place(grid, |pick, place| cell(grid, pick, place, threads).map(Some))
}

fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (len, batch, pass, seed): Point,
    threads: usize,
) -> Result<Cell, PlanError> {
    let settings = &pick.settings;
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let (mut resolved, mut reason) = resolve_or_unsupported(pick, |choice| spec.resolve_measured(choice))?;
    if let (Pass::Decode, Some(_), Ok(choice)) = (pass, &resolved, &pick.choice)
        && !decodes(&spec, choice)
    {
        let mut others = grid.entries.iter().filter_map(|other| other.choice.as_ref().ok());
        if !others.any(|other| decodes(&spec, other)) {
            return Err(no_decoder(&spec));
        }
        (resolved, reason) = (None, Some("cannot generate one token at a time".to_owned()));
    }
    let published =
        ["step_time", "steps_per_second"].map(|metric| (metric, pick.published(metric, pass, len)));
    let (metric, published) = published.into_iter().find(|(_, number)| number.is_some()).unwrap_or_default();
    let mut row = Row {
        suite: grid.suite.as_ref().map(|suite| suite.name.clone()),
        metric: metric.to_owned(),
        published,
        ..spec.row(NAME, threads, resolved.as_deref())
    };
    let request = asked(settings, spec);
    if let Some(own) = pick.of_suite() {
        let batches = own.settings.batch.as_ref().map_or(&[][..], |list| &list.0);
        let usual = if batches.contains(&batch) { batch } else { batches.first().copied().unwrap_or(batch) };
        let usual = asked(&own.settings, ModelSpec::new(&own, len, usual, pass, seed)?);
        let mut words = differing_words(&unusual_values(&request, &usual), &[]);
        if own.settings.len.as_ref().is_some_and(|list| !list.0.contains(&len)) {
            words.push(format!("length {len} (none of the suite's)"));
        }
        row.differs = (!words.is_empty()).then(|| words.join("; "));
    }
    let (warmup, min_runs, runs, max_time) = USUAL;
    let usual = SpeedRequest {
        spec: request.spec.default_spec(PRESET),
        warmup,
        min_runs,
        runs,
        max_time,
        profile: false,
        program: None,
    };
    // without multiply-adds it is one token, which takes no time
    let flops = row.flops.map(|flops| request.spec.step_flops(flops));
    let step = |threads: usize| flops.map_or(TOKEN, |flops| flops / (RATE * threads as f64));
    let cell = Cell::new(&request.spec.key(), row, &request, &usual);
    let cell = cell.with_seconds(threads, |threads| seconds(&request, step(threads)));
    let shortest = SpeedRequest { spec: ModelSpec { len: 0, ..request.spec.clone() }, ..request.clone() };
    let series = serde_json::to_string(&shortest).map_err(PlanError::new)?;
    let timeout = settings.timeout.map(|time| time.0);
    Ok(Cell { series, timeout, ..cell }.with_unsupported(reason))
}

/// What `settings` ask of the worker that measures `spec`.
fn asked(settings: &Settings, spec: ModelSpec) -> SpeedRequest {
    SpeedRequest {
        warmup: settings.warmup.unwrap_or(USUAL.0),
        min_runs: settings.min_runs.unwrap_or(USUAL.1).max(1),
        runs: settings.runs.unwrap_or(USUAL.2).max(1),
        max_time: settings.max_time.map_or(USUAL.3, |time| time.0),
        profile: settings.profile == Some(true),
        program: None,
        spec,
    }
}

/// Whether the model of `spec` makes one token after another: asked of a short one, whose state is small.
fn decodes(spec: &ModelSpec, choice: &MechanismChoice) -> bool {
    let short = ModelSpec { len: spec.len.min(16), ..spec.clone() };
    let built = |model: Box<dyn Architecture>| model.build_decoder(&ParamBuilder::counting(), 1);
    short.resolve_measured(choice).is_ok_and(|model| built(model).is_ok_and(|net| net.is_some()))
}

/// What to do where the model of `spec` cannot be decoded with.
fn no_decoder(spec: &ModelSpec) -> PlanError {
    let able = |preset: &str, choice: &MechanismChoice| {
        decodes(&ModelSpec { preset: preset.to_owned(), ..spec.clone() }, choice)
    };
    let all: Vec<MechanismChoice> = entries().into_iter().map(MechanismChoice::default_of).collect();
    let can: Vec<&str> =
        all.iter().filter(|choice| able(&spec.preset, choice)).map(|choice| choice.entry.name).collect();
    if can.is_empty() {
        let presets = family::presets(&family::families());
        let able = |name: &str| all.iter().any(|choice| able(name, choice));
        let presets: Vec<&str> = presets.iter().map(|preset| preset.name).filter(|name| able(name)).collect();
        return PlanError(format!(
            "the model of preset {} cannot generate one token at a time; --mode decode takes --preset {}",
            spec.preset,
            presets.join(", ")
        ));
    }
    PlanError(format!(
        "{} cannot generate one token at a time; --mode decode takes {}",
        spec.model,
        can.join(", ")
    ))
}

/// Predicted seconds of a cell whose step takes `step` seconds.
pub fn seconds(request: &SpeedRequest, step: f64) -> f64 {
    let warm = (request.warmup.max(1) as f64 * step).min(request.max_time.max(step));
    let most = request.runs as f64 * step;
    let profiled = if request.profile { PROFILE_TIME.max(2.0 * step) + RATES_TIME } else { 0.0 };
    0.3 + warm + request.max_time.max(request.min_runs as f64 * step).min(most) + profiled
}
