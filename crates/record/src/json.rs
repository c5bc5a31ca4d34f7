//! Rows as JSON: `{"manifest": {...}, "rows": [...]}`. Every row has every column; absent is null.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ReadError, Row};

/// What `--export-json` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Export {
    /// Where the rows come from: argv, machine, versions, hashes.
    pub manifest: Value,
    /// The rows.
    pub rows: Vec<Row>,
}

/// The export as text, ending in a line feed.
pub fn to_string(export: &Export) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(export).map(|text| text + "\n")
}

/// Reads what [`to_string`] wrote.
pub fn from_str(text: &str) -> Result<Export, ReadError> {
    Ok(serde_json::from_str(text)?)
}

#[cfg(test)]
mod tests {
    use super::super::{Outcome, Published};
    use super::*;

    #[test]
    fn absent_is_null_and_numbers_are_numbers() {
        let mut row = Row::new("speed", "ls").with("steps_per_second", "1/s", Some(2.0));
        row.published = Some(Published::Outcome(Outcome::Oom));
        let export = Export { manifest: Value::Null, rows: vec![row] };
        let text = to_string(&export).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let row = &json["rows"][0];
        assert!(row["value"].is_number() && row["std"].is_null() && row["published"] == "oom");
        assert_eq!(row.as_object().unwrap().len(), super::super::COLUMNS.len());
        assert_eq!(from_str(&text).unwrap(), export);
    }
}
