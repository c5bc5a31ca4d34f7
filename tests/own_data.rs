//! Files of a person's own: every command of docs/own-data.md works, and what is wrong with a file is said with its line.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use effattn::record::{Row, csv};

fn effattn(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_effattn"));
    command
        .args(words)
        .current_dir(folder)
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env_remove("EFFATTN_LOG");
    command.output().unwrap()
}

fn run(folder: &Path, line: &str) -> Output {
    effattn(folder, &line.split_whitespace().collect::<Vec<_>>())
}

fn works(folder: &Path, line: &str) -> String {
    let output = run(folder, line);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line}: {told}");
    told
}

/// What is said of a wrong command, which ends with exit code 2.
fn refused(folder: &Path, line: &str) -> String {
    let output = run(folder, line);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{line}: {told}");
    told
}

/// The matrices of `plots/attention.csv` by name: query, key and weight.
fn drawn(folder: &Path) -> BTreeMap<String, Vec<(usize, usize, f64)>> {
    let mut all: BTreeMap<String, Vec<(usize, usize, f64)>> = BTreeMap::new();
    let mut reader = ::csv::Reader::from_path(folder.join("plots/attention.csv")).unwrap();
    for row in reader.records() {
        let row = row.unwrap();
        let place = (row[1].parse().unwrap(), row[3].parse().unwrap(), row[4].parse().unwrap());
        all.entry(row[0].to_owned()).or_default().push(place);
    }
    all
}

#[test]
fn a_trained_language_model_is_drawn_for_a_text_and_an_example() {
    let folder = files();
    let folder = folder.path();
    let small = "--steps 4 --len 16 --batch 2 --set layers=2 --set heads=2 --set width=16 --set ffn=16";
    let machine = "--no-plot --threads 1";
    works(folder, &format!("charlm --quick --data book.txt --model full --limit 300 {small} {machine}"));
    let told = refused(folder, "plot attention --weights latest --text the-fox");
    assert!(told.contains("--text has \"-\", which the model has never seen"), "{told}");
    for (input, positions) in [("--text thefox.", 7), ("--example 2", 16), ("--example 2 --len 9", 9)] {
        works(folder, &format!("plot attention --weights latest {input}"));
        let matrices = drawn(folder);
        assert_eq!(matrices.len(), 4, "layers and heads");
        for (name, cells) in matrices {
            assert_eq!(cells.iter().map(|cell| cell.0 + 1).max(), Some(positions), "{name}");
            for query in 0..positions {
                let row: Vec<_> = cells.iter().filter(|cell| cell.0 == query).collect();
                let sum: f64 = row.iter().map(|cell| cell.2).sum();
                assert!((sum - 1.0).abs() < 1e-4, "{name} {query}: {sum}");
                assert!(row.iter().all(|cell| cell.1 <= query || cell.2 == 0.0), "{name} {query}");
            }
        }
    }
    let told = refused(folder, "plot attention --weights latest --example 99999");
    assert!(told.contains("segments of 16 symbols in the test part of book.txt, from 0"), "{told}");
    works(folder, &format!("charlm --quick --data book.txt --limit 300 {small} {machine}"));
    let told = refused(folder, "plot attention --weights latest");
    assert!(
        told.contains("set dual_ln=false") && told.contains("effattn charlm --quick --model full"),
        "{told}"
    );
    works(folder, "plot norms --weights latest");
    // what is no trained model
    works(folder, &format!("speed --model full --preset ls-lra --len 64 --max-time 10ms {machine}"));
    let told = refused(folder, "plot attention --weights results/speed/latest");
    assert!(
        told.contains("is a run of effattn speed, which trains nothing; name a run of lra, charlm"),
        "{told}"
    );
    fs::remove_dir_all(folder.join("results/charlm/latest/cells")).unwrap();
    let told = refused(folder, "plot attention --weights results/charlm/latest");
    assert!(told.contains("has no cell with a checkpoint; train a model with effattn charlm"), "{told}");
}

#[test]
fn what_cannot_be_drawn_of_a_trained_model_says_what_can() {
    let folder = files();
    let folder = folder.path();
    let small = "--steps 2 --no-plot --threads 1";
    let sizes = "--len 16 --batch 4 --set layers=2 --set width=16 --set ffn=16";
    let train = format!("lra --data train.csv,val.csv,test.csv --model ls:dual_ln=false {sizes} {small}");
    let plot = "plot attention --weights latest";
    works(folder, &train);
    assert!(refused(folder, plot).contains("train it with --set pooling=mean"), "{}", refused(folder, plot));
    works(folder, "plot norms --weights latest --example 1");
    works(folder, &format!("{train} --set pooling=mean"));
    works(folder, plot);
    for flag in ["causal", "head 0", "seed 1", "model ls", "suite cos-figure3"] {
        let told = refused(folder, &format!("{plot} --{flag}"));
        assert!(told.contains("is of mechanisms without a model"), "{told}");
    }
    works(folder, &format!("recall --quick --model full --limit 8 {small}"));
    let recall = "plot attention --weights results/recall/latest --example";
    works(folder, &format!("{recall} 7"));
    let told = refused(folder, &format!("{recall} 8"));
    assert!(told.contains("there are 8 tested sequences of mqar 32:4"), "{told}");
    let told = refused(folder, "plot norms --weights results/recall/latest");
    assert!(told.contains("--weights results/recall/latest: full has no window beside slots"), "{told}");
    works(folder, &format!("charlm --quick --data book.txt --limit 300 {sizes} {small}"));
    let told = refused(folder, "plot norms --weights results/charlm/latest --example 1");
    assert!(told.contains("--example is not read by models of charlm"), "{told}");
}

/// Rows of a table whose label is the word in its text.
fn table(rows: std::ops::Range<usize>, separator: char) -> String {
    let row = |at: usize| {
        let word = ["good", "bad"][at % 2];
        format!("{word} number {at}{separator}{word}\n")
    };
    format!("text{separator}label\n{}", rows.map(row).collect::<String>())
}

fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("train.csv", &table(0..200, ','));
    write("val.csv", &table(200..240, ','));
    write("test.csv", &table(240..280, ','));
    write("new.csv", &table(280..301, ','));
    let line = |at: usize| format!("The {} fox saw the {} hen .\n", at % 7, at % 11);
    write("book.txt", &(0..600).map(line).collect::<String>());
    fs::create_dir(folder.path().join("my-texts")).unwrap();
    write("my-texts/a.txt", &(0..60).map(line).collect::<String>());
    folder
}

fn rows(folder: &Path, command: &str) -> Vec<Row> {
    let text = fs::read_to_string(folder.join("results").join(command).join("latest/rows.csv")).unwrap();
    csv::from_str(&text).unwrap()
}

/// The encoder of the one cell of the last run of `mlm`.
fn encoder(folder: &Path) -> PathBuf {
    let cells = folder.join("results/mlm/latest/cells");
    fs::read_dir(cells).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn the_commands_of_the_page_work() {
    let folder = files();
    let folder = folder.path();
    works(folder, "mlm --quick --steps 2 --set layers=1 --set width=32 --set ffn=32 --no-plot --model full");
    fs::rename(encoder(folder), folder.join("roberta-base")).unwrap();
    fs::remove_dir_all(folder.join("results")).unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/own-data.md");
    let page = fs::read_to_string(page).unwrap();
    let mut fenced = false;
    let mut commands = Vec::new();
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        commands.extend(line.strip_prefix("effattn ").filter(|_| fenced));
    }
    assert!(commands.len() > 5, "{commands:?}");
    for line in commands {
        // as written, but short
        let short = line.replace("--steps 200", "--steps 8").replace("--steps 400", "--steps 4");
        let trains = line.contains("--quick") && !line.contains("--steps");
        let short = short + if trains { " --steps 4" } else { "" };
        let plots = match line {
            line if line.contains("--generate") => " --symbols 5",
            line if line.starts_with("plot") => "",
            _ => " --no-plot",
        };
        works(folder, &format!("{short}{plots}"));
    }
    let drawn = fs::read_to_string(folder.join("plots/attention.csv")).unwrap();
    assert!(drawn.contains("\"layer 1, head 2\",3,key,2,"), "{drawn}");
    assert!(folder.join("plots/norms.svg").is_file());
    let differs = |command: &str| rows(folder, command)[0].differs.clone().unwrap();
    assert!(differs("finetune").contains("own files: 200 / 40 / 40 texts, 2 classes, content "));
    assert!(differs("charlm").contains(" bytes, content ") && differs("wordlm").contains(" words, content "));
}

#[test]
fn a_classifier_learns_a_persons_own_texts_and_is_tested_on_others() {
    let folder = files();
    let folder = folder.path();
    let quick =
        "--model full --steps 60 --len 16 --batch 16 --set width=32 --set ffn=32 --no-plot --threads 1";
    works(folder, &format!("lra --data train.csv,val.csv,test.csv --tokenizer words {quick}"));
    let trained = rows(folder, "lra");
    let accuracy = |rows: &[Row]| rows.iter().find(|row| row.metric == "accuracy").unwrap().clone();
    let row = accuracy(&trained);
    assert_eq!(row.task.as_deref(), Some("train.csv+val.csv+test.csv:tokenizer=words"));
    assert!(row.value.unwrap() > 90.0, "{row:?}");
    let count = |rows: &[Row]| rows.iter().find(|row| row.metric == "tested").unwrap().value;
    assert_eq!(count(&trained), Some(40.0), "two full batches of 16 and the rest");
    let manifest = fs::read_to_string(folder.join("results/lra/latest/manifest.json")).unwrap();
    let content = row.differs.unwrap().split("content ").last().unwrap().to_owned();
    assert!(manifest.contains(&content), "{content}");
    let run = fs::canonicalize(folder.join("results/lra/latest")).unwrap();
    let run = run.file_name().unwrap().to_str().unwrap().to_owned();
    works(folder, "plot attention --weights latest --example 3 --len 8");
    let drawn = fs::read_to_string(folder.join("plots/attention.csv")).unwrap();
    assert!(drawn.contains("\"layer 2, head 2\",2,key,2,"), "{drawn}");
    // the run's own texts are not needed
    ["train.csv", "val.csv", "test.csv"].iter().for_each(|name| fs::remove_file(folder.join(name)).unwrap());
    let told = works(folder, "lra --eval latest --data new.csv --no-plot --threads 1");
    assert!(told.contains(&format!("weights of run {run} on 21 rows")), "{told}");
    let tested = accuracy(&rows(folder, "lra"));
    assert_eq!((tested.task.as_deref(), tested.model.as_str()), (Some("new.csv"), "full"));
    assert!(tested.value.unwrap() > 90.0, "{tested:?}");
    let differs = tested.differs.unwrap();
    assert!(differs.contains(&format!("not trained: weights of run {run}, content ")), "{differs}");
    assert!(differs.contains("own file: 21 rows, content "), "{differs}");
    assert_eq!(count(&rows(folder, "lra")), Some(21.0));
    // the one wrong label is behind the full batch, and counts as one of 17
    fs::write(folder.join("odd.csv"), table(280..296, ',') + "good number 300,bad\n").unwrap();
    works(folder, "lra --eval latest --data odd.csv --no-plot --threads 1");
    let odd = accuracy(&rows(folder, "lra")).value.unwrap();
    assert!((80.0..95.0).contains(&odd), "{odd}");
    // the run without weights that was made just now is passed over
    works(folder, "lra --eval latest --data new.csv --limit 5 --no-plot --threads 1");
    fs::write(folder.join("other.csv"), "text,label\nx,good\ny,fine\n").unwrap();
    let eval = |rest: &str| refused(folder, &format!("lra --eval {run} {rest} --no-plot"));
    assert!(eval("--data other.csv").contains("other.csv:3: the label \"fine\" is none of those in"));
    let output = effattn(folder, &["plot", "attention", "--weights", &run, "--text", "good number 7"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(eval("").contains("needs the texts to test on"));
    assert!(eval("--data new.csv --model ls").contains("leave --model out"));
    assert!(eval("--data new.csv,other.csv").contains("one file"));
    assert!(
        refused(folder, "lra --eval nowhere --data new.csv").contains("is no folder of a run that trained")
    );
}

#[test]
fn what_is_wrong_with_a_file_is_said_with_its_line() {
    let folder = files();
    let folder = folder.path();
    let says = |text: &[u8], name: &str| {
        fs::write(folder.join(name), text).unwrap();
        let lra = refused(folder, &format!("lra --data {name},val.csv,test.csv --no-plot"));
        let finetune = refused(folder, &format!("finetune --data {name},val.csv,test.csv --no-plot"));
        assert_eq!(lra, finetune);
        lra
    };
    for (name, text, expected) in [
        ("a.csv", &b"text,class\nx,1\n"[..], "a.csv:1: has no column \"label\""),
        ("a.csv", b"text,label\nx,1\n,2\n", "a.csv:3: the text is empty"),
        ("a.csv", b"text,label\nx,1\ny\xff,2\n", "a.csv:3: is not UTF-8"),
        ("a.csv", b"text,label\nx,1\ny,1\n", "a.csv: every label is \"1\""),
        ("a.jsonl", b"{\"text\": \"x\", \"label\": 1}\n{\"text\":\n", "a.jsonl:2: is not JSON"),
        ("a.csv", b"text,label\nx,1\ny,2\n", "val.csv:2: the label \"good\" is none of those in a.csv: 1, 2"),
    ] {
        let told = says(text, name);
        assert!(told.contains(expected), "{told}");
        assert!(told.lines().count() <= 2, "{told}");
    }
    assert!(
        !folder.join("results").exists() && !folder.join("plots").exists(),
        "a refused command leaves nothing"
    );
    assert!(refused(folder, "charlm --data none.txt").contains("none.txt: cannot be opened"));
    assert!(refused(folder, "lra --data listops").contains("--data listops names no file"));
    assert!(refused(folder, "lra --data a.csv --task text").contains("takes the place of --task text"));
    assert!(
        refused(folder, "lra --suite ls-table1 --data a.csv").contains("suite ls-table1 has data of its own")
    );
    assert!(refused(folder, "lra --task listops --tokenizer words").contains("says how --data is read"));
}
