//! `effattn list tasks`: which data are there.

use std::path::PathBuf;

use serde_json::json;

use super::List;
use crate::protocol::protocols;
use effattn_data::data_dir;
use effattn_data::{DataSetEntry, Origin, data_sets};
use effattn_record::report::table::Table;

/// The tasks and corpora with what is in `dir`.
#[derive(Clone, Debug, clap::Args)]
pub struct Tasks {
    /// Folder with data sets [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR")]
    pub(super) data_dir: Option<PathBuf>,
    #[command(flatten)]
    pub format: super::Format,
}

impl Tasks {
    pub(super) fn list(&self) -> List {
        let dir = self.data_dir.clone().unwrap_or_else(data_dir::default_dir);
        let mut list = List { table: Table::default(), json: Vec::new() };
        list.table.title = format!("Tasks and corpora; data in {}", dir.display());
        list.table.columns =
            ["task", "command", "found", "full set", "how to get it"].map(str::to_owned).to_vec();
        list.table.notes = vec![
            "found: the file or folder that would be read; whether it is the full set is known when it is read. Generated \
             sets need no files. Incomplete data need --allow-partial, and their rows are marked."
                .to_owned(),
        ];
        for set in data_sets() {
            let (path, problem) = match (set.locate)(&dir) {
                Ok(path) => (path, None),
                Err(error) => (None, Some(error.to_string())),
            };
            let name = path.as_ref().map(|path| path.file_name().unwrap_or_default().to_string_lossy());
            let there = match (&name, &problem) {
                (Some(name), _) => name,
                (None, Some(_)) => "incomplete",
                (None, None) => without_files(set),
            };
            let next = if path.is_some() { None } else { set.command() };
            let next = next.unwrap_or_default();
            let commands = commands(set.name);
            let cells = [set.name, &commands, there, set.records, &next];
            list.table.rows.push(cells.map(str::to_owned).to_vec());
            list.json.push(json!({
                "name": set.name,
                "about": set.about,
                "kind": set.kind.name(),
                "command": commands,
                "path": path,
                "bytes": path.as_deref().and_then(|path| path.metadata().ok()).map(|meta| meta.len()),
                "generated": matches!(set.origin, Origin::Generated { .. }),
                "records": set.records,
                "problem": problem,
                "next": next,
            }));
            list.table.notes.extend(problem);
        }
        list
    }
}

/// The commands that read the data set called `name`.
fn commands(name: &str) -> String {
    let reading = protocols().into_iter().filter(|protocol| protocol.info().reads(name));
    reading.map(|protocol| protocol.name()).collect::<Vec<_>>().join(", ")
}

/// What there is of a set that has no files.
fn without_files(set: &DataSetEntry) -> &'static str {
    match set.origin {
        Origin::Generated { .. } => "generated",
        Origin::BuiltIn => "built in",
        Origin::Download(_) | Origin::UserProvided(_) => "no",
    }
}
