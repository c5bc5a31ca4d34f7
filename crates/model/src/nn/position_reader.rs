//! Reads what stood at every position from one vector (compression of MAD, Poli et al. 2024).
//!
//! ```text
//! z_p = h + sinusoid(p);  z_p <- gelu(W z_p' + b), twice, z' = RMSNorm(z)
//! ```

use candle_core::{Result, Tensor};

use super::embedding::interleaved;
use super::norm::RmsNorm;
use super::params::{Init, ParamBuilder};
use effattn_kernel::activation::gelu;
use effattn_kernel::embedding::embedding;
use effattn_kernel::linear::linear;

/// Layers of the decoder.
const LAYERS: usize = 2;
/// Added to the mean square.
const EPS: f64 = 1e-6;

/// A small decoder without a view of other positions.
pub struct PositionReader {
    positions: Tensor, // [max_len, width]
    layers: Vec<(RmsNorm, Tensor, Tensor)>,
}

impl PositionReader {
    /// Parameters `reader.<i>.norm.weight`, `reader.<i>.weight` [width, width] from N(0, 0.02^2) and `reader.<i>.bias`, which starts at 0.
    pub fn new(builder: &ParamBuilder, max_len: usize, width: usize) -> Result<Self> {
        let layer = |number: usize| {
            let builder = builder.pp(format!("reader.{number}"));
            let norm = RmsNorm::new(&builder, "norm", width, EPS)?;
            let weight = builder.param("weight", &[width, width], Init::normal(0.02))?;
            Ok((norm, weight, builder.param("bias", &[width], Init::ZERO)?))
        };
        let layers = (0..LAYERS).map(layer).collect::<Result<_>>()?;
        Ok(Self { positions: interleaved(max_len, width, &builder.device())?, layers })
    }

    /// What stood at the positions `at`, of `vectors` [asked, width]: [asked, width].
    pub fn forward(&self, vectors: &Tensor, at: &[u32]) -> Result<Tensor> {
        let mut z = (vectors + embedding(&Tensor::new(at, vectors.device())?, &self.positions)?)?;
        for (norm, weight, bias) in &self.layers {
            z = gelu(&linear(&norm.forward(&z)?, weight, Some(bias))?)?;
        }
        Ok(z)
    }

    /// Floating-point operations for `count` positions of `width` channels, a product and a sum counted as one.
    pub fn flops(count: usize, width: usize) -> usize {
        count * width * (1 + LAYERS * (width + 5))
    }
}
