//! Blocks of words, and the words in them that are hidden (`docs/spec/SPEC-text.md` section 6).
//!
//! Of a block of n ids floor(0.15 n + u) are chosen, u uniform in [0, 1), never a special word; of these 80 % become
//! `<mask>`, 10 % another word, and 10 % stay. What is chosen is a function of seed, epoch and block alone.

use super::tokenizer::{Specials, Tokenizer};
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::embedding::PADDING;

/// Seed of the words that are hidden in validation, whatever the seed of a run.
pub const VALIDATION_SEED: u64 = 0;
/// Share of the ids of a block that are predicted.
const CHOSEN: f64 = 0.15;
/// Of those: become `<mask>`; become `<mask>` or stay.
const MASKED: (f64, f64) = (0.8, 0.9);

/// How texts become blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMode {
    /// One stream, cut wherever a block ends.
    Stream,
    /// A text that does not fit behind those before it begins a block; only one that fits no block is cut (fairseq's
    /// `complete`).
    Complete,
}

/// Texts as ids, cut into blocks.
pub struct Blocks {
    ids: Vec<u32>,
    /// Where each block begins in `ids`; a last entry is its end.
    starts: Vec<usize>,
    specials: Specials,
    vocabulary: usize,
}

/// A block with some of its words hidden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskedBlock {
    /// `<s>` and the block's ids, hidden ones replaced.
    pub ids: Vec<u32>,
    /// Places in `ids` that are predicted, in order, and the ids that stood there.
    pub chosen: Vec<(usize, u32)>,
}

impl Blocks {
    /// `texts` in blocks of at most `len` ids, `<s>` in front included; every text ends with `</s>`.
    pub fn new<'a>(
        tokenizer: &Tokenizer,
        texts: impl Iterator<Item = &'a str>,
        len: usize,
        cut: BlockMode,
    ) -> Self {
        let (specials, room) = (tokenizer.specials(), len.saturating_sub(1).max(1));
        let mut encoder = tokenizer.encoder();
        let (mut ids, mut starts) = (Vec::new(), vec![0]);
        let mut begun = 0; // where the open block begins
        for text in texts {
            let before = ids.len();
            ids.extend(encoder.ids(text));
            ids.push(specials.end);
            if cut == BlockMode::Complete && before > begun && ids.len() - begun > room {
                starts.push(before);
                begun = before;
            }
            while ids.len() - begun > room {
                begun += room;
                starts.push(begun);
            }
        }
        starts.push(ids.len());
        starts.dedup();
        Self { ids, starts, specials, vocabulary: tokenizer.len() }
    }

    /// The first `limit` blocks only.
    pub fn truncate(&mut self, limit: usize) {
        self.starts.truncate(limit.saturating_add(1));
        self.ids.truncate(self.starts.last().copied().unwrap_or(0));
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids of all blocks, without the `<s>` in front of each.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Block `index` as it is hidden in `epoch` of the run with `seed`.
    pub fn hidden(&self, index: usize, seed: u64, epoch: u64) -> MaskedBlock {
        let block = &self.ids[self.starts[index]..self.starts[index + 1]];
        let mut ids = Vec::with_capacity(block.len() + 1);
        ids.push(self.specials.start);
        ids.extend_from_slice(block);
        let mut stream = RngStream::new(seed, &format!("mask/{epoch}/{index}"));
        let free: Vec<usize> = (0..ids.len()).filter(|at| !self.fixed(ids[*at])).collect();
        let count = (CHOSEN * ids.len() as f64 + stream.uniform(0.0, 1.0)).floor() as usize;
        let count = count.max(1).min(free.len()); // a block always teaches something
        let order = stream.permutation(free.len());
        let mut places: Vec<usize> = order[..count].iter().map(|at| free[*at]).collect();
        places.sort_unstable();
        let chosen = places.iter().map(|at| (*at, ids[*at])).collect();
        for at in places {
            let draw = stream.uniform(0.0, 1.0);
            if draw < MASKED.0 {
                ids[at] = self.specials.mask;
            } else if draw >= MASKED.1 {
                ids[at] = self.word(&mut stream);
            }
        }
        MaskedBlock { ids, chosen }
    }

    /// Whether an id is never chosen: `<s>`, `<pad>`, `</s>`.
    fn fixed(&self, id: u32) -> bool {
        id == PADDING || id == self.specials.start || id == self.specials.end
    }

    /// Any id but the four special ones.
    fn word(&self, stream: &mut RngStream) -> u32 {
        loop {
            let id = stream.below(self.vocabulary) as u32;
            if !self.specials.reserved(id) {
                return id;
            }
        }
    }

    /// Mean -log of the add-one frequencies of words in these blocks, over the words of `other`, in nats: what a model that
    /// looks at nothing reaches. `</s>` is not counted.
    pub fn unigram(&self, other: &Self) -> f64 {
        let mut counts = vec![1u64; self.vocabulary];
        let words =
            |blocks: &Self| blocks.ids.iter().copied().filter(|id| !blocks.fixed(*id)).collect::<Vec<_>>();
        words(self).into_iter().for_each(|id| counts[id as usize] += 1);
        let total = counts.iter().sum::<u64>() as f64;
        let seen = words(other);
        let sum: f64 = seen.iter().map(|id| -(counts[*id as usize] as f64 / total).ln()).sum();
        sum / seen.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::train(["a b c d e f g h i j k l m n o p q r s t"].into_iter(), 300).expect("a tokenizer")
    }

    fn blocks(texts: &[&str], len: usize, cut: BlockMode) -> Blocks {
        Blocks::new(&tokenizer(), texts.iter().copied(), len, cut)
    }

    fn lens(blocks: &Blocks) -> Vec<usize> {
        blocks.starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    #[test]
    fn texts_fill_blocks() {
        let texts = ["abcd", "ab", "abcdefgh", "a"]; // 5, 3, 9 and 2 ids with their ends
        assert_eq!(lens(&blocks(&texts, 7, BlockMode::Stream)), [6, 6, 6, 1]);
        assert_eq!(lens(&blocks(&texts, 7, BlockMode::Complete)), [5, 3, 6, 5]);
        let (stream, complete) =
            (blocks(&texts, 7, BlockMode::Stream), blocks(&texts, 7, BlockMode::Complete));
        assert_eq!(stream.ids(), complete.ids(), "no word is lost");
        assert!(blocks(&[], 7, BlockMode::Stream).is_empty());
        let mut few = stream;
        few.truncate(2);
        assert_eq!((few.len(), few.ids().len()), (2, 12));
    }

    #[test]
    fn hidden_words_follow_the_counts() {
        let text = "abcdefghijklmnopqrstuvwxyz".repeat(40);
        let blocks = blocks(&[&text, &text], 100, BlockMode::Stream);
        let (mut chosen, mut masked, mut kept, mut all) = (0, 0, 0, 0);
        for (index, epoch) in (0..blocks.len()).flat_map(|index| (0..20).map(move |epoch| (index, epoch))) {
            let MaskedBlock { ids, chosen: places } = blocks.hidden(index, 3, epoch);
            let clean = &blocks.ids[blocks.starts[index]..blocks.starts[index + 1]];
            assert_eq!(ids.len(), clean.len() + 1);
            let expected = 0.15 * ids.len() as f64;
            assert!(((expected.floor() as usize)..=expected.ceil() as usize).contains(&places.len()));
            for (at, id) in &places {
                assert_eq!(clean[at - 1], *id, "labels are what stood there");
                assert!(!blocks.fixed(*id));
                masked += usize::from(ids[*at] == blocks.specials.mask);
                kept += usize::from(ids[*at] == *id);
            }
            let changed = (1..ids.len()).filter(|at| ids[*at] != clean[at - 1]).count();
            assert!(changed <= places.len() && places.is_sorted());
            (chosen, all) = (chosen + places.len(), all + ids.len());
        }
        let share = |part: usize, of: usize| part as f64 / of as f64;
        assert!((share(chosen, all) - 0.15).abs() < 0.002, "{}", share(chosen, all));
        assert!((share(masked, chosen) - 0.8).abs() < 0.02, "{}", share(masked, chosen));
        assert!((share(kept, chosen) - 0.1).abs() < 0.02, "{}", share(kept, chosen));
    }

    #[test]
    fn what_is_hidden_depends_on_seed_epoch_and_block_alone() {
        let blocks =
            blocks(&["abcdefghijklmnopqrstuvwxyz abcdefghijklmnopqrstuvwxyz"; 4], 40, BlockMode::Stream);
        assert_eq!(blocks.hidden(1, 5, 2), blocks.hidden(1, 5, 2));
        for (index, seed, epoch) in [(2, 5, 2), (1, 6, 2), (1, 5, 3)] {
            assert_ne!(blocks.hidden(index, seed, epoch).chosen, blocks.hidden(1, 5, 2).chosen);
        }
        let only_ends = blocks.hidden(0, 0, 0);
        assert!(!only_ends.chosen.is_empty());
    }

    #[test]
    fn a_unigram_of_even_words_is_the_log_of_their_number() {
        let text = "ab".repeat(20_000);
        let blocks = blocks(&[&text], 64, BlockMode::Stream);
        assert!((blocks.unigram(&blocks) - 2f64.ln()).abs() < 0.05, "{}", blocks.unigram(&blocks));
    }
}
