//! The layer around a mechanism, one token after another.

use std::cell::RefCell;

use candle_core::{Device, Result, Tensor};

use super::{AttentionLayer, ForwardArgs};
use crate::attention::decode::DecodeState;
use crate::nn::short_conv::ConvPast;

/// The state of a mechanism behind a convolution.
struct ConvolvedState {
    inner: Box<dyn DecodeState>,
    past: RefCell<ConvPast>,
}

impl DecodeState for ConvolvedState {
    fn position(&self) -> usize {
        self.inner.position()
    }

    fn set_position(&mut self, position: usize) {
        self.inner.set_position(position);
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }

    fn bytes(&self) -> usize {
        self.inner.bytes() + self.past.borrow().bytes()
    }
}

impl AttentionLayer {
    /// What the layer carries in front of the first token; nothing where the mechanism has no form that goes on token by token.
    pub(super) fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        let state = self.mechanism.init_decode(batch, room, device)?;
        Ok(match (state, &self.conv) {
            (Some(inner), Some(conv)) => {
                let past = RefCell::new(conv.start(batch, device)?);
                Some(Box::new(ConvolvedState { inner, past }))
            }
            (state, _) => state,
        })
    }

    /// The next token [b, 1, width] of sequences behind `state`, with its residual.
    pub(super) fn decode_step(&self, x: &Tensor, state: &mut dyn DecodeState) -> Result<Tensor> {
        let call = ForwardArgs { position: state.position(), ..ForwardArgs::default() };
        let (x, _) = if self.conv.is_some() {
            let ConvolvedState { inner, past } = state.downcast::<ConvolvedState>()?;
            let call = ForwardArgs { past: Some(past), ..call };
            self.run(x, &call, true, |input| self.mechanism.decode_step(input, inner.as_mut()))?
        } else {
            self.run(x, &call, true, |input| self.mechanism.decode_step(input, state))?
        };
        Ok(x)
    }
}
