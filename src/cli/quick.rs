//! `--quick` of commands that train: as many of its steps as fit into a time. Their number is decided once, before training: it is part of
//! the plan and of the rows, and the same command resumes with it.

use std::path::Path;

use anyhow::Result;

use super::command::CommandArgs;
use crate::protocol::grid::Grid;
use crate::protocol::training::QUICK_SECONDS;
use crate::run::manifest::Manifest;
use crate::run::plan::{Cell, Plan};
use crate::run::plan_file::PlanFile;
use crate::run::reuse;

/// At least one of so many steps is made, however long it takes: fewer show nothing.
const LEAST: u64 = 10;

/// The steps of `grid` where their number may be lowered; `None` where somebody chose it, or the cells are divided among machines, whose
/// plans must be the same.
pub fn whole_steps(args: &CommandArgs, grid: &Grid) -> Option<u64> {
    let free = args.flags.quick
        && args.protocol.trains()
        && args.output.shard.is_none()
        && args.flags.user_settings().steps.is_none();
    grid.settings.steps.filter(|_| free)
}

/// The steps that an earlier run of the same command in the folder `base` decided on.
pub fn earlier_steps(base: &Path, plan: &Plan) -> Option<u64> {
    let without_steps = |manifest: &Manifest| {
        let mut settings = manifest.settings.clone();
        settings["steps"] = serde_json::Value::Null;
        settings
    };
    let decided = |argv: &[String]| {
        let chosen = argv.iter().any(|word| word.starts_with("--steps") || word.contains("steps="));
        argv.iter().any(|word| word == "--quick") && !chosen
    };
    let now = Manifest::new(plan, "");
    let same = |earlier: &Manifest| {
        earlier.command == now.command
            && decided(&earlier.argv)
            && without_steps(earlier) == without_steps(&now)
            && earlier.computes_as(&now, &[])
    };
    let runs =
        reuse::runs(base).into_iter().filter(|(folder, run)| same(run) && has_cells(folder, &plan.cells));
    runs.into_iter().find_map(|(_, run)| run.settings["steps"].as_u64())
}

/// Whether the run in `folder` has `cells`, whatever the number of their steps: mechanisms are no settings.
fn has_cells(folder: &Path, cells: &[Cell]) -> bool {
    let Ok(Some(planned)) = PlanFile::read(folder) else { return false };
    let same = planned
        .cells
        .iter()
        .zip(cells)
        .all(|(then, now)| then.cell == now.words || then.cell.starts_with(&format!("{} ", now.words)));
    planned.cells.len() == cells.len() && same
}

/// Of `whole` steps as many as the tried `cells` make in [`QUICK_SECONDS`], to two digits; all where none could be tried.
fn fitting_steps(cells: &[Cell], whole: u64) -> u64 {
    let all: f64 = cells.iter().map(|cell| cell.seconds).sum();
    let training: f64 = cells.iter().filter_map(|cell| cell.training).sum();
    if all <= QUICK_SECONDS || training <= 0.0 {
        return whole;
    }
    let share = (QUICK_SECONDS - (all - training)).max(0.0) / training;
    let steps = (share * whole as f64) as u64;
    let unit = 10u64.pow(steps.checked_ilog10().unwrap_or(0).saturating_sub(1));
    (steps / unit * unit).clamp(whole.div_ceil(LEAST), whole)
}

/// Lowers the steps of `grid` and `plan` from `whole` to as many as an `earlier` run made, else as fit by `estimate`; `replan` makes the plan
/// of a grid. Gives whether the cells of `plan` have been tried.
pub fn fit(
    (grid, plan): (&mut Grid, &mut Plan),
    (whole, earlier): (u64, Option<u64>),
    estimate: impl FnOnce(&mut Plan) -> Result<()>,
    replan: impl FnOnce(&Grid) -> Result<Plan>,
) -> Result<bool> {
    let steps = match earlier {
        Some(steps) => steps,
        None => {
            estimate(plan)?;
            fitting_steps(&plan.cells, whole)
        }
    };
    if steps == whole {
        return Ok(earlier.is_none());
    }
    grid.settings.steps = Some(steps);
    grid.entries.iter_mut().for_each(|entry| entry.settings.steps = Some(steps));
    let tried = std::mem::replace(plan, replan(grid)?);
    let share = steps as f64 / whole as f64;
    for (cell, tried) in plan.cells.iter_mut().zip(tried.cells).filter(|_| earlier.is_none()) {
        let training = tried.training.unwrap_or(0.0);
        cell.seconds = tried.seconds - training + share * training;
        cell.training = tried.training.map(|training| share * training);
        cell.memory = tried.memory;
    }
    Ok(earlier.is_none())
}

/// What is said of `steps` that are fewer than `whole`.
pub fn remark(steps: u64, whole: u64) -> String {
    format!(
        "--quick: {steps} of {whole} steps, as many as take about {QUICK_SECONDS} s here; --steps {whole} makes all of them"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol;
    use crate::protocol::grid::GridFlags;
    use crate::protocol::resolve;
    use effattn_record::csv;

    /// The plan of `command --quick` where its cells together take `rest` seconds and a step of all of them `step`.
    fn planned(command: &str, earlier: Option<u64>, rest: f64, step: f64) -> (Grid, Plan, bool) {
        let protocol = protocol::find(command).unwrap();
        let flags = GridFlags { quick: true, ..GridFlags::default() };
        let mut grid = resolve(&flags, protocol).unwrap();
        let replan = |grid: &Grid| {
            let settings = serde_json::to_value(&grid.settings)?;
            Ok(Plan { cells: protocol.cells(grid, 1)?, settings, ..Plan::default() })
        };
        let mut plan = replan(&grid).unwrap();
        let whole = grid.settings.steps.unwrap();
        let pretend = |plan: &mut Plan| {
            let count = plan.cells.len() as f64;
            for cell in &mut plan.cells {
                let training = step * whole as f64 / count;
                (cell.seconds, cell.training) = (rest / count + training, Some(training));
            }
            Ok(())
        };
        let tried = fit((&mut grid, &mut plan), (whole, earlier), pretend, replan).unwrap();
        (grid, plan, tried)
    }

    #[test]
    fn a_fast_machine_makes_all_steps_and_a_slow_one_as_many_as_fit() {
        for command in ["recall", "lra", "charlm", "wordlm", "mlm", "finetune", "vision"] {
            let whole = planned(command, None, 0.0, 0.0).0.settings.steps.unwrap();
            let usual = 40.0 / whole as f64; // 40 s with 4 s of tests: all of it fits
            let (grid, plan, tried) = planned(command, None, 4.0, usual);
            assert!(tried && plan.seconds() < QUICK_SECONDS, "{command}");
            assert_eq!(grid.settings.steps, Some(whole), "{command}");
            let (grid, plan, _) = planned(command, None, 16.0, 4.0 * usual);
            let steps = grid.settings.steps.unwrap();
            assert!(steps < whole / 5 && steps >= whole / 6, "{command}: {steps} of {whole}");
            assert!(
                plan.seconds() <= QUICK_SECONDS && plan.seconds() > 40.0,
                "{command}: {}",
                plan.seconds()
            );
            for cell in &plan.cells {
                let row = csv::to_string([&cell.row]).unwrap();
                assert!(cell.request.to_string().contains(&format!("\"steps\":{steps}")), "{}", cell.request);
                assert!(
                    cell.key.contains(&format!("steps={steps}")) && row.contains(&format!("steps {steps} (")),
                    "{row}"
                );
            }
        }
    }

    #[test]
    fn the_number_is_decided_once() {
        let (grid, _, tried) = planned("recall", Some(120), 0.0, 1e9);
        assert!(!tried && grid.settings.steps == Some(120), "an earlier run decided");
        let (grid, ..) = planned("recall", None, 100.0, 1.0);
        assert_eq!(grid.settings.steps, Some(60), "where tests alone take the time, few steps and not none");
    }

    #[test]
    fn only_a_quick_run_without_steps_of_its_own_decides_for_the_next() {
        let base = tempfile::tempdir().unwrap();
        let plan = |words: &str, steps: u64, (batch, model): (u64, &str)| {
            let cell = Cell {
                key: format!("listops {model} s1 steps={steps}"),
                words: format!("listops {model} s1"),
                ..Cell::default()
            };
            Plan {
                command: "lra".to_owned(),
                settings: serde_json::json!({ "steps": steps, "batch": [batch] }),
                argv: words.split(' ').map(str::to_owned).collect(),
                cells: vec![cell],
                ..Plan::default()
            }
        };
        let put = |name: &str, words: &str, steps: u64| {
            let plan = plan(words, steps, (32, "ls"));
            let folder = base.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            Manifest::new(&plan, name).write(&folder).unwrap();
            PlanFile::of(&plan).write(&folder).unwrap();
        };
        let earlier = |batch, model| earlier_steps(base.path(), &plan("lra --quick", 1500, (batch, model)));
        put("1", "lra --quick --steps 70", 70);
        put("2", "lra --quick --set steps=80", 80);
        put("3", "lra --len 64", 90);
        assert_eq!(earlier(32, "ls"), None);
        put("4", "lra --quick", 400);
        assert_eq!(earlier(32, "ls"), Some(400));
        assert_eq!(earlier(16, "ls"), None, "another setting");
        assert_eq!(earlier(32, "full"), None, "another mechanism");
        assert_eq!(earlier(32, "l"), None, "another mechanism");
    }
}
