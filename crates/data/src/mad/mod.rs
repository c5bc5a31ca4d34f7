//! Tasks of MAD (Poli et al. 2024): recall, with noise and with fuzzy keys, selective copying, compression, memorization. One file each.

pub mod compression;
pub mod fuzzy_recall;
pub mod in_context_recall;
pub mod memorization;
pub mod noisy_recall;
pub mod selective_copying;

use crate::Split;
use crate::position_labels::{PositionExample, Question, Segment};

/// Refuses what MAD's recall tasks have not.
fn check_recall(segment: &Segment, least: usize) -> Result<(), String> {
    segment.without_items()?;
    segment.one_length()?;
    match segment.longest.is_multiple_of(2) && segment.longest >= least {
        true => Ok(()),
        false => Err(format!(
            "segment {segment}: the length must be even, {least} or more; write {}",
            segment.longest.next_multiple_of(2).max(least)
        )),
    }
}

/// `tokens` without the last one, labelled as MAD does: at every position where models are trained, at `asked` where they are tested.
fn recall_example(mut tokens: Vec<u32>, asked: Vec<usize>, split: Split) -> PositionExample {
    let label = |position: usize| (position, tokens[position + 1]);
    let labels = match split {
        Split::Train => (0..tokens.len() - 1).map(label).collect(),
        Split::Validation | Split::Test => asked.into_iter().map(label).collect(),
    };
    tokens.pop();
    PositionExample { tokens, labels }
}

/// Values that stood behind keys before the position asked for, the last one first. `values` says which tokens are values.
fn values_before<'a>(
    question: &'a Question,
    values: impl Fn(u32) -> bool + 'a,
) -> impl Iterator<Item = u32> + 'a {
    question.tokens[..question.position()].iter().rev().copied().filter(move |token| values(*token))
}

/// The value behind an earlier place of the key at the position asked for, at most `within` positions back.
fn look_up(question: &Question, within: usize) -> Option<u32> {
    let (at, key) = (question.position(), question.tokens[question.position()]);
    let place = (0..at / 2).rev().map(|pair| 2 * pair).find(|place| question.tokens[*place] == key)?;
    (at - (place + 1) <= within).then(|| question.tokens[place + 1])
}

/// The most frequent of `values`, the first of equals.
fn most_frequent(values: impl Iterator<Item = u32>) -> Option<u32> {
    let mut counts = std::collections::BTreeMap::<u32, usize>::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}
