//! From the grid to cells.

use serde::{Deserialize, Serialize};

use super::interleave::Budget;
use crate::protocol::grid::{Grid, GridDefaults, GridEntry, GridFlags, PlanError, Point};
use crate::protocol::measuring::plan::{self, Draft, Measure, PRESET, RATE, StepRequest};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::run::plan::Cell;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::entries;
use effattn_model::family::{self, Architecture};
use effattn_model::nn::params::ParamBuilder;
use effattn_record::config::lists::Modes;
use effattn_record::config::settings::Settings;
use effattn_record::config::units::Seconds;
use effattn_record::{Pass, Row};

/// Mechanisms of cosFormer Table 5, and Transformer-LS.
const MODELS: &str = "full,local,linformer,reformer,sinkhorn,synthesizer,bigbird,linear,performer,longformer,\
                      sparse,cosformer,ls";
/// The mechanisms of `--quick`.
const QUICK: &str = "full,local,linformer,reformer,linear,performer,cosformer,ls";
/// The command.
pub const NAME: &str = "speed";
/// Preset and mechanisms where tokens are made one after another and nothing else is said.
const DECODER: &str = "charlm-small";
const DECODED: &str = "full,window,linear,cosformer,performer,rfa";
/// Seconds of steps that are timed operation by operation, and of measuring what the machine reaches at most.
pub const PROFILE_TIME: f64 = 1.0;
const RATES_TIME: f64 = 0.5;
/// Seconds of a token, roughly.
const TOKEN: f64 = 2e-3;

/// How long steps are timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
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
}

/// What the worker of a cell is asked.
pub type SpeedRequest = StepRequest<Timing>;

impl Timing {
    /// Where nothing is said.
    const USUAL: Self = Self { warmup: 2, min_runs: 3, runs: 1000, max_time: 2.0, profile: false };
    /// With `--quick`; order statistics have an interval from six steps on.
    const QUICK: Self = Self { warmup: 1, min_runs: 6, max_time: 0.8, ..Self::USUAL };

    /// What the cell may spend.
    pub fn budget(&self) -> Budget {
        Budget {
            seconds: self.max_time,
            min_runs: self.min_runs as usize,
            runs: self.runs as usize,
            repeats: f64::INFINITY,
        }
    }

    /// Predicted seconds of a cell whose step takes `step` seconds.
    pub fn seconds(&self, step: f64) -> f64 {
        let warm = (self.warmup.max(1) as f64 * step).min(self.max_time.max(step));
        let most = self.runs as f64 * step;
        let profiled = if self.profile { PROFILE_TIME.max(2.0 * step) + RATES_TIME } else { 0.0 };
        0.3 + warm + self.max_time.max(self.min_runs as f64 * step).min(most) + profiled
    }
}

impl Measure for Timing {
    fn of(settings: &Settings) -> Self {
        let usual = Self::USUAL;
        Self {
            warmup: settings.warmup.unwrap_or(usual.warmup),
            min_runs: settings.min_runs.unwrap_or(usual.min_runs).max(1),
            runs: settings.runs.unwrap_or(usual.runs).max(1),
            max_time: settings.max_time.map_or(usual.max_time, |time| time.0),
            profile: settings.profile == Some(true),
        }
    }
}

/// What `speed` does where nothing is said. `--quick`: minutes become seconds.
pub fn defaults(flags: &GridFlags) -> GridDefaults {
    let said = flags.user_settings();
    // only language models make one token after another
    let decodes = said.mode.as_ref().is_some_and(|Modes(passes)| passes.contains(&Pass::Decode));
    let (preset, decoded) = if decodes { (DECODER, Some(DECODED)) } else { (PRESET, None) };
    let usual = said.preset.as_deref().and_then(family::usual).filter(|_| !decodes);
    let (len, models, timing) = match flags.quick {
        true => (vec![256, 512, 1024], QUICK, Timing::QUICK),
        false => (vec![1024, 2048, 3072, 4096], MODELS, Timing::USUAL),
    };
    let settings = Settings {
        preset: Some(preset.to_owned()),
        warmup: Some(timing.warmup),
        runs: Some(timing.runs),
        min_runs: Some(timing.min_runs),
        max_time: Some(Seconds(timing.max_time)),
        ..plan::defaults(usual.map_or(len, |usual| vec![usual.len as u64]))
    };
    GridDefaults { settings, models: usual.map(|usual| usual.models).or(decoded).unwrap_or(models) }
}

/// Metrics whose published numbers stand beside the measured ones.
pub const PUBLISHED: [&str; 2] = ["step_time", "steps_per_second"];

/// The cell of `pick` at a point of `grid`.
pub fn cell(
    grid: &Grid,
    pick: &GridEntry,
    (len, batch, pass, seed): Point,
    threads: usize,
) -> Result<Cell, PlanError> {
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let (mut resolved, mut unsupported) =
        resolve_or_unsupported(pick, |choice| spec.resolve_measured(choice))?;
    if let (Pass::Decode, Some(_), Ok(choice)) = (pass, &resolved, &pick.choice) {
        unsupported = cannot_decode(grid, &spec, choice)?;
        resolved = resolved.filter(|_| unsupported.is_none());
    }
    let published = PUBLISHED.map(|metric| (metric, pick.published(metric, pass, len)));
    let (metric, published) = published.into_iter().find(|(_, number)| number.is_some()).unwrap_or_default();
    let row = Row { metric: metric.to_owned(), published, ..spec.row(NAME, threads, resolved.as_deref()) };
    // without multiply-adds it is one token, which takes no time
    let flops = row.flops.map(|flops| spec.step_flops(flops));
    let step = |threads: usize| flops.map_or(TOKEN, |flops| flops / (RATE * threads as f64));
    let timing = Timing::of(&pick.settings);
    let draft = Draft {
        words: spec.key(),
        row,
        usual: StepRequest::new(spec.default_spec(PRESET), Timing::USUAL),
        request: StepRequest::new(spec, timing.clone()),
        unsupported,
    };
    draft.cell(grid, pick, threads, |threads| timing.seconds(step(threads)))
}

/// Why the model of `spec` with `choice` does not make one token after another; none if it does. Where no line of `grid` has
/// one that does, it is a mistake.
fn cannot_decode(
    grid: &Grid,
    spec: &ModelSpec,
    choice: &MechanismChoice,
) -> Result<Option<String>, PlanError> {
    if decodes(spec, choice) {
        return Ok(None);
    }
    let mut others = grid.entries.iter().filter_map(|other| other.choice.as_ref().ok());
    if !others.any(|other| decodes(spec, other)) {
        return Err(no_decoder(spec));
    }
    Ok(Some("cannot generate one token at a time".to_owned()))
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
