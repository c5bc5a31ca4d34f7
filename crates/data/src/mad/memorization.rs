//! MAD's memorization: a fixed map from keys to values, which only training shows.

use crate::position_labels::{Alphabet, Draw, PositionExample, PositionRule, PositionTask, Reading};
use crate::{DataSetEntry, position_files};
use effattn_kernel::device::rng::RngStream;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    records: "any number, drawn from a seed; MAD trains on 256",
    ..position_files::set(
        "memorization",
        "MAD: memorization",
        "the value of a key by a map that is the same in all examples",
        PositionTask {
            reading: Reading::There,
            alphabet: Alphabet { vocabulary: 256, noise: 0.0 },
            train: &["32"],
            test: &["32"],
            check: |segment, Alphabet { vocabulary, noise }| {
                super::check_recall(segment, 2)?;
                if noise > 0.0 {
                    return Err("this task has no noise; leave --noise out".to_owned());
                }
                match vocabulary {
                    0..=5 => Err(format!(
                        "a vocabulary of {vocabulary} has no keys to tell apart; take --vocabulary 6 or more"
                    )),
                    _ => Ok(()),
                }
            },
            draw,
            rules: &[
                PositionRule::definition("map", "the map", |question| {
                    let key = *question.tokens.get(question.position().checked_sub(1)?)?;
                    value(key, question.alphabet.vocabulary)
                }),
                PositionRule::floor("one-value", "always the same value", |question| {
                    value(0, question.alphabet.vocabulary)
                }),
            ],
        },
    )
};

/// Seed of the map.
const SEED: u64 = 12_345;

/// The value of `key`. Keys are 0..V/2-1, values V/2-1..V-1, the last id asks.
fn value(key: u32, vocabulary: usize) -> Option<u32> {
    let first = vocabulary / 2 - 1;
    let draw = || first + RngStream::new(SEED, &format!("{vocabulary}/{key}")).below(vocabulary - 1 - first);
    ((key as usize) < first).then(|| draw() as u32)
}

fn draw(Draw { segment, alphabet: Alphabet { vocabulary, .. }, rng, .. }: Draw) -> PositionExample {
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for _ in 0..segment.longest / 2 {
        let key = rng.below(vocabulary / 2 - 1) as u32;
        tokens.extend([key, vocabulary as u32 - 1]);
        labels.extend(value(key, vocabulary).map(|value| (tokens.len() - 1, value)));
    }
    PositionExample { tokens, labels }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::Segment;

    /// Share of the test's keys that 256 examples show: the published ceilings.
    #[test]
    fn ceilings_are_the_published_ones() {
        let (task, segment) = (SET.positions().unwrap(), "32".parse::<Segment>().unwrap());
        for (vocabulary, ceiling) in [(256, 1.0), (2048, 0.988), (8192, 0.640)] {
            let alphabet = Alphabet { vocabulary, noise: 0.0 };
            let keys = |split, count| -> Vec<u32> {
                let draw = |index| task.example((&segment, alphabet), (0, split), index).tokens;
                (0..count).flat_map(draw).step_by(2).collect()
            };
            let known: std::collections::BTreeSet<u32> = keys(Split::Train, 256).into_iter().collect();
            let asked = keys(Split::Test, 1280);
            let share = asked.iter().filter(|key| known.contains(key)).count() as f64 / asked.len() as f64;
            assert!((share - ceiling).abs() < 0.02, "{vocabulary}: {share}");
        }
    }
}
