//! The TOML text of a suite: its keys as they stand in the file, and their checks.

use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::published::{PublishedPlaces, WireTables};
use super::{Column, PublishedOnlyRow, Suite, SuiteError, SuiteRatio, SuiteRow};
use crate::config::lists::{MechanismSpec, Models};
use crate::config::settings::Settings;
use crate::config::{ParseError, nearest, unknown};
use crate::file::plain_name;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSuite {
    title: String,
    protocol: Spanned<String>,
    source: String,
    analysis: Option<String>,
    numbers_of: Option<String>,
    source_seeds: Option<u64>,
    base: Option<Spanned<Settings>>,
    row: Vec<WireRow>,
    #[serde(default)]
    printed: Vec<WirePrinted>,
    #[serde(default)]
    columns: Vec<Column>,
    #[serde(default)]
    ratio: Vec<Spanned<SuiteRatio>>,
    by_len: Option<Spanned<bool>>,
    also: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireRow {
    label: String,
    part_of: Option<String>,
    model: Spanned<String>,
    #[serde(default)]
    knobs: toml::Table,
    #[serde(default)]
    set: Settings,
    published: Option<Spanned<WireTables>>,
    not_comparable: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WirePrinted {
    label: String,
    why: String,
    published: Spanned<WireTables>,
}

impl Suite {
    /// Reads the text of `file`.
    pub fn parse(file: &str, text: &str) -> Result<Self, SuiteError> {
        let at = |offset: usize, problem: String| SuiteError::At {
            file: file.to_owned(),
            line: line_of(text, offset),
            problem,
        };
        let wire: WireSuite = toml::from_str(text).map_err(|error| {
            let (line, problem) = toml_problem(text, &error);
            SuiteError::At { file: file.to_owned(), line, problem }
        })?;
        if wire.row.is_empty() {
            return Err(at(0, "there is no [[row]]; give at least one".to_owned()));
        }
        let base_at = wire.base.as_ref().map_or(0, |base| base.span().start);
        let base = wire.base.map_or(Settings::NONE, Spanned::into_inner);
        base.check().map_err(|error| at(base_at, format!("[base]: {error}")))?;
        if let Some(column) = wire.columns.iter().find(|column| column.metrics.is_empty()) {
            let Column { title, .. } = column;
            let place = text.find(title.as_str()).unwrap_or(0);
            return Err(at(place, format!("column {title:?} has no metrics; give the name of at least one")));
        }
        let newlines: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let places = PublishedPlaces {
            text,
            protocol: wire.protocol.get_ref(),
            columns: &wire.columns,
            by_len: wire.by_len.as_ref().is_some_and(|by_len| *by_len.get_ref()),
            lens: base.len.as_ref().map_or(&[], |len| &len.0),
        };
        let mut rows: Vec<SuiteRow> = Vec::new();
        for row in wire.row {
            let start = row.model.span().start;
            let mut model = single(row.model.get_ref()).map_err(|problem| at(start, problem))?;
            let twice = |key: &&String| model.knobs.iter().any(|(known, _)| known == *key);
            if let Some(key) = row.knobs.keys().find(twice) {
                let problem =
                    format!("knob {key} is given twice, in model and in knobs; leave one of them out");
                return Err(at(start, problem));
            }
            model.knobs.extend(row.knobs.iter().map(|(key, value)| (key.clone(), knob_text(value))));
            if let Some(known) = rows.iter().find(|known| known.label == row.label) {
                let SuiteRow { label, line, .. } = known;
                return Err(at(
                    start,
                    format!("the label {label:?} is that of line {line} too; give each row its own"),
                ));
            }
            let own = row.set.len.as_ref().map(|len| len.0.as_slice());
            let published = row.published.map(|wire| places.tables(wire, &row.label, own));
            let published =
                published.transpose().map_err(|(start, problem)| at(start, problem))?.unwrap_or_default();
            let line = 1 + newlines.partition_point(|at| *at < start);
            row.set.check().map_err(|error| at(start, error.0))?;
            let (label, part_of, set, not_comparable) = (row.label, row.part_of, row.set, row.not_comparable);
            rows.push(SuiteRow { label, part_of, model, set, published, not_comparable, line });
        }
        let mut printed = Vec::new();
        for WirePrinted { label, why, published } in wire.printed {
            let published =
                places.tables(published, &label, None).map_err(|(start, problem)| at(start, problem))?;
            printed.push(PublishedOnlyRow { label, why, published });
        }
        let by_len = wire.by_len.filter(|by_len| *by_len.get_ref());
        if let (Some(by_len), true) = (&by_len, wire.columns.is_empty()) {
            let problem =
                "by_len makes a line for every length of a table with [[columns]], and there are none";
            return Err(at(by_len.span().start, problem.to_owned()));
        }
        for ratio in &wire.ratio {
            let wrong = misplaced(ratio.get_ref(), (&rows, &base), &wire.columns);
            wrong.map_or(Ok(()), |problem| Err(at(ratio.span().start, problem)))?;
        }
        let name = Path::new(file).file_stem().map_or_else(|| file.into(), |stem| stem.to_string_lossy());
        Ok(Self {
            name: plain_name(&name),
            file: file.to_owned(),
            title: wire.title,
            protocol: wire.protocol.into_inner(),
            source: wire.source,
            analysis: wire.analysis,
            base_line: line_of(text, base_at),
            numbers_of: wire.numbers_of,
            source_seeds: wire.source_seeds,
            base,
            rows,
            printed,
            columns: wire.columns,
            ratios: wire.ratio.into_iter().map(Spanned::into_inner).collect(),
            by_len: by_len.is_some(),
            also: wire.also,
            text: text.to_owned(),
        })
    }
}

/// What keeps `ratio` out of a table of `rows` over `base` and these columns.
fn misplaced(
    ratio: &SuiteRatio,
    (rows, base): (&[SuiteRow], &Settings),
    columns: &[Column],
) -> Option<String> {
    let SuiteRatio { over, under, len, metric, key, published, .. } = ratio;
    if !published.is_finite() {
        return Some(format!("the published ratio {published} is no finite number"));
    }
    for label in [over, under] {
        let mut own = rows.iter().filter(|row| row.printed_as() == label).peekable();
        if own.peek().is_none() {
            return Some(unknown("row of a ratio", label, rows.iter().map(SuiteRow::printed_as)));
        }
        let mut lens = own.filter_map(|row| row.set.len.as_ref().or(base.len.as_ref())).peekable();
        if lens.peek().is_some() && !lens.any(|lens| lens.0.contains(len)) {
            return Some(format!("{label} does not have the length {len} of the ratio"));
        }
    }
    let fits = |column: &Column| column.metrics.first() == Some(metric) && column.key == *key;
    (!columns.iter().any(fits)).then(|| {
        format!("no column has {metric} of {key} first, which the ratio of {over} to {under} is of; give it in [[columns]]")
    })
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

/// The line that `error` is at in `text`, and what is wrong there, on one line.
pub fn toml_problem(text: &str, error: &toml::de::Error) -> (usize, String) {
    (line_of(text, error.span().map_or(0, |span| span.start)), one_line(error.message()))
}

/// toml's message on one line, with the nearest key where a key is unknown.
fn one_line(message: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(key) = message.strip_prefix("missing field ") {
        return format!("the key {key} is missing; give it");
    }
    let Some(rest) = message.strip_prefix("unknown field ") else {
        return message
            .replace("expected a sequence", "expected a list")
            .replace("expected a map", "expected a table");
    };
    let mut words = rest.split('`').skip(1).step_by(2);
    let Some(key) = words.next() else { return message };
    let keys: Vec<&str> = words.collect();
    let hint = nearest(key, keys.iter().copied());
    let hint = hint.map_or_else(String::new, |near| format!(" (did you mean {near}?)"));
    format!("unknown key {key:?}{hint}; allowed: {}", keys.join(", "))
}

fn single(text: &str) -> Result<MechanismSpec, String> {
    let Models(mut list) = text.parse().map_err(|error: ParseError| error.0)?;
    match (list.pop(), list.is_empty()) {
        (Some(variant), true) if !variant.is_pattern() => Ok(variant),
        _ => Err(format!("a row takes one mechanism, not {text:?}; write one [[row]] each")),
    }
}

/// A knob's TOML value as on the command line.
fn knob_text(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(items) => items.iter().map(knob_text).collect::<Vec<_>>().join("+"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::suite::BUILTIN_SUITES;
    use crate::{Outcome, Published};

    const HEAD: &str = "title = \"t\"\nprotocol = \"speed\"\nsource = \"s\"\n[base]\nlen = [1024, 2048]\n";

    fn error(tail: &str) -> String {
        Suite::parse("x.toml", &format!("{HEAD}{tail}")).unwrap_err().to_string()
    }

    #[test]
    fn every_shipped_suite_is_read() {
        for (name, _) in BUILTIN_SUITES {
            let suite = Suite::load(name).unwrap();
            assert_eq!(suite.name, *name);
        }
    }

    #[test]
    fn knobs_come_from_the_name_or_a_table() {
        let row =
            "[[row]]\nlabel = \"a\"\nmodel = \"ls:w=16\"\nknobs = { r = 2, global = [0, 3], m = \"auto\" }";
        let suite = Suite::parse("dir/x.toml", &format!("{HEAD}{row}")).unwrap();
        let mut text = suite.rows[0].model.to_string();
        text.retain(|c| c != ' ');
        assert_eq!(suite.name, "x");
        assert!(text.starts_with("ls:w=16,") && text.contains("r=2") && text.contains("global=0+3"));
    }

    #[test]
    fn published_values_go_along_the_lengths() {
        let row =
            "[[row]]\nlabel = \"a\"\nmodel = \"ls\"\npublished = { metric = \"m\", infer = [1.5, \"oom\"] }";
        let suite = Suite::parse("x.toml", &format!("{HEAD}{row}")).unwrap();
        let table = suite.rows[0].table("m").unwrap();
        assert_eq!(table.at("infer", 0), Some(Published::Value(1.5)));
        assert_eq!(table.at("infer", 1), Some(Published::Outcome(Outcome::Oom)));
        assert_eq!((table.at("train", 0), &table.source), (None, &None));
        let read = row.replace("\"m\",", "\"m\", source = \"another paper\",");
        let suite = Suite::parse("x.toml", &format!("{HEAD}{read}")).unwrap();
        let table = suite.rows[0].table("m").unwrap();
        assert_eq!(table.source.as_deref(), Some("another paper"));
        assert_eq!(table.values.keys().collect::<Vec<_>>(), ["infer"], "a source is no number");
    }

    #[test]
    fn mistakes_in_published_numbers_are_told_with_their_line() {
        let row = "[[row]]\nlabel = \"a\"\nmodel = \"ls\"\n";
        let told = |table: &str| error(&format!("{row}published = {{ metric = \"m\", {table} }}"));
        let starts = |table: &str, says: &str| {
            let told = told(table);
            assert!(told.starts_with(&format!("suite x.toml:9: a: {says}")), "{table}: {told}");
        };
        starts(
            "trian = [5, 6]",
            "unknown key of published numbers \"trian\" (did you mean train?); known: infer",
        );
        starts("\"infer-999\" = 7", "unknown key of published numbers \"infer-999\"");
        for few in ["5", "[1]"] {
            starts(&format!("infer = {few}"), "infer has 1 published value for 2 lengths; give one for each");
        }
        starts("infer = [1, nan]", "infer has the published value NaN, which is no finite number");
        starts("infer = [-inf, 1]", "infer has the published value -inf");
        let several = format!(
            "{row}published = [\n{{ metric = \"m\", infer = [1, 2] }},\n{{ metric = \"n\", trian = [1, 2] }}]"
        );
        assert!(error(&several).starts_with("suite x.toml:11: a: unknown key"), "{}", error(&several));
        let first = format!("{row}set = {{ len = 1024 }}\npublished = {{ metric = \"m\", infer = 5 }}");
        assert!(Suite::parse("x.toml", &format!("{HEAD}{first}")).is_ok(), "the first length only");
        let other = first.replace("1024", "2048");
        assert!(error(&other).contains("1 published value for 2 lengths"), "{}", error(&other));
        let twice = error(&format!("{row}{row}"));
        assert!(twice.starts_with("suite x.toml:11: the label \"a\" is that of line 8 too"), "{twice}");
        let trained =
            format!("{HEAD}{row}published = {{ metric = \"m\", listops = 5 }}").replace("speed", "lra");
        assert!(Suite::parse("x.toml", &trained).is_ok(), "a task");
    }

    #[test]
    fn words_of_the_reader_are_plain() {
        let told = error("");
        assert!(told.contains("the key `row` is missing"), "{told}");
        let told = error("[row]\nlabel = \"a\"");
        assert!(told.contains("expected a list") && !told.contains('\n'), "{told}");
    }

    #[test]
    fn a_file_has_the_name_of_a_shipped_suite_only_with_its_text() {
        let folder = tempfile::tempdir().unwrap();
        let (name, text) = BUILTIN_SUITES[0];
        let path = folder.path().join(format!("{name}.toml"));
        let file = path.display().to_string();
        std::fs::write(&path, text).unwrap();
        assert_eq!(Suite::load(&file).unwrap().name, name, "a copy");
        std::fs::write(&path, format!("{text}\n# mine\n")).unwrap();
        let error = Suite::load(&file).unwrap_err().to_string();
        let says =
            format!("suite {file}: {name} is a suite of effattn's own, and this text is another; rename");
        assert!(error.starts_with(&says), "{error}");
        let renamed = folder.path().join("mine.toml");
        std::fs::rename(&path, &renamed).unwrap();
        assert_eq!(Suite::load(&renamed.display().to_string()).unwrap().name, "mine");
    }

    #[test]
    fn a_ratio_is_of_two_rows_in_a_column_of_the_table() {
        let head = HEAD.replace("[base]", "by_len = true\n[base]");
        let rows = ["a", "b"].map(|label| format!("[[row]]\nlabel = \"{label}\"\nmodel = \"ls\"\n")).concat();
        let rows = format!("{rows}set = {{ len = [64, 2048] }}\n");
        let column = "[[columns]]\ntitle = \"t\"\nmetrics = [\"m\"]\nkey = \"infer\"\n";
        let ratio = |over: &str, metric: &str, len: u64| {
            let text = format!(
                "{head}{rows}{column}[[ratio]]\nover = \"{over}\"\nunder = \"b\"\nmetric = \"{metric}\"\nkey = \"infer\"\nlen = {len}\npublished = 2\n"
            );
            Suite::parse("x.toml", &text).map(|suite| suite.ratios.len()).map_err(|error| error.to_string())
        };
        assert_eq!(ratio("a", "m", 2048), Ok(1));
        let told = ratio("aa", "m", 2048).unwrap_err();
        assert!(told.starts_with("suite x.toml:18: unknown row of a ratio \"aa\""), "{told}");
        let told = ratio("a", "n", 2048).unwrap_err();
        assert!(told.starts_with("suite x.toml:18: no column has n of infer first"), "{told}");
        let told = ratio("a", "m", 64).unwrap_err();
        assert!(told.starts_with("suite x.toml:18: a does not have the length 64"), "{told}");
        let told = ratio("a", "m", 1024).unwrap_err();
        assert!(told.starts_with("suite x.toml:18: b does not have the length 1024"), "{told}");
        let told = Suite::parse("x.toml", &format!("{head}{rows}")).unwrap_err().to_string();
        assert!(told.starts_with("suite x.toml:4: by_len makes a line"), "{told}");
    }

    #[test]
    fn errors_name_file_line_and_the_nearest_key() {
        assert!(error("batc = 3").starts_with("suite x.toml:6: unknown key \"batc\" (did you mean batch?)"));
        let row = "[[row]]\nlabel = \"a\"\nmodel = ";
        assert!(error(&format!("{row}\"a,b\"")).starts_with("suite x.toml:8: a row takes one mechanism"));
        let wrong = format!("{row}\"ls\"\npublished = {{ metric = \"m\", infer = [1, 2, 3] }}");
        let says =
            "suite x.toml:9: a: infer has 3 published values for 2 lengths; give one for each length of";
        assert!(error(&wrong).starts_with(says), "{}", error(&wrong));
        assert!(error("batch = 0\n[[row]]").contains("x.toml:6: batch size 0 is out of range"));
        let zero = format!("width = 0\n{row}\"ls\"");
        assert!(error(&zero).starts_with("suite x.toml:4: [base]: width: "), "{}", error(&zero));
        let after = "analysis = \"\"\"\nbase case of the table:\n\"\"\"\nbase = { width = 0 }\n";
        let after =
            Suite::parse("x.toml", &format!("{}{after}{row}\"ls\"", &HEAD[..HEAD.find("[base]").unwrap()]));
        let after = after.unwrap_err().to_string();
        assert!(after.starts_with("suite x.toml:7: [base]: width: "), "{after}");
        let column = format!("{row}\"ls\"\n[[columns]]\ntitle = \"t\"\nmetrics = []\nkey = \"a\"");
        assert!(error(&column).contains("column \"t\" has no metrics"), "{}", error(&column));
        let twice = error(&format!("{row}\"ls:w=16\"\nknobs = {{ w = 8 }}"));
        assert!(twice.starts_with("suite x.toml:8: knob w is given twice, in model and in knobs"), "{twice}");
        assert!(Suite::load("cos-tabel5").unwrap_err().to_string().contains("did you mean cos-table5?"));
    }
}
