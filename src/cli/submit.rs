//! `effattn submit`: a command's cells as a job array of the scheduler that is there.

mod kubernetes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};

use super::command::CommandArgs;
use super::command_line::command_line;
use super::open_run;
use crate::protocol;
use crate::run::plan::Plan;
use crate::run::plan_file::PlanFile;
use crate::run::shard::parent;
use crate::term::{Term, clock};
use effattn_record::config::units::{Bytes, Seconds};
use effattn_record::config::unknown;
use effattn_record::file;
use effattn_record::text::plural;

const EXAMPLES: &str = "\
Examples:
  # Write jobs/ls-table1/: look at it, then sh jobs/ls-table1/submit.sh
  effattn submit --shards 6 lra --suite ls-table1
  # A GPU for each task, submitted at once
  effattn submit --gpus 1 --option partition=gpu --submit \\
      lra --suite ls-table1
  # Kubernetes
  effattn submit --scheduler kubernetes --option image=effattn:1 \\
      --option claim=results lra --suite ls-table1

Two jobs are written: an array that computes one shard of the cells per task, and a second job that joins the shards and makes the report. A task that is preempted or exceeds its time limit resumes from its checkpoint. Time and memory are estimated from a few steps that are tried on this machine, with a margin.";

/// Seconds before the end of a task's time at which it writes its checkpoint.
const WARNING: u64 = 120;

/// Who runs jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scheduler {
    /// Scripts for sbatch
    Slurm,
    /// An indexed job for kubectl; --option image=..., claim=... (a volume claim, mounted at /runs)
    Kubernetes,
    /// An array job for aws batch; --option queue=..., definition=...
    AwsBatch,
}

impl Scheduler {
    /// Options that its files have a place for; none: its jobs take all.
    fn options(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Slurm => None,
            Self::Kubernetes => Some(["image", "claim"]),
            Self::AwsBatch => Some(["queue", "definition"]),
        }
    }
}

/// Options of sbatch that submit writes, and what to do instead of giving them.
const OWN_OPTIONS: [(&str, &str); 10] = [
    ("array", "choose the number of tasks with --shards"),
    ("time", "choose the time of a task with --time"),
    ("mem", "choose the memory of a task with --memory"),
    ("cpus-per-task", "choose the CPUs of a task with --cpus"),
    ("gres", "choose the GPUs of a task with --gpus"),
    ("job-name", EDIT),
    ("output", EDIT),
    ("open-mode", EDIT),
    ("signal", EDIT),
    ("requeue", EDIT),
];
const EDIT: &str = "leave it out, or change it in the files that are written";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Scheduler that runs the jobs
    #[arg(long, value_enum, default_value = "slurm")]
    scheduler: Scheduler,
    /// Number of tasks that the cells are distributed over
    #[arg(long, value_name = "N", default_value = "8", value_parser = |text: &str| whole(text, 1, 100_000))]
    shards: u64,
    /// GPUs per task
    #[arg(long, value_name = "N", default_value = "0", value_parser = |text: &str| whole(text, 0, 4096))]
    gpus: u64,
    /// CPUs per task [default: the command's --threads, or all CPUs of this machine]
    #[arg(long, value_name = "N", value_parser = |text: &str| whole(text, 1, 4096))]
    cpus: Option<u64>,
    /// Time limit per task [default: 1.5 times the estimate for the longest shard, plus ten minutes]
    #[arg(long, value_name = "TIME")]
    time: Option<Seconds>,
    /// Memory per task [default: 1.5 times the estimate for the largest cell, plus 1 GiB]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Pass an option to the scheduler: partition=gpu, account=me (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = option)]
    option: Vec<(String, String)>,
    /// Folder for the job files, with a subfolder per suite or command
    #[arg(long, value_name = "DIR", default_value = "jobs")]
    jobs_dir: PathBuf,
    /// Submit the jobs at once, instead of only writing them
    #[arg(long)]
    submit: bool,
    /// The command whose cells are run, with its flags
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A whole number from `least` to `most`.
fn whole(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("expected a whole number from {least} to {most}, such as 1"))
}

fn option(text: &str) -> Result<(String, String), String> {
    let plain = |key: &str| {
        let mut letters = key.chars();
        letters.next().is_some_and(|first| first.is_ascii_alphanumeric())
            && letters.all(|letter| letter.is_ascii_alphanumeric() || "-_".contains(letter))
    };
    match text.split_once('=') {
        Some((key, value)) if plain(key) && value.trim().is_empty() => {
            Err(format!("{key} has no value; give it as in {key}=VALUE, or leave the option out"))
        }
        Some((key, value)) if plain(key) && !text.contains('\n') => Ok((key.to_owned(), value.to_owned())),
        Some((key, _)) if plain(key.trim_start_matches('-')) => {
            Err(format!("the name of an option without dashes: {}", text.trim_start_matches('-')))
        }
        _ => Err("expected KEY=VALUE such as partition=gpu; a key is letters, digits, - and _".to_owned()),
    }
}

/// Makes sure that the scheduler's files have a place for every option.
fn check_options(args: &Args) -> Result<()> {
    let Some(known) = args.scheduler.options() else {
        for (key, _) in &args.option {
            if let Some((_, instead)) = OWN_OPTIONS.iter().find(|(own, _)| own == key) {
                bail!("--option {key}: submit writes {key} itself; {instead}");
            }
        }
        return Ok(());
    };
    match args.option.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, _)) => bail!("--option: {}", unknown("key", key, known)),
        None => Ok(()),
    }
}

/// What jobs are written from.
struct Job<'a> {
    args: &'a Args,
    name: String,
    /// Words of the command, without the shard.
    words: Vec<String>,
    cpus: u64,
    seconds: f64,
    bytes: u64,
    /// Folder of the shards.
    shards: PathBuf,
    /// Folder of the jobs.
    folder: PathBuf,
    program: PathBuf,
    here: PathBuf,
}

pub fn run(args: &Args, mut term: Term) -> Result<u8> {
    check_options(args)?;
    let asked = asked(&args.command)?;
    let (plan, planned) = open_run::whole(&asked, &mut term)?;
    let cells = plan.cells.len() as u64;
    ensure!(
        args.shards <= cells,
        "{} cannot be distributed over {}; choose --shards {cells}{}",
        plural(cells, "cell"),
        plural(args.shards, "task"),
        if cells > 1 { " or fewer" } else { "" }
    );
    let job = Job::new(args, &asked, &plan, &planned)?;
    for (name, text) in job.files()? {
        let path = job.folder.join(name);
        file::write_user_file(&path, text.as_bytes()).with_context(|| path.display().to_string())?;
    }
    term.info(&format!(
        "{} cells in {} tasks of at most {}, {} and {} processors: {}",
        plan.cells.len(),
        args.shards,
        clock(job.seconds),
        Bytes(job.bytes),
        job.cpus,
        job.folder.display()
    ));
    let script = job.folder.join("submit.sh");
    if !args.submit {
        term.info(&format!("review these files, then run: sh {}", script.display()));
        return Ok(0);
    }
    let status = Command::new("sh").arg(&script).status().context("sh cannot be started")?;
    ensure!(status.success(), "sh {} ended with {status}; its output is above", script.display());
    Ok(0)
}

/// The command that `words` name.
fn asked(words: &[String]) -> Result<CommandArgs> {
    let name = words.first().map_or("", String::as_str);
    let Some(protocol) = protocol::find(name) else {
        let names: Vec<&str> = protocol::protocols().iter().map(|protocol| protocol.name()).collect();
        bail!("submit takes a command with cells, such as {}; found {name:?}", names.join(", "));
    };
    let said = |flag: &str| words.iter().any(|word| word == flag || word.starts_with(&format!("{flag}=")));
    for flag in ["--shard", "--dry-run", "--fresh"] {
        ensure!(
            !said(flag),
            "submit sets --shard itself and takes no {flag} of the command; leave {flag} out"
        );
    }
    for flag in ["--export-json", "--export-csv", "--export-markdown"] {
        ensure!(
            !said(flag),
            "every task would write its part to the file of {flag}; leave {flag} out: the joined run has \
             all rows in its rows.csv, and effattn report RUN -o report.md writes the tables"
        );
    }
    let words = std::iter::once("effattn".to_owned()).chain(words.iter().cloned());
    let matches = super::tree().try_get_matches_from(words)?;
    let (_, matches) = matches.subcommand().context("no command")?;
    CommandArgs::from_matches(protocol, matches)
}

impl<'a> Job<'a> {
    fn new(args: &'a Args, asked: &CommandArgs, plan: &Plan, planned: &PlanFile) -> Result<Self> {
        let owners = planned.assign_shards(args.shards as usize);
        let mut loads: BTreeMap<usize, f64> = BTreeMap::new();
        for (owner, cell) in owners.iter().zip(&plan.cells) {
            *loads.entry(*owner).or_default() += cell.seconds;
        }
        let longest = loads.values().copied().fold(0.0, f64::max);
        let seconds = args.time.map_or(1.5 * longest + 600.0, |time| time.0);
        // where no step was tried: weights, moments, and about as much again for a batch
        let cell = |cell: &crate::run::plan::Cell| cell.memory.unwrap_or(4 * cell.row.bytes.unwrap_or(0));
        let largest = plan.cells.iter().map(cell).max().unwrap_or(0);
        let bytes = args.memory.map_or((1 << 30) + largest / 2 * 3, |memory| memory.0);
        let cpus = args.cpus.unwrap_or(plan.threads as u64);
        let here = std::env::current_dir().context("the current folder no longer exists")?;
        let mut words = args.command.clone();
        if asked.flags.user_settings().threads.is_none() {
            words.extend(["--threads".to_owned(), cpus.to_string()]);
        }
        let name = file::plain_name(&plan.name);
        let folder = here.join(&args.jobs_dir).join(&name);
        std::fs::create_dir_all(&folder).with_context(|| format!("--jobs-dir {}", folder.display()))?;
        let shards = parent(&asked.output.output_path.join(&plan.name), &planned.plan);
        let program = std::env::current_exe().context("the path of the effattn program cannot be found")?;
        Ok(Self { args, name, words, cpus, seconds, bytes, shards, folder, program, here })
    }

    fn files(&self) -> Result<Vec<(&'static str, String)>> {
        match self.args.scheduler {
            Scheduler::Slurm => self.slurm(),
            Scheduler::Kubernetes => self.kubernetes(),
            Scheduler::AwsBatch => self.aws(),
        }
    }

    fn minutes(&self) -> u64 {
        (self.seconds / 60.0).ceil().clamp(1.0, 1e7) as u64
    }

    fn mebibytes(&self) -> u64 {
        self.bytes.div_ceil(1 << 20)
    }

    fn report(&self) -> PathBuf {
        self.folder.join("report.html")
    }

    fn slurm(&self) -> Result<Vec<(&'static str, String)>> {
        let quoted = |path: &Path| {
            command_line(std::iter::once(path.display().to_string())).split_off("effattn ".len())
        };
        let (folder, program, here) = (quoted(&self.folder), quoted(&self.program), quoted(&self.here));
        ensure!(
            !self.folder.display().to_string().contains(char::is_whitespace),
            "#SBATCH lines cannot contain spaces: {}; choose another folder with --jobs-dir",
            self.folder.display()
        );
        let options: String =
            self.args.option.iter().map(|(key, value)| format!("#SBATCH --{key}={value}\n")).collect();
        let gpus = match self.args.gpus {
            0 => String::new(),
            gpus => format!("#SBATCH --gres=gpu:{gpus}\n"),
        };
        let words = command_line(self.words.iter().cloned()).split_off("effattn ".len());
        let (name, count, minutes, mebibytes, cpus) =
            (&self.name, self.args.shards, self.minutes(), self.mebibytes(), self.cpus);
        let shards = quoted(&self.shards);
        let report = quoted(&self.report());
        let array = format!(
            "#!/bin/sh
# Written by effattn submit. A part of the shards again: sbatch --array=2,5 {folder}/array.sbatch
#SBATCH --job-name=effattn-{name}
#SBATCH --array=1-{count}
#SBATCH --time={minutes}
#SBATCH --mem={mebibytes}M
#SBATCH --cpus-per-task={cpus}
#SBATCH --requeue
#SBATCH --signal=B:USR1@{WARNING}
#SBATCH --open-mode=append
#SBATCH --output={folder}/%A_%a.log
{gpus}{options}
cd {here} || exit 2
{program} {words} --shard \"$SLURM_ARRAY_TASK_ID/{count}\" &
run=$!
again=
trap 'again=1; kill -TERM $run' USR1    # the time is nearly over: a checkpoint now, and another turn
trap 'kill -TERM $run' TERM
while :; do
    wait $run
    code=$?
    kill -0 $run 2>/dev/null || break
done
if [ -n \"$again\" ] && [ $code -eq 130 ]; then
    exec scontrol requeue \"${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID\"
fi
exit $code
"
        );
        let merge = format!(
            "#!/bin/sh
# Written by effattn submit: joins the shards and makes the report, of what there is where cells are missing.
#SBATCH --job-name=effattn-{name}-merge
#SBATCH --time=60
#SBATCH --mem=2048M
#SBATCH --open-mode=append
#SBATCH --output={folder}/merge-%j.log
{options}
cd {here} || exit 2
{program} merge {shards}
code=$?
{program} report {shards} -o {report} || exit
exit $code
"
        );
        let submit = format!(
            "#!/bin/sh
# Written by effattn submit.
set -e
array=$(sbatch --parsable {folder}/array.sbatch)
array=${{array%%;*}}
merge=$(sbatch --parsable --dependency=afterany:\"$array\" {folder}/merge.sbatch)
echo \"array job $array, merge job ${{merge%%;*}}\"
"
        );
        Ok(vec![("array.sbatch", array), ("merge.sbatch", merge), ("submit.sh", submit)])
    }

    /// The value of an option that the scheduler cannot do without.
    fn needs(&self, key: &str, example: &str) -> Result<&str> {
        let found = self.args.option.iter().find(|(known, _)| known == key);
        let found = found.map(|(_, value)| value.as_str());
        found.with_context(|| format!("this scheduler needs --option {key}={example}"))
    }

    /// The words of merge and report for a shell in a container.
    fn merge_line(&self) -> String {
        let line = |words: [&str; 2]| command_line(words.map(str::to_owned).into_iter());
        let shards = self.shards.display().to_string();
        format!(
            "{}; code=$?; {} -o report.html || exit; exit $code",
            line(["merge", &shards]),
            line(["report", &shards])
        )
    }

    fn aws(&self) -> Result<Vec<(&'static str, String)>> {
        let (queue, definition) = (self.needs("queue", "gpus")?, self.needs("definition", "effattn:1")?);
        ensure!(self.args.shards >= 2, "an array of AWS Batch has 2 tasks or more; choose --shards");
        let mut resources = vec![
            json!({ "type": "VCPU", "value": self.cpus.to_string() }),
            json!({ "type": "MEMORY", "value": self.mebibytes().to_string() }),
        ];
        if self.args.gpus > 0 {
            resources.push(json!({ "type": "GPU", "value": self.args.gpus.to_string() }));
        }
        let count = self.args.shards;
        let words: Vec<&str> = ["effattn"]
            .into_iter()
            .chain(self.words.iter().map(String::as_str))
            .chain(["--shard", "auto"])
            .collect();
        let environment = json!([{ "name": "COMPLETIONS", "value": count.to_string() }]);
        let name = format!("effattn-{}", self.name.replace(['.', '='], "-"));
        let array = json!({
            "jobName": name,
            "jobQueue": queue,
            "jobDefinition": definition,
            "arrayProperties": { "size": count },
            "retryStrategy": { "attempts": 10 },
            "timeout": { "attemptDurationSeconds": 60 * self.minutes() },
            "containerOverrides": { "command": words, "environment": environment, "resourceRequirements": resources },
        });
        let merge = json!({
            "jobName": format!("{name}-merge"),
            "jobQueue": queue,
            "jobDefinition": definition,
            "containerOverrides": { "command": ["sh", "-c", self.merge_line()] },
        });
        let folder = self.folder.display();
        let submit = format!(
            "#!/bin/sh\n# Written by effattn submit.\nset -e\n\
             id=$(aws batch submit-job --cli-input-json 'file://{folder}/array.json' --query jobId --output text)\n\
             aws batch submit-job --cli-input-json 'file://{folder}/merge.json' --depends-on jobId=\"$id\"\n"
        );
        let text = |job: &Value| Ok::<_, serde_json::Error>(serde_json::to_string_pretty(job)? + "\n");
        Ok(vec![("array.json", text(&array)?), ("merge.json", text(&merge)?), ("submit.sh", submit)])
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Args, asked, check_options};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// What is said of `flags`; nothing where they are taken.
    fn refused(flags: &str) -> String {
        let words = ["submit"].into_iter().chain(flags.split(' ')).chain(["speed"]);
        match Cli::try_parse_from(words) {
            Ok(cli) => check_options(&cli.args).err().map_or_else(String::new, |error| error.to_string()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn numbers_and_options_that_cannot_be_are_told_in_plain_words() {
        for shards in ["-1", "0", "x", "100001"] {
            let told = refused(&format!("--shards {shards}"));
            assert!(told.contains("expected a whole number from 1 to 100000, such as 1"), "{told}");
        }
        let told = refused("--option array=1-99");
        assert_eq!(
            told,
            "--option array: submit writes array itself; choose the number of tasks with --shards"
        );
        assert!(refused("--option output=x").contains("change it in the files"));
        assert!(
            refused("--option partition=").contains("partition has no value; give it as in partition=VALUE")
        );
        assert_eq!(refused("--option partition=gpu --shards 2 --gpus 1"), "");
    }

    #[test]
    fn flags_that_every_task_would_share_are_refused() {
        let told = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            asked(&words).err().map_or_else(String::new, |error| error.to_string())
        };
        let exported = told("speed --len 32 --export-csv rows.csv");
        assert!(exported.contains("leave --export-csv out"), "{exported}");
        assert!(told("speed --export-json=-").contains("leave --export-json out"));
        assert!(told("speed --shard 1/2").contains("leave --shard out"));
        assert_eq!(told("speed --len 32"), "");
    }
}
