//! From the grid to cells.

use serde::{Deserialize, Serialize};

use super::super::grid::{Defaults, Flags, Grid, Pick, PlanError, points};
use super::super::model_spec::{ModelSpec, settle};
use super::interleave::Budget;
use crate::config::grid::{Batches, Lengths, Modes, Seeds};
use crate::config::settings::Settings;
use crate::config::units::Seconds;
use crate::model::family;
use crate::record::{Pass, Row};
use crate::run::plan::Cell;

/// Mechanisms of cosFormer Table 5, and Transformer-LS.
const MODELS: &str = "full,local,linformer,reformer,sinkhorn,synthesizer,bigbird,linear,performer,longformer,\
                      sparse,cosformer,ls";
/// The mechanisms of `--quick`.
const QUICK: &str = "full,local,linformer,reformer,linear,performer,cosformer,ls";
/// Preset where nothing is said.
pub const PRESET: &str = "lra-repo";
/// Steps before the clock starts, fewest and most measured steps, and seconds, where nothing is said.
const USUAL: (u64, u64, u64, f64) = (2, 3, 1000, 2.0);
/// Seconds until a cell ends as `timeout`, where nothing is said.
const TIMEOUT: f64 = 600.0;
/// Multiply-adds per second and thread that predictions start from.
const RATE: f64 = 8e9;

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
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
}

impl Request {
    /// What the cell may spend.
    pub fn budget(&self) -> Budget {
        Budget {
            seconds: self.max_time,
            min_runs: self.min_runs as usize,
            runs: self.runs.max(self.min_runs) as usize,
        }
    }
}

/// What `speed` does where nothing is said. `--quick`: minutes become seconds.
pub fn defaults(flags: &Flags) -> Defaults {
    let quick = flags.quick;
    let usual = flags.said().preset.as_deref().and_then(family::usual);
    let len = usual.map(|usual| vec![usual.len as u64]);
    let settings = Settings {
        len: Some(Lengths(len.unwrap_or_else(|| match quick {
            true => vec![256, 512, 1024],
            false => vec![1024, 2048, 3072, 4096],
        }))),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some(PRESET.to_owned()),
        warmup: Some(if quick { 1 } else { USUAL.0 }),
        runs: Some(USUAL.2),
        min_runs: Some(USUAL.1),
        max_time: Some(Seconds(if quick { 0.25 } else { USUAL.3 })),
        timeout: Some(Seconds(TIMEOUT)),
        ..Settings::NONE
    };
    let models = usual.map(|usual| usual.models);
    Defaults { settings, models: models.unwrap_or(if quick { QUICK } else { MODELS }) }
}

/// The cells of `grid`: by length, batch size, pass, so that those that take turns stand together.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.picks {
        for (len, batch, pass, seed) in points(&pick.settings) {
            let place = (len, batch, pass, seed);
            cells.push((place, cell(grid, pick, place, threads)?));
        }
    }
    cells.sort_by_key(|(place, _)| *place); // stable: mechanisms keep their order
    Ok(cells.into_iter().map(|(_, cell)| cell).collect())
}

fn cell(
    grid: &Grid,
    pick: &Pick,
    (len, batch, pass, seed): (u64, u64, Pass, u64),
    threads: usize,
) -> Result<Cell, PlanError> {
    let settings = &pick.settings;
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let (resolved, reason) = settle(pick, |choice| spec.measured(choice))?;
    let published =
        ["step_time", "steps_per_second"].map(|metric| (metric, pick.published(metric, pass, len)));
    let (metric, published) = published.into_iter().find(|(_, number)| number.is_some()).unwrap_or_default();
    let row = Row {
        suite: grid.suite.as_ref().map(|suite| suite.name.clone()),
        metric: metric.to_owned(),
        published,
        ..spec.row("speed", threads, resolved.as_deref())
    };
    let request = Request {
        warmup: settings.warmup.unwrap_or(USUAL.0),
        min_runs: settings.min_runs.unwrap_or(USUAL.1).max(1),
        runs: settings.runs.unwrap_or(USUAL.2).max(1),
        max_time: settings.max_time.map_or(USUAL.3, |time| time.0),
        spec,
    };
    let (warmup, min_runs, runs, max_time) = USUAL;
    let usual = Request { spec: request.spec.usual(PRESET), warmup, min_runs, runs, max_time };
    let seconds = row
        .flops
        .map_or(0.0, |flops| seconds(&request, request.spec.step_flops(flops) / (RATE * threads as f64)));
    let cell = Cell::new(&request.spec.key(), row, &request, &usual);
    let shortest = Request { spec: ModelSpec { len: 0, ..request.spec.clone() }, ..request.clone() };
    let series = serde_json::to_string(&shortest).map_err(PlanError::new)?;
    let timeout = settings.timeout.map(|time| time.0);
    Ok(Cell { seconds, series, timeout, ..cell }.refused(reason))
}

/// Predicted seconds of a cell whose step takes `step` seconds.
pub fn seconds(request: &Request, step: f64) -> f64 {
    let warm = (request.warmup.max(1) as f64 * step).min(request.max_time.max(step));
    let most = request.runs as f64 * step;
    0.3 + warm + request.max_time.max(request.min_runs as f64 * step).min(most)
}
