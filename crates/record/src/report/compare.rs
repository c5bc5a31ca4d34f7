//! Two sets of rows side by side: ratios with intervals, and what got worse.

use std::collections::HashMap;

use super::chart::Unit;
use super::table::Table;
use super::wrap::TIED;
use crate::Row;
use crate::stats::{Interval, SampleStats, ratio_interval};

/// Metrics of which less is better; of all others more is, and those without a direction are left out.
/// (What is resident is the system's doing: it differs by a tenth from run to run of one program.)
const LESS: &[&str] = &["step_time", "peak_memory", "loss", "bpc_stream", "bpc_overlap"];
const MORE: &[&str] = &["steps_per_second", "accuracy", "longest_length"];

/// One cell in both sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Mechanism, task, pass, length, batch.
    pub cell: String,
    /// Metric.
    pub metric: String,
    /// First value.
    pub before: f64,
    /// Second value.
    pub after: f64,
    /// Interval of second / first, where both say how much they spread.
    pub interval: Option<Interval>,
    /// How much worse the second is, as a share: 0.1 is 10 %; below 0 it is better.
    pub worse: f64,
}

/// What both sets have, and the cells that only one has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Cells in both.
    pub pairs: Vec<Pair>,
    /// Cells of both that had a value before and have none now, with what happened.
    pub lost: Vec<String>,
    /// Cells that had a value before and are not there now.
    pub absent: Vec<String>,
    /// Cells that are only there now, and those that have a value now and had none before.
    pub lonely: Vec<String>,
}

/// Matches rows by everything that defines a cell: rows of another device, number format or kernel are never compared.
pub fn compare(before: &[Row], after: &[Row]) -> Comparison {
    let mut comparison = Comparison::default();
    let apart = on_several_machines(before) || on_several_machines(after);
    let (known, wanted) = (by_key(before, apart), by_key(after, apart));
    // a step's time and its inverse are one finding
    let timed = before.iter().any(|row| row.metric == "step_time");
    let counts = |row: &&Row| direction(row).is_some() && !(timed && row.metric == "steps_per_second");
    for row in before.iter().filter(counts) {
        let Some(other) = wanted.get(&place(row, apart)) else {
            let list = if finite(row).is_some() { &mut comparison.absent } else { &mut comparison.lonely };
            list.push(format!("only before: {}", name(row)));
            continue;
        };
        match (finite(row), finite(other)) {
            (Some(a), Some(b)) => comparison.pairs.push(pair(row, other, a, b)),
            (Some(a), None) => {
                comparison.lost.push(format!(
                    "{}: {} before, {} now",
                    name(row),
                    text(row, a),
                    other.outcome
                ));
            }
            (None, Some(b)) => {
                comparison.lonely.push(format!(
                    "{}: {} before, {} now",
                    name(row),
                    row.outcome,
                    text(other, b)
                ));
            }
            (None, None) => {
                comparison.lonely.push(format!(
                    "{}: {} before, {} now",
                    name(row),
                    row.outcome,
                    other.outcome
                ));
            }
        }
    }
    for row in after.iter().filter(counts) {
        if !known.contains_key(&place(row, apart)) {
            comparison.lonely.push(format!("only now: {}", name(row)));
        }
    }
    comparison
}

/// The row's value, if it is one: files that others wrote may say NaN.
fn finite(row: &Row) -> Option<f64> {
    row.value.filter(|value| value.is_finite())
}

/// The first row of every cell.
fn by_key(rows: &[Row], apart: bool) -> HashMap<Compared<'_>, &Row> {
    let mut found = HashMap::new();
    for row in rows {
        found.entry(place(row, apart)).or_insert(row);
    }
    found
}

/// A cell; and its machine, where machines are told apart.
type Compared<'a> = (Key<'a>, Option<&'a str>);

fn place(row: &Row, apart: bool) -> Compared<'_> {
    (key(row), row.machine.as_deref().filter(|_| apart))
}

/// Whether a cell was measured on several machines: then a machine is compared with itself only.
fn on_several_machines(rows: &[Row]) -> bool {
    let mut first: HashMap<Key<'_>, Option<&str>> = HashMap::new();
    rows.iter().any(|row| *first.entry(key(row)).or_insert(row.machine.as_deref()) != row.machine.as_deref())
}

/// Why two sets of rows may have no cell in common: conditions of which they share no value.
pub fn differences(before: &[Row], after: &[Row]) -> Vec<String> {
    let number = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    type Condition<'a> = (&'a str, &'a dyn Fn(&Row) -> String);
    let conditions: [Condition; 8] = [
        ("command", &|row| row.protocol.clone()),
        ("device", &|row| row.device.clone()),
        ("number format", &|row| row.dtype.clone()),
        ("kernel", &|row| row.kernel.clone()),
        ("threads", &|row| number(row.threads)),
        ("preset", &|row| row.preset.clone().unwrap_or_default()),
        ("batch", &|row| number(row.batch)),
        ("length", &|row| number(row.len)),
    ];
    let differs = conditions.iter().filter_map(|(name, of)| {
        let values = |rows: &[Row]| rows.iter().map(of).collect::<std::collections::BTreeSet<_>>();
        let (first, second) = (values(before), values(after));
        let list =
            |values: std::collections::BTreeSet<String>| values.into_iter().collect::<Vec<_>>().join(", ");
        first.is_disjoint(&second).then(|| format!("{name}: {} before, {} now", list(first), list(second)))
    });
    differs.collect()
}

impl Pair {
    /// Whether the intervals leave no doubt that something changed; certain where no interval is known.
    fn sure(&self) -> bool {
        self.interval.is_none_or(|interval| !interval.contains(1.0))
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
            super::place(&mut verdicts, |known| known.0 == pair.verdict(), || (pair.verdict(), 0)).1 += 1;
        }
        let verdicts: Vec<String> =
            verdicts.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
        let cells =
            if self.pairs.len() == 1 { "1 value".to_owned() } else { format!("{} values", self.pairs.len()) };
        let logs: Vec<f64> = (self.pairs.iter().filter(|pair| pair.metric == "step_time"))
            .map(|pair| (pair.before / pair.after).ln())
            .collect();
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
        let notes = std::iter::once(self.summary())
            .chain(self.lost.iter().chain(&self.absent).chain(&self.lonely).cloned());
        Table {
            title: "Now compared with before".to_owned(),
            columns: columns.map(str::to_owned).to_vec(),
            numbers: 4,
            rows: rows.collect(),
            notes: notes.collect(),
            ..Table::default()
        }
    }
}

/// The row's value with its unit.
fn text(row: &Row, value: f64) -> String {
    unit_text(&row.metric, value)
}

fn unit_text(metric: &str, value: f64) -> String {
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

/// Whether less is better.
fn direction(row: &Row) -> Option<bool> {
    let known = |list: &[&str]| list.contains(&row.metric.as_str());
    if known(LESS) { Some(true) } else { known(MORE).then_some(false) }
}

fn pair(row: &Row, other: &Row, before: f64, after: f64) -> Pair {
    let side = |row: &Row, mean: f64| Some(SampleStats { mean, std: row.std?, n: row.n? as usize });
    let sides = side(other, after).zip(side(row, before));
    // without a standard deviation the ends are the least and the most that was seen
    let seen = |row: &Row| row.interval().filter(|(low, _)| row.std.is_none() && *low > 0.0);
    let ends = || {
        let ((low, high), (before_low, before_high)) = seen(other).zip(seen(row))?;
        Some(Interval { low: low / before_high, high: high / before_low })
    };
    let interval = sides.and_then(|(after, before)| ratio_interval(before, after)).or_else(ends);
    let less = direction(row) == Some(true);
    let worse = if less { after / before - 1.0 } else { before / after - 1.0 };
    let worse = if worse.is_nan() { 0.0 } else { worse }; // 0 beside 0
    Pair { cell: name(row), metric: row.metric.clone(), before, after, interval, worse }
}

type Key<'a> = (
    (&'a str, Option<&'a str>, &'a str, Option<&'a str>, Option<&'a str>, &'a str),
    (&'a str, &'a str, &'a str, Option<u64>, Option<u64>, Option<u64>),
    (Option<&'a str>, Option<u64>, Option<&'a str>),
);

fn key(row: &Row) -> Key<'_> {
    (
        (
            &row.protocol,
            row.task.as_deref(),
            &row.model,
            row.variant.as_deref(),
            row.preset.as_deref(),
            &row.metric,
        ),
        (&row.device, &row.dtype, &row.kernel, row.threads, row.batch, row.len),
        (row.pass.map(|pass| pass.word()), row.seed, row.differs.as_deref()),
    )
}

/// Whether two rows are of one cell, whatever they measure.
pub(super) fn same_cell(a: &Row, b: &Row) -> bool {
    let (mut a, mut b) = (key(a), key(b));
    (a.0.5, b.0.5) = ("", "");
    a == b
}

fn name(row: &Row) -> String {
    let number = |name: &str, value: Option<u64>| value.map(|value| format!("{name}{value}"));
    let pass = row.pass.map(|pass| pass.word().to_owned());
    let parts = [
        Some(row.label()),
        row.task.clone(),
        number("n", row.len),
        number("b", row.batch),
        pass,
        number("s", row.seed),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;

    fn row(metric: &str, value: f64) -> Row {
        Row { std: Some(0.01), n: Some(20), ..Row::new("speed", "ls").with(metric, "x", Some(value)) }
    }

    #[test]
    fn worse_depends_on_the_metric() {
        let of = |metric: &str, a, b| compare(&[row(metric, a)], &[row(metric, b)]);
        let slower = of("step_time", 1.0, 1.2);
        assert!((slower.pairs[0].worse - 0.2).abs() < 1e-12);
        assert_eq!(slower.regressions(0.05).len(), 1);
        assert!(slower.regressions(0.3).is_empty() && of("step_time", 1.2, 1.0).regressions(0.0).is_empty());
        assert_eq!(of("accuracy", 60.0, 50.0).regressions(0.05).len(), 1);
        assert!(of("params", 1.0, 2.0).pairs.is_empty());
    }

    #[test]
    fn a_change_that_is_not_printed_is_none_and_a_step_counts_once() {
        let exact = |value: f64| Row { std: None, ..row("peak_memory", value) };
        let one = compare(&[exact(20e6)], &[exact(20e6 + 32.0)]);
        assert_eq!(one.pairs[0].verdict(), "no difference");
        assert_eq!(compare(&[exact(20e6)], &[exact(21e6)]).pairs[0].verdict(), "more memory");
        let both = [row("step_time", 1.0), row("steps_per_second", 1.0)];
        assert_eq!(compare(&both, &both).pairs.len(), 1);
        assert_eq!(compare(&both[1..], &both[1..]).pairs.len(), 1);
    }

    #[test]
    fn noise_is_no_regression() {
        let noisy = |value| Row { std: Some(1.0), n: Some(4), ..row("step_time", value) };
        assert!(compare(&[noisy(1.0)], &[noisy(1.2)]).regressions(0.05).is_empty());
    }

    #[test]
    fn peaks_that_were_seen_in_both_are_no_regression() {
        let seen = |low, high| {
            let row = row("peak_memory", high);
            Row { std: None, ci_low: Some(low), ci_high: Some(high), ..row }
        };
        assert!(compare(&[seen(1.0, 1.2)], &[seen(1.1, 1.4)]).regressions(0.05).is_empty());
        assert_eq!(compare(&[seen(1.0, 1.2)], &[seen(1.3, 1.4)]).regressions(0.05).len(), 1);
        assert_eq!(compare(&[seen(1.0, 1.0)], &[seen(1.4, 1.4)]).regressions(0.05).len(), 1);
    }

    #[test]
    fn what_cannot_be_compared_is_named() {
        let metal = Row { device: "metal".to_owned(), ..row("step_time", 1.0) };
        let both = compare(&[row("step_time", 1.0)], &[metal]);
        assert!(both.pairs.is_empty() && (both.absent.len(), both.lonely.len()) == (1, 1), "{both:?}");
        let gone = row("step_time", 1.0).with("step_time", "s", None).with_outcome(Outcome::Oom, None);
        let lost = compare(&[row("step_time", 1.0)], &[gone]);
        assert!(lost.lost[0].ends_with("1 s before, oom now"), "{lost:?}");
        let nan = Row { value: Some(f64::NAN), ..row("step_time", 1.0).with_outcome(Outcome::Ok, None) };
        assert_eq!(compare(&[row("step_time", 1.0)], &[nan]).lost.len(), 1, "NaN is no value");
    }

    #[test]
    fn many_rows_and_many_samples_take_no_time() {
        let many: Vec<Row> = (0..50_000)
            .map(|len| Row { len: Some(len), n: Some(10_000_000), ..row("step_time", 1.0) })
            .collect();
        let start = std::time::Instant::now();
        assert_eq!(compare(&many, &many).pairs.len(), many.len());
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }

    #[test]
    fn verdicts_carry_units_and_words() {
        let of = |metric: &str, a, b| compare(&[row(metric, a)], &[row(metric, b)]);
        for (metric, a, b, verdict) in [
            ("step_time", 1.0, 1.2, "slower"),
            ("step_time", 1.2, 1.0, "faster"),
            ("steps_per_second", 1.0, 1.2, "faster"),
            ("peak_memory", 1.0, 1.2, "more memory"),
            ("accuracy", 60.0, 50.0, "worse"),
            ("step_time", 1.0, 1.0, "no difference"),
        ] {
            assert_eq!(of(metric, a, b).pairs[0].verdict(), verdict, "{metric} {a} {b}");
        }
        let slower = of("step_time", 0.020, 0.024);
        let cells = &slower.table().rows[0];
        assert_eq!(cells[3..6], ["20\u{a0}ms", "24\u{a0}ms", "+20.0\u{a0}%"]);
        assert_eq!(
            of("step_time", 1.0, 1.25).summary(),
            "1 value compared: 1 slower; steps are 0.80 times as fast as before in geometric mean."
        );
    }

    #[test]
    fn sets_without_a_common_condition_say_which() {
        let metal = Row { device: "metal".to_owned(), threads: Some(8), ..row("step_time", 1.0) };
        let said = differences(&[row("step_time", 1.0)], &[metal]);
        assert!(
            said.iter().any(|line| line.starts_with("device: ") && line.ends_with("metal now")),
            "{said:?}"
        );
        assert!(said.iter().any(|line| line == "threads: none before, 8 now"), "{said:?}");
        assert!(differences(&[row("loss", 1.0)], &[row("loss", 2.0)]).is_empty());
    }
}
