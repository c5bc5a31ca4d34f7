//! Trained models beside the published numbers, as a table.

use super::table::Table;
use crate::config::suite::{Suite, SuiteRow};
use crate::record::{Outcome, Row};
use crate::stats::{Interval, Summary};

/// What trained models are compared by: metric, heading, unit, whether less is better.
const METRICS: &[(&str, &str, &str, bool)] = &[
    ("accuracy", "Accuracy on the test split", "accuracy %", false),
    ("bpc_stream", "Bits per character of the test part, blocks behind a cache", "bpc", true),
    ("bpc_overlap", "Bits per character of the test part, overlapping windows", "bpc", true),
];

/// A table per metric, with one line per task, mechanism and preset: the value over its seeds, what the paper has,
/// and what to make of it. Nothing where no row is one of a trained model.
pub fn tables(rows: &[Row]) -> Vec<Table> {
    METRICS.iter().filter_map(|metric| table(rows, *metric)).collect()
}

fn table(rows: &[Row], (metric, title, unit, less): (&str, &str, &str, bool)) -> Option<Table> {
    let tested: Vec<&Row> = rows.iter().filter(|row| row.metric == metric).collect();
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in tested {
        match groups.iter_mut().find(|group| alike(group[0], row)) {
            // robustness tests the same model that lra trained: it is one seed
            Some(group) if group.iter().any(|other| other.seed == row.seed) => (),
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    if groups.is_empty() {
        return None;
    }
    let columns = [
        "task",
        "model",
        "preset",
        "kernel",
        "verdict",
        "batch",
        "length",
        "seeds",
        "share",
        unit,
        "published",
    ];
    let mut lines: Vec<Vec<String>> = groups.iter().map(|group| line(group, less)).collect();
    let mut notes = vec![
        "share: part of the paper's protocol that was run (steps x batch, length, data), empty with other settings than \
         the protocol's; anything below 100 % is not comparable with the published number. Over several seeds: mean ±standard deviation \
         [95 % interval of the mean]."
            .to_owned(),
    ];
    let mut seen = Vec::new();
    for row in rows.iter().filter(|row| row.metric == "witten_bell_3_bpc") {
        let (Some(task), Some(value)) = (&row.task, row.value) else { continue };
        if metric.starts_with("bpc") && !seen.contains(&(task, value.to_bits())) {
            seen.push((task, value.to_bits()));
            notes.push(format!(
                "{task}: an order-3 interpolated Witten-Bell model of the same split needs {value:.3}."
            ));
        }
    }
    // a column that says the same everywhere says nothing: only kernels differ seldom
    let mut columns = columns.map(str::to_owned).to_vec();
    if lines.iter().all(|line| line[3] == "fused") {
        columns.remove(3);
        lines.iter_mut().for_each(|line| {
            line.remove(3);
        });
    }
    Some(Table { title: title.to_owned(), columns, numbers: 6, rows: lines, notes, ..Table::default() })
}

fn alike(a: &Row, b: &Row) -> bool {
    let key = |row: &Row| {
        (
            (row.suite.clone(), row.task.clone(), row.model.clone(), row.variant.clone(), row.preset.clone()),
            (row.device.clone(), row.dtype.clone(), row.kernel.clone(), row.batch, row.len),
            row.fraction.map(f64::to_bits),
        )
    };
    key(a) == key(b)
}

fn line(group: &[&Row], less: bool) -> Vec<String> {
    let row = group[0];
    let values: Vec<f64> = group.iter().filter_map(|row| row.value).collect();
    let measured = match Summary::of(&values) {
        Some(Summary { mean, std: Some(std), mean_interval: Some(Interval { low, high }), .. }) => {
            format!("{mean:.2} ±{std:.2} [{low:.2}, {high:.2}]")
        }
        Some(summary) => format!("{:.2}", summary.mean),
        None => row.outcome.to_string(),
    };
    let published = row.published.and_then(crate::record::Published::value);
    let text = |value: Option<&str>| value.unwrap_or("").to_owned();
    let number = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    vec![
        text(row.task.as_deref()),
        row.label(),
        text(row.preset.as_deref()),
        if row.dtype == "f32" { row.kernel.clone() } else { format!("{}, {}", row.kernel, row.dtype) },
        verdict(group, &values, published, less),
        number(row.batch),
        number(row.len),
        values.len().to_string(),
        row.fraction.map_or_else(String::new, share),
        measured,
        published.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}")),
    ]
}

/// A share in percent with two digits at least.
fn share(part: f64) -> String {
    let percent = 100.0 * part;
    if percent >= 10.0 { format!("{percent:.0} %") } else { format!("{percent:.2} %") }
}

/// Within spread means |measured - published| <= 2 s sqrt(1/n + 1/4) with our own deviation s over n >= 2 seeds
/// at the whole protocol (the papers' numbers are means over 4 seeds).
fn verdict(group: &[&Row], values: &[f64], published: Option<f64>, less: bool) -> String {
    let row = group[0];
    let Some(published) = published else { return "nothing published".to_owned() };
    if let Some(bad) = group.iter().find(|row| row.outcome != Outcome::Ok) {
        return format!("not comparable: {}", bad.outcome);
    }
    if let Some(why) = foreign(row) {
        return format!("not comparable: {why}");
    }
    if row.fraction.is_none() {
        return "not comparable: other settings".to_owned();
    }
    if row.fraction.is_some_and(|part| part < 1.0) {
        return "not comparable: part of the protocol".to_owned();
    }
    match Summary::of(values) {
        Some(Summary { mean, std: Some(std), n, .. }) if n >= 2 => {
            let spread = 2.0 * std * (1.0 / n as f64 + 0.25).sqrt();
            let gap = mean - published;
            match gap {
                _ if gap.abs() <= spread => "within spread".to_owned(),
                _ if (gap > 0.0) != less => format!("better by {:.2}", gap.abs()),
                _ => format!("worse by {:.2}", gap.abs()),
            }
        }
        Some(Summary { mean, .. }) => format!("not comparable: one seed (gap {:+.2})", mean - published),
        None => "not comparable: no value".to_owned(),
    }
}

/// Why the number that stands beside `row` is of another computation: what its suite, or the suite of its preset, says.
fn foreign(row: &Row) -> Option<String> {
    let preset = if row.preset.as_deref() == Some("ls-lra") { "ls-table1" } else { "cos-table4" };
    let suite = Suite::load(row.suite.as_deref().unwrap_or(preset)).ok()?;
    let same = |entry: &&SuiteRow| {
        entry.model.name == row.model && entry.model.knobs.is_empty() && row.variant.is_none()
    };
    suite.rows.iter().find(same)?.not_comparable.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Published;

    fn row(seed: u64, value: f64, fraction: f64) -> Row {
        Row {
            task: Some("listops".to_owned()),
            seed: Some(seed),
            fraction: Some(fraction),
            published: Some(Published::Value(37.5)),
            ..Row::new("lra", "ls").with("accuracy", "%", Some(value)).ended(Outcome::Ok, None)
        }
    }

    fn said(rows: &[Row]) -> (String, String) {
        let tables = tables(rows);
        assert_eq!((tables.len(), tables[0].rows.len()), (1, 1));
        (tables[0].rows[0][3].clone(), tables[0].rows[0][8].clone())
    }

    #[test]
    fn verdicts_in_words() {
        let all = |fraction| [row(0, 37.0, fraction), row(1, 38.2, fraction)];
        assert_eq!(said(&all(1.0)), ("within spread".to_owned(), "37.60 ±0.85 [29.98, 45.22]".to_owned()));
        assert_eq!(said(&all(0.1)).0, "not comparable: part of the protocol");
        let other = Row { fraction: None, ..row(0, 37.0, 1.0) };
        assert_eq!(said(&[other]).0, "not comparable: other settings");
        let sparse = Row { model: "sparse".to_owned(), ..row(0, 37.0, 1.0) };
        let why = said(&[sparse]).0;
        assert_eq!(why, "not comparable: the code behind the number hides the future in an encoder");
        assert_eq!(said(&[row(0, 20.0, 1.0), row(1, 20.1, 1.0)]).0, "worse by 17.45");
        assert_eq!(said(&[row(0, 20.0, 1.0), row(0, 20.0, 1.0)]).1, "20.00", "a seed counts once");
        assert_eq!(said(&[row(0, 36.5, 1.0)]).0, "not comparable: one seed (gap -1.00)");
        let broken = row(0, 1.0, 1.0).ended(Outcome::Diverged, Some("step 3".to_owned()));
        assert_eq!(
            said(&[Row { value: None, ..broken }]),
            ("not comparable: diverged".to_owned(), "diverged".to_owned())
        );
        let half = Row { dtype: "bf16".to_owned(), ..row(0, 36.0, 1.0) };
        let table = &tables(&[row(0, 37.0, 1.0), half])[0];
        assert_eq!((table.rows[0][3].as_str(), table.rows[1][3].as_str()), ("fused", "fused, bf16"));
        assert!(tables(&[]).is_empty());
        let bits = |seed, value| Row {
            published: Some(Published::Value(0.99)),
            ..row(seed, value, 1.0).with("bpc_stream", "bit", Some(value))
        };
        assert_eq!(said(&[bits(0, 1.5), bits(1, 1.51)]).0, "worse by 0.51");
    }
}
