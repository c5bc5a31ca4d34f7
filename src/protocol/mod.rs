//! The paper protocols and the conformance check.
//!
//! A protocol makes a plan of cells, conducts workers through it and turns what they say into rows; its
//! `work` is the other end, inside the worker.

pub mod attention;
pub mod charlm;
pub mod check;
pub mod gate;
pub mod grid;
pub mod lra;
pub mod measured_step;
pub mod memory;
pub mod model_spec;
pub mod norms;
pub mod pattern;
pub mod robustness;
pub mod speed;
pub mod text;
pub mod training;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::device::alloc;
use crate::run::worker::Link;

/// What a worker is asked to do: the first line on its stdin.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub enum Task {
    /// Steps against the clock.
    Speed {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell.
        request: speed::plan::Request,
    },
    /// Bytes of one step.
    Memory {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell.
        request: memory::Request,
    },
    /// A training run of the Long Range Arena.
    Lra {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell.
        request: lra::plan::Request,
        /// Where it finds and keeps things.
        place: training::Place,
    },
    /// A training run of a character language model.
    Charlm {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell.
        request: charlm::plan::Request,
        /// Where it finds and keeps things.
        place: training::Place,
    },
    /// A model that is tested on changed texts.
    Robustness {
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell.
        request: robustness::Request,
        /// Where it finds and keeps things.
        place: training::Place,
        /// Folder of a finished training run.
        found: Option<PathBuf>,
    },
    /// The shipped golden files of some mechanisms.
    Gate {
        /// What to check.
        request: gate::Request,
    },
}

/// Does what the first message asks, until the parent closes the pipe. `text` is the input of the models.
///
/// # Errors
/// The parent is gone, or speaks another language.
pub fn work(link: &Link, text: &[u8]) -> anyhow::Result<()> {
    let Some(task) = link.next::<Task>()? else { return Ok(()) };
    let limit = |bytes: u64| alloc::set_limit(usize::try_from(bytes).unwrap_or(usize::MAX));
    match task {
        Task::Speed { memory_limit, request } => {
            limit(memory_limit);
            speed::work::work(link, &request, text)
        }
        Task::Memory { memory_limit, request } => {
            limit(memory_limit);
            memory::work(link, &request, text)
        }
        Task::Lra { memory_limit, request, place } => {
            limit(memory_limit);
            lra::work::work(link, &request, &place)
        }
        Task::Charlm { memory_limit, request, place } => {
            limit(memory_limit);
            charlm::work::work(link, &request, &place)
        }
        Task::Robustness { memory_limit, request, place, found } => {
            limit(memory_limit);
            robustness::work(link, &request, &place, found.as_deref())
        }
        Task::Gate { request } => gate::work(link, &request),
    }
}
