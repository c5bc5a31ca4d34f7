//! Why runs cannot be joined.

use std::path::PathBuf;

use crate::run::RunError;

/// Why runs cannot be joined.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// A file or folder cannot be used.
    #[error(transparent)]
    Run(#[from] RunError),
    /// No run there.
    #[error("there is no run in {}; name the folder of a run or of its shards, such as results/lra/plan-0123456789ab", .0.display())]
    Nothing(PathBuf),
    /// A run whose journal is gone.
    #[error(
        "{} has no journal.jsonl, and only what journals say can be joined; copy journal.jsonl and plan.json of that run \
         into it, or show its rows as they are: effattn report {}",
        .0.display(),
        .0.display()
    )]
    NoJournal(PathBuf),
    /// Neither a plan nor a finished cell.
    #[error(
        "{} has no plan.json and no cell in its journal.jsonl, so that there is nothing to join; copy both files of that \
         run into it",
        .0.display()
    )]
    NoCells(PathBuf),
    /// Runs of different plans.
    #[error(
        "{} and {} belong to different plans: the second has {differ}; merge the runs of each plan separately",
        first.display(),
        second.display()
    )]
    Different {
        /// One run.
        first: PathBuf,
        /// Another.
        second: PathBuf,
        /// What differs, in words.
        differ: String,
    },
    /// Two results of one training run.
    #[error(
        "{cell}: {} and {} claim to be one training run and differ ({what}); nothing was written. Move the one away that \
         you do not trust",
        first.display(),
        second.display()
    )]
    Conflict {
        /// The cell.
        cell: String,
        /// One run.
        first: PathBuf,
        /// Another.
        second: PathBuf,
        /// What differs.
        what: String,
    },
}
