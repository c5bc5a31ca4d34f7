//! MAD's in-context recall: keys and values in pairs, keys repeated; the value behind a repeated key.

use super::{check_recall, look_up, most_frequent, recall_example, values_before};
use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading, Segment,
};
use crate::{DataSetEntry, position_files};
use effattn_kernel::device::rng::RngStream;

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "in-context-recall",
    "MAD: in-context recall",
    "the value that a repeated key had before",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 16, noise: 0.0 },
        train: &["128"],
        test: &["128"],
        check,
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

fn check(segment: &Segment, alphabet: Alphabet) -> Result<(), String> {
    check_recall(segment, 4)?;
    if alphabet.noise > 0.0 {
        return Err("this task has no noise; leave --noise out, or take noisy-recall".to_owned());
    }
    match alphabet.vocabulary {
        0..=3 => Err(format!(
            "a vocabulary of {} has no keys to tell apart; take --vocabulary 4 or more",
            alphabet.vocabulary
        )),
        _ => Ok(()),
    }
}

fn values<'a>(question: &'a Question) -> impl Iterator<Item = u32> + 'a {
    let half = (question.alphabet.vocabulary / 2) as u32;
    values_before(question, move |token| token >= half)
}

fn draw(Draw { segment, alphabet, split, rng }: Draw) -> PositionExample {
    let (tokens, asked) = pairs(segment.longest, alphabet.vocabulary, rng, |_| None);
    recall_example(tokens, asked, split)
}

/// `len` tokens in pairs of a key and its value, drawn at the key's first use, and the positions of repeated keys. A pair may be
/// replaced by what `noise` gives. The last key is one that was seen.
pub(super) fn pairs(
    len: usize,
    vocabulary: usize,
    rng: &mut RngStream,
    mut noise: impl FnMut(&mut RngStream) -> Option<[u32; 2]>,
) -> (Vec<u32>, Vec<usize>) {
    let half = vocabulary / 2;
    let mut value_of: Vec<Option<u32>> = vec![None; half];
    let mut seen: Vec<usize> = Vec::new();
    let (mut tokens, mut asked) = (Vec::with_capacity(len), Vec::new());
    for number in 0..len / 2 {
        let last = number + 1 == len / 2;
        let only = number + 2 == len / 2 && seen.is_empty(); // a key must have been seen
        if let Some(noise) = (!last && !only).then(|| noise(rng)).flatten() {
            tokens.extend(noise);
            continue;
        }
        let key = if last { seen[rng.below(seen.len())] } else { rng.below(half) };
        let value = match value_of[key] {
            Some(value) => {
                asked.push(tokens.len());
                value
            }
            None => {
                seen.push(key);
                *value_of[key].insert((half + rng.below(vocabulary - half)) as u32)
            }
        };
        tokens.extend([key as u32, value]);
    }
    (tokens, asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::score;

    #[test]
    fn floors_are_the_published_ones() {
        let task = SET.positions().unwrap();
        let segment: Segment = "128".parse().unwrap();
        let draw = |split, index| task.example((&segment, task.alphabet), (0, split), index);
        let examples: Vec<_> = (0..1280).map(|index| draw(Split::Test, index)).collect();
        let rate = |name: &str| {
            let rule = task.rules.iter().find(|rule| rule.name == name).unwrap();
            score(rule, &examples, task.alphabet)
        };
        for (name, expected) in [("last-value", 0.26), ("most-frequent", 0.33), ("within-32", 0.92)] {
            // measured on a few hundred examples of the original generator
            assert!((rate(name) - expected).abs() < 0.016, "{name}: {}", rate(name));
        }
        // 63 of 8 * 56 repeated keys follow themselves, and one in eight of the others has the same value
        let same = 63.0 / (8.0 * 56.0);
        assert!((rate("last-value") - (same + (1.0 - same) / 8.0)).abs() < 0.006, "{}", rate("last-value"));
        assert!(examples.iter().all(|example| example.tokens.len() == 127));
        let trained = draw(Split::Train, 0);
        assert_eq!(trained.labels.len(), 127, "every next token");
        assert!(trained.labels.windows(2).all(|pair| trained.tokens[pair[1].0] == pair[0].1));
    }
}
