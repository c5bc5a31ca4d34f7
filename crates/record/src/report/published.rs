//! Measured beside published, and what did not run, as tables.

use super::ranking::fused_full_attention;
use super::seeds::over_seeds;
use super::table::Table;
use crate::config::suite::{Suite, SuiteRow};
use crate::config::units::Bytes;
use crate::{Outcome, Pass, Published, Row};

/// One table per pass and batch size of a suite whose rows are lengths: measured, and in parentheses what
/// the paper printed.
pub fn tables(rows: &[Row], suite: &Suite) -> Vec<Table> {
    let measured = |metric: &&str| rows.iter().any(|row| row.metric == *metric);
    let published = suite.rows.iter().flat_map(|row| &row.published).map(|table| table.metric.as_str());
    // numbers of something that was not measured hide nothing that was
    let metric = published.chain(["step_time"]).find(measured);
    let metric = metric.or(rows.first().map(|row| row.metric.as_str())).unwrap_or_default();
    let rows: Vec<&Row> = rows.iter().filter(|row| row.metric == metric && row.len.is_some()).collect();
    let key = |row: &Row| (row.pass, row.batch, row.device.clone());
    let mut keys: Vec<(Option<Pass>, Option<u64>, String)> = rows.iter().map(|row| key(row)).collect();
    keys.sort_unstable();
    keys.dedup();
    let mut tables: Vec<Table> = keys
        .into_iter()
        .map(|wanted| {
            let here: Vec<&Row> = rows.iter().copied().filter(|row| key(row) == wanted).collect();
            one(&here, suite, metric, wanted.0, wanted.1)
        })
        .collect();
    if let (Some(last), Some(analysis)) = (tables.last_mut(), &suite.analysis) {
        last.notes.push(analysis.trim().to_owned());
    }
    tables
}

fn one(rows: &[&Row], suite: &Suite, metric: &str, pass: Option<Pass>, batch: Option<u64>) -> Table {
    let mut lens: Vec<u64> = rows.iter().filter_map(|row| row.len).collect();
    lens.sort_unstable();
    lens.dedup();
    let pass = pass.map_or("", |pass| pass.word());
    let device = rows.iter().map(|row| row.device.as_str()).find(|device| *device != "cpu");
    let mut table = Table {
        title: format!(
            "{}: {} · {pass}, batch {} · measured{} (published: {})",
            suite.title,
            metric.replace('_', " "),
            batch.unwrap_or(1),
            device.map_or_else(String::new, |device| format!(" on {device}")),
            suite.source
        ),
        columns: std::iter::once("model".to_owned()).chain(lens.iter().map(u64::to_string)).collect(),
        numbers: lens.len(),
        ..Table::default()
    };
    let cells = over_seeds(rows.iter().copied());
    for entry in &suite.rows {
        let of = |row: &&Row| {
            row.model == entry.model.name && same_variant(row, entry) && same_preset(row, entry, suite)
        };
        let claimed = |row: &Row| suite.rows.iter().any(|other| same_settings(row, other, suite));
        let (own, rest): (Vec<&Row>, Vec<&Row>) =
            cells.iter().filter(of).partition(|row| same_settings(row, entry, suite));
        // an entry may set what is usual anyway, which rows do not say
        let here: Vec<&Row> =
            if own.is_empty() { rest.into_iter().filter(|row| !claimed(row)).collect() } else { own };
        if here.is_empty() {
            continue;
        }
        let cells = lens.iter().map(|len| {
            here.iter().find(|row| row.len == Some(*len)).map_or_else(|| "-".to_owned(), |row| cell(row))
        });
        table.rows.push(std::iter::once(entry.label.clone()).chain(cells).collect());
        let beside = here.iter().any(|row| row.published.is_some());
        if let Some(why) = entry.not_comparable.as_ref().filter(|_| beside) {
            table.notes.push(format!("{}: {why}.", entry.label));
        }
    }
    table.notes.extend(other_sizes(rows));
    let wanted = suite.base.min_runs;
    let repetitions = rows.iter().filter(|row| row.value.is_some()).filter_map(|row| row.n.zip(wanted));
    table.notes.extend(few_repetitions(&repetitions.collect::<Vec<_>>()));
    table
}

/// Sizes of models in the settings of rows.
const SIZES: [&str; 6] = ["layers", "width", "heads", "ffn", "dropout", "attention_dropout"];

/// Settings of `row` that are sizes of its model, and not its preset's.
pub(super) fn sizes(row: &Row) -> impl Iterator<Item = &str> {
    row.each_setting().filter(|setting| setting.split_once('=').is_some_and(|(key, _)| SIZES.contains(&key)))
}

/// In words, which sizes of `rows` are not their preset's.
fn other_sizes(rows: &[&Row]) -> Option<String> {
    let mut said: Vec<&str> = Vec::new();
    for word in rows.iter().flat_map(|row| sizes(row)) {
        if !said.contains(&word) {
            said.push(word);
        }
    }
    let preset = rows.first().and_then(|row| row.preset.as_deref()).unwrap_or_default();
    (!said.is_empty()).then(|| format!("Measured with {}, not with the sizes of {preset}.", said.join(", ")))
}

/// In words, how many cells have fewer repetitions than asked for; of each its repetitions and the fewest that were asked for.
pub(super) fn few_repetitions(cells: &[(u64, u64)]) -> Option<String> {
    let few: Vec<u64> = cells.iter().filter(|(n, wanted)| n < wanted).map(|(n, _)| *n).collect();
    let (least, most) = (few.iter().min()?, few.iter().max()?);
    let range = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let wanted = cells.iter().map(|(_, wanted)| wanted).max()?;
    Some(format!(
        "{} of {} measured cells have fewer repetitions than the suite asks for: medians of {range} steps, not of {wanted} or more.",
        few.len(),
        cells.len()
    ))
}

/// Whether the row was made with the settings of the suite's entry: of those that tell the suite's rows apart, every unusual
/// one of the row is the entry's.
fn same_settings(row: &Row, entry: &SuiteRow, suite: &Suite) -> bool {
    let said = serde_json::to_value(entry.set.clone().over(suite.base.clone())).unwrap_or_default();
    let own = |key: &str| match &said[key] {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some(text.trim_end_matches('s').to_owned()),
        value => Some(value.to_string()),
    };
    suite.rows.iter().flat_map(|other| other.set.set_keys()).all(|key| match (row.setting(key), own(key)) {
        (Some(here), Some(own)) => here.trim_end_matches('s') == own,
        (Some(_), None) => false,
        (None, _) => !entry.set.set_keys().contains(&key),
    })
}

/// Whether the row's knobs are those of the suite's entry: all of its own are among the entry's.
fn same_variant(row: &Row, entry: &crate::config::suite::SuiteRow) -> bool {
    let said: Vec<String> = entry.model.knobs.iter().map(|(knob, value)| format!("{knob}={value}")).collect();
    let variant = row.variant.as_deref().unwrap_or_default();
    variant.split(',').filter(|knob| !knob.is_empty()).all(|knob| said.iter().any(|said| said == knob))
}

/// Whether the row is of the preset of the suite's entry, where the suite has it: one that the user chose instead belongs to every entry.
fn same_preset(row: &Row, entry: &SuiteRow, suite: &Suite) -> bool {
    let preset = |entry: &SuiteRow| entry.set.preset.clone().or_else(|| suite.base.preset.clone());
    row.preset == preset(entry) || suite.rows.iter().all(|other| row.preset != preset(other))
}

/// Whether the row is of the model of the suite's entry, with the same knobs in whatever order.
pub(super) fn is_model_of(row: &Row, entry: &SuiteRow) -> bool {
    let count = row.variant.as_deref().unwrap_or_default().split(',').filter(|knob| !knob.is_empty()).count();
    row.model == entry.model.name && same_variant(row, entry) && count == entry.model.knobs.len()
}

fn cell(row: &Row) -> String {
    let measured = match row.value {
        Some(value) => number(value),
        None => row.outcome.to_string(),
    };
    match row.published {
        Some(Published::Value(value)) => format!("{measured} ({})", number(value)),
        Some(Published::Outcome(outcome)) => format!("{measured} ({outcome})"),
        None => measured,
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// The longest lengths that `memory --fit` found.
pub fn longest(rows: &[Row]) -> Option<Table> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.metric == "longest_length").collect();
    if rows.is_empty() {
        return None;
    }
    let mut table = Table {
        title: "Longest length that fits".to_owned(),
        columns: ["model", "pass", "remark", "batch", "length", "peak"].map(str::to_owned).to_vec(),
        numbers: 3,
        ..Table::default()
    };
    for row in &rows {
        table.rows.push(vec![
            row.label(),
            row.pass.map_or_else(String::new, |pass| pass.to_string()),
            row.error.clone().unwrap_or_default(),
            row.batch.map_or_else(String::new, |batch| batch.to_string()),
            row.value.map_or_else(|| row.outcome.to_string(), |len| format!("{len:.0}")),
            row.peak_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string()),
        ]);
    }
    table.notes = reach(&rows);
    table.notes.extend(fused_full_attention(&rows));
    table.notes.extend(other_sizes(&rows));
    Some(table)
}

/// How far Transformer-LS says that its language model reaches beside Transformer-XL in the memory of one device.
const REACH: (&str, &str, &str) =
    ("charlm-small", "ls", "the text of Transformer-LS (Figure 3) says about 3");

/// How far each mechanism reaches beside full attention in the same memory. A length that something else ended than the
/// memory is none.
fn reach(rows: &[&Row]) -> Vec<String> {
    let same =
        |a: &Row, b: &Row| (a.pass, a.batch, &a.kernel, &a.device) == (b.pass, b.batch, &b.kernel, &b.device);
    let full = |row: &&&Row| matches!(row.model.as_str(), "full" | "transformer-xl");
    let found = |row: &&Row| row.outcome == Outcome::Ok && row.error.is_none();
    let rows: Vec<&Row> = rows.iter().copied().filter(found).collect();
    let beside = |row: &&Row| {
        let full = rows.iter().filter(full).find(|full| same(full, row) && full.model != row.model)?;
        let (len, of) = (row.value?, full.value.filter(|len| *len > 0.0)?);
        let (preset, model, words) = REACH;
        let published =
            row.preset.as_deref() == Some(preset) && row.model == model && row.pass == Some(Pass::Train);
        let published = if published { format!("; {words}") } else { String::new() };
        Some(format!(
            "{}{} reaches {:.2} times the length of {} ({} kernels){published}.",
            match row.pass {
                Some(Pass::Infer) => "Inference: ",
                Some(Pass::Train) => "Training: ",
                Some(Pass::Decode) => "Decoding: ",
                None => "",
            },
            row.label(),
            len / of,
            full.label(),
            row.kernel
        ))
    };
    rows.iter().filter(|row| !full(row)).filter_map(beside).collect()
}

/// Why cells have no value, each reason once.
pub fn reasons(rows: &[Row]) -> Option<Table> {
    let mut table = Table {
        title: "Cells without a value".to_owned(),
        columns: ["model", "outcome", "where", "why"].map(str::to_owned).to_vec(),
        ..Table::default()
    };
    let mut seen = std::collections::BTreeSet::new();
    let told = |row: &&Row| !matches!(row.outcome, Outcome::Ok | Outcome::Interrupted | Outcome::Planned);
    // why there is no longest length stands beside it
    let beside = |row: &&Row| row.metric != "longest_length";
    for row in rows.iter().filter(|row| row.value.is_none()).filter(told).filter(beside) {
        let pass = row.pass.map_or("", |pass| pass.word());
        let number = |name: &str, value: Option<u64>| value.map(|value| format!("{name}{value}"));
        let place = [number("n", row.len), number("b", row.batch), Some(pass.to_owned())];
        let place = place.into_iter().flatten().collect::<Vec<_>>().join(" ");
        let why = row.error.clone().unwrap_or_default();
        if seen.insert((row.label(), row.outcome, place.clone(), row.batch)) {
            table.rows.push(vec![row.label(), row.outcome.to_string(), place.trim().to_owned(), why]);
        }
    }
    // The same reason at every length is one line.
    let mut merged: Vec<Vec<String>> = Vec::new();
    for row in table.rows {
        match merged.iter_mut().find(|kept| (&kept[0], &kept[1], &kept[3]) == (&row[0], &row[1], &row[3])) {
            Some(kept) => {
                if !kept[2].ends_with(", ...") {
                    kept[2].push_str(", ...");
                }
            }
            None => merged.push(row),
        }
    }
    table.rows = merged;
    (!table.rows.is_empty()).then_some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, len: u64, value: Option<f64>, published: Published) -> Row {
        let outcome = if value.is_some() { Outcome::Ok } else { Outcome::Oom };
        let row = Row {
            len: Some(len),
            batch: Some(32),
            pass: Some(Pass::Infer),
            published: Some(published),
            ..Row::new("speed", model)
        };
        row.with("steps_per_second", "1/s", value).with_outcome(outcome, None)
    }

    #[test]
    fn rows_of_one_mechanism_with_other_settings_stay_apart() {
        let line =
            |label: &str, set: &str| format!("[[row]]\nlabel = \"{label}\"\nmodel = \"full\"\n{set}\n");
        let text = format!(
            "title = \"t\"\nprotocol = \"speed\"\nsource = \"s\"\n[base]\nlen = [8]\n{}{}{}",
            line("plain", ""),
            line("deep", "set = { layers = 8 }"),
            line("composed", "set = { kernel = \"composed\" }")
        );
        let suite = Suite::parse("x.toml", &text).unwrap();
        let row = |settings: Option<&str>, value: f64| Row {
            len: Some(8),
            settings: settings.map(str::to_owned),
            ..Row::new("speed", "full").with("step_time", "s", Some(value))
        };
        let rows = [row(None, 1.0), row(Some("layers=8"), 2.0), row(Some("runs=9 kernel=composed"), 3.0)];
        let table = &tables(&rows, &suite)[0];
        let cells: Vec<&str> = table.rows.iter().map(|row| row[1].as_str()).collect();
        assert_eq!(cells, ["1.00", "2.00", "3.00"]);
    }

    #[test]
    fn a_cell_is_of_all_seeds_and_its_repetitions_are_of_each() {
        let suite = Suite::load("cos-table5").unwrap();
        let of = |seed: u64, value: f64| {
            let row = row("full", 1024, Some(value), Published::Value(25.37));
            Row { seed: Some(seed), n: suite.base.min_runs, ..row }
        };
        let table = &tables(&[of(0, 2.0), of(1, 4.0)], &suite)[0];
        assert_eq!(table.rows[0][1], "3.00 (25.37)");
        assert!(!table.notes.iter().any(|note| note.contains("repetitions")), "{:?}", table.notes);
    }

    #[test]
    fn rows_of_one_mechanism_with_other_presets_stay_apart() {
        let suite = Suite::load("ls-table5").unwrap();
        let row = |preset: &str, value: f64| Row {
            preset: Some(preset.to_owned()),
            len: Some(224),
            ..Row::new("speed", "ls2d").with("step_time", "s", Some(value))
        };
        let table = &tables(&[row("vil-ls-medium", 2.0), row("cvt-21", 3.0)], &suite)[0];
        assert_eq!(table.rows, [["ViL-LS-Medium", "2.00"], ["CvT*-LS-21", "3.00"]]);
        let table = &tables(&[row("of-the-user", 4.0)], &suite)[0];
        assert!(table.rows.len() > 1 && table.rows.iter().all(|row| row[1] == "4.00"), "{:?}", table.rows);
    }

    #[test]
    fn published_numbers_stand_beside_measured_ones() {
        let suite = Suite::load("cos-table5").unwrap();
        let rows = [
            row("full", 1024, Some(2.5), Published::Value(25.37)),
            row("full", 3072, None, Published::Outcome(Outcome::Oom)),
        ];
        let tables = tables(&rows, &suite);
        assert_eq!(tables.len(), 1);
        assert_eq!(tables[0].columns, ["model", "1024", "3072"]);
        assert_eq!(tables[0].rows, [["Transformer", "2.50 (25.37)", "oom (oom)"]]);
        assert_eq!(reasons(&rows).unwrap().rows.len(), 1);
    }

    #[test]
    fn a_published_metric_that_no_row_has_hides_no_measured_one() {
        let text = "title = \"t\"\nprotocol = \"speed\"\nsource = \"s\"\n[base]\nlen = [8]\n[[row]]\nlabel = \"a\"\nmodel = \
                    \"full\"\npublished = { metric = \"step_tme\", infer = 3.0 }\n";
        let suite = Suite::parse("x.toml", text).unwrap();
        let row = |metric: &str, value: f64| Row {
            len: Some(8),
            ..Row::new("speed", "full").with(metric, "s", Some(value))
        };
        let timed = [row("tokens_per_second", 3.0), row("step_time", 2.0)];
        for (rows, shown) in [(&timed[..], "2.00"), (&[row("peak_memory", 4.0)], "4.00")] {
            assert_eq!(tables(rows, &suite)[0].rows, [["a", shown]]);
        }
    }

    #[test]
    fn only_lengths_that_memory_ended_are_compared() {
        let row = |model: &str, pass, len: Option<f64>, outcome, why: Option<&str>| {
            let row = Row { pass: Some(pass), batch: Some(1), ..Row::new("memory", model) };
            row.with("longest_length", "positions", len).with_outcome(outcome, why.map(str::to_owned))
        };
        let rows = [
            row("full", Pass::Infer, Some(1000.0), Outcome::Ok, None),
            row("ls", Pass::Infer, Some(4000.0), Outcome::Ok, None),
            row(
                "linear",
                Pass::Infer,
                Some(8000.0),
                Outcome::Ok,
                Some("the longest length that --len allows"),
            ),
            row("full", Pass::Train, None, Outcome::Timeout, Some("by its growth about 500 positions")),
            row("ls", Pass::Train, Some(900.0), Outcome::Ok, None),
        ];
        let table = longest(&rows).unwrap();
        assert_eq!(
            table.notes[..1],
            ["Inference: ls reaches 4.00 times the length of full (fused kernels)."]
        );
        assert!(table.notes.len() == 2 && table.notes[1].contains("stores no scores"), "{:?}", table.notes);
        assert_eq!(table.rows[3][4], "timeout");
        assert!(reasons(&rows).is_none(), "why there is none stands beside it");
    }
}
