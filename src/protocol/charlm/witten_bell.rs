//! What counting reaches: an interpolated n-gram model, below which a trained model should be.

/// Bits per symbol that an interpolated Witten-Bell model of `order` (3: two symbols of context) needs for `test`, with
/// counts from `train` over `vocab` symbols. The first symbols of `test` have what context there is.
///
/// p_k(s | c) = (count(c s) + types(c) p_{k-1}(s | c')) / (count(c) + types(c)), p_0 = 1 / vocab; a context
/// that was never seen passes p_{k-1} on (Witten and Bell 1991; Chen and Goodman 1999, section 2.6).
pub fn witten_bell(train: &[u8], test: &[u8], vocab: usize, order: usize) -> f64 {
    let tables: Vec<Table> = (1..=order).map(|length| Table::count(train, vocab, length)).collect();
    let mut bits = 0.0;
    for (at, &symbol) in test.iter().enumerate() {
        let mut p = 1.0 / vocab as f64;
        for table in &tables {
            let Some(start) = at.checked_sub(table.length - 1) else { break };
            p = table.interpolate(&test[start..at], symbol, p);
        }
        bits -= p.log2();
    }
    bits / test.len().max(1) as f64
}

/// Counts of all strings of one length.
struct Table {
    length: usize,
    vocab: usize,
    counts: Vec<u32>,          // [vocab ^ length], the last symbol fastest
    contexts: Vec<(u32, u32)>, // occurrences, different successors
}

impl Table {
    fn count(train: &[u8], vocab: usize, length: usize) -> Self {
        let mut counts = vec![0; vocab.pow(length as u32)];
        for string in train.windows(length) {
            counts[index(string, vocab)] += 1;
        }
        let contexts = counts
            .chunks(vocab)
            .map(|row: &[u32]| (row.iter().sum(), row.iter().filter(|count| **count > 0).count() as u32));
        let contexts = contexts.collect();
        Self { length, vocab, counts, contexts }
    }

    fn interpolate(&self, context: &[u8], symbol: u8, lower: f64) -> f64 {
        let row = index(context, self.vocab);
        let (seen, types) = self.contexts[row];
        if seen == 0 {
            return lower;
        }
        let count = self.counts[row * self.vocab + usize::from(symbol)];
        (f64::from(count) + f64::from(types) * lower) / f64::from(seen + types)
    }
}

fn index(string: &[u8], vocab: usize) -> usize {
    string.iter().fold(0, |index, &symbol| index * vocab + usize::from(symbol))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_cases_by_hand() {
        // unigram: a 3 of 4, b 1 of 4, two types: p(a) = (3 + 2/2) / 6, p(b) = (1 + 2/2) / 6
        let bits = witten_bell(&[0, 0, 1, 0], &[0, 1], 2, 1);
        let by_hand = -((4.0f64 / 6.0).log2() + (2.0f64 / 6.0).log2()) / 2.0;
        assert!((bits - by_hand).abs() < 1e-12, "{bits} {by_hand}");
        // nothing counted: uniform
        assert!((witten_bell(&[], &[3, 1], 8, 3) - 3.0).abs() < 1e-12);
    }

    #[test]
    fn probabilities_sum_to_one_behind_any_context() {
        let train: Vec<u8> = (0..400u32).map(|i| ((i * i / 7 + i) % 5) as u8).collect();
        for context in [[0, 0], [1, 4], [4, 4]] {
            let sum: f64 = (0..5u8)
                .map(|symbol| {
                    let whole = witten_bell(&train, &[context[0], context[1], symbol], 5, 3) * 3.0;
                    let prefix = witten_bell(&train, &context, 5, 3) * 2.0;
                    2f64.powf(prefix - whole)
                })
                .sum();
            assert!((sum - 1.0).abs() < 1e-9, "{context:?} {sum}");
        }
    }

    #[test]
    fn context_helps_where_text_repeats() {
        let text: Vec<u8> = (0..600).map(|i| [0, 1, 2, 1][i % 4]).collect();
        let bits = |order| witten_bell(&text[..500], &text[500..], 3, order);
        assert!(bits(3) < 0.1 && bits(2) < bits(1) && bits(1) > 1.4, "{} {} {}", bits(1), bits(2), bits(3));
    }
}
