//! Attention one token after another: what a causal mechanism carries from token to token.

use candle_core::{DType, Device, Result, Tensor, bail};

use effattn_kernel::heads::{Heads, Qkv};
use effattn_kernel::linear_attention::LinearAttention;
use effattn_kernel::linear_attention::decode::{self, LinearState};

/// What one layer carries.
#[derive(Debug)]
pub struct DecodeState {
    /// Tokens so far.
    pub len: usize,
    held: Held,
}

#[derive(Debug)]
enum Held {
    /// Keys and values [b h, room, d]; the token at position i lies at i mod room.
    Cache { k: Tensor, v: Tensor },
    /// The sums of a linear mechanism; none in front of the first token.
    Sums(Option<LinearState>),
}

impl DecodeState {
    /// An empty cache for the last `room` tokens of `batch` sequences.
    ///
    /// # Errors
    /// Too little memory.
    pub fn cache(
        (batch, heads, head_dim): (usize, usize, usize),
        room: usize,
        device: &Device,
    ) -> Result<Self> {
        let empty = || Tensor::zeros((batch * heads, room.max(1), head_dim), DType::F32, device);
        Ok(Self { len: 0, held: Held::Cache { k: empty()?, v: empty()? } })
    }

    /// Empty sums.
    pub const fn sums() -> Self {
        Self { len: 0, held: Held::Sums(None) }
    }

    /// Softmax attention of one token, queries, keys and values [b, h, 1, d], over the cached ones and its own.
    ///
    /// # Errors
    /// Shapes that do not fit the cache.
    pub fn attend(&mut self, qkv: &Qkv) -> Result<Heads> {
        let Held::Cache { k, v } = &self.held else { bail!("this state has no cache") };
        let (b, h, n, d) = qkv.value_dims()?;
        if n != 1 {
            bail!("{n} tokens at once; a cache takes one after another");
        }
        let flat = |x: Tensor| x.contiguous()?.reshape((b * h, 1, d));
        let room = k.dim(1)?;
        k.slice_set(&flat(qkv.k()?)?, 1, self.len % room)?;
        v.slice_set(&flat(qkv.v()?)?, 1, self.len % room)?;
        self.len += 1;
        let seen = self.len.min(room);
        let scores = (flat(qkv.q()?)? / (d as f64).sqrt())?.matmul(&k.narrow(1, 0, seen)?.t()?)?;
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        Ok(Heads::Split(weights.matmul(&v.narrow(1, 0, seen)?)?.reshape((b, h, 1, d))?))
    }

    /// Linear attention of one token, which is added to the sums.
    ///
    /// # Errors
    /// As [`decode::step`].
    pub fn linear(&mut self, qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
        let Held::Sums(sums) = &mut self.held else { bail!("this state has no sums") };
        let out = decode::step(qkv, call, sums, self.len)?;
        self.len += 1;
        Ok(out)
    }
}
