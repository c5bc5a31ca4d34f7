//! `weigh`: the trained numbers of a model, counted by a worker.

use effattn::config::lists::Lengths;
use effattn::config::settings::Settings;
use effattn::config::settings::groups::MODEL;
use effattn::model::family;
use effattn::protocol::definition::{Prepared, Protocol, ResultView, WorkerContext, WorkerInput};
use effattn::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError, listed};
use effattn::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use effattn::protocol::runner::{CellResult, Runner};
use effattn::record::{Metric, Outcome, Pass, Row};
use effattn::run::RunError;
use effattn::run::plan::Cell;
use effattn::run::worker::{ParentLink, Received};
use serde_json::{Value, from_value};

/// The table line.
pub static PROTOCOL: Protocol = Protocol {
    name: "weigh",
    about: "Trained numbers of a model",
    examples: "Examples:\n  effattn weigh --model full,ls",
    settings: &[&["len"], MODEL],
    help: &[("len", "Lengths: weights of positions count")],
    presets: || family::names(|_| true),
    tasks: None,
    reads: &[],
    quick: None,
    defaults,
    cells,
    prepare: |_, _| Ok(Prepared::default()),
    summary: |plan| listed(plan, |row| row.preset.clone()),
    estimate: None,
    same_group: |_, _| false,
    compute,
    failure_rows: |row, ending| vec![row.with_outcome(ending.outcome, Some(ending.reason.clone()))],
    work,
    metrics: &[Metric { name: "parameters", title: "Trained numbers", unit: "1", lower_is_better: true }],
    view: ResultView::Plain,
    curve: None,
    reuses_finished: false,
    needs_golden_check: false,
    delegates_to: &[],
    alternative: None,
};

fn defaults(_: &GridFlags) -> GridDefaults {
    let settings =
        Settings { len: Some(Lengths(vec![1024])), preset: Some("ls-lra".to_owned()), ..Settings::NONE };
    GridDefaults { settings, models: "full" }
}

/// A cell for every mechanism and length; its request is the model.
fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.entries {
        for &len in pick.settings.len.iter().flat_map(|lens| &lens.0) {
            let spec = ModelSpec::new(pick, len, 1, Pass::Infer, 0)?;
            let (resolved, reason) = resolve_or_unsupported(pick, |choice| spec.resolve_measured(choice))?;
            let row = spec.row(PROTOCOL.name, threads, resolved.as_deref());
            let words = format!("{} n{len}", spec.model);
            cells.push(Cell::new(&words, row, &spec, &spec.default_spec("ls-lra")).with_unsupported(reason));
        }
    }
    Ok(cells)
}

/// Asks a worker for each of the cells `open`.
fn compute(runner: &mut Runner, open: &[usize]) -> Result<(), RunError> {
    for &index in open {
        let mut worker = runner.start(index, runner.session.memory_limit, WorkerContext::default())?;
        let heard = worker.receive::<u64>(None, runner.session.resident_limit, &runner.session.stop)?;
        match heard {
            Received::Message(count) => {
                worker.finish();
                let rows = rows(&runner.plan.cells[index].row, count);
                let summary = format!("{count} numbers");
                runner.record_result(
                    index,
                    CellResult { rows, samples: Vec::new(), summary, progress_seconds: 0.0 },
                )?;
            }
            Received::Ended(ending) => runner.record_failure(index, &ending, 0.0)?,
        }
    }
    Ok(())
}

fn rows(row: &Row, count: u64) -> Vec<Row> {
    vec![row.with("parameters", "1", Some(count as f64)).with_outcome(Outcome::Ok, None)]
}

/// The worker's side.
fn work(link: &ParentLink, request: Value, _: &WorkerInput) -> anyhow::Result<()> {
    let spec: ModelSpec = from_value(request)?;
    let model = spec.choice().and_then(|choice| spec.resolve_measured(&choice))?;
    Ok(link.send(&model.parameters()?)?)
}
