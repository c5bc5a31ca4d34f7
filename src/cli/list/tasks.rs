//! `effattn list tasks`: which data are there.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::List;
use crate::cli::data_dir;
use crate::data::{image, listops, retrieval, store, text};
use crate::report::table::Table;

/// A task or corpus, its files, and how the rest is got.
struct Known {
    name: &'static str,
    command: &'static str,
    files: &'static [&'static str],
    records: &'static str,
    next: &'static str,
    /// Whether it is generated where nothing is found.
    made: bool,
}

const KNOWN: &[Known] = &[
    Known {
        name: "listops",
        command: "lra",
        files: listops::NAMES,
        records: "96,000 / 2,000 / 2,000 expressions",
        next: "effattn fetch listops",
        made: true,
    },
    Known {
        name: "text",
        command: "lra, speed, memory",
        files: text::NAMES,
        records: "25,000 / 25,000 reviews",
        next: "effattn fetch imdb",
        made: false,
    },
    Known {
        name: "retrieval",
        command: "lra",
        files: retrieval::NAMES,
        records: "147,086 / 18,090 / 17,437 pairs",
        next: "effattn fetch aan",
        made: false,
    },
    Known {
        name: "image",
        command: "lra",
        files: image::NAMES,
        records: "45,000 / 5,000 / 10,000 images",
        next: "effattn fetch cifar10",
        made: false,
    },
    Known {
        name: "pathfinder32",
        command: "lra",
        files: &["pathfinder32"],
        records: "160,000 / 20,000 / 20,000 images",
        next: "effattn fetch pathfinder",
        made: true,
    },
    Known {
        name: "pathfinder64",
        command: "lra",
        files: &["pathfinder64"],
        records: "160,000 / 20,000 / 20,000 images",
        next: "effattn fetch pathfinder",
        made: true,
    },
    Known {
        name: "pathfinder128",
        command: "lra",
        files: &["pathfinder128"],
        records: "160,000 / 20,000 / 20,000 images",
        next: "effattn fetch pathfinder",
        made: true,
    },
    Known {
        name: "enwik8",
        command: "charlm",
        files: crate::data::corpus::ENWIK8.files,
        records: "100,000,000 bytes",
        next: "effattn fetch enwik8",
        made: false,
    },
    Known {
        name: "text8",
        command: "charlm",
        files: crate::data::corpus::TEXT8.files,
        records: "100,000,000 bytes",
        next: "effattn fetch text8",
        made: false,
    },
];

/// The tasks and corpora with what is in `dir`.
#[derive(Clone, Debug, clap::Args)]
pub struct Tasks {
    /// Folder of data sets; the user's cache folder without
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    pub format: super::Format,
}

impl Tasks {
    /// The list.
    pub(super) fn list(&self) -> List {
        let dir = self.data_dir.clone().unwrap_or_else(data_dir::default_dir);
        let mut list = List { table: Table::default(), json: Vec::new() };
        list.table.columns =
            ["task", "command", "there", "whole set", "to get it"].map(str::to_owned).to_vec();
        for known in KNOWN {
            let folders = ["lra, speed, memory", "lra"].contains(&known.command);
            let found =
                if folders { store::find(&dir, known.files) } else { store::find_file(&dir, known.files) };
            let there = there(found.as_deref(), known.made);
            let next = if found.is_some() { "" } else { known.next };
            let cells = [known.name, known.command, &there, known.records, next];
            list.table.rows.push(cells.map(str::to_owned).to_vec());
            list.json.push(json!({
                "name": known.name,
                "command": known.command,
                "path": found,
                "bytes": found.as_deref().and_then(|path| path.metadata().ok()).map(|meta| meta.len()),
                "generated": known.made,
                "records": known.records,
                "next": known.next,
            }));
        }
        list.table.title = format!("Tasks and corpora; data in {}", dir.display());
        list.table.notes = vec![
            "Generated ones need nothing. Incomplete data run under --allow-partial; rows say so.".to_owned(),
        ];
        list
    }
}

fn there(found: Option<&Path>, made: bool) -> String {
    match found {
        Some(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        None if made => "generated".to_owned(),
        None => "no".to_owned(),
    }
}
