//! The command line: arguments to plans, outcomes to exit codes.

mod campaign;
mod check;
mod check_program;
mod command;
mod command_line;
mod compare;
mod curves;
mod doctor;
mod dry_run;
mod export;
mod fetch;
mod finish;
mod golden;
mod interrupt;
pub mod list;
mod merge;
mod open_run;
mod pages;
pub mod plot;
mod quick;
mod report;
mod report_overview;
mod report_suites;
mod run;
mod status;
mod stored_drawings;
mod stored_runs;
mod submit;
mod value_names;
mod worker;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use log::Level;

use crate::program::{candle_flash, description};
use crate::protocol;
use crate::run::RunError;
use crate::term::{Color, STOPPED, Term, USAGE, Verbosity, is_closed};
use effattn_kernel::device::simd;
use effattn_record::config::settings::Setting;
use effattn_record::text::visible as visible_text;

const EXAMPLES: &str = "\
Examples:
  # A table and charts in about a minute
  effattn speed --quick
  # Steps per second against length
  effattn speed --len 1024..8192 --model full,ls
  # The longest length that fits into memory
  effattn memory --model all --fit 2GiB
  # What a paper's table would take on this machine
  effattn speed --suite cos-table5 --dry-run

Exit codes: 0 success (running out of memory or time is a result); 1 a cell or a check failed; 2 wrong usage, configuration or data; 130 interrupted.";

/// Benchmarks and reproduces efficient-attention transformers.
#[derive(Parser)]
#[command(name = "effattn", version, about, after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
}

/// Flags of every command.
#[derive(clap::Args)]
struct GlobalArgs {
    /// Print only results, warnings and errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Verbosity")]
    quiet: bool,
    /// Print what every worker does
    #[arg(short, long, global = true, help_heading = "Verbosity")]
    verbose: bool,
    /// Colours on stderr
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", help_heading = "Verbosity")]
    #[arg(value_parser = ["auto", "always", "never"])]
    color: String,
}

impl GlobalArgs {
    fn term(&self) -> Term {
        let verbosity = match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        };
        let color = match self.color.as_str() {
            "always" => Color::Always,
            "never" => Color::Never,
            _ => Color::Auto,
        };
        Term::new(verbosity, color)
    }
}

// A doc comment here would take the place of the program's own description.
#[derive(Subcommand)]
enum Tool {
    /// Verify mechanisms and models against golden files
    Check(check::Args),
    /// Check and measure one device in ten minutes: parts, each with its share of the time
    Campaign(campaign::Args),
    /// Show measured next to published numbers for all runs, as Markdown or HTML
    Report(report::Args),
    /// Compare two runs: ratios with confidence intervals
    Compare(compare::Args),
    /// Look at this machine: processor, devices, data, programs, steadiness of times
    Doctor(doctor::Args),
    /// Join the shards of a run, or runs of several machines, into one run
    Merge(merge::Args),
    /// Write or submit the jobs that run a command's cells on a cluster
    Submit(submit::Args),
    /// Show the progress of runs and shards, and the time that is left
    Status(status::Args),
    /// Plot attention patterns and matrices, norms, papers' figures, or charts of a run
    Plot {
        #[command(subcommand)]
        what: plot::PlotCommand,
    },
    /// Download a data set into the data folder, or generate it there
    Fetch(fetch::Args),
    /// Write a golden file of effattn's own definition, for code that is no program
    Golden(golden::Args),
    /// List mechanisms, tasks, suites, devices, presets and programs
    List {
        #[command(subcommand)]
        what: list::ListCommand,
    },
    /// Print what a program for --program is written with
    Programs {
        #[command(subcommand)]
        what: ProgramFile,
    },
    /// Print shell completions
    Completions(pages::Completions),
    /// Print the manual page
    Man(pages::Man),
    #[command(hide = true)]
    Worker(worker::Args),
    /// The program candle-flash
    #[command(hide = true)]
    CandleFlash,
}

/// Files for who writes a program.
#[derive(Clone, Copy, Subcommand)]
enum ProgramFile {
    /// Print effattn_program.py: a function becomes a program (needs torch)
    Python,
}

/// The whole command line: one command per protocol, and the tools.
fn tree() -> Command {
    let commands = protocol::protocols().into_iter().map(command::command);
    Tool::augment_subcommands(Cli::command().subcommands(commands))
        .subcommand_required(true)
        .arg_required_else_help(true)
}

/// Parses the command line, runs the command, and returns its exit code.
pub fn main() -> ExitCode {
    effattn_kernel::device::signals::ignore_file_size_limit();
    effattn_kernel::device::alloc::keep_pages();
    effattn_record::set_build_commit(option_env!("EFFATTN_COMMIT"));
    protocol::declare_settings();
    let matches = match tree().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return ExitCode::from(usage(&error)),
    };
    let global = match GlobalArgs::from_arg_matches(&matches) {
        Ok(global) => global,
        Err(error) => return ExitCode::from(usage(&error)),
    };
    init_log(global.verbose);
    let term = global.term();
    let result = dispatch(&matches, &global);
    description::remove_files();
    ExitCode::from(result.unwrap_or_else(|error| code_of(&error, &term)))
}

fn dispatch(matches: &ArgMatches, global: &GlobalArgs) -> anyhow::Result<u8> {
    let term = global.term();
    simd::limit(simd::asked().as_deref()).map_err(anyhow::Error::msg)?;
    if let Some((name, matches)) = matches.subcommand()
        && let Some(protocol) = protocol::find(name)
    {
        return run::run(protocol, matches, term);
    }
    match Tool::from_arg_matches(matches)? {
        Tool::Check(args) if !args.program.is_empty() => check_program::run(&args, term),
        Tool::Check(args) => check::run(&args, term),
        Tool::Campaign(args) => campaign::run(&args, term),
        Tool::Fetch(args) => fetch::run(&args, &term),
        Tool::Golden(args) => golden::run(&args, &term),
        Tool::List { what } => {
            list::run(&what, crate::term::width()).and_then(|text| Ok(crate::term::data(&text).map(|()| 0)?))
        }
        Tool::Report(args) => report::run(&args, &term),
        Tool::Compare(args) => compare::run(&args, &term),
        Tool::Doctor(args) => doctor::run(&args, &term),
        Tool::Merge(args) => merge::run(&args, &term),
        Tool::Submit(args) => submit::run(&args, term),
        Tool::Status(args) => status::run(&args, &term),
        Tool::Plot { what } => plot::run(&what, &term),
        Tool::Programs { what: ProgramFile::Python } => {
            Ok(crate::term::data(description::PYTHON_HELPER).map(|()| 0)?)
        }
        Tool::Completions(args) => pages::completions(&args),
        Tool::Man(args) => pages::man(&args),
        Tool::Worker(args) => worker::run(&args),
        Tool::CandleFlash => candle_flash::serve().map(|()| 0),
    }
}

/// The exit code of an error, after saying what it is.
fn code_of(error: &anyhow::Error, term: &Term) -> u8 {
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        return usage(error); // of the command that submit was given
    }
    let closed = error.chain().any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(is_closed));
    if closed {
        return 0; // nobody reads on: `effattn ... | head -1`
    }
    if error.chain().any(|cause| matches!(cause.downcast_ref::<RunError>(), Some(RunError::Stopped))) {
        return STOPPED;
    }
    term.error(&words(error));
    USAGE
}

/// The error and its causes, each said once: many messages end with their cause.
fn words(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push_str(if said.is_empty() { "" } else { ": " });
            said.push_str(&cause);
        }
    }
    said
}

fn init_log(verbose: bool) {
    let level = if verbose { "info" } else { "warn" };
    let env = env_logger::Env::new().filter_or("EFFATTN_LOG", level);
    let mut builder = env_logger::Builder::from_env(env);
    // as Term says it; who debugs wants to know where it comes from
    builder.format(|out, record| {
        let style = out.default_level_style(record.level());
        let text = visible_text(&record.args().to_string());
        match record.level() {
            Level::Error => writeln!(out, "{style}error:{style:#} {text}"),
            Level::Warn => writeln!(out, "{style}warning:{style:#} {text}"),
            Level::Info => writeln!(out, "{text}"),
            level => writeln!(out, "{style}{level}{style:#} {}: {text}", record.target()),
        }
    });
    let _ = builder.try_init();
}

/// What to say of a flag that other protocols take.
fn refused(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let setting = Setting::all()
        .into_iter()
        .find(|setting| setting.flag().is_some_and(|name| format!("--{name}") == *flag))?;
    let name = std::env::args_os().find_map(|word| protocol::find(word.to_str()?))?;
    Some(protocol::refusal(name, setting.key, flag))
}

/// Prints clap's verdict: help and version on stdout, mistakes on stderr in at most two lines.
fn usage(error: &clap::Error) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            drop(error.print());
            return 0;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            drop(error.print());
            return USAGE;
        }
        ErrorKind::UnknownArgument => {
            if let Some(said) = refused(error) {
                Term::new(Verbosity::Quiet, Color::Auto).error(&said);
                return USAGE;
            }
        }
        _ => {}
    }
    let text = error.render().to_string();
    let (mut said, mut usage) = (Vec::new(), None);
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.strip_prefix("Usage: ") {
            Some(line) => usage = Some(line.to_owned()),
            None if line.starts_with("For more information") => {}
            None => said.push(line.strip_prefix("error: ").unwrap_or(line).to_owned()),
        }
    }
    let asked = std::env::args().nth(1).filter(|word| tree().find_subcommand(word).is_some());
    let asked = asked.map_or_else(|| "effattn".to_owned(), |name| format!("effattn {name}"));
    let command = usage.as_deref().and_then(|usage| usage.split(" [").next()).unwrap_or(&asked);
    let command = command.split(" <").next().unwrap_or(command).split(" -").next().unwrap_or(command);
    let term = Term::new(Verbosity::Quiet, Color::Auto);
    term.error(&sentence(&said));
    if std::io::stderr().is_terminal() || usage.is_some() {
        drop(writeln!(std::io::stderr(), "see `{} --help`", command.trim()));
    }
    USAGE
}

/// Lines of one mistake as a sentence: what a line with a colon at its end lists follows it.
fn sentence(lines: &[String]) -> String {
    let mut said = String::new();
    let mut lists = false;
    for line in lines {
        let values = line.strip_prefix("[possible values: ").and_then(|rest| rest.strip_suffix(']'));
        let between = match said.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) if lists && !line.starts_with("tip: ") => ", ",
            Some(_) => "; ",
        };
        said.push_str(between);
        said.push_str(&values.map_or_else(|| line.clone(), |values| format!("possible values: {values}")));
        lists |= line.ends_with(':');
    }
    said
}

/// The commands that people see, for manual pages and completions.
fn visible() -> Command {
    let full = tree();
    let visible = full.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("effattn")
        .version(env!("CARGO_PKG_VERSION"))
        .about(full.get_about().cloned().unwrap_or_default())
        .after_help(EXAMPLES)
        .args(full.get_arguments().cloned())
        .subcommands(visible.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::sentence;

    #[test]
    fn lines_of_a_mistake_become_a_sentence() {
        let of = |lines: &[&str]| sentence(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        for (lines, says) in [
            (&["these are missing:", "<A>", "--b <B>"][..], "these are missing: <A>, --b <B>"),
            (&["invalid 'x'", "[possible values: a, b]"][..], "invalid 'x'; possible values: a, b"),
            (&["unexpected 'x'", "tip: did you mean 'y'?"][..], "unexpected 'x'; tip: did you mean 'y'?"),
            (&["alone"][..], "alone"),
        ] {
            assert_eq!(of(lines), says);
        }
    }
}
