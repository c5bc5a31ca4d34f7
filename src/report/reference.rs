//! Another program's measured steps beside ours: `speed --reference`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::table::Table;
use crate::record::{Pass, Row};
use crate::stats::median;

/// Name of the file in a run folder.
pub const FILE: &str = "reference.json";

/// One measured cell of another program: a line of JSON as `benches/peer/torch_speed.py` prints it, or a line of CSV with
/// these columns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
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
    /// Resident memory before the step.
    pub base_rss_mib: Option<f64>,
    /// Highest resident memory.
    pub peak_rss_mib: Option<f64>,
}

fn one() -> u64 {
    1
}

/// Why another program's numbers cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "line {line} is no measurement ({reason}); expected JSON or CSV with model, len, mode (infer or train) and ms"
)]
pub struct ReferenceError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

/// Measurements, one JSON object per line or CSV with a header.
///
/// # Errors
/// A line that is neither.
pub fn parse(text: &str) -> Result<Vec<Reference>, ReferenceError> {
    let bad = |line: usize, reason: String| ReferenceError { line, reason };
    let mut all = Vec::new();
    if text.trim_start().starts_with('{') {
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            all.push(serde_json::from_str(line).map_err(|error| bad(index + 1, error.to_string()))?);
        }
    } else {
        for (index, record) in ::csv::Reader::from_reader(text.as_bytes()).deserialize().enumerate() {
            all.push(record.map_err(|error| bad(index + 2, error.to_string()))?);
        }
    }
    if all.is_empty() {
        return Err(bad(1, "there is none".to_owned()));
    }
    Ok(all)
}

/// The measurements in a run folder; none if there is no such file.
///
/// # Errors
/// A file that cannot be read.
pub fn read(folder: &Path) -> std::io::Result<Vec<Reference>> {
    match std::fs::read_to_string(folder.join(FILE)) {
        Ok(text) => parse(&text).map_err(std::io::Error::other),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// As it is kept in a run folder.
///
/// # Errors
/// None in practice.
pub fn to_text(references: &[Reference]) -> serde_json::Result<String> {
    let lines: Result<Vec<String>, _> = references.iter().map(serde_json::to_string).collect();
    Ok(lines?.join("\n") + "\n")
}

/// Our steps beside the reference's: medians where a cell was measured several times, and how many times as fast ours is.
/// Nothing where no cell is in both.
pub fn table(rows: &[Row], references: &[Reference]) -> Option<Table> {
    let columns = [
        "model",
        "pass",
        "batch",
        "length",
        "ours",
        "reference",
        "times as fast",
        "our memory",
        "reference's",
    ];
    let mut table = Table {
        title: "Beside the reference".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        numbers: 7,
        ..Table::default()
    };
    let (mut logs, mut memory, mut least) = (Vec::new(), Vec::new(), f64::INFINITY);
    for row in rows.iter().filter(|row| row.metric == "step_time") {
        let (Some(ours), Some(pass), Some(len)) = (row.value, row.pass, row.len) else { continue };
        let same = |one: &&Reference| {
            let name = if one.model == "ls-own" { "ls" } else { &one.model };
            name == row.label() && one.len == len && one.mode == pass && Some(one.batch) == row.batch
        };
        let here: Vec<&Reference> = references.iter().filter(same).collect();
        let times: Vec<f64> = here.iter().filter_map(|one| one.ms).collect();
        let Some(theirs) = median(&times).map(|ms| ms / 1e3) else { continue };
        let ratio = theirs / ours;
        logs.push(ratio.ln());
        least = least.min(ratio);
        let grown =
            here.iter().filter_map(|one| Some((one.peak_rss_mib? - one.base_rss_mib?) * (1 << 20) as f64));
        let grown = median(&grown.collect::<Vec<_>>());
        let own = row.peak_bytes.map(|bytes| bytes as f64);
        memory.extend(own.zip(grown).map(|(own, grown)| own / grown));
        let mebi = |bytes: Option<f64>| {
            bytes.map_or_else(|| "-".to_owned(), |b| format!("{:.0} MiB", b / (1 << 20) as f64))
        };
        table.rows.push(vec![
            row.label(),
            pass.word().to_owned(),
            row.batch.unwrap_or(1).to_string(),
            len.to_string(),
            format!("{:.1} ms", ours * 1e3),
            format!("{:.1} ms", theirs * 1e3),
            format!("{ratio:.2}"),
            mebi(own),
            mebi(grown),
        ]);
    }
    if logs.is_empty() {
        return None;
    }
    let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
    let memory = median(&memory)
        .map_or_else(String::new, |share| format!("; memory {share:.2} of the reference's (median)"));
    table.notes.push(format!(
        "{} cells: {mean:.2} times as fast in geometric mean, at least {least:.2} times{memory}. Our memory is live bytes, the \
         reference's is resident growth.",
        logs.len()
    ));
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = "{\"model\": \"ls-own\", \"len\": 1024, \"batch\": 1, \"mode\": \"infer\", \"ms\": 60.0, \
                        \"base_rss_mib\": 200.0, \"peak_rss_mib\": 300.0, \"runs\": 9}\n\
                        {\"model\": \"full\", \"len\": 1024, \"mode\": \"train\", \"error\": \"out of memory\"}\n";

    #[test]
    fn both_forms_are_read() {
        let json = parse(JSON).unwrap();
        assert_eq!((json[0].ms, json[1].ms, json[1].batch), (Some(60.0), None, 1));
        assert_eq!(parse(&to_text(&json).unwrap()).unwrap(), json);
        let csv =
            parse("model,len,batch,mode,ms,base_rss_mib,peak_rss_mib\nls,1024,1,infer,60,200,300\n").unwrap();
        assert_eq!((csv[0].ms, csv[0].mode), (Some(60.0), Pass::Infer));
        for (text, line) in [("{\"model\": 1}", "line 1"), ("model,len\nls,many\n", "line 2"), ("", "line 1")]
        {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(line) && error.contains("expected JSON or CSV"), "{error}");
        }
    }

    #[test]
    fn ratios_are_reference_over_ours() {
        let row = Row {
            pass: Some(Pass::Infer),
            len: Some(1024),
            batch: Some(1),
            peak_bytes: Some(50 << 20),
            ..Row::new("speed", "ls").with("step_time", "s", Some(0.04))
        };
        let table = table(&[row], &parse(JSON).unwrap()).unwrap();
        assert_eq!(
            table.rows,
            [["ls", "infer", "1", "1024", "40.0 ms", "60.0 ms", "1.50", "50 MiB", "100 MiB"]]
        );
        assert!(
            table.notes[0].contains("1.50 times as fast") && table.notes[0].contains("memory 0.50"),
            "{}",
            table.notes[0]
        );
        assert!(super::table(&[], &parse(JSON).unwrap()).is_none());
    }
}
