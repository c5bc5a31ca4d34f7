//! MAD's fuzzy in-context recall: keys and values of one to three tokens; the tokens of the value behind a repeated key.

use super::recall_example;
use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading,
};
use crate::{DataSetEntry, Split, position_files};
use effattn_kernel::device::rng::RngStream;

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "fuzzy-recall",
    "MAD: fuzzy in-context recall",
    "the tokens of the value that a key of several tokens had before",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 16, noise: 0.0 },
        train: &["128"],
        test: &["128"],
        check: |segment, Alphabet { vocabulary, noise }| {
            super::check_recall(segment, 4 * LONGEST + 2)?;
            if noise > 0.0 {
                return Err("this task has no noise; leave --noise out".to_owned());
            }
            match (vocabulary / 2).saturating_sub(1) < LONGEST {
                true => Err(format!(
                    "a vocabulary of {vocabulary} has too few tokens for keys of {LONGEST}; take --vocabulary {} or more",
                    2 * LONGEST + 2
                )),
                false => Ok(()),
            }
        },
        draw,
        rules: &[
            PositionRule::definition("look-up", "the value behind the key before", look_up),
            PositionRule::floor("last-value", "the last token of a value", |question| {
                let mut before = question.tokens[..question.position()].iter().rev();
                before.find(|token| !is_key(**token, question.alphabet)).copied()
            }),
        ],
    },
);

/// Most tokens of a key or value.
const LONGEST: usize = 3;

/// Keys are 0..V/2-1, values V/2-1..V-1, the last id pads.
fn is_key(token: u32, alphabet: Alphabet) -> bool {
    (token as usize) < alphabet.vocabulary / 2 - 1
}

/// An ordered choice of different tokens of `from..to`, of every length as likely, or of length `len`.
fn motif((from, to): (usize, usize), len: Option<usize>, rng: &mut RngStream) -> Vec<u32> {
    let len = len.unwrap_or_else(|| 1 + rng.below(LONGEST));
    rng.permutation(to - from).into_iter().take(len).map(|token| (from + token) as u32).collect()
}

/// Pairs are added while there is room, one of them (the probe) somewhere among them and at the end again; padding in front. Keys of
/// the test have three tokens.
fn draw(Draw { segment, alphabet, split, rng }: Draw) -> PositionExample {
    let (len, half, vocabulary) = (segment.longest, alphabet.vocabulary / 2 - 1, alphabet.vocabulary);
    let key_len = (split != Split::Train).then_some(LONGEST);
    let mut known: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
    let mut pair = |rng: &mut RngStream| {
        let key = motif((0, half), key_len, rng);
        match known.iter().find(|(known, _)| *known == key) {
            Some(pair) => pair.clone(),
            None => {
                known.push((key, motif((half, vocabulary - 1), None, rng)));
                known[known.len() - 1].clone()
            }
        }
    };
    let probe = pair(rng);
    let size = |(key, value): &(Vec<u32>, Vec<u32>)| key.len() + value.len();
    let (mut pairs, mut filled) = (vec![probe.clone()], size(&probe));
    while filled < len - size(&probe) - 2 * LONGEST {
        let next = pair(rng);
        filled += size(&next);
        pairs.push(next);
    }
    let place = rng.below(pairs.len());
    pairs.swap(0, place);
    pairs.push(probe);
    let (mut tokens, mut asked) =
        (vec![vocabulary as u32 - 1; len + 1 - filled - size(&pairs[pairs.len() - 1])], Vec::new());
    for (number, (key, value)) in pairs.iter().enumerate() {
        tokens.extend(key);
        if pairs[..number].iter().any(|(before, _)| before == key) {
            asked.extend((0..value.len()).map(|item| tokens.len() - 1 + item));
        }
        tokens.extend(value);
    }
    recall_example(tokens, asked, split)
}

/// Runs of key tokens and of value tokens take turns: the value behind the same run of key tokens.
fn look_up(question: &Question) -> Option<u32> {
    let Question { tokens, alphabet, .. } = *question;
    let runs: Vec<&[u32]> = tokens[..=question.position()]
        .chunk_by(|a, b| is_key(*a, alphabet) == is_key(*b, alphabet))
        .collect();
    let (last, item) = match runs.last()? {
        run if is_key(run[0], alphabet) => (runs.len() - 1, 0),
        run => (runs.len().checked_sub(2)?, run.len()),
    };
    let key = runs[last];
    let place = (0..last).find(|run| runs[*run] == key)?;
    runs.get(place + 1)?.get(item).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position_labels::{Segment, score};

    #[test]
    fn examples_have_the_form_of_the_original_generator() {
        let task = SET.positions().unwrap();
        let segment: Segment = "128".parse().unwrap();
        for index in 0..300 {
            let PositionExample { tokens, labels } =
                task.example((&segment, task.alphabet), (0, Split::Test), index);
            assert_eq!(tokens.len(), 128);
            let padding = tokens.iter().take_while(|token| **token == 15).count();
            assert!(
                (1..=12).contains(&padding) && tokens[padding..].iter().all(|token| *token < 15),
                "{tokens:?}"
            );
            let keys = tokens[padding..].chunk_by(|a, b| (*a < 7) == (*b < 7)).step_by(2);
            assert!(keys.clone().all(|key| key.len() == 3), "{tokens:?}");
            assert_eq!(
                labels.last().map(|label| label.0),
                Some(127),
                "the probe's last value ends the sequence"
            );
        }
        let uniform = |question: &Question| Some(7 + (question.position() * 7919 % 8) as u32);
        let examples: Vec<_> =
            (0..2000).map(|index| task.example((&segment, task.alphabet), (0, Split::Test), index)).collect();
        let share = score(&PositionRule { answer: uniform, ..task.rules[1] }, &examples, task.alphabet);
        assert!((share - 0.125).abs() < 0.02, "{share}");
    }
}
