//! What earlier keys are still worth within a chunk.

use super::super::scale;

/// What one step keeps of the state and lets in.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Gate {
    /// ln g; 0 at a hidden key.
    pub(in super::super) log_keep: f32,
    /// 1 - g; 0 at a hidden key.
    pub(in super::super) open: f32,
}

/// Weights within one chunk: key s counts w(t, s) = open_s prod_{s < r <= t} exp(step_r) at query t.
///
/// Products, not differences of sums: a step of -1e30 between two keys must not spoil later ones.
pub(super) struct Decay {
    /// Row t holds w(t, 0..=t), `size` apart.
    weights: Vec<f32>,
    /// What the state before the chunk is worth at t: prod_{r <= t} exp(step_r).
    since: Vec<f32>,
    size: usize,
    count: usize,
    active: bool,
}

impl Decay {
    /// Space for chunks of up to `size` rows.
    pub(super) fn new(size: usize) -> Self {
        Self { weights: Vec::new(), since: vec![1.0; size], size, count: 0, active: false }
    }

    /// Takes the logarithms `steps` of one chunk, and how much of each key enters (all of it without gates).
    pub(super) fn set(&mut self, steps: &[f32], gates: Option<&[Gate]>) {
        self.count = steps.len();
        self.active = gates.is_some() || steps.iter().any(|&step| step != 0.0);
        if !self.active {
            return;
        }
        self.weights.resize(self.size * self.size, 0.0);
        let mut total = 1.0;
        for (t, step) in steps.iter().enumerate() {
            let step = step.exp();
            total *= step;
            self.since[t] = total;
            let (before, row) = self.weights.split_at_mut(t * self.size);
            if t > 0 {
                let last = &before[(t - 1) * self.size..][..t];
                row.iter_mut().zip(last).for_each(|(row, last)| *row = last * step);
            }
            row[t] = gates.map_or(1.0, |gates| gates[t].open);
        }
    }

    /// Multiplies pair (t, s) by w(t, s), and clears s > t.
    pub(super) fn weigh(&self, pairs: &mut [f32]) {
        for (t, row) in pairs.chunks_exact_mut(self.count).enumerate() {
            row[t + 1..].fill(0.0);
            if self.active {
                let weights = &self.weights[t * self.size..][..=t];
                row.iter_mut().zip(weights).for_each(|(pair, weight)| *pair *= weight);
            }
        }
    }

    /// Weighs query rows by what the state before the chunk is worth there.
    pub(super) fn weigh_queries(&self, rows: &mut [f32], width: usize) {
        if self.active {
            for (row, since) in rows.chunks_exact_mut(width).zip(&self.since) {
                scale(*since, row);
            }
        }
    }

    /// Weighs key rows by what they are worth at the end of the chunk.
    pub(super) fn weigh_keys(&self, rows: &mut [f32], width: usize) {
        if self.active {
            for (index, row) in rows.chunks_exact_mut(width).enumerate() {
                scale(self.rest(index), row);
            }
        }
    }

    /// What key `index` is worth at the end of the chunk.
    pub(super) fn rest(&self, index: usize) -> f32 {
        if self.active { self.weights[(self.count - 1) * self.size + index] } else { 1.0 }
    }

    /// What the state before the chunk is worth at its end.
    pub(super) fn total(&self) -> f32 {
        if self.active { self.since[self.count - 1] } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_products_of_steps() {
        let steps = [-0.5f32, 0.0, -1.0, -0.25];
        let mut decay = Decay::new(5);
        decay.set(&steps, None);
        let mut pairs = vec![1.0; 16];
        decay.weigh(&mut pairs);
        for t in 0..4 {
            for s in 0..4 {
                let sum: f32 = if s < t { steps[s + 1..=t].iter().sum() } else { 0.0 };
                let want = if s <= t { sum.exp() } else { 0.0 };
                assert!((pairs[4 * t + s] - want).abs() < 1e-6, "{t} {s}");
            }
        }
        assert!((decay.total() - (-1.75f32).exp()).abs() < 1e-6);
        decay.set(&[0.0, 0.0], None);
        let mut pairs = vec![2.0; 4];
        decay.weigh(&mut pairs);
        assert_eq!((pairs, decay.total()), (vec![2.0, 0.0, 2.0, 2.0], 1.0));
    }

    #[test]
    fn gates_weigh_what_enters() {
        let gate = |keep: f32| Gate { log_keep: keep.ln(), open: 1.0 - keep };
        let gates = [gate(0.25), gate(0.5)];
        let mut decay = Decay::new(2);
        decay.set(&gates.map(|gate| gate.log_keep), Some(&gates));
        let mut pairs = vec![1.0; 4];
        decay.weigh(&mut pairs);
        assert_eq!(pairs, [0.75, 0.0, 0.375, 0.5]);
        assert_eq!((decay.rest(0), decay.total()), (0.375, 0.125));
    }
}
