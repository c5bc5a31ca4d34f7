//! Fixtures, and what is left out of them because it may differ.

use std::fs;
use std::path::PathBuf;

use super::{blesses, root};

/// In front of the processor in the line above the digits of a fixture: other processors may compute others.
pub const DIGITS: &str = "## digits on ";

/// The place of a fixture.
pub fn place(name: &str) -> PathBuf {
    root().join("tests/identity/fixtures").join(name)
}

/// The part of a fixture that holds on `processor`.
fn holds<'a>(text: &'a str, processor: Option<&str>) -> &'a str {
    let Some(at) = text.find(DIGITS) else { return text };
    let written_on = text[at + DIGITS.len()..].lines().next();
    if written_on == processor { text } else { &text[..at] }
}

/// Compares `text` with the fixture called `name`, or writes it. Digits are compared where the fixture is from the same kind
/// of processor.
pub fn same(name: &str, text: &str) {
    let path = place(name);
    if blesses() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        return fs::write(&path, text).unwrap();
    }
    let fixture = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let here = text.find(DIGITS).and_then(|at| text[at + DIGITS.len()..].lines().next());
    let kept = holds(&fixture, here);
    let now = if kept.len() == fixture.len() { text } else { &text[..text.find(DIGITS).unwrap()] };
    if kept.len() < fixture.len() {
        eprintln!("{name}: the fixture's digits are from another processor and not compared");
    }
    alike(&format!("{} (EFFATTN_BLESS=1 renews it)", path.display()), kept, now);
}

/// Makes sure that two texts are the same, or says in which lines they differ.
pub fn alike(what: &str, then: &str, now: &str) {
    let (then, now): (Vec<&str>, Vec<&str>) = (then.lines().collect(), now.lines().collect());
    let differ = (0..then.len().max(now.len())).filter(|&line| then.get(line) != now.get(line));
    let told = |lines: &[&str], line: usize| lines.get(line).map_or("(nothing)", |line| *line).to_owned();
    let told: Vec<String> = differ
        .map(|line| format!("line {}\n  then {}\n  now  {}", line + 1, told(&then, line), told(&now, line)))
        .collect();
    assert!(told.is_empty(), "{what}: {} lines differ\n{}", told.len(), told[..told.len().min(8)].join("\n"));
}

/// Units of what is measured and not computed.
const MEASURED: [&str; 7] = ["s", "1/s", "B", "FLOP/s", "B/s", "GFLOP/s", "share"];

/// The rows of a file, and of those that were computed the digits by themselves.
///
/// A `*` stands for what differs from run to run, machine to machine or build to build, a `=` for what the row above has.
pub fn rows(text: &str) -> (String, String) {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().unwrap().clone();
    let at = |name: &str| header.iter().position(|column| column == name).unwrap();
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&header).unwrap();
    let (mut digits, mut above) = (String::new(), csv::StringRecord::new());
    let mut records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    if let Some(operation) = header.iter().position(|column| column == "operation") {
        records.sort_by(|a, b| a[operation].cmp(&b[operation])); // those of a profile stand by their time
    }
    for row in records {
        let longest = &row[at("metric")] == "longest_length"; // products keep more memory where caches are large
        let measured = longest || MEASURED.contains(&&row[at("unit")]);
        let field = |(column, text): (&str, &str)| match column {
            "n" | "std" | "ci_low" | "ci_high" if measured => "*".to_owned(), // also where few were taken
            "len" if longest => "*".to_owned(),
            "version" | "commit" | "machine" => "*".to_owned(), // a build outside a checkout has no commit
            "value" | "std" | "ci_low" | "ci_high" | "peak_bytes" if !text.is_empty() => "*".to_owned(),
            _ => text.to_owned(),
        };
        let masked: csv::StringRecord = header.iter().zip(&row).map(field).collect();
        let short = |(index, text): (usize, &str)| match above.get(index) {
            Some(same) if same == text && text.len() > 1 => "=".to_owned(),
            _ => text.to_owned(),
        };
        let shown: Vec<String> = masked.iter().enumerate().map(short).collect();
        writer.write_record(shown).unwrap();
        above = masked;
        if !measured || longest {
            let of = |column: &str| row[at(column)].to_owned();
            let told = ["metric", "task", "value", "std", "ci_low", "ci_high"].map(of);
            digits += &format!("{}\n", told.join(","));
        }
    }
    (String::from_utf8(writer.into_inner().unwrap()).unwrap(), digits)
}

/// Makes sure that every row of a file has `value` in `column`.
pub fn every(text: &str, (column, value): (&&str, &str)) {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let at = reader.headers().unwrap().iter().position(|name| name == *column).unwrap();
    for row in reader.records().map(Result::unwrap) {
        assert_eq!(&row[at], value, "{column} of a row, and that of its manifest");
    }
}

#[test]
fn what_is_measured_is_left_out_and_what_is_computed_is_digits() {
    let columns = "metric,task,unit,value,std,ci_low,ci_high,n,peak_bytes,version,commit,machine,model";
    let text = format!("{columns}\nstep_time,a,s,1,2,3,4,5,6,7,8,9,ls\nloss,b,nat,1.5,,,,5,,7,8,9,ls\n");
    let (rows, digits) = rows(&text);
    assert_eq!(rows, format!("{columns}\nstep_time,a,s,*,*,*,*,*,*,*,*,*,ls\nloss,b,nat,*,,,,5,,*,*,*,=\n"));
    assert_eq!(digits, "loss,b,1.5,,,\n");
}

#[test]
fn digits_hold_on_one_processor() {
    let text = format!("a\n{DIGITS}x\n1\n");
    assert_eq!(holds(&text, Some("x")), text);
    assert_eq!(holds(&text, Some("y")), "a\n");
}
