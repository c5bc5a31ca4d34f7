//! Attention one token after another: what a causal mechanism carries from token to token.

use std::any::{Any, type_name};

use candle_core::{DType, Result, Tensor, bail};

use effattn_kernel::attend::attend_cached;
use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::linear_attention::LinearAttention;
use effattn_kernel::linear_attention::decode::{self, LinearState};

/// What one layer carries from token to token: a type of the mechanism that made it, which `downcast` finds again.
pub trait DecodeState: Any + Send {
    /// Tokens so far.
    fn position(&self) -> usize;

    /// Goes on as if `position` tokens had been seen, to measure a step there.
    fn set_position(&mut self, position: usize);

    /// Sequences.
    fn batch(&self) -> usize;

    /// Bytes that it holds, all sequences together.
    fn bytes(&self) -> usize;
}

impl dyn DecodeState {
    /// The state as the type that its mechanism made.
    pub fn downcast<T: DecodeState>(&mut self) -> Result<&mut T> {
        let any: &mut dyn Any = self;
        match any.downcast_mut() {
            Some(state) => Ok(state),
            None => {
                bail!(
                    "the decoding state is not a {}: take one that this model's start_decoding made",
                    type_name::<T>()
                )
            }
        }
    }
}

/// What a mechanism holds between two tokens.
pub trait Held: Send + 'static {
    /// Bytes of its tensors.
    fn bytes(&self) -> usize;
}

impl Held for Option<Tensor> {
    fn bytes(&self) -> usize {
        self.as_ref().map_or(0, bytes)
    }
}

impl Held for Option<LinearState> {
    fn bytes(&self) -> usize {
        self.as_ref().map_or(0, |sums| sums.tensors().map(bytes).sum())
    }
}

/// Bytes of the elements of `x`.
pub fn bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

/// What a mechanism holds, and how many tokens it has seen.
pub struct Carried<S> {
    position: usize,
    batch: usize,
    held: S,
}

impl<S: Held> Carried<S> {
    /// `held` of `batch` sequences, before their first token.
    pub fn holding(batch: usize, held: S) -> Box<dyn DecodeState> {
        Box::new(Self { position: 0, batch, held })
    }

    /// [`Self::holding`] nothing.
    pub fn start(batch: usize) -> Box<dyn DecodeState>
    where
        S: Default,
    {
        Self::holding(batch, S::default())
    }

    /// Takes one token: `step` moves what is held on, given the token's position.
    pub fn advance<T>(&mut self, step: impl FnOnce(&mut S, usize) -> Result<T>) -> Result<T> {
        let out = step(&mut self.held, self.position)?;
        self.position += 1;
        Ok(out)
    }
}

impl<S: Held> DecodeState for Carried<S> {
    fn position(&self) -> usize {
        self.position
    }

    fn set_position(&mut self, position: usize) {
        self.position = position;
    }

    fn batch(&self) -> usize {
        self.batch
    }

    fn bytes(&self) -> usize {
        self.held.bytes()
    }
}

/// The sums of a linear mechanism.
pub type LinearSums = Carried<Option<LinearState>>;

impl LinearSums {
    /// Linear attention of one token, which is added to the sums.
    pub fn attend(&mut self, qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
        self.advance(|sums, position| decode::step(qkv, call, sums, position))
    }
}

/// Keys and values of tokens, [b g, rows, d] each for g heads, which the query heads may share. Memory is taken at the first token.
pub struct KeyValueCache {
    rows: usize,
    held: Option<[Tensor; 2]>,
}

impl KeyValueCache {
    /// An empty cache of `rows` tokens.
    pub fn new(rows: usize) -> Self {
        Self { rows: rows.max(1), held: None }
    }

    /// Tokens that it has room for.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Writes keys and values [b, g, n, d] into the rows from `at` on.
    pub fn set(&mut self, k: &Tensor, v: &Tensor, at: usize) -> Result<()> {
        let (b, g, n, d) = k.dims4()?;
        if at + n > self.rows {
            bail!("{n} rows from row {at} on do not fit a cache of {}", self.rows);
        }
        let [keys, values] = self.memory(k)?;
        let flat = |x: &Tensor| x.contiguous()?.reshape((b * g, n, d));
        keys.slice_set(&flat(k)?, 1, at)?;
        values.slice_set(&flat(v)?, 1, at)
    }

    /// The memory of all rows, of keys and values like `k`, [b, g, _, d]; where there is none yet, it is taken.
    pub fn memory(&mut self, k: &Tensor) -> Result<&[Tensor; 2]> {
        let (b, g, _, d) = k.dims4()?;
        match &mut self.held {
            Some(held) => Ok(held),
            none => {
                // ones and not zeros, whose memory the system only promises: a step that is measured behind tokens that were
                // never there would read one page of zeros in the place of a cache
                let unwritten = || Tensor::ones((b * g, self.rows, d), DType::F32, k.device());
                Ok(none.insert([unwritten()?, unwritten()?]))
            }
        }
    }

    /// Keys and values of `len` rows from the row `from` on, [b g, len, d] each.
    pub fn read(&self, from: usize, len: usize) -> Result<[Tensor; 2]> {
        let Some([k, v]) = &self.held else { bail!("the cache is empty") };
        Ok([k.narrow(1, from, len)?, v.narrow(1, from, len)?])
    }

    /// Softmax attention of queries [b, h, 1, d] over the rows that `tokens` have written; logits are scaled by `scale`.
    pub fn attend(&self, q: &Tensor, tokens: usize, scale: f64) -> Result<Heads> {
        let Some([k, v]) = &self.held else { bail!("the cache is empty") };
        attend_cached(q, k, v, tokens.min(self.rows), scale)
    }
}

impl Held for KeyValueCache {
    fn bytes(&self) -> usize {
        self.held.iter().flatten().map(bytes).sum()
    }
}

impl Carried<KeyValueCache> {
    /// Softmax attention of one token over its own key and value and those of the last tokens; the token at position i lies in row
    /// i mod rows. Queries [b, h, 1, d]; keys and values [b, g, 1, d], each shared by h/g neighbouring query heads.
    pub fn attend(&mut self, qkv: &Qkv) -> Result<Heads> {
        self.advance(|cache, position| {
            let (q, k) = (qkv.q()?, qkv.k()?);
            cache.set(&k, &qkv.v()?, position % cache.rows)?;
            cache.attend(&q, position + 1, 1.0 / (q.dim(3)? as f64).sqrt())
        })
    }

    /// Keys and values [b g, tokens, d] so far, where there is room for all.
    pub fn held(&self) -> Result<[Tensor; 2]> {
        self.held.read(0, self.position.min(self.held.rows))
    }
}
