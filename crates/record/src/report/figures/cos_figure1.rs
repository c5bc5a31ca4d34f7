//! cosFormer, Figure 1: accuracy on the Long Range Arena against speed, memory as the area of a bubble; what the paper
//! printed stands in a plane of its own.
//!
//! Machines differ, so speed is relative to full attention of the same source: inference at 1K. Accuracy is the mean
//! over the tasks that were trained here, also of the published numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::conditions;
use crate::config::suite::Suite;
use crate::departures::leaves_share;
use crate::report::chart::{Bubble, Chart, bubbles};
use crate::{Outcome, Pass, Row};

/// Areas of the drawn circles relative to the largest (read from the figure's file; the paper gives no bytes).
const DRAWN: &[(&str, f64)] = &[
    ("synthesizer", 1.0),
    ("full", 0.84),
    ("longformer", 0.84),
    ("sparse", 0.84),
    ("bigbird", 0.51),
    ("local", 0.27),
    ("linformer", 0.27),
    ("reformer", 0.27),
    ("sinkhorn", 0.27),
    ("linear", 0.27),
    ("performer", 0.27),
    ("cosformer", 0.27),
];

/// Published accuracies and speeds.
const ACCURACY: &str = "cos-table4";
const SPEED: &str = "cos-table5";

/// The length of the figure.
const LEN: u64 = 1024;

pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let Some(learned) = accuracies(rows) else { return Ok(Vec::new()) };
    let Some(measured) = speeds(rows, &learned) else { return Ok(Vec::new()) };
    let most = measured.values.values().map(|(_, bytes)| *bytes).fold(1.0, f64::max);
    let mut all = Vec::new();
    for (model, (speed, bytes)) in &measured.values {
        if let Some(y) = learned.values.get(model) {
            all.push(Bubble { label: model.clone(), x: *speed, y: *y, area: bytes / most, ghost: false });
        }
    }
    if all.len() < 2 {
        return Ok(Vec::new());
    }
    all.extend(ghosts(&learned.tasks));
    all.sort_by(|a, b| a.label.cmp(&b.label)); // a model's look is its place in the alphabet
    let tasks = learned.tasks.join(", ");
    let subtitles = [
        format!("measured: speed and memory with {}", measured.about),
        format!("measured accuracy: {}", learned.about),
        "published: other models, batch 32 on one A6000".to_owned(),
        "area: peak memory relative to the largest".to_owned(),
    ];
    let title = "Accuracy, speed and memory (cosFormer, Figure 1)";
    let axes = ("inference at 1K: speed relative to full attention", format!("accuracy, % ({tasks})"));
    Ok(bubbles("cos-figure1", (title, &subtitles), (axes.0, &axes.1), &all)?.into_iter().collect())
}

/// Speed relative to full attention and peak bytes, by mechanism.
struct Speeds {
    values: BTreeMap<String, (f64, f64)>,
    about: String,
}

/// The measurement, of one build on one machine under one set of conditions, that has full attention and most of the mechanisms
/// that were `learned`; the last of equals. Turns with another program do not count: it slows the cell after it.
fn speeds(rows: &[&Row], learned: &Accuracies) -> Option<Speeds> {
    let mut groups: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let wanted = row.protocol == "speed" && row.metric == "step_time" && row.pass == Some(Pass::Infer);
        let ours = row.variant.is_none() && row.program.is_none() && row.outcome == Outcome::Ok;
        if wanted && ours && row.len == Some(LEN) {
            let key = format!("{} {} {:?} {:?}", conditions(row), row.kernel, row.commit, row.machine);
            match groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, group)) => group.push(row),
                None => groups.push((key, vec![row])),
            }
        }
    }
    let has_full = |group: &Vec<&Row>| group.iter().any(|row| row.model == "full");
    let shown = |group: &Vec<&Row>| {
        let models: BTreeSet<&str> = group.iter().map(|row| row.model.as_str()).collect();
        models.into_iter().filter(|model| learned.values.contains_key(*model)).count()
    };
    let group = groups.into_iter().map(|(_, group)| group).filter(has_full).max_by_key(shown)?;
    let full = group.iter().rev().find(|row| row.model == "full")?.value?;
    let values = group.iter().filter_map(|row| {
        let seconds = row.value.filter(|seconds| *seconds > 0.0)?;
        Some((row.model.clone(), (full / seconds, row.peak_bytes? as f64)))
    });
    Some(Speeds { values: values.collect(), about: conditions(group[0]) })
}

/// Mean accuracy over tasks, by mechanism.
struct Accuracies {
    values: BTreeMap<String, f64>,
    tasks: Vec<String>,
    about: String,
}

/// The settings with which most of the figure's mechanisms were trained, task by task; a further task counts where it leaves none of
/// the first task's mechanisms out.
fn accuracies(rows: &[&Row]) -> Option<Accuracies> {
    let mut groups: BTreeMap<(String, String), BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    for row in
        rows.iter().filter(|row| row.protocol == "lra" && row.metric == "accuracy" && row.variant.is_none())
    {
        let (Some(task), Some(value), Outcome::Ok) = (&row.task, row.value, row.outcome) else { continue };
        // what leaves the share is said in tables; a caption has one line
        let words = row.differs.as_deref().unwrap_or_default().split("; ").filter(|word| !word.is_empty());
        let words: Vec<&str> = words.filter(|word| !leaves_share(word)).collect();
        let words = (!words.is_empty()).then(|| words.join("; "));
        let share = words.or_else(|| row.fraction.map(share));
        let share = share.unwrap_or_else(|| "other settings".to_owned());
        let preset = row.preset.as_deref().unwrap_or("");
        let about = format!("{preset}, length {}, {share}", row.len.unwrap_or(0));
        groups.entry((task.clone(), about)).or_default().entry(row.model.clone()).or_default().push(value);
    }
    let mut best: BTreeMap<String, (String, BTreeMap<String, f64>)> = BTreeMap::new();
    for ((task, about), models) in groups {
        let means = models.into_iter().map(|(model, values)| {
            let count = values.len() as f64;
            (model, values.into_iter().sum::<f64>() / count)
        });
        let means: BTreeMap<String, f64> = means.collect();
        if best.get(&task).is_none_or(|(_, known)| drawn(known) < drawn(&means)) {
            best.insert(task, (about, means));
        }
    }
    let (first, (about, means)) = best.iter().max_by_key(|(_, (_, means))| drawn(means))?;
    let mut tasks = vec![first.clone()];
    tasks.extend(
        best.iter()
            .filter(|(task, (_, other))| {
                *task != first && means.keys().all(|model| other.contains_key(model))
            })
            .map(|(task, _)| task.clone()),
    );
    let mean = |model: &String| -> Option<f64> {
        let values: Option<Vec<f64>> =
            tasks.iter().map(|task| best.get(task)?.1.get(model).copied()).collect();
        let values = values?;
        Some(values.iter().sum::<f64>() / values.len() as f64)
    };
    let values = means.keys().filter_map(|model| Some((model.clone(), mean(model)?)));
    Some(Accuracies { values: values.collect(), about: about.clone(), tasks: tasks.clone() })
}

/// How many of `means` are of mechanisms that the figure has, then of any.
fn drawn(means: &BTreeMap<String, f64>) -> (usize, usize) {
    (means.keys().filter(|model| DRAWN.iter().any(|(known, _)| known == model)).count(), means.len())
}

fn share(part: f64) -> String {
    format!("{:.2} % of the protocol", 100.0 * part)
}

/// What the paper printed, at the mean over `tasks`.
fn ghosts(tasks: &[String]) -> Vec<Bubble> {
    let published = |suite: &str| Suite::load(suite).map(|suite| suite.rows).unwrap_or_default();
    let mut speeds = BTreeMap::new();
    for row in published(SPEED) {
        let value = row.table("steps_per_second").and_then(|table| table.at("infer", 0)?.value());
        speeds.extend(value.map(|value| (row.model.name, value)));
    }
    let Some(full) = speeds.get("full").copied() else { return Vec::new() };
    let rows = published(ACCURACY);
    // a mechanism may have a row of its own for some tasks
    let at = |model: &str, task: &String| {
        let own = rows.iter().filter(|row| row.model.name == model);
        own.filter_map(|row| row.table("accuracy")?.at(task, 0)?.value()).next()
    };
    let mut all: Vec<Bubble> = Vec::new();
    for (model, area) in DRAWN {
        let values: Option<Vec<f64>> = tasks.iter().map(|task| at(model, task)).collect();
        let (Some(values), Some(speed)) = (values, speeds.get(*model)) else { continue };
        let y = values.iter().sum::<f64>() / values.len().max(1) as f64;
        all.push(Bubble { label: (*model).to_owned(), x: speed / full, y, area: *area, ghost: true });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let mut rows = Vec::new();
        for (model, seconds, accuracy) in [("full", 2.0, 62.0), ("linear", 0.5, 60.0), ("ls", 0.8, 64.0)] {
            let done = |row: Row| row.with_outcome(Outcome::Ok, None);
            let speed = Row {
                pass: Some(Pass::Infer),
                len: Some(LEN),
                peak_bytes: Some(1000),
                ..Row::new("speed", model)
            };
            rows.push(done(speed.with("step_time", "s", Some(seconds))));
            for (task, shift) in [("text", 0.0), ("listops", -30.0)] {
                let row = Row { task: Some(task.to_owned()), fraction: Some(0.5), ..Row::new("lra", model) };
                rows.push(done(row.with("accuracy", "%", Some(accuracy + shift))));
            }
        }
        rows
    }

    #[test]
    fn speed_is_relative_and_accuracy_a_mean() {
        let rows = rows();
        let rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        let csv = &charts[0].csv;
        assert!(csv.contains("linear,measured,4,45,1\n"), "{csv}");
        let published = csv.lines().find(|line| line.starts_with("full,published,1,")).unwrap();
        let mean: f64 = published.split(',').nth(3).unwrap().parse().unwrap();
        assert!((mean - (36.37 + 64.27) / 2.0).abs() < 1e-9, "{published}");
        assert!(!csv.contains("ls,published"), "the paper has no Transformer-LS");
    }

    #[test]
    fn speeds_are_of_one_build_and_without_other_programs() {
        let of = |rows: &[Row]| draw(&rows.iter().collect::<Vec<_>>()).unwrap()[0].csv.clone();
        let alone = of(&rows());
        let mut all = rows();
        let speed: Vec<Row> = rows().into_iter().filter(|row| row.protocol == "speed").collect();
        // another build has two of the mechanisms, and more that have no accuracy
        for (index, row) in speed.iter().enumerate() {
            let model = if index < 2 { row.model.clone() } else { "retention".to_owned() };
            let value = row.value.map(|seconds| seconds * (1 + index) as f64);
            all.push(Row { commit: Some("b".to_owned()), value, model, ..row.clone() });
        }
        all.push(Row { model: "gla".to_owned(), ..all[all.len() - 1].clone() });
        // in turn with a program
        all.extend(speed.iter().map(|row| {
            let value = row.value.map(|seconds| seconds + 1.0);
            Row { program: Some("effattn".to_owned()), value, ..row.clone() }
        }));
        assert_eq!(of(&all), alone);
    }

    #[test]
    fn without_both_there_is_no_figure() {
        let rows = rows();
        let speed: Vec<&Row> = rows.iter().filter(|row| row.protocol == "speed").collect();
        assert!(draw(&speed).unwrap().is_empty() && draw(&[]).unwrap().is_empty());
    }
}
