use super::*;
use crate::{FLOOR, Outcome};

const ACCURACY: Metric = Metric { name: "accuracy", title: "", unit: "%", lower_is_better: false };

const SUITE: &str = r#"
title = "T"
protocol = "lra"
source = "Paper, Table 9"
source_seeds = 4
columns = [
    { title = "ListOps", metrics = ["accuracy"], key = "listops" },
    { title = "FLOPs", metrics = ["gflops"], key = "listops" },
    { title = "Text", metrics = ["accuracy"], key = "text" },
    { title = "Average", metrics = ["accuracy"], key = "average" },
]
[base]
preset = "ls-lra"
task = ["listops", "text"]
[[row]]
label = "DP by definition"
model = "linformer"
[[row]]
label = "DP (listops)"
part_of = "DP"
model = "dp"
set = { task = ["listops"] }
published = [{ metric = "accuracy", listops = 37.0 }, { metric = "gflops", listops = 0.15 }]
[[row]]
label = "DP (text)"
part_of = "DP"
model = "ls"
set = { task = ["text"] }
published = { metric = "accuracy", text = 66.0 }
[[printed]]
label = "DP"
why = "the mean"
published = { metric = "accuracy", average = 51.5 }
[[printed]]
label = "Other"
why = "another paper's"
published = { metric = "accuracy", listops = 40.0 }
"#;

fn planned(model: &str, tasks: &[&str]) -> Vec<Row> {
    let row = |task: &&str| Row {
        task: Some((*task).to_owned()),
        preset: Some("ls-lra".to_owned()),
        flops: Some(146_325_056),
        ..Row::new("lra", model)
    };
    tasks.iter().map(row).collect()
}

fn run(model: &str, task: &str, seed: u64, value: f64) -> Row {
    let row = planned(model, &[task]).remove(0);
    let row = Row { seed: Some(seed), fraction: Some(1.0), ..row };
    row.with("accuracy", "%", Some(value)).with_outcome(Outcome::Ok, None)
}

fn made(rows: &[Row]) -> Paper {
    let suite = Suite::parse("x.toml", SUITE).unwrap();
    let planned =
        [planned("linformer", &["listops", "text"]), planned("dp", &["listops"]), planned("ls", &["text"])];
    paper(&PaperSource { suite: &suite, planned: &planned, rows, metrics: &[ACCURACY], others: &[] }).unwrap()
}

#[test]
fn published_numbers_keep_their_digits() {
    let text =
        SUITE.replace("listops = 37.0 }", "listops = 37 }").replace("listops = 40.0", "listops = 95.3");
    let suite = Suite::parse("x.toml", &text.replace("text = 66.0", "text = 1.125")).unwrap();
    let planned =
        [planned("linformer", &["listops", "text"]), planned("dp", &["listops"]), planned("ls", &["text"])];
    let source =
        PaperSource { suite: &suite, planned: &planned, rows: &[], metrics: &[ACCURACY], others: &[] };
    let table = paper(&source).unwrap().table;
    assert_eq!(table.rows[0][1..5], ["- / 37", "0.15 / 0.15 =", "- / 1.125", "- / 51.5"]);
    assert_eq!(table.rows[1][1], "- / 95.3");
}

#[test]
fn without_runs_every_cell_has_what_is_printed_and_the_line_says_what_runs_it() {
    let table = made(&[]).table;
    assert_eq!(table.columns, ["model", "ListOps", "FLOPs", "Text", "Average", "to run"]);
    let command = "effattn lra --suite x.toml --model dp,ls";
    assert_eq!(table.rows[0], ["DP", "- / 37.0", "0.15 / 0.15 =", "- / 66.0", "- / 51.5", command]);
    assert_eq!(table.rows[1], ["Other (a)", "- / 40.0", "", "", "", ""]);
    assert_eq!(table.notes[0], "a: another paper's.", "why it is not run");
    let own = ["DP by definition", "-", "0.15", "-", "-", "effattn lra --suite x.toml --model linformer"];
    assert_eq!(table.rows[2], own, "what the paper has no number for stands below");
    let row = "[[row]]\nlabel = \"DP (r=8)\"\nmodel = \"dp\"\nknobs = { r = 8 }\n";
    let variant = format!("{SUITE}{row}");
    let suite = Suite::parse("x.toml", &variant).unwrap();
    let planned =
        [planned("linformer", &["listops", "text"]), planned("dp", &["listops"]), planned("ls", &["text"])];
    let source =
        PaperSource { suite: &suite, planned: &planned, rows: &[], metrics: &[ACCURACY], others: &[] };
    let command = paper(&source).unwrap().table.rows[0][5].clone();
    assert!(
        command.starts_with("effattn lra --suite x.toml --model \"DP"),
        "the name alone chooses both: {command}"
    );
}

#[test]
fn cells_have_value_seeds_and_sign_and_the_mean_those_of_all_tasks() {
    let rows = [
        run("dp", "listops", 1, 37.2),
        run("dp", "listops", 2, 36.9),
        run("ls", "text", 1, 60.0),
        run("ls", "text", 2, 60.1),
    ];
    let made = made(&rows);
    let line = &made.table.rows[0];
    assert_eq!(line[1], "37.05 / 37.0 = n=2");
    assert_eq!(line[3], "60.05 / 66.0 ▼ n=2");
    assert_eq!(line[4], "48.55 / 51.5 ▼ n=2");
    assert_eq!(line[5], "", "nothing is missing");
    assert_eq!(made.used.len(), 4);
    let one = self::made(&rows[..1]);
    assert_eq!(one.table.rows[0][1], "37.20 / 37.0 ○ n=1", "one seed says nothing");
    assert_eq!(one.table.rows[0][4], "- / 51.5", "a mean of one task is none");
}

#[test]
fn other_settings_are_marked_and_never_shown_before_the_protocol() {
    let differs = Some("steps 40 (5000)".to_owned());
    let short = Row { fraction: None, differs, ..run("dp", "listops", 1, 39.0) };
    let table = made(std::slice::from_ref(&short)).table;
    assert_eq!(table.rows[0][1], "39.00 / 37.0 ○ n=1 (a)");
    assert!(table.notes.iter().any(|note| note == "a: steps 40 (5000)."), "{:?}", table.notes);
    let table = made(&[run("dp", "listops", 1, 37.2), short]).table;
    assert_eq!(table.rows[0][1], "37.20 / 37.0 ○ n=1", "the protocol's run stands there");
    let other = Row { preset: Some("lra-repo".to_owned()), ..run("dp", "listops", 1, 37.2) };
    assert_eq!(made(&[other]).table.rows[0][1], "- / 37.0", "another model");
}

#[test]
fn what_does_not_exceed_the_floor_is_marked() {
    let rule = Row {
        variant: Some("root-operator".to_owned()),
        preset: None,
        fraction: None,
        flops: None,
        ..run(FLOOR, "listops", 0, 37.1)
    };
    let table = made(&[rule.clone(), run("dp", "listops", 1, 36.0)]).table;
    assert_eq!(table.rows[0][1], "36.00↓ / 37.0↓ ○ n=1");
    assert_eq!(table.rows[1][1], "- / 40.0");
    let last = table.rows.last().unwrap();
    assert_eq!((last[0].as_str(), last[1].as_str()), ("floor: the best simple rule", "37.10 root-operator"));
    let trained = run("ls", "text", 1, 60.0);
    let largest = trained.clone().with("largest_class", "%", Some(50.0));
    let listops = run("dp", "listops", 1, 36.0).with("largest_class", "%", Some(17.0));
    let table = made(&[rule.clone(), trained, largest, listops]).table;
    let last = &table.rows.last().unwrap()[1..];
    assert_eq!(last[..3], ["37.10 root-operator", "", "50.00 largest class"], "where no rule was scored");
    let differs = Some("40 examples of each split".to_owned());
    let part = Row { differs: differs.clone(), ..rule };
    let table = made(std::slice::from_ref(&part)).table;
    assert_eq!(table.rows[0][1], "- / 37.0", "a floor of other data says nothing of the published number");
    assert!(!table.rows.last().unwrap()[0].starts_with("floor"), "nothing was measured on those examples");
    let measured = Row { differs, ..run("dp", "listops", 1, 30.0) };
    let table = made(&[part, measured]).table;
    assert_eq!(table.rows[0][1], "30.00↓ / 37.0 ○ n=1 (a)");
    assert_eq!(table.rows.last().unwrap()[1], "37.10 root-operator (a)");
}

const SIZES: &str = r#"
title = "T"
protocol = "speed"
source = "Paper, Table 5"
by_len = true
columns = [
    { title = "Parameters", metrics = ["parameters_millions"], key = "infer" },
    { title = "FLOPs", metrics = ["gflops"], key = "infer" },
    { title = "Top-1", metrics = ["accuracy"], key = "imagenet", suite = "accuracy" },
    { title = "Latency", metrics = ["step_time"], key = "infer" },
]
[base]
len = [224, 384]
[[row]]
label = "A"
model = "ls2d"
published = [{ metric = "step_time", infer = [0.075, 0.271] }, { metric = "gflops", infer = [8.7, 28.0] }]
[[row]]
label = "B"
model = "full"
set = { len = 384 }
published = { metric = "parameters_millions", infer-384 = 307 }
[[printed]]
label = "C"
why = "not built"
published = { metric = "accuracy", source = "Paper C, Table 1", imagenet = 83.5 }
"#;

const TOP1: &str = r#"
title = "T"
protocol = "vision"
source = "Paper, Table 5"
also = "--data-dir images"
[base]
task = "imagenet"
[[row]]
label = "A"
model = "ls2d"
set = { len = 224 }
published = { metric = "accuracy", imagenet = 83.8 }
[[row]]
label = "A at 384"
part_of = "A"
model = "ls2d"
set = { len = 384 }
published = { metric = "accuracy", imagenet = 84.4 }
"#;

fn measured(model: &str, len: u64) -> Row {
    let flops = Some(if len == 224 { 8_660_000_000 } else { 28_700_000_000 });
    let (params, pass) = (Some(307_100_000), Some(crate::Pass::Infer));
    Row { len: Some(len), pass, flops, params, batch: Some(32), ..Row::new("speed", model) }
}

fn tested(len: u64, seed: u64, value: f64) -> Row {
    let task = Some("imagenet".to_owned());
    let row =
        Row { task, len: Some(len), seed: Some(seed), fraction: Some(1.0), ..Row::new("vision", "ls2d") };
    row.with("accuracy", "%", Some(value)).with_outcome(Outcome::Ok, None)
}

const SPEEDS: &str = r#"
title = "T"
protocol = "speed"
source = "Paper"
columns = [
    { title = "1K", metrics = ["steps_per_second"], key = "train", len = 1024 },
    { title = "2K", metrics = ["steps_per_second"], key = "train", len = 2048 },
]
[base]
len = [1024, 2048]
mode = ["train"]
[[row]]
label = "Transformer"
model = "full"
published = { metric = "steps_per_second", train = [10.0, "oom"] }
[[row]]
label = "LS"
model = "ls"
published = { metric = "steps_per_second", train = [23.0, 8.0] }
"#;

#[test]
fn speeds_lead_with_the_ratio_to_full_attention() {
    let suite = Suite::parse("x.toml", SPEEDS).unwrap();
    let row = |model: &str, len: u64, rate: f64| {
        let row = Row {
            len: Some(len),
            pass: Some(crate::Pass::Train),
            batch: Some(1),
            ..Row::new("speed", model)
        };
        row.with("steps_per_second", "1/s", Some(rate)).with_outcome(Outcome::Ok, None)
    };
    let planned = ["full", "ls"].map(|model| vec![row(model, 1024, 0.0), row(model, 2048, 0.0)]);
    let table = |rows: &[Row]| {
        paper(&PaperSource { suite: &suite, planned: &planned, rows, metrics: &[], others: &[] })
            .unwrap()
            .ratios
    };
    let rows = [row("full", 1024, 2.0), row("full", 2048, 0.5), row("ls", 1024, 3.0), row("ls", 2048, 2.0)];
    let ratios = table(&rows).unwrap();
    assert!(ratios.title.contains("times as fast as Transformer, measured / published"), "{ratios:?}");
    assert_eq!(ratios.rows, [["LS", "1.50 / 2.30", "4.00 / Transformer oom"]]);
    let other = Row { batch: Some(2), ..row("ls", 1024, 3.0) };
    assert!(table(&[row("full", 1024, 2.0), other]).is_none(), "of another batch");
    assert!(table(&[]).is_none());
}

fn by_size(rows: &[Row]) -> Table {
    let suites = [SIZES, TOP1].map(|text| Suite::parse("accuracy.toml", text).unwrap());
    let speed = [vec![measured("ls2d", 224), measured("ls2d", 384)], vec![measured("full", 384)]];
    let vision = [224, 384].map(|len| vec![Row { value: None, ..tested(len, 0, 0.0) }]);
    let metrics = &[ACCURACY];
    let others = [PaperSource { suite: &suites[1], planned: &vision, rows, metrics, others: &[] }];
    paper(&PaperSource { suite: &suites[0], planned: &speed, rows, metrics, others: &others }).unwrap().table
}

#[test]
fn a_table_may_have_a_line_for_every_length_and_columns_that_another_suite_runs() {
    let table = by_size(&[]);
    let names: Vec<&str> = table.rows.iter().map(|line| line[0].as_str()).collect();
    assert_eq!(names, ["A, 224", "C, 224 (a)", "A, 384", "B, 384"], "grouped by length");
    let runs = "effattn vision --suite accuracy.toml --model ls2d --data-dir images; effattn speed --suite accuracy.toml --model ls2d";
    let first = ["A, 224", "307.10", "8.66 / 8.7 =", "- / 83.8", "- / 0.075", runs];
    assert_eq!(table.rows[0], first, "FLOPs have as many digits as are printed");
    assert_eq!(table.rows[1][3], "- / 83.5 (b)");
    assert_eq!(table.notes[..2], ["a: not built.", "b: the published number was read in Paper C, Table 1."]);
    assert_eq!(table.rows[2][1..5], ["307.10", "28.70 / 28.0 ≠", "- / 84.4", "- / 0.271"]);
    assert_eq!(table.rows[3][1..5], ["307.10 / 307 =", "28.70", "", "-"]);
}

#[test]
fn a_run_of_another_length_fills_no_cell() {
    let time = measured("ls2d", 384).with("step_time", "s", Some(2.5)).with_outcome(Outcome::Ok, None);
    let table = by_size(&[tested(224, 1, 83.7), tested(224, 2, 83.9), time]);
    assert_eq!(table.rows[0][3..5], ["83.80 / 83.8 = n=2", "- / 0.075"]);
    assert_eq!(table.rows[2][3..5], ["- / 84.4", "2.500 / 0.271"]);
}

#[test]
fn a_row_with_a_length_of_its_own_takes_no_run_of_another() {
    let text = r#"
title = "T"
protocol = "finetune"
source = "Paper"
columns = [{ title = "IMDb", metrics = ["accuracy"], key = "imdb" }]
[base]
task = "imdb"
[[row]]
label = "short"
model = "full"
set = { len = 128 }
"#;
    let suite = Suite::parse("x.toml", text).unwrap();
    let row =
        |len: u64| Row { len: Some(len), protocol: "finetune".to_owned(), ..run("full", "imdb", 1, 80.0) };
    let planned = [vec![row(128)]];
    let cell = |rows: &[Row]| {
        let source =
            PaperSource { suite: &suite, planned: &planned, rows, metrics: &[ACCURACY], others: &[] };
        paper(&source).unwrap().table.rows[0][1].clone()
    };
    assert_eq!(cell(&[row(256)]), "-");
    assert_eq!(cell(&[row(256), row(128)]), "80.00 n=1");
    let largest = Row { metric: "largest_class".to_owned(), value: Some(81.0), ..row(128) };
    assert_eq!(cell(&[row(128), largest]), "80.00↓ n=0, 1 at the largest class");
}
