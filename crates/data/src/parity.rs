//! Parity of a row of bits (Grazzi et al. 2024, after Deletang et al. 2022): one label, at the last bit.

use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Reading, draw_len,
};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "parity",
    "Parity",
    "whether a row of bits has an odd number of ones",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 3, noise: 0.0 },
        train: &["3..40"],
        test: &["3..40", "64", "128", "256"],
        check: |segment, alphabet| {
            segment.without_items()?;
            alphabet.fixed(3)?;
            match segment.shortest {
                0 | 1 => Err(format!(
                    "segment {segment}: a row of bits and its answer have at least 2 tokens; write 2..{}",
                    segment.longest.max(2)
                )),
                _ => Ok(()),
            }
        },
        draw,
        rules: &[
            PositionRule::definition("count", "the number of ones, modulo 2", |question| {
                Some(answer(question.tokens))
            }),
            PositionRule::floor("last-bit", "the last bit", |question| question.tokens.last().copied()),
        ],
    },
);

/// Tokens 1 and 2 are bits 0 and 1; so are the answers.
fn answer(tokens: &[u32]) -> u32 {
    1 + tokens.iter().filter(|token| **token == 2).count() as u32 % 2
}

/// The length counts the answer, which stands at the last bit as its label.
fn draw(Draw { segment, rng, .. }: Draw) -> PositionExample {
    let len = draw_len(segment, rng);
    let tokens: Vec<u32> = (0..len - 1).map(|_| 1 + rng.below(2) as u32).collect();
    let labels = vec![(len - 2, answer(&tokens))];
    PositionExample { tokens, labels }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::Segment;

    #[test]
    fn lengths_and_answers_have_the_published_law() {
        let (task, segment) = (SET.positions().unwrap(), "3..40".parse::<Segment>().unwrap());
        let count = 8000;
        let examples: Vec<_> = (0..count)
            .map(|index| task.example((&segment, task.alphabet), (0, Split::Train), index))
            .collect();
        let mean = |of: &dyn Fn(&PositionExample) -> f64| examples.iter().map(of).sum::<f64>() / count as f64;
        // a uniform length of 38 values has a deviation of 11
        assert!(
            (mean(&|example| example.tokens.len() as f64 + 1.0) - 21.5).abs()
                < 4.0 * 11.0 / (count as f64).sqrt()
        );
        assert!(
            (mean(&|example| f64::from(example.labels[0].1)) - 1.5).abs() < 4.0 * 0.5 / (count as f64).sqrt()
        );
    }

    #[test]
    fn answers_are_those_of_the_original_generator() {
        for (tokens, expected) in
            [(&[1, 1, 2][..], 2), (&[2, 2, 2, 1, 1, 1, 2, 2, 1, 2, 1, 2], 2), (&[2, 1, 2, 1], 1)]
        {
            assert_eq!(answer(tokens), expected, "{tokens:?}");
        }
        let task = SET.positions().unwrap();
        assert!(task.check(&["1".parse().unwrap()], task.alphabet).unwrap_err().contains("at least 2"));
        assert!(task.check(&["8:2".parse().unwrap()], task.alphabet).unwrap_err().contains("no pairs"));
    }
}
