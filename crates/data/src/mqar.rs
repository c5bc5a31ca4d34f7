//! Multi-query associative recall (Zoology, Arora et al. 2023): key-value pairs, then the keys again in another order.

use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Question, Reading, Segment,
};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "mqar",
    "MQAR",
    "the values of keys that came with them earlier in the sequence",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 256, noise: 1.0 },
        train: &["64:4", "64:8", "64:16"],
        test: &["64:4", "64:8", "64:16", "128:32"],
        check,
        draw,
        rules: &[
            PositionRule::definition("look-up", "the value behind the key", look_up),
            PositionRule::floor("context-value", "the first value of the sequence", |question| {
                question.tokens.get(1).copied()
            }),
            PositionRule::floor("same-order", "value t for query t", |question| {
                question.tokens.get(2 * question.number + 1).copied()
            }),
            PositionRule::floor(
                "window-16",
                "the value behind the key, at most 16 positions back",
                within::<16>,
            ),
            PositionRule::floor(
                "window-32",
                "the value behind the key, at most 32 positions back",
                within::<32>,
            ),
        ],
    },
);

/// Power of the law of gaps: weights (s + 1)^(POWER - 1).
const POWER: f64 = 0.01;

fn check(segment: &Segment, Alphabet { vocabulary, .. }: Alphabet) -> Result<(), String> {
    segment.one_length()?;
    let len = segment.longest;
    let Some(pairs) = segment.items else {
        return Err(format!(
            "segment {segment}: MQAR needs a number of pairs; write {len}:{}",
            (len / 4).max(1)
        ));
    };
    if !len.is_multiple_of(2) {
        return Err(format!(
            "segment {segment}: a length of {len} is odd; MQAR's are even, such as {}",
            len + 1
        ));
    }
    if 4 * pairs > len {
        let most = len / 4;
        return Err(format!(
            "segment {segment}: {pairs} pairs and their queries need a length of {}; at {len} there are at most {most}",
            4 * pairs
        ));
    }
    let keys = (vocabulary / 2).saturating_sub(1);
    if pairs > keys {
        return Err(format!(
            "segment {segment}: a vocabulary of {vocabulary} has {keys} keys, fewer than {pairs} pairs; take --vocabulary {} or more",
            2 * pairs + 2
        ));
    }
    Ok(())
}

/// Keys are 1..V/2, values V/2..V. Query j comes at slot s_j behind the pairs: slots are drawn one after the other without
/// repetition, with probability proportional to their weights, and the j-th belongs to pair j.
fn draw(draw: Draw) -> PositionExample {
    let Draw { segment, alphabet: Alphabet { vocabulary, noise }, rng, .. } = draw;
    let (len, pairs) = (segment.longest, segment.items.unwrap_or(0));
    let half = vocabulary / 2;
    let keys: Vec<usize> = rng.permutation(half - 1).into_iter().take(pairs).map(|key| 1 + key).collect();
    let values: Vec<usize> =
        rng.permutation(vocabulary - half).into_iter().take(pairs).map(|value| half + value).collect();
    let mut tokens = vec![0; len];
    for (j, (&key, &value)) in keys.iter().zip(&values).enumerate() {
        (tokens[2 * j], tokens[2 * j + 1]) = (key as u32, value as u32);
    }
    // the order of exponential times with these rates is that of draws without repetition
    let time = |s: usize| -(1.0 - rng.uniform(0.0, 1.0)).ln() * ((s + 1) as f64).powf(1.0 - POWER);
    let mut slots: Vec<(f64, usize)> = (0..(len - 2 * pairs) / 2).map(time).zip(0..).collect();
    slots.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = vec![true; len];
    free[..2 * pairs].fill(false);
    let mut labels = Vec::with_capacity(pairs);
    for ((_, slot), (&key, &value)) in slots.into_iter().zip(keys.iter().zip(&values)) {
        let position = 2 * pairs + 2 * slot;
        (tokens[position], free[position]) = (key as u32, false);
        labels.push((position, value as u32));
    }
    labels.sort_unstable();
    for position in (0..len).filter(|&position| free[position]) {
        if noise > 0.0 && rng.uniform(0.0, 1.0) < noise {
            tokens[position] = rng.below(vocabulary) as u32;
        }
    }
    PositionExample { tokens, labels }
}

/// Position of the value that is asked for: every pair has one query.
fn place(question: &Question) -> Option<usize> {
    let (pairs, key) = (question.positions.len(), question.tokens[question.position()]);
    (0..pairs).find(|j| question.tokens[2 * j] == key).map(|j| 2 * j + 1)
}

fn look_up(question: &Question) -> Option<u32> {
    place(question).map(|place| question.tokens[place])
}

fn within<const W: usize>(question: &Question) -> Option<u32> {
    place(question).filter(|place| question.position() - place <= W).map(|place| question.tokens[place])
}

#[cfg(test)]
mod tests;
