//! What comes before a run: everything that can be wrong is found before anything is measured.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

use super::command::{CommandArgs, OutputArgs};
use super::interrupt::stop_on_ctrl_c;
use super::quick;
use crate::protocol::definition::{DataDirs, EstimateContext, Prepared, WorkerContext};
use crate::protocol::grid::{Grid, listed};
use crate::protocol::{measuring, resolve};
use crate::run::manifest::argv;
use crate::run::plan::{Cell, Plan};
use crate::run::plan_file::PlanFile;
use crate::run::session::{Session, SessionOptions};
use crate::run::shard::PlanPart;
use crate::run::worker::Launcher;
use crate::run::{CancelToken, RunError};
use crate::term::{Term, Verbosity, Warning};
use effattn_data::data_dir;
use effattn_kernel::cpu::bf16;
use effattn_kernel::device::machine::{self, Machine};
use effattn_kernel::device::{Backend, alloc, threads};
use effattn_record::config::settings::{DeviceName, DtypeName, Settings};
use effattn_record::config::suite::Suite;
use effattn_record::config::units::Bytes;
use effattn_record::file;
use effattn_record::report::reference::{self, Reference};
use effattn_record::text::plural;

/// Seconds of a measurement that is not worth an estimate.
const SHORT: f64 = 5.0;

/// A command that is ready to go.
pub enum RunStart {
    /// `--dry-run`: the plan with the time that it would take.
    DryRun(Box<DryRun>),
    /// The open run of a plan.
    Open(Box<OpenRun>),
}

/// A plan that is only printed.
pub struct DryRun {
    pub plan: Plan,
    /// Where it is printed.
    pub term: Term,
}

/// The open run of a plan.
pub struct OpenRun {
    pub plan: Plan,
    /// The suite that it comes from.
    pub suite: Option<Suite>,
    pub session: Session,
    /// Paths and options of its workers.
    pub context: WorkerContext,
}

/// Plans what was asked, and opens its run: from there on Ctrl-C keeps what is finished. A command that is refused leaves no
/// empty folder behind.
pub fn open_run(args: &CommandArgs, references: &[Reference], term: Term) -> Result<RunStart> {
    let output = &args.output;
    let base = output.output_path.join(args.protocol.name());
    let folders = [base.as_path(), &output.output_path, &output.plots_dir];
    let new: Vec<&Path> = folders.into_iter().filter(|folder| !folder.exists()).collect();
    let opened = open(args, references, term);
    if opened.is_err() {
        // only what is empty can be removed so
        new.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
    opened
}

fn open(args: &CommandArgs, references: &[Reference], term: Term) -> Result<RunStart> {
    let protocol = args.protocol;
    let mut grid = resolve(&args.flags, protocol)?;
    let ready = open_machine(&grid.settings)?;
    let (mut plan, merged) = distinct_plan(args, &grid, &ready)?;
    if merged > 0 {
        term.info(&format!("{merged} cells were requested more than once; each runs once"));
    }
    if let Some(baseline) = &args.baseline {
        let mut labels: Vec<String> = plan.cells.iter().map(|cell| cell.row.label()).collect();
        labels.dedup();
        if !labels.contains(baseline) {
            labels.sort();
            labels.dedup();
            anyhow::bail!("--baseline {baseline} is not measured here; choose one of {}", labels.join(", "));
        }
    }
    let mut term = term;
    if args.output.dry_run {
        args.exports.check(&args.inputs())?;
        let tried = fit_quick(args, (&mut grid, &mut plan), &ready, &mut term)?;
        if let Some(shard) = args.output.shard {
            let owners = PlanFile::of(&plan).assign_shards(shard.count);
            plan.keep_shard(shard, &owners);
        }
        if !tried {
            try_cells(args, &mut plan, &ready, &mut term)?;
        }
        return Ok(RunStart::DryRun(Box::new(DryRun { plan, term })));
    }
    writable(args)?;
    let Prepared { remarks, text } = prepare(args, &mut plan)?;
    let tried = fit_quick(args, (&mut grid, &mut plan), &ready, &mut term)?;
    let planned = PlanFile::of(&plan); // the data are known by now
    let owners = args.output.shard.map(|shard| (shard, planned.assign_shards(shard.count)));
    if let Some((shard, owners)) = &owners {
        let all = plan.cells.len();
        plan.keep_shard(*shard, owners);
        term.info(&format!("shard {shard}: {} of {all} cells", plan.cells.len()));
    }
    if !plan.cells.is_empty() {
        term.info(&header(&plan, protocol.summary(&plan), &ready));
    }
    let cores = threads::available();
    if ready.threads > cores {
        let text = format!(
            "{} threads on {}: they take turns, and steps take longer than they need",
            ready.threads,
            plural(cores as u64, "core")
        );
        term.warn(&Warning::Other(text));
    }
    remarks.iter().for_each(|remark| term.info(remark));
    if let Some(quick) = protocol.info().quick.filter(|_| args.flags.quick) {
        term.info(&format!("--quick: {}", quick.said));
    }
    let text = text.map(temporary).transpose()?;
    let mut session = session((&plan, &planned), args, &ready, text, term)?;
    // the time of short measurements is the time that they were given
    let given = protocol.info().times_steps() && plan.seconds() < SHORT;
    if session.term.verbosity() > Verbosity::Quiet && !given && !tried {
        let keys = plan.cells.iter().filter(|cell| session.is_done(cell)).map(|cell| cell.key.clone());
        let done: HashSet<String> = keys.collect();
        let trial = Trial {
            launcher: session.launcher.clone(),
            memory_limit: session.memory_limit,
            stop: session.stop.clone(),
        };
        match estimate(args, &mut plan, trial, &|cell| done.contains(&cell.key), &mut session.term) {
            Ok(()) | Err(RunError::Stopped) => {} // the run itself stops
            Err(error) => return Err(error.into()),
        }
    }
    if !references.is_empty() {
        let path = session.path().join(reference::FILE);
        let text = reference::to_text(references)?;
        file::write(&path, text.as_bytes()).with_context(|| path.display().to_string())?;
    }
    let context = worker_context(args, &plan);
    Ok(RunStart::Open(Box::new(OpenRun { plan, suite: grid.suite, session, context })))
}

/// The plan of `grid` with every cell once and its groups, and how many cells were left out.
fn distinct_plan(args: &CommandArgs, grid: &Grid, ready: &MachineLimits) -> Result<(Plan, usize)> {
    let mut plan = plan(args, grid, ready)?;
    let merged = plan.remove_duplicates()?;
    plan.groups = args.protocol.groups(&plan.cells);
    Ok((plan, merged))
}

/// The whole plan of what was asked and its cells' weights, with times and bytes as far as a step of them can be tried here:
/// for jobs that run it elsewhere.
pub fn whole(args: &CommandArgs, term: &mut Term) -> Result<(Plan, PlanFile)> {
    let grid = resolve(&args.flags, args.protocol)?;
    let device = grid.settings.device.unwrap_or_default();
    let here = Backend::open(device).is_ok(); // a login node has no accelerator
    let ready = open_machine(&Settings { device: Some(DeviceName::Cpu), ..grid.settings.clone() })?;
    let (mut plan, _) = distinct_plan(args, &grid, &MachineLimits { device, ..ready })?;
    prepare(args, &mut plan)?;
    let planned = PlanFile::of(&plan);
    if here {
        let ready = open_machine(&Settings { device: Some(DeviceName::Cpu), ..grid.settings.clone() })?;
        try_cells(args, &mut plan, &ready, term)?;
    } else {
        term.info(&format!(
            "this machine has no {device}: time and memory are guesses; set them with --time and --memory"
        ));
    }
    Ok((plan, planned))
}

/// Workers that try steps before a run: how they are started, the live bytes that each may reach, and what stops them.
struct Trial {
    launcher: Launcher,
    memory_limit: u64,
    stop: CancelToken,
}

/// Predicts the seconds of the cells that are not `done` by trying some of their steps, and says so meanwhile.
fn estimate(
    args: &CommandArgs,
    plan: &mut Plan,
    trial: Trial,
    done: &dyn Fn(&Cell) -> bool,
    term: &mut Term,
) -> std::result::Result<(), RunError> {
    term.start_progress(0.0);
    let said = std::cell::Cell::new(false);
    let tell = |what: &str| {
        term.doing(&format!("trying a few steps to estimate the time: {what}"));
        if !term.has_bar() && !said.replace(true) {
            term.info("trying a few steps to estimate the time");
        }
    };
    let (data, results) = (self::data(args), args.output.output_path.clone());
    let Trial { launcher, memory_limit, stop } = trial;
    let context = EstimateContext { launcher, memory_limit, stop, data, results, done, tell: &tell };
    let tried = args.protocol.estimate(plan, &context);
    term.finish_progress();
    tried
}

/// [`estimate`] of every cell of `plan`, before there is a run.
fn try_cells(args: &CommandArgs, plan: &mut Plan, ready: &MachineLimits, term: &mut Term) -> Result<()> {
    let launcher = launcher(ready, None)?;
    let trial = Trial { launcher, memory_limit: ready.memory_limit, stop: CancelToken::default() };
    Ok(estimate(args, plan, trial, &|_| false, term)?)
}

/// Lowers the steps of a quick training to as many as this machine makes in its time. Gives whether the cells have been tried.
fn fit_quick(
    args: &CommandArgs,
    (grid, plan): (&mut Grid, &mut Plan),
    ready: &MachineLimits,
    term: &mut Term,
) -> Result<bool> {
    let Some(whole) = quick::whole_steps(args, grid) else { return Ok(false) };
    let OutputArgs { fresh, dry_run, output_path, .. } = &args.output;
    let earlier = if *fresh { None } else { quick::earlier_steps(&plan.base(output_path), plan) };
    let replan = |grid: &Grid| {
        let (mut plan, _) = distinct_plan(args, grid, ready)?;
        if !dry_run {
            prepare(args, &mut plan)?;
        }
        Ok(plan)
    };
    let tried =
        quick::fit((grid, plan), (whole, earlier), |plan| try_cells(args, plan, ready, term), replan)?;
    if let Some(steps) = grid.settings.steps.filter(|steps| *steps < whole) {
        term.info(&quick::remark(steps, whole));
    }
    Ok(tried)
}

/// What workers are given besides their requests.
fn worker_context(args: &CommandArgs, plan: &Plan) -> WorkerContext {
    let training = args.training;
    WorkerContext {
        data: data(args),
        planned: plan.data.clone(),
        save: training.map_or(f64::INFINITY, |training| training.save_every.0),
        detect_anomaly: training.is_some_and(|training| training.detect_anomaly),
        ..WorkerContext::default()
    }
}

/// Where data sets lie.
fn data(args: &CommandArgs) -> PathBuf {
    args.output.data_dir.clone().unwrap_or_else(data_dir::default_dir)
}

fn prepare(args: &CommandArgs, plan: &mut Plan) -> Result<Prepared> {
    if let Some(dir) = args.output.data_dir.as_ref().filter(|dir| !dir.is_dir()) {
        anyhow::bail!("--data-dir {} is not a folder", dir.display());
    }
    args.protocol.prepare(plan, &DataDirs { data: data(args), results: &args.output.output_path })
}

fn temporary(text: Vec<u8>) -> Result<NamedTempFile> {
    let write = || {
        let mut file = NamedTempFile::new()?;
        file.write_all(&text).map(|()| file)
    };
    write().context("the folder for temporary files cannot be written")
}

/// A machine that is ready.
struct MachineLimits {
    /// CPU threads.
    threads: usize,
    /// Live bytes that all workers together may reach.
    memory_limit: u64,
    /// Resident bytes that all workers together may reach.
    resident_limit: u64,
    device: DeviceName,
    /// What it calls itself, where it is not the processor.
    accelerator: Option<String>,
}

/// Opens the device and counts threads and memory; call before any other thread exists.
fn open_machine(settings: &Settings) -> Result<MachineLimits> {
    let count = settings.threads.map_or_else(threads::available, |count| count as usize);
    addressable(count)?;
    threads::set(count, threads::PlainOperations::OnCaller);
    let device = settings.device.unwrap_or_default();
    let accelerator = Backend::open(device)?.accelerator();
    let free = machine::free_memory();
    let memory_limit = settings.memory_limit.map_or(free / 10 * 9, |bytes| bytes.0);
    Ok(MachineLimits { threads: count, memory_limit, resident_limit: free / 100 * 95, device, accelerator })
}

/// Refuses a limit of the address space in which no worker could start.
fn addressable(threads: usize) -> Result<()> {
    let needed = threads::address_space(threads);
    match alloc::address_space().filter(|limit| *limit < needed) {
        Some(limit) => anyhow::bail!(
            "a process may map {} here (ulimit -v), but {} {} before the model's own bytes; raise the limit \
             (ulimit -v unlimited), or take fewer --threads",
            Bytes(limit),
            if threads == 1 { "1 thread needs".to_owned() } else { format!("{threads} threads need") },
            Bytes(needed)
        ),
        None => Ok(()),
    }
}

/// Output, plots and export folders, tried before anything is measured.
fn writable(args: &CommandArgs) -> Result<()> {
    let writable = |flag: &str, path: &Path| {
        file::ensure_writable(path).map_err(|error| {
            anyhow::anyhow!("{flag} {} cannot be written ({error}); choose another folder", path.display())
        })
    };
    args.exports.check(&args.inputs())?;
    writable("--output-path", &args.output.output_path)?;
    if !args.output.no_plot {
        writable("--plots-dir", &args.output.plots_dir)?;
    }
    Ok(())
}

fn plan(args: &CommandArgs, grid: &Grid, ready: &MachineLimits) -> Result<Plan> {
    let protocol = args.protocol;
    if let Some(fit) = grid.settings.fit.filter(|fit| fit.0 > ready.memory_limit) {
        let limit = Bytes(ready.memory_limit);
        anyhow::bail!(
            "--fit {fit} is more than the memory limit of {limit}; choose less, or raise --memory-limit"
        );
    }
    let suite = grid.suite.as_ref();
    let cells = protocol.cells(grid, ready.threads)?;
    let programs = args.programs.iter().map(|word| Ok((word.clone(), measuring::described(word)?)));
    let programs = programs.collect::<Result<Vec<_>>>()?;
    if let Some(fit) = grid.settings.fit.filter(|_| !programs.is_empty()) {
        anyhow::bail!("--fit {fit} is looked for in effattn only; leave out --fit or --program");
    }
    let cells = if programs.is_empty() { cells } else { measuring::with_programs(cells, &programs) };
    let mut data = BTreeMap::new();
    for (_, program) in &programs {
        data.extend(program.hash()?.map(|hash| (program.data_name(), hash)));
    }
    Ok(Plan {
        name: suite.map_or_else(|| protocol.name().to_owned(), |suite| suite.name.clone()),
        command: protocol.name().to_owned(),
        suite: suite.map(|suite| suite.text.clone()),
        argv: argv(),
        settings: serde_json::to_value(&grid.settings).unwrap_or_default(),
        cells,
        machine: machine::identity(),
        accelerator: ready.accelerator.clone(),
        data,
        threads: ready.threads,
        device: ready.device.to_string(),
        seeds: grid.settings.seeds.as_ref().map_or_else(Vec::new, |seeds| seeds.0.clone()),
        keeps: protocol.trains(),
        part: PlanPart::default(),
        groups: Vec::new(),
    })
}

fn launcher(ready: &MachineLimits, text: Option<&Path>) -> Result<Launcher> {
    let mut launcher = Launcher::own(ready.threads)?;
    if let Some(text) = text {
        launcher.arguments.extend(["--text".into(), text.into()]);
    }
    Ok(launcher)
}

fn session(
    (plan, planned): (&Plan, &PlanFile),
    args: &CommandArgs,
    ready: &MachineLimits,
    text: Option<NamedTempFile>,
    term: Term,
) -> Result<Session> {
    // how busy the machine is says nothing about accuracies, and nothing about bytes
    if args.protocol.info().times_steps() {
        let (load, cores) = machine::busy_cores();
        if load > 0.25 * cores as f64 {
            term.warn(&Warning::Busy { load, cores });
        }
    }
    let on_cuda = plan.settings["device"].as_str().is_some_and(|device| device.starts_with("cuda"));
    if plan.settings["dtype"] == DtypeName::Bf16.to_string() && !on_cuda && !bf16::is_native() {
        term.warn(&Warning::EmulatedBf16);
    }
    let around = SessionOptions {
        output: &args.output.output_path,
        planned,
        fresh: args.output.fresh,
        launcher: launcher(ready, text.as_ref().map(NamedTempFile::path))?,
        text,
        stop: stop_on_ctrl_c(),
        memory_limit: ready.memory_limit,
        resident_limit: ready.resident_limit,
        term,
    };
    Ok(Session::open(plan, around)?)
}

/// `effattn lra · listops · ls-lra · 5000 steps · batch 32 · cpu AMD EPYC, 2 threads, avx512 · f32, fused kernels · limit 20 GiB`.
fn header(plan: &Plan, amount: String, ready: &MachineLimits) -> String {
    let machine = Machine::this();
    let place = match ready.device {
        DeviceName::Cpu => {
            format!("cpu {}, {}, {}", machine.cpu, plural(ready.threads as u64, "thread"), machine.simd)
        }
        device => {
            format!("{device} {}", ready.accelerator.as_deref().unwrap_or_default()).trim_end().to_owned()
        }
    };
    let dtype = listed(plan, |row| Some(row.dtype.clone()));
    // what another program computes has no kernels of ours
    let kernel = listed(plan, |row| (!row.kernel.is_empty()).then(|| row.kernel.clone()));
    let kernel = if kernel.is_empty() { String::new() } else { format!(", {kernel} kernels") };
    let (limit, command) = (Bytes(ready.memory_limit), &plan.command);
    format!("effattn {command} · {amount} · {place} · {dtype}{kernel} · limit {limit}")
}
