//! Other programs' measured steps beside ours: `speed --reference`.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::chart::{Chart, RatioPanel, ratios};
use super::place;
use super::ratio::ratio_text;
use super::table::Table;
use crate::stats::{Interval, SampleStats, median, ratio_interval};
use crate::{Pass, Row, csv, file};

/// Name of the file in a run folder.
pub const FILE: &str = "reference.json";

/// One measured cell of another program: a line of JSON or CSV with these names, or a row of another run of `speed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// Name of the program, where a file holds several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Mechanism; `ls-own` is `ls`.
    pub model: String,
    /// Length.
    pub len: u64,
    /// Samples per step.
    #[serde(default = "one")]
    pub batch: u64,
    /// `infer` or `train`.
    pub mode: Pass,
    /// Median milliseconds per step; absent where it failed.
    pub ms: Option<f64>,
    /// Sample standard deviation of the milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub std_ms: Option<f64>,
    /// Steps that were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs: Option<u64>,
    /// Resident memory before the step.
    pub base_rss_mib: Option<f64>,
    /// Highest resident memory.
    pub peak_rss_mib: Option<f64>,
}

fn one() -> u64 {
    1
}

impl Reference {
    fn program(&self) -> &str {
        self.program.as_deref().unwrap_or("reference")
    }

    /// A row of a run, named by its kernels and number format; nothing where it is not the time of a whole step.
    fn of(row: &Row) -> Option<Self> {
        let whole = row.metric == "step_time" && row.operation.is_none();
        let program = match row.kernel.as_str() {
            _ if row.other_program().is_some() => {
                format!("{} {}", row.program.as_deref().unwrap_or_default(), row.dtype)
            }
            "composed" => format!("candle's operations {}", row.dtype),
            kernel => format!("effattn {kernel} {}", row.dtype),
        };
        whole.then_some(Self {
            program: Some(program),
            model: row.choice(),
            len: row.len?,
            batch: row.batch?,
            mode: row.pass?,
            ms: row.value.map(|seconds| seconds * 1e3),
            std_ms: row.std.map(|seconds| seconds * 1e3),
            runs: row.n,
            base_rss_mib: None,
            peak_rss_mib: None,
        })
    }
}

/// What the programs of a run measured, beside what is known from elsewhere.
pub fn with_programs(rows: &[Row], known: &[Reference]) -> Vec<Reference> {
    let theirs = rows.iter().filter(|row| row.other_program().is_some());
    let grown = |of: &Row| {
        let cell = |row: &&Row| (row.program.clone(), row.choice(), row.len, row.batch, row.pass, row.seed);
        let same = rows.iter().filter(|row| row.metric == "resident_growth" && cell(row) == cell(&of));
        same.filter_map(|row| row.value).next().map(|bytes| bytes / f64::from(1 << 20))
    };
    let theirs = theirs.filter_map(|row| {
        let peak_rss_mib = grown(row);
        Some(Reference { base_rss_mib: peak_rss_mib.map(|_| 0.0), peak_rss_mib, ..Reference::of(row)? })
    });
    theirs.chain(known.iter().cloned()).collect()
}

/// Why another program's numbers cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// A line that is no measurement.
    #[error(
        "line {line} is not a measurement ({reason}); expected JSON or CSV with model, len, mode (infer or train) and ms, or \
         the rows.csv of a run"
    )]
    Form {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A measurement whose time is none.
    #[error("line {line}: ms = {ms} is no number above 0; leave ms empty where the program failed")]
    Time {
        /// Line, from 1.
        line: usize,
        /// What it says.
        ms: f64,
    },
}

/// Measurements, one JSON object per line, CSV with a header, or the `rows.csv` of a run of `speed`.
pub fn parse(text: &str) -> Result<Vec<Reference>, ReferenceError> {
    let bad = |line: usize, reason: String| ReferenceError::Form { line, reason };
    let mut all: Vec<(usize, Reference)> = Vec::new();
    let header = text.lines().next().unwrap_or_default();
    if text.trim_start().starts_with('{') {
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let one = serde_json::from_str(line).map_err(|error| bad(index + 1, error.to_string()))?;
            all.push((index + 1, one));
        }
    } else if header.split(',').any(|column| column == "metric") {
        let rows = csv::from_str(text).map_err(|error| bad(1, error.to_string()))?;
        let lines = rows.iter().enumerate();
        all.extend(lines.filter_map(|(index, row)| Some((index + 2, Reference::of(row)?))));
    } else {
        let mut reader = ::csv::Reader::from_reader(text.as_bytes());
        let columns = reader.headers().map_err(|error| bad(1, error.to_string()))?.clone();
        let lacks = |name: &&&str| !columns.iter().any(|column| column == **name);
        if let Some(name) = ["model", "len", "mode", "ms"].iter().find(lacks) {
            let there = columns.iter().collect::<Vec<_>>().join(", ");
            return Err(bad(1, format!("there is no column {name} among {there}")));
        }
        for (index, record) in reader.deserialize().enumerate() {
            all.push((index + 2, record.map_err(|error| bad(index + 2, error.to_string()))?));
        }
    }
    if all.is_empty() {
        return Err(bad(1, "there is none".to_owned()));
    }
    let no_time = |ms: &f64| !ms.is_finite() || *ms <= 0.0;
    if let Some((line, ms)) = all.iter().find_map(|(line, one)| Some((*line, one.ms.filter(no_time)?))) {
        return Err(ReferenceError::Time { line, ms });
    }
    Ok(all.into_iter().map(|(_, one)| one).collect())
}

/// What is to be said of models of `references` that no row has; nothing where there is none.
pub fn unmatched(rows: &[Row], references: &[Reference]) -> Option<String> {
    let ours: BTreeSet<String> =
        rows.iter().filter(|row| row.other_program().is_none()).map(Row::choice).collect();
    let of_none = |model: &&str| *model != "ls-own" && !ours.contains(*model);
    let models: BTreeSet<&str> = references.iter().map(|one| one.model.as_str()).filter(of_none).collect();
    let list = models.into_iter().collect::<Vec<_>>().join(", ");
    (!list.is_empty()).then(|| {
        format!("--reference has numbers of models that were not measured, which are not shown: {list}")
    })
}

/// The measurements in a run folder; none if there is no such file.
pub fn read(folder: &Path) -> io::Result<Vec<Reference>> {
    match file::read_to_string(&folder.join(FILE)) {
        Ok(text) => parse(&text).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// As it is kept in a run folder.
pub fn to_text(references: &[Reference]) -> serde_json::Result<String> {
    let lines: Result<Vec<String>, _> = references.iter().map(serde_json::to_string).collect();
    Ok(lines?.join("\n") + "\n")
}

/// A cell that is in both.
struct Pair {
    label: String,
    pass: Pass,
    batch: u64,
    len: u64,
    /// Seconds per step, ours and the reference's.
    seconds: [f64; 2],
    /// Interval of the reference's over ours, where each was measured once and says how its steps spread.
    interval: Option<Interval>,
    /// Bytes of a step, ours and the reference's.
    bytes: [Option<f64>; 2],
}

impl Pair {
    /// What was measured.
    fn cell(&self) -> (&str, Pass, u64, u64) {
        (&self.label, self.pass, self.batch, self.len)
    }

    /// How many times as fast ours is.
    fn ratio(&self) -> f64 {
        self.seconds[1] / self.seconds[0]
    }

    /// `1.82 ±0.1`, and whether the interval leaves open who is faster.
    fn text(&self) -> String {
        let text = ratio_text(self.ratio(), self.interval);
        match self.interval {
            Some(interval) if interval.contains(1.0) => format!("{text}, {OPEN}"),
            _ => text,
        }
    }
}

/// What is said of a ratio whose interval contains 1.
const OPEN: &str = "not resolved";

/// What an interval says, for the note of a table whose ratios have one.
fn interval_note<'a>(pairs: impl IntoIterator<Item = &'a Pair>) -> Option<String> {
    let with = pairs.into_iter().any(|pair| pair.interval.is_some());
    with.then(|| format!("±: 95 % interval of the ratio (Welch); {OPEN}: it contains 1."))
}

/// The cells of `rows` that the reference has too: its medians where it measured a cell several times.
fn pairs(rows: &[Row], references: &[Reference]) -> Vec<Pair> {
    let whole =
        |row: &&Row| row.metric == "step_time" && row.operation.is_none() && row.other_program().is_none();
    let cell = |row: &Row| (row.label(), row.pass, row.batch, row.len);
    let mut seen = Vec::new();
    let pair = |row: &Row| {
        let (pass, len) = (row.pass?, row.len?);
        if seen.contains(&cell(row)) {
            return None; // another seed, whose time is in the median
        }
        seen.push(cell(row));
        let alike: Vec<&Row> = rows.iter().filter(whole).filter(|other| cell(other) == cell(row)).collect();
        let ours = median(&alike.iter().filter_map(|row| row.value).collect::<Vec<_>>());
        let ours = ours.filter(|ours| *ours > 0.0)?;
        let same = |one: &&Reference| {
            let name = if one.model == "ls-own" { "ls" } else { &one.model };
            name == row.label() && one.len == len && one.mode == pass && Some(one.batch) == row.batch
        };
        let here: Vec<&Reference> = references.iter().filter(same).collect();
        let times: Vec<f64> = here.iter().filter_map(|one| one.ms).collect();
        let theirs = median(&times).filter(|ms| *ms > 0.0 && ms.is_finite())? / 1e3;
        let interval = match (alike.as_slice(), here.as_slice()) {
            ([own], [there]) => interval(own, there),
            _ => None, // medians of several
        };
        let grown =
            here.iter().filter_map(|one| Some((one.peak_rss_mib? - one.base_rss_mib?) * (1 << 20) as f64));
        let grown = median(&grown.collect::<Vec<_>>());
        Some(Pair {
            label: row.label(),
            pass,
            batch: row.batch.unwrap_or(1),
            len,
            seconds: [ours, theirs],
            interval,
            bytes: [row.peak_bytes.map(|bytes| bytes as f64), grown],
        })
    };
    rows.iter().filter(whole).filter_map(pair).collect()
}

/// Interval of the time of `there` over that of `own`.
fn interval(own: &Row, there: &Reference) -> Option<Interval> {
    let ours = SampleStats { mean: own.value?, std: own.std?, n: own.n? as usize };
    let theirs = SampleStats { mean: there.ms? / 1e3, std: there.std_ms? / 1e3, n: there.runs? as usize };
    ratio_interval(ours, theirs)
}

/// Geometric mean of the ratios and the least.
fn summary(pairs: &[Pair]) -> (f64, f64) {
    let logs: f64 = pairs.iter().map(|pair| pair.ratio().ln()).sum();
    let least = pairs.iter().map(Pair::ratio).fold(f64::INFINITY, f64::min);
    ((logs / pairs.len() as f64).exp(), least)
}

/// The programs of a reference, in its order, and what each measured.
fn programs(references: &[Reference]) -> Vec<(&str, Vec<Reference>)> {
    let mut programs: Vec<(&str, Vec<Reference>)> = Vec::new();
    for one in references {
        let name = one.program();
        place(&mut programs, |(program, _)| *program == name, || (name, Vec::new())).1.push(one.clone());
    }
    programs
}

/// Our steps beside the reference's, and how many times as fast ours is: a table of all cells, and with several programs one
/// more that sums them up. None where no cell is in both.
pub fn tables(rows: &[Row], references: &[Reference]) -> Vec<Table> {
    let programs = programs(references).into_iter().map(|(name, all)| (name, pairs(rows, &all)));
    let programs: Vec<_> = programs.filter(|(_, pairs)| !pairs.is_empty()).collect();
    match programs.as_slice() {
        [] => Vec::new(),
        [(name, pairs)] => vec![beside(name, pairs)],
        several => vec![sums(several), cells(several)],
    }
}

/// Of every program the geometric mean of how many times as fast ours is, and the least.
fn sums(programs: &[(&str, Vec<Pair>)]) -> Table {
    let line = |(name, pairs): &(&str, Vec<Pair>)| {
        let (mean, least) = summary(pairs);
        let worst = pairs.iter().min_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        let worst = worst
            .map_or_else(String::new, |pair| format!("{} {} {}", pair.label, pair.pass.word(), pair.len));
        vec![(*name).to_owned(), worst, pairs.len().to_string(), format!("{mean:.2}"), format!("{least:.2}")]
    };
    Table {
        title: format!("{TITLE}: how many times as fast effattn is"),
        columns: ["program", "where least", "cells", "geometric mean", "least"].map(str::to_owned).to_vec(),
        numbers: 3,
        rows: programs.iter().map(line).collect(),
        ..Table::default()
    }
}

/// How many times as fast ours is as each program, cell by cell.
fn cells(programs: &[(&str, Vec<Pair>)]) -> Table {
    let mut lines: Vec<(&Pair, Vec<Option<String>>)> = Vec::new();
    for (at, (_, pairs)) in programs.iter().enumerate() {
        for pair in pairs {
            let fresh = || (pair, vec![None; programs.len()]);
            place(&mut lines, |(other, _)| other.cell() == pair.cell(), fresh).1[at] = Some(pair.text());
        }
    }
    let columns = ["model", "pass", "batch", "length", "ours"].map(str::to_owned);
    let line = |(pair, ratios): &(&Pair, Vec<Option<String>>)| {
        let (label, pass, batch, len) = pair.cell();
        let cell = [label.to_owned(), pass.word().to_owned(), batch.to_string(), len.to_string()];
        let ratios = ratios.iter().map(|ratio| ratio.clone().unwrap_or_else(|| "-".to_owned()));
        cell.into_iter().chain([format!("{:.1} ms", pair.seconds[0] * 1e3)]).chain(ratios).collect()
    };
    Table {
        title: format!("{TITLE}, cell by cell"),
        columns: columns.into_iter().chain(programs.iter().map(|(name, _)| (*name).to_owned())).collect(),
        numbers: 3 + programs.len(),
        rows: lines.iter().map(line).collect(),
        notes: std::iter::once("Under a program: how many times as fast effattn is.".to_owned())
            .chain(interval_note(programs.iter().flat_map(|(_, pairs)| pairs)))
            .collect(),
        ..Table::default()
    }
}

/// Our steps beside those of the program called `name`.
fn beside(name: &str, pairs: &[Pair]) -> Table {
    let columns = [
        "model",
        "pass",
        "batch",
        "length",
        "ours",
        name,
        "times as fast",
        "our memory",
        &format!("{name}'s"),
    ];
    let mebi = |bytes: Option<f64>| {
        bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{:.0} MiB", bytes / (1 << 20) as f64))
    };
    let line = |pair: &Pair| {
        vec![
            pair.label.clone(),
            pair.pass.word().to_owned(),
            pair.batch.to_string(),
            pair.len.to_string(),
            format!("{:.1} ms", pair.seconds[0] * 1e3),
            format!("{:.1} ms", pair.seconds[1] * 1e3),
            pair.text(),
            mebi(pair.bytes[0]),
            mebi(pair.bytes[1]),
        ]
    };
    let shares: Vec<f64> = pairs.iter().filter_map(|pair| Some(pair.bytes[0]? / pair.bytes[1]?)).collect();
    let memory =
        median(&shares).map_or_else(String::new, |share| format!("; memory {share:.2} of {name}'s (median)"));
    let (mean, least) = summary(pairs);
    let note = format!(
        "{} cells: {mean:.2} times as fast in geometric mean, at least {least:.2} times{memory}. Our memory is live bytes, \
         {name}'s is resident growth.",
        pairs.len()
    );
    Table {
        title: TITLE.to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        numbers: 7,
        rows: pairs.iter().map(line).collect(),
        notes: std::iter::once(note).chain(interval_note(pairs)).collect(),
        ..Table::default()
    }
}

const TITLE: &str = "Beside the reference";

/// The chart `<prefix>-reference`: how many times as fast as the reference each cell is, with a panel per program, pass and
/// batch size. Nothing where no cell is in both.
pub fn chart(rows: &[Row], references: &[Reference], prefix: &str) -> io::Result<Option<Chart>> {
    let all: Vec<(&str, Pair)> = programs(references)
        .into_iter()
        .flat_map(|(name, references)| pairs(rows, &references).into_iter().map(move |pair| (name, pair)))
        .collect();
    let several = all.iter().any(|(name, _)| *name != all[0].0);
    let Some((_, first)) = all.first() else { return Ok(None) };
    let batches = all.iter().any(|(_, pair)| pair.batch != first.batch);
    let mut panels: Vec<RatioPanel> = Vec::new();
    for (program, pair) in &all {
        let pass = match pair.pass {
            Pass::Infer => "Inference",
            Pass::Train => "Training",
            Pass::Decode => "Decoding",
        };
        let program = if several { format!("{program} · ") } else { String::new() };
        let batch = if batches { format!(" · batch {}", pair.batch) } else { String::new() };
        let title = format!("{program}{pass}{batch}");
        let panel = place(
            &mut panels,
            |panel| panel.title == title,
            || RatioPanel { title: title.clone(), rows: Vec::new() },
        );
        let row = place(&mut panel.rows, |row| row.0 == pair.label, || (pair.label.clone(), Vec::new()));
        row.1.push((pair.len, pair.ratio()));
    }
    let pairs: Vec<Pair> = all.into_iter().map(|(_, pair)| pair).collect();
    let subtitle = match (several, summary(&pairs)) {
        (true, _) => format!("{} cells; a mark per length", pairs.len()),
        (false, (mean, least)) => {
            format!("{} cells, geometric mean {mean:.2}, least {least:.2}; a mark per length", pairs.len())
        }
    };
    let axis = "times as fast as the reference";
    ratios(&format!("{prefix}-reference"), (TITLE, &subtitle), axis, &panels).map(Some)
}

#[cfg(test)]
mod tests;
