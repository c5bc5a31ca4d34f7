//! The order in which examples are seen.

use effattn_kernel::device::rng::RngStream;

/// Shuffled once per epoch; a last batch that is not full is never formed.
///
/// The order is a function of seed and step alone, so a resumed run needs nothing but its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOrder {
    seed: u64,
    examples: usize,
    batch: usize,
}

impl BatchOrder {
    /// The order of `examples` in batches of `batch`; none if a batch can never be full.
    pub fn new(seed: u64, examples: usize, batch: usize) -> Option<Self> {
        (batch > 0 && examples >= batch).then_some(Self { seed, examples, batch })
    }

    /// Batches per epoch.
    pub fn per_epoch(&self) -> u64 {
        (self.examples / self.batch) as u64
    }

    /// The examples of step `step`, counted from 0. `memo` keeps the epoch's permutation between calls.
    pub fn batch(&self, step: u64, memo: &mut Option<(u64, Vec<usize>)>) -> Vec<usize> {
        let (epoch, number) = (step / self.per_epoch(), (step % self.per_epoch()) as usize);
        if memo.as_ref().is_none_or(|(known, _)| *known != epoch) {
            *memo = None;
        }
        let draw =
            || (epoch, RngStream::new(self.seed, &format!("order/{epoch}")).permutation(self.examples));
        let (_, order) = memo.get_or_insert_with(draw);
        order[number * self.batch..(number + 1) * self.batch].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_sees_every_example_at_most_once_in_another_order() {
        let order = BatchOrder::new(1, 23, 5).unwrap();
        assert_eq!(order.per_epoch(), 4);
        let mut memo = None;
        let epoch = |from: u64, memo: &mut _| -> Vec<usize> {
            (from..from + 4).flat_map(|step| order.batch(step, memo)).collect()
        };
        let (first, second) = (epoch(0, &mut memo), epoch(4, &mut memo));
        for seen in [&first, &second] {
            let unique: std::collections::BTreeSet<_> = seen.iter().collect();
            assert_eq!(unique.len(), 20);
            assert!(seen.iter().all(|&i| i < 23));
        }
        assert_ne!(first, second);
    }

    #[test]
    fn a_step_needs_no_step_before_it() {
        let order = BatchOrder::new(9, 100, 7).unwrap();
        let mut memo = None;
        let run: Vec<_> = (0..40).map(|step| order.batch(step, &mut memo)).collect();
        for step in [39, 13, 14, 0] {
            assert_eq!(order.batch(step, &mut None), run[step as usize]);
        }
    }

    #[test]
    fn a_batch_that_is_never_full_has_no_order() {
        assert_eq!(BatchOrder::new(0, 6, 7), None);
        assert_eq!(BatchOrder::new(0, 6, 0), None);
    }
}
