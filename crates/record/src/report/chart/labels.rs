//! Labels beside line ends, moved apart so that none overlap.

/// Moves positions apart to at least `gap` with the smallest sum of squared moves, in the same order, within
/// `low..=high` (where they fit). Gives the new position of each input.
pub(super) fn spread(wanted: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    // Without the gaps the order is all that is asked: isotonic regression by pooling neighbours.
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for (rank, index) in order.iter().enumerate() {
        pools.push((wanted[*index] - rank as f64 * gap, 1));
        while let [.., (before, many), (last, few)] = pools[..] {
            if before <= last {
                break;
            }
            let mean = (before * many as f64 + last * few as f64) / (many + few) as f64;
            pools.truncate(pools.len() - 2);
            pools.push((mean, many + few));
        }
    }
    let room = high - gap * wanted.len().saturating_sub(1) as f64;
    let level = pools.iter().flat_map(|(level, count)| std::iter::repeat_n(*level, *count));
    let mut moved = vec![0.0; wanted.len()];
    for ((rank, index), level) in order.iter().enumerate().zip(level) {
        moved[*index] = level.min(room).max(low) + rank as f64 * gap;
    }
    moved
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn free_labels_stay() {
        assert_eq!(spread(&[30.0, 10.0, 60.0], 10.0, 0.0, 100.0), [30.0, 10.0, 60.0]);
        assert!(spread(&[], 10.0, 0.0, 100.0).is_empty());
    }

    #[test]
    fn a_crowd_moves_apart_around_its_middle() {
        assert_eq!(spread(&[50.0, 50.0, 50.0], 10.0, 0.0, 100.0), [40.0, 50.0, 60.0]);
        assert_eq!(spread(&[99.0, 100.0], 10.0, 0.0, 100.0), [90.0, 100.0]);
        assert_eq!(spread(&[0.0, 1.0], 10.0, 0.0, 100.0), [0.0, 10.0]);
    }

    proptest! {
        #[test]
        fn no_two_labels_overlap(wanted in prop::collection::vec(0.0..100.0, 0..12)) {
            let mut moved = spread(&wanted, 8.0, 0.0, 100.0);
            moved.sort_by(f64::total_cmp);
            prop_assert!(moved.windows(2).all(|pair| pair[1] - pair[0] > 8.0 - 1e-9));
            prop_assert!(moved.iter().all(|at| (-1e-9..100.0 + 1e-9).contains(at)));
        }
    }
}
