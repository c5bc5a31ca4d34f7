//! Two sets of rows side by side: ratios with intervals, and what got worse.
//!
//! `estimate` says how exactly a value is known, with what two runs differ by even where nothing changed; `machine` whether
//! the machine was in the same state, as far as the runs tell. Verdicts hold together: Holm's correction over all values.

mod estimate;
mod machine;
mod table;

use std::collections::{HashMap, HashSet};

use crate::Row;
use crate::stats::{Interval, holm};
use estimate::{Estimate, is_time, scatter};
use machine::Machines;
pub use machine::{ComparedRun, RunCalibration, RunMachine};

/// Metrics of which less is better; of all others more is, and those without a direction are left out.
/// (What is resident is the system's doing: it differs by a tenth from run to run of one program.)
const LESS: &[&str] = &["step_time", "peak_memory", "loss", "bpc_stream", "bpc_overlap"];
const MORE: &[&str] = &["steps_per_second", "accuracy", "longest_length"];

/// One cell in both sets.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Mechanism, task, pass, length, batch; settings where they tell it from another cell.
    pub cell: String,
    /// Metric.
    pub metric: String,
    /// First value.
    pub before: f64,
    /// Second value.
    pub after: f64,
    /// 95 % interval of second / first, of this comparison alone, where both say how much they spread.
    pub interval: Option<Interval>,
    /// Chance of such a ratio where nothing changed, adjusted for the number of comparisons; none where no spread is known.
    pub p: Option<f64>,
    /// Whether the value is a time of runs whose machines were not in the same state.
    pub refused: bool,
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
    /// Why times are not compared: the machine was not in the same state.
    pub refused: Option<String>,
    /// What is to be said about the machine where times are compared.
    pub remarks: Vec<String>,
}

/// Matches rows by everything that defines a cell: rows of another device, number format, kernel or model are never compared,
/// however often they were measured. Nothing is known of the machine.
pub fn compare(before: &[Row], after: &[Row]) -> Comparison {
    let run = |rows: &[Row]| [ComparedRun { rows: rows.to_vec(), machine: RunMachine::default() }];
    compare_runs(&run(before), &run(after))
}

/// The same for several runs a side: a value is the mean of its runs, of times the geometric one.
pub fn compare_runs(before: &[ComparedRun], after: &[ComparedRun]) -> Comparison {
    let machines = Machines::of(before, after);
    let mut comparison = Comparison::default();
    let apart = on_several_machines(before) || on_several_machines(after);
    let (known, wanted) = (by_key(before, apart), by_key(after, apart));
    // a step's time and its inverse are one finding
    let timed = before.iter().flat_map(|run| &run.rows).any(|row| row.metric == "step_time");
    let counts = |row: &Row| direction(row).is_some() && !(timed && row.metric == "steps_per_second");
    let names = Names::of(known.cells().chain(wanted.cells()).map(|cell| cell[0].0));
    let scatter = scatter(known.cells().chain(wanted.cells()).filter(|cell| counts(cell[0].0)));
    let mut pairs = Vec::new();
    for cell in known.cells().filter(|cell| counts(cell[0].0)) {
        let row = cell[0].0;
        let before = Estimate::of(cell, scatter);
        let Some(other) = wanted.get(&place(row, apart)) else {
            let list = if before.is_some() { &mut comparison.absent } else { &mut comparison.lonely };
            list.push(format!("only before: {}", names.of_row(row)));
            continue;
        };
        let (then, now) = (row.outcome, other[0].0.outcome);
        match (before, Estimate::of(other, scatter)) {
            (Some(a), Some(b)) => pairs.push(pair((names.of_row(row), row), a, b, &machines)),
            (Some(a), None) => {
                let value = text(row, a.value);
                comparison.lost.push(format!("{}: {value} before, {now} now", names.of_row(row)));
            }
            (None, Some(b)) => {
                let value = text(row, b.value);
                comparison.lonely.push(format!("{}: {then} before, {value} now", names.of_row(row)));
            }
            (None, None) => {
                comparison.lonely.push(format!("{}: {then} before, {now} now", names.of_row(row)));
            }
        }
    }
    for cell in wanted.cells().filter(|cell| counts(cell[0].0)) {
        if !known.has(&place(cell[0].0, apart)) {
            comparison.lonely.push(format!("only now: {}", names.of_row(cell[0].0)));
        }
    }
    if pairs.iter().any(Pair::is_timed) {
        comparison.refused = machines.refusal();
        comparison.remarks = machines.remarks();
    }
    comparison.pairs = adjusted(pairs);
    comparison
}

/// The pairs with p-values adjusted for their number.
fn adjusted(mut pairs: Vec<Pair>) -> Vec<Pair> {
    let known: Vec<f64> = pairs.iter().filter_map(|pair| pair.p).collect();
    let mut adjusted = holm(&known).into_iter();
    for pair in pairs.iter_mut().filter(|pair| pair.p.is_some()) {
        pair.p = adjusted.next();
    }
    pairs
}

/// The rows of a cell, one of every run that has it, with the machines of these runs.
type CellRows<'a> = Vec<(&'a Row, &'a RunMachine)>;

/// The cells of some runs in the order of their first rows.
struct Cells<'a> {
    cells: Vec<CellRows<'a>>,
    places: HashMap<Compared<'a>, usize>,
}

impl<'a> Cells<'a> {
    fn cells(&self) -> impl Iterator<Item = &CellRows<'a>> {
        self.cells.iter()
    }

    fn get(&self, place: &Compared) -> Option<&CellRows<'a>> {
        self.places.get(place).map(|&index| &self.cells[index])
    }

    fn has(&self, place: &Compared) -> bool {
        self.places.contains_key(place)
    }
}

/// The first row of every cell of every run.
fn by_key(runs: &[ComparedRun], apart: bool) -> Cells<'_> {
    let mut found = Cells { cells: Vec::new(), places: HashMap::new() };
    for run in runs {
        let mut seen = HashSet::new();
        for row in &run.rows {
            let place = place(row, apart);
            if !seen.insert(place.clone()) {
                continue;
            }
            let index = *found.places.entry(place).or_insert_with(|| {
                found.cells.push(Vec::new());
                found.cells.len() - 1
            });
            found.cells[index].push((row, &run.machine));
        }
    }
    found
}

/// A cell; and its machine, where machines are told apart.
type Compared<'a> = (Key<'a>, Option<&'a str>);

fn place(row: &Row, apart: bool) -> Compared<'_> {
    (key(row), row.machine.as_deref().filter(|_| apart))
}

/// Whether a cell was measured on several machines: then a machine is compared with itself only.
fn on_several_machines(runs: &[ComparedRun]) -> bool {
    let mut first: HashMap<Key<'_>, Option<&str>> = HashMap::new();
    runs.iter()
        .flat_map(|run| &run.rows)
        .any(|row| *first.entry(key(row)).or_insert(row.machine.as_deref()) != row.machine.as_deref())
}

/// Why two sets of rows may have no cell in common: conditions of which they share no value.
pub fn differences(before: &[Row], after: &[Row]) -> Vec<String> {
    let number = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    type Condition<'a> = (&'a str, &'a dyn Fn(&Row) -> String);
    let settings = |row: &Row| match row.defining_settings().join(" ") {
        settings if settings.is_empty() => "none".to_owned(),
        settings => settings,
    };
    let conditions: [Condition; 9] = [
        ("command", &|row| row.protocol.clone()),
        ("device", &|row| row.device.clone()),
        ("number format", &|row| row.dtype.clone()),
        ("kernel", &|row| row.kernel.clone()),
        ("threads", &|row| number(row.threads)),
        ("preset", &|row| row.preset.clone().unwrap_or_default()),
        ("batch", &|row| number(row.batch)),
        ("length", &|row| number(row.len)),
        ("settings", &settings),
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

/// Whether less is better.
fn direction(row: &Row) -> Option<bool> {
    let known = |list: &[&str]| list.contains(&row.metric.as_str());
    if known(LESS) { Some(true) } else { known(MORE).then_some(false) }
}

fn pair((cell, row): (String, &Row), before: Estimate, after: Estimate, machines: &Machines) -> Pair {
    let timed = is_time(&row.metric);
    let apart = if timed { machines.apart() } else { 0.0 };
    let (interval, p) = after.over(&before, apart);
    let less = direction(row) == Some(true);
    let (before, after) = (before.value, after.value);
    let worse = if less { after / before - 1.0 } else { before / after - 1.0 };
    let worse = if worse.is_nan() { 0.0 } else { worse }; // 0 beside 0
    let refused = timed && machines.refuse();
    Pair { cell, metric: row.metric.clone(), before, after, interval, p, refused, worse }
}

/// The row's value with its unit.
fn text(row: &Row, value: f64) -> String {
    table::unit_text(&row.metric, value)
}

type Key<'a> = (
    (&'a str, Option<&'a str>, &'a str, Option<&'a str>, Option<&'a str>, &'a str),
    (&'a str, &'a str, &'a str, Option<u64>, Option<u64>, Option<u64>),
    (Option<&'a str>, Option<u64>, Option<&'a str>, Option<&'a str>, Vec<&'a str>),
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
        (
            row.pass.map(|pass| pass.word()),
            row.seed,
            row.differs.as_deref(),
            row.other_program(),
            row.defining_settings(),
        ),
    )
}

/// Whether two rows are of one cell, whatever they measure.
pub(super) fn same_cell(a: &Row, b: &Row) -> bool {
    let (mut a, mut b) = (key(a), key(b));
    (a.0.5, b.0.5) = ("", "");
    a == b
}

/// The settings of the cells of each name, each once: they tell cells of one name apart.
struct Names<'a>(HashMap<String, Vec<Vec<&'a str>>>);

impl<'a> Names<'a> {
    fn of(cells: impl Iterator<Item = &'a Row>) -> Self {
        let mut known: HashMap<String, Vec<Vec<&str>>> = HashMap::new();
        for row in cells {
            let (settings, all) = (row.defining_settings(), known.entry(name(row)).or_default());
            if !all.contains(&settings) {
                all.push(settings);
            }
        }
        Self(known)
    }

    /// The row's name, with those of its settings that not every cell of the name has.
    fn of_row(&self, row: &Row) -> String {
        let name = name(row);
        let all = self.0.get(&name).map(Vec::as_slice).unwrap_or_default();
        let apart = |setting: &&str| all.iter().any(|settings| !settings.contains(setting));
        let settings = row.defining_settings().into_iter().filter(apart);
        std::iter::once(name.as_str()).chain(settings).collect::<Vec<_>>().join(" ")
    }
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
mod tests;
