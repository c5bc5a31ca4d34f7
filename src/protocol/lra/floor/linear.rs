//! Softmax regression on a few numbers per example.

use rayon::prelude::*;

use super::percent;
use effattn_data::{Dataset, Split};

/// Passes over the training split, examples per step, and rate.
const PASSES: usize = 20;
const BATCH: usize = 64;
const RATE: f64 = 0.05;

/// Accuracy of softmax regression on intensities scaled to [-1, 1].
pub fn pixels(data: &dyn Dataset, keep: usize) -> f64 {
    regression(data, |split, index| {
        let tokens = data.example(split, index, keep).tokens;
        tokens.iter().map(|&id| id as f32 / 128.0 - 1.0).collect()
    })
}

/// Accuracy of logistic regression on the shares of intensities: none, then in sixteenths of the range.
pub fn ink(data: &dyn Dataset, keep: usize) -> f64 {
    regression(data, |split, index| {
        let tokens = data.example(split, index, keep).tokens;
        let mut shares = vec![0f32; 17];
        for &id in &tokens {
            shares[if id == 0 { 0 } else { 1 + id.min(255) as usize / 16 }] += 8.0 / tokens.len() as f32;
        }
        shares
    })
}

/// Fits classes on the features of the training split by averaged stochastic gradient steps; accuracy on the test split.
pub fn regression(data: &dyn Dataset, features: impl Fn(Split, usize) -> Vec<f32> + Sync) -> f64 {
    let read = |split: Split| -> Vec<(Vec<f32>, usize)> {
        let one = |index: usize| (features(split, index), data.example(split, index, 1).label as usize);
        (0..data.len(split)).into_par_iter().map(one).collect()
    };
    let (train, test) = (read(Split::Train), read(Split::Test));
    let classes = train.iter().map(|(_, label)| label + 1).max().unwrap_or(1);
    let width = train.iter().map(|(x, _)| x.len()).max().unwrap_or(0) + 1;
    let mut weights = vec![0f64; classes * width];
    let mut mean = weights.clone();
    let mut stream = effattn_kernel::device::rng::RngStream::new(0, "floor");
    let steps = PASSES * train.len().div_ceil(BATCH);
    let mut step = 0;
    for _ in 0..PASSES {
        for batch in stream.permutation(train.len()).chunks(BATCH) {
            let mut gradient = vec![0f64; weights.len()];
            for (x, label) in batch.iter().map(|&index| &train[index]) {
                let p = probabilities(&weights, x, classes, width);
                for (class, p) in p.iter().enumerate() {
                    let error = p - f64::from(u8::from(class == *label));
                    let row = &mut gradient[class * width..(class + 1) * width];
                    row.iter_mut().zip(x).for_each(|(g, x)| *g += error * f64::from(*x));
                    row[width - 1] += error;
                }
            }
            let rate = RATE / batch.len() as f64;
            weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= rate * g);
            step += 1;
            // the mean over the second half of the steps is less noisy than the last
            if 2 * step > steps {
                mean.iter_mut().zip(&weights).for_each(|(m, w)| *m += w);
            }
        }
    }
    percent(data, |index| {
        let (x, label) = &test[index];
        let p = probabilities(&mean, x, classes, width);
        (0..classes).max_by(|&a, &b| p[a].total_cmp(&p[b])) == Some(*label)
    })
}

fn probabilities(weights: &[f64], x: &[f32], classes: usize, width: usize) -> Vec<f64> {
    let logit = |class: usize| {
        let row = &weights[class * width..(class + 1) * width];
        row.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>() + row[width - 1]
    };
    let logits: Vec<f64> = (0..classes).map(logit).collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = logits.iter().map(|logit| (logit - top).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}
