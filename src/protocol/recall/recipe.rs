//! How the tasks are trained: Zoology's and Based's protocols of MQAR, that of Grazzi et al. for state tracking, and small ones.

use serde::{Deserialize, Serialize};

use super::{NOISE, VOCABULARY};
use crate::protocol::grid::PlanError;
use crate::train::optim::AdamW;
use crate::train::schedule::Schedule;
use effattn_data::position_labels::{self, Alphabet, Segment};
use effattn_kernel::device::rng::RngStream;
use effattn_record::config::lists::{Rates, Segments};
use effattn_record::config::settings::Settings;

/// Examples that are trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainPart {
    /// Their segment.
    pub segment: Segment,
    /// Examples, the same in every epoch; 0: new ones in every step.
    pub examples: u64,
}

/// Shape of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// Cosine to 0, set once per epoch.
    EpochCosine,
    /// Linear over a tenth of the steps, then a cosine to 1e-6.
    WarmupCosine,
}

/// A protocol, as data.
struct Source {
    preset: &'static str,
    task: &'static str,
    /// Training segments and examples of each; empty: the data set's, with new examples in every step.
    train: &'static [(&'static str, u64)],
    /// Test segments; empty: the data set's.
    test: &'static [&'static str],
    alphabet: Option<Alphabet>,
    /// Examples per segment that are validated and tested on.
    counts: [u64; 2],
    batch: u64,
    /// Updates of an epoch, and epochs.
    epochs: [u64; 2],
    rates: &'static str,
    decay: f64,
    shape: Shape,
    enough: Option<f64>,
    gaps: &'static [&'static str],
    order: Order,
    macro_batch: Option<usize>,
}

/// Order of fixed examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Segment by segment, the same in every epoch.
    Listed,
    /// Another one in every epoch, for one segment.
    Shuffled,
}

/// What Zoology's code does and this does not.
const SELECTED: &str = "selected on a validation split (on the test split)";

/// Where nothing else is said: eight rates.
pub const GRID: &str = "3e-4..3e-2";

/// New examples in every step.
const NEW: [&[(&str, u64)]; 3] = [&[("64", 0)], &[("64:8", 0)], &[("16", 0)]];

/// MAD's benchmark, its first setting of each task.
const MAD: Source = Source {
    preset: "mad",
    task: "",
    train: &[],
    test: &[],
    alphabet: None,
    counts: [1280, 1280],
    batch: 128,
    epochs: [100, 200],
    rates: "1e-4,5e-4,1e-3",
    decay: 0.1,
    shape: Shape::EpochCosine,
    enough: Some(99.9),
    gaps: &[
        SELECTED,
        "accuracy of the best evaluation (of the least test loss)",
        "weight decay 0.1 (0 or 0.1, the better)",
        "rate falls to 0 (1e-6)",
        "head without bias",
    ],
    order: Order::Shuffled,
    macro_batch: Some(128),
};

/// Grazzi et al. 2024: what their tasks share.
const TRACKING: Source = Source {
    preset: "tracking",
    task: "",
    train: &[],
    test: &[],
    alphabet: None,
    counts: [8192, 8192],
    batch: 1024,
    epochs: [1000, 100],
    rates: "1e-4,5e-4,1e-3,1e-2",
    decay: 0.1,
    shape: Shape::WarmupCosine,
    enough: None,
    gaps: &["rate of each seed (of the median of seeds)"],
    order: Order::Listed,
    macro_batch: None,
};

const MAD_SMALL: Source = Source {
    preset: "mad-small",
    batch: 32,
    counts: [320, 640],
    epochs: [100, 6],
    rates: "1e-3,3e-3",
    decay: 0.0,
    shape: Shape::WarmupCosine,
    gaps: &["small: a protocol of this program's own, no paper's"],
    ..MAD
};

static SOURCES: &[Source] = &[
    Source {
        preset: "recall-small",
        task: "mqar",
        train: &[],
        test: &[],
        alphabet: None,
        counts: [300, 300],
        batch: 64,
        epochs: [188, 30],
        rates: GRID,
        decay: 0.1,
        shape: Shape::EpochCosine,
        enough: Some(99.0),
        gaps: &["small: a protocol of this program's own, no paper's"],
        order: Order::Listed,
        macro_batch: None,
    },
    Source {
        preset: "recall-based",
        task: "mqar",
        train: &[
            ("64:4", 100_000),
            ("128:8", 20_000),
            ("256:16", 20_000),
            ("256:32", 20_000),
            ("256:64", 20_000),
        ],
        test: &["64:4", "64:8", "64:16", "128:32", "256:64", "512:128", "1024:256"],
        alphabet: Some(Alphabet { vocabulary: 8192, noise: 1.0 }),
        counts: [500, 1000],
        batch: 256,
        epochs: [707, 32],
        rates: "1e-3,3.16e-3,1e-2,3.16e-2",
        decay: 0.1,
        shape: Shape::EpochCosine,
        enough: Some(99.0),
        gaps: &[SELECTED],
        order: Order::Listed,
        macro_batch: None,
    },
    Source {
        preset: "recall-zoology",
        task: "mqar",
        train: &[("64:4", 100_000)],
        test: &["64:4"],
        alphabet: Some(Alphabet { vocabulary: 8192, noise: 0.0 }),
        counts: [500, 3000],
        batch: 512,
        epochs: [196, 64],
        rates: "1e-4,4.64e-4,2.15e-3,1e-2",
        decay: 0.1,
        shape: Shape::EpochCosine,
        enough: Some(99.0),
        gaps: &[SELECTED, "no positions (learned in attention)"],
        order: Order::Listed,
        macro_batch: None,
    },
    Source {
        preset: "tracking-small",
        task: "parity",
        train: &[],
        test: &[],
        alphabet: None,
        counts: [300, 1000],
        batch: 128,
        epochs: [100, 10],
        rates: GRID,
        decay: 0.0,
        shape: Shape::WarmupCosine,
        enough: Some(99.0),
        gaps: &["small: a protocol of this program's own, no paper's"],
        order: Order::Listed,
        macro_batch: None,
    },
    Source { task: "parity", test: &["40..256"], ..TRACKING },
    Source { task: "modular-arithmetic", test: &["39..255"], ..TRACKING },
    Source { task: "bracket-arithmetic", test: &["40..256"], ..TRACKING },
    Source { task: "in-context-recall", train: NEW[0], test: &["64"], ..MAD_SMALL },
    Source { task: "noisy-recall", train: NEW[0], test: &["64"], ..MAD_SMALL },
    Source { task: "fuzzy-recall", train: NEW[0], test: &["64"], ..MAD_SMALL },
    Source { task: "selective-copying", train: NEW[1], test: &["64:8"], ..MAD_SMALL },
    Source { task: "compression", train: NEW[2], test: &["16"], ..MAD_SMALL },
    Source { task: "memorization", train: &[("32", 256)], test: &["32"], ..MAD_SMALL },
    Source { task: "in-context-recall", train: &[("128", 12_800)], ..MAD },
    Source { task: "noisy-recall", train: &[("128", 12_800)], ..MAD },
    Source { task: "fuzzy-recall", train: &[("128", 12_800)], ..MAD },
    Source { task: "selective-copying", train: &[("256:16", 12_800)], ..MAD },
    Source { task: "compression", train: &[("32", 12_800)], ..MAD },
    Source { task: "memorization", train: &[("32", 256)], epochs: [2, 200], ..MAD },
];

/// The protocol of a task with a preset.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// What is trained on.
    pub train: Vec<TrainPart>,
    /// What is validated and tested on.
    pub test: Vec<Segment>,
    /// Number of ids, noise.
    pub alphabet: Alphabet,
    /// Examples per segment that are validated and tested on.
    pub counts: [u64; 2],
    /// Examples per update.
    pub batch: u64,
    /// Most updates.
    pub steps: u64,
    /// Updates of an epoch, an evaluation behind each.
    pub every: u64,
    /// Rates to choose from.
    pub rates: Vec<f64>,
    /// Validation accuracy in percent above which training ends.
    pub enough: Option<f64>,
    /// What the source does and this does not, or why there is no source.
    pub gaps: Vec<String>,
    /// Order of fixed examples.
    pub order: Order,
    /// Examples of a batch that an accuracy by classes is taken of; `None`: the source takes none.
    pub macro_batch: Option<usize>,
    decay: f64,
    shape: Shape,
}

/// The preset for `task` where none is said: that of its first protocol, or of the first.
pub fn preset(task: &str) -> &'static str {
    SOURCES.iter().find(|source| source.task == task).unwrap_or(&SOURCES[0]).preset
}

impl Recipe {
    /// The protocol of `task` with `preset`. A task that the preset's source does not have is trained as its first one.
    pub fn find(preset: &str, task: &str) -> Result<Self, String> {
        let of_preset = || SOURCES.iter().filter(|source| source.preset == preset);
        let own = of_preset().find(|source| source.task == task);
        let names = || SOURCES.iter().map(|source| source.preset);
        let Some(source) = own.or_else(|| of_preset().next()) else {
            return Err(effattn_record::config::unknown("preset of recall", preset, names()));
        };
        let (_, set) = position_labels::task(task).map_err(|error| error.to_string())?;
        let segments = |list: &[&'static str]| Segment::list(list.iter().copied()).map_err(|error| error.0);
        let (train, test) = match own {
            Some(source) => (source.train, source.test),
            None => Default::default(),
        };
        let part = |(text, examples): &(&str, u64)| {
            text.parse().map(|segment| TrainPart { segment, examples: *examples }).map_err(|error| error.0)
        };
        let train = match train {
            [] => {
                segments(set.train)?.into_iter().map(|segment| TrainPart { segment, examples: 0 }).collect()
            }
            parts => parts.iter().map(part).collect::<Result<_, String>>()?,
        };
        let mut gaps: Vec<String> = source.gaps.iter().map(|gap| (*gap).to_owned()).collect();
        if own.is_none() {
            gaps.push(format!("{task} trained as {}", source.task));
        }
        Ok(Self {
            train,
            test: segments(if test.is_empty() { set.test } else { test })?,
            alphabet: own.and_then(|source| source.alphabet).unwrap_or(set.alphabet),
            counts: source.counts,
            batch: source.batch,
            steps: source.epochs[0] * source.epochs[1],
            every: source.epochs[0],
            rates: source.rates.parse::<Rates>().map_err(|error| error.0)?.0,
            enough: source.enough,
            gaps,
            order: source.order,
            macro_batch: source.macro_batch,
            decay: source.decay,
            shape: source.shape,
        })
    }

    /// Updates of an epoch of a run of `steps`, after which it is evaluated where nothing else is said: a short run has four.
    pub fn epoch(&self, steps: u64) -> u64 {
        self.every.min(steps.div_ceil(4)).max(1)
    }

    /// AdamW, which decays every parameter, and the schedule of a run of `steps` at `rate`.
    pub fn training(&self, rate: f64, steps: u64) -> (AdamW, Schedule) {
        let epoch = self.epoch(steps);
        let optimizer = AdamW { beta2: 0.999, eps: 1e-8, weight_decay: self.decay, clip: None };
        let schedule = match self.shape {
            Shape::EpochCosine => {
                Schedule::EpochCosine { base_lr: rate, epoch, epochs: steps.div_ceil(epoch) }
            }
            Shape::WarmupCosine => {
                let warmup = (steps / 10).max(1);
                let cycle = steps.saturating_sub(warmup).max(1);
                let (start_lr, min_lr) = (0.0, 1e-6f64.min(rate));
                Schedule::CosineRestarts {
                    peak_lr: rate,
                    start_lr,
                    min_lr,
                    warmup,
                    cycle,
                    growth: 1.0,
                    shrink: 1.0,
                }
            }
        };
        (optimizer, schedule)
    }
}

/// The protocol of `task` with the preset of `settings`.
pub fn recipe_of(settings: &Settings, task: &str) -> Result<Recipe, PlanError> {
    let preset = settings.preset.as_deref().unwrap_or_else(|| preset(task));
    Recipe::find(preset, task).map_err(PlanError)
}

/// What is trained and tested on, with what was said in the place of the protocol's.
pub fn examples(
    settings: &Settings,
    recipe: &Recipe,
    task: &str,
) -> Result<(Vec<TrainPart>, Vec<Segment>, Alphabet), PlanError> {
    let (_, set) = position_labels::task(task).map_err(PlanError::new)?;
    let vocabulary =
        VOCABULARY.of(settings).map_or(recipe.alphabet.vocabulary, |vocabulary| vocabulary as usize);
    let alphabet = Alphabet { vocabulary, noise: NOISE.of(settings).unwrap_or(recipe.alphabet.noise) };
    let examples = recipe.train.first().map_or(0, |part| part.examples);
    let train = match &settings.segments {
        Some(Segments(list)) => list.iter().map(|&segment| TrainPart { segment, examples }).collect(),
        None => recipe.train.clone(),
    };
    let test =
        settings.test_segments.as_ref().map_or_else(|| recipe.test.clone(), |Segments(list)| list.clone());
    let trained: Vec<Segment> = train.iter().map(|part| part.segment).collect();
    set.check(&trained, alphabet).and_then(|()| set.check(&test, alphabet)).map_err(PlanError)?;
    Ok((train, test, alphabet))
}

/// Segment and numbers of the examples that a step reads, in the order of its epoch.
pub fn numbers(parts: &[TrainPart], (batch, step, seed): (u64, u64, u64), order: Order) -> (usize, Vec<u64>) {
    let StepExamples { segment, first, count } = examples_of(parts, batch, step);
    let fixed = parts[segment].examples;
    if order == Order::Listed || fixed == 0 || parts.len() > 1 {
        return (segment, (first..first + count).collect());
    }
    let epoch = step / fixed.div_ceil(batch.max(1));
    let order = RngStream::new(seed, &format!("order/{epoch}")).permutation(fixed as usize);
    (segment, order[first as usize..(first + count) as usize].iter().map(|number| *number as u64).collect())
}

/// The examples of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepExamples {
    /// Number of the segment.
    pub segment: usize,
    /// First example of it.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// What step `step` reads of `parts` in batches of `batch`, which never mix segments. New examples come from the segments in turns;
/// fixed ones come segment by segment, in the same order in every epoch, the last batch of a segment perhaps smaller.
pub fn examples_of(parts: &[TrainPart], batch: u64, step: u64) -> StepExamples {
    let batches = |part: &TrainPart| part.examples.div_ceil(batch.max(1));
    let epoch: u64 = parts.iter().map(batches).sum();
    if epoch == 0 || parts.iter().any(|part| part.examples == 0) {
        let count = parts.len().max(1) as u64;
        return StepExamples { segment: (step % count) as usize, first: step / count * batch, count: batch };
    }
    let mut place = step % epoch;
    for (segment, part) in parts.iter().enumerate() {
        if place < batches(part) {
            let first = place * batch;
            return StepExamples { segment, first, count: batch.min(part.examples - first) };
        }
        place -= batches(part);
    }
    StepExamples { segment: 0, first: 0, count: batch }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_protocols_have_the_published_updates() {
        let based = Recipe::find("recall-based", "mqar").unwrap();
        let of = |step| examples_of(&based.train, based.batch, step);
        assert_eq!(of(0), StepExamples { segment: 0, first: 0, count: 256 });
        assert_eq!(of(390), StepExamples { segment: 0, first: 99_840, count: 160 }, "the rest of a segment");
        assert_eq!(of(391), StepExamples { segment: 1, first: 0, count: 256 });
        assert_eq!(of(based.every), of(0), "707 updates are an epoch");
        assert_eq!(of(based.every - 1).segment, 4);
        let zoology = Recipe::find("recall-zoology", "mqar").unwrap();
        assert_eq!(examples_of(&zoology.train, zoology.batch, zoology.every).first, 0);
        assert_eq!(zoology.steps, 196 * 64);
    }

    #[test]
    fn new_examples_are_never_seen_twice() {
        let small = Recipe::find("recall-small", "mqar").unwrap();
        let of = |step| examples_of(&small.train, small.batch, step);
        assert_eq!([of(0).segment, of(1).segment, of(2).segment, of(3).segment], [0, 1, 2, 0]);
        assert_eq!((of(2).first, of(3).first, of(6).first), (0, 64, 128));
    }

    #[test]
    fn shuffled_examples_come_once_an_epoch_in_another_order() {
        let mad = Recipe::find("mad", "memorization").unwrap();
        let read = |step| numbers(&mad.train, (mad.batch, step, 1), mad.order).1;
        let epoch = |first: u64| -> Vec<u64> { (first..first + mad.every).flat_map(read).collect() };
        let (first, second) = (epoch(0), epoch(mad.every));
        assert_eq!((first.len(), mad.steps), (256, 400));
        assert_ne!(first, second);
        let sorted = |mut all: Vec<u64>| {
            all.sort_unstable();
            all
        };
        assert_eq!(sorted(first), (0..256).collect::<Vec<_>>());
        assert_eq!(sorted(second), (0..256).collect::<Vec<_>>());
        let recall = Recipe::find("mad", "in-context-recall").unwrap();
        assert_eq!((recall.steps, recall.train[0].examples), (20_000, 12_800));
        let small = Recipe::find("mad-small", "compression").unwrap();
        assert_eq!(numbers(&small.train, (small.batch, 1, 1), small.order), (0, (32..64).collect()));
    }

    #[test]
    fn rates_start_and_end_as_they_should() {
        let small = Recipe::find("recall-small", "mqar").unwrap();
        assert_eq!((small.rates.len(), small.rates[0], small.rates[7]), (8, 3e-4, 3e-2));
        let (_, schedule) = small.training(1e-3, small.steps);
        assert_eq!((schedule.at(0).lr, schedule.at(187).lr), (1e-3, 1e-3), "one rate per epoch");
        let expected = 1e-3 * 0.5 * (1.0 + (std::f64::consts::PI / 30.0).cos());
        assert!((schedule.at(188).lr - expected).abs() < 1e-12);
        let (_, schedule) = Recipe::find("tracking", "parity").unwrap().training(1e-3, 20_000);
        assert_eq!(schedule.at(0).lr, 0.0);
        assert!((schedule.at(1000).lr - 5e-4).abs() < 1e-12 && (schedule.at(2000).lr - 1e-3).abs() < 1e-9);
        assert!(schedule.at(19_999).lr < 1.1e-6);
    }

    #[test]
    fn other_tasks_are_trained_as_the_presets_first() {
        let other = Recipe::find("tracking-small", "mqar").unwrap();
        assert_eq!((other.alphabet.vocabulary, other.batch), (256, 128));
        assert!(other.gaps.iter().any(|gap| gap == "mqar trained as parity"));
        assert!(Recipe::find("recall-smal", "mqar").unwrap_err().contains("did you mean recall-small"));
        assert_eq!((preset("parity"), preset("induction")), ("tracking-small", "recall-small"));
    }
}
