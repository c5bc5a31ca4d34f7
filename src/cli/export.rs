//! `--export-json|-csv|-markdown FILE|-`: opened before anything is measured, written at the end.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::term;
use effattn_record::report::markdown;
use effattn_record::report::table::Table;
use effattn_record::{Row, csv, file, json};

/// Where rows go besides the run folder.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Exports {
    /// Write the results as JSON, with the manifest of a run; - is stdout
    #[arg(long, value_name = "FILE|-", help_heading = "Output")]
    export_json: Option<PathBuf>,
    /// Write the results as CSV; - is stdout
    #[arg(long, value_name = "FILE|-", help_heading = "Output")]
    export_csv: Option<PathBuf>,
    /// Write the tables as Markdown; - is stdout
    #[arg(long, value_name = "FILE|-", help_heading = "Output")]
    export_markdown: Option<PathBuf>,
}

impl Exports {
    fn all(&self) -> [(&'static str, Option<&PathBuf>); 3] {
        [
            ("--export-json", self.export_json.as_ref()),
            ("--export-csv", self.export_csv.as_ref()),
            ("--export-markdown", self.export_markdown.as_ref()),
        ]
    }

    /// Whether stdout is taken by an export.
    pub fn to_stdout(&self) -> bool {
        self.all().iter().any(|(_, path)| path.is_some_and(|path| is_stdout(path)))
    }

    /// # Errors
    /// A folder that cannot be written, two exports to one place, or one to a file that is `read`.
    pub fn check(&self, read: &[PathBuf]) -> Result<()> {
        let given = self.all().into_iter().filter_map(|(flag, path)| Some((flag, path?)));
        let mut stdout = None;
        let mut files: Vec<(&str, PathBuf)> = Vec::new();
        for (flag, path) in given {
            if is_stdout(path) {
                if let Some(other) = stdout.replace(flag) {
                    bail!("{other} - and {flag} - would both write to stdout; give one of them a file");
                }
                continue;
            }
            if path.is_dir() {
                bail!("{flag} {} is a folder; give a file", path.display());
            }
            if path.exists() && !path.is_file() {
                continue; // a device or a FIFO is written through
            }
            let folder = folder_of(path);
            if !folder.is_dir() {
                bail!("{flag} {}: there is no folder {}; make it first", path.display(), folder.display());
            }
            file::ensure_writable(folder)
                .with_context(|| format!("{flag} {}: the folder cannot be written", path.display()))?;
            let file = whole(path);
            if read.iter().any(|read| read.canonicalize().is_ok_and(|read| read == file)) {
                bail!("{flag} {} is a file that the command reads; give another name", path.display());
            }
            if let Some((other, _)) = files.iter().find(|(_, known)| *known == file) {
                bail!("{other} and {flag} would both write {}; give one another name", path.display());
            }
            files.push((flag, file));
        }
        Ok(())
    }

    /// Writes what was asked for.
    pub fn write(&self, manifest: &serde_json::Value, rows: &[Row], tables: &[Table]) -> Result<()> {
        let export = || json::Export { manifest: manifest.clone(), rows: rows.to_vec() };
        self.write_texts(|| Ok(json::to_string(&export())?), || Ok(csv::to_string(rows)?), tables)
    }

    /// Writes what was asked for of results that are no rows of a run.
    pub fn write_texts(
        &self,
        json: impl FnOnce() -> Result<String>,
        csv: impl FnOnce() -> Result<String>,
        tables: &[Table],
    ) -> Result<()> {
        if let Some(path) = &self.export_json {
            put(path, &json()?)?;
        }
        if let Some(path) = &self.export_csv {
            put(path, &csv()?)?;
        }
        if let Some(path) = &self.export_markdown {
            let text: Vec<String> = tables.iter().map(markdown::table).collect();
            put(path, &text.join("\n"))?;
        }
        Ok(())
    }
}

fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The folder that `path` is in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The one spelling of `path`, also where there is no such file yet.
fn whole(path: &Path) -> PathBuf {
    let new = |folder: PathBuf| folder.join(path.file_name().unwrap_or_default());
    let found = path.canonicalize().or_else(|_| folder_of(path).canonicalize().map(new));
    found.unwrap_or_else(|_| path.to_owned())
}

fn put(path: &Path, text: &str) -> Result<()> {
    if is_stdout(path) {
        return Ok(term::data(text)?);
    }
    file::write_user_file(path, text.as_bytes())
        .with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_export_replaces_what_is_read_or_another_export() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("train.csv"), "text,label\n").unwrap();
        std::fs::create_dir(at("x")).unwrap();
        let told = |csv: &str, json: &str| {
            let (export_csv, export_json) = (Some(at(csv)), Some(at(json)));
            let exports = Exports { export_csv, export_json, export_markdown: None };
            exports.check(&[at("train.csv")]).err().map_or_else(String::new, |error| error.to_string())
        };
        for spelling in ["train.csv", "x/../train.csv"] {
            let refusal = told(spelling, "a.json");
            assert!(refusal.starts_with("--export-csv "), "{refusal}");
            assert!(refusal.ends_with("train.csv is a file that the command reads; give another name"));
        }
        let refusal = told("x/../new", "new");
        assert!(refusal.starts_with("--export-json and --export-csv would both write "), "{refusal}");
        assert_eq!(told("x/train.csv", "a.json"), "");
        assert_eq!(std::fs::read_to_string(at("train.csv")).unwrap(), "text,label\n");
    }
}
