//! Shards: things dealt to several starts of one command, the same on every machine.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most shards of a plan.
const MOST: usize = 100_000;

/// One of several shards, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// Which.
    pub index: usize,
    /// How many there are.
    pub count: usize,
}

/// Invalid `--shard` value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ShardError(String);

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let numbers = text.split_once('/').and_then(|(index, count)| {
            Some((index.trim().parse::<usize>().ok()?, count.trim().parse::<usize>().ok()?))
        });
        let Some((index, count)) = numbers else {
            return Err(ShardError(format!("expected I/N such as 1/4, or auto; found {text:?}")));
        };
        if count == 0 || count > MOST {
            return Err(ShardError(format!("a plan is cut into 1 to {MOST} shards, not {count}")));
        }
        if index == 0 || index > count {
            return Err(ShardError(format!("shards are counted from 1: 1/{count} to {count}/{count}")));
        }
        Ok(Self { index, count })
    }
}

impl Shard {
    /// The shard that `text` names; `auto`: the one that a scheduler's variables name.
    pub fn parse_or_auto(text: &str) -> Result<Self, ShardError> {
        if text == "auto" { Self::auto(|name| std::env::var(name).ok()) } else { text.parse() }
    }

    /// The shard that the variables of a scheduler name: Slurm's array task, Kubernetes' indexed job, AWS Batch's array job.
    pub fn auto(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ShardError> {
        let number = |name: &str| -> Result<Option<usize>, ShardError> {
            let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
            let wrong = |_| ShardError(format!("{name} is {text:?}, expected a whole number"));
            text.trim().parse::<usize>().map(Some).map_err(wrong)
        };
        if let Some(id) = number("SLURM_ARRAY_TASK_ID")? {
            return slurm(id, number);
        }
        let places: [(&str, &[&str]); 2] = [
            ("JOB_COMPLETION_INDEX", &["COMPLETIONS"]),
            ("AWS_BATCH_JOB_ARRAY_INDEX", &["AWS_BATCH_JOB_ARRAY_SIZE", "COMPLETIONS"]),
        ];
        for (name, counts) in places {
            let Some(index) = number(name)? else { continue };
            for count in counts {
                if let Some(count) = number(count)? {
                    return format!("{}/{count}", index + 1).parse();
                }
            }
            let counts = counts.join(" nor ");
            return Err(ShardError(format!(
                "{name} gives the index of this shard, but no variable gives the number of shards ({counts} is not set); set it in the \
                 job, or name the shard: --shard {}/N",
                index + 1
            )));
        }
        Err(ShardError(
            "auto takes the shard from SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX or AWS_BATCH_JOB_ARRAY_INDEX, and none \
             of them is set; start it as a job array, or name the shard: --shard 1/4"
                .to_owned(),
        ))
    }

    /// `3-of-6`: its folder in the folder of the whole run.
    pub fn folder(self) -> String {
        format!("{}-of-{}", self.index, self.count)
    }

    /// The shard whose folder is called `name`.
    pub fn of_folder(name: &str) -> Option<Self> {
        let (index, count) = name.split_once("-of-")?;
        format!("{index}/{count}").parse().ok().filter(|shard: &Self| shard.folder() == name)
    }
}

/// The shard of task `id` of a Slurm array. An array with gaps is a part of another one: its tasks would take each
/// other's cells.
fn slurm(id: usize, number: impl Fn(&str) -> Result<Option<usize>, ShardError>) -> Result<Shard, ShardError> {
    let unset = |name: &str| {
        ShardError(format!("SLURM_ARRAY_TASK_ID is set and {name} is not; name the shard: --shard {id}/N"))
    };
    let least = number("SLURM_ARRAY_TASK_MIN")?.ok_or_else(|| unset("SLURM_ARRAY_TASK_MIN"))?;
    let count = number("SLURM_ARRAY_TASK_COUNT")?.ok_or_else(|| unset("SLURM_ARRAY_TASK_COUNT"))?;
    let step = number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
    let most = number("SLURM_ARRAY_TASK_MAX")?.unwrap_or(least + step * count.saturating_sub(1));
    let whole = id >= least && most >= least && (most - least) / step + 1 == count;
    let whole = whole && (id - least).is_multiple_of(step);
    if !whole {
        return Err(ShardError(format!(
            "the array {least} to {most} has {count} tasks: it has gaps, and its tasks do not say of how many shards they \
             are; name the shard: --shard $SLURM_ARRAY_TASK_ID/N"
        )));
    }
    format!("{}/{count}", (id - least) / step + 1).parse()
}

/// What of a plan a shard has.
#[derive(Clone, Debug, Default)]
pub struct PlanPart {
    /// Which shard; none: the whole plan.
    pub shard: Option<Shard>,
    /// [`Plan::digest`](super::plan::Plan::digest) of the whole plan.
    pub digest: String,
    /// [`Plan::identity`](super::plan::Plan::identity) of the whole plan on this machine.
    pub identity: String,
}

/// The folder of the whole run of the plan `digest` below the folder of its name.
pub fn parent(base: &Path, digest: &str) -> PathBuf {
    base.join(format!("plan-{digest}"))
}

/// The folders of shards in the folder of a whole run, the first shard first.
pub fn shards(parent: &Path) -> Vec<(Shard, PathBuf)> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<(Shard, PathBuf)> = entries
        .filter_map(|entry| Some((Shard::of_folder(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(_, path)| path.is_dir())
        .collect();
    found.sort();
    found
}

/// The words without `--shard` and its value.
pub fn without_shard(words: &[String]) -> Vec<String> {
    let mut left = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--shard" {
            words.next();
        } else if !word.starts_with("--shard=") {
            left.push(word.clone());
        }
    }
    left
}

/// What a cell of `seconds` weighs: whole milliseconds, so that every machine adds the same, and a second for its worker.
pub fn cost(seconds: f64) -> u64 {
    1000 + (seconds.max(0.0) * 1e3).min(1e15) as u64
}

/// Deals things of `costs` to `count` hands, the costliest first, each to the hand that has least.
pub fn distribute(costs: &[u64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(costs[index]), index));
    let mut hands: std::collections::BTreeSet<(u64, usize)> =
        (0..count.max(1)).map(|hand| (0, hand)).collect();
    let mut owners = vec![0; costs.len()];
    for index in order {
        let Some((load, hand)) = hands.pop_first() else { break };
        owners[index] = hand;
        hands.insert((load.saturating_add(costs[index]), hand));
    }
    owners
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use effattn_kernel::device::rng::RngStream;

    fn said(text: &str) -> Result<String, String> {
        text.parse::<Shard>().map(|shard| shard.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn shards_are_counted_from_one() {
        assert_eq!(said("1/4").unwrap(), "1/4");
        assert_eq!(said(" 4 / 4 ").unwrap(), "4/4");
        for text in ["0/4", "5/4", "1/0", "4", "a/b", "-1/4", "1/4/2", "1/999999999", ""] {
            assert!(said(text).is_err(), "{text}");
        }
        assert!(said("0/4").unwrap_err().contains("1/4 to 4/4"));
        let shard: Shard = "3/6".parse().unwrap();
        assert_eq!(Shard::of_folder(&shard.folder()), Some(shard));
        assert_eq!(
            (Shard::of_folder("03-of-6"), Shard::of_folder("7-of-6"), Shard::of_folder("x")),
            (None, None, None)
        );
    }

    fn auto(variables: &[(&str, &str)]) -> Result<String, String> {
        let find = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Shard::auto(find).map(|shard| shard.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn schedulers_say_which_shard_it_is() {
        let slurm = |id, min, max, step, count| {
            auto(&[
                ("SLURM_ARRAY_TASK_ID", id),
                ("SLURM_ARRAY_TASK_MIN", min),
                ("SLURM_ARRAY_TASK_MAX", max),
                ("SLURM_ARRAY_TASK_STEP", step),
                ("SLURM_ARRAY_TASK_COUNT", count),
            ])
        };
        assert_eq!(slurm("3", "1", "6", "1", "6").unwrap(), "3/6");
        assert_eq!(slurm("0", "0", "5", "1", "6").unwrap(), "1/6");
        assert_eq!(slurm("4", "0", "10", "2", "6").unwrap(), "3/6");
        assert!(slurm("5", "2", "5", "1", "2").unwrap_err().contains("gaps"));
        assert!(slurm("x", "2", "5", "1", "2").unwrap_err().contains("whole number"));
        assert_eq!(auto(&[("JOB_COMPLETION_INDEX", "0"), ("COMPLETIONS", "3")]).unwrap(), "1/3");
        let aws = [("AWS_BATCH_JOB_ARRAY_INDEX", "2"), ("AWS_BATCH_JOB_ARRAY_SIZE", "3")];
        assert_eq!(auto(&aws).unwrap(), "3/3");
        assert!(auto(&[("JOB_COMPLETION_INDEX", "0")]).unwrap_err().contains("COMPLETIONS is not set"));
        assert!(auto(&[("SLURM_ARRAY_TASK_ID", "1")]).unwrap_err().contains("SLURM_ARRAY_TASK_MIN is not"));
        assert!(auto(&[]).unwrap_err().contains("none of them is set"));
    }

    #[test]
    fn the_shard_is_no_part_of_the_command() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(without_shard(&words("lra --shard 1/4 --quick --shard=2/4")), words("lra --quick"));
    }

    proptest! {
        #[test]
        fn every_cell_is_dealt_once_and_no_hand_waits_longer_than_the_bound(
            costs in prop::collection::vec(0u64..1_000_000, 0..200),
            count in 1usize..40,
        ) {
            let owners = distribute(&costs, count);
            prop_assert_eq!(owners.len(), costs.len());
            prop_assert!(owners.iter().all(|owner| *owner < count));
            let mut loads = vec![0u64; count];
            owners.iter().zip(&costs).for_each(|(owner, cost)| loads[*owner] += cost);
            let most = loads.iter().max().copied().unwrap_or(0);
            let ideal = (costs.iter().sum::<u64>().div_ceil(count as u64)).max(costs.iter().max().copied().unwrap_or(0));
            prop_assert!(most <= 2 * ideal, "{} where {} is ideal", most, ideal);
        }
    }

    #[test]
    fn ten_thousand_cells_on_five_hundred_shards_end_within_a_tenth_of_the_ideal() {
        for seed in 0..5 {
            let mut stream = RngStream::new(seed, "deal");
            // hours by a factor of 50, as lengths of 1024 to 8192 with linear and quadratic mechanisms make them
            let costs: Vec<u64> =
                (0..10_000).map(|_| (3.6e6 * (stream.uniform(0.0, 50f64.ln())).exp()) as u64).collect();
            let mut loads = vec![0u64; 500];
            distribute(&costs, 500).into_iter().zip(&costs).for_each(|(owner, cost)| loads[owner] += cost);
            let ideal = costs.iter().sum::<u64>() as f64 / 500.0;
            let most = *loads.iter().max().unwrap() as f64;
            assert!(most <= 1.1 * ideal, "{}", most / ideal);
        }
    }
}
