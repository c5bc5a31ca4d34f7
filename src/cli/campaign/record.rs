//! `campaign.json`: which parts of a campaign are done, and how the others ended.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::description::Campaign;
use crate::run::manifest::{SCHEMA, now};
use crate::run::plan::sha256;
use crate::run::{RunError, read_text};
use effattn_kernel::device::machine::{self, Machine};
use effattn_record::file;

/// The file's name.
pub const FILE: &str = "campaign.json";

/// How far a part is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartState {
    /// It was not begun.
    #[default]
    Waiting,
    /// It was begun, and nobody has said how it ended: the campaign was killed.
    Running,
    /// It is complete.
    Done,
    /// It is complete, and something in it failed or is red (exit code 1).
    Failed,
    /// It could not be run: its words, its device, its data (exit code 2), or it died.
    Refused,
    /// Its minutes were over.
    Timeout,
    /// The campaign was stopped.
    Stopped,
}

impl PartState {
    /// Whether the part is kept when the campaign is run again.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }

    /// As in the file and in tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Stopped => "stopped",
        }
    }
}

/// What was done of a part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartRecord {
    pub name: String,
    /// The words of its command, without the program.
    pub argv: Vec<String>,
    /// How far it is.
    pub state: PartState,
    /// Exit code of the last start, where it ended by itself.
    #[serde(default)]
    pub exit: Option<i32>,
    /// Seconds that it took, all starts together.
    #[serde(default)]
    pub seconds: f64,
    /// When it was started (UTC).
    #[serde(default)]
    pub starts: Vec<String>,
    /// Why it is not done, or what it said last.
    #[serde(default)]
    pub said: Option<String>,
    /// The build of the last start.
    #[serde(default)]
    pub build: String,
}

/// `campaign.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this file's form.
    pub schema: u64,
    /// Name of the campaign.
    pub campaign: String,
    /// SHA-256 of its text.
    pub text_sha256: String,
    /// Device of the parts.
    pub device: String,
    /// Whether it is the short form.
    pub quick: bool,
    /// Version of effattn.
    pub version: String,
    /// Commit it was built from.
    pub commit: Option<String>,
    /// Host name.
    pub host: String,
    /// Processor, memory, system.
    pub machine: serde_json::Value,
    /// When it was started first (UTC).
    pub start: String,
    /// When the last start ended (UTC).
    #[serde(default)]
    pub end: Option<String>,
    /// The parts in the order of the campaign.
    pub parts: Vec<PartRecord>,
}

impl Record {
    /// The record of `campaign` before its first part.
    pub fn new(campaign: &Campaign, quick: bool) -> Self {
        let waiting = |name: &String| PartRecord { name: name.clone(), ..PartRecord::default() };
        Self {
            schema: SCHEMA,
            campaign: campaign.name.clone(),
            text_sha256: sha256(&campaign.text),
            device: campaign.device.to_string(),
            quick,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: option_env!("EFFATTN_COMMIT").map(str::to_owned),
            host: machine::host(),
            machine: serde_json::to_value(Machine::this()).unwrap_or_default(),
            start: now(),
            end: None,
            parts: campaign.parts.iter().map(|part| waiting(&part.name)).collect(),
        }
    }

    /// What differs between this campaign and that of `other`, in words; none: one continues the other.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let short = |quick: bool| if quick { "with --quick" } else { "without --quick" };
        if self.campaign != other.campaign {
            return Some(format!("campaign {}", self.campaign));
        }
        if self.device != other.device {
            return Some(format!("device {}", self.device));
        }
        if self.quick != other.quick {
            return Some(format!("a campaign {}", short(self.quick)));
        }
        (self.text_sha256 != other.text_sha256).then(|| "other parts under the same name".to_owned())
    }

    /// The record of the part called `name`.
    pub fn part(&mut self, name: &str) -> Option<&mut PartRecord> {
        self.parts.iter_mut().find(|part| part.name == name)
    }

    /// Reads the record in `folder`; none if there is none.
    pub fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let path = path(folder);
        let Some(text) = read_text(&path)? else { return Ok(None) };
        match serde_json::from_str::<Self>(&text) {
            Ok(record) if record.schema > SCHEMA => {
                Err(RunError::Newer { path, found: record.schema, known: SCHEMA })
            }
            Ok(record) => Ok(Some(record)),
            Err(error) => Err(RunError::Damaged { path, reason: error.to_string() }),
        }
    }

    /// Writes it into `folder`.
    pub fn write(&self, folder: &Path) -> Result<(), RunError> {
        let path = path(folder);
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        file::write(&path, text.as_bytes()).map_err(RunError::file(path))
    }
}

fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}
