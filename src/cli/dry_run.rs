//! `--dry-run`: what would run, what it costs by definition, and how long it would take here.

use anyhow::Result;

use super::export::Exports;
use super::finish;
use crate::run::manifest::Manifest;
use crate::run::plan::Plan;
use crate::term::{Term, clock};
use effattn_record::config::units::Bytes;
use effattn_record::report::table::Table;
use effattn_record::{Outcome, Row};

/// Prints and exports the plan as it stands.
pub fn print_plan(plan: &Plan, exports: &Exports, term: &Term) -> Result<u8> {
    let rows: Vec<Row> = plan.cells.iter().map(row).collect();
    let tables = [table(plan)];
    finish::print_tables(&tables, exports, term)?;
    let manifest = serde_json::to_value(Manifest::new(plan, "dry-run"))?;
    exports.write(&manifest, &rows, &tables)?;
    Ok(0)
}

fn row(cell: &crate::run::plan::Cell) -> Row {
    match &cell.row.error {
        Some(reason) => cell.row.with_outcome(Outcome::Unsupported, Some(reason.clone())),
        None => cell.row.with("cell_time", "s", Some(cell.seconds)).with_outcome(Outcome::Planned, None),
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
        "GFLOPs: one forward pass of the batch; a multiply-add counts as one. held: memory of weights and optimizer moments."
            .to_owned(),
    );
    let reasons =
        plan.cells.iter().filter_map(|cell| Some(named(&cell.row.label(), cell.row.error.as_ref()?)));
    for reason in reasons {
        if !table.notes.contains(&reason) {
            table.notes.push(reason);
        }
    }
    table
}

/// `reason` with `name` in front, which it may have already.
fn named(name: &str, reason: &str) -> String {
    let begins = reason.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', ':']));
    if begins { reason.to_owned() } else { format!("{name}: {reason}") }
}
