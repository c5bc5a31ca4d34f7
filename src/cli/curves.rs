//! Learning curves of the commands that train, drawn while they do, and those of finished runs in a report.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::stored_runs::{StoredRun, or_left_out, trained_key};
use crate::protocol::curve::CellCurve;
use crate::protocol::{self, Protocol};
use crate::run::plan::{folder, key_word};
use crate::train::training_loop::EvalPoint;
use effattn_record::report::chart::{Chart, Evaluation, TrainingCurve, learning};
use effattn_record::report::labels;
use effattn_record::report::table::Table;
use effattn_record::report::trained;
use effattn_record::{FLOOR, Row};

/// Draws the curves of the group that is being trained, and gives the chart's path. A chart that cannot be written does not end
/// a run.
pub fn draw(protocol: &dyn Protocol, all: &[CellCurve], folder: Option<&Path>) -> Option<PathBuf> {
    write(protocol, all, folder?).unwrap_or_else(|error| {
        log::warn!("the learning curve was not drawn: {error}");
        None
    })
}

fn write(protocol: &dyn Protocol, all: &[CellCurve], folder: &Path) -> std::io::Result<Option<PathBuf>> {
    let (Some(group), Some(shown)) = (all.last().map(|curve| curve.group.as_str()), &protocol.curve()) else {
        return Ok(None);
    };
    let here = all.iter().filter(|curve| curve.group == group);
    let point = |point: &EvalPoint| {
        let evaluation = Evaluation {
            step: point.step as f64,
            train_loss: point.train_loss,
            loss: point.score.loss,
            value: (shown.value)(&point.score),
        };
        (point.rate, evaluation)
    };
    let lines: Vec<TrainingCurve> =
        here.flat_map(|curve| lines(&curve.label, curve.points.iter().map(point))).collect();
    let (name, title) =
        (format!("{}-{group}-curves", protocol.name()), format!("Learning curves of {group}"));
    let chart = learning(&name, &title, shown.axis, &lines, None)?;
    chart.map(|chart| chart.write(folder)).transpose()
}

/// A line per learning rate of a model called `label`, or one where its points have none.
fn lines(label: &str, points: impl IntoIterator<Item = (Option<f64>, Evaluation)>) -> Vec<TrainingCurve> {
    let mut lines: Vec<TrainingCurve> = Vec::new();
    for (rate, point) in points {
        let label = rate.map_or_else(|| label.to_owned(), |rate| format!("{label}, rate {rate:e}"));
        match lines.last_mut().filter(|line| line.label == label) {
            Some(line) => line.points.push(point),
            None => lines.push(TrainingCurve { label, points: vec![point] }),
        }
    }
    lines
}

/// The learning curves of one command and task.
pub struct CurveChart {
    command: String,
    task: String,
    /// What weights are selected by.
    axis: &'static str,
    lines: Vec<TrainingCurve>,
    /// The best simple rule for the task, and what it reaches.
    floor: Option<(String, f64)>,
}

/// Rows, labels and evaluations of the curves of one chart.
type Labelled<'a> = Vec<(&'a Row, Vec<String>, Vec<(Option<f64>, Evaluation)>)>;

/// Learning curves of the models of `rows`, by command and task. One that is damaged is named and left out.
pub fn of_runs(runs: &[&StoredRun], rows: &[Row]) -> Vec<CurveChart> {
    let mut groups: BTreeMap<(String, String, &str), Labelled> = BTreeMap::new();
    let wanted: HashSet<String> = rows.iter().map(trained_key).collect();
    for run in runs {
        let curve = protocol::find(&run.manifest.command).and_then(|protocol| protocol.curve());
        let Some(curve) = curve else { continue };
        let mut seen = HashSet::new();
        for row in run.rows.iter().filter(|row| wanted.contains(&trained_key(row))) {
            let (Some(task), Some(preset), Some(seed)) = (&row.task, &row.preset, row.seed) else { continue };
            let variant = row.variant.as_ref().map_or_else(String::new, |variant| format!(":{variant}"));
            let settings = row.settings.as_ref().map_or_else(String::new, |settings| format!(" {settings}"));
            let key = format!("{} {}{variant} {preset} s{seed}{settings}", key_word(task), row.model);
            let path = folder(&run.folder, &key).join("curve.csv");
            if !path.is_file() || !seen.insert(key) {
                continue;
            }
            let points = read(&path).with_context(|| path.display().to_string());
            let points = or_left_out(points, "this learning curve");
            if points.is_empty() {
                continue; // weights of another run were tested
            }
            if curve.by_rate && points.iter().any(|(rate, _)| rate.is_none()) {
                log::warn!(
                    "{}: its steps are counted over all learning rates, as an earlier version wrote them, and no line says which rate; \
                     this curve is not drawn. Train the cell again to have it",
                    path.display()
                );
                continue;
            }
            let group = (run.manifest.command.clone(), task.clone(), curve.axis);
            groups.entry(group).or_default().push((row, traits(run, row, &points), points));
        }
    }
    let curves = groups.into_iter().map(|((command, task, axis), curves)| {
        let rows: Vec<&Row> = curves.iter().map(|curve| curve.0).collect();
        let (traits, points): (Vec<_>, Vec<_>) =
            curves.into_iter().map(|(_, traits, points)| (traits, points)).unzip();
        let named = labels::distinct(&traits).into_iter().zip(points);
        let lines = named.flat_map(|(label, points)| self::lines(&label, points)).collect();
        let floor = floor(runs, &rows);
        CurveChart { command, task, axis, lines, floor }
    });
    curves.collect()
}

/// What the best simple rule reaches on the split that all of `rows` were tested on; nothing where they differ.
fn floor(runs: &[&StoredRun], rows: &[&Row]) -> Option<(String, f64)> {
    let rule = |row: &Row| {
        let all = runs.iter().flat_map(|run| &run.rows);
        trained::best_rule(all.filter(|row| row.model == FLOOR && row.metric == "accuracy"), row)
    };
    let first = rule(rows.first()?)?;
    rows.iter().all(|row| rule(row).as_ref() == Some(&first)).then_some(first)
}

/// What tells one trained model from another, the mechanism first and what is always different last.
fn traits(run: &StoredRun, row: &Row, points: &[(Option<f64>, Evaluation)]) -> Vec<String> {
    let number =
        |name: &str, value: Option<u64>| value.map_or_else(String::new, |value| format!("{name} {value}"));
    vec![
        row.label(),
        number("length", row.len),
        number("seed", row.seed),
        number("batch", row.batch),
        row.preset.clone().unwrap_or_default(),
        row.dtype.clone(),
        row.kernel.clone(),
        row.fraction.map_or_else(String::new, |part| format!("{} %", 100.0 * part)),
        points.last().map_or_else(String::new, |(_, last)| format!("{} steps", last.step)),
        run.manifest.id.clone(),
    ]
}

/// Evaluations and the learning rates of their lines, where the file has a column of them.
fn read(path: &Path) -> Result<Vec<(Option<f64>, Evaluation)>> {
    let mut points = Vec::new();
    let mut reader = ::csv::Reader::from_path(path)?;
    let rates = reader.headers()?.iter().any(|column| column == "rate");
    for record in reader.records() {
        let record = record?;
        let (rate, (step, train_loss, loss, value)) = match rates {
            true => {
                let (step, train_loss, loss, value, rate) = record.deserialize(None)?;
                (Some(rate), (step, train_loss, loss, value))
            }
            false => (None, record.deserialize(None)?),
        };
        points.push((rate, Evaluation { step, train_loss, loss, value }));
    }
    Ok(points)
}

/// A chart per command and task.
pub fn charts(all: &[CurveChart]) -> Result<Vec<Chart>> {
    let charts = all.iter().map(|CurveChart { command, task, axis, lines, floor }| {
        let name = format!("{command}-{task}-curves");
        let floor = floor.as_ref().map(|(rule, value)| (rule.as_str(), *value));
        learning(&name, &format!("Learning curves of {task}"), axis, lines, floor)
    });
    charts.filter_map(|chart| chart.transpose()).collect::<std::io::Result<_>>().map_err(Into::into)
}

/// Fewest evaluations of a curve that says when its loss fell.
const EVALUATIONS: usize = 5;

/// When the validation loss of every model had fallen half of its way: early, late, or at once.
pub fn fell(all: &[CurveChart]) -> Option<Table> {
    let lines = all.iter().flat_map(|curves| {
        curves.lines.iter().filter(|line| line.points.len() >= EVALUATIONS).filter_map(|line| {
            let (first, last) = (line.points.first()?, line.points.last()?);
            let best = line.points.iter().min_by(|a, b| a.loss.total_cmp(&b.loss))?;
            let half = f64::midpoint(first.loss, best.loss);
            let step = line.points.iter().find(|point| point.loss <= half)?.step;
            let numbers = [step, best.step, last.step].map(|step| format!("{step:.0}"));
            let losses = [first.loss, best.loss].map(|loss| format!("{loss:.3}"));
            let [half, lowest, all] = numbers;
            let [first, best] = losses;
            Some(vec![curves.task.clone(), line.label.clone(), half, lowest, all, first, best])
        })
    });
    let rows: Vec<Vec<String>> = lines.collect();
    let columns = ["task", "model", "half way", "lowest", "all updates", "first loss", "lowest loss"];
    (!rows.is_empty()).then(|| Table {
        title: "When the validation loss fell".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        numbers: 5,
        rows,
        notes: vec![
            "half way: the first evaluation whose loss is at most the mean of the first and the lowest one. A model that stays on a \
             plateau and then leaves it has its half way there. Losses in nat."
                .to_owned(),
        ],
        spare: vec![5, 6],
        ..Table::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::manifest::Manifest;
    use crate::run::plan::Plan;

    #[test]
    fn every_learning_rate_has_a_line_from_its_own_first_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("curve.csv");
        let text = "step,train_loss,validation_loss,validation_accuracy,rate\n188,5,4.9,1,1e-3\n376,3,2.9,30,1e-3\n188,5,4,2,1e-2\n";
        std::fs::write(&path, text).unwrap();
        let all = lines("full", read(&path).unwrap());
        let steps = |line: &TrainingCurve| line.points.iter().map(|point| point.step).collect::<Vec<_>>();
        let told: Vec<_> = all.iter().map(|line| (line.label.as_str(), steps(line))).collect();
        assert_eq!(told, [("full, rate 1e-3", vec![188.0, 376.0]), ("full, rate 1e-2", vec![188.0])]);
        std::fs::write(&path, text.replace(",rate", "").replace(",1e-3", "").replace(",1e-2", "")).unwrap();
        let all = lines("full", read(&path).unwrap());
        assert_eq!((all.len(), all[0].points.len(), all[0].label.as_str()), (1, 3, "full"));
    }

    #[test]
    fn a_damaged_curve_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let row = Row {
            task: Some("listops".into()),
            preset: Some("ls-lra".into()),
            seed: Some(1),
            ..Row::new("lra", "full")
        };
        let plan = Plan { command: "lra".to_owned(), ..Plan::default() };
        let manifest = Manifest::new(&plan, "id");
        let run = StoredRun { folder: dir.path().to_owned(), manifest, rows: vec![row.clone()] };
        let cell = folder(dir.path(), "listops full ls-lra s1");
        std::fs::create_dir_all(&cell).unwrap();
        for (text, curves) in [("1,2,1.5,50\n", 1), ("1,no number\n", 0), ("1\n", 0)] {
            let head = "step,train_loss,validation_loss,validation_accuracy\n";
            std::fs::write(cell.join("curve.csv"), format!("{head}{text}")).unwrap();
            assert_eq!(of_runs(&[&run], std::slice::from_ref(&row)).len(), curves, "{text}");
        }
    }

    #[test]
    fn a_plateau_has_its_half_way_where_it_ends() {
        let loss = |step: usize| if step < 7 { 2.25 - 0.001 * step as f64 } else { 1.8 - 0.01 * step as f64 };
        let point =
            |step: usize| Evaluation { step: 50.0 * step as f64, loss: loss(step), ..Evaluation::default() };
        let line = |label: &str, count: usize| TrainingCurve {
            label: label.to_owned(),
            points: (1..=count).map(point).collect(),
        };
        let lines = vec![line("ls, seed 1", 9), line("short", 3)];
        let curves = CurveChart {
            command: "lra".into(),
            task: "listops".into(),
            axis: "accuracy",
            lines,
            floor: None,
        };
        let table = fell(&[curves]).unwrap();
        assert_eq!(table.rows, [["listops", "ls, seed 1", "350", "450", "450", "2.249", "1.710"]]);
        assert!(fell(&[]).is_none());
    }
}
