//! Examples with a label at some of their positions, drawn from a seed: what recall and state tracking are measured with.
//!
//! An example is a function of its seed, split, segment and number alone, so that every machine draws the same ones, in any
//! order, and nothing is stored.

use serde::{Deserialize, Serialize};

use crate::content_hash::ContentHash;
use crate::{DataError, DataSetEntry, Split, data_sets, find_or_error};
use effattn_kernel::device::rng::RngStream;
use effattn_record::config::ParseError;
pub use effattn_record::config::segments::Segment;

/// A length of `segment`, uniform.
pub fn draw_len(segment: &Segment, rng: &mut RngStream) -> usize {
    segment.shortest + rng.below(segment.longest - segment.shortest + 1)
}

/// Number of ids and share of noise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alphabet {
    /// Number of token ids.
    pub vocabulary: usize,
    /// Share of the places left free that hold random tokens, from 0 to 1.
    pub noise: f64,
}

impl Alphabet {
    /// Refuses other ids than the task's `own`, and noise, for a task that has neither.
    pub fn fixed(&self, own: usize) -> Result<(), String> {
        let Self { vocabulary, noise } = *self;
        if vocabulary != own {
            return Err(format!("this task has {own} tokens, not {vocabulary}; leave --vocabulary out"));
        }
        if noise != 0.0 { Err("this task has no noise; leave --noise out".to_owned()) } else { Ok(()) }
    }
}

/// One example.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PositionExample {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Positions that have a label, ascending, and the labels: token ids too.
    pub labels: Vec<(usize, u32)>,
}

/// What draws an example.
pub struct Draw<'a> {
    /// Its segment.
    pub segment: &'a Segment,
    /// Number of ids, noise.
    pub alphabet: Alphabet,
    /// Its split.
    pub split: Split,
    /// Its random numbers.
    pub rng: &'a mut RngStream,
}

/// A rule that answers without learning.
#[derive(Clone, Copy, Debug)]
pub struct PositionRule {
    /// Its name, the variant in rows.
    pub name: &'static str,
    /// What it looks at.
    pub about: &'static str,
    /// Whether it is the task's definition and right everywhere; the others are floors.
    pub solves: bool,
    /// Its answer at one of the labelled positions; `None`: it has none.
    pub answer: fn(&Question) -> Option<u32>,
}

impl PositionRule {
    /// The task's definition, right everywhere.
    pub const fn definition(
        name: &'static str,
        about: &'static str,
        answer: fn(&Question) -> Option<u32>,
    ) -> Self {
        Self { name, about, solves: true, answer }
    }

    /// A rule that is right by chance or in part.
    pub const fn floor(
        name: &'static str,
        about: &'static str,
        answer: fn(&Question) -> Option<u32>,
    ) -> Self {
        Self { name, about, solves: false, answer }
    }
}

/// What a rule sees of an example.
pub struct Question<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// The labelled positions.
    pub positions: &'a [usize],
    /// Which of them is asked for.
    pub number: usize,
    /// Number of ids, noise.
    pub alphabet: Alphabet,
}

impl Question<'_> {
    /// The position that is asked for.
    pub fn position(&self) -> usize {
        self.positions[self.number]
    }
}

/// Where a model reads the label of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// At that position.
    There,
    /// At the last position: everything that is asked must be in its vector.
    AtTheEnd,
}

/// A data set of examples with labels at positions.
#[derive(Clone, Copy)]
pub struct PositionTask {
    /// Where labels are read.
    pub reading: Reading,
    /// Number of ids and share of noise where nothing is said.
    pub alphabet: Alphabet,
    /// Segments that are trained on where nothing is said.
    pub train: &'static [&'static str],
    /// Segments that are validated and tested on where nothing is said.
    pub test: &'static [&'static str],
    /// Refuses a segment that has no examples, with words.
    pub check: fn(&Segment, Alphabet) -> Result<(), String>,
    /// Draws an example of a segment that was checked.
    pub draw: fn(Draw) -> PositionExample,
    /// Rules, the task's definition first where it is one.
    pub rules: &'static [PositionRule],
}

impl PositionTask {
    /// Example `index` of `segment` in `split` under `seed`.
    pub fn example(
        &self,
        (segment, alphabet): (&Segment, Alphabet),
        (seed, split): (u64, Split),
        index: u64,
    ) -> PositionExample {
        let rng = &mut RngStream::new(seed, &format!("{}/{segment}/{index}", split.name()));
        (self.draw)(Draw { segment, alphabet, split, rng })
    }

    /// Refuses segments and alphabets that the task does not have.
    pub fn check(&self, segments: &[Segment], alphabet: Alphabet) -> Result<(), String> {
        segments.iter().try_for_each(|segment| (self.check)(segment, alphabet))
    }

    /// Checksum of what it draws: examples of every segment that it has by itself.
    pub fn fingerprint(&self) -> Result<String, ParseError> {
        let mut content = ContentHash::default();
        for (split, segments) in
            [(Split::Train, self.train), (Split::Validation, self.test), (Split::Test, self.test)]
        {
            for segment in Segment::list(segments.iter().copied())? {
                for index in 0..64 {
                    let example = self.example((&segment, self.alphabet), (0, split), index);
                    content.number(example.tokens.len() as u64);
                    example.tokens.iter().for_each(|token| content.number(u64::from(*token)));
                    for (position, label) in example.labels {
                        content.number(position as u64);
                        content.number(u64::from(label));
                    }
                }
            }
        }
        Ok(content.finish())
    }
}

/// The data sets of this kind.
pub fn tasks() -> Vec<(&'static DataSetEntry, &'static PositionTask)> {
    data_sets().into_iter().filter_map(|set| Some((set, set.positions()?))).collect()
}

/// The data set of this kind called `name`.
pub fn task(name: &str) -> Result<(&'static DataSetEntry, &'static PositionTask), DataError> {
    find_or_error("task", name, &tasks())
}

/// Share of the labels of `examples` that `rule` gives.
pub fn score(rule: &PositionRule, examples: &[PositionExample], alphabet: Alphabet) -> f64 {
    let (mut right, mut count) = (0u64, 0u64);
    for PositionExample { tokens, labels } in examples {
        let positions: Vec<usize> = labels.iter().map(|(position, _)| *position).collect();
        for (number, (_, label)) in labels.iter().enumerate() {
            let question = Question { tokens, positions: &positions, number, alphabet };
            right += u64::from((rule.answer)(&question) == Some(*label));
            count += 1;
        }
    }
    right as f64 / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_depend_on_seed_split_segment_and_number_alone() {
        for (set, task) in tasks() {
            let segments = Segment::list(task.train.iter().copied()).unwrap();
            let draw = |seed, split, index| task.example((&segments[0], task.alphabet), (seed, split), index);
            let one = draw(1, Split::Train, 7);
            assert_eq!(one, draw(1, Split::Train, 7), "{}", set.name);
            let others = [draw(2, Split::Train, 7), draw(1, Split::Test, 7), draw(1, Split::Train, 8)];
            assert!(others.iter().all(|other| *other != one), "{}", set.name);
        }
    }

    #[test]
    fn every_task_is_solved_by_its_rule_and_not_by_its_floors() {
        for (set, task) in tasks() {
            let segments = Segment::list(task.test.iter().chain(task.train).copied()).unwrap();
            task.check(&segments, task.alphabet).unwrap();
            for segment in &segments {
                let draw = |index| task.example((segment, task.alphabet), (3, Split::Test), index);
                let examples: Vec<_> = (0..200).map(draw).collect();
                for PositionExample { tokens, labels } in &examples {
                    assert!((1..=segment.longest + 1).contains(&tokens.len()), "{} {segment}", set.name);
                    assert!(!labels.is_empty() && labels.is_sorted_by(|a, b| a.0 < b.0), "{}", set.name);
                    let ids = tokens.iter().chain(labels.iter().map(|(_, label)| label));
                    assert!(
                        ids.max().is_some_and(|id| (*id as usize) < task.alphabet.vocabulary),
                        "{}",
                        set.name
                    );
                    assert!(labels.iter().all(|(position, _)| *position < tokens.len()), "{}", set.name);
                }
                for rule in task.rules {
                    let score = score(rule, &examples, task.alphabet);
                    assert!(rule.solves == (score == 1.0), "{} {segment} {}: {score}", set.name, rule.name);
                }
            }
        }
    }
}
