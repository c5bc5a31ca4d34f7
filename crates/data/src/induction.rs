//! Induction heads (Gu and Dao 2023): what came behind the trigger the first time. The published generator is not available; this one
//! follows Safari's, with one label, at the end.

use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading, draw_len,
};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "induction",
    "Induction heads",
    "the token that came behind the trigger the first time",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 16, noise: 0.0 },
        train: &["64"],
        test: &["64", "128", "256", "512", "1024"],
        check: |segment, Alphabet { vocabulary, .. }| {
            segment.without_items()?;
            if segment.shortest < 4 {
                return Err(format!(
                    "segment {segment}: trigger, answer and trigger need a length of 4 or more"
                ));
            }
            match vocabulary {
                0..=3 => Err(format!(
                    "a vocabulary of {vocabulary} has no ordinary tokens to tell apart; take --vocabulary 4 or more"
                )),
                _ => Ok(()),
            }
        },
        draw,
        rules: &[
            PositionRule::definition("look-up", "the token behind the trigger", look_up),
            PositionRule::floor("first-token", "the first token of the sequence", |question| {
                question.tokens.first().copied()
            }),
        ],
    },
);

/// Ordinary tokens are 1..V-1, the trigger is V-1. It stands at a place whose next token is an ordinary one, and at the end.
fn draw(Draw { segment, alphabet: Alphabet { vocabulary, .. }, rng, .. }: Draw) -> PositionExample {
    let len = draw_len(segment, rng);
    let trigger = vocabulary as u32 - 1;
    let mut tokens: Vec<u32> = (0..len).map(|_| 1 + rng.below(vocabulary - 2) as u32).collect();
    let place = rng.below(len - 2);
    (tokens[place], tokens[len - 1]) = (trigger, trigger);
    let labels = vec![(len - 1, tokens[place + 1])];
    PositionExample { tokens, labels }
}

fn look_up(question: &Question) -> Option<u32> {
    let trigger = question.tokens.last()?;
    let place = question.tokens.iter().position(|token| token == trigger)?;
    question.tokens.get(place + 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::Segment;

    #[test]
    fn the_trigger_stands_anywhere_and_its_answer_is_uniform() {
        let task = SET.positions().unwrap();
        let segment: Segment = "64".parse().unwrap();
        let count = 14_000;
        let (mut places, mut answers) = (Vec::new(), [0.0f64; 16]);
        for index in 0..count {
            let PositionExample { tokens, labels } =
                task.example((&segment, task.alphabet), (0, Split::Test), index);
            let triggers: Vec<usize> = (0..64).filter(|at| tokens[*at] == 15).collect();
            assert!(matches!(triggers[..], [_, 63]) && labels.len() == 1 && labels[0].0 == 63, "{tokens:?}");
            assert!(tokens.iter().all(|token| *token > 0));
            places.push(triggers[0] as f64);
            answers[labels[0].1 as usize] += 1.0;
        }
        // places 0 to 61, uniform: a mean of 30.5, a deviation of 17.9
        let mean = places.iter().sum::<f64>() / count as f64;
        assert!((mean - 30.5).abs() < 4.0 * 17.9 / (count as f64).sqrt(), "{mean}");
        assert!(places.contains(&0.0) && places.contains(&61.0));
        // 14 answers, 1000 of each: a deviation of 30
        assert!(answers[1..15].iter().all(|count| (count - 1000.0).abs() < 130.0), "{answers:?}");
        assert!(task.check(&["3".parse().unwrap()], task.alphabet).unwrap_err().contains("4 or more"));
    }
}
