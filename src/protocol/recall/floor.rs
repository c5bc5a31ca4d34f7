//! What simple rules reach on the test examples (`recall --floor`): the floor under every trained row.

use serde::{Deserialize, Serialize};

use super::recipe::{examples, recipe_of};
use super::{ACCURACY, HELD_OUT_SEED, INFO, SEGMENT_ACCURACY};
use crate::protocol::cell_runner::{CellResult, CellRunner, request};
use crate::protocol::grid::{Grid, GridFlags, PlanError, tasks};
use crate::protocol::lra::floor::check_flags as check_rules;
use crate::run::RunError;
use crate::run::plan::{Cell, Plan};
use effattn_data::Split;
use effattn_data::position_labels::{self, Alphabet, PositionExample, PositionRule, Segment, score};
use effattn_record::config::settings::Settings;
use effattn_record::{FLOOR, Outcome, Row};

/// What a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorRequest {
    /// The rule.
    floor: String,
    pub task: String,
    /// Number of ids, noise.
    alphabet: Alphabet,
    /// What is tested on.
    test: Vec<Segment>,
    /// Examples per segment.
    count: u64,
}

/// The requests of `plan` that are rules; none if models are trained.
pub fn requests(plan: &Plan) -> Vec<FloorRequest> {
    plan.cells.iter().filter_map(|cell| request(cell).ok()).collect()
}

/// Refuses what has no effect on rules, which are scored on test segments and learn nothing.
pub fn check_flags(flags: &GridFlags) -> Result<(), PlanError> {
    check_rules(flags, &["preset", "vocabulary", "noise", "test_segments", "quick"])
}

/// The cells of `grid`: a row for each rule and task, with what the rule is.
pub fn cells(grid: &Grid) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for task in tasks(grid) {
        let (_, set) = position_labels::task(&task).map_err(PlanError::new)?;
        let (recipe, plain) = (recipe_of(&grid.settings, &task)?, recipe_of(&Settings::NONE, &task)?);
        let (_, test, alphabet) = examples(&grid.settings, &recipe, &task)?;
        for rule in set.rules {
            let mut row = Row::new(INFO.name, FLOOR).with(ACCURACY.name, "%", None);
            (row.task, row.variant, row.seed) = (Some(task.clone()), Some(rule.name.to_owned()), Some(0));
            let request = |test: &[Segment], alphabet, count| FloorRequest {
                floor: rule.name.to_owned(),
                task: task.clone(),
                alphabet,
                test: test.to_vec(),
                count,
            };
            let usual = request(&plain.test, plain.alphabet, plain.counts[1]);
            let count = grid.settings.limit.map_or(recipe.counts[1], |limit| limit.min(recipe.counts[1]));
            let asked = request(&test, alphabet, count);
            let cell = Cell::new(&format!("{task} {FLOOR} {}", rule.name), row, &asked, &usual);
            cells.push(cell.with_seconds(1, |_| 1.0));
        }
    }
    Ok(cells)
}

/// Scores the rules of the cells `open`.
pub fn compute(runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
    for &index in open {
        if runner.session.stop.is_cancelled() {
            return Err(RunError::Stopped);
        }
        let cell = &runner.plan.cells[index];
        let request: FloorRequest = request(cell)?;
        let set =
            position_labels::task(&request.task).map_err(|error| RunError::Internal(error.to_string()))?.1;
        let rule = set.rules.iter().find(|rule| rule.name == request.floor);
        let rule = rule.ok_or_else(|| RunError::Internal(format!("there is no rule {}", request.floor)))?;
        runner.session.term.info(&format!("{}: {}, {}", request.task, rule.name, rule.about));
        let rows = rows(&cell.row, rule, &request, |segment| {
            let draw = |index| set.example((segment, request.alphabet), (HELD_OUT_SEED, Split::Test), index);
            (0..request.count).map(draw).collect()
        });
        let summary = rows[0].value.map_or_else(String::new, |value| format!("{value:.2} %"));
        let result = CellResult { rows, samples: Vec::new(), summary, progress_seconds: 0.0 };
        runner.record_result(index, result)?;
    }
    Ok(())
}

/// The mean over the segments, which count alike, then each of them.
fn rows(
    row: &Row,
    rule: &PositionRule,
    request: &FloorRequest,
    draw: impl Fn(&Segment) -> Vec<PositionExample>,
) -> Vec<Row> {
    let row = row.with_outcome(Outcome::Ok, None);
    let scores: Vec<f64> =
        request.test.iter().map(|segment| 100.0 * score(rule, &draw(segment), request.alphabet)).collect();
    let mean = scores.iter().sum::<f64>() / scores.len().max(1) as f64;
    let segment = |(segment, value): (&Segment, &f64)| Row {
        task: Some(format!("{} {segment}", request.task)),
        len: Some(segment.longest as u64),
        ..row.with(SEGMENT_ACCURACY, "%", Some(*value))
    };
    let first = row.with(ACCURACY.name, "%", Some(mean));
    std::iter::once(first).chain(request.test.iter().zip(&scores).map(segment)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{declare_settings, recall::Recall, resolve};

    #[test]
    fn what_has_no_effect_on_rules_is_refused() {
        declare_settings();
        let told = |line: &str| {
            let settings = line.split(' ').map(|one| Settings::set(one).unwrap());
            let settings = settings.fold(Settings::NONE, |all, one| one.over(all));
            let flags = GridFlags { settings, quick: true, ..GridFlags::default() };
            resolve(&flags, &Recall).err().map_or_else(String::new, |error| error.to_string())
        };
        assert!(told("floor=true steps=7").ends_with("leave --steps out"));
        assert!(told("floor=true rates=1e-3,1e-2").ends_with("leave --rates out"));
        assert_eq!(told("floor=true task=mqar limit=10 test_segments=32:4 vocabulary=128"), "");
        assert_eq!(told("steps=7"), "");
    }
}
