//! `--dry-run`: what would run, what it costs by definition, and how long it would take here.

use std::collections::HashMap;

use anyhow::Result;

use super::export::Exports;
use super::{finish, start};
use crate::config::units::Bytes;
use crate::protocol::model_spec::ModelSpec;
use crate::protocol::speed;
use crate::protocol::speed::plan::{Request, seconds};
use crate::record::{Outcome, Row};
use crate::report::table::Table;
use crate::run::Stop;
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use crate::run::worker::Launcher;
use crate::term::{Term, clock};

/// Length of the probe steps.
const PROBE: u64 = 256;

/// The plan of `speed`, priced by one short step of every mechanism and pass.
pub fn run(
    plan: &Plan,
    requests: &[Option<Request>],
    ready: &start::Ready,
    exports: &Exports,
    term: &Term,
) -> Result<u8> {
    let launcher = Launcher::own(ready.threads)?;
    let mut rates = HashMap::new();
    let mut plan = plan.clone();
    for (cell, request) in plan.cells.iter_mut().zip(requests) {
        let Some(request) = request else { continue };
        let spec = &request.spec;
        let Some(flops) = cell.row.flops else { continue };
        let key = (spec.model.clone(), spec.pass);
        let rate = match rates.get(&key) {
            Some(rate) => *rate,
            None => {
                let rate = speed::probe(request, PROBE, &launcher, ready.memory_limit, &Stop::default())?;
                rates.insert(key, rate);
                rate
            }
        };
        if let Some(rate) = rate {
            cell.seconds = seconds(request, spec.step_flops(flops) / rate);
        }
    }
    tell(&plan, exports, term)
}

/// Multiply-adds per second in a few steps of the model of `spec` at length `len`; none if it cannot step.
pub fn rate(spec: &ModelSpec, len: u64, ready: &start::Ready) -> Result<Option<f64>> {
    let launcher = Launcher::own(ready.threads)?;
    let probe = Request { spec: spec.clone(), warmup: 1, min_runs: 1, runs: 3, max_time: 0.5, timeout: 60.0 };
    Ok(speed::probe(&probe, len, &launcher, ready.memory_limit, &Stop::default())?)
}

/// Prints and exports the plan as it stands.
pub fn tell(plan: &Plan, exports: &Exports, term: &Term) -> Result<u8> {
    let rows: Vec<Row> = plan.cells.iter().map(row).collect();
    let tables = [table(plan)];
    finish::show(&tables, exports, term)?;
    let manifest = serde_json::to_value(Manifest::new(plan, "dry-run"))?;
    exports.write(&manifest, &rows, &tables)?;
    Ok(0)
}

fn row(cell: &crate::run::plan::Cell) -> Row {
    match &cell.row.error {
        Some(reason) => cell.row.ended(Outcome::Unsupported, Some(reason.clone())),
        None => cell.row.with("cell_time", "s", Some(cell.seconds)).ended(Outcome::Planned, None),
    }
}

fn table(plan: &Plan) -> Table {
    let total = clock(plan.seconds());
    let mut table = Table {
        title: format!("Cells: {}; about {total}; nothing was run", plan.cells.len()),
        columns: ["model", "pass", "len", "batch", "GFLOPs", "parameters", "held", "time"]
            .map(str::to_owned)
            .to_vec(),
        numbers: 6,
        ..Table::default()
    };
    for cell in &plan.cells {
        let row = &cell.row;
        let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        let flops = row.flops.map(|flops| flops as f64 * row.batch.unwrap_or(1) as f64 / 1e9);
        table.rows.push(vec![
            row.label(),
            row.pass.map_or_else(String::new, |pass| pass.to_string()),
            number(row.len),
            number(row.batch),
            flops.map_or_else(|| "-".to_owned(), |flops| format!("{flops:.3}")),
            number(row.params),
            row.bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string()),
            if row.error.is_some() { "unsupported".to_owned() } else { clock(cell.seconds) },
        ]);
    }
    table.notes.push(
        "GFLOPs: one forward of the batch, a multiply-add counts as one. held: weights and moments."
            .to_owned(),
    );
    let reasons = plan
        .cells
        .iter()
        .filter_map(|cell| Some(format!("{}: {}", cell.row.label(), cell.row.error.as_ref()?)));
    for reason in reasons {
        if !table.notes.contains(&reason) {
            table.notes.push(reason);
        }
    }
    table
}
