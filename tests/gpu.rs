//! What docs/building-for-gpus.md says was measured on a GPU.

use effattn::config::suite::Suite;
use effattn::record::{Pass, Published, Row, csv};

use super::prose::root;
use super::tables::{renew, with_rows_below};

/// Rows of the newest run of a part of the committed campaign.
fn rows(part: &str) -> Vec<Row> {
    let file = root().join("reproduction/gpu").join(part).join("latest/rows.csv");
    csv::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// The published number of `row` with the digits that its suite has.
fn with_printed_digits(row: &Row, published: f64) -> String {
    let digits = || {
        let suite = Suite::load(row.suite.as_deref()?).ok()?;
        let at = suite.base.len.as_ref()?.0.iter().position(|len| Some(*len) == row.len)?;
        let entry = suite.rows.iter().find(|entry| entry.model.name == row.model)?;
        entry.table(&row.metric)?.digits_at(row.pass?.word(), at)
    };
    digits().map_or_else(|| published.to_string(), |digits| format!("{published:.digits$}"))
}

/// A line per model: what `metric` was in each of the cells, with the published number; a dash where a cell was not reached or not
/// finished, the outcome where it has no number for another reason.
fn lines(rows: &[Row], metric: &str, cells: &[(Pass, u64, u64)], digits: usize) -> Vec<String> {
    let mut models: Vec<String> = Vec::new();
    for row in rows {
        if !models.contains(&row.label()) {
            models.push(row.label());
        }
    }
    let cell = |model: &str, (pass, batch, len): (Pass, u64, u64)| {
        let is = |row: &&Row| {
            row.label() == model
                && row.metric == metric
                && (row.pass, row.batch, row.len) == (Some(pass), Some(batch), Some(len))
        };
        let Some(row) = rows.iter().find(is) else { return "-".to_owned() };
        match (row.value, &row.published) {
            (Some(value), Some(Published::Value(published))) => {
                format!("{value:.digits$} ({})", with_printed_digits(row, *published))
            }
            (Some(value), _) => format!("{value:.digits$}"),
            (None, _) if row.outcome.word() == "interrupted" => "-".to_owned(),
            (None, _) => row.outcome.to_string(),
        }
    };
    let line = |model: &String| {
        let cells = cells.iter().map(|at| format!(" {} |", cell(model, *at)));
        format!("| `{model}` |{}", cells.collect::<String>())
    };
    models.iter().map(line).collect()
}

#[test]
fn what_was_measured_on_a_gpu_is_of_the_committed_runs() {
    use Pass::{Infer, Train};
    let table5 = [(Infer, 1024), (Infer, 4096), (Train, 1024)];
    let table5 = lines(&rows("table5"), "steps_per_second", &table5.map(|(pass, len)| (pass, 32, len)), 2);
    let figure3 = [(1, 512), (1, 2048), (4, 512), (4, 2048)];
    let figure3 = figure3.map(|(batch, len)| (Train, batch, len));
    let [seconds, bytes] = ["step_time", "peak_memory"].map(|metric| {
        let scale = if metric == "step_time" { 1e3 } else { 1.0 / f64::from(1 << 20) };
        let scaled =
            rows("figure3").into_iter().map(|row| Row { value: row.value.map(|it| it * scale), ..row });
        lines(&scaled.collect::<Vec<_>>(), metric, &figure3, 0)
    });
    assert!(table5.len() == 12 && seconds.len() == 2 && bytes.len() == 2, "{table5:?} {seconds:?}");
    renew("docs/building-for-gpus.md", |page| {
        let page = with_rows_below(page, "| steps per second at batch 32 |", &table5);
        let page = with_rows_below(&page, "| milliseconds of a training step |", &seconds);
        with_rows_below(&page, "| peak MiB of a training step |", &bytes)
    });
}
