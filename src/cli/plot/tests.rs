use clap::Parser;

use super::*;
use crate::run::manifest::Manifest;
use crate::run::plan::sha256;
use crate::term::{Color, Verbosity};
use effattn_record::csv;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    what: PlotCommand,
}

/// Runs `plot LINE` with results and plots below `folder`.
fn plot(line: &str, folder: &Path) -> std::result::Result<(), String> {
    let words = line.replace("DIR", &folder.display().to_string());
    let cli = Cli::try_parse_from(std::iter::once("plot").chain(words.split_whitespace()));
    let what = cli.map_err(|error| error.to_string())?.what;
    let result = run(&what, &Term::new(Verbosity::Quiet, Color::Never));
    result.map(drop).map_err(|error| format!("{error:#}"))
}

const PLACE: &str = "-o DIR/results --plots-dir DIR/plots";

#[test]
fn every_mechanism_has_a_pattern_and_its_matrices_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    for (form, missing) in [("", "transformer-xl"), ("--causal", "nystrom")] {
        plot(&format!("pattern --len 32 {form} {PLACE}"), folder.path()).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("plots/pattern.svg")).unwrap();
        let kept = matrix::read(&folder.path().join("results/pattern/latest")).unwrap();
        assert!(kept.len() >= 15 && svg.contains(">\nfull"), "{} matrices", kept.len());
        assert!(kept.iter().all(|matrix| !matrix.label.starts_with(missing)), "{missing} has no such form");
    }
}

#[test]
fn attention_is_drawn_from_random_and_from_given_weights() {
    let folder = tempfile::tempdir().unwrap();
    plot(&format!("attention --len 20 --threshold 0.5 --samples 3 {PLACE}"), folder.path()).unwrap();
    let kept = matrix::read(&folder.path().join("results/attention/latest")).unwrap();
    assert_eq!(
        kept.iter().map(|matrix| matrix.label.as_str()).collect::<Vec<_>>(),
        ["full", "cosformer", "relu-linear"]
    );
    assert!(kept[0].values.iter().all(|value| (0.0..=1.0).contains(value)));
    let golden = "tests/golden/full-02.safetensors";
    plot(&format!("attention --model full --weights {golden} {PLACE}"), folder.path()).unwrap();
    let csv = std::fs::read_to_string(folder.path().join("plots/attention.csv")).unwrap();
    assert!(csv.starts_with("model,query,kind,index,value\nfull,0,key,0,"), "{csv}");
    let drawn = crate::cli::stored_drawings::sections(folder.path());
    let charts: Vec<&str> = drawn.iter().map(|section| section.charts[0].svg.as_str()).collect();
    let svg = std::fs::read_to_string(folder.path().join("plots/attention.svg")).unwrap();
    assert!(charts.len() == 2 && charts[1] == svg, "a report has both as they were drawn");
}

#[test]
fn mistakes_name_what_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    for (line, says) in [
        ("pattern --model fulll", "did you mean full?"),
        ("pattern --model nystrom --causal", "nystrom has no causal form; leave --causal out"),
        ("pattern --len 0", "out of range"),
        ("pattern --len 2048", "a picture has at most 1024 positions"),
        ("pattern --len 8,16", "one length is drawn at a time"),
        ("pattern --head 4", "--head 4 is not one of the 4 heads"),
        ("attention --model ls", "set dual_ln=false"),
        ("attention --threshold 1.5", "is not a number from 0 to 1"),
        ("attention --weights DIR/file", "--weights"),
        ("attention --weights tests/golden/full-02.safetensors --len 7", "leave --len out"),
        ("rows DIR", "run `effattn speed` first"),
        ("attention --suite cos-table5", "suite cos-table5 is run by: effattn speed --suite cos-table5"),
        ("norms --task sample --len 64 --model dp", "dp has no window beside slots; ls has"),
        ("norms --task sample --len 65536", "take --len"),
        ("norms --task enwik9", "did you mean enwik8?"),
        ("norms --task enwik8 --data-dir DIR", "run effattn fetch enwik8"),
    ] {
        let line = if line.starts_with("rows") { line.to_owned() } else { format!("{line} {PLACE}") };
        let error = plot(&line, folder.path()).unwrap_err();
        assert!(error.contains(says), "{line}: {error}");
    }
    let error = plot("pattern -o DIR/file --plots-dir DIR/plots", folder.path()).unwrap_err();
    assert!(error.contains("--output-path") && error.contains("cannot be written"), "{error}");
}

#[test]
fn norms_and_a_suite_are_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = "--set layers=2 --set width=64 --set heads=4 --set ffn=64";
    plot(&format!("norms --task sample --len 64 {sizes} {PLACE}"), folder.path()).unwrap();
    let kept = effattn_record::norms::read(&folder.path().join("results/norms/latest")).unwrap();
    assert_eq!(kept.len(), 2 * 2 * 2 * 5, "models, layers, kinds, heads and all of them");
    assert!(folder.path().join("plots/norms.csv").exists());
    plot(&format!("attention --suite cos-figure3 --threshold 0.9 {PLACE}"), folder.path()).unwrap();
    let kept = matrix::read(&folder.path().join("results/attention/latest")).unwrap();
    assert_eq!(
        kept.iter().map(|matrix| matrix.label.as_str()).collect::<Vec<_>>(),
        ["full", "cosformer", "relu-linear", "cos distance"]
    );
}

#[test]
fn rows_are_drawn_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut row = effattn_record::Row::new("speed", "ls").with("step_time", "s", Some(0.5));
    (row.len, row.outcome) = (Some(1024), effattn_record::Outcome::Ok);
    let text = csv::to_string(&[row]).unwrap();
    std::fs::write(folder.path().join("rows.csv"), &text).unwrap();
    let drawn = || plot("rows DIR --plots-dir DIR/plots", folder.path());
    assert!(drawn().unwrap_err().contains("no manifest.json"));
    let mut manifest = Manifest::new(&Plan::default(), "id");
    manifest.rows_sha256 = Some(sha256(&text));
    manifest.write(folder.path()).unwrap();
    drawn().unwrap();
    assert!(folder.path().join("plots/speed-time.svg").exists());
    std::fs::write(folder.path().join("rows.csv"), text.replace("0.5", "0.25")).unwrap();
    assert!(drawn().unwrap_err().contains("is not what its run wrote"));
    manifest.rows_sha256 = None;
    manifest.write(folder.path()).unwrap();
    std::fs::write(folder.path().join("rows.csv"), text.replace("0.5", "NaN")).unwrap();
    assert!(drawn().unwrap_err().contains("is no finite number"));
    std::fs::write(folder.path().join("manifest.json"), "{\"schema\": 99}").unwrap();
    assert!(drawn().unwrap_err().contains("a newer effattn"));
}
