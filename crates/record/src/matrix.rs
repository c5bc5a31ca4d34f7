//! Attention matrices as files: what `plot pattern` and `plot attention` draw.
//!
//! A folder of them has `matrices.json`, which names the files in order, and one CSV per matrix: a row per
//! query, the columns `query`, `k0`, `k1`, ... for keys and `s0`, ... for slots.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file;

/// Weights or visibility of every pair of query and key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    /// Mechanism and settings.
    pub label: String,
    /// What a reader should know about it; may be empty.
    pub note: String,
    /// Layer and head, from 1, where it is one of a model.
    pub head: Option<(usize, usize)>,
    /// What stands at each position; empty where the input is no text.
    pub tokens: Vec<String>,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys.
    pub keys: usize,
    /// Number of slots, whose columns follow the keys'.
    pub slots: usize,
    /// Row-major values, `queries` x (`keys` + `slots`).
    pub values: Vec<f32>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Item {
    file: String,
    label: String,
    note: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    head: Option<(usize, usize)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tokens: Vec<String>,
}

/// The file that names the others.
pub const INDEX: &str = "matrices.json";

impl Matrix {
    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.keys + self.slots
    }

    /// The values of query `query`.
    pub fn row(&self, query: usize) -> &[f32] {
        &self.values[query * self.columns()..(query + 1) * self.columns()]
    }

    fn to_csv(&self) -> String {
        let mut text = "query".to_owned();
        (0..self.keys).for_each(|key| text.push_str(&format!(",k{key}")));
        (0..self.slots).for_each(|slot| text.push_str(&format!(",s{slot}")));
        text.push('\n');
        for query in 0..self.queries {
            text.push_str(&query.to_string());
            self.row(query).iter().for_each(|value| text.push_str(&format!(",{value}")));
            text.push('\n');
        }
        text
    }

    fn from_csv(text: &str, item: Item) -> Result<Self, String> {
        let mut reader = ::csv::Reader::from_reader(text.as_bytes());
        let header = reader.headers().map_err(|error| error.to_string())?.clone();
        let count = |letter: char| header.iter().skip(1).filter(|name| name.starts_with(letter)).count();
        let (keys, slots) = (count('k'), count('s'));
        if header.get(0) != Some("query") || 1 + keys + slots != header.len() {
            return Err("its first line is not query,k0,...,s0,...".to_owned());
        }
        let mut values = Vec::new();
        let mut queries = 0;
        for record in reader.records() {
            let record = record.map_err(|error| error.to_string())?;
            for field in record.iter().skip(1) {
                let value: f32 = field.parse().map_err(|_| format!("{field:?} is not a number"))?;
                values.push(value);
            }
            queries += 1;
        }
        let Item { label, note, head, tokens, .. } = item;
        Ok(Self { label, note, head, tokens, queries, keys, slots, values })
    }
}

/// Writes `matrices` into `folder`.
pub fn write(folder: &Path, matrices: &[Matrix]) -> io::Result<()> {
    let mut items = Vec::new();
    for (index, matrix) in matrices.iter().enumerate() {
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let label: String = matrix.label.chars().map(plain).take(60).collect();
        let file = format!("{:02}-{label}.csv", index + 1);
        file::write(&folder.join(&file), matrix.to_csv().as_bytes())?;
        let Matrix { label, note, head, tokens, .. } = matrix.clone();
        items.push(Item { file, label, note, head, tokens });
    }
    let index = serde_json::to_string_pretty(&items).map_err(io::Error::other)?;
    file::write(&folder.join(INDEX), index.as_bytes())
}

/// Reads what [`write()`] wrote.
pub fn read(folder: &Path) -> io::Result<Vec<Matrix>> {
    let text = |name: &str| {
        let path = folder.join(name);
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        file::read_to_string(&path).map_err(named)
    };
    let wrong =
        |name: &str, reason: String| io::Error::other(format!("{}: {reason}", folder.join(name).display()));
    let items: Vec<Item> =
        serde_json::from_str(&text(INDEX)?).map_err(|error| wrong(INDEX, error.to_string()))?;
    items
        .into_iter()
        .map(|item| {
            let file = item.file.clone();
            if Path::new(&file).components().count() != 1 || file.starts_with('.') {
                return Err(wrong(INDEX, format!("{file:?} is not a file of this folder")));
            }
            Matrix::from_csv(&text(&file)?, item).map_err(|reason| wrong(&file, reason))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix() -> Matrix {
        Matrix {
            label: "ls:w=2,r=1".into(),
            note: "1 slot".into(),
            head: Some((1, 2)),
            tokens: vec!["a,\"".into(), "\n".into()],
            queries: 2,
            keys: 2,
            slots: 1,
            values: vec![0.5, 0.0, 1.0, -1e-9, 0.25, 0.125],
        }
    }

    #[test]
    fn matrices_survive_the_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let none = Matrix { queries: 0, keys: 0, slots: 0, values: vec![], ..matrix() };
        write(folder.path(), &[matrix(), none.clone()]).unwrap();
        assert_eq!(read(folder.path()).unwrap(), [matrix(), none]);
        assert!(folder.path().join("01-ls-w-2-r-1.csv").exists());
    }

    #[test]
    fn foreign_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("matrices.json"));
        write(folder.path(), &[matrix()]).unwrap();
        let file = folder.path().join("01-ls-w-2-r-1.csv");
        for (text, says) in [
            ("a,b\n1,2\n", "first line"),
            ("query,k0\n0,x\n", "not a number"),
            ("query,k0\n0,1,2\n", "01-ls-w-2-r-1.csv"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let index = folder.path().join("matrices.json");
        std::fs::write(&index, r#"[{"file": "../x.csv", "label": "", "note": ""}]"#).unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("not a file of this folder"));
    }
}
