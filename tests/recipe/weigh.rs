//! `weigh`: the parameters of a model, counted by a worker.

use effattn::config::lists::Lengths;
use effattn::config::settings::groups::MODEL;
use effattn::config::settings::{Settings, within};
use effattn::own_setting;
use effattn::protocol::cell_runner::{CellResult, CellRunner};
use effattn::protocol::definition::{Protocol, ProtocolInfo, WorkerContext, WorkerInput};
use effattn::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError, listed};
use effattn::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use effattn::record::{Metric, Outcome, Pass, Row};
use effattn::run::RunError;
use effattn::run::plan::{Cell, Plan};
use effattn::run::worker::{ParentLink, Received};
use serde::{Deserialize, Serialize};
use serde_json::{Value, from_value};

own_setting! {
    /// Models side by side, whose parameters are counted together [default: 1]
    COPIES: u64 = "copies", "Grid", "N", |text| within(text, 1, 1000);
}

/// What the worker of a cell is asked.
#[derive(Serialize, Deserialize)]
struct WeighRequest {
    model: ModelSpec,
    copies: u64,
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: "Examples:\n  effattn weigh --model full,ls",
    settings: &[&["len", "copies"], MODEL],
    own: &[&COPIES.setting],
    help: &[("len", "Lengths: position embeddings count as parameters")],
    metrics: &[Metric { name: "parameters", title: "Parameters", unit: "1", lower_is_better: true }],
    ..ProtocolInfo::new("weigh", "Parameters of a model")
};

/// `weigh`.
pub struct Weigh;

impl Protocol for Weigh {
    fn info(&self) -> &'static ProtocolInfo {
        &INFO
    }

    fn defaults(&self, _: &GridFlags) -> GridDefaults {
        let settings =
            Settings { len: Some(Lengths(vec![1024])), preset: Some("ls-lra".to_owned()), ..Settings::NONE };
        GridDefaults { settings, models: "full" }
    }

    /// A cell for every mechanism and length; its request is the model.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        let mut cells = Vec::new();
        for pick in &grid.entries {
            for &len in pick.settings.len.iter().flat_map(|lens| &lens.0) {
                let spec = ModelSpec::new(pick, len, 1, Pass::Infer, 0)?;
                let (resolved, reason) =
                    resolve_or_unsupported(pick, |choice| spec.resolve_measured(choice))?;
                let row = spec.row(INFO.name, threads, resolved.as_deref());
                let words = format!("{} n{len}", spec.model);
                let copies = COPIES.of(&pick.settings).unwrap_or(1);
                let usual = WeighRequest { model: spec.default_spec("ls-lra"), copies: 1 };
                let cell = Cell::new(&words, row, &WeighRequest { model: spec, copies }, &usual);
                cells.push(cell.with_unsupported(reason));
            }
        }
        Ok(cells)
    }

    fn summary(&self, plan: &Plan) -> String {
        listed(plan, |row| row.preset.clone())
    }

    /// Asks a worker for each of the cells `open`.
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        for &index in open {
            let mut worker = runner.start(index, runner.session.memory_limit, WorkerContext::default())?;
            let reply = worker.receive::<u64>(None, runner.session.resident_limit, &runner.session.stop)?;
            match reply {
                Received::Message(count) => {
                    worker.finish();
                    let rows = rows(&runner.plan.cells[index].row, count);
                    let summary = format!("{count} parameters");
                    let result = CellResult { rows, samples: Vec::new(), summary, progress_seconds: 0.0 };
                    runner.record_result(index, result)?;
                }
                Received::Ended(failure) => runner.record_failure(index, &failure, 0.0)?,
            }
        }
        Ok(())
    }

    fn work(&self, link: &ParentLink, request: Value, _: &WorkerInput) -> anyhow::Result<()> {
        let WeighRequest { model: spec, copies } = from_value(request)?;
        let model = spec.choice().and_then(|choice| spec.resolve_measured(&choice))?;
        Ok(link.send(&(copies * model.parameters()? as u64))?)
    }
}

fn rows(row: &Row, count: u64) -> Vec<Row> {
    vec![row.with("parameters", "1", Some(count as f64)).with_outcome(Outcome::Ok, None)]
}
