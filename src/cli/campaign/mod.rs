//! `effattn campaign`: commands that are run one after another on one device, each with its share of the time.

mod child;
mod description;
mod estimate;
mod record;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use self::child::{Ended, Ending, LOG_FILE, OUTPUT};
use self::description::{BUILTIN_CAMPAIGNS, Campaign, Part, wrong_time};
use self::record::{FILE, PartRecord, PartState, Record};
use super::command_line::command_line;
use super::interrupt::stop_on_ctrl_c;
use super::value_names::{NamedValues, text};
use crate::run::folder::lock_run;
use crate::run::manifest::{argv, now};
use crate::run::{BUILD, CancelToken, RunError};
use crate::term::{self, Term, Warning, clock};
use effattn_record::config::settings::DeviceName;
use effattn_record::config::units::Bytes;
use effattn_record::file;
use effattn_record::report::table::Table;

const EXAMPLES: &str = "\
Examples:
  # Everything about a GPU in ten minutes; again: what is unfinished goes on
  effattn campaign gpu
  # What would run, and how long it would take
  effattn campaign cpu --dry-run
  # One part, with more time
  effattn campaign gpu --only cos-table5 --minutes 20
  # Parts of your own
  effattn campaign ./mine.toml -o results/mine
  # What came of it
  effattn report results/campaign-gpu -o gpu.html

A part that fails or runs out of time is a line of the table, and the campaign goes on. The exit code is 1 if a part failed or could not run; running out of time is no failure.";

/// Bytes that a campaign's folder should not pass: it is carried from machine to machine.
const MOST_BYTES: u64 = 16 << 20;
/// How long the devices may take to answer.
const DEVICES: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// gpu, cpu, or a TOML file
    #[arg(value_name = "NAME|FILE", hide_possible_values = true)]
    #[arg(value_parser = NamedValues::new(names, text))]
    campaign: String,
    /// Minutes for all parts together; each has its share of them [default: the campaign's]
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,
    /// cpu, cuda, cuda:1 or metal [default: the campaign's]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
    /// Run only these parts
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// Few cells of every part, in two minutes
    #[arg(long)]
    quick: bool,
    /// Print the parts with their estimated times; run nothing
    #[arg(long)]
    dry_run: bool,
    /// Start over, finished parts included; with --only, these parts
    #[arg(long)]
    fresh: bool,
    /// Folder for everything that the campaign writes [default: results/campaign-NAME]
    #[arg(short, long, value_name = "DIR")]
    output_path: Option<PathBuf>,
}

fn names() -> Vec<&'static str> {
    BUILTIN_CAMPAIGNS.iter().map(|(name, _)| *name).collect()
}

pub fn run(args: &Args, mut term: Term) -> Result<u8> {
    let mut campaign = Campaign::load(&args.campaign, args.quick)?;
    campaign.device = args.device.unwrap_or(campaign.device);
    campaign.minutes = args.minutes.unwrap_or(campaign.minutes);
    if let Some(why) = wrong_time(campaign.minutes) {
        bail!("--minutes {} is {why}", campaign.minutes);
    }
    let whole = Record::new(&campaign, args.quick);
    campaign.keep_only(&args.only)?;
    let default = || Path::new("results").join(format!("campaign-{}", campaign.name));
    let folder = args.output_path.clone().unwrap_or_else(default);
    let stop = stop_on_ctrl_c();
    if args.dry_run {
        let table = estimate::table(&campaign, &folder, &stop)?;
        term::data(&table.terminal(term::width()))?;
        return Ok(0);
    }
    usable(campaign.device, &stop)?;
    file::ensure_writable(&folder).map_err(|error| {
        anyhow!("--output-path {} cannot be written ({error}); choose another folder", folder.display())
    })?;
    let _lock = lock_run(&folder, &stop)?;
    let record = continued(whole, &folder, args.fresh, &campaign)?;
    let mut open = OpenCampaign { campaign, folder, record, fresh: args.fresh, stop };
    let result = open.run_parts(&mut term);
    term.finish_progress();
    open.record.end = Some(now());
    open.record.write(&open.folder)?;
    let stopped = matches!(result, Err(RunError::Stopped));
    if !stopped {
        result?;
    }
    open.report(&term)?;
    match stopped {
        true => {
            let line = command_line(argv().into_iter());
            term.info(&format!("stopped: finished parts are kept. Resume with: {line}"));
            Ok(term::STOPPED)
        }
        false => Ok(open.code()),
    }
}

/// Asks a process of its own, which gives the device back, whether `device` can be used.
fn usable(device: DeviceName, stop: &CancelToken) -> Result<()> {
    if device == DeviceName::Cpu {
        return Ok(());
    }
    let words = ["list", "devices", "--json"].map(str::to_owned);
    let text = child::printed(&words, DEVICES, stop)?.context("effattn list devices does not answer")?;
    let devices: Vec<Value> = serde_json::from_str(&text).context("effattn list devices")?;
    let name = device.to_string();
    let found = devices.iter().find(|one| one["name"] == *name);
    match found {
        Some(found) if found["usable"] == true => Ok(()),
        Some(found) => {
            bail!("{}; for this processor: effattn campaign cpu", found["what"].as_str().unwrap_or(&name))
        }
        None => bail!("--device {device} is not there; `effattn list devices` shows what is"),
    }
}

/// The record in `folder` that `whole` continues, or `whole`. With `fresh` another campaign's record gives way, and of its own the parts
/// of `campaign` are begun anew.
fn continued(whole: Record, folder: &Path, fresh: bool, campaign: &Campaign) -> Result<Record> {
    let found = match Record::read(folder) {
        Err(RunError::Damaged { .. }) if fresh => None,
        Err(error @ RunError::Damaged { .. }) => bail!("{error}, or start the campaign over with --fresh"),
        found => found?,
    };
    let Some(mut found) = found else { return Ok(whole) };
    match found.differs(&whole) {
        Some(_) if fresh => return Ok(whole),
        Some(other) => bail!(
            "{} holds {other}; choose another folder with --output-path, or start over with --fresh",
            folder.join(FILE).display()
        ),
        None => {}
    }
    for part in campaign.parts.iter().filter(|_| fresh) {
        if let Some(record) = found.part(&part.name) {
            *record = PartRecord { name: part.name.clone(), ..PartRecord::default() };
        }
    }
    Ok(found)
}

/// A campaign whose folder is locked.
struct OpenCampaign {
    campaign: Campaign,
    folder: PathBuf,
    record: Record,
    fresh: bool,
    stop: CancelToken,
}

impl OpenCampaign {
    /// Runs the parts that are not finished. What a part leaves of its time goes to those behind it.
    fn run_parts(&mut self, term: &mut Term) -> Result<(), RunError> {
        let total = 60.0 * self.campaign.minutes;
        let mut left = self.campaign.parts.clone();
        left.retain(|part| {
            let state = self.record.part(&part.name).map_or(PartState::Waiting, |record| record.state);
            if state.is_final() {
                term.info(&format!("{}: {}, kept (--fresh runs it again)", part.name, state.word()));
            }
            !state.is_final()
        });
        let start = Instant::now();
        term.start_progress(total);
        self.record.write(&self.folder)?;
        for (index, part) in left.iter().enumerate() {
            let shares: f64 = left[index..].iter().map(|part| part.minutes).sum();
            let rest = (total - start.elapsed().as_secs_f64()).max(0.0);
            self.run_part(part, Duration::from_secs_f64(rest * part.minutes / shares), term)?;
        }
        Ok(())
    }

    fn run_part(&mut self, part: &Part, limit: Duration, term: &mut Term) -> Result<(), RunError> {
        let seconds = limit.as_secs_f64();
        let folder = self.folder.join(&part.name);
        std::fs::create_dir_all(&folder).map_err(RunError::file(&folder))?;
        let words = words(part, self.campaign.device, &folder, self.fresh);
        let name = &part.name;
        term.at(&format!("{name}, at most {}", clock(seconds)));
        self.update(name, |record| {
            record.state = PartState::Running;
            record.argv.clone_from(&words);
            record.starts.push(now());
            record.build = BUILD.to_owned();
        })?;
        let start = Instant::now();
        let mut failed = None;
        let heard = &mut |line: &str| {
            term.at(&format!("{name}: {line}"));
            failed = line.split_once(": failed: ").map(|(_, why)| why.to_owned()).or(failed.take());
        };
        let Ended { ending, last } = child::run(&words, &folder, limit, &self.stop, heard)?;
        let took = start.elapsed().as_secs_f64();
        let (state, exit, said) = match &ending {
            Ending::Exited(0) => (PartState::Done, Some(0), None),
            Ending::Exited(1) => (PartState::Failed, Some(1), Some(failure(part, last, failed))),
            Ending::Exited(code) => (PartState::Refused, Some(*code), last),
            Ending::Died(how) => {
                let last = last.map_or_else(String::new, |line| format!(": {line}"));
                (PartState::Refused, None, Some(format!("{how}{last}")))
            }
            Ending::Timeout => (PartState::Timeout, None, Some(progress(last, "its time was over"))),
            Ending::Stopped => (PartState::Stopped, None, Some(progress(last, "stopped"))),
        };
        let said = said.map(|text| text.strip_prefix("error: ").unwrap_or(&text).to_owned());
        let line = match &said {
            None => format!("{name}: {} in {}", state.word(), clock(took)),
            Some(said) => format!("{name}: {} after {}: {said}", state.word(), clock(took)),
        };
        self.update(name, |record| {
            (record.state, record.exit, record.said) = (state, exit, said);
            record.seconds += took;
        })?;
        term.advance(seconds, &line);
        if term.has_bar() {
            term.info(&line);
        }
        if ending == Ending::Stopped { Err(RunError::Stopped) } else { Ok(()) }
    }

    fn update(&mut self, name: &str, change: impl FnOnce(&mut PartRecord)) -> Result<(), RunError> {
        if let Some(part) = self.record.part(name) {
            change(part);
        }
        self.record.write(&self.folder)
    }

    /// The table of all parts, and what can be done now.
    fn report(&self, term: &Term) -> Result<()> {
        let record = &self.record;
        let count = record.parts.iter().filter(|part| part.state.is_final()).count();
        let mut table = Table {
            title: format!(
                "Campaign {} on {}: {count} of {} parts are finished",
                record.campaign,
                record.device,
                record.parts.len()
            ),
            columns: ["part", "state", "time", "why"].map(str::to_owned).to_vec(),
            ..Table::default()
        };
        for part in &record.parts {
            let time = if part.starts.is_empty() { "-".to_owned() } else { clock(part.seconds) };
            let said = part.said.clone().unwrap_or_default();
            table.rows.push(vec![part.name.clone(), part.state.word().to_owned(), time, said]);
        }
        let folder = self.folder.display();
        table.notes.push(format!(
            "What each part printed: {folder}/PART/{OUTPUT}; what it said meanwhile: {LOG_FILE}."
        ));
        if record.parts.iter().any(|part| self.is_asked(part) && !part.state.is_final()) {
            let line = command_line(argv().into_iter());
            table.notes.push(format!("The same command continues what is not finished: {line}"));
        }
        table.notes.push(format!("Tables and charts of everything: effattn report {folder} -o report.html"));
        term::data(&table.terminal(term::width()))?;
        let (bytes, largest) = size(&self.folder);
        let most = MOST_BYTES;
        match largest.filter(|_| bytes > most) {
            Some((path, of)) => term.warn(&Warning::Other(format!(
                "{folder} has {}, more than {}; its largest file is {} ({})",
                Bytes(bytes),
                Bytes(most),
                path.display(),
                Bytes(of)
            ))),
            None => term.info(&format!("folder: {folder} ({})", Bytes(bytes))),
        }
        Ok(())
    }

    /// Whether `--only` names the part, or nothing.
    fn is_asked(&self, part: &PartRecord) -> bool {
        self.campaign.parts.iter().any(|one| one.name == part.name)
    }

    /// The exit code: of the parts that were asked for.
    fn code(&self) -> u8 {
        let bad = |part: &PartRecord| matches!(part.state, PartState::Failed | PartState::Refused);
        if self.record.parts.iter().filter(|part| self.is_asked(part)).any(bad) { term::FAILED } else { 0 }
    }
}

/// The words of the child that runs `part` on `device` with its files in `folder`.
fn words(part: &Part, device: DeviceName, folder: &Path, fresh: bool) -> Vec<String> {
    let mut words = part.command.clone();
    words.extend(["--device".to_owned(), device.to_string()]);
    let folder = folder.display();
    if part.checks() {
        words.extend(["--export-json".to_owned(), format!("{folder}/check.json")]);
        return words;
    }
    words.extend(["--output-path".to_owned(), folder.to_string(), "--no-plot".to_owned()]);
    if fresh {
        words.push("--fresh".to_owned());
    }
    words
}

/// What a part says whose exit code is 1; `failed`: why the last cell of those that failed did.
fn failure(part: &Part, last: Option<String>, failed: Option<String>) -> String {
    if let Some(line) = last.filter(|line| line.starts_with("error: ")) {
        return line;
    }
    let what = match failed {
        _ if part.checks() => "a golden file is red".to_owned(),
        Some(why) => format!("a cell failed: {why}"),
        None => "a cell failed".to_owned(),
    };
    format!("{what}; see {}/{OUTPUT}", part.name)
}

/// The line that says how many cells are done, where there is one.
fn progress(last: Option<String>, otherwise: &str) -> String {
    let done = last.as_deref().and_then(|line| line.strip_prefix("stopped: "));
    let done = done.and_then(|line| line.split('.').next());
    done.map_or_else(|| otherwise.to_owned(), |done| format!("{otherwise}: {done}"))
}

/// Bytes of all files below `folder`, and the largest.
fn size(folder: &Path) -> (u64, Option<(PathBuf, u64)>) {
    let (mut total, mut largest): (u64, Option<(PathBuf, u64)>) = (0, None);
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(next) else { continue };
        for entry in entries.flatten() {
            let Ok(kind) = entry.metadata() else { continue }; // of a link itself
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                total += kind.len();
                if largest.as_ref().is_none_or(|(_, most)| kind.len() > *most) {
                    largest = Some((entry.path(), kind.len()));
                }
            }
        }
    }
    (total, largest)
}
