//! Rules on which runs of bytes occur, their hashes as features.

use rayon::prelude::*;

use super::linear::regression;
use super::percent;
use effattn_data::{Dataset, Split};

/// Places of the table of hashes.
const PLACES: usize = 1 << 20;

/// The different hashes of the runs of `lengths` tokens, in order.
fn hashes(tokens: &[u32], lengths: std::ops::RangeInclusive<usize>) -> Vec<u32> {
    let hash = |run: &[u32]| {
        let mixed = run.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| {
            (hash ^ u64::from(id)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        });
        ((mixed ^ (mixed >> 32)) % PLACES as u64) as u32
    };
    let mut all: Vec<u32> = lengths.flat_map(|length| tokens.windows(length).map(hash)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Naive Bayes with presence of runs of three to five bytes, one added to every count: accuracy on the test split.
pub fn naive_bayes(data: &dyn Dataset, keep: usize) -> f64 {
    let mut counts = vec![[1u32; 2]; PLACES];
    let mut documents = [2u32; 2];
    let indices: Vec<usize> = (0..data.len(Split::Train)).collect();
    // a thousand documents at a time: their hashes together would be gigabytes
    for part in indices.chunks(1000) {
        let read = |&index: &usize| {
            let example = data.example(Split::Train, index, keep);
            (hashes(&example.tokens, 3..=5), example.label.min(1) as usize)
        };
        for (hashes, label) in part.par_iter().map(read).collect::<Vec<_>>() {
            documents[label] += 1;
            hashes.iter().for_each(|&place| counts[place as usize][label] += 1);
        }
    }
    let ratio = |[a, b]: [u32; 2]| f64::from(b).ln() - f64::from(a).ln();
    let prior = ratio(documents);
    let weights: Vec<f32> = counts.iter().map(|&count| (ratio(count) - prior) as f32).collect();
    let right: Vec<bool> = (0..data.len(Split::Test))
        .into_par_iter()
        .map(|index| {
            let example = data.example(Split::Test, index, keep);
            let seen = hashes(&example.tokens, 3..=5);
            let score = prior + seen.iter().map(|&place| f64::from(weights[place as usize])).sum::<f64>();
            (score > 0.0) == (example.label == 1)
        })
        .collect();
    percent(data, |index| right[index])
}

/// Logistic regression on the share of runs, of three to eight bytes each, that both documents of a pair have.
pub fn overlap(data: &dyn Dataset, keep: usize) -> f64 {
    regression(data, |split, index| {
        let example = data.example(split, index, keep);
        let second = example.second.unwrap_or_default();
        let share = |length: usize| {
            let (a, b) = (hashes(&example.tokens, length..=length), hashes(&second, length..=length));
            let both = a.iter().filter(|hash| b.binary_search(hash).is_ok()).count();
            let any = a.len() + b.len() - both;
            8.0 * both as f32 / any.max(1) as f32 - 1.0
        };
        (3..=8).map(share).collect()
    })
}
