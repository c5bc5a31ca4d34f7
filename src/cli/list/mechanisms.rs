//! `list mechanisms`: the zoo, as a table, as JSON, or one mechanism explained.

use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::costs::{Costs, costs};
use super::cuda;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_model::attention::{Growth, MechanismEntry, Property};
use effattn_model::family::{self, PresetInfo};
use effattn_record::config::lists::Models;
use effattn_record::config::unknown;
use effattn_record::report::table::Table;
use effattn_record::report::wrap::wrap;

/// What `list mechanisms` is asked.
#[derive(Clone, Debug, clap::Args)]
pub struct Mechanisms {
    /// Explain these mechanisms: equations, knobs, sources, deviations
    #[arg(long, value_name = "NAME,...")]
    model: Option<Models>,
    /// Backbone that parameters and FLOPs are counted for
    #[arg(long, default_value = "lra-repo", value_name = "NAME")]
    preset: String,
    /// Task whose model is counted [default: the byte-level text classifier that speed measures, or the
    /// preset's only task of that length]
    #[arg(long, value_name = "NAME")]
    task: Option<String>,
    /// Sequence length [default: 4096, or the longest of --task]
    #[arg(long, value_name = "N", value_parser = length)]
    len: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn length(text: &str) -> Result<usize, String> {
    let lengths: effattn_record::config::lists::Lengths = text.parse().map_err(|error| format!("{error}"))?;
    match lengths.0[..] {
        [len] => Ok(len as usize),
        _ => Err("one length is counted at a time, such as 4096 or 4k".to_owned()),
    }
}

/// Which models are counted.
struct Scene {
    preset: PresetInfo,
    task: Option<&'static str>,
    /// As given.
    len: Option<usize>,
}

impl Scene {
    fn of(args: &Mechanisms) -> Result<Self> {
        let families = family::families();
        let mut presets = family::presets(&families);
        let names = presets.iter().map(|preset| preset.name);
        let at = presets.iter().position(|preset| preset.name == args.preset);
        let preset = presets.swap_remove(at.with_context(|| unknown("preset", &args.preset, names))?);
        let task = match &args.task {
            Some(name) => {
                let tasks = &preset.tasks;
                let task = tasks.iter().copied().find(|task| task == name);
                let Some(task) = task else {
                    bail!("preset {}: {}", preset.name, unknown("task", name, tasks.iter().copied()))
                };
                Some(task)
            }
            None => families.iter().find_map(|family| (family.usual_task)(preset.name, args.len)),
        };
        Ok(Self { preset, task, len: args.len })
    }

    fn costs(&self, choice: &MechanismChoice) -> Costs {
        let usual = || family::usual(self.preset.name).map_or(4096, |usual| usual.len);
        let len = self.len.or_else(|| self.task.is_none().then(usual));
        costs(choice, self.preset.name, self.task, len, true)
    }
}

/// The text to print.
pub fn run(args: &Mechanisms, width: usize) -> Result<String> {
    let choices = match &args.model {
        Some(models) => choose(models)?,
        None => effattn_model::attention::entries().into_iter().map(MechanismChoice::default_of).collect(),
    };
    let scene = Scene::of(args)?;
    if args.json {
        let mechanisms: Vec<Value> = choices.iter().map(|choice| describe(choice, &scene)).collect();
        return Ok(serde_json::to_string_pretty(&mechanisms)? + "\n");
    }
    if args.model.is_some() {
        let texts: Vec<String> = choices.iter().map(|choice| explain(choice, &scene, width)).collect();
        return Ok(texts.join("\n"));
    }
    Ok(overview(&choices, &scene).terminal(width))
}

/// Whether every length works, or only multiples of something.
fn any_length(choice: &MechanismChoice) -> bool {
    let mut exceptions = choice.entry.exceptions.iter();
    !exceptions.any(|e| e.property == Property::AnyLength && (e.applies)(&choice.knobs, false))
}

fn overview(choices: &[MechanismChoice], scene: &Scene) -> Table {
    let mark = |yes: bool| if yes { "yes" } else { "-" }.to_owned();
    let rows = choices.iter().map(|choice| {
        let MechanismEntry { name, paper, support, complexity, .. } = choice.entry;
        let costs = scene.costs(choice);
        vec![
            (*name).to_owned(),
            format!("{} {}", paper.authors, paper.year),
            (*complexity).to_owned(),
            mark(support.bidirectional),
            mark(support.causal),
            mark(support.cross),
            mark(any_length(choice)),
            cuda::mark(choice).to_owned(),
            costs.parameters.map_or_else(|| "-".to_owned(), |count| format!("{:.3} M", count as f64 / 1e6)),
            costs.flops.map_or_else(|| "-".to_owned(), |flops| format!("{:.3}", flops as f64 / 1e9)),
            costs.state_bytes.map_or_else(
                || "-".to_owned(),
                |bytes| effattn_record::config::units::Bytes(bytes).to_string(),
            ),
        ]
    });
    let columns = [
        "name",
        "paper",
        "cost of attention",
        "bidir.",
        "causal",
        "cross",
        "any len",
        "CUDA",
        "params",
        "GFLOPs",
        "state",
    ];
    let first = choices.first().map(|choice| scene.costs(choice));
    let len = first.as_ref().map_or(0, |costs| costs.len);
    let task = scene.task.map_or_else(String::new, |task| format!(", {task}"));
    Table {
        title: format!(
            "{} mechanisms; parameters, GFLOPs and decoder state of preset {}{task} at length {len}",
            choices.len(),
            scene.preset.name
        ),
        columns: columns.map(str::to_owned).to_vec(),
        numbers: 3,
        rows: rows.collect(),
        notes: vec![
            "GFLOPs: one forward pass of one example; a multiply-add counts as 1, LayerNorm as 5 per element. state: memory of the past that a causal decoder keeps per sequence.".to_owned(),
            "CUDA: kernels of this program, candle's operations (composed), or both; --model NAME says which for what.".to_owned(),
            "Equations, knobs and sources of a mechanism: effattn list mechanisms --model NAME".to_owned(),
        ],
        spare: vec![1, 5, 6, 7],
        ..Table::default()
    }
}

const fn growth(growth: Growth) -> &'static str {
    match growth {
        Growth::Linear => "n",
        Growth::Linearithmic => "n log n",
        Growth::ThreeHalves => "n^1.5",
        Growth::Quadratic => "n^2",
    }
}

fn describe(choice: &MechanismChoice, scene: &Scene) -> Value {
    let entry = choice.entry;
    let support = entry.support;
    let knobs: Vec<Value> = entry
        .knobs
        .iter()
        .map(|knob| {
            json!({
                "name": knob.name,
                "default": knob.default().to_string(),
                "values": knob.kind.to_string(),
                "doc": knob.doc,
                "source": knob.source,
            })
        })
        .collect();
    let tasks: Vec<Costs> = scene
        .preset
        .tasks
        .iter()
        .map(|task| costs(choice, scene.preset.name, Some(task), scene.len, false))
        .collect();
    let mut value = json!({
        "name": entry.name,
        "variant": choice.variant,
        "title": entry.title,
        "paper": {
            "authors": entry.paper.authors,
            "title": entry.paper.title,
            "year": entry.paper.year,
            "locator": entry.paper.locator,
        },
        "bidirectional": support.bidirectional,
        "causal": support.causal,
        "cross": support.cross,
        "any_length": any_length(choice),
        "memory": support.memory,
        "cls": support.cls,
        "complexity": entry.complexity,
        "time_grows_with": growth(entry.time),
        "memory_grows_with": growth(entry.memory),
        "cuda": cuda::describe(choice),
        "equations": entry.equations,
        "deviations": entry.deviations,
        "knobs": knobs,
        "preset": scene.preset.name,
    });
    let costs = json!(scene.costs(choice));
    if let (Some(value), Some(costs)) = (value.as_object_mut(), costs.as_object()) {
        value.extend(costs.clone());
        value.insert("tasks".to_owned(), json!(tasks));
    }
    value
}

/// One mechanism in plain text.
fn explain(choice: &MechanismChoice, scene: &Scene, width: usize) -> String {
    let entry = choice.entry;
    let mut text = String::new();
    let mut say = |line: &str| text.push_str(&wrap(line, width));
    let paper = entry.paper;
    say(&format!("{} ({})", entry.title, choice.label()));
    say(&format!("  {}, \"{}\", {}, {}", paper.authors, paper.title, paper.year, paper.locator));
    say("");
    for line in entry.equations.lines() {
        say(&format!("  {}", line.trim_end()));
    }
    say("");
    say(&format!("Forms: {}", forms(choice).join(", ")));
    say(&format!(
        "Cost of attention: {}; at fixed knobs time grows as {}, memory as {}",
        entry.complexity,
        growth(entry.time),
        growth(entry.memory)
    ));
    say(&format!("On CUDA: {}", cuda::explain(choice)));
    say(&format!("Preset {}: {}", scene.preset.name, in_words(&scene.costs(choice))));
    if !entry.knobs.is_empty() {
        say("");
        say("Knobs:");
    }
    for knob in entry.knobs {
        let setting = choice.knobs.iter().find(|(name, _)| *name == knob.name);
        let value = setting.map_or_else(|| knob.default().to_string(), |(_, value)| value.to_string());
        say(&format!("  {}={value}: {}", knob.name, knob.doc));
        say(&format!("      {}; default {} from {}", knob.kind, knob.default(), knob.source));
    }
    let sections = [
        ("Deviations in papers and reference code:", entry.deviations.to_vec()),
        (
            "Exceptions to the properties that are tested for all mechanisms:",
            entry.exceptions.iter().map(|exception| exception.reason).collect(),
        ),
    ];
    for (heading, lines) in sections {
        if !lines.is_empty() {
            say("");
            say(heading);
        }
        for line in lines {
            say(&format!("  - {line}"));
        }
    }
    text
}

fn forms(choice: &MechanismChoice) -> Vec<&'static str> {
    let support = choice.entry.support;
    let forms = [
        (support.bidirectional, "bidirectional"),
        (support.causal, "causal"),
        (support.cross, "cross-attention"),
        (support.memory, "with cached positions"),
        (support.cls, "with its own class token"),
        (any_length(choice), "any length"),
    ];
    forms.into_iter().filter(|(has, _)| *has).map(|(_, form)| form).collect()
}

fn in_words(costs: &Costs) -> String {
    if let Some(problem) = &costs.problem {
        return problem.clone();
    }
    let task = costs.task.map_or_else(String::new, |task| format!(" ({task})"));
    let mut text = format!("at length {}{task}", costs.len);
    for (count, unit) in [
        (costs.parameters.map(|count| count as u64), "parameters"),
        (costs.flops, "FLOPs"),
        (costs.core_macs, "multiply-adds in the attention cores"),
        (costs.state_bytes, "bytes of decoder state"),
    ] {
        if let Some(count) = count {
            let _ = write!(text, ", {count} {unit}");
        }
    }
    text
}
