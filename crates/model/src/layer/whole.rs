//! A block: the layer around a mechanism, then the feed-forward half.

use candle_core::{Device, Result, Tensor, bail};

use super::{AttentionLayer, BlockConfig, BlockStyle, ForwardArgs};
use crate::attention::decode::DecodeState;
use crate::nn::dropout::Dropout;
use crate::nn::ffn::Ffn;
use crate::nn::params::ParamBuilder;
use effattn_kernel::cpu::few;
use effattn_kernel::{nan_trace, tape};

/// Attention and feed-forward half.
pub struct Block {
    attention: AttentionLayer,
    /// `None`: the block has no feed-forward half.
    ffn: Option<Ffn>,
    /// `layer 3 (ls)`.
    name: String,
}

impl Block {
    /// Parameters below `builder` (prefix `layers.<i>`).
    pub fn new(config: &BlockConfig, builder: &ParamBuilder) -> Result<Self> {
        let attention = AttentionLayer::new(config, builder)?;
        let BlockStyle { norm, name, .. } = config.style;
        let ffn = match config.ffn {
            0 => None,
            hidden => Some(Ffn::new(builder, config.width, hidden, config.form, norm, name)?),
        };
        let scope = format!("layer {} ({})", config.layer + 1, config.entry.name);
        Ok(Self { attention, ffn, name: scope })
    }

    /// [b, n, width] to [b, n, width], or the rows of it that `call` says.
    pub fn forward(&self, x: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let x = self.half("attention", &[], || self.attention.forward(x, &call.branch(0)))?;
        self.feed_forward(x, call.dropout_behind())
    }

    fn feed_forward(&self, x: Tensor, dropout: Dropout) -> Result<Tensor> {
        let Some(ffn) = &self.ffn else { return Ok(x) };
        self.half("feed-forward half", &[&x], || ffn.forward(&x, dropout.branch(1)))
    }

    /// [`Self::forward`] of a mechanism with a second stream [b, rows, width], and the stream of the next block.
    pub fn forward_with_stream(
        &self,
        x: &Tensor,
        stream: &Tensor,
        call: &ForwardArgs,
    ) -> Result<(Tensor, Tensor)> {
        let mut next = None;
        let attention = &self.attention;
        let call = ForwardArgs { stream: Some(stream), ..*call };
        // not as bf16 activations: the stream is read by the blocks behind this one
        let run = || -> Result<Tensor> {
            let (x, stream) =
                attention.run(x, &call.branch(0), false, |input| attention.mechanism.forward(input))?;
            next = stream;
            Ok(x)
        };
        let x = nan_trace::in_scope(|| format!("{}, attention", self.name), run)?;
        let Some(next) = next else { bail!("{} has no second stream", self.name) };
        Ok((self.feed_forward(x, call.dropout_behind())?, next))
    }

    /// What this block carries in front of the first of up to `room` tokens of `batch` sequences; nothing where the mechanism has
    /// no form that goes on token by token.
    pub fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        self.attention.init_decode(batch, room, device)
    }

    /// The next token [b, 1, width] of sequences behind `state`: [`Self::forward`] at its position.
    pub fn decode_step(&self, x: &Tensor, state: &mut dyn DecodeState) -> Result<Tensor> {
        few::of_tokens(|| {
            let x = self.attention.decode_step(x, state)?;
            match &self.ffn {
                Some(ffn) => ffn.forward(&x, Dropout::NONE),
                None => Ok(x),
            }
        })
    }

    /// What [`softmax_inputs`](crate::attention::Mechanism::softmax_inputs) gives for this block's input.
    pub fn softmax_inputs(&self, x: &Tensor, call: &ForwardArgs) -> Result<Option<(Tensor, Tensor)>> {
        self.attention.with_input(x, call, false, |input, _| self.attention.mechanism.softmax_inputs(input))
    }

    /// The class token's row behind this block, [b, 1, width].
    pub fn forward_cls(&self, x: &Tensor, cls: &Tensor, call: &ForwardArgs) -> Result<Tensor> {
        let cls = self.half("attention", &[], || self.attention.forward_cls(x, cls, &call.branch(0)))?;
        self.feed_forward(cls, call.dropout)
    }

    /// Runs one half of the block, the last to read `inputs`; names it where something is not finite.
    fn half(&self, half: &str, inputs: &[&Tensor], run: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        nan_trace::in_scope(
            || format!("{}, {half}", self.name),
            || {
                let out = tape::with_bf16_activations(inputs, run)?;
                nan_trace::check("sum with its input", &out)?;
                Ok(out)
            },
        )
    }
}
