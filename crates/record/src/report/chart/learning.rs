//! Learning curves: loss and accuracy against steps.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::linear::{Line, Panel, Plane, Ticks};
use super::style::{Dash, SeriesStyle, apart, looks, mechanism};
use super::{Chart, table};

/// One model under training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainingCurve {
    /// Name.
    pub label: String,
    /// Evaluations in the order of steps.
    pub points: Vec<Evaluation>,
}

/// What is known behind a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Steps made.
    pub step: f64,
    /// Mean training loss since the evaluation before.
    pub train_loss: f64,
    /// Validation loss.
    pub loss: f64,
    /// What weights are selected by.
    pub value: f64,
}

/// Parts of labels that tell runs of one model apart, and what several of them are called.
const RUNS: [(&str, &str); 2] = [("seed ", "seeds"), ("rate ", "learning rates")];

/// The runs of one model, which look alike.
struct Series<'a> {
    label: String,
    look: SeriesStyle,
    seeds: Vec<&'a TrainingCurve>,
}

impl<'a> Series<'a> {
    /// The models of `lines`: a colour per mechanism while there are enough, the less known of more in grey, and the second variant of
    /// a mechanism paler than the first.
    fn of(lines: &'a [TrainingCurve]) -> Vec<Self> {
        let mut names: Vec<String> = Vec::new();
        let mut seeds: Vec<Vec<&TrainingCurve>> = Vec::new();
        for line in lines {
            let own = |part: &&str| !RUNS.iter().any(|(word, _)| part.starts_with(word));
            let name = line.label.split(", ").filter(own).collect::<Vec<_>>().join(", ");
            match names.iter().position(|known| *known == name) {
                Some(index) => seeds[index].push(line),
                None => {
                    names.push(name);
                    seeds.push(vec![line]);
                }
            }
        }
        let labels: Vec<&str> = names.iter().map(String::as_str).collect();
        let mechanisms = labels.iter().map(|label| mechanism(label)).collect::<BTreeSet<_>>();
        let mechanisms: Vec<&str> = mechanisms.into_iter().collect();
        let colors: BTreeMap<&str, Option<SeriesStyle>> =
            mechanisms.iter().copied().zip(apart(&mechanisms)).collect();
        let mut variants: BTreeMap<&str, usize> = BTreeMap::new();
        let looks = looks(&labels).into_iter().zip(&labels).map(|(look, label)| {
            let variant = variants.entry(mechanism(label)).or_default();
            *variant += 1;
            match (colors[mechanism(label)], *variant) {
                (None, _) => look.faint(),
                (Some(own), 2) => SeriesStyle { color: own.color, ..look }.paler(),
                (Some(own), _) => SeriesStyle { color: own.color, ..look },
            }
        });
        let looks: Vec<SeriesStyle> = looks.collect();
        let all = names.into_iter().zip(looks).zip(seeds);
        let series = all.map(|((name, look), seeds)| {
            let count = |(word, plural): (&str, &str)| {
                let parts = seeds.iter().flat_map(|line| line.label.split(", "));
                let count = parts.filter(|part| part.starts_with(word)).collect::<BTreeSet<_>>().len();
                (count > 1).then(|| format!("{count} {plural}"))
            };
            let label = match seeds.len() {
                1 => seeds[0].label.clone(),
                _ => {
                    format!("{name} ({})", RUNS.into_iter().filter_map(count).collect::<Vec<_>>().join(", "))
                }
            };
            Series { label, look, seeds }
        });
        series.collect()
    }
}

/// A chart of `lines`: validation loss (solid) and training loss (dashed) above, `measure` (such as "validation
/// accuracy, %") below, with a line at what the best simple rule reaches (`floor`: its name and value). Of more mechanisms
/// than can be told apart the less known are grey. Nothing without points.
pub fn learning(
    name: &str,
    title: &str,
    measure: &str,
    lines: &[TrainingCurve],
    floor: Option<(&str, f64)>,
) -> io::Result<Option<Chart>> {
    if lines.iter().all(|line| line.points.is_empty()) {
        return Ok(None);
    }
    let series = Series::of(lines);
    let of = |pick: fn(&Evaluation) -> f64| -> Vec<Line> {
        let points =
            |line: &TrainingCurve| line.points.iter().map(|point| (point.step, pick(point))).collect();
        let mut drawn = Vec::new();
        for series in &series {
            for (index, seed) in series.seeds.iter().enumerate() {
                let line = Line::solid(series.look, &series.label, points(seed));
                drawn.push(Line { label: line.label.filter(|_| index == 0), ..line });
            }
        }
        drawn
    };
    let dashed = of(|point| point.train_loss).into_iter().map(|line| Line {
        label: None,
        look: SeriesStyle { dash: Dash::Dashed, open: true, ..line.look },
        ..line
    });
    let panel = |title, lines| Panel { title, axis: "training steps", ticks: Ticks::FromZero, lines };
    let losses = dashed.chain(of(|point| point.loss)).collect();
    let mut values = of(|point| point.value);
    let last = lines.iter().flat_map(|line| &line.points).map(|point| point.step).fold(0.0, f64::max);
    let rule = floor.map(|(rule, value)| (format!("floor: {rule}"), value));
    if let Some((label, value)) = &rule {
        let (look, ends) = (SeriesStyle::default().faint(), vec![(0.0, *value), (last, *value)]);
        values.push(Line { markers: false, ..Line::solid(look, label, ends) });
    }
    let plane = Plane {
        title,
        subtitle: "solid: validation, dashed: training (mean since the evaluation before)",
        panels: vec![panel("loss, nat", losses), panel(measure, values)],
    };
    let points = lines.iter().flat_map(|line| line.points.iter().map(move |point| (&line.label, point)));
    let records = points.map(|(label, point)| {
        let numbers = [point.step, point.train_loss, point.loss, point.value].map(|x| x.to_string());
        std::iter::once(label.clone()).chain(numbers).collect()
    });
    let below = rule.iter().map(|(label, value)| {
        let empty = || String::new();
        vec![label.clone(), empty(), empty(), empty(), value.to_string()]
    });
    let csv = table(
        &["series", "step", "train_loss", "validation_loss", measure],
        records.chain(below).collect::<Vec<_>>(),
    )?;
    Ok(Some(Chart { name: name.to_owned(), svg: plane.draw()?, csv }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_names_its_lines_and_keeps_its_data() {
        let point = |step: f64| Evaluation { step, train_loss: 2.0, loss: f64::NAN, value: step / 10.0 };
        let line = TrainingCurve { label: "ls <a>".to_owned(), points: vec![point(50.0), point(100.0)] };
        let floor = Some(("root operator", 37.5));
        let chart = learning("x", "Title", "validation accuracy, %", &[line], floor).unwrap().unwrap();
        assert!(chart.svg.contains("ls &lt;a&gt;") && chart.svg.contains("training steps"));
        assert!(
            chart.svg.contains("floor: root operator")
                && chart.csv.ends_with("floor: root operator,,,,37.5\n")
        );
        assert_eq!(chart.csv.lines().count(), 4);
        assert!(learning("x", "", "", &[TrainingCurve::default()], floor).unwrap().is_none());
    }

    #[test]
    fn seeds_of_a_model_look_alike_and_are_named_once() {
        let point = |step: f64| Evaluation { step, train_loss: 2.0, loss: 1.0, value: step };
        let line =
            |label: &str| TrainingCurve { label: label.to_owned(), points: vec![point(1.0), point(2.0)] };
        let lines = ["ls, seed 1", "ls:dual_ln=false, seed 1", "ls, seed 2"].map(line);
        let series = Series::of(&lines);
        let labels: Vec<&str> = series.iter().map(|series| series.label.as_str()).collect();
        assert_eq!(labels, ["ls (2 seeds)", "ls:dual_ln=false, seed 1"]);
        assert_eq!(series[0].seeds.len(), 2);
        assert_ne!(series[0].look, series[1].look);
        let chart = learning("x", "T", "%", &lines, None).unwrap().unwrap();
        assert_eq!(chart.svg.matches(">\nls (2 seeds)\n<").count(), 2, "once in each of two panels");
        assert!(chart.csv.contains("\"ls, seed 2\",2,"), "{}", chart.csv);
        let lines = ["ls, seed 1, rate 1e-3", "ls, seed 1, rate 1e-2", "ls, seed 2, rate 1e-3"].map(line);
        let series = Series::of(&lines);
        assert_eq!(
            series.iter().map(|series| &series.label[..]).collect::<Vec<_>>(),
            ["ls (2 seeds, 2 learning rates)"]
        );
    }

    #[test]
    fn of_many_mechanisms_the_less_known_are_grey() {
        let drawn = |names: &[&str]| {
            let point = |step: f64| Evaluation { step, train_loss: 2.0, loss: 1.0, value: step };
            let line = |name: &&str| TrainingCurve {
                label: format!("{name} s1"),
                points: vec![point(1.0), point(2.0)],
            };
            let lines: Vec<TrainingCurve> = names.iter().map(line).collect();
            learning("x", "T", "%", &lines, None).unwrap().unwrap().svg.matches("#A8A8A8").count()
        };
        let all = [
            "full",
            "ls",
            "cosformer",
            "linear",
            "linformer",
            "rfa",
            "local",
            "reformer",
            "dp",
            "sparse",
            "bigbird",
        ];
        assert_eq!(drawn(&all[..10]), 0);
        assert!(drawn(&all) > 0);
    }

    #[test]
    fn thousands_of_lines_make_a_chart_that_grows_with_their_number_only() {
        let point =
            |step: f64| Evaluation { step, train_loss: 2.0 - step / 100.0, loss: 1.5, value: step / 10.0 };
        let drawn = |count: usize| {
            let line = |index| TrainingCurve {
                label: format!("run {index}"),
                points: vec![point(50.0), point(100.0)],
            };
            let lines: Vec<TrainingCurve> = (0..count).map(line).collect();
            learning("x", "Title", "validation accuracy, %", &lines, None).unwrap().unwrap().svg
        };
        let (few, many, most) = (drawn(50), drawn(500), drawn(2000));
        assert!(!few.contains("too many") && most.contains("2000 lines, too many to name;"));
        assert!(few.contains(">\nrun 49\n<"), "every one of a few lines is named");
        assert!(
            !many.contains(">\nrun 49\n<") && many.contains("run 499, training steps"),
            "named under the pointer"
        );
        assert!(most.len() < 1500 * 2000, "{} bytes of 2,000 lines", most.len());
    }
}
