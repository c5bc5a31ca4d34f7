//! Rows as CSV.

use super::row::FIRST_COLUMNS;
use super::{COLUMNS, ReadError, Row};

/// The rows as CSV with a header, also when there are none.
pub fn to_string<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Result<String, ::csv::Error> {
    let mut writer = ::csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
    writer.write_record(COLUMNS)?;
    for row in rows {
        writer.serialize(row)?;
    }
    let bytes = writer.into_inner().map_err(|error| ::csv::Error::from(error.into_error()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads what [`to_string`] wrote.
pub fn from_str(text: &str) -> Result<Vec<Row>, ReadError> {
    let mut reader = ::csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| line_error(&error))?.clone();
    check_columns(&header)?;
    let rows = reader.deserialize().map(|row| row.map_err(|error| line_error(&error)));
    rows.collect()
}

fn check_columns(header: &::csv::StringRecord) -> Result<(), ReadError> {
    let wrong = |columns: String| Err(ReadError::Columns { columns });
    let missing: Vec<&str> = COLUMNS[..FIRST_COLUMNS]
        .iter()
        .copied()
        .filter(|column| !header.iter().any(|name| name == *column))
        .collect();
    if !missing.is_empty() {
        let names = missing.join(", ");
        return wrong(format!("not rows of effattn: the columns {names} are missing from the first line"));
    }
    let unknown: Vec<&str> = header.iter().filter(|name| !COLUMNS.contains(name)).collect();
    if !unknown.is_empty() {
        let names = unknown.join(", ");
        return wrong(format!("written by a newer effattn (unknown columns {names}); update effattn"));
    }
    Ok(())
}

fn line_error(error: &::csv::Error) -> ReadError {
    let line = error.position().map_or(1, ::csv::Position::line);
    let reason = match error.kind() {
        ::csv::ErrorKind::Deserialize { err, .. } => {
            let field = err.field().and_then(|field| COLUMNS.get(field as usize));
            field.map_or_else(|| err.to_string(), |field| format!("{field}: {}", err.kind()))
        }
        _ => error.to_string(),
    };
    ReadError::Line { line, reason }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Outcome, Pass, Published};
    use super::*;

    fn rows() -> impl Strategy<Value = Row> {
        let published = prop_oneof![
            Just(None),
            any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(|x| Some(Published::Value(x))),
            Just(Some(Published::Outcome(Outcome::Oom))),
        ];
        let value = prop::option::of(any::<f64>().prop_filter("finite", |x| x.is_finite()));
        let text = prop::option::of("[ -~\n\"]{1,12}");
        (published, value, text, any::<Option<u64>>(), any::<Option<bool>>()).prop_map(
            |(published, value, error, flops, simulated)| Row {
                published,
                error,
                flops,
                simulated,
                pass: Some(Pass::Train),
                ..Row::new("speed", "ls").with("step_time", "s", value)
            },
        )
    }

    proptest! {
        #[test]
        fn rows_survive_the_round_trip(rows in prop::collection::vec(rows(), 0..4)) {
            prop_assert_eq!(from_str(&to_string(&rows).unwrap()).unwrap(), rows);
        }

        #[test]
        fn any_text_is_rows_or_an_error(text in "(?s).{0,200}") {
            let _ = from_str(&text);
        }
    }

    #[test]
    fn columns_of_a_newer_version_are_refused() {
        let text = to_string(&[]).unwrap().replace("commit", "commit,joules");
        assert!(from_str(&text).unwrap_err().to_string().contains("newer effattn (unknown columns joules)"));
    }

    #[test]
    fn a_bad_number_is_named_with_line_and_column() {
        let row = Row::new("speed", "ls").with("step_time", "s", Some(1.5));
        let text = to_string(&[row]).unwrap().replace("1.5", "fast");
        assert!(from_str(&text).unwrap_err().to_string().starts_with("line 2: value: "));
    }
}
