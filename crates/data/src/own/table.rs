//! Tables of texts with labels: comma-separated (RFC 4180), tab-separated, or one JSON object a line.

use std::path::Path;

use serde_json::Value as Json;

use crate::{DataError, store};

/// Most bytes of one file.
pub(super) const LARGEST: u64 = 1 << 30;
/// The columns that a table has.
pub(super) const COLUMNS: &str = "text,label or text1,text2,label";

/// One line of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableRow {
    /// Line of the file, from 1.
    pub line: usize,
    /// The text, or the first of two.
    pub first: String,
    /// The second of two.
    pub second: Option<String>,
    /// Name of the class.
    pub label: String,
}

/// What a file is, by the end of its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Separated(u8),
    JsonLines,
}

impl Form {
    fn of(file: &Path) -> Result<Self, DataError> {
        let name = file.to_string_lossy().to_lowercase();
        let name = name.strip_suffix(".gz").unwrap_or(&name);
        match name.rsplit('.').next() {
            Some("csv") => Ok(Self::Separated(b',')),
            Some("tsv") => Ok(Self::Separated(b'\t')),
            Some("jsonl" | "ndjson") => Ok(Self::JsonLines),
            _ => Err(store::bad_file(
                file,
                format!("the name ends in none of .csv, .tsv and .jsonl; tables have the columns {COLUMNS}"),
            )),
        }
    }
}

/// The content of `file` as text.
pub(super) fn text(file: &Path) -> Result<String, DataError> {
    let bytes = store::read_limited(store::open(file)?, LARGEST)
        .map_err(|error| store::bad_file(file, format!("cannot be read ({error})")))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        wrong(file, line, "is not UTF-8; convert the file".to_owned())
    })?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

fn wrong(file: &Path, line: usize, reason: String) -> DataError {
    DataError::Line { file: file.to_owned(), line, reason }
}

/// The rows of `file`: all have one text, or all have two, and no text and no label is empty.
pub(super) fn read(file: &Path) -> Result<Vec<TableRow>, DataError> {
    let form = Form::of(file)?;
    let text = text(file)?;
    let rows = match form {
        Form::Separated(separator) => separated(&text, separator),
        Form::JsonLines => json_lines(&text),
    };
    let rows = rows.map_err(|(line, reason)| wrong(file, line, reason))?;
    if rows.is_empty() {
        return Err(store::bad_file(file, format!("has no rows; expected {COLUMNS}")));
    }
    for row in &rows {
        let empty = |text: &str| text.trim().is_empty();
        if empty(&row.first) || row.second.as_deref().is_some_and(empty) {
            return Err(wrong(file, row.line, "the text is empty; fill it or delete the row".to_owned()));
        }
        if empty(&row.label) {
            return Err(wrong(file, row.line, "the label is empty; fill it or delete the row".to_owned()));
        }
    }
    Ok(rows)
}

/// A line, and what is wrong in it.
type LineError = (usize, String);

type Rows = Result<Vec<TableRow>, LineError>;

/// Rows below a line with the names of columns. Fields of comma-separated tables may be quoted; those of tab-separated ones
/// stand as they are.
fn separated(text: &str, separator: u8) -> Rows {
    let mut at: Option<(usize, [Option<usize>; 2], usize)> = None;
    let mut rows = Vec::new();
    let mut reader = Fields { bytes: text.as_bytes(), at: 0, line: 1, separator };
    while let Some((line, mut fields)) = reader.next_row()? {
        let Some((count, [first, second], label)) = at else {
            at = Some((fields.len(), text_columns(&fields, line)?, column(&fields, "label", line)?));
            continue;
        };
        if fields.len() != count {
            return Err((
                line,
                format!("has {} fields, expected {count} as in the first line", fields.len()),
            ));
        }
        let mut take = |at: usize| std::mem::take(&mut fields[at]);
        let first = take(first.unwrap_or_default());
        rows.push(TableRow {
            line,
            first,
            second: second.map(&mut take),
            label: take(label).trim().to_owned(),
        });
    }
    Ok(rows)
}

/// Where the text, or where both texts stand.
fn text_columns(names: &[String], line: usize) -> Result<[Option<usize>; 2], LineError> {
    let has = |wanted: &str| names.iter().any(|name| name.trim() == wanted);
    if has("text") || !(has("text1") || has("text2")) {
        return Ok([Some(column(names, "text", line)?), None]);
    }
    Ok([Some(column(names, "text1", line)?), Some(column(names, "text2", line)?)])
}

fn column(names: &[String], wanted: &str, line: usize) -> Result<usize, LineError> {
    let mut called = (0..names.len()).filter(|&at| names[at].trim() == wanted);
    let (first, second) = (called.next(), called.next());
    if second.is_some() {
        return Err((line, format!("two columns are called {wanted}; rename or delete one of them")));
    }
    first.ok_or_else(|| {
        let names: Vec<String> = names.iter().take(8).map(|name| name.chars().take(24).collect()).collect();
        let there = names.join(", ");
        (line, format!("has no column {wanted:?} (it has {there}); the first line names {COLUMNS}"))
    })
}

/// Reads the fields of a table row by row.
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
    line: usize,
    separator: u8,
}

impl Fields<'_> {
    /// The next row that is not blank, with the line that it begins in.
    fn next_row(&mut self) -> Result<Option<(usize, Vec<String>)>, LineError> {
        while self.at < self.bytes.len() {
            let (line, mut fields) = (self.line, Vec::new());
            loop {
                fields.push(self.field(line)?);
                let end = self.bytes.get(self.at).copied();
                self.at += 1;
                if end != Some(self.separator) {
                    self.line += 1;
                    break;
                }
            }
            if fields.len() > 1 || !fields[0].is_empty() {
                return Ok(Some((line, fields)));
            }
        }
        Ok(None)
    }

    /// The field that begins here; what stands behind it is a separator, the end of the line, or the end of the text.
    fn field(&mut self, line: usize) -> Result<String, LineError> {
        let mut field = Vec::new();
        if self.separator == b',' && self.bytes.get(self.at) == Some(&b'"') {
            self.at += 1;
            loop {
                match (self.bytes.get(self.at), self.bytes.get(self.at + 1)) {
                    (None, _) => return Err((line, "a quoted field of this row is not closed".to_owned())),
                    (Some(b'"'), Some(b'"')) => {
                        field.push(b'"');
                        self.at += 2;
                    }
                    (Some(b'"'), _) => break self.at += 1,
                    (Some(byte), _) => {
                        self.line += usize::from(*byte == b'\n');
                        field.push(*byte);
                        self.at += 1;
                    }
                }
            }
            if self.bytes[self.at.min(self.bytes.len())..].starts_with(b"\r\n") {
                self.at += 1;
            }
            let ends = self.bytes.get(self.at).is_none_or(|byte| [self.separator, b'\n'].contains(byte));
            if !ends {
                let reason =
                    "has characters behind a closing quote; a quote inside a quoted field is doubled";
                return Err((self.line, reason.to_owned()));
            }
        } else {
            let rest = &self.bytes[self.at..];
            let ends = |byte: &u8| *byte == self.separator || *byte == b'\n';
            let len = rest.iter().position(ends).unwrap_or(rest.len());
            let own = &rest[..len];
            let last = rest.get(len) != Some(&self.separator);
            field.extend_from_slice(own.strip_suffix(b"\r").filter(|_| last).unwrap_or(own));
            self.at += len;
        }
        // separators and quotes are single bytes, so that characters stay whole
        Ok(String::from_utf8_lossy(&field).into_owned())
    }
}

/// The fields that are read: two of one name are an error here, where of [`Json`] the second one counts.
#[derive(serde::Deserialize)]
#[expect(dead_code, reason = "what is read is taken from the JSON value")]
struct JsonFields {
    text: Option<Json>,
    text1: Option<Json>,
    text2: Option<Json>,
    label: Option<Json>,
}

/// Rows of JSON objects with texts and a label; a label may be a text, a whole number or true and false.
fn json_lines(text: &str) -> Rows {
    let mut rows = Vec::new();
    let mut two: Option<bool> = None;
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let number = index + 1;
        let expected = "expected a JSON object a line, such as {\"text\": \"...\", \"label\": \"...\"}";
        let json: Json = serde_json::from_str(line)
            .map_err(|error| (number, format!("is not JSON ({error}); {expected}")))?;
        let object = json.as_object().ok_or_else(|| (number, format!("is no JSON object; {expected}")))?;
        serde_json::from_str::<JsonFields>(line)
            .map_err(|error| (number, format!("has a field twice ({error}); {expected}")))?;
        let pair = two.get_or_insert(!object.contains_key("text") && object.contains_key("text1"));
        let field = |key: &str| match object.get(key) {
            Some(Json::String(text)) => Ok(text.clone()),
            Some(value) if key == "label" && (value.is_i64() || value.is_u64() || value.is_boolean()) => {
                Ok(value.to_string())
            }
            Some(_) if key == "label" => {
                Err((number, "\"label\" is neither text nor a whole number".to_owned()))
            }
            Some(_) => Err((number, format!("{key:?} is no text; {expected}"))),
            None => Err((number, format!("has no {key:?}; {expected}"))),
        };
        let (first, second) = match *pair {
            true => (field("text1")?, Some(field("text2")?)),
            false => (field("text")?, None),
        };
        rows.push(TableRow { line: number, first, second, label: field("label")?.trim().to_owned() });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        (folder, path)
    }

    fn row(line: usize, first: &str, second: Option<&str>, label: &str) -> TableRow {
        let second = second.map(str::to_owned);
        TableRow { line, first: first.to_owned(), second, label: label.to_owned() }
    }

    #[test]
    fn quoted_fields_hold_commas_quotes_and_ends_of_lines() {
        let text = "\u{feff}label,text\r\npos,\"a, \"\"b\"\"\nc\"\r\n\nneg,\u{e9} d\r\nneg,\"e\"";
        let (_folder, path) = file("a.csv", text.as_bytes());
        let rows = read(&path).unwrap();
        assert_eq!(
            rows,
            [row(2, "a, \"b\"\nc", None, "pos"), row(5, "\u{e9} d", None, "neg"), row(6, "e", None, "neg")]
        );
        let (_folder, path) = file("a.tsv", b"text1\tlabel\tx\ttext2\n\"a\t1\t\tb\n");
        assert_eq!(read(&path).unwrap(), [row(2, "\"a", Some("b"), "1")]);
        let (_folder, path) =
            file("a.jsonl", b"{\"text\": \"a\", \"label\": 1}\n\n{\"label\": \"b\", \"text\": \"c\"}\n");
        assert_eq!(read(&path).unwrap(), [row(1, "a", None, "1"), row(3, "c", None, "b")]);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (name, content, expected) in [
            ("a.csv", &b"text,class\na,1\n"[..], "a.csv:1: has no column \"label\" (it has text, class)"),
            ("a.csv", b"body,label\na,1\n", "a.csv:1: has no column \"text\""),
            ("a.csv", b"text1,label\na,1\n", "a.csv:1: has no column \"text2\""),
            ("a.csv", b"text,label,label\na,1,2\n", "a.csv:1: two columns are called label; rename"),
            ("a.tsv", b"text\tlabel\ttext\na\t1\tb\n", "a.tsv:1: two columns are called text; rename"),
            ("a.csv", b"text,label\na,1\nb\n", "a.csv:3: has 1 fields, expected 2"),
            ("a.csv", b"text,label\na,1\n \t,1\n", "a.csv:3: the text is empty"),
            ("a.csv", b"text,label\na,\n", "a.csv:2: the label is empty"),
            ("a.csv", b"text,label\n\"a,1\nb,2\n", "a.csv:2: a quoted field of this row is not closed"),
            ("a.csv", b"text,label\n\"a\"b,1\n", "a.csv:2: has characters behind a closing quote"),
            ("a.csv", b"text,label\n", "a.csv: has no rows"),
            ("a.csv", b"text,label\na,1\nb\xff,1\n", "a.csv:3: is not UTF-8"),
            ("a.jsonl", b"{\"text\": \"a\", \"label\": 1}\n{\"text\": \n", "a.jsonl:2: is not JSON"),
            (
                "a.jsonl",
                b"{\"text\": \"a\", \"text\": \"b\", \"label\": 1}\n",
                "a.jsonl:1: has a field twice",
            ),
            ("a.jsonl", b"[1]\n", "a.jsonl:1: is no JSON object"),
            ("a.jsonl", b"{\"text\": \"a\"}\n", "a.jsonl:1: has no \"label\""),
            ("a.jsonl", b"{\"text\": 1, \"label\": 1}\n", "a.jsonl:1: \"text\" is no text"),
            ("a.jsonl", b"{\"text\": \"a\", \"label\": 1.5}\n", "a.jsonl:1: \"label\" is neither"),
            ("a.txt", b"a", "ends in none of .csv, .tsv and .jsonl"),
        ] {
            let (_folder, path) = file(name, content);
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
