//! MAD's noisy in-context recall: as in-context recall, with places of pairs that hold noise.

use super::in_context_recall::pairs;
use super::{check_recall, look_up, most_frequent, recall_example, values_before};
use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading,
};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "noisy-recall",
    "MAD: noisy in-context recall",
    "the value that a repeated key had before, with noise between the pairs",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 32, noise: 0.2 },
        train: &["128"],
        test: &["128"],
        check: |segment, Alphabet { vocabulary, noise }| {
            check_recall(segment, 4)?;
            if noise >= 1.0 {
                return Err("a share of noise of 1 leaves no pairs; take --noise 0.8 or less".to_owned());
            }
            match vocabulary < NOISE + 4 {
                true => Err(format!(
                    "a vocabulary of {vocabulary} has {NOISE} noise tokens and no keys to tell apart; take --vocabulary {} or more",
                    NOISE + 4
                )),
                false => Ok(()),
            }
        },
        draw,
        rules: &[
            PositionRule::definition("look-up", "the value behind the key before", |question| {
                look_up(question, usize::MAX)
            }),
            PositionRule::floor("last-value", "the last value", |question| values(question).next()),
            PositionRule::floor("most-frequent", "the most frequent value so far", |question| {
                most_frequent(values(question))
            }),
            PositionRule::floor(
                "within-32",
                "the value behind the key before, at most 32 positions back",
                |question| look_up(question, 32),
            ),
        ],
    },
);

/// The last ids are noise.
const NOISE: usize = 16;

fn values<'a>(question: &'a Question) -> impl Iterator<Item = u32> + 'a {
    let own = question.alphabet.vocabulary - NOISE;
    values_before(question, move |token| (own / 2..own).contains(&(token as usize)))
}

fn draw(Draw { segment, alphabet: Alphabet { vocabulary, noise }, split, rng }: Draw) -> PositionExample {
    let own = vocabulary - NOISE;
    let (tokens, asked) = pairs(segment.longest, own, rng, |rng| {
        let token = |number: usize| (own + number) as u32;
        (rng.uniform(0.0, 1.0) < noise).then(|| [token(rng.below(NOISE)), token(rng.below(NOISE))])
    });
    recall_example(tokens, asked, split)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::{Segment, score};

    #[test]
    fn floors_are_the_published_ones() {
        let task = SET.positions().unwrap();
        let segment: Segment = "128".parse().unwrap();
        let draw = |index| task.example((&segment, task.alphabet), (0, Split::Test), index);
        let examples: Vec<_> = (0..1280).map(draw).collect();
        let rate = |name: &str| {
            let rule = task.rules.iter().find(|rule| rule.name == name).unwrap();
            score(rule, &examples, task.alphabet)
        };
        for (name, expected) in [("last-value", 0.25), ("most-frequent", 0.32), ("within-32", 0.88)] {
            assert!((rate(name) - expected).abs() < 0.012, "{name}: {}", rate(name));
        }
        let noise = examples.iter().flat_map(|example| &example.tokens).filter(|token| **token >= 16).count();
        let share = noise as f64 / (1280.0 * 126.0);
        assert!((share - 0.2).abs() < 0.01, "{share}");
    }
}
