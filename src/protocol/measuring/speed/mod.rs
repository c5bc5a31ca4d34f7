//! `speed`: inference and training steps per second against length (cosFormer Table 5's protocol).
//!
//! Every cell has a worker process of its own. Cells of one (length, batch, pass) take turns ([`interleave`]) between
//! calibrations; the value of a row is the median over all steps of the turns that nobody disturbed.

mod bracket;
mod estimate;
mod interleave;
mod limit;
mod parent;
mod plan;
mod process;
mod rows;
#[cfg(test)]
mod simulation;
mod worker;

use super::{input_text, plan as shared};
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::definition::{
    DataDirs, EstimateContext, Prepared, Protocol, ProtocolInfo, Quick, ResultView, WorkerInput,
};
use crate::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError, cells_by_place};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use crate::run::worker::ParentLink;
use effattn_record::config::settings::groups::{MACHINE, MODEL, POINTS};
use effattn_record::{Metric, Row};
use serde_json::Value;

pub use estimate::measure_rate;

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    settings: &[POINTS, MODEL, MACHINE, &["warmup", "runs", "min_runs", "max_time", "timeout", "profile"]],
    help: &[(
        "mode",
        "What a step does: infer, train, or decode (generate the next token, for language models)",
    )],
    reads: &[input_text::SET],
    quick: Some(Quick {
        help: "Short lengths and little time per cell, for a first look",
        said: "eight mechanisms, lengths up to 1024, 0.8 s per cell, unless flags say otherwise",
    }),
    metrics: &[
        Metric { name: "step_time", title: "Time of a step", unit: "s", lower_is_better: true },
        Metric { name: "steps_per_second", title: "Steps per second", unit: "1/s", lower_is_better: false },
        Metric { name: "tokens_per_second", title: "Tokens per second", unit: "1/s", lower_is_better: false },
        Metric { name: "images_per_second", title: "Images per second", unit: "1/s", lower_is_better: false },
        Metric { name: "peak_memory", title: "Peak memory", unit: "B", lower_is_better: true },
        Metric { name: "share_of_limit", title: "Share of the limit", unit: "share", lower_is_better: false },
    ],
    needs_golden_check: true,
    takes_programs: true,
    ..ProtocolInfo::new(
        plan::NAME,
        "Measure inference and training steps per second against length (cosFormer, Table 5)",
    )
};

pub struct Speed;

impl Protocol for Speed {
    fn info(&self) -> &'static ProtocolInfo {
        &INFO
    }

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        plan::defaults(flags)
    }

    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        shared::check_metrics(grid, &plan::PUBLISHED)?;
        cells_by_place(grid, |pick, place| plan::cell(grid, pick, place, threads).map(Some))
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        input_text::prepare(plan, dirs)
    }

    fn summary(&self, plan: &Plan) -> String {
        shared::summary(plan)
    }

    fn estimate(&self, plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
        estimate::price(plan, context)
    }

    fn same_group(&self, a: &Cell, b: &Cell) -> bool {
        place(a) == place(b)
    }

    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        parent::compute(runner, open)
    }

    fn failure_rows(&self, row: &Row, failure: &CellFailure) -> Vec<Row> {
        match row.other_program() {
            Some(_) => rows::program_rows(row, &[], None, Some(failure)),
            None => rows::rows(row, &[], None, Some(failure)),
        }
    }

    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        worker::work(link, request, input)
    }

    fn view(&self) -> ResultView {
        ResultView::Growth
    }
}

const EXAMPLES: &str = "\
Examples:
  # The mechanisms of cosFormer's Table 5 and ls, at 1024 to 4096: minutes
  effattn speed
  # Short lengths: about a minute
  effattn speed --quick
  # Chosen lengths and mechanisms, with a knob
  effattn speed --len 1024..8192 --model full,cosformer,ls:w=16
  # A paper's table, with less time per cell
  effattn speed --suite cos-table5 --max-time 5s --min-runs 3
  # Every mechanism beside linear attention
  effattn speed --model full,linear,ls --len 2048 --baseline linear
  # Tokens per second of generation after contexts of several lengths
  effattn speed --mode decode --len 1024..8192
  # The attention calls alone, in plain operations
  effattn speed --kernel-only --model full,ls --len 4096 --kernel composed
  # Where the time of a training step goes, operation by operation
  effattn speed --model ls,full --len 4096 --mode train --profile
  # PyTorch's steps in turn with ours, on the same weights and inputs
  effattn speed --program torch --model full,linear --len 1024..4096
  # Rows for another program
  effattn speed --mode infer --export-json - | jq '.rows[0]'

A value is the median over the steps of a cell; its 95 % interval is given by order statistics (Student's t below six steps). Cells of one length, batch and pass take turns in processes of their own. A turn that other programs disturb (they take 5 % of its processor time, or a calibration beside it takes 4 to 10 % longer than the run's fastest twentieth, as steady as the machine is, and longer than the median turn's) is put back and repeated, for up to four times the time that a cell has.";

/// Cells of one place take turns.
fn place(cell: &Cell) -> (Option<u64>, Option<u64>, Option<effattn_record::Pass>, Option<u64>) {
    let Row { len, batch, pass, seed, .. } = cell.row;
    (len, batch, pass, seed)
}
