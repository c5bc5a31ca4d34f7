//! What a model is fed: one type for documents, pairs of documents and images.

use candle_core::{Device, Result, Tensor, bail};

/// A label of a position that has none: it is not counted.
pub const IGNORED: u32 = u32::MAX;

/// Token sequences of one length.
#[derive(Clone)]
pub struct Tokens {
    /// Ids [b, n] (u32).
    pub ids: Tensor,
    /// [b, n]: 1 keep, 0 padding; absent keeps all.
    pub mask: Option<Tensor>,
}

/// What a model reads.
#[derive(Clone)]
pub enum ModelInput {
    /// One sequence per sample.
    Tokens(Tokens),
    /// Two sequences per sample.
    Pairs(Tokens, Tokens),
    /// Images [b, channels, rows, columns] (f32).
    Pixels(Tensor),
}

/// Kinds of [`ModelInput`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputKind {
    /// [`ModelInput::Tokens`].
    Tokens,
    /// [`ModelInput::Pairs`].
    Pairs,
    /// [`ModelInput::Pixels`].
    Pixels,
}

/// What a data set asks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataShape {
    /// What is read.
    pub input: InputKind,
    /// Number of ids.
    pub vocab: usize,
    /// Number of classes.
    pub classes: usize,
    /// Longest example.
    pub len: usize,
}

/// Samples on the device.
#[derive(Clone)]
pub struct Batch {
    /// What the model reads.
    pub input: ModelInput,
    /// Classes (u32) of samples `[b]`, or of positions [b, n], where [`IGNORED`] ones do not count.
    pub labels: Tensor,
}

impl InputKind {
    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Tokens => "one sequence of tokens per sample",
            Self::Pairs => "two sequences of tokens per sample",
            Self::Pixels => "one image per sample",
        }
    }
}

impl Batch {
    /// Its kind.
    pub const fn kind(&self) -> InputKind {
        match self.input {
            ModelInput::Tokens(_) => InputKind::Tokens,
            ModelInput::Pairs(..) => InputKind::Pairs,
            ModelInput::Pixels(_) => InputKind::Pixels,
        }
    }

    /// The sequences.
    pub fn tokens(&self) -> Result<&Tokens> {
        match &self.input {
            ModelInput::Tokens(tokens) => Ok(tokens),
            ModelInput::Pairs(..) | ModelInput::Pixels(_) => self.misfit(InputKind::Tokens),
        }
    }

    /// The first and the second sequences.
    pub fn pairs(&self) -> Result<(&Tokens, &Tokens)> {
        match &self.input {
            ModelInput::Pairs(first, second) => Ok((first, second)),
            ModelInput::Tokens(_) | ModelInput::Pixels(_) => self.misfit(InputKind::Pairs),
        }
    }

    /// The images.
    pub fn pixels(&self) -> Result<&Tensor> {
        match &self.input {
            ModelInput::Pixels(pixels) => Ok(pixels),
            ModelInput::Tokens(_) | ModelInput::Pairs(..) => self.misfit(InputKind::Pixels),
        }
    }

    fn misfit<T>(&self, wanted: InputKind) -> Result<T> {
        bail!(
            "the data do not fit the model: it reads {}, and they have {}",
            wanted.words(),
            self.kind().words()
        )
    }
}

/// What made-up batches are cut from, and how many samples of which length they have.
#[derive(Clone, Copy)]
pub struct SyntheticInput<'a> {
    /// A text; it is repeated where it is too short.
    pub text: &'a [u8],
    /// Samples per batch.
    pub batch: usize,
    /// Length of a sample.
    pub len: usize,
    /// Chooses where the text is cut.
    pub seed: u64,
}

impl SyntheticInput<'_> {
    /// Batches that are made: a measurement takes them in turns.
    pub const BATCHES: usize = 4;

    /// The bytes of the text, without end.
    pub fn bytes(&self) -> impl Iterator<Item = u8> {
        let text = if self.text.is_empty() { b" " } else { self.text };
        let at = (self.seed as usize).wrapping_mul(7919) % text.len();
        text.iter().cycle().skip(at).copied()
    }

    /// Ids [b, n], one per byte, as `id` says.
    pub fn ids(
        &self,
        bytes: &mut impl Iterator<Item = u8>,
        id: impl Fn(u8) -> u32,
        device: &Device,
    ) -> Result<Tensor> {
        let ids: Vec<u32> = bytes.take(self.batch * self.len).map(id).collect();
        Tensor::from_vec(ids, (self.batch, self.len), device)
    }

    /// Classes `[b]` that alternate.
    pub fn classes(&self, classes: usize, device: &Device) -> Result<Tensor> {
        Tensor::from_vec((0..self.batch).map(|row| (row % classes) as u32).collect(), self.batch, device)
    }
}
