//! Who is how many times as fast as a baseline, in words and as a ranking; how steps spread; how sure an accuracy is.

use super::chart::{Unit, alike};
use super::table::Table;
use super::wrap::TIED;
use super::{compare, place};
use crate::Row;
use crate::stats::{Interval, SampleStats, mean, quantile, ratio_interval};

/// What a ratio is against where nothing is asked: full attention in classifiers and in language models.
const USUAL: [&str; 2] = ["full", "transformer-xl"];

/// Lines about single mechanisms below a ranking.
const LINES: usize = 3;

/// One mechanism's speed relative to the baseline at one length.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    len: u64,
    times: f64,
    interval: Option<Interval>,
}

/// An interval that reaches so many times the ratio from it says nothing in digits.
const WIDE: f64 = 10.0;

impl Ratio {
    /// `1.82 ±0.1`.
    fn text(self) -> String {
        match self.interval {
            Some(Interval { low, high }) => {
                let half = (high - self.times).max(self.times - low);
                if half > WIDE * self.times {
                    return format!("{:.2} ±wide", self.times);
                }
                let digits = match half {
                    _ if half < 0.0095 => 3,
                    _ if half < 0.095 => 2,
                    _ if half < 0.95 => 1,
                    _ => 0,
                };
                format!("{:.digits$} ±{half:.digits$}", self.times)
            }
            None => format!("{:.2}", self.times),
        }
    }

    /// `linear is 1.8 ±0.1 times as fast as full at 4096 (training)`.
    fn line(self, label: &str, baseline: &str, title: &str) -> String {
        let place = if title.is_empty() { String::new() } else { format!(" ({})", title.to_lowercase()) };
        let sure = self.interval.is_none_or(|interval| !interval.contains(1.0));
        let (text, len) = (self.text(), self.len);
        match sure {
            true => format!("{label} is {text} times as fast as {baseline} at {len}{place}."),
            false => {
                format!("{label} and {baseline} cannot be told apart at {len}: {text} times as fast{place}.")
            }
        }
    }
}

/// A table per pass, batch and whatever else differs: how many times as fast as `baseline` (full attention where none
/// is named) every mechanism is, the fastest first, and what follows in words. Nothing without the baseline.
pub fn rankings(rows: &[Row], baseline: Option<&str>) -> Vec<Table> {
    let times: Vec<&Row> = rows.iter().filter(|row| row.metric == "step_time" && row.len.is_some()).collect();
    let groups = alike(&times).into_iter().filter_map(|(title, group)| {
        let has = |name: &&str| group.iter().any(|row| row.label() == **name);
        ranking(&group, baseline.or_else(|| USUAL.into_iter().find(has))?, &title)
    });
    groups.collect()
}

fn ranking(rows: &[&Row], baseline: &str, title: &str) -> Option<Table> {
    let of = |label: &str, len: u64| rows.iter().find(|row| row.label() == label && row.len == Some(len));
    let mut lens: Vec<u64> =
        rows.iter().filter(|row| row.label() == baseline).filter_map(|row| row.len).collect();
    lens.sort_unstable();
    lens.dedup();
    let mut ranked: Vec<(String, Vec<Ratio>)> = Vec::new();
    for row in rows {
        let (label, Some(len)) = (row.label(), row.len) else { continue };
        let Some(base) = of(baseline, len).filter(|_| label != baseline) else { continue };
        let (Some(own), Some(reference)) = (row.value.filter(|own| *own > 0.0), base.value) else { continue };
        let side = |row: &Row, mean: f64| Some(SampleStats { mean, std: row.std?, n: row.n? as usize });
        let interval =
            side(row, own).zip(side(base, reference)).and_then(|(own, base)| ratio_interval(own, base));
        let entry = place(&mut ranked, |known| known.0 == label, || (label.clone(), Vec::new()));
        entry.1.push(Ratio { len, times: reference / own, interval });
    }
    if ranked.is_empty() {
        return None;
    }
    // a mean over different lengths would compare nothing
    let common: Vec<u64> = (lens.iter().copied())
        .filter(|len| ranked.iter().all(|(_, ratios)| ratios.iter().any(|ratio| ratio.len == *len)))
        .collect();
    let geometric = |ratios: &[Ratio]| {
        let here = ratios.iter().filter(|ratio| common.contains(&ratio.len));
        mean(&here.map(|ratio| ratio.times.ln()).collect::<Vec<_>>()).map(f64::exp)
    };
    let last = |ratios: &[Ratio]| ratios.iter().map(|ratio| ratio.times).next_back();
    let rank = |ratios: &[Ratio]| geometric(ratios).or(last(ratios)).unwrap_or(0.0);
    ranked.sort_by(|a, b| rank(&b.1).total_cmp(&rank(&a.1)));
    let simulated = |label: &str| rows.iter().any(|row| row.label() == label && row.simulated == Some(true));
    let line = |(index, (label, ratios)): (usize, &(String, Vec<Ratio>))| {
        let at =
            |len: &u64| ratios.iter().find(|ratio| ratio.len == *len).map_or("-".to_owned(), |r| r.text());
        let star = if simulated(label) { "*" } else { "" };
        let mut cells = vec![format!("{}. {label}{star}", index + 1).replace(' ', &TIED.to_string())];
        cells.extend(lens.iter().map(at));
        cells.push(geometric(ratios).map_or("-".to_owned(), |times| format!("{times:.2}")));
        cells
    };
    let mut notes: Vec<String> = (ranked.iter().filter(|(label, _)| !simulated(label)))
        .filter_map(|(label, ratios)| {
            Some(ratios.iter().max_by_key(|ratio| ratio.len)?.line(label, baseline, title))
        })
        .take(LINES)
        .collect();
    if common.len() < lens.len() {
        let list: Vec<String> = common.iter().map(u64::to_string).collect();
        let list = if list.is_empty() { "there is none".to_owned() } else { list.join(", ") };
        notes.push(format!("The geometric mean is over the lengths that all of them ran: {list}."));
    }
    if ranked.iter().any(|(label, _)| simulated(label)) {
        notes.push(
            "*: computes a dense matrix and masks it, so its time is not representative of the method."
                .to_owned(),
        );
    }
    let mut columns = vec!["model".to_owned()];
    columns.extend(lens.iter().map(u64::to_string));
    columns.push("mean".to_owned());
    let place = if title.is_empty() { String::new() } else { format!(" · {title}") };
    Some(Table {
        title: format!("Times as fast as {baseline}, with 95 % intervals and geometric mean{place}"),
        numbers: columns.len() - 1,
        columns,
        rows: ranked.iter().enumerate().map(line).collect(),
        notes,
        ..Table::default()
    })
}

/// How the steps of each cell spread: (cell, seconds of its steps) to a line of percentiles.
pub fn percentiles(cells: &[(String, Vec<f64>)]) -> Option<Table> {
    const PARTS: [(&str, f64); 6] =
        [("5 %", 0.05), ("25 %", 0.25), ("median", 0.5), ("75 %", 0.75), ("95 %", 0.95), ("99 %", 0.99)];
    let text = |seconds: f64| Unit::Seconds.text(seconds).replace(' ', &TIED.to_string());
    let line = |(cell, values): &(String, Vec<f64>)| {
        let parts = PARTS.map(|(_, part)| quantile(values, part).map_or("-".to_owned(), text));
        [cell.clone(), values.len().to_string()].into_iter().chain(parts).collect()
    };
    let columns = ["cell", "steps"].into_iter().chain(PARTS.map(|(name, _)| name));
    (!cells.is_empty()).then(|| Table {
        title: "Percentiles of the time per step".to_owned(),
        columns: columns.map(str::to_owned).collect(),
        numbers: 1 + PARTS.len(),
        rows: cells.iter().map(line).collect(),
        ..Table::default()
    })
}

/// Standard error of an accuracy in percent that comes from the size of the split it was tested on, where the rows of
/// the same cell say how many examples that were: sqrt(p (1 - p) / n).
pub fn split_error<'a>(row: &Row, rows: impl IntoIterator<Item = &'a Row>) -> Option<f64> {
    let tested =
        rows.into_iter().find(|other| other.metric == "tested" && compare::same_cell(row, other))?.value?;
    let part = row.value? / 100.0;
    (matches!(row.metric.as_str(), "accuracy" | "top5") && tested >= 1.0 && (0.0..=1.0).contains(&part))
        .then(|| 100.0 * (part * (1.0 - part) / tested).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Pass};

    fn row(model: &str, len: u64, seconds: f64) -> Row {
        let row = Row {
            len: Some(len),
            pass: Some(Pass::Train),
            std: Some(seconds / 50.0),
            n: Some(20),
            ..Row::new("speed", model)
        };
        row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None)
    }

    #[test]
    fn the_fastest_stands_first_and_is_told_in_words() {
        let mut rows = vec![row("full", 1024, 1.0), row("full", 2048, 4.0)];
        rows.extend([
            row("ls", 1024, 1.0),
            row("ls", 2048, 2.0),
            row("linear", 1024, 0.5),
            row("linear", 2048, 1.0),
        ]);
        rows.push(Row { simulated: Some(true), ..row("sparse", 1024, 2.0) });
        let table = &rankings(&rows, None)[0];
        assert_eq!(table.columns, ["model", "1024", "2048", "mean"]);
        let first: Vec<&str> = table.rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(first, ["1.\u{a0}linear", "2.\u{a0}ls", "3.\u{a0}sparse*"]);
        assert_eq!(table.rows[0][3], "2.00", "over 1024, which all ran");
        assert_eq!(table.rows[2][2], "-");
        assert!(
            table.notes[0].starts_with("linear is 4.00 ±0.05 times as fast as full at 2048"),
            "{table:?}"
        );
        assert!(table.notes.iter().any(|note| note.ends_with("that all of them ran: 1024.")), "{table:?}");
        assert!(!table.notes.iter().any(|note| note.contains("sparse is")), "{table:?}");
        let other = &rankings(&rows, Some("ls"))[0];
        assert!(
            other.rows.iter().any(|row| row[0].ends_with("full") && row[1].starts_with("1.00")),
            "{other:?}"
        );
        assert!(rankings(&rows, Some("rfa")).is_empty() && rankings(&[], None).is_empty());
    }

    #[test]
    fn noise_is_not_called_faster() {
        let noisy = |model, seconds| Row { std: Some(0.5), n: Some(4), ..row(model, 1024, seconds) };
        let table = &rankings(&[noisy("full", 1.0), noisy("ls", 0.9)], None)[0];
        assert!(table.notes[0].starts_with("ls and full cannot be told apart at 1024"), "{table:?}");
    }

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let values: Vec<f64> = (1..=101).map(f64::from).collect();
        let table = percentiles(&[("full n1024".to_owned(), values)]).unwrap();
        assert_eq!(table.rows[0][1..5], ["101", "6\u{a0}s", "26\u{a0}s", "51\u{a0}s"]);
        assert!(percentiles(&[]).is_none());
    }

    #[test]
    fn one_seed_is_as_sure_as_its_split() {
        let done = |row: Row| row.with_outcome(Outcome::Ok, None);
        let row = |metric: &str, value| {
            done(Row { seed: Some(1), ..Row::new("lra", "ls") }.with(metric, "%", Some(value)))
        };
        let accuracy = row("accuracy", 36.0);
        let error = split_error(&accuracy, &[row("tested", 2000.0)]).unwrap();
        assert!((error - 100.0 * (0.36f64 * 0.64 / 2000.0).sqrt()).abs() < 1e-12, "{error}");
        assert_eq!(split_error(&accuracy, &[Row { seed: Some(2), ..row("tested", 2000.0) }]), None);
        assert_eq!(split_error(&row("loss", 1.0), &[row("tested", 2000.0)]), None);
    }
}
