//! Token and position embeddings.

use candle_core::{Device, Result, Tensor, bail};

use super::params::{Init, ParamBuilder};
use effattn_kernel::embedding::with_positions;

/// What stands for a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Positions {
    /// A trained row per position.
    #[default]
    Learned,
    /// Fixed waves: sin on even, cos on odd channels, frequencies 10000^(-2i / width) (Long Range Arena).
    Sinusoid,
}

/// `token_embedding[ids]` + position_embedding[0..n], not scaled.
pub struct Embedding {
    tokens: Tensor,    // [vocab, width]
    positions: Tensor, // [max_len, width]
}

impl Embedding {
    /// Parameters `token_embedding.weight` [vocab, width] and, if learned, `position_embedding.weight`
    /// [max_len, width], both from N(0, 0.02^2).
    pub fn new(
        builder: &ParamBuilder,
        (vocab, max_len, width): (usize, usize, usize),
        positions: Positions,
    ) -> Result<Self> {
        let tokens = builder.param("token_embedding.weight", &[vocab, width], Init::normal(0.02))?;
        let positions = match positions {
            Positions::Learned => {
                builder.param("position_embedding.weight", &[max_len, width], Init::normal(0.02))?
            }
            Positions::Sinusoid => interleaved(max_len, width, &builder.device())?,
        };
        Ok(Self { tokens, positions })
    }

    /// `ids` [b, n] (u32) to [b, n, width].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.fits(ids.dim(1)?)?;
        with_positions(ids, &self.tokens, &self.positions)
    }

    /// The vector `front`, `width` long, at position 0 and `ids` [b, n] behind it, [b, n + 1, width].
    pub fn behind(&self, front: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (b, n) = ids.dims2()?;
        self.fits(n + 1)?;
        let first = (front.unsqueeze(0)? + self.positions.narrow(0, 0, 1)?)?;
        let rest = with_positions(ids, &self.tokens, &self.positions.narrow(0, 1, n)?.contiguous()?)?;
        Tensor::cat(&[&first.unsqueeze(0)?.repeat((b, 1, 1))?, &rest], 1)
    }

    fn fits(&self, n: usize) -> Result<()> {
        let rows = self.positions.dim(0)?;
        if n > rows {
            bail!(
                "{n} positions do not fit a position table of {rows} rows; build the model for that length"
            );
        }
        Ok(())
    }
}

/// sin(t f) and cos(t f) by turns, [n, width].
pub(super) fn interleaved(n: usize, width: usize, device: &Device) -> Result<Tensor> {
    let wave = |t: usize, channel: usize| {
        let angle = t as f64 / 10000f64.powf((channel / 2 * 2) as f64 / width as f64);
        (if channel.is_multiple_of(2) { angle.sin() } else { angle.cos() }) as f32
    };
    let data = (0..n * width).map(|i| wave(i / width, i % width)).collect::<Vec<_>>();
    Tensor::from_vec(data, (n, width), device)
}
