//! Softmax over the last dimension in plain candle operations, for the definitions.

use candle_core::{D, DType, Result, Tensor};

/// exp(x - max) / sum exp(x - max) over the last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach();
    let weights = x.broadcast_sub(&max)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}

/// Softmax over the last dimension of the entries whose `visible` (broadcast to `logits`) is not 0; a row
/// without any is zero.
pub fn masked_softmax(logits: &Tensor, visible: &Tensor) -> Result<Tensor> {
    let visible = visible.broadcast_as(logits.shape())?;
    let lowest = if logits.dtype() == DType::F16 { -6e4 } else { -1e30 };
    let hidden = Tensor::new(lowest, logits.device())?.to_dtype(logits.dtype())?;
    let logits = visible.ne(0f64)?.where_cond(logits, &hidden.broadcast_as(logits.shape())?)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let weights = (logits.broadcast_sub(&max)?.exp()? * &visible)?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let empty = sum.eq(0f64)?.to_dtype(sum.dtype())?;
    weights.broadcast_div(&(sum + empty)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn large_and_hidden_logits() {
        let x =
            Tensor::new(&[[1e4f32, -1e4, f32::NEG_INFINITY], [-3e38, -3e38, -1e9]], &Device::Cpu).unwrap();
        assert_eq!(softmax(&x).unwrap().to_vec2::<f32>().unwrap(), [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]);
        let visible = Tensor::new(&[[0f32, 1.0, 0.0], [0.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let y = masked_softmax(&x, &visible).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(y, [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]);
    }
}
