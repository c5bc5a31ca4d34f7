//! `weigh`: the trained numbers of a model, counted by a worker.

use effattn::config::grid::Lengths;
use effattn::config::settings::Settings;
use effattn::config::settings::groups::MODEL;
use effattn::model::family;
use effattn::protocol::grid::{Defaults, Flags, Grid, PlanError, listed};
use effattn::protocol::model_spec::{ModelSpec, settle};
use effattn::protocol::runner::{Finished, Runner};
use effattn::protocol::table::{Conditions, Given, Prepared, Protocol, Shown};
use effattn::record::{Metric, Outcome, Pass, Row};
use effattn::run::RunError;
use effattn::run::plan::Cell;
use effattn::run::worker::{Heard, Link};
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
    amount: |plan| listed(plan, |row| row.preset.clone()),
    price: None,
    together: |_, _| false,
    compute,
    ended: |row, ending| vec![row.ended(ending.outcome, Some(ending.reason.clone()))],
    work,
    metrics: &[Metric { name: "parameters", title: "Trained numbers", unit: "1", less: true }],
    shown: Shown::Plain,
    curve: None,
    keeps: false,
    checks: false,
    passes_on: &[],
    instead: None,
};

fn defaults(_: &Flags) -> Defaults {
    let settings =
        Settings { len: Some(Lengths(vec![1024])), preset: Some("ls-lra".to_owned()), ..Settings::NONE };
    Defaults { settings, models: "full" }
}

/// A cell for every mechanism and length; its request is the model.
fn cells(grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.picks {
        for &len in pick.settings.len.iter().flat_map(|lens| &lens.0) {
            let spec = ModelSpec::new(pick, len, 1, Pass::Infer, 0)?;
            let (resolved, reason) = settle(pick, |choice| spec.measured(choice))?;
            let row = spec.row(PROTOCOL.name, threads, resolved.as_deref());
            let words = format!("{} n{len}", spec.model);
            cells.push(Cell::new(&words, row, &spec, &spec.usual("ls-lra")).refused(reason));
        }
    }
    Ok(cells)
}

/// Asks a worker for each of the cells `open`.
fn compute(runner: &mut Runner, open: &[usize]) -> Result<(), RunError> {
    for &index in open {
        let mut worker = runner.start(index, runner.session.memory_limit, Conditions::default())?;
        let heard = worker.hear::<u64>(None, runner.session.resident_limit, &runner.session.stop)?;
        match heard {
            Heard::Message(count) => {
                worker.finish();
                let rows = rows(&runner.plan.cells[index].row, count);
                let said = format!("{count} numbers");
                runner.finish(index, Finished { rows, samples: Vec::new(), said, moved: 0.0 })?;
            }
            Heard::Ended(ending) => runner.end(index, &ending, 0.0)?,
        }
    }
    Ok(())
}

fn rows(row: &Row, count: u64) -> Vec<Row> {
    vec![row.with("parameters", "1", Some(count as f64)).ended(Outcome::Ok, None)]
}

/// The worker's side.
fn work(link: &Link, request: Value, _: &Given) -> anyhow::Result<()> {
    let spec: ModelSpec = from_value(request)?;
    let model = spec.choice().and_then(|choice| spec.measured(&choice))?;
    Ok(link.send(&model.parameters()?)?)
}
