//! Plans: the cells of every kind of command and of every suite, without running any.

use std::fs;

use super::kept::{rows, same};
use super::{data, effattn, keys, root, said, stderr};

/// Sets of commands: the protocol, and lines that differ in what their cells are.
const PLANS: &[(&str, &[&str])] = &[
    (
        "speed",
        &[
            "speed --len 1024",
            "speed --quick --model full,ls",
            "speed --preset ls-lra --model full,ls:w=4,r=2,reformer:n_hashes=1 --len 64..128 --batch 1,2",
            "speed --model ls --len 64 --dtype bf16 --seeds 0..1 --set layers=1 --warmup 1 --runs 5 --min-runs 2 --max-time 1s",
            "speed --model linear --len 64 --kernel composed --mode train --profile --timeout 5s",
            "speed --suite rows.toml",
            "speed --mode decode --len 64,128 --model full,cosformer,rfa:gate=true",
            "speed --mode decode --preset charlm-large --len 64 --model linear --batch 2",
            "speed --kernel-only --model full,ls,cosformer --len 64 --batch 1,2",
            "speed --kernel-only --model linear --len 64 --mode infer --set heads=8 --set width=512 --dtype bf16",
            "speed --preset cvt-13 --model full --batch 2 --mode infer",
            "speed --preset wikitext103 --model cosformer,full --len 64",
        ],
    ),
    (
        "memory",
        &[
            "memory --model full",
            "memory --preset ls-lra --model full,transformer-xl,ls:w=4 --len 64,128 --batch 1,4",
            "memory --preset ls-lra --model linear,ls --fit 24MiB --mode train",
            "memory --model full --kernel composed --dtype f32 --mode infer --set layers=2 --len 64 --fit 64MiB --batch 1,2",
        ],
    ),
    (
        "lra",
        &[
            "lra --quick",
            "lra --task listops --model 'ls:w=4,r=2,full,synthesizer:mode=dense' --seeds 0..1",
            "lra --task listops --preset lra-paper --model linear --len 16 --batch 4 --steps 7 --rate 1e-3 --limit 10",
            "lra --task listops --keep-close --model local:compat=lra --dtype bf16",
            "lra --task listops,text --allow-partial --strict --model cosformer --preset lra-repo --kernel composed",
            "lra --task text --allow-partial --model full --set layers=1 --set pooling=mean --set dropout=0.1",
            "lra --floor --task listops,text --allow-partial",
            "lra --floor --task listops --keep-close --limit 10",
        ],
    ),
    (
        "charlm",
        &[
            "charlm --quick",
            "charlm --task sample --model ls,transformer-xl",
            "charlm --task sample --model ls:w=8,full --len 32,64 --phases 2 --seeds 1..2 --overlap --every 3 --accumulate 2 \
             --rate 1e-3 --limit 50 --preset charlm-large",
            "charlm --task sample --model ls:compat=code --phases 1 --steps 5 --batch 2 --set layers=2 --dtype bf16",
        ],
    ),
    (
        "wordlm",
        &[
            "wordlm --quick",
            "wordlm --task sample-words --model full,rfa:gate=true --preset wikitext103 --seeds 1..2",
            "wordlm --task sample-words --model linear --steps 9 --rate 0.5 --len 32 --batch 4 --limit 100 --every 3 --accumulate 2 \
             --set dropout=0.2",
        ],
    ),
    (
        "recall",
        &[
            "recall --quick",
            "recall --task parity,modular-arithmetic --model deltanet:neg_eigval=true,full --seeds 1..2",
            "recall --preset recall-based --model based --rates 1e-3,3e-3 --steps 9 --every 3 --limit 10 --noise 0.5 --vocabulary 1024",
            "recall --layers shortconv,window,mixer --model ls:w=4 --segments 32:4,64:8 --test-segments 128:8 --batch 8 --dtype bf16",
            "recall --layers 4 --set width=32 --set dropout=0.1 --model linear --kernel composed --timeout 1m",
            "recall --floor --task mqar,selective-copying --limit 10",
        ],
    ),
    (
        "mlm",
        &[
            "mlm --quick",
            "mlm --task sample --model full,cosformer --seeds 1..2",
            "mlm --task sample --model linear --steps 9 --rate 1e-4 --len 32 --batch 4 --limit 10 --every 3 --accumulate 2",
            "mlm --task words.txt --model full",
        ],
    ),
    (
        "finetune",
        &[
            "finetune --quick",
            "finetune --task sentences --model full,cosformer --preset roberta-base --seeds 1..2",
            "finetune --task sentences --model 'ls:w=4,r=2' --preset roberta-large --len 64 --batch 8 --steps 9 --rate 1e-4 --limit 20 \
             --every 3 --accumulate 2 --strict",
            "finetune --task imdb --allow-partial --model full --strict",
        ],
    ),
    (
        "vision",
        &[
            "vision --quick",
            "vision --task generated --model full,ls --preset cvt-small --seeds 1..2",
            "vision --task generated --preset vil-ls-small --batch 8 --steps 9 --rate 1e-4 --limit 20 --every 3 --accumulate 2",
            "vision --task generated --preset cvt-small --model full --similarity 4 --dtype bf16",
        ],
    ),
    (
        "robustness",
        &[
            "robustness --task text --allow-partial --model ls,linformer",
            "robustness --task text --allow-partial --model 'ls:w=4,r=2' --len 32 --steps 24 --batch 8 --insertions 0,10 \
             --perturbation-seeds 2 --characters abc --seeds 1..2 --strict --rate 1e-3 --limit 10",
        ],
    ),
];

/// A suite of a user, whose rows differ in what they set.
const SUITE: &str = "title = \"Rows\"\nprotocol = \"speed\"\nsource = \"a test\"\n[base]\npreset = \"ls-lra\"\nlen = [32, 64]\n\
    mode = \"infer\"\nmax_time = \"30ms\"\n[[row]]\nlabel = \"one\"\nmodel = \"full\"\nset = { layers = 1 }\n\
    [[row]]\nlabel = \"composed\"\nmodel = \"full\"\nset = { kernel = \"composed\" }\n\
    [[row]]\nlabel = \"knobs\"\nmodel = \"ls:w=4,r=2\"\nset = { batch = [1, 2] }\n";

/// Memory with which no step is tried for a price: every worker ends at once. `memory` tries none.
const UNTRIED: &str = "--memory-limit 3MiB";

/// The rows of a dry run of `line`.
fn planned(folder: &std::path::Path, line: &str) -> String {
    let limit = if line.starts_with("memory") { "" } else { UNTRIED };
    let line = format!("{line} {limit} --dry-run --threads 1 --quiet --export-csv rows.csv");
    let output = effattn(folder, &line).output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    rows(&fs::read_to_string(folder.join("rows.csv")).unwrap()).0
}

/// The keys and rows of every line of PLANS for `protocol`. The last of a thousand shards has no cell, and the plan of all
/// beside it.
fn hold(protocol: &str) {
    let lines = PLANS.iter().find(|(name, _)| *name == protocol).unwrap().1;
    let folder = data();
    fs::write(folder.path().join("rows.toml"), SUITE).unwrap();
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        let output = format!("results/{index}");
        let shard = "--shard 1000/1000 --no-plot --threads 1 --data-dir . --quiet";
        said(folder.path(), &format!("{line} {shard} -o {output}"));
        let runs = fs::read_dir(folder.path().join(&output)).unwrap().next().unwrap().unwrap().path();
        let plan = fs::read_dir(runs).unwrap().next().unwrap().unwrap().path();
        text += &format!(
            "# effattn {line}\n{}{}",
            keys(&plan),
            planned(folder.path(), &format!("{line} --data-dir ."))
        );
    }
    same(&format!("plans/{protocol}.txt"), &text);
}

/// The rows of every shipped suite of the `protocols`.
fn hold_suites(protocols: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut names: Vec<String> = fs::read_dir(root().join("suites"))
        .unwrap()
        .map(|file| file.unwrap().file_name().to_string_lossy().trim_end_matches(".toml").to_owned())
        .collect();
    names.sort();
    for protocol in protocols {
        let mut text = String::new();
        for name in &names {
            let suite = fs::read_to_string(root().join("suites").join(format!("{name}.toml"))).unwrap();
            if suite.contains(&format!("\nprotocol = \"{protocol}\"\n")) {
                let line = format!("{protocol} --suite {name}");
                text += &format!("# effattn {line}\n{}", planned(folder.path(), &line));
            }
        }
        assert!(!text.is_empty(), "no suite of {protocol}");
        same(&format!("suites/{protocol}.txt"), &text);
    }
}

#[test]
fn cells_of_measurements_are_the_same() {
    hold("speed");
    hold("memory");
}

#[test]
fn cells_of_classifiers_are_the_same() {
    ["lra", "robustness", "vision", "finetune"].into_iter().for_each(hold);
}

#[test]
fn cells_of_language_models_are_the_same() {
    ["charlm", "wordlm", "mlm", "recall"].into_iter().for_each(hold);
}

#[test]
fn rows_of_the_papers_speed_tables_are_the_same() {
    hold_suites(&["speed", "robustness", "vision"]);
}

#[test]
fn rows_of_the_papers_long_range_tables_are_the_same() {
    hold_suites(&["lra"]);
}

#[test]
fn rows_of_the_papers_language_tables_are_the_same() {
    hold_suites(&["charlm", "wordlm", "mlm", "finetune", "recall"]);
}

#[test]
fn every_protocol_has_its_plans_held() {
    let help = effattn(root(), "--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let plans = |name: &&str| {
        let help = effattn(root(), &format!("{name} --help")).output().unwrap();
        String::from_utf8(help.stdout).unwrap().contains("--shard ")
    };
    let commands = help.lines().filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next());
    let mut protocols: Vec<&str> = commands
        .filter(|word| word.chars().all(|letter| letter.is_ascii_lowercase()))
        .filter(plans)
        .collect();
    let mut held: Vec<&str> = PLANS.iter().map(|(name, _)| *name).collect();
    protocols.sort_unstable();
    held.sort_unstable();
    assert_eq!(protocols, held);
}
