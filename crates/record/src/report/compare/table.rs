//! Verdicts and the table of a comparison.

use super::{Comparison, Pair};
use crate::report::chart::Unit;
use crate::report::table::Table;
use crate::report::wrap::TIED;
use crate::stats::{COVERAGE, Interval};

impl Pair {
    /// Whether it is a time, which a busy machine changes.
    pub(super) fn is_timed(&self) -> bool {
        super::is_time(&self.metric)
    }

    /// Whether there is no doubt that something changed: by the adjusted p-value, or where ranges of what was seen do not meet;
    /// certain where nothing is known to spread.
    pub(super) fn sure(&self) -> bool {
        !self.refused
            && match self.p {
                Some(p) => p < 1.0 - COVERAGE,
                None => self.interval.is_none_or(|interval| !interval.contains(1.0)),
            }
    }

    /// `faster`, `slower`, `more memory`, ... or `no difference`.
    pub fn verdict(&self) -> &'static str {
        let [better, worse] = match self.metric.as_str() {
            "step_time" | "steps_per_second" => ["faster", "slower"],
            "peak_memory" => ["less memory", "more memory"],
            "longest_length" => ["longer", "shorter"],
            _ => ["better", "worse"],
        };
        match self.worse {
            _ if self.refused => "not comparable",
            // what is printed as 0.0 % is none: a peak may differ by the length of a name
            change if !self.sure() || change.abs() < 5e-4 => "no difference",
            change if change > 0.0 => worse,
            _ => better,
        }
    }
}

impl Comparison {
    /// The pairs that are worse by more than `share`, certainly so where intervals are known.
    pub fn regressions(&self, share: f64) -> Vec<&Pair> {
        self.pairs.iter().filter(|pair| pair.worse > share && pair.sure()).collect()
    }

    /// `12 cells: 3 faster, 9 no difference; steps 1.04 times as fast in geometric mean`.
    pub fn summary(&self) -> String {
        let mut verdicts: Vec<(&str, usize)> = Vec::new();
        for pair in &self.pairs {
            crate::report::place(&mut verdicts, |known| known.0 == pair.verdict(), || (pair.verdict(), 0))
                .1 += 1;
        }
        let verdicts: Vec<String> =
            verdicts.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
        let cells =
            if self.pairs.len() == 1 { "1 value".to_owned() } else { format!("{} values", self.pairs.len()) };
        let timed = self.pairs.iter().filter(|pair| pair.metric == "step_time" && !pair.refused);
        let logs: Vec<f64> = timed.map(|pair| (pair.before / pair.after).ln()).collect();
        let mean = crate::stats::mean(&logs).map_or_else(String::new, |log| {
            format!("; steps are {:.2} times as fast as before in geometric mean", log.exp())
        });
        format!("{cells} compared: {}{mean}.", verdicts.join(", "))
    }

    /// As a table.
    pub fn table(&self) -> Table {
        let columns = ["cell", "what", "verdict", "before", "now", "change", "95 % interval"];
        let percent = |ratio: f64| format!("{:+.1}{TIED}%", 100.0 * (ratio - 1.0));
        let rows = self.pairs.iter().map(|pair| {
            let ends = |i: Interval| format!("{} to {}", percent(i.low), percent(i.high));
            let value = |value| unit_text(&pair.metric, value).replace(' ', &TIED.to_string());
            vec![
                pair.cell.clone(),
                pair.metric.replace('_', " "),
                pair.verdict().to_owned(),
                value(pair.before),
                value(pair.after),
                percent(pair.after / pair.before),
                pair.interval.map_or_else(String::new, ends),
            ]
        });
        let tested = self.pairs.iter().filter(|pair| pair.p.is_some()).count();
        let corrected = (tested > 1).then(|| {
            format!(
                "An interval is of one comparison; verdicts hold together (Holm's correction over {tested})."
            )
        });
        let notes = std::iter::once(self.summary())
            .chain(self.refused.clone())
            .chain(corrected)
            .chain(self.remarks.iter().chain(&self.lost).chain(&self.absent).chain(&self.lonely).cloned());
        Table {
            title: "Now compared with before".to_owned(),
            columns: columns.map(str::to_owned).to_vec(),
            numbers: 4,
            rows: rows.collect(),
            notes: notes.collect(),
            ..Table::default()
        }
    }

    /// The pairs as CSV: values in the units of the rows, the interval of now over before, the adjusted p-value.
    pub fn csv(&self) -> csv::Result<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(["cell", "metric", "verdict", "before", "now", "ratio", "low", "high", "p"])?;
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        for pair in &self.pairs {
            let interval = pair.interval;
            let numbers = [
                Some(pair.before),
                Some(pair.after),
                Some(pair.after / pair.before).filter(|ratio| ratio.is_finite()),
                interval.map(|interval| interval.low),
                interval.map(|interval| interval.high),
                pair.p,
            ];
            let texts = [&pair.cell, &pair.metric, pair.verdict()].map(str::to_owned);
            writer.write_record(texts.into_iter().chain(numbers.map(number)))?;
        }
        let bytes = writer.into_inner().map_err(|error| error.into_error())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The pairs, what stands below them and why times are not compared, as JSON.
    pub fn json(&self) -> serde_json::Value {
        let pair = |pair: &Pair| {
            serde_json::json!({
                "cell": pair.cell,
                "metric": pair.metric,
                "verdict": pair.verdict(),
                "before": pair.before,
                "now": pair.after,
                "interval": pair.interval.map(|interval| [interval.low, interval.high]),
                "p": pair.p,
            })
        };
        serde_json::json!({
            "pairs": self.pairs.iter().map(pair).collect::<Vec<_>>(),
            "refused": self.refused,
            "remarks": self.remarks,
            "lost": self.lost,
            "only_before": self.absent,
            "other": self.lonely,
        })
    }
}

pub(super) fn unit_text(metric: &str, value: f64) -> String {
    match metric {
        "step_time" => Unit::Seconds.text(value),
        "peak_memory" => Unit::Bytes.text(value),
        "steps_per_second" => format!("{value:.3} /s"),
        "accuracy" => format!("{value:.2} %"),
        "longest_length" => format!("{value:.0}"),
        "loss" => format!("{value:.4} nat"),
        _ => format!("{value:.4}"),
    }
}
