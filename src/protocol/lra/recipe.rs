//! How a task is trained: steps, batch, rates, evaluation, as the sources have it.

use crate::train::optim::AdamW;
use crate::train::schedule::Schedule;
use effattn_data as data;

/// Shape of the learning rate over a run; lengths follow the number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rate {
    /// One cycle with cycling momentum.
    OneCycle,
    /// Reciprocal square root behind a linear warm-up.
    Rsqrt,
    /// Cosine over the whole run behind a linear warm-up.
    Cosine,
}

/// The protocol of one task.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub task: &'static str,
    /// Optimizer steps.
    pub steps: u64,
    /// Examples per step.
    pub batch: u64,
    /// Tokens of a document that are kept.
    pub keep: u64,
    /// Positions of the model; what is not filled is padding.
    pub len: u64,
    /// Highest (one cycle) or base rate.
    pub rate: f64,
    shape: Rate,
    /// Steps of the warm-up.
    pub warmup: u64,
    optimizer: AdamW,
    /// Steps between evaluations.
    pub every: u64,
    /// Batches per evaluation, drawn from the shuffled validation split; absent: every full batch of it.
    pub batches: Option<u64>,
    /// Whether the weights of the best evaluation are tested, or those of the last step.
    pub select: bool,
    /// First seed of the source.
    pub seed: u64,
    /// Why it is no source's: a data set or preset that no source trains has a recipe too, but no share of a protocol.
    pub ours: Option<&'static str>,
    /// Whether closing brackets of ListOps are tokens.
    pub keep_close: bool,
    /// What the source does and this does not.
    pub gaps: &'static [&'static str],
}

const fn adam(beta2: f64, eps: f64, weight_decay: f64) -> AdamW {
    AdamW { beta2, eps, weight_decay, clip: None }
}

/// Transformer-LS's code; Image and Pathfinder have its Nystromformer ancestor's values.
const fn table_1(task: &'static str, steps: u64, keep: u64, len: u64, decay: f64) -> Recipe {
    Recipe {
        task,
        steps,
        batch: 32,
        keep,
        len,
        rate: 1e-4,
        shape: Rate::OneCycle,
        warmup: 1000,
        optimizer: adam(0.999, 1e-6, decay),
        every: 50,
        batches: None,
        select: true,
        seed: 1234,
        ours: None,
        keep_close: false,
        gaps: &[],
    }
}

/// What the Long Range Arena's code does with pairs and this does not.
const PAIRS: &[&str] = &["pair features [u, v, uv, u-v] and two layers ([u, v] and three)"];
/// The same with images.
const IMAGE: &[&str] = &["every batch drawn anew (batches kept)"];

/// The Long Range Arena's code.
const fn arena(task: &'static str, steps: u64, len: u64) -> Recipe {
    Recipe {
        task,
        steps,
        batch: 32,
        keep: len,
        len,
        rate: 0.05,
        shape: Rate::Rsqrt,
        warmup: 8000,
        optimizer: adam(0.98, 1e-9, 0.1),
        every: 100,
        batches: None,
        select: true,
        seed: 0,
        ours: None,
        keep_close: true,
        gaps: &[],
    }
}

/// Pathfinder in the Long Range Arena's code; `epoch` is the warm-up and the distance of evaluations.
const fn arena_pathfinder(task: &'static str, batch: u64, (steps, epoch): (u64, u64), len: u64) -> Recipe {
    Recipe {
        batch,
        rate: 1e-3,
        shape: Rate::Cosine,
        warmup: epoch,
        optimizer: adam(0.98, 1e-9, 0.0),
        every: epoch,
        select: false,
        ..arena(task, steps, len)
    }
}

/// The recipes of the sources, by preset.
const PRESETS: &[(&str, &[Recipe])] = &[("ls-lra", LS), ("lra-repo", ARENA), ("lra-paper", ARENA)];

const LS: &[Recipe] = &[
    Recipe { batches: Some(62), ..table_1("listops", 5000, 2000, 2048, 0.0) },
    Recipe { warmup: 8000, every: 500, batches: Some(781), ..table_1("text", 20_000, 4000, 4096, 0.01) },
    Recipe {
        warmup: 8000,
        every: 300,
        batches: Some(565),
        seed: 4096,
        ..table_1("retrieval", 30_000, 4096, 4096, 0.01)
    },
    Recipe { batch: 256, warmup: 175, every: 175, ..table_1("image", 35_000, 1024, 1024, 0.0) },
    Recipe { batch: 256, warmup: 312, every: 312, ..table_1("pathfinder32", 62_400, 1024, 1024, 0.0) },
];

const ARENA: &[Recipe] = &[
    Recipe { warmup: 1000, every: 50, ..arena("listops", 5000, 2000) },
    Recipe { select: false, ..arena("text", 20_000, 1000) },
    Recipe { gaps: PAIRS, ..arena("retrieval", 5000, 4000) },
    Recipe {
        batch: 256,
        rate: 5e-4,
        shape: Rate::Cosine,
        warmup: 175,
        optimizer: adam(0.98, 1e-9, 0.0),
        every: 175,
        select: false,
        gaps: IMAGE,
        ..arena("image", 35_000, 1024)
    },
    arena_pathfinder("pathfinder32", 512, (62_400, 312), 1024),
    arena_pathfinder("pathfinder64", 512, (62_400, 312), 4096),
    Recipe {
        optimizer: AdamW { clip: Some(1.0), ..adam(0.98, 1e-9, 0.0) },
        ..arena_pathfinder("pathfinder128", 64, (500_000, 2500), 16_384)
    },
];

/// Rates of the Long Range Arena's paper that are not those of its code.
const PAPER_RATES: &[(&str, f64)] = &[
    ("retrieval", 0.5),
    ("image", 0.01),
    ("pathfinder32", 0.01),
    ("pathfinder64", 0.01),
    ("pathfinder128", 0.01),
];

/// Weight decays of the Long Range Arena's code for single mechanisms.
const OWN_DECAY: &[(&str, &str, f64)] = &[("image", "sinkhorn", 0.7)];

/// The recipe of `preset` for `task`, with what the source has for `mechanism` only; in the manner of Transformer-LS where
/// no source trains on the task, or trains this preset.
pub fn find(preset: &str, task: &str, mechanism: &str) -> Result<Recipe, String> {
    let of = |table: &[Recipe]| table.iter().find(|recipe| recipe.task == task).copied();
    let table = PRESETS.iter().find(|(name, _)| *name == preset).map(|(_, table)| *table);
    let published = PRESETS.iter().any(|(_, table)| of(table).is_some());
    let mut recipe = match (table.and_then(of), table) {
        (Some(recipe), _) => recipe,
        (None, Some(table)) if published => {
            let known: Vec<&str> = table.iter().map(|recipe| recipe.task).collect();
            return Err(format!("preset {preset} has no recipe for {task}, only for {}", known.join(", ")));
        }
        (None, _) => return ours(task, published),
    };
    if preset == "lra-paper" {
        if task == "text" {
            (recipe.keep, recipe.len) = (4000, 4000);
        }
        if let Some((_, rate)) = PAPER_RATES.iter().find(|(of, _)| *of == task) {
            recipe.rate = *rate;
        }
    }
    let own = OWN_DECAY.iter().find(|(of, only, _)| (*of, *only) == (task, mechanism));
    if let Some((_, _, decay)) = own.filter(|_| preset != "ls-lra") {
        recipe.optimizer.weight_decay = *decay;
    }
    Ok(recipe)
}

/// Epochs that files of a person's own are trained for, within 100 and 5,000 steps.
const OWN_EPOCHS: u64 = 10;

/// A recipe in the manner of Transformer-LS for what no source trains: the task, or the preset where the task is `published`.
fn ours(task: &str, published: bool) -> Result<Recipe, String> {
    let (set, examples) = data::task(task).map_err(|error| error.to_string())?;
    let like = LS.iter().find(|recipe| recipe.task == task).copied();
    let len = examples.len as u64;
    if data::own::is_own(task) {
        let steps = (OWN_EPOCHS * examples.train as u64).div_ceil(32).clamp(100, 5000);
        let own = table_1(set.name, steps, len, len, 0.0);
        return Ok(Recipe { rate: 1e-3, warmup: steps / 5, ours: Some("files of one's own"), ..own });
    }
    let why =
        if published { "a preset that no source trains" } else { "a data set that no source trains on" };
    Ok(Recipe { ours: Some(why), ..like.unwrap_or(table_1(set.name, 5000, len, len, 0.0)) })
}

impl Recipe {
    /// Steps between evaluations of a run of `steps`: a short one has four at least, so that its curve is one.
    pub fn every_of(&self, steps: u64) -> u64 {
        if steps < self.steps { self.every.min(steps.div_ceil(4)) } else { self.every }
    }

    /// Optimizer and schedule over `steps` steps with rate `rate`: the warm-up keeps its share of the run.
    pub fn training(&self, steps: u64, rate: f64) -> (AdamW, Schedule) {
        let share = |part: u64| (part as f64 * steps as f64 / self.steps as f64).round() as u64;
        let warmup = if steps == self.steps { self.warmup } else { share(self.warmup).max(1) };
        let schedule = match self.shape {
            Rate::OneCycle => Schedule::Onecycle { peak_lr: rate, warmup, steps, cycle_momentum: true },
            Rate::Rsqrt => Schedule::Rsqrt { base_lr: rate, warmup },
            Rate::Cosine => Schedule::Cosine { base_lr: rate, warmup, cycle: steps.max(1) },
        };
        (self.optimizer, schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rates_of_the_sources() {
        let (_, schedule) = find("ls-lra", "listops", "ls").unwrap().training(5000, 1e-4);
        assert!((schedule.at(999).lr - 1e-4).abs() < 1e-12 && schedule.at(999).beta1 == 0.85);
        let (adam, schedule) = find("lra-repo", "listops", "ls").unwrap().training(5000, 0.05);
        assert!((schedule.at(1000).lr - 1.58114e-3).abs() < 1e-8 && adam.weight_decay == 0.1);
        let text = find("ls-lra", "text", "ls").unwrap();
        assert_eq!([20_000, 400, 3].map(|steps| text.every_of(steps)), [500, 100, 1]);
        let (_, short) = find("ls-lra", "listops", "ls").unwrap().training(500, 1e-4);
        assert!((short.at(99).lr - 1e-4).abs() < 1e-12);
    }

    #[test]
    fn only_names_of_data_sets_have_recipes() {
        assert!(
            LS.iter().chain(ARENA).all(|recipe| data::task(recipe.task).is_ok() && recipe.ours.is_none())
        );
        assert!(find("ls-lra", "listop", "ls").unwrap_err().contains("did you mean listops"));
        assert!(find("ls-lra", "enwik8", "ls").is_err(), "a corpus has no classes");
    }

    #[test]
    fn paper_code_and_single_mechanisms_differ() {
        let rate = |preset, task| find(preset, task, "full").unwrap().rate;
        assert_eq!([rate("lra-repo", "retrieval"), rate("lra-paper", "retrieval")], [0.05, 0.5]);
        assert_eq!([rate("lra-repo", "image"), rate("lra-paper", "image")], [5e-4, 0.01]);
        assert_eq!(rate("lra-paper", "pathfinder32"), 0.01);
        let decay =
            |preset, mechanism| find(preset, "image", mechanism).unwrap().training(9, 1.0).0.weight_decay;
        assert_eq!([decay("lra-repo", "sinkhorn"), decay("lra-repo", "full")], [0.7, 0.0]);
        assert_eq!(decay("ls-lra", "sinkhorn"), 0.0);
        let known = |name| effattn_model::attention::find(name).is_some();
        assert!(
            OWN_DECAY.iter().all(|(_, mechanism, _)| known(mechanism)),
            "a mechanism that does not exist"
        );
        let text = find("lra-repo", "text", "full").unwrap();
        assert!(!text.select && find("ls-lra", "text", "full").unwrap().select);
        assert!(find("lra-repo", "listops", "full").unwrap().keep_close);
        assert!(!find("ls-lra", "listops", "full").unwrap().keep_close);
    }

    #[test]
    fn presets_that_no_source_has_are_trained_in_our_manner() {
        let reason = |preset, task| find(preset, task, "full").unwrap().ours;
        assert_eq!(reason("bag", "listops"), Some("a preset that no source trains"));
        assert_eq!(reason("ls-lra", "listops"), None);
        let (own, table) = (find("bag", "text", "full").unwrap(), find("ls-lra", "text", "full").unwrap());
        assert_eq!((own.rate, own.steps, own.batches), (table.rate, table.steps, table.batches));
        assert!(find("bag", "enwik8", "full").is_err());
    }

    #[test]
    fn a_task_without_a_recipe_says_which_have_one() {
        let error = find("ls-lra", "pathfinder128", "ls").unwrap_err();
        assert!(error.contains("listops") && error.contains("pathfinder128"), "{error}");
    }
}
