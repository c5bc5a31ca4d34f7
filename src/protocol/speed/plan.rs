//! From the grid to cells.

use serde::{Deserialize, Serialize};

use super::super::grid::{Defaults, Grid, Pick, PlanError};
use super::super::model_spec::{ModelSpec, settle};
use super::turns::Budget;
use crate::config::grid::{Batches, Lengths, Modes, Seeds};
use crate::config::settings::Settings;
use crate::config::units::Seconds;
use crate::record::{Outcome, Pass, Row};
use crate::run::plan::Cell;

/// Mechanisms of cosFormer Table 5, and Transformer-LS.
const MODELS: &str = "full,local,linformer,reformer,sinkhorn,synthesizer,bigbird,linear,performer,longformer,\
                      sparse,cosformer,ls";
/// The mechanisms of `--quick`.
const QUICK: &str = "full,local,linformer,reformer,linear,performer,cosformer,ls";
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
    /// The cell ends as `timeout` after so many seconds.
    pub timeout: f64,
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

/// What `speed` does where nothing is said. `quick`: minutes become seconds.
pub fn defaults(quick: bool) -> Defaults {
    let settings = Settings {
        len: Some(Lengths(if quick { vec![256, 512, 1024] } else { vec![1024, 2048, 3072, 4096] })),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some("lra-repo".to_owned()),
        warmup: Some(if quick { 1 } else { 2 }),
        runs: Some(1000),
        min_runs: Some(3),
        max_time: Some(Seconds(if quick { 0.25 } else { 2.0 })),
        timeout: Some(Seconds(600.0)),
        ..Settings::NONE
    };
    Defaults { protocol: "speed", settings, models: if quick { QUICK } else { MODELS } }
}

/// The cells of `grid`: by length, batch size, pass, so that those that take turns stand together.
///
/// # Errors
/// Settings that nobody can run.
pub fn cells(grid: &Grid, threads: usize) -> Result<Vec<(Cell, Option<Request>)>, PlanError> {
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

/// Every combination of the grid's lists.
pub fn points(settings: &Settings) -> Vec<(u64, u64, Pass, u64)> {
    let lens = settings.len.as_ref().map_or(&[][..], |list| &list.0);
    let batches = settings.batch.as_ref().map_or(&[][..], |list| &list.0);
    let modes = settings.mode.as_ref().map_or(&[][..], |list| &list.0);
    let seeds = settings.seeds.as_ref().map_or(&[][..], |list| &list.0);
    let mut points = Vec::new();
    for &len in lens {
        for &batch in batches {
            for &pass in modes {
                points.extend(seeds.iter().map(|&seed| (len, batch, pass, seed)));
            }
        }
    }
    points
}

fn cell(
    grid: &Grid,
    pick: &Pick,
    (len, batch, pass, seed): (u64, u64, Pass, u64),
    threads: usize,
) -> Result<(Cell, Option<Request>), PlanError> {
    let settings = &pick.settings;
    let spec = ModelSpec::new(pick, len, batch, pass, seed)?;
    let (resolved, reason) = settle(pick, |choice| spec.measured(choice))?;
    let row = Row {
        suite: grid.suite.as_ref().map(|suite| suite.name.clone()),
        published: pick.published("steps_per_second", pass, len),
        ..spec.row("speed", threads, resolved.as_deref())
    };
    let key = spec.key();
    let (Some(flops), None) = (row.flops, reason.clone()) else {
        let row = row.ended(Outcome::Unsupported, reason);
        let cell = Cell { key, row, request: serde_json::Value::Null, seconds: 0.0 };
        return Ok((cell, None));
    };
    let request = Request {
        warmup: settings.warmup.unwrap_or(2),
        min_runs: settings.min_runs.unwrap_or(3).max(1),
        runs: settings.runs.unwrap_or(1000).max(1),
        max_time: settings.max_time.map_or(2.0, |time| time.0),
        timeout: settings.timeout.map_or(600.0, |time| time.0),
        spec,
    };
    let step = request.spec.step_flops(flops) / (RATE * threads as f64);
    let seconds = seconds(&request, step);
    let json = serde_json::to_value(&request).map_err(PlanError::new)?;
    Ok((Cell { key, row, request: json, seconds }, Some(request)))
}

/// Predicted seconds of a cell whose step takes `step` seconds.
pub fn seconds(request: &Request, step: f64) -> f64 {
    let warm = (request.warmup.max(1) as f64 * step).min(request.max_time.max(step));
    let most = request.runs as f64 * step;
    0.3 + warm + request.max_time.max(request.min_runs as f64 * step).min(most)
}
