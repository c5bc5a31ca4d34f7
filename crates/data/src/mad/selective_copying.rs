//! MAD's selective copying: data tokens among blanks, to be written down in their order behind the copy token.

use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading, Segment,
};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "selective-copying",
    "MAD: selective copying",
    "the tokens among blanks, in their order",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 16, noise: 0.0 },
        train: &["256:16"],
        test: &["256:16"],
        check,
        draw,
        rules: &[
            PositionRule::definition("copy", "the tokens that are no blanks", copy),
            PositionRule::floor("first-token", "the first token that is no blank", |question| {
                data(question).next()
            }),
        ],
    },
);

fn check(segment: &Segment, Alphabet { vocabulary, noise }: Alphabet) -> Result<(), String> {
    segment.one_length()?;
    let len = segment.longest;
    let Some(items) = segment.items else {
        return Err(format!(
            "segment {segment}: selective copying needs a number of tokens; write {len}:{}",
            (len / 16).max(1)
        ));
    };
    if 2 * items + 1 > len {
        return Err(format!(
            "segment {segment}: {items} tokens and their copies need a length of {} or more",
            2 * items + 1
        ));
    }
    if noise > 0.0 {
        return Err("this task has no noise; leave --noise out".to_owned());
    }
    match vocabulary {
        0..=3 => Err(format!(
            "a vocabulary of {vocabulary} has no tokens to tell apart; take --vocabulary 4 or more"
        )),
        _ => Ok(()),
    }
}

/// Data tokens are 0..V-2, then come the blank and the copy token. Every blank stands before a data token, each as likely.
fn draw(Draw { segment, alphabet: Alphabet { vocabulary, .. }, rng, .. }: Draw) -> PositionExample {
    let (len, items) = (segment.longest, segment.items.unwrap_or(1));
    let (blank, copy) = (vocabulary as u32 - 2, vocabulary as u32 - 1);
    let data: Vec<u32> = (0..items).map(|_| rng.below(vocabulary - 2) as u32).collect();
    let mut blanks = vec![0; items];
    (0..len - 2 * items - 1).for_each(|_| blanks[rng.below(items)] += 1);
    let mut tokens = Vec::with_capacity(len);
    for (token, blanks) in data.iter().zip(blanks) {
        tokens.resize(tokens.len() + blanks, blank);
        tokens.push(*token);
    }
    tokens.push(copy);
    let first = tokens.len();
    tokens.resize(len, blank);
    PositionExample { tokens, labels: (first..).zip(data).collect() }
}

fn data<'a>(question: &'a Question) -> impl Iterator<Item = u32> + 'a {
    let blank = question.alphabet.vocabulary as u32 - 2;
    question.tokens.iter().copied().filter(move |token| *token < blank)
}

fn copy(question: &Question) -> Option<u32> {
    data(question).nth(question.number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::score;

    #[test]
    fn places_and_the_floor_have_the_published_law() {
        let task = SET.positions().unwrap();
        let segment: Segment = "256:16".parse().unwrap();
        let draw = |index| task.example((&segment, task.alphabet), (0, Split::Test), index);
        let examples: Vec<_> = (0..3000).map(draw).collect();
        for item in [0, 7, 15] {
            let place = |example: &PositionExample| {
                let data = example.tokens.iter().enumerate().filter(|(_, token)| **token < 14);
                data.map(|(place, _)| place as f64).nth(item).unwrap()
            };
            let mean = examples.iter().map(place).sum::<f64>() / examples.len() as f64;
            let expected = 223.0 / 16.0 * (item + 1) as f64 + item as f64;
            assert!((mean - expected).abs() < 0.6, "token {item}: {mean} instead of {expected}");
        }
        let uniform = score(&PositionRule { answer: |_| Some(3), ..task.rules[1] }, &examples, task.alphabet);
        assert!((uniform - 1.0 / 14.0).abs() < 0.005, "{uniform}");
        assert!(task.check(&["16:8".parse().unwrap()], task.alphabet).unwrap_err().contains("17 or more"));
    }
}
