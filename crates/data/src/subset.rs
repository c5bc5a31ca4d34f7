//! Data sets seen through a choice or a change of their examples.

use rand::Rng;

use super::{Dataset, Example, Split};
use effattn_kernel::device::rng::RngStream;

/// So many examples of each split, drawn once (files are often sorted by class).
pub struct LimitedDataset<'a> {
    data: &'a dyn Dataset,
    chosen: [Vec<usize>; 3],
}

/// The numbers of at most `limit` of the `count` examples of `split`: the same ones every time.
pub(crate) fn drawn(split: Split, count: usize, limit: usize) -> Vec<usize> {
    if limit >= count {
        return (0..count).collect(); // all of them, in their order
    }
    let mut order = RngStream::new(0, &format!("limit/{}", split.name())).permutation(count);
    order.truncate(limit);
    order
}

impl<'a> LimitedDataset<'a> {
    /// At most `limit` examples of each split of `data`.
    pub fn new(data: &'a dyn Dataset, limit: usize) -> Self {
        Self { data, chosen: Split::ALL.map(|split| drawn(split, data.len(split), limit)) }
    }

    /// The same without what does not fill a batch of `batch` at the end of the test split, as models are tested; a split
    /// that fills none stays.
    #[must_use]
    pub fn in_whole_batches(mut self, batch: usize) -> Self {
        for (split, chosen) in Split::ALL.iter().zip(&mut self.chosen) {
            let whole = chosen.len() / batch.max(1) * batch.max(1);
            if *split == Split::Test && whole > 0 {
                chosen.truncate(whole);
            }
        }
        self
    }

    fn side(&self, split: Split) -> &[usize] {
        &self.chosen[Split::ALL.iter().position(|one| *one == split).unwrap_or(0)]
    }
}

impl Dataset for LimitedDataset<'_> {
    fn len(&self, split: Split) -> usize {
        self.side(split).len()
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        self.data.example(split, self.side(split)[index], max_len)
    }

    fn hash(&self) -> &str {
        self.data.hash()
    }

    fn partial(&self) -> Option<&str> {
        self.data.partial()
    }
}

/// The 32 punctuation characters of ASCII.
pub const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

/// What is done to a text before it is cut and padded (Transformer-LS section 4.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// So many characters at random gaps of the part that is kept.
    Insertion {
        /// How many.
        count: usize,
        /// Seed of places and characters.
        seed: u64,
    },
    /// Every character of the set is removed.
    Deletion,
}

/// Byte texts with punctuation inserted or deleted: the same for every model, as places and characters depend only
/// on seed, example and document.
pub struct Perturbed<'a> {
    /// Texts; ids are bytes + 1.
    pub data: &'a dyn Dataset,
    /// What is done.
    pub change: Change,
    /// The characters.
    pub characters: &'a [u8],
}

impl Perturbed<'_> {
    fn change(&self, tokens: Vec<u32>, max_len: usize, place: (usize, usize)) -> Vec<u32> {
        let mut tokens = tokens;
        match self.change {
            Change::Deletion => {
                let known = |id: &u32| self.characters.contains(&((id - 1) as u8));
                tokens.retain(|id| *id == 0 || !known(id));
            }
            Change::Insertion { count, seed } if !self.characters.is_empty() => {
                let mut stream = RngStream::new(seed, &format!("insertion/{}/{}", place.0, place.1));
                let gaps = tokens.len().min(max_len) + 1;
                let mut draw = || {
                    let rng = stream.rng();
                    let gap = rng.random_range(0..gaps);
                    (gap, self.characters[rng.random_range(0..self.characters.len())])
                };
                let mut all: Vec<(usize, u8)> = (0..count).map(|_| draw()).collect();
                all.sort_by_key(|(gap, _)| std::cmp::Reverse(*gap)); // from the right: gaps of the original
                for (gap, byte) in all {
                    tokens.insert(gap, u32::from(byte) + 1);
                }
            }
            Change::Insertion { .. } => (),
        }
        tokens.truncate(max_len);
        tokens
    }
}

impl Dataset for Perturbed<'_> {
    fn len(&self, split: Split) -> usize {
        self.data.len(split)
    }

    fn example(&self, split: Split, index: usize, max_len: usize) -> Example {
        let Example { tokens, second, label } = self.data.example(split, index, usize::MAX);
        let tokens = self.change(tokens, max_len, (index, 0));
        let second = second.map(|tokens| self.change(tokens, max_len, (index, 1)));
        Example { tokens, second, label }
    }

    fn hash(&self) -> &str {
        self.data.hash()
    }

    fn partial(&self) -> Option<&str> {
        self.data.partial()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::byte_ids;

    struct Texts;

    impl Dataset for Texts {
        fn len(&self, _: Split) -> usize {
            50
        }
        fn example(&self, _: Split, index: usize, max_len: usize) -> Example {
            let text = format!("<b>no. {index}</b>, it's (fine)!");
            let tokens = byte_ids(text.as_bytes(), max_len);
            Example { second: Some(tokens.clone()), tokens, label: u32::from(index >= 25) }
        }
        fn hash(&self) -> &'static str {
            "x"
        }
        fn partial(&self) -> Option<&str> {
            None
        }
    }

    fn perturbed(change: Change) -> Perturbed<'static> {
        Perturbed { data: &Texts, change, characters: PUNCTUATION.as_bytes() }
    }

    fn text(tokens: &[u32]) -> String {
        tokens.iter().map(|&id| char::from((id - 1) as u8)).collect()
    }

    #[test]
    fn a_limit_is_drawn_from_all_classes() {
        let few = LimitedDataset::new(&Texts, 20);
        let ones: u32 = (0..20).map(|index| few.example(Split::Train, index, 9).label).sum();
        assert_eq!(few.len(Split::Test), 20);
        assert!((4..=16).contains(&ones), "{ones} of 20");
        assert_eq!(LimitedDataset::new(&Texts, 99).len(Split::Train), 50);
        let all = LimitedDataset::new(&Texts, 50);
        assert!(
            (0..50).all(|index| all.example(Split::Test, index, 99) == Texts.example(Split::Test, index, 99))
        );
        let twice =
            (few.example(Split::Train, 3, 99), LimitedDataset::new(&Texts, 20).example(Split::Train, 3, 99));
        assert_eq!(twice.0, twice.1);
    }

    #[test]
    fn deletion_removes_all_punctuation() {
        let example = perturbed(Change::Deletion).example(Split::Test, 7, 99);
        assert_eq!(text(&example.tokens), "bno 7b its fine");
        assert_eq!(text(&perturbed(Change::Deletion).example(Split::Test, 7, 4).tokens), "bno ");
    }

    #[test]
    fn insertion_adds_punctuation_only_and_is_the_same_again() {
        let change = |seed| Change::Insertion { count: 10, seed };
        let clean = Texts.example(Split::Test, 4, 99);
        let example = perturbed(change(1)).example(Split::Test, 4, 99);
        assert_eq!(example.tokens.len(), clean.tokens.len() + 10);
        let mut left = clean.tokens.iter().peekable();
        for id in &example.tokens {
            let kept = left.next_if_eq(&id).is_some();
            assert!(kept || PUNCTUATION.contains(char::from((id - 1) as u8)), "{}", text(&example.tokens));
        }
        assert!(left.next().is_none(), "what was there stays in order");
        assert_eq!(example, perturbed(change(1)).example(Split::Test, 4, 99));
        assert_ne!(example, perturbed(change(2)).example(Split::Test, 4, 99));
        assert_ne!(Some(&example.tokens), example.second.as_ref(), "documents are changed independently");
        let short = perturbed(change(1)).example(Split::Test, 4, 8);
        assert_eq!(short.tokens.len(), 8);
        let none = Perturbed { characters: b"", ..perturbed(change(1)) };
        assert_eq!(none.example(Split::Test, 4, 99), clean);
    }
}
