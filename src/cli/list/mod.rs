//! `effattn list`: what there is.

mod costs;
mod cuda;
mod mechanisms;
pub(super) mod programs;
mod suites;
mod tasks;

use anyhow::Result;
use serde_json::{Value, json};

use effattn_kernel::device::Backend;
use effattn_kernel::device::machine::Machine;
use effattn_model::family::{self, PresetInfo};
use effattn_record::config::settings::DeviceName;
use effattn_record::config::units::Bytes;
use effattn_record::report::table::Table;
use effattn_record::text::plural;

/// What to list.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum ListCommand {
    /// Attention mechanisms: forms, knobs, parameters, FLOPs, decoder state
    Mechanisms(mechanisms::Mechanisms),
    /// Tasks and corpora: which data are present, and how to get the rest
    Tasks(tasks::Tasks),
    /// Suites: the papers' tables and figures
    Suites(suites::Suites),
    /// Devices: what this build supports and this machine has
    Devices(Format),
    /// Presets: named backbones
    Presets(Format),
    /// Programs: other code that is checked and timed beside effattn, and what it needs
    Programs(Format),
}

/// How to print.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Format {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The text that `list` prints in a terminal of `width` columns.
pub fn run(what: &ListCommand, width: usize) -> Result<String> {
    match what {
        ListCommand::Mechanisms(args) => mechanisms::run(args, width),
        ListCommand::Tasks(args) => args.format.print(args.list(), width),
        ListCommand::Suites(args) => args.format.print(args.list()?, width),
        ListCommand::Devices(format) => format.print(devices(), width),
        ListCommand::Presets(format) => format.print(presets(), width),
        ListCommand::Programs(format) => programs::run(*format, width),
    }
}

/// The same list for people and for programs.
pub(super) struct List {
    table: Table,
    pub(super) json: Vec<Value>,
}

impl Format {
    fn print(self, list: List, width: usize) -> Result<String> {
        if self.json {
            return Ok(serde_json::to_string_pretty(&list.json)? + "\n");
        }
        Ok(list.table.terminal(width))
    }
}

/// How many accelerators of a kind are asked for at most.
const MOST_DEVICES: usize = 16;

/// The data sets with what is in `dir`, by default the user's folder.
pub(super) fn data_sets(dir: Option<std::path::PathBuf>) -> Vec<Value> {
    tasks::Tasks { data_dir: dir, format: Format { json: true } }.list().json
}

/// The devices that this build knows.
pub(super) fn devices() -> List {
    let mut list = List { table: Table::default(), json: Vec::new() };
    list.table.columns = ["device", "usable", "what"].map(str::to_owned).to_vec();
    let machine = Machine::this();
    let mut add = |name: DeviceName, usable: bool, what: String| {
        let word = if usable { "yes" } else { "no" };
        list.table.rows.push(vec![name.to_string(), word.to_owned(), what.clone()]);
        list.json.push(json!({ "name": name.to_string(), "usable": usable, "what": what }));
    };
    let memory = Bytes(machine.memory_bytes);
    let cpu =
        format!("{}, {}, {memory}, {}", machine.cpu, plural(machine.cores as u64, "core"), machine.simd);
    add(DeviceName::Cpu, true, cpu);
    for index in 0..MOST_DEVICES {
        match Backend::open(DeviceName::Cuda(index)) {
            Ok(backend) => {
                add(
                    DeviceName::Cuda(index),
                    true,
                    backend.accelerator().unwrap_or_else(|| "CUDA".to_owned()),
                );
            }
            Err(error) if index == 0 => {
                add(DeviceName::Cuda(index), false, error.to_string());
                break;
            }
            Err(_) => break,
        }
    }
    match Backend::open(DeviceName::Metal) {
        Ok(_) => add(DeviceName::Metal, true, "Metal".to_owned()),
        Err(error) => add(DeviceName::Metal, false, error.to_string()),
    }
    list.table.title = "Devices, for --device".to_owned();
    list
}

fn presets() -> List {
    let mut list = List { table: Table::default(), json: Vec::new() };
    list.table.columns = ["preset", "backbone", "source", "tasks"].map(str::to_owned).to_vec();
    for preset in family::presets(&family::families()) {
        let PresetInfo { name, title, description, source, tasks, .. } = preset;
        list.table.rows.push([name, title, source, &tasks.join(" ")].map(str::to_owned).to_vec());
        list.json.push(json!({
            "name": name,
            "title": title,
            "description": description,
            "source": source,
            "tasks": tasks,
        }));
    }
    list.table.title = format!("{} presets", list.json.len());
    list
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(subcommand)]
        what: ListCommand,
    }

    fn list(line: &str) -> std::result::Result<String, String> {
        let cli = Cli::try_parse_from(std::iter::once("list").chain(line.split_whitespace()));
        run(&cli.map_err(|error| error.to_string())?.what, 80).map_err(|error| format!("{error:#}"))
    }

    fn parsed(line: &str) -> Vec<Value> {
        serde_json::from_str(&list(line).unwrap()).unwrap()
    }

    #[test]
    fn table_1_flops_are_there_to_the_last_digit() {
        let at_2048 = parsed("mechanisms --json --preset ls-lra --len 2048");
        let ls = at_2048.iter().find(|entry| entry["name"] == "ls").unwrap();
        assert_eq!((&ls["task"], &ls["flops"]), (&json!("listops"), &json!(198_789_696)));
        let of = parsed("mechanisms --json --preset ls-lra --model ls:w=16,r=2 --task listops");
        assert_eq!(of[0]["flops"], 159_953_984);
        let own = parsed("mechanisms --json --preset ls-lra --model ls");
        let flops: Vec<(&Value, &Value)> = own[0]["tasks"].as_array().unwrap()[..3]
            .iter()
            .map(|task| (&task["task"], &task["flops"]))
            .collect();
        assert_eq!(
            flops,
            [
                (&json!("listops"), &json!(198_789_696)),
                (&json!("text"), &json!(397_493_824)),
                (&json!("retrieval"), &json!(795_003_776)),
            ]
        );
    }

    #[test]
    fn every_mechanism_has_costs_or_a_reason() {
        for entry in parsed("mechanisms --json") {
            assert_eq!(entry["flops"].is_number(), entry["problem"].is_null(), "{}", entry["name"]);
            assert_eq!(entry["parameters"].is_number(), entry["problem"].is_null(), "{}", entry["name"]);
            assert!(entry["equations"].as_str().unwrap().len() > 10, "{}", entry["name"]);
        }
        let table = list("mechanisms").unwrap();
        for entry in effattn_model::attention::TABLE {
            assert!(table.contains(&format!("\n {} ", entry.name)), "{} is missing:\n{table}", entry.name);
        }
    }

    #[test]
    fn an_explanation_names_every_knob() {
        for entry in effattn_model::attention::TABLE {
            let text = list(&format!("mechanisms --model {}", entry.name)).unwrap();
            assert!(text.contains(entry.paper.locator), "{text}");
            for knob in entry.knobs {
                assert!(text.contains(&format!("  {}=", knob.name)), "{} of {text}", knob.name);
            }
        }
        assert!(list("mechanisms --model ls:w=16").unwrap().contains("  w=16: "));
    }

    #[test]
    fn language_models_are_counted() {
        let of = |line: &str| parsed(&format!("mechanisms --json {line}"))[0]["parameters"].clone();
        assert_eq!(of("--preset charlm-small --model ls"), 44_294_448);
        assert_eq!(of("--preset charlm-small --model ls --task text8"), 44_204_160);
        assert_eq!(of("--preset charlm-large --model ls"), 110_576_064);
        assert_eq!(of("--preset charlm-small --model transformer-xl"), 41_068_752);
        let nystrom = parsed("mechanisms --json --preset charlm-small --model nystrom");
        assert!(nystrom[0]["problem"].as_str().unwrap().contains("no causal form"));
    }

    #[test]
    fn suites_and_presets_are_listed() {
        let suites = parsed("suites --json --results src");
        let table5 = suites.iter().find(|suite| suite["name"] == "cos-table5").unwrap();
        assert_eq!((&table5["cells"], &table5["done"]), (&json!(96), &json!(0)));
        assert!(suites.iter().all(|suite| suite["cells"].as_u64() >= Some(2)), "{suites:?}");
        assert_eq!(parsed("presets --json").len(), family::presets(&family::families()).len());
        let devices = parsed("devices --json");
        assert_eq!((&devices[0]["name"], &devices[0]["usable"]), (&json!("cpu"), &json!(true)));
        assert!(devices.iter().any(|device| device["name"] == "metal"));
        assert!(
            list("suites").unwrap().contains("cos-table5") && list("presets").unwrap().contains("ls-lra")
        );
    }

    #[test]
    fn mistakes_name_what_is_allowed() {
        for (line, says) in [
            ("mechanisms --model cosfomer", "did you mean cosformer?"),
            ("mechanisms --preset ls-lar", "did you mean ls-lra?"),
            ("mechanisms --preset ls-lra --task listop", "did you mean listops?"),
            ("mechanisms --len 0", "out of range"),
            ("mechanisms --len 1024,2048", "one length is counted at a time"),
            ("nothing", "unrecognized subcommand"),
        ] {
            let error = list(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
