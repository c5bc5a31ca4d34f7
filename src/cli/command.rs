//! The command of a protocol, made from its entry in the table: flags, help, and what was said.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::export::Exports;
use super::value_names::{self, NamedValues};
use crate::protocol::definition::Flag;
use crate::protocol::grid::GridFlags;
use crate::protocol::lra::EVAL;
use crate::protocol::own_data::{DATA, TOKENIZER};
use crate::protocol::training::QUICK_SECONDS;
use crate::protocol::vision::WEIGHTS;
use crate::protocol::{self, Protocol};
use crate::run::manifest::Manifest;
use crate::run::shard::Shard;
use effattn_data::own::OwnFiles;
use effattn_model::family::attention;
use effattn_record::config::lists::{Models, Words};
use effattn_record::config::settings::{DtypeName, KernelName, Setting, Settings};
use effattn_record::config::suite::Suite;
use effattn_record::config::units::Seconds;

/// Which mechanisms.
#[derive(clap::Args)]
struct Mechanisms {
    /// Mechanisms, with knobs after a colon: full,ls:w=16,r=2 or all or 'ls*'
    #[arg(long, value_name = "LIST", help_heading = "Grid", hide_possible_values = true)]
    #[arg(value_parser = NamedValues::new(value_names::mechanisms, str::parse::<Models>))]
    model: Option<Models>,
    /// Mechanisms to leave out
    #[arg(long, value_name = "LIST", help_heading = "Grid", hide_possible_values = true)]
    #[arg(value_parser = NamedValues::new(value_names::mechanisms, str::parse::<Models>))]
    exclude: Option<Models>,
}

/// Settings of a paper, and single ones.
#[derive(clap::Args)]
struct SuiteArgs {
    /// Run a paper's table: a name (effattn list suites) or a TOML file. Grid flags select a subset of it
    #[arg(long, value_name = "NAME|FILE", help_heading = "Grid", hide_possible_values = true)]
    #[arg(value_parser = NamedValues::new(value_names::suites, value_names::text))]
    suite: Option<String>,
    /// Override one setting, including those of a suite: heads=8 or len=512 (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = Settings::set, help_heading = "Grid")]
    set: Vec<Settings>,
}

/// Where things are read and kept.
#[derive(clap::Args)]
pub struct OutputArgs {
    /// Compute one of N parts of the cells, such as 2/6; auto: the part assigned by Slurm, Kubernetes or AWS
    /// Batch. effattn merge joins the parts
    #[arg(long, value_name = "I/N|auto", value_parser = Shard::parse_or_auto, help_heading = "Budget")]
    pub shard: Option<Shard>,
    /// Print the plan with FLOPs, memory and estimated time; run nothing
    #[arg(long, help_heading = "Budget")]
    pub dry_run: bool,
    /// Start over even if the same run is unfinished
    #[arg(long, help_heading = "Output")]
    pub fresh: bool,
    /// Folder with data sets [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub data_dir: Option<PathBuf>,
    /// Folder for results
    #[arg(short, long, value_name = "DIR", default_value = "results", help_heading = "Output")]
    pub output_path: PathBuf,
    /// Folder for charts
    #[arg(long, value_name = "DIR", default_value = "plots", help_heading = "Output")]
    pub plots_dir: PathBuf,
    /// Draw no charts
    #[arg(long, help_heading = "Output")]
    pub no_plot: bool,
}

/// Flags of commands that time steps.
#[derive(clap::Args, Default)]
struct Timed {
    /// Compare with other programs' measurements: JSON lines or CSV with model, len, mode (infer or train) and ms,
    /// or the rows.csv of another run; several files are separated by commas, and entries without a program
    /// get the file name; several lines of one cell count by their median
    #[arg(long, value_name = "FILES", value_delimiter = ',', help_heading = "Output")]
    reference: Vec<PathBuf>,
    /// Mechanism that the others are ranked against [default: full; transformer-xl if full is not measured]
    #[arg(long, value_name = "MODEL", help_heading = "Output", value_parser = NamedValues::new(value_names::mechanisms, value_names::text), hide_possible_values = true)]
    baseline: Option<String>,
    /// Measure attention alone, without a model around it (--preset attention)
    #[arg(long, help_heading = "Grid", conflicts_with_all = ["preset", "suite"])]
    kernel_only: bool,
}

/// Flags of commands that measure other programs too.
#[derive(clap::Args, Default)]
struct Programs {
    /// Programs that are measured beside effattn: names (effattn list programs), TOML files or Python files
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Grid")]
    program: Vec<String>,
}

/// Flags of commands that train.
#[derive(clap::Args, Clone, Copy)]
pub struct Training {
    /// Time between checkpoints: the most training that is lost if the run is killed
    #[arg(long, value_name = "TIME", default_value = "10s", help_heading = "Output")]
    pub save_every: Seconds,
    /// Check every operation for NaN and infinity, forward and backward (slower). Without this flag, a step that
    /// fails is computed again to find the operation
    #[arg(long, help_heading = "Machine")]
    pub detect_anomaly: bool,
}

/// Parsed arguments of a protocol command.
pub struct CommandArgs {
    /// The protocol that runs it.
    pub protocol: &'static dyn Protocol,
    /// What is measured.
    pub flags: GridFlags,
    /// Where things are read and kept.
    pub output: OutputArgs,
    /// Where rows go besides.
    pub exports: Exports,
    /// What only training has.
    pub training: Option<Training>,
    /// Other programs' numbers.
    pub reference: Vec<PathBuf>,
    /// Programs whose cells are measured beside ours.
    pub programs: Vec<String>,
    /// The mechanism that others are compared with.
    pub baseline: Option<String>,
    /// The protocol's flags for something else, where its first one was given.
    pub alternative: Option<BTreeMap<&'static str, String>>,
}

/// The command of `protocol`.
pub fn command(protocol: &'static dyn Protocol) -> Command {
    let mut command = Command::new(protocol.name());
    command = Mechanisms::augment_args(command);
    command = command.args(flags(protocol).filter(|one| one.heading == "Grid").map(|one| arg(protocol, one)));
    command = SuiteArgs::augment_args(command);
    if let Some(quick) = &protocol.info().quick {
        let limit = format!("; fewer steps where all of them take longer than {QUICK_SECONDS} s");
        let limit = if protocol.trains() { limit } else { String::new() };
        command = command.arg(
            Arg::new("quick")
                .long("quick")
                .help(format!("{}{limit}", quick.help))
                .help_heading("Budget")
                .action(ArgAction::SetTrue),
        );
    }
    command = command.args(flags(protocol).filter(|one| one.heading != "Grid").map(|one| arg(protocol, one)));
    if protocol.curve().is_some() {
        command = Training::augment_args(command);
    }
    if protocol.info().times_steps() {
        command = Timed::augment_args(command);
    }
    if protocol.info().takes_programs {
        command = Programs::augment_args(command);
    }
    if let Some(instead) = &protocol.info().alternative {
        let first = instead.flags.first().map_or("", |flag| flag.name);
        for flag in instead.flags {
            let arg = Arg::new(flag.name).long(flag.name).value_name(flag.value).help(flag.help);
            let arg = arg.help_heading(instead.heading);
            let arg = if flag.name == first { arg } else { arg.requires(first) };
            command = command.arg(match flag.default {
                Some(default) => arg.default_value(default),
                None => arg,
            });
        }
    }
    // the groups of flags bring descriptions of their own
    let command = Exports::augment_args(OutputArgs::augment_args(command));
    command.about(protocol.info().about).long_about(None).after_help(protocol.info().examples)
}

/// The settings of `protocol` that have a flag; the others are set by `--set` and in suites.
fn flags(protocol: &'static dyn Protocol) -> impl Iterator<Item = &'static Setting> {
    protocol.info().settings().filter(|setting| setting.flag().is_some())
}

/// What `protocol` takes for `setting` where nothing is said, as on the command line.
fn usual(protocol: &dyn Protocol, setting: &Setting) -> Option<String> {
    fn text(value: &serde_json::Value) -> Option<String> {
        match value {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Number(number) => Some(number.to_string()),
            serde_json::Value::Array(all) => {
                all.iter().map(text).collect::<Option<Vec<_>>>().map(|all| all.join(","))
            }
            _ => None,
        }
    }
    let defaults = protocol.defaults(&GridFlags::default()).settings;
    let device = |key: &str| match key {
        "device" => Some("cpu".to_owned()),
        "dtype" => Some("f32".to_owned()),
        "kernel" => Some("fused".to_owned()),
        _ => None,
    };
    text(&serde_json::to_value(defaults).ok()?[setting.key]).or_else(|| device(setting.key))
}

/// The flag of `setting`.
fn arg(protocol: &dyn Protocol, setting: &'static Setting) -> Arg {
    let help = protocol.info().help(setting);
    let default = usual(protocol, setting).filter(|_| !help.contains("[default"));
    let help = default.map_or_else(|| help.clone(), |default| format!("{help} [default: {default}]"));
    let arg = Arg::new(setting.key).help(help).help_heading(setting.heading);
    let arg = arg.long(setting.flag().unwrap_or_default());
    let arg = match setting.key {
        "seeds" => arg.visible_alias("seed"),
        "rate" => arg.alias("learning-rate"),
        "rates" => arg.alias("learning-rates"),
        _ => arg,
    };
    if setting.value.is_empty() {
        return arg.action(ArgAction::SetTrue);
    }
    let arg = arg.value_name(setting.value).allow_negative_numbers(true); // its own words refuse one
    let names: Option<fn() -> Vec<&'static str>> = match setting.key {
        "task" => protocol.info().tasks.map(|tasks| tasks.names),
        "preset" => Some(protocol.info().presets),
        "mode" if protocol.info().times_steps() => Some(|| vec!["infer", "train", "decode"]),
        "mode" => Some(|| vec!["infer", "train"]),
        "device" => Some(|| vec!["cpu", "cuda", "metal"]),
        "dtype" => Some(|| DtypeName::WORDS.to_vec()),
        "kernel" => Some(|| KernelName::WORDS.to_vec()),
        _ => None,
    };
    match names {
        Some(names) => arg.value_parser(NamedValues::new(names, setting.read)).hide_possible_values(true),
        None => arg.value_parser(setting.read),
    }
}

/// The run called `run`: a folder, or below `results` the name of a run of `command` or of a suite; `latest` is the last one of
/// `command` that has weights. What is not found stays as it is, and is refused by who opens it.
pub fn run_folder(results: &Path, command: &str, run: String) -> String {
    let below = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        all.sort();
        all
    };
    let is_weights = |file: &PathBuf| file.extension().is_some_and(|end| end == "safetensors");
    let has_weights =
        |folder: &PathBuf| below(&folder.join("cells")).iter().any(|cell| below(cell).iter().any(is_weights));
    let named = PathBuf::from(&run);
    if named.join("cells").is_dir() {
        return run;
    }
    let own = results.join(command);
    let found = match run.as_str() {
        "latest" => {
            let runs = below(&own).into_iter().filter(|folder| !folder.is_symlink());
            runs.filter(has_weights).max_by_key(|folder| started(folder))
        }
        _ => [own].into_iter().chain(below(results)).map(|place| place.join(&run)).find(has_weights),
    };
    found.map_or(run, |folder| folder.display().to_string())
}

/// When the run in `folder` started, and its place among the runs of its command that started in the same second.
pub fn started(folder: &Path) -> (String, u64) {
    let manifest = Manifest::read(folder).ok().flatten();
    manifest.map_or_else(Default::default, |manifest| (manifest.start, manifest.order))
}

/// Files that are read of a folder with a tokenizer or an encoder.
const READ_OF_FOLDERS: [&str; 5] =
    ["tokenizer.json", "vocab.json", "merges.txt", "config.json", "model.safetensors"];

/// Adds `path`, or the files below it where it is a folder.
pub fn files_below(path: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(path) else { return files.push(path.to_owned()) };
    for entry in entries.flatten() {
        // a link to a folder may lead back here
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files_below(&entry.path(), files);
        } else {
            files.push(entry.path());
        }
    }
}

impl CommandArgs {
    /// Files that the command reads, as far as it names them: no export may take their place.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let said = self.flags.user_settings();
        let words = |list: Option<Words>| list.map_or_else(Vec::new, |Words(list)| list);
        let data = DATA.of(&said).and_then(|files| OwnFiles::name_of(&files, None).ok());
        let named = words(said.task.clone()).into_iter().chain(data);
        let own = named.filter_map(|name| OwnFiles::of(&name).ok().flatten());
        let mut all: Vec<PathBuf> =
            own.flat_map(|own| own.files.into_iter().chain([PathBuf::from(own.tokenizer)])).collect();
        let paths = [TOKENIZER.of(&said), WEIGHTS.of(&said), self.flags.suite.clone()];
        let paths = paths.into_iter().flatten().chain(words(said.from.clone()));
        all.extend(paths.chain(self.programs.iter().cloned()).map(PathBuf::from));
        all.extend(self.reference.iter().cloned());
        let parts = all.iter().flat_map(|path| READ_OF_FOLDERS.map(|name| path.join(name)));
        let parts: Vec<PathBuf> = parts.collect();
        all.extend(parts);
        // a run whose weights are tested, and a text or a folder of texts under its own name
        let folders = EVAL.of(&said).into_iter().chain(words(said.task.clone()));
        folders.for_each(|folder| files_below(Path::new(&folder), &mut all));
        all
    }

    /// What `matches` say to the command of `protocol`.
    pub fn from_matches(protocol: &'static dyn Protocol, matches: &ArgMatches) -> Result<Self> {
        let mut settings = Settings::NONE;
        for setting in flags(protocol) {
            if setting.value.is_empty() {
                if matches.get_flag(setting.key) {
                    settings = (setting.read)("true")?.over(settings);
                }
            } else if let Some(one) = matches.get_one::<Settings>(setting.key) {
                settings = one.clone().over(settings);
            }
        }
        let timed =
            if protocol.info().times_steps() { Timed::from_arg_matches(matches)? } else { Timed::default() };
        let programs = match protocol.info().takes_programs {
            true => Programs::from_arg_matches(matches)?.program,
            false => Vec::new(),
        };
        if timed.kernel_only {
            settings.preset = Some(attention::PRESET.to_owned());
        }
        let mechanisms = Mechanisms::from_arg_matches(matches)?;
        let given = SuiteArgs::from_arg_matches(matches)?;
        let keys: Vec<&str> = given.set.iter().flat_map(Settings::set_keys).collect();
        if let Some(key) =
            keys.iter().enumerate().find_map(|(at, key)| keys[..at].contains(key).then_some(key))
        {
            anyhow::bail!("--set {key} is given twice; give one of them");
        }
        let set = given.set.into_iter().fold(Settings::NONE, |all, one| one.over(all));
        let quick = protocol.info().quick.is_some() && matches.get_flag("quick");
        let Mechanisms { model, exclude } = mechanisms;
        if let Some(suite) = given.suite.as_ref().filter(|_| quick) {
            anyhow::bail!("--quick has sizes of its own and suite {suite} has others; give only one of them");
        }
        let output = OutputArgs::from_arg_matches(matches)?;
        if let Some(run) = EVAL.of(&settings) {
            settings = EVAL.settings(&run_folder(&output.output_path, protocol.name(), run)).over(settings);
        }
        let flags = GridFlags { settings, set, model, exclude, suite: given.suite, quick };
        let (trains, offers) = (protocol.curve().is_some(), protocol.info().alternative);
        let protocol = Self::runs(protocol, &flags)?;
        let training = trains.then(|| Training::from_arg_matches(matches));
        let instead = offers.filter(|instead| {
            instead.flags.first().is_some_and(|flag| matches.try_contains_id(flag.name).unwrap_or(false))
        });
        let values = instead.map(|instead| {
            let value = |flag: &Flag| {
                let value = matches.get_one::<String>(flag.name).cloned().unwrap_or_default();
                let is_run = flag.value.starts_with("RUN");
                if is_run { run_folder(&output.output_path, protocol.name(), value) } else { value }
            };
            instead.flags.iter().map(|flag| (flag.name, value(flag))).collect()
        });
        Ok(Self {
            protocol,
            flags,
            output,
            exports: Exports::from_arg_matches(matches)?,
            training: training.transpose()?,
            reference: timed.reference,
            programs,
            baseline: timed.baseline,
            alternative: values,
        })
    }

    /// The protocol that runs the suite: the command's, or one that it passes suites on to.
    fn runs(protocol: &'static dyn Protocol, flags: &GridFlags) -> Result<&'static dyn Protocol> {
        let Some(name) = flags.suite.as_deref().filter(|_| !protocol.info().delegates_to.is_empty()) else {
            return Ok(protocol);
        };
        let suite = Suite::load(name)?;
        let other = protocol.info().delegates_to.iter().find(|other| **other == suite.protocol);
        let Some(other) = other.and_then(|name| protocol::find(name)) else { return Ok(protocol) };
        Ok(other)
    }
}
