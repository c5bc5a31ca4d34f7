//! Attention one token after another: what a causal mechanism carries from token to token.

use std::any::{Any, type_name};

use candle_core::{DType, Device, Result, Tensor, bail};

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

/// Keys and values of the last tokens.
pub struct KeyValueCache {
    position: usize,
    batch: usize,
    /// [b h, room, d]; the token at position i lies at i mod room.
    k: Tensor,
    v: Tensor,
}

impl KeyValueCache {
    /// An empty cache for the last `room` tokens of `batch` sequences.
    pub fn start(
        (batch, heads, head_dim): (usize, usize, usize),
        room: usize,
        device: &Device,
    ) -> Result<Box<dyn DecodeState>> {
        let empty = || Tensor::zeros((batch * heads, room.max(1), head_dim), DType::F32, device);
        Ok(Box::new(Self { position: 0, batch, k: empty()?, v: empty()? }))
    }

    /// Softmax attention of one token, queries, keys and values [b, h, 1, d], over the cached ones and its own.
    pub fn attend(&mut self, qkv: &Qkv) -> Result<Heads> {
        let (b, h, n, d) = qkv.value_dims()?;
        if n != 1 {
            bail!("{n} tokens at once; a cache takes one after another");
        }
        let flat = |x: Tensor| x.contiguous()?.reshape((b * h, 1, d));
        let room = self.k.dim(1)?;
        self.k.slice_set(&flat(qkv.k()?)?, 1, self.position % room)?;
        self.v.slice_set(&flat(qkv.v()?)?, 1, self.position % room)?;
        self.position += 1;
        let seen = self.position.min(room);
        let scores = (flat(qkv.q()?)? / (d as f64).sqrt())?.matmul(&self.k.narrow(1, 0, seen)?.t()?)?;
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        Ok(Heads::Split(weights.matmul(&self.v.narrow(1, 0, seen)?)?.reshape((b, h, 1, d))?))
    }
}

impl DecodeState for KeyValueCache {
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
        bytes(&self.k) + bytes(&self.v)
    }
}

/// The sums of a linear mechanism.
pub struct LinearSums {
    position: usize,
    batch: usize,
    /// `None` before the first token.
    sums: Option<LinearState>,
}

impl LinearSums {
    /// Empty sums of `batch` sequences.
    pub fn start(batch: usize) -> Box<dyn DecodeState> {
        Box::new(Self { position: 0, batch, sums: None })
    }

    /// Linear attention of one token, which is added to the sums.
    pub fn attend(&mut self, qkv: &Qkv, call: &LinearAttention) -> Result<Heads> {
        let out = decode::step(qkv, call, &mut self.sums, self.position)?;
        self.position += 1;
        Ok(out)
    }
}

impl DecodeState for LinearSums {
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
        self.sums.as_ref().map_or(0, |sums| sums.tensors().map(bytes).sum())
    }
}

/// Bytes of the elements of `x`.
pub fn bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

/// What a recurrence holds between two tokens.
pub trait Held: Default + Send + 'static {
    /// Bytes of its tensors.
    fn bytes(&self) -> usize;
}

impl Held for Option<Tensor> {
    fn bytes(&self) -> usize {
        self.as_ref().map_or(0, bytes)
    }
}

/// The state of a recurrence, empty before the first token.
pub struct Recurrent<S> {
    position: usize,
    batch: usize,
    held: S,
}

impl<S: Held> Recurrent<S> {
    /// The state of `batch` sequences before their first token.
    pub fn start(batch: usize) -> Box<dyn DecodeState> {
        Box::new(Self { position: 0, batch, held: S::default() })
    }

    /// Takes one token: `step` moves what is held on.
    pub fn advance<T>(&mut self, step: impl FnOnce(&mut S) -> Result<T>) -> Result<T> {
        let out = step(&mut self.held)?;
        self.position += 1;
        Ok(out)
    }
}

impl<S: Held> DecodeState for Recurrent<S> {
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
