//! One token after another.

use std::collections::VecDeque;

use candle_core::{Result, Tensor, bail};

use super::Direction;

/// What [`step`] carries from token to token.
#[derive(Clone, Debug, Default)]
pub struct EmaState {
    /// The recurrences, [b, e, ndim]; `None` before the first token.
    states: Option<Tensor>,
    /// With a truncation, the latest inputs [b, e, 1], the oldest first.
    recent: VecDeque<Tensor>,
}

impl EmaState {
    /// What it holds.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.states.iter().chain(&self.recent)
    }
}

/// [`super::ema`] in [`Direction::Forward`] of the next token, `x` [b, 1, e], which is added to `state`. The `truncation` is the
/// same in all steps.
pub fn step(
    x: &Tensor,
    coefficient: &Tensor,
    decay: &Tensor,
    truncation: Option<usize>,
    state: &mut EmaState,
) -> Result<Tensor> {
    super::check(x, [coefficient, decay], Direction::Forward, truncation)?;
    if x.dim(1)? != 1 {
        bail!("a decode step takes one position, not {}", x.dim(1)?);
    }
    let x = x.transpose(1, 2)?.contiguous()?; // [b, e, 1]
    let zeros = || x.zeros_like()?.broadcast_as((x.dim(0)?, x.dim(1)?, decay.dim(1)?))?.contiguous();
    let before = state.states.take().map_or_else(zeros, Ok)?;
    let mut states = before.broadcast_mul(decay)?.broadcast_add(&x)?;
    if let Some(distance) = truncation {
        if state.recent.len() == distance
            && let Some(oldest) = state.recent.pop_front()
        {
            states = (states - oldest.broadcast_mul(&decay.powf(distance as f64)?)?)?;
        }
        state.recent.push_back(x);
    }
    let y = states.broadcast_mul(coefficient)?.sum(2)?.unsqueeze(1)?;
    state.states = Some(states);
    Ok(y)
}
