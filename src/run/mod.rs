//! Runs cells: worker processes, the journal that survives a kill, the run folder and its manifest.
//!
//! Only the parent writes files. What a worker computes is given as a function from above.

pub mod claim;
pub mod folder;
pub mod journal;
pub mod manifest;
pub mod merge;
pub mod outcome;
pub mod plan;
pub mod plan_file;
pub mod reuse;
pub mod session;
pub mod shard;
pub mod turn;
pub mod worker;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use effattn_record::file;

/// What the binary is built from: sources, toolchain, flags. Two builds of one commit with changes differ in it.
pub const BUILD: &str = env!("EFFATTN_BUILD");

/// Set by Ctrl-C and polled by every wait.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Relaxed);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// Why a run cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A file or folder that is to be written cannot be used.
    #[error("{} cannot be used: {source}; check the path, its permissions and the free space, or choose another folder with --output-path", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file or folder cannot be read.
    #[error("{} cannot be read: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The results were written by a newer version.
    #[error(
        "{} was written by a newer effattn (schema {found}, this one knows {known}); update effattn or use \
         another folder of results",
        path.display()
    )]
    Newer {
        /// The manifest.
        path: PathBuf,
        /// Its schema.
        found: u64,
        /// Ours.
        known: u64,
    },
    /// A manifest, plan or record that cannot be read.
    #[error("{} is damaged: {reason}; move it away, or its whole folder", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another process is at it.
    #[error("{} is in use by {holder}; wait for it, or choose another folder with --output-path", path.display())]
    Locked {
        /// The run folder.
        path: PathBuf,
        /// Who holds the lock.
        holder: String,
    },
    /// Another start of the same shard has it now.
    #[error(
        "{} was taken over by {holder}; this process stopped and has written nothing since",
        path.display()
    )]
    TakenOver {
        /// The shard's folder.
        path: PathBuf,
        /// Who has it.
        holder: String,
    },
    /// A worker cannot be started or spoken to.
    #[error("a worker process cannot be started: {0}")]
    Worker(io::Error),
    /// The user pressed Ctrl-C.
    #[error("stopped")]
    Stopped,
    /// Something that should not happen.
    #[error("{0}")]
    Internal(String),
}

impl RunError {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }

    /// Of `path`, which is only read: bytes that are no text are damage.
    pub(crate) fn reading(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.kind() {
            ErrorKind::InvalidData => Self::Damaged { path, reason: source.to_string() },
            _ => Self::Unreadable { path, source },
        }
    }
}

/// The text of the file at `path`; none where there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, RunError> {
    match file::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(RunError::reading(path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_can_be_put_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let error = read_text(folder.path()).unwrap_err().to_string();
        assert!(error.contains("cannot be read") && !error.contains("--output-path"), "{error}");
        let file = folder.path().join("manifest.json");
        std::fs::write(&file, b"{}\xff").unwrap();
        let error = read_text(&file).unwrap_err().to_string();
        assert!(error.contains("is damaged") && !error.contains("--fresh"), "{error}");
        assert_eq!(read_text(&file.join("plan.json")).unwrap(), None, "a file is no folder of a run");
    }
}
