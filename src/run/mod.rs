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

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
    /// A file or folder cannot be written or read.
    #[error("{} cannot be used: {source}; check the path, its permissions and the free space, or choose another folder with --output-path", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The results were written by a newer version.
    #[error(
        "{} was written by a newer effattn (schema {found}, this one knows {known}); update effattn or choose \
         another folder with --output-path",
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
    /// A manifest or journal that cannot be read.
    #[error("{} is damaged: {reason}; move its folder away, or start the run over with --fresh", path.display())]
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
    Worker(std::io::Error),
    /// The user pressed Ctrl-C.
    #[error("stopped")]
    Stopped,
    /// Something that should not happen.
    #[error("{0}")]
    Internal(String),
}

impl RunError {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
