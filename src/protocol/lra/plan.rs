//! From flags and suites to training runs.

use std::path::Path;

use super::recipe::{self, Recipe};
use super::request::{LraRequest, model};
use super::stored::StoredRuns;
use super::stored_input::stored_input;
use super::tasks::{self, LoadOptions};
use super::worker::LraExperiment;
use super::{ACCURACY, EVAL, KEEP_CLOSE, Lra, floor};
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError, listed};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::own_data::{DATA, check_tokenizer};
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    self, DataRead, PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, one_of_each,
    read_once, requests,
};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::plan::{Cell, Plan};
use effattn_data as data;
use effattn_record::Pass;
use effattn_record::config::lists::{Lengths, Words};
use effattn_record::config::settings::Settings;

/// Steps, length and rate of `--quick`: the operator that decides most is an expression's first token, and among few
/// tokens it is found soon.
pub const QUICK: (u64, u64, f64) = (1500, 64, 1e-3);

/// Preset where nothing is said.
const PRESET: &str = "ls-lra";

impl TrainingProtocol for Lra {
    type Request = LraRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] =
        &["steps", "batch", "len", "keep", "rate", "sizes", "dtype", "limit", "strict", "keep_close"];
    const CURVE: CurveSpec = CurveSpec::ACCURACY;
    const PUBLISHED_BY: Option<&'static str> = Some(super::INFO.name);

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let quick = flags.quick;
        let settings = Settings {
            task: Some(Words(vec!["listops".to_owned()])),
            preset: Some(PRESET.to_owned()),
            steps: quick.then_some(QUICK.0),
            len: quick.then(|| Lengths(vec![QUICK.1])),
            rate: quick.then_some(QUICK.2),
            ..Settings::NONE
        };
        GridDefaults { settings, models: "ls" }
    }

    fn check_flags(&self, flags: &GridFlags) -> Result<(), PlanError> {
        StoredRuns::check_flags(flags)?;
        floor::check_flags(flags, &["data", "tokenizer", "strict", "keep_close", "allow_partial"])?;
        check_reading(flags)
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        data::task(task).map(|_| ()).map_err(PlanError::new)
    }

    fn seed(&self, place: &RunPlace) -> Result<u64, PlanError> {
        Ok(recipe_of(place)?.seed)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<LraRequest>, PlanError> {
        let RunPlace { entry, task, .. } = *place;
        check_tokenizer(&entry.settings, task).map_err(PlanError)?;
        let (settings, recipe) = (&entry.settings, recipe_of(place)?);
        let (len, batch) = one_of_each(settings, "lra")?;
        let (len, batch) = (len.unwrap_or(recipe.len), batch.unwrap_or(recipe.batch));
        let spec = ModelSpec::new(entry, len, batch, Pass::Train, seed)?;
        let (model, unsupported) = resolve_or_unsupported(entry, |choice| model(&spec, choice, task))?;
        let model = model.ok_or_else(|| unsupported.unwrap_or_default());
        let request = |spec: ModelSpec, settings: &Settings| LraRequest {
            task: task.to_owned(),
            keep: recipe.keep.min(spec.len),
            steps: settings.steps.unwrap_or(recipe.steps).max(1),
            rate: settings.rate.unwrap_or(recipe.rate),
            limit: settings.limit,
            reading: LoadOptions {
                strict: settings.strict.unwrap_or(false),
                allow_partial: settings.allow_partial.unwrap_or(false),
                keep_close: KEEP_CLOSE.of(settings).unwrap_or(false) || recipe.keep_close,
            },
            stored: None,
            spec,
        };
        let usual = ModelSpec { len: recipe.len, batch: recipe.batch, ..spec.default_spec(&spec.preset) };
        let (request, usual) = (request(spec, settings), request(usual, &Settings::NONE));
        let work = work(&request.spec, flops(&model, len), &recipe, request.steps);
        let differs = differences(&request, &recipe);
        Ok(PlannedRun { metric: ACCURACY.name, unit: "%", request, usual, model, differs, work })
    }

    /// Training runs, or with `--floor` the rules for the tasks.
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        match (grid.settings.floor, EVAL.of(&grid.settings)) {
            (_, Some(run)) => StoredRuns::cells(grid, &run, threads),
            (Some(true), None) => floor::cells(grid),
            (_, None) => training::cells(self, grid, threads),
        }
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        if requests::<LraRequest>(plan).iter().any(|request| request.stored.is_some()) {
            return StoredRuns::prepare(plan);
        }
        let runs = requests::<LraRequest>(plan).into_iter().map(|run| (run.task, run.reading));
        let rules = floor::requests(plan).into_iter().map(|rule| (rule.task, rule.reading));
        let wanted: Vec<(String, LoadOptions)> = runs.chain(rules).collect();
        let wanted = wanted.iter().map(|(task, reading)| (task.as_str(), *reading, (task, *reading)));
        read_once(plan, wanted, |(task, reading)| read(task, &dirs.data, reading))
    }

    fn summary(&self, plan: &Plan) -> String {
        match floor::requests(plan).is_empty() {
            true => training::summary(self, plan),
            false => format!("{} · simple rules", listed(plan, |row| row.task.clone())),
        }
    }

    fn same_group(&self, a: &Cell, b: &Cell) -> bool {
        floor::together(a, b)
    }

    /// Rules are scored here, models are trained by workers.
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        match floor::requests(runner.plan).is_empty() {
            true => training::compute::<LraRequest>(runner, open, Self::CURVE),
            false => floor::compute(runner, open),
        }
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<LraRequest>) -> Result<TrainingResult, CellFailure> {
        if let Some(stored) = &job.request.stored {
            return StoredRuns::test(job, stored);
        }
        let run = LraExperiment::open(job)?;
        let trained = run.train()?;
        run.done(trained)
    }
}

/// Refuses what changes nothing in how the named tasks are read, while rows would say that it did. Suites may
/// set it for all of their tasks.
fn check_reading(flags: &GridFlags) -> Result<(), PlanError> {
    let said = flags.user_settings();
    let tasks = said.task.as_ref().map_or(&[][..], |Words(tasks)| &tasks[..]);
    let named = DATA.of(&said).map(|files| format!("--data {files}"));
    let Some(named) = named.or_else(|| (!tasks.is_empty()).then(|| format!("--task {}", tasks.join(","))))
    else {
        return Ok(()); // ListOps, or the tasks of a suite
    };
    if KEEP_CLOSE.of(&said) == Some(true) && !tasks.iter().any(|task| task == "listops") {
        return Err(PlanError(format!(
            "--keep-close is about the brackets of ListOps, and {named} has none; leave --keep-close out"
        )));
    }
    if said.strict == Some(true) && tasks.iter().all(|task| data::own::is_own(task)) {
        return Err(PlanError(format!(
            "--strict holds out reviews of the task text, and {named} has a validation split; choose it with \
             three files (--data train.csv,val.csv,test.csv), and leave --strict out"
        )));
    }
    Ok(())
}

/// The protocol of the task and preset of `place`.
fn recipe_of(place: &RunPlace) -> Result<Recipe, PlanError> {
    let preset = place.entry.settings.preset.as_deref().unwrap_or(PRESET);
    recipe::find(preset, place.task, &place.entry.model).map_err(PlanError)
}

/// Reads the data of `task` in the folder `dir`.
pub fn read(task: &str, dir: &Path, reading: LoadOptions) -> anyhow::Result<DataRead> {
    let set = tasks::load(task, dir, reading)?;
    let (hash, partial) = (set.hash().to_owned(), set.partial().map(str::to_owned));
    Ok(DataRead { hash, partial, remark: data::own::division(task) })
}

/// Multiply-adds of the whole run, `flops` per example: steps of three forwards, and one forward per evaluated example.
fn work(spec: &ModelSpec, flops: f64, recipe: &Recipe, steps: u64) -> f64 {
    let forward = flops * spec.batch as f64;
    let evaluations = steps.div_ceil(recipe.every_of(steps)) as f64 * recipe.batches.unwrap_or(62) as f64;
    steps as f64 * 3.0 * forward + evaluations * forward
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &LraRequest, recipe: &Recipe) -> ProtocolDiff {
    let spec = &request.spec;
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (request.steps, recipe.steps) };
    all.settings.extend(recipe.ours.map(str::to_owned));
    all.note("batch", spec.batch, recipe.batch);
    all.note("length", spec.len, recipe.len);
    all.rate(request.rate, recipe.rate);
    all.model(spec);
    all.settings.extend(request.limit.map(tasks::limited));
    if request.reading.strict {
        all.settings.push("selected on held-out training examples".to_owned());
    }
    if request.reading.keep_close != recipe.keep_close {
        all.settings.push("closing brackets kept".to_owned());
    }
    all.settings.extend(recipe.gaps.iter().map(|gap| (*gap).to_owned()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{declare_settings, resolve};

    /// What is said against `line`, settings such as `steps=7` in a row; nothing where it is taken.
    fn told(line: &str, flags: GridFlags) -> String {
        declare_settings();
        let settings = line.split(' ').map(|one| Settings::set(one).unwrap());
        let settings = settings.fold(Settings::NONE, |all, one| one.over(all));
        let resolved = resolve(&GridFlags { settings, ..flags }, &Lra);
        resolved.err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn what_has_no_effect_on_rules_is_refused() {
        let plain = |line: &str| told(line, GridFlags::default());
        for idle in ["steps=7", "rate=1e-2", "seeds=1,2", "len=8", "batch=3"] {
            let flag = idle.split('=').next().unwrap();
            let refusal = plain(&format!("floor=true {idle}"));
            assert!(refusal.ends_with(&format!("take no {flag}; leave --{flag} out")), "{refusal}");
            assert_eq!(plain(idle), "", "it is taken where something is trained");
        }
        let model = || GridFlags { model: "full".parse().ok(), ..GridFlags::default() };
        assert!(told("floor=true", model()).ends_with("leave --model out"));
        assert!(told("floor=true", GridFlags { quick: true, ..GridFlags::default() }).contains("--quick"));
        let suite = GridFlags { suite: Some("ls-table1".to_owned()), ..model() };
        assert_eq!(told("floor=true", suite), "", "of a suite, mechanisms choose lines");
        let taken = "floor=true task=listops keep_close=true limit=10 allow_partial=true threads=1";
        assert_eq!(plain(taken), "");
    }

    #[test]
    fn files_of_a_suite_are_a_task() {
        declare_settings();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.toml");
        let text = "title = 't'\nprotocol = 'lra'\nsource = 's'\n[base]\ndata = 'a.csv,b.csv,c.csv'\n[[row]]\n\
                    label = 'a'\nmodel = 'full'\n";
        std::fs::write(&path, text).unwrap();
        let suite = Some(path.display().to_string());
        let error = resolve(&GridFlags { suite, ..GridFlags::default() }, &Lra).err().unwrap().to_string();
        assert!(
            error.ends_with("in a suite these files are a task: task = [\"a.csv+b.csv+c.csv\"]"),
            "{error}"
        );
    }

    #[test]
    fn what_changes_no_data_is_refused() {
        let plain = |line: &str| told(line, GridFlags::default());
        for task in ["data=a.csv", "task=text", "task=a.csv,text"] {
            let told = plain(&format!("{task} keep_close=true"));
            assert!(told.ends_with("leave --keep-close out"), "{task}: {told}");
        }
        for line in ["data=a.csv,b.csv strict=true", "task=a.csv strict=true"] {
            assert!(plain(line).ends_with("leave --strict out"), "{line}: {}", plain(line));
        }
        for line in ["keep_close=true", "task=listops,text keep_close=true strict=true", "strict=true"] {
            assert_eq!(plain(line), "", "{line}");
        }
    }
}
