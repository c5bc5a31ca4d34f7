//! The paper protocols and the conformance check.
//!
//! A protocol is an entry of [`table::TABLE`]: it makes a plan of cells, the [`runner`] takes workers through it, and what
//! they say becomes rows; its `work` is the other end, inside the worker.

pub mod attention;
pub mod charlm;
pub mod check;
pub mod finetune;
pub mod gate;
pub mod grid;
pub mod lra;
pub mod measured_step;
pub mod memory;
pub mod mlm;
pub mod model_spec;
pub mod norms;
pub mod pattern;
pub mod robustness;
pub mod runner;
pub mod speed;
pub mod start;
pub mod table;
pub mod text;
pub mod training;
pub mod vision;
pub mod wordlm;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::device::alloc;
use crate::run::worker::Link;
use table::{Conditions, Given};
pub use table::{Protocol, TABLE, find, protocols, register};

/// What a worker is asked to do: the first line on its stdin.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// A cell of a protocol.
    Cell {
        /// The protocol.
        protocol: String,
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell's request.
        request: Value,
        /// Where it finds and keeps things.
        conditions: Conditions,
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
    match link.next::<Order>()? {
        None => Ok(()),
        Some(Order::Gate { request }) => gate::work(link, &request),
        Some(Order::Cell { protocol, memory_limit, request, conditions }) => {
            let Some(protocol) = find(&protocol) else { anyhow::bail!("there is no protocol {protocol}") };
            alloc::set_limit(usize::try_from(memory_limit).unwrap_or(usize::MAX));
            (protocol.work)(link, request, &Given { text, conditions })
        }
    }
}
