//! The papers' figures and what belongs beside them, drawn from rows: one file per figure, one line in [`FIGURES`].

mod cos_figure1;
mod cos_table5;
mod language_state;
mod ls_figure3;
mod ls_figure6;
mod ls_table2;
mod recall;

use std::collections::BTreeSet;
use std::io;

use super::chart::Chart;
use crate::Row;
use crate::config::registry::Registry;
use crate::text::plural;

/// A figure that is drawn where rows have what it needs.
pub struct PaperFigure {
    /// Name of its files.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// Its charts from the rows of one device.
    pub draw: fn(&[&Row]) -> io::Result<Vec<Chart>>,
}

/// Every figure of the crate.
pub static FIGURES: &[&PaperFigure] = &[
    &PaperFigure {
        name: "cos-figure1",
        about: "accuracy against speed and memory (cosFormer, Figure 1)",
        draw: cos_figure1::draw,
    },
    &PaperFigure {
        name: "cos-table5",
        about: "steps per second by length (cosFormer, Table 5)",
        draw: cos_table5::draw,
    },
    &PaperFigure {
        name: "ls-figure3",
        about: "time and memory of language models against length (Transformer-LS, Figure 3)",
        draw: ls_figure3::draw,
    },
    &PaperFigure {
        name: "ls-figure6",
        about: "how alike patches are after every block (Transformer-LS, Figure 6)",
        draw: ls_figure6::draw,
    },
    &PaperFigure {
        name: "ls-table2",
        about: "accuracy on changed texts (Transformer-LS, Table 2)",
        draw: ls_table2::draw,
    },
    &PaperFigure {
        name: "state",
        about: "validation loss of language models against the bytes that decoding keeps",
        draw: language_state::draw,
    },
    &PaperFigure {
        name: "recall",
        about: "recall and state tracking: accuracy against state, time of a token, length and learning rate",
        draw: recall::draw,
    },
];

static ALL: Registry<PaperFigure> = Registry::new(FIGURES);

/// Adds a figure at run time (a library user's own, or a test's).
pub fn register(figure: &'static PaperFigure) {
    ALL.add(figure);
}

/// Every figure: those of the crate, then the registered ones.
pub fn figures() -> Vec<&'static PaperFigure> {
    ALL.all()
}

/// Every chart that `rows` have enough for. What was trained stands together, whatever device trained it; devices that were measured are
/// kept apart: each has charts of its own, with its name behind theirs where several have the same one.
pub fn draw(rows: &[Row]) -> io::Result<Vec<Chart>> {
    let measured = rows.iter().filter(|row| row.is_measured());
    let mut devices: BTreeSet<&str> = measured.map(|row| row.device.as_str()).collect();
    if devices.is_empty() {
        devices.insert("");
    }
    let mut drawn: Vec<(&str, Chart)> = Vec::new();
    for device in devices {
        let here: Vec<&Row> = rows.iter().filter(|row| row.device == device || !row.is_measured()).collect();
        for figure in figures() {
            for chart in (figure.draw)(&here)? {
                let known = drawn.iter().any(|(_, known)| known.name == chart.name && known.svg == chart.svg);
                if !known {
                    drawn.push((device, chart));
                }
            }
        }
    }
    let names: Vec<String> = drawn.iter().map(|(_, chart)| chart.name.clone()).collect();
    let named = drawn.into_iter().map(|(device, chart)| {
        let once = names.iter().filter(|name| **name == chart.name).count() == 1;
        let name = if once { chart.name } else { format!("{}-{}", chart.name, device.replace(':', "")) };
        Chart { name, ..chart }
    });
    Ok(named.collect())
}

/// Names in the order they come first.
fn in_order<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        if !all.iter().any(|known| known == name) {
            all.push(name.to_owned());
        }
    }
    all
}

/// `cpu · 2 threads · batch 1 · lra-repo`: what `row` was measured with.
fn conditions(row: &Row) -> String {
    let threads = row.threads.map_or_else(String::new, |threads| plural(threads, "thread"));
    let batch = row.batch.map_or_else(String::new, |batch| format!("batch {batch}"));
    let size = |word: &&str| ["layers=", "width=", "heads=", "ffn="].iter().any(|key| word.starts_with(key));
    let sizes: Vec<&str> = row.each_setting().filter(size).collect();
    let preset = row.preset.clone().unwrap_or_default();
    let parts = [row.device.clone(), threads, batch, preset, sizes.join(" "), row.dtype.clone()];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Pass, Published};

    #[test]
    fn what_was_trained_is_drawn_once_and_with_every_device() {
        let trained = |model: &str, task: &str, device: &str, accuracy: f64| Row {
            task: Some(task.to_owned()),
            len: Some(1024),
            fraction: Some(1.0),
            device: device.to_owned(),
            ..Row::new("robustness", model)
                .with("accuracy", "%", Some(accuracy))
                .with_outcome(Outcome::Ok, None)
        };
        let speed = |model: &str, device: &str| Row {
            pass: Some(Pass::Infer),
            len: Some(1024),
            batch: Some(1),
            peak_bytes: Some(1 << 20),
            device: device.to_owned(),
            ..Row::new("speed", model).with("step_time", "s", Some(1.0)).with_outcome(Outcome::Ok, None)
        };
        let learned = |model: &str, device: &str, accuracy: f64| Row {
            protocol: "lra".to_owned(),
            ..trained(model, "listops", device, accuracy)
        };
        let mut rows = vec![speed("full", "cpu"), speed("linear", "cpu"), learned("linear", "cpu", 20.0)];
        rows.extend([learned("full", "cpu", 30.0), learned("full", "cuda:0", 40.0)]);
        let figure = |rows: &[Row]| -> Vec<(String, String)> {
            let charts = draw(rows).unwrap().into_iter().map(|chart| (chart.name, chart.csv));
            charts.filter(|(name, _)| name.starts_with("cos-figure1")).collect()
        };
        let found = figure(&rows);
        assert!(matches!(&found[..], [(_, csv)] if csv.contains("full,measured,1,35,")), "{found:?}");
        rows.extend(["text", "text-insertion"].map(|task| trained("full", task, "cpu", 60.0)));
        rows.extend([speed("full", "cuda:0"), speed("linear", "cuda:0")]);
        let names: Vec<String> = draw(&rows).unwrap().into_iter().map(|chart| chart.name).collect();
        let of_trained = names.iter().filter(|name| name.starts_with("ls-table2"));
        assert_eq!(of_trained.count(), 1, "{names:?}");
    }

    #[test]
    fn a_device_names_charts_that_another_has_too() {
        let row = |model: &str, device: &str| Row {
            suite: Some("cos-table5".to_owned()),
            pass: Some(Pass::Infer),
            len: Some(1024),
            batch: Some(32),
            published: Some(Published::Value(25.37)),
            device: device.to_owned(),
            ..Row::new("speed", model)
                .with("steps_per_second", "1/s", Some(2.0))
                .with_outcome(Outcome::Ok, None)
        };
        let names = |rows: &[Row]| -> Vec<String> {
            let charts = draw(rows).unwrap();
            charts.into_iter().map(|chart| chart.name).filter(|name| name.starts_with("cos-table5")).collect()
        };
        let trained = Row { device: "cuda:0".to_owned(), ..Row::new("lra", "full") };
        let mut rows = vec![row("full", "cpu"), row("linear", "cpu"), trained];
        assert_eq!(names(&rows), ["cos-table5"]);
        rows.extend([row("full", "cuda:0"), row("linear", "cuda:0")]);
        assert_eq!(names(&rows), ["cos-table5-cpu", "cos-table5-cuda0"]);
    }
}
