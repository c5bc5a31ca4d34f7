//! Decays of the sums.

use candle_core::{Result, Tensor, bail};

/// Factors by which the sums shrink from position to position, as logarithms (finite, at most 0).
///
/// Causal: S_t = exp(log_t) S_{t-1} + phi(k_t) v_t^T, so that a query at i weighs a key at j <= i with
/// exp(sum_{j < t <= i} log_t). Bidirectional: keys j > i are weighted with exp(sum_{i <= t < j} backward_t) as well; the
/// own key counts once. z of the normaliser decays in the same way.
#[derive(Clone, Copy, Debug, Default)]
pub enum Decay<'a> {
    /// Sums keep everything.
    #[default]
    None,
    /// One logarithm per head, a constant without a gradient. Hidden positions are not written, but count as steps
    /// (retention).
    PerHead(&'a [f64]),
    /// A logarithm per head and position. A hidden position changes nothing: no write, no decay (Mamba-2).
    PerToken {
        /// [b, h, n].
        log: &'a Tensor,
        /// Those of keys after the query, [b, h, n]; absent: `log`. Bidirectional only.
        backward: Option<&'a Tensor>,
    },
    /// A logarithm per head, position and key channel; hidden positions as in [`Self::PerToken`] (GLA).
    PerChannel {
        /// [b, h, n, d].
        log: &'a Tensor,
        /// Those of keys after the query, [b, h, n, d]; absent: `log`. Bidirectional only.
        backward: Option<&'a Tensor>,
    },
    /// Logits [b, h, n] of a gate g that also weighs what is written, causal only:
    /// S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T. Hidden positions as in [`Self::PerToken`] (Random Feature Attention).
    Gate(&'a Tensor),
}

impl<'a> Decay<'a> {
    /// The decay tensors, forward first.
    pub(super) fn tensors(&self) -> Vec<&'a Tensor> {
        match *self {
            Self::None | Self::PerHead(_) => Vec::new(),
            Self::PerToken { log, backward } | Self::PerChannel { log, backward } => {
                std::iter::once(log).chain(backward).collect()
            }
            Self::Gate(logits) => vec![logits],
        }
    }

    /// Forward and backward logarithms [b, h, n] or [b, h, n, d] in the type of `values` [b, h, n, e], hidden steps of `mask`
    /// [b, 1, n, 1] taken into account; `None` where there are no such decays.
    pub(super) fn logs(&self, values: &Tensor, mask: Option<&Tensor>) -> Result<Option<(Tensor, Tensor)>> {
        let (b, h, n, _) = values.dims4()?;
        let ready = |log: &Tensor| -> Result<Tensor> {
            let log = log.to_dtype(values.dtype())?.contiguous()?;
            match (mask, log.rank()) {
                (Some(mask), 3) => log.broadcast_mul(&mask.squeeze(3)?),
                (Some(mask), _) => log.broadcast_mul(mask),
                (None, _) => Ok(log),
            }
        };
        match *self {
            Self::None | Self::Gate(_) => Ok(None),
            Self::PerHead(log) => {
                let log = Tensor::from_slice(log, (1, h, 1), values.device())?.to_dtype(values.dtype())?;
                let log = log.broadcast_as((b, h, n))?.contiguous()?;
                Ok(Some((log.clone(), log)))
            }
            Self::PerToken { log, backward } | Self::PerChannel { log, backward } => {
                Ok(Some((ready(log)?, ready(backward.unwrap_or(log))?)))
            }
        }
    }

    /// Checks shapes for `t` keys.
    pub(super) fn check(&self, [b, h, n, d]: [usize; 4], t: usize, causal: bool) -> Result<()> {
        if !matches!(self, Self::None) && n != t {
            bail!("sums that decay need as many keys as queries, got {n} queries and {t} keys");
        }
        let shape: &[usize] =
            if matches!(self, Self::PerChannel { .. }) { &[b, h, n, d] } else { &[b, h, n] };
        if let Some(other) = self.tensors().into_iter().find(|x| x.dims() != shape) {
            bail!("decays of shape {:?} were given, not {shape:?}", other.dims());
        }
        match self {
            Self::PerHead(log) if log.len() != h => bail!("{} decays were given for {h} heads", log.len()),
            Self::Gate(_) if !causal => bail!("gated linear attention is causal only"),
            Self::PerToken { backward: Some(_), .. } | Self::PerChannel { backward: Some(_), .. }
                if causal =>
            {
                bail!("decays of a backward pass were given to a causal call")
            }
            _ => Ok(()),
        }
    }
}
