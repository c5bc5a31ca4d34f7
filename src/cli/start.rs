//! What comes before a run: everything that can be wrong is found before anything is measured.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

use super::export::Exports;
use super::grid::Place;
use super::interrupt::stop_on_ctrl_c;
use crate::config::settings::{DeviceName, DtypeName, Settings};
use crate::config::units::Bytes;
use crate::device::machine::{self, Machine};
use crate::device::{Backend, threads};
use crate::kernel::cpu::bf16;
use crate::protocol::grid::Grid;
use crate::protocol::text;
use crate::record::file;
use crate::run::manifest::argv;
use crate::run::plan::{Cell, Plan};
use crate::run::session::{Session, Surroundings};
use crate::run::worker::Launcher;
use crate::term::{Term, Warning};

/// A machine that is ready.
pub struct Ready {
    /// CPU threads.
    pub threads: usize,
    /// Live bytes that all workers together may reach.
    pub memory_limit: u64,
    /// Resident bytes that all workers together may reach.
    pub resident_limit: u64,
    /// The device.
    pub device: DeviceName,
}

/// Opens the device and counts threads and memory; call before any other thread exists.
///
/// # Errors
/// A device that cannot be opened.
pub fn ready(settings: &Settings) -> Result<Ready> {
    let count = settings.threads.map_or_else(threads::available, |count| count as usize);
    threads::set(count);
    let device = settings.device.unwrap_or_default();
    Backend::open(device)?;
    let free = machine::free_memory();
    let memory_limit = settings.memory_limit.map_or(free / 10 * 9, |bytes| bytes.0);
    Ok(Ready { threads: count, memory_limit, resident_limit: free / 100 * 95, device })
}

/// Output, plots and export folders, tried before anything is measured.
///
/// # Errors
/// A folder that cannot be written.
pub fn folders(place: &Place, exports: &Exports) -> Result<()> {
    let writable = |flag: &str, path: &Path| {
        file::ensure_writable(path).map_err(|error| {
            anyhow::anyhow!("{flag} {} cannot be written ({error}); choose another folder", path.display())
        })
    };
    exports.check()?;
    writable("--output-path", &place.output_path)?;
    if !place.no_plot {
        writable("--plots-dir", &place.plots_dir)?;
    }
    Ok(())
}

/// The plan of `command` over `cells`.
pub fn plan(command: &str, grid: &Grid, ready: &Ready, cells: Vec<Cell>) -> Plan {
    let suite = grid.suite.as_ref();
    Plan {
        name: suite.map_or_else(|| command.to_owned(), |suite| suite.name.clone()),
        command: command.to_owned(),
        suite: suite.map(|suite| suite.text.clone()),
        argv: argv(),
        settings: serde_json::to_value(&grid.settings).unwrap_or_default(),
        cells,
        machine: machine::identity(),
        data: BTreeMap::new(),
        threads: ready.threads,
        device: ready.device.to_string(),
        seeds: grid.settings.seeds.as_ref().map_or_else(Vec::new, |seeds| seeds.0.clone()),
    }
}

/// The text of the models: noted in the plan, and in a file for workers where it is not built in.
///
/// # Errors
/// Data that are there but cannot be read.
pub fn text(place: &Place, plan: &mut Plan) -> Result<Option<NamedTempFile>> {
    let dir = place.data_dir.clone().unwrap_or_else(super::data_dir::default_dir);
    if let Some(dir) = place.data_dir.as_ref().filter(|dir| !dir.is_dir()) {
        anyhow::bail!("--data-dir {} is no folder", dir.display());
    }
    let text = text::load(&dir)?;
    plan.data.insert(text.name.to_owned(), text.hash());
    if text.name == "embedded" {
        return Ok(None);
    }
    let mut file = NamedTempFile::new().context("the folder for temporary files cannot be written")?;
    file.write_all(&text.bytes).context("the folder for temporary files cannot be written")?;
    Ok(Some(file))
}

/// Opens the run: from here on Ctrl-C keeps what is finished.
///
/// # Errors
/// Results that cannot be used.
pub fn session(
    plan: &Plan,
    place: &Place,
    ready: &Ready,
    text: Option<&NamedTempFile>,
    term: Term,
) -> Result<Session> {
    let mut launcher = Launcher::own(ready.threads)?;
    if let Some(text) = text {
        launcher.arguments.extend(["--text".into(), text.path().into()]);
    }
    if let Some(load) = machine::load()
        && load > 0.5 * threads::available() as f64
    {
        term.warn(&Warning::Busy { load, cores: threads::available() });
    }
    if plan.settings["dtype"] == DtypeName::Bf16.to_string() && !bf16::is_native() {
        term.warn(&Warning::EmulatedBf16);
    }
    let around = Surroundings {
        output: &place.output_path,
        fresh: place.fresh,
        launcher,
        stop: stop_on_ctrl_c(),
        memory_limit: ready.memory_limit,
        resident_limit: ready.resident_limit,
        term,
    };
    Ok(Session::open(plan, around)?)
}

/// `effattn speed · cpu AMD EPYC, 2 threads, avx512 · lra-repo · batch 1 · f32, fused kernels · ...`.
pub fn header(plan: &Plan, settings: &Settings, ready: &Ready) -> String {
    let machine = Machine::this();
    let list = |values: &[u64]| values.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let batch = settings.batch.as_ref().map_or_else(String::new, |batch| list(&batch.0));
    let place = match ready.device {
        DeviceName::Cpu => format!("cpu {}, {} threads, {}", machine.cpu, ready.threads, machine.simd),
        device => device.to_string(),
    };
    let preset = settings.preset.as_deref().unwrap_or("lra-repo");
    let (dtype, kernel) = (settings.dtype.unwrap_or_default(), settings.kernel.unwrap_or_default());
    let (limit, command) = (Bytes(ready.memory_limit), &plan.command);
    let text = if plan.data.contains_key("imdb") { "IMDb reviews" } else { "built-in text" };
    format!(
        "effattn {command} · {place} · {preset} · batch {batch} · {dtype}, {kernel} kernels · {text} · limit {limit}"
    )
}
