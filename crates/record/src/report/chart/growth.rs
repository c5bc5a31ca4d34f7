//! Time and memory against length, from rows.

use std::io;

use super::style::looks;
use super::{Chart, Figure, Measured, Missing, Panel, Series, Unit};
use crate::report::place;
use crate::report::ratio::Ratio;
use crate::report::seeds::over_seeds;
use crate::text::plural;
use crate::{Outcome, Pass, Row};

/// What a growth chart shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Seconds per step.
    Time,
    /// Peak bytes of a step.
    Memory,
    /// Tokens per second of decoding.
    Tokens,
    /// Time that the matrix products of a step alone would take, over the time of the step.
    Limit,
}

impl Quantity {
    /// Those with a chart.
    pub const CHARTS: [Self; 2] = [Self::Time, Self::Memory];
    /// Those with a table.
    pub const TABLES: [Self; 4] = [Self::Time, Self::Tokens, Self::Limit, Self::Memory];

    const fn title(self) -> &'static str {
        match self {
            Self::Time => "Time per step against length",
            Self::Memory => "Peak memory of a step against length",
            Self::Tokens => "Tokens per second against length of the context",
            Self::Limit => "Share of the limit against length",
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Memory => "memory",
            Self::Tokens => "tokens",
            Self::Limit => "limit",
        }
    }

    /// The unit of its values.
    pub(in crate::report) const fn unit(self) -> Unit {
        match self {
            Self::Time => Unit::Seconds,
            Self::Memory => Unit::Bytes,
            Self::Tokens => Unit::Rate,
            Self::Limit => Unit::Share,
        }
    }

    /// Whether `row` is about this quantity. Time rows carry peak bytes in a column of their own; they
    /// count where no row has memory as its metric.
    fn picks(self, row: &Row, peaks: bool) -> bool {
        match self {
            Self::Time => row.metric == "step_time",
            Self::Memory if row.other_program().is_some() => false, // no peak of live bytes
            Self::Memory if peaks => row.metric == "peak_memory",
            Self::Memory => row.metric == "step_time",
            Self::Tokens => row.metric == "tokens_per_second" && row.pass == Some(Pass::Decode),
            Self::Limit => row.metric == "share_of_limit",
        }
    }

    /// The rows that are about it and have a length, the seeds of a cell as one.
    pub(in crate::report) fn rows(self, rows: &[Row]) -> Vec<Row> {
        let peaks = rows.iter().any(|row| row.metric == "peak_memory");
        over_seeds(rows.iter().filter(|row| self.picks(row, peaks) && row.len.is_some()))
    }

    /// `over` divided by `under` in it; bytes are exact.
    pub(in crate::report) fn ratio(self, over: &Row, under: &Row) -> Option<Ratio> {
        match self {
            Self::Memory => Ratio::exact(self.value(over)?, self.value(under)?),
            Self::Time | Self::Tokens | Self::Limit => Ratio::of(over, under),
        }
    }

    /// Its value in `row`.
    pub(in crate::report) fn value(self, row: &Row) -> Option<f64> {
        let value = match self {
            Self::Memory if row.metric != "peak_memory" => row.peak_bytes.map(|bytes| bytes as f64),
            Self::Time | Self::Memory | Self::Tokens | Self::Limit => row.value,
        };
        value.filter(|value| *value > 0.0 && value.is_finite())
    }
}

/// The chart `<prefix>-time` or `<prefix>-memory`: `quantity` against length, one line per mechanism and
/// variant, one panel per pass, batch size and whatever else differs. `None` if no row has a value of it.
pub fn growth(rows: &[Row], quantity: Quantity, prefix: &str) -> io::Result<Option<Chart>> {
    match figure(rows, quantity) {
        Some(figure) => figure.chart(&format!("{prefix}-{}", quantity.word())).map(Some),
        None => Ok(None),
    }
}

/// Columns that make panels, with their texts; those that are equal everywhere go to the subtitle. The last are the settings
/// of another model, which are said only where they differ.
fn conditions(row: &Row) -> Vec<String> {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let pass = row.pass.map_or("", |pass| match pass {
        Pass::Infer => "inference",
        Pass::Train => "training",
        Pass::Decode => "decoding",
    });
    vec![
        pass.to_owned(),
        row.batch.map_or_else(String::new, |batch| format!("batch {batch}")),
        text(&row.task),
        text(&row.preset),
        row.device.clone(),
        row.threads.map_or_else(String::new, |threads| plural(threads, "thread")),
        row.dtype.clone(),
        row.kernel.clone(),
        row.defining_settings().join(" "),
    ]
}

/// Rows measured under the same conditions, each group with what tells it from the others.
pub fn alike<'a>(rows: &[&'a Row]) -> Vec<(String, Vec<&'a Row>)> {
    grouped(rows).1
}

/// What all `rows` have in common, and those that are alike in everything with what tells them from the others.
pub(in crate::report) fn grouped<'a>(rows: &[&'a Row]) -> (String, Vec<(String, Vec<&'a Row>)>) {
    let keys: Vec<Vec<String>> = rows.iter().map(|row| conditions(row)).collect();
    let Some(first) = keys.first() else { return Default::default() };
    let differs: Vec<bool> = (0..first.len()).map(|i| keys.iter().any(|key| key[i] != first[i])).collect();
    let join = |key: &[String], wanted: bool| {
        let parts =
            key.iter().zip(&differs).filter(|(part, differs)| **differs == wanted && !part.is_empty());
        parts.map(|(part, _)| part.as_str()).collect::<Vec<_>>().join(" · ")
    };
    let mut groups: Vec<(&Vec<String>, Vec<&Row>)> = Vec::new();
    for (row, key) in rows.iter().zip(&keys) {
        place(&mut groups, |(known, _)| *known == key, || (key, Vec::new())).1.push(row);
    }
    let titled = groups.into_iter().map(|(key, rows)| (capital(&join(key, true)), rows)).collect();
    (join(&first[..first.len() - 1], false), titled)
}

/// What [`growth`] draws; [`crate::report::table::growth`] makes tables of it.
pub fn figure(rows: &[Row], quantity: Quantity) -> Option<Figure> {
    let picked = quantity.rows(rows);
    picked.iter().find(|row| quantity.value(row).is_some())?;
    let (subtitle, groups) = grouped(&picked.iter().collect::<Vec<_>>());
    let mut labels: Vec<String> = Vec::new();
    for row in &picked {
        if !labels.contains(&row.label()) {
            labels.push(row.label());
        }
    }
    let panel = |(title, rows): (String, Vec<&Row>)| {
        let mut panel = Panel { title, series: Vec::new() };
        for row in rows {
            let label = row.label();
            let new = || Series { label: label.clone(), ..Series::default() };
            add(place(&mut panel.series, |series| series.label == label, new), row, quantity);
        }
        panel
    };
    let mut panels: Vec<Panel> = groups.into_iter().map(panel).collect();
    panels.retain(|panel| panel.series.iter().any(Series::can_run));
    finish(&mut panels, &labels);
    Some(Figure { title: quantity.title().to_owned(), subtitle, unit: quantity.unit(), panels })
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn add(series: &mut Series, row: &Row, quantity: Quantity) {
    let x = row.len.unwrap_or_default() as f64;
    match quantity.value(row).filter(|_| row.outcome == Outcome::Ok) {
        Some(y) => {
            let own = quantity == Quantity::Time || row.metric == "peak_memory";
            let interval = row.interval().filter(|_| own);
            series.points.push(Measured { x, y, interval });
        }
        None => {
            let cross = matches!(row.outcome, Outcome::Oom | Outcome::Timeout);
            series.missing.push(Missing { x, outcome: row.outcome.word().to_owned(), cross });
        }
    }
}

/// Sorts points by length and gives every label its look.
fn finish(panels: &mut [Panel], labels: &[String]) {
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    let looks = looks(&labels);
    for series in panels.iter_mut().flat_map(|panel| &mut panel.series) {
        series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
        series.missing.sort_by(|a, b| a.x.total_cmp(&b.x));
        let place = labels.iter().position(|label| *label == series.label);
        series.look = place.map(|place| looks[place]).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a run over `models` whose time is `factor * len^slope`, out of memory beyond `limit`.
    fn rows(models: &[(&str, f64, f64, u64)], passes: &[Pass]) -> Vec<Row> {
        let mut rows = Vec::new();
        for pass in passes {
            for (model, factor, slope, limit) in models {
                for len in [512u64, 1024, 2048, 4096, 8192] {
                    let heavy = if *pass == Pass::Train { 3.0 } else { 1.0 };
                    let value = heavy * factor * (len as f64 / 1024.0).powf(*slope);
                    let fits = len <= *limit;
                    let mut row = Row::new("speed", model).with("step_time", "s", fits.then_some(value));
                    row.pass = Some(*pass);
                    row.len = Some(len);
                    row.batch = Some(1);
                    row.device = "cpu".into();
                    row.threads = Some(2);
                    row.preset = Some("lra-repo".into());
                    row.outcome = match len {
                        len if len <= *limit => Outcome::Ok,
                        len if len / 2 <= *limit => Outcome::Oom,
                        _ => Outcome::Implied,
                    };
                    row.peak_bytes = fits.then_some((value * 4e9) as u64);
                    (row.ci_low, row.ci_high) = (row.value.map(|v| v * 0.97), row.value.map(|v| v * 1.04));
                    rows.push(row);
                }
            }
        }
        rows
    }

    const FOUR: [(&str, f64, f64, u64); 4] = [
        ("linear", 0.011, 1.0, 9000),
        ("full", 0.02, 1.9, 2048),
        ("cosformer", 0.013, 1.01, 9000),
        ("ls", 0.0125, 1.03, 9000),
    ];

    #[test]
    fn what_differs_makes_panels_and_the_rest_a_subtitle() {
        let figure = figure(&rows(&FOUR, &[Pass::Infer, Pass::Train]), Quantity::Time).unwrap();
        let titles: Vec<&str> = figure.panels.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(titles, ["Inference", "Training"]);
        assert_eq!(figure.subtitle, "batch 1 · lra-repo · cpu · 2 threads · f32 · fused");
        for series in figure.panels.iter().flat_map(|panel| &panel.series) {
            assert_eq!(series.look, looks(&[&series.label])[0], "{}", series.label);
        }
    }

    #[test]
    fn models_of_other_sizes_have_panels_of_their_own() {
        let mut rows = rows(&FOUR[..2], &[Pass::Infer]);
        let sized = |settings: &str| {
            let settings = Some(format!("max_time=1.0 {settings}"));
            rows.iter().map(move |row| Row { settings: settings.clone(), ..row.clone() }).collect::<Vec<_>>()
        };
        let (deep, wide) = (sized("layers=2"), sized("width=16"));
        let alone = figure(&deep, Quantity::Time).unwrap();
        assert_eq!(alone.subtitle, figure(&rows, Quantity::Time).unwrap().subtitle);
        rows.extend(deep.into_iter().chain(wide));
        let figure = figure(&rows, Quantity::Time).unwrap();
        let titles: Vec<&str> = figure.panels.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(titles, ["", "Layers=2", "Width=16"]);
        assert!(figure.panels.iter().flat_map(|panel| &panel.series).all(|series| series.points.len() < 6));
    }

    #[test]
    fn only_the_first_length_beyond_the_limit_has_a_cross() {
        let figure = figure(&rows(&FOUR, &[Pass::Infer]), Quantity::Time).unwrap();
        let full = &figure.panels[0].series[1];
        let missing: Vec<_> = full.missing.iter().map(|m| (m.x, m.outcome.as_str(), m.cross)).collect();
        assert_eq!(missing, [(4096.0, "oom", true), (8192.0, "implied", false)]);
        assert!((full.law().unwrap().slope - 1.9).abs() < 1e-9);
    }

    #[test]
    fn memory_rows_count_before_the_peaks_of_time_rows() {
        let mut rows = rows(&FOUR, &[Pass::Infer]);
        let peaks = figure(&rows, Quantity::Memory).unwrap();
        assert_eq!(peaks.panels[0].series.len(), 4);
        assert_eq!(peaks.panels[0].series[0].points[0].interval, None, "the interval is the time's");
        let mut own = rows[0].clone().with("peak_memory", "B", Some(1e6));
        own.ci_low = None;
        rows.push(own);
        let figure = figure(&rows, Quantity::Memory).unwrap();
        assert_eq!(figure.panels[0].series[0].points, [Measured { x: 512.0, y: 1e6, interval: None }]);
    }

    #[test]
    fn the_csv_holds_every_cell() {
        let rows = rows(&FOUR, &[Pass::Infer, Pass::Train]);
        let chart = growth(&rows, Quantity::Time, "speed").unwrap().unwrap();
        assert_eq!(chart.name, "speed-time");
        assert_eq!(chart.csv.lines().count(), 1 + rows.len());
        assert!(chart.csv.contains("\nTraining,full,4096,,s,,,oom,1.9000\n"), "{}", chart.csv);
        assert!(chart.svg.contains("out of memory or time"));
    }

    #[test]
    fn conditions_under_which_nothing_can_run_are_no_panel() {
        let mut rows = rows(&FOUR, &[Pass::Infer, Pass::Train]);
        for row in rows.iter_mut().filter(|row| row.pass == Some(Pass::Train)) {
            (row.value, row.outcome) = (None, Outcome::Unsupported);
        }
        let figure = figure(&rows, Quantity::Time).unwrap();
        assert_eq!(figure.panels.iter().map(|panel| panel.title.as_str()).collect::<Vec<_>>(), ["Inference"]);
    }

    #[test]
    fn no_value_no_chart() {
        let mut rows = rows(&FOUR, &[Pass::Infer]);
        assert!(growth(&[], Quantity::Time, "speed").unwrap().is_none());
        rows.iter_mut().for_each(|row| (row.value, row.peak_bytes) = (None, None));
        assert!(growth(&rows, Quantity::Time, "speed").unwrap().is_none());
        assert!(growth(&rows, Quantity::Memory, "speed").unwrap().is_none());
    }

    #[test]
    fn one_length_and_a_series_of_crosses_can_be_drawn() {
        let mut rows = rows(&[("ls", 0.01, 1.0, 9000), ("full", 0.01, 2.0, 0)], &[Pass::Train]);
        rows.retain(|row| row.len == Some(512));
        rows[1].outcome = Outcome::Timeout;
        let chart = growth(&rows, Quantity::Time, "speed").unwrap().unwrap();
        assert!(!chart.svg.contains("NaN") && chart.svg.contains(">\nfull"), "{}", chart.svg);
    }
}
