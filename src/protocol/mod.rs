//! The paper protocols and the conformance check.
//!
//! A [`Protocol`] is an entry of [`TABLE`]: it makes a plan of cells, the [`runner`] takes workers through it, and what
//! they say becomes rows; its `work` is the other end, inside the worker.

pub mod attention_matrix;
pub mod cell_runner;
pub mod charlm;
pub mod check;
pub mod curve;
pub mod definition;
mod differing;
pub mod finetune;
pub mod golden_gate;
pub mod grid;
pub mod input_text;
pub mod lra;
pub mod measured_step;
pub mod memory;
pub mod mlm;
pub mod model_spec;
pub mod norms;
pub mod own_data;
pub mod pattern;
pub mod pretrained_start;
pub mod recall;
pub mod robustness;
pub mod runner;
pub mod speed;
pub mod trained_attention;
pub mod training;
pub mod vision;
pub mod wordlm;
pub mod worker_context;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::run::worker::ParentLink;
pub use definition::Protocol;
use definition::{ResultView, WorkerContext, WorkerInput};
use effattn_kernel::device::alloc;
use effattn_record::Metric;
use effattn_record::config::registry::Registry;

/// Every protocol of the crate.
pub static TABLE: &[&dyn Protocol] = &[
    &speed::Speed,
    &memory::Memory,
    &lra::Lra,
    &charlm::CharLm,
    &wordlm::WordLm,
    &mlm::Mlm,
    &finetune::Finetune,
    &robustness::Robustness,
    &vision::Vision,
    &recall::Recall,
];

static ALL: Registry<dyn Protocol> = Registry::new(TABLE);

/// Adds a protocol at run time. A tool that does so calls [`crate::cli::main`] afterwards: workers are the same program.
pub fn register(protocol: &'static dyn Protocol) {
    if find(protocol.name()).is_none() {
        ALL.add(protocol);
    }
}

/// Makes the settings that protocols declare known to `--set` and suites.
pub fn declare_settings() {
    protocols().into_iter().flat_map(|protocol| protocol.info().own).for_each(|setting| setting.declare());
}

/// Every protocol: the table, then the registered ones.
pub fn protocols() -> Vec<&'static dyn Protocol> {
    ALL.all()
}

/// What trained models are compared by, in the order of the protocols.
pub fn trained_metrics() -> Vec<Metric> {
    let mut all: Vec<Metric> = Vec::new();
    for protocol in protocols().into_iter().filter(|protocol| protocol.view() == ResultView::Trained) {
        all.extend(protocol.info().metrics.iter().filter(|metric| !all.contains(metric)).collect::<Vec<_>>());
    }
    all
}

/// The protocol called `name`.
pub fn find(name: &str) -> Option<&'static dyn Protocol> {
    protocols().into_iter().find(|protocol| protocol.name() == name)
}

/// `lra takes no mode; speed and memory do`.
pub fn refusal(protocol: &dyn Protocol, key: &str, name: &str) -> String {
    let takers: Vec<&str> =
        protocols().into_iter().filter(|other| other.info().takes(key)).map(|other| other.name()).collect();
    match takers.as_slice() {
        [] => format!("{} does not take {name}; no command does", protocol.name()),
        [one] => format!("{} does not take {name}; {one} does", protocol.name()),
        [most @ .., last] => {
            format!("{} does not take {name}; {} and {last} do", protocol.name(), most.join(", "))
        }
    }
}

/// What a worker is asked to do: the first line on its stdin.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum WorkerRequest {
    /// A cell of a protocol.
    Cell {
        /// The protocol.
        protocol: String,
        /// Live bytes it may reach.
        memory_limit: u64,
        /// The cell's request.
        request: Value,
        /// Where it finds and keeps things.
        conditions: WorkerContext,
    },
    /// The shipped golden files of some mechanisms.
    Gate {
        /// What to check.
        request: golden_gate::GateRequest,
    },
}

/// Does what the first message asks, until the parent closes the pipe. `text` is the input of the models.
pub fn work(link: &ParentLink, text: &[u8]) -> anyhow::Result<()> {
    match link.next::<WorkerRequest>()? {
        None => Ok(()),
        Some(WorkerRequest::Gate { request }) => golden_gate::work(link, &request),
        Some(WorkerRequest::Cell { protocol, memory_limit, request, conditions }) => {
            let Some(protocol) = find(&protocol) else { anyhow::bail!("there is no protocol {protocol}") };
            alloc::set_limit(usize::try_from(memory_limit).unwrap_or(usize::MAX));
            protocol.work(link, request, &WorkerInput { text, conditions })
        }
    }
}
