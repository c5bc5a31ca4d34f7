//! The recipe of `docs/adding-a-data-set.md` works: this program is the whole of `effattn` with a data set more, as
//! somebody else's crate would be. It has no test harness, as its workers are itself; called with a command it is the tool,
//! else it tries its own commands.

mod bag;
mod parity;
mod weigh;
mod weights;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use effattn::data::entry::{self, DataKind, DataSetEntry, WordTask};
use effattn::data::images;
use effattn::data::images::answer::Answer;
use effattn::data::images::test_only::{self, Form, Parts, TestOnlySet, TestSetOrigin};
use effattn::data::images::transform::Interpolation;
use effattn::data::running_text::{self, RunningText};

#[global_allocator]
static ALLOCATOR: effattn::device::alloc::CountingAllocator = effattn::device::alloc::CountingAllocator;

/// The words that ship with the program under another name: a corpus that no recipe knows.
static STORIES: DataSetEntry = DataSetEntry {
    name: "stories",
    collection: "stories",
    title: "Stories",
    about: "the next word",
    records: "440 words",
    kind: DataKind::Words(WordTask {
        vocabulary: 440,
        complete: None,
        load: &|dir, reading| (effattn::data::words("sample-words")?.1.load)(dir, reading),
    }),
    origin: entry::Origin::BuiltIn,
    locate: |_| Ok(None),
};

/// Colour images under another name.
static SHAPES: images::ImageSource = images::ImageSource {
    name: "shapes",
    about: "the generated images",
    published: None,
    classes: Some(10),
    load: |dir, partial| (images::source("generated")?.load)(dir, partial),
};

/// Folders of images that models of these are tested on.
static DRAWN_SHAPES: TestOnlySet = TestOnlySet {
    name: "drawn-shapes",
    about: "the same things, drawn by hand",
    of: "shapes",
    folders: &["drawn-shapes"],
    parts: Parts::One,
    evaluated: (1.0, Interpolation::Bilinear),
    answer: || Answer::All,
    origin: TestSetOrigin::Placed("draw them"),
    form: Form::Trained,
};

/// A running text for masked models.
static TALES: running_text::TextSource = running_text::TextSource {
    name: "tales",
    load: |_, _| {
        let line = |number: usize| format!("the fox number {number} saw the hen number {}", number % 7);
        Ok(RunningText::of("tales", (0..200).map(line).collect()))
    },
};

const COMMANDS: [&str; 13] = [
    "plot",
    "vision",
    "mlm",
    "lra",
    "speed",
    "wordlm",
    "weigh",
    "--help",
    "list",
    "fetch",
    "report",
    "completions",
    "worker",
];

fn main() -> ExitCode {
    effattn::data::register(&parity::SET);
    effattn::data::register(&STORIES);
    images::register(&SHAPES);
    test_only::register(&DRAWN_SHAPES);
    running_text::register(&TALES);
    effattn::model::register(&bag::FAMILY);
    effattn::protocol::register(&weigh::Weigh);
    effattn::report::figures::register(&weights::FIGURE);
    if std::env::args().nth(1).is_some_and(|first| COMMANDS.contains(&first.as_str())) {
        return effattn::cli::main();
    }
    let tests: [(&str, fn()); 9] = [
        ("the_document_shows_this_very_data_set", the_document_shows_this_very_data_set),
        ("a_protocol_is_a_command_that_runs_and_reports", a_protocol_is_a_command_that_runs_and_reports),
        ("it_is_listed_named_and_generated", it_is_listed_named_and_generated),
        ("it_is_trained_on_and_reported", it_is_trained_on_and_reported),
        (
            "a_family_is_listed_measured_trained_and_reported",
            a_family_is_listed_measured_trained_and_reported,
        ),
        ("a_figure_is_drawn_of_the_rows_that_it_needs", a_figure_is_drawn_of_the_rows_that_it_needs),
        ("images_and_running_texts_are_trained_on", images_and_running_texts_are_trained_on),
        ("a_corpus_of_words_is_trained_on", a_corpus_of_words_is_trained_on),
        ("data_that_change_during_a_run_are_noticed", data_that_change_during_a_run_are_noticed),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// The tool in `folder`.
fn tool(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(line.split(' ')).current_dir(folder).env("EFFATTN_LOG", "error");
    command
}

/// What the tool prints and says; it must end with `code`.
fn run(folder: &Path, line: &str, code: i32) -> String {
    let output = tool(folder, line).output().expect("the tool");
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    text
}

/// The document has this very code.
fn shows(document: &str, code: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    assert!(
        read(document).contains(&format!("```rust\n{}```", read(code))),
        "{document} differs from {code}"
    );
}

fn the_document_shows_this_very_data_set() {
    shows("docs/adding-a-data-set.md", "tests/recipe/parity.rs");
}

fn a_protocol_is_a_command_that_runs_and_reports() {
    shows("docs/adding-a-protocol.md", "tests/recipe/weigh.rs");
    let folder = tempfile::tempdir().expect("a folder");
    assert!(run(folder.path(), "--help", 0).contains("weigh"));
    assert!(run(folder.path(), "weigh --help", 0).contains("position embeddings count as parameters"));
    let said = run(folder.path(), "weigh --model full,ls --len 64", 0);
    assert!(said.contains("112514") && said.contains("121410"), "{said}");
    let both = run(folder.path(), "weigh --model full --len 64 --copies 2", 0);
    assert!(both.contains("225028"), "{both}");
    let suite = "title = 'Two'\nprotocol = 'weigh'\nsource = 'here'\n[base]\nlen = 64\ncopies = 3\n[[row]]\nlabel = 'F'\nmodel = 'full'\n";
    std::fs::write(folder.path().join("three.toml"), suite).expect("a suite");
    assert!(run(folder.path(), "weigh --suite three.toml", 0).contains("337542"));
    let error = run(folder.path(), "weigh --copies 0", 2);
    assert!(error.contains("0 is out of range; allowed: 1 to 1000"), "{error}");
    let error = run(folder.path(), "lra --copies 2", 2);
    assert!(error.contains("lra does not take --copies; weigh does"), "{error}");
    let report = run(folder.path(), "report", 0);
    assert!(report.contains("Parameters of a model") && report.contains("121410"), "{report}");
    let error = run(folder.path(), "weigh --steps 3", 2);
    assert!(error.contains("weigh does not take --steps; lra, charlm, "), "{error}");
}

fn it_is_listed_named_and_generated() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = |line: &str| run(folder.path(), line, 0).split_whitespace().collect::<Vec<_>>().join(" ");
    let listed = || {
        let list: serde_json::Value =
            serde_json::from_str(&run(folder.path(), "list tasks --json --data-dir .", 0)).expect("JSON");
        let mut sets = list.as_array().expect("a list").iter();
        sets.find(|set| set["name"] == "odd-ones").cloned().expect("the set")
    };
    assert_eq!((&listed()["generated"], &listed()["path"]), (&true.into(), &serde_json::Value::Null));
    assert!(words("lra --help").contains("pathfinder128, odd-ones"));
    assert!(words("fetch --help").contains("odd-ones (generated)"));
    assert!(words("completions bash").contains("pathfinder128 odd-ones"));
    assert!(words("fetch odd-ones --data-dir .").contains("parity.txt: generated"));
    assert!(listed()["path"].as_str().is_some_and(|path| path.ends_with("parity.txt")), "{}", listed());
    let error = run(folder.path(), "lra --task odd-one --dry-run", 2);
    assert!(error.contains("did you mean odd-ones") && error.contains("pathfinder128"), "{error}");
    let error = run(folder.path(), "fetch odd-ones --from x --data-dir .", 2);
    assert!(error.contains("odd-ones is generated"), "{error}");
}

const TRAIN: &str = "lra --task odd-ones --model full --batch 8 --data-dir . --no-plot --threads 1";

fn it_is_trained_on_and_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = run(folder.path(), &format!("{TRAIN} --steps 8 --export-csv rows.csv"), 0);
    assert!(text.contains("odd-ones"), "{text}");
    let rows = std::fs::read_to_string(folder.path().join("rows.csv")).expect("rows");
    let mut lines = rows.lines();
    let columns: Vec<&str> = lines.next().expect("a header").split(',').collect();
    let accuracy: Vec<&str> =
        lines.find(|line| line.contains(",accuracy,")).expect("a row").split(',').collect();
    let cell = |name: &str| accuracy[columns.iter().position(|column| *column == name).expect(name)];
    assert_eq!((cell("task"), cell("outcome"), cell("len")), ("odd-ones", "ok", "12"));
    assert_eq!(
        (cell("fraction"), cell("published")),
        ("", ""),
        "no source trains on it: no share of a protocol"
    );
    assert!((0.0..=100.0).contains(&cell("value").parse::<f64>().expect("a number")));
    assert!(run(folder.path(), "report results", 0).contains("odd-ones"));
}

fn a_family_is_listed_measured_trained_and_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let tool = |line: &str, code: i32| run(folder.path(), line, code);
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(tool("list presets", 0).contains("a bag of bytes"));
    assert!(
        words(&tool("lra --help", 0)).contains("Model preset: ls-lra, lra-repo, lra-paper, bag (effattn")
    );
    assert!(!words(&tool("wordlm --help", 0)).contains("bag"), "it predicts no words");
    tool("speed --preset bag --model full --len 32 --mode infer --runs 2 --threads 1 --no-plot", 0);
    let short = "--batch 8 --steps 8 --no-plot --threads 1 --data-dir .";
    let trained = tool(&format!("lra --task odd-ones --preset bag --model full {short}"), 0);
    assert!(trained.contains("odd-ones"), "{trained}");
    let text = tool("report results", 0);
    assert!(text.contains("bag") && text.contains("odd-ones"), "{text}");
    let rows = std::fs::read_to_string(folder.path().join("results/lra/latest/rows.csv")).expect("rows");
    let accuracy = rows.lines().find(|line| line.contains(",accuracy,")).expect("a row");
    assert!(accuracy.contains(",bag,") && accuracy.contains(",ok,"), "{rows}");
    // 3 ids, two classes
    assert!(accuracy.contains(&format!(",{},", 3 * 16 + 34)), "{accuracy}");
    let error = tool("lra --task retrieval --preset bag --model full --dry-run", 2);
    assert!(
        error.contains("preset bag reads one sequence of tokens per sample, retrieval has two"),
        "{error}"
    );
}

fn a_figure_is_drawn_of_the_rows_that_it_needs() {
    shows("docs/adding-a-chart.md", "tests/recipe/weights.rs");
    let folder = tempfile::tempdir().expect("a folder");
    run(folder.path(), "weigh --model full,ls --len 64,128", 0);
    let said = run(folder.path(), "plot figures", 0);
    assert!(said.contains("weights.svg"), "{said}");
    let csv =
        std::fs::read_to_string(folder.path().join("plots/weights.csv")).expect("the data of the chart");
    assert!(csv.contains("full,64,112514") && csv.contains("ls,64,121410"), "{csv}");
}

fn images_and_running_texts_are_trained_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let tool = |line: &str, code: i32| run(folder.path(), line, code);
    let rows = |command: &str| {
        let path = folder.path().join(format!("results/{command}/latest/rows.csv"));
        std::fs::read_to_string(path).expect("rows")
    };
    let short = "--steps 2 --batch 4 --no-plot --threads 1";
    tool(&format!("mlm --task tales --model full --preset roberta-small --set layers=1 --len 16 {short}"), 0);
    assert!(rows("mlm").contains(",tales,") && rows("mlm").contains(",ok,"), "{}", rows("mlm"));
    tool(&format!("vision --task shapes --limit 8 {short}"), 0);
    assert!(rows("vision").contains(",shapes,") && rows("vision").contains(",ok,"), "{}", rows("vision"));
    let help = tool("vision --help", 0).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("generated, shapes") && help.contains("folder-c, drawn-shapes"), "{help}");
    let error = tool("vision --task cifar10 --also drawn-shapes --dry-run", 2);
    assert!(error.contains("drawn-shapes has the classes of shapes, not of cifar10"), "{error}");
}

fn a_corpus_of_words_is_trained_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let line =
        "wordlm --task stories --model full --steps 2 --set layers=1 --allow-partial --no-plot --threads 1";
    run(folder.path(), line, 0);
    let rows = std::fs::read_to_string(folder.path().join("results/wordlm/latest/rows.csv")).expect("rows");
    assert!(rows.contains(",stories,") && rows.contains("a corpus that no source trains on"), "{rows}");
    assert!(rows.lines().skip(1).all(|row| row.contains(",ok,")), "{rows}");
}

/// The worker that starts after the plan was made reads another file than the plan did.
fn data_that_change_during_a_run_are_noticed() {
    let folder = tempfile::tempdir().expect("a folder");
    run(folder.path(), "fetch odd-ones --data-dir .", 0);
    let file = folder.path().join("parity.txt");
    let before = std::fs::read_to_string(&file).expect("rows of digits");
    let mut first = tool(folder.path(), &format!("{TRAIN} --steps 3000 --seeds 0..1"));
    let mut running = first.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool");
    // the folder of the first cell has files: its worker has read the data
    let below = |folder: &Path| -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let trains = || {
        let runs = below(&folder.path().join("results/lra"));
        let cells = runs.iter().flat_map(|run| below(&run.join("cells")));
        cells.into_iter().any(|cell| !below(&cell).is_empty())
    };
    let started = std::time::Instant::now();
    while !trains() && started.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let flipped = before.replacen(" 0\n", " 1\n", 1); // one label
    std::fs::write(&file, flipped).expect("another file");
    running.wait().expect("the end");
    let rows = std::fs::read_to_string(folder.path().join("results/lra/latest/rows.csv")).expect("rows");
    let second = rows.lines().filter(|line| line.contains(",failed,")).collect::<Vec<_>>();
    assert_eq!(second.len(), 1, "{rows}");
    assert!(second[0].contains("changed since the plan was made"), "{rows}");
}
