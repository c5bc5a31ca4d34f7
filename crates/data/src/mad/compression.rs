//! MAD's compression: a row of tokens must be in the vector of its last one, from which a small decoder reads all of them.

use crate::position_labels::{Alphabet, Draw, PositionExample, PositionRule, PositionTask, Reading, Segment};
use crate::{DataSetEntry, position_files};

/// Tokens to be decoded from the last vector.
pub static SET: DataSetEntry = position_files::set(
    "compression",
    "MAD: compression",
    "all tokens of a row, from the vector of the last one",
    PositionTask {
        reading: Reading::AtTheEnd,
        alphabet: Alphabet { vocabulary: 16, noise: 0.0 },
        train: &["32"],
        test: &["32"],
        check,
        draw,
        rules: &[
            PositionRule::definition("copy", "the token at the position", |question| {
                question.tokens.get(question.position()).copied()
            }),
            PositionRule::floor("constant", "always the same token, and the last one", |question| {
                let last = question.tokens.len() - 1;
                Some(if question.position() == last { question.tokens[last] } else { 0 })
            }),
        ],
    },
);

fn check(segment: &Segment, Alphabet { vocabulary, noise }: Alphabet) -> Result<(), String> {
    segment.without_items()?;
    segment.one_length()?;
    if segment.longest < 2 {
        return Err(format!("segment {segment}: a token and the last one are a length of 2 or more"));
    }
    if noise > 0.0 {
        return Err("this task has no noise; leave --noise out".to_owned());
    }
    match vocabulary {
        0..=2 => Err(format!(
            "a vocabulary of {vocabulary} has no tokens to tell apart; take --vocabulary 3 or more"
        )),
        _ => Ok(()),
    }
}

/// Tokens are 0..V-1, uniform; the id V-1 stands at the end.
fn draw(Draw { segment, alphabet: Alphabet { vocabulary, .. }, rng, .. }: Draw) -> PositionExample {
    let mut tokens: Vec<u32> = (1..segment.longest).map(|_| rng.below(vocabulary - 1) as u32).collect();
    tokens.push(vocabulary as u32 - 1);
    PositionExample { labels: tokens.iter().copied().enumerate().collect(), tokens }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    #[test]
    fn tokens_are_uniform_and_all_of_them_are_asked_for() {
        let task = SET.positions().unwrap();
        let segment: Segment = "32".parse().unwrap();
        let mut counts = [0.0f64; 16];
        for index in 0..1280 {
            let example = task.example((&segment, task.alphabet), (0, Split::Test), index);
            assert_eq!((example.tokens.len(), example.tokens[31], example.labels.len()), (32, 15, 32));
            assert!(example.labels.iter().all(|(position, label)| example.tokens[*position] == *label));
            example.tokens.iter().for_each(|token| counts[*token as usize] += 1.0);
        }
        // 31 * 1280 draws of 15 tokens: a deviation of 1.9 %
        let mean = 31.0 * 1280.0 / 15.0;
        assert!(counts[..15].iter().all(|count| (count / mean - 1.0).abs() < 0.08), "{counts:?}");
        let refused = |text: &str, vocabulary| {
            task.check(&[text.parse().unwrap()], Alphabet { vocabulary, noise: 0.0 }).is_err()
        };
        assert!(refused("8..16", 16) && refused("32:4", 16) && refused("1", 16) && refused("32", 2));
    }
}
