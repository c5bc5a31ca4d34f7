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
    /// A folder that cannot be written, or two exports on stdout.
    pub fn check(&self) -> Result<()> {
        let given = self.all().into_iter().filter_map(|(flag, path)| Some((flag, path?)));
        let mut stdout = None;
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
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            if !folder.is_dir() {
                bail!("{flag} {}: there is no folder {}; make it first", path.display(), folder.display());
            }
            file::ensure_writable(folder)
                .with_context(|| format!("{flag} {}: the folder cannot be written", path.display()))?;
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

fn put(path: &Path, text: &str) -> Result<()> {
    if is_stdout(path) {
        return Ok(term::data(text)?);
    }
    file::write_user_file(path, text.as_bytes())
        .with_context(|| format!("{} cannot be written", path.display()))
}
