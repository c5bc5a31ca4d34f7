//! `speed`: inference and training steps per second against length (cosFormer Table 5's protocol).
//!
//! Every cell has a worker process of its own. Cells of one (length, batch, pass) take turns ([`interleave`]); the value
//! of a row is the median over all steps of the cell.

pub mod interleave;
mod parent;
pub mod plan;
mod rows;
pub mod worker;

use super::definition::{Protocol, Quick, ResultView};
use super::input_text;
use crate::run::plan::Cell;
use effattn_model::family;
use effattn_record::config::settings::groups::{MACHINE, MODEL, POINTS};
use effattn_record::{Metric, Row};

pub use parent::measure_rate;

/// The table line.
pub static PROTOCOL: Protocol = Protocol {
    name: "speed",
    about: "Measure inference and training steps per second against length (cosFormer, Table 5)",
    examples: EXAMPLES,
    settings: &[POINTS, MODEL, MACHINE, &["warmup", "runs", "min_runs", "max_time", "timeout", "profile"]],
    help: &[(
        "mode",
        "What a step does: infer, train, or decode (generate the next token, for language models)",
    )],
    presets: || family::names(|_| true),
    tasks: None,
    reads: &[input_text::SET],
    quick: Some(Quick {
        help: "Short lengths and little time per cell, for a first look",
        said: "eight mechanisms, lengths up to 1024, 0.8 s per cell, unless flags say otherwise",
    }),
    defaults: plan::defaults,
    cells: plan::cells,
    prepare: input_text::prepare,
    summary: super::grid::steps_amount,
    estimate: Some(parent::price),
    same_group: |a, b| place(a) == place(b),
    compute: parent::compute,
    failure_rows: |row, ending| rows::rows(row, &[], None, Some(ending)),
    work: worker::work,
    metrics: &[
        Metric { name: "step_time", title: "Time of a step", unit: "s", lower_is_better: true },
        Metric { name: "steps_per_second", title: "Steps per second", unit: "1/s", lower_is_better: false },
        Metric { name: "tokens_per_second", title: "Tokens per second", unit: "1/s", lower_is_better: false },
        Metric { name: "images_per_second", title: "Images per second", unit: "1/s", lower_is_better: false },
        Metric { name: "peak_memory", title: "Peak memory", unit: "B", lower_is_better: true },
    ],
    view: ResultView::Growth,
    curve: None,
    reuses_finished: false,
    needs_golden_check: true,
    delegates_to: &[],
    alternative: None,
};

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
  # Rows for another program
  effattn speed --mode infer --export-json - | jq '.rows[0]'

A value is the median over the steps of a cell; its 95 % interval is given by order statistics (Student's t below six steps). Cells of one length, batch and pass take turns in processes of their own.";

/// Cells of one place take turns.
fn place(cell: &Cell) -> (Option<u64>, Option<u64>, Option<effattn_record::Pass>, Option<u64>) {
    let Row { len, batch, pass, seed, .. } = cell.row;
    (len, batch, pass, seed)
}
