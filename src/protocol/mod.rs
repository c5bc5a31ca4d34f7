//! The paper protocols and the conformance check.
//!
//! A [`Protocol`] is an entry of [`TABLE`]: it makes a plan of cells, the `runner` takes workers through it, and what
//! they say becomes rows; its `work` is the other end, inside the worker.

pub(crate) mod attention_matrix;
pub mod cell_runner;
pub(crate) mod charlm;
pub mod check;
pub mod curve;
pub mod definition;
mod differing;
pub(crate) mod finetune;
pub(crate) mod golden_gate;
pub mod grid;
pub(crate) mod lra;
pub mod measuring;
pub(crate) mod mlm;
pub mod model_spec;
pub(crate) mod norms;
pub(crate) mod own_data;
pub(crate) mod pattern;
pub(crate) mod pretrained_start;
pub(crate) mod recall;
pub(crate) mod robustness;
pub(crate) mod runner;
pub mod stored_input;
pub(crate) mod stored_model;
pub(crate) mod trained_attention;
pub mod training;
pub(crate) mod vision;
pub(crate) mod wordlm;
pub mod worker_context;

use crate::run::worker::ParentLink;
pub use definition::Protocol;
use definition::ResultView;
use effattn_kernel::device::alloc;
use effattn_record::Metric;
use effattn_record::config::registry::Registry;
use effattn_record::config::settings::Settings;
use effattn_record::config::suite::Suite;
use effattn_record::config::unknown;
use grid::{Grid, GridFlags, PlanError, combine};
use worker_context::{WorkerInput, WorkerRequest};

/// Every protocol of the crate.
pub static TABLE: &[&dyn Protocol] = &[
    &measuring::Speed,
    &measuring::Memory,
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

/// Resolves `flags` for `protocol`.
pub fn resolve(flags: &GridFlags, protocol: &dyn Protocol) -> Result<Grid, PlanError> {
    let suite = flags.suite.as_deref().map(Suite::load).transpose().map_err(PlanError::new)?;
    resolve_suite(flags, suite, protocol)
}

/// Resolves `flags` for `protocol`, and `suite` in the place of the one that they name.
pub fn resolve_suite(
    flags: &GridFlags,
    suite: Option<Suite>,
    protocol: &dyn Protocol,
) -> Result<Grid, PlanError> {
    if let Some(suite) = &suite
        && suite.protocol != protocol.name()
    {
        return Err(PlanError(run_elsewhere(suite, flags.suite.as_deref().unwrap_or(&suite.name))));
    }
    check_settings(flags, suite.as_ref(), protocol)?;
    protocol.check_flags(flags)?;
    combine(flags, suite, &protocol.defaults(flags))
}

/// Who runs `suite`, which was typed as `typed`; or that nobody does.
pub fn run_elsewhere(suite: &Suite, typed: &str) -> String {
    let Suite { name, file, protocol, .. } = suite;
    // pictures of mechanisms have suites and are no protocol
    let commands = protocols().into_iter().map(|known| known.name()).chain(["plot attention"]);
    let commands: Vec<&str> = commands.collect();
    if commands.contains(&protocol.as_str()) {
        return format!("suite {name} is run by: effattn {protocol} --suite {typed}");
    }
    format!("suite {file}: {}", unknown("protocol", protocol, commands))
}

/// Makes sure that `protocol` takes everything that is set, with values that it can have.
fn check_settings(
    flags: &GridFlags,
    suite: Option<&Suite>,
    protocol: &dyn Protocol,
) -> Result<(), PlanError> {
    let check = |settings: &Settings, place: &str, dashes: &dyn Fn(&str) -> String| {
        if let Some(key) = settings.set_keys().into_iter().find(|key| !protocol.info().takes(key)) {
            return Err(PlanError(format!("{place}{}", refusal(protocol, key, &dashes(key)))));
        }
        settings.check().map_err(|error| PlanError(format!("{place}{error}")))
    };
    check(&flags.settings, "", &|key| format!("--{}", key.replace('_', "-")))?;
    check(&flags.set, "--set: ", &str::to_owned)?;
    check(&flags.user_settings(), "", &str::to_owned)?;
    // of a suite's lists, flags choose among what --set has put there
    const LISTS: [&str; 6] = ["task", "len", "batch", "seeds", "mode", "preset"];
    let typed = flags.settings.set_keys();
    let twice = |key: &&str| typed.contains(key) && !(suite.is_some() && LISTS.contains(key));
    if let Some(key) = flags.set.set_keys().into_iter().find(twice) {
        let flag = key.replace('_', "-");
        return Err(PlanError(format!("--{flag} and --set {key} say the same setting; give one of them")));
    }
    if let Some(suite) = suite {
        let rows = suite.rows.iter().map(|row| (&row.set, format!("suite {}:{}: ", suite.file, row.line)));
        let base = (&suite.base, format!("suite {}:{}: [base]: ", suite.file, suite.base_line));
        for (settings, place) in std::iter::once(base).chain(rows) {
            check(settings, &place, &str::to_owned)?;
            own_data::check_suite(settings).map_err(|problem| PlanError(format!("{place}{problem}")))?;
        }
    }
    Ok(())
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

/// Does what the first message asks, until the parent closes the pipe. `text` is the input of the models.
pub fn work(link: &ParentLink, text: &[u8]) -> anyhow::Result<()> {
    match link.next::<WorkerRequest>()? {
        None => Ok(()),
        Some(WorkerRequest::Gate { request }) => golden_gate::work(link, &request),
        Some(WorkerRequest::FirstStep { memory_limit, request }) => {
            alloc::set_limit(usize::try_from(memory_limit).unwrap_or(usize::MAX));
            Ok(measuring::first_step::work(link, &request, text)?)
        }
        Some(WorkerRequest::Cell { protocol, memory_limit, request, conditions }) => {
            let Some(protocol) = find(&protocol) else { anyhow::bail!("there is no protocol {protocol}") };
            alloc::set_limit(usize::try_from(memory_limit).unwrap_or(usize::MAX));
            protocol.work(link, request, &WorkerInput { text, conditions })
        }
    }
}
