//! How alike the patches of a block's output are (Transformer-LS Figure 6; `SPEC-vision.md` section 10).

use candle_core::{Result, Tensor};

/// Rows of the matrix of cosines that are held at a time.
const ROWS: usize = 256;

/// Mean over ordered pairs i != j of |cos(x_i, x_j)|, and of cos(x_i, x_j), for every image of `x` [b, n, e], without the
/// first `skip` tokens: two tensors `[b]`.
pub fn patch_cosine(x: &Tensor, skip: usize) -> Result<(Tensor, Tensor)> {
    let (_, n, _) = x.dims3()?;
    let n = n.saturating_sub(skip);
    if n < 2 {
        candle_core::bail!("{n} patches have no pairs");
    }
    let x = x.narrow(1, skip, n)?.contiguous()?;
    let unit = x.broadcast_div(&(x.sqr()?.sum_keepdim(2)?.sqrt()? + 1e-12)?)?;
    let other = unit.t()?.contiguous()?;
    let (mut absolute, mut signed): (Option<Tensor>, Option<Tensor>) = (None, None);
    for from in (0..n).step_by(ROWS) {
        let cosines = unit.narrow(1, from, ROWS.min(n - from))?.contiguous()?.matmul(&other)?;
        let sum = |x: Tensor, total: Option<Tensor>| {
            let here = x.flatten_from(1)?.sum(1)?;
            match total {
                Some(total) => total + here,
                None => Ok(here),
            }
        };
        absolute = Some(sum(cosines.abs()?, absolute)?);
        signed = Some(sum(cosines, signed)?);
    }
    let mean = |total: Option<Tensor>| {
        let total = total.ok_or_else(|| candle_core::Error::msg("no patches"))?;
        (total - n as f64)? / (n * (n - 1)) as f64 // the diagonal is 1
    };
    Ok((mean(absolute)?, mean(signed)?))
}

/// Errors under corruption beside AlexNet's (`SPEC-vision.md` section 11).
pub struct CorruptionError {
    /// Mean over the corruptions, in percent.
    pub mean_ce: Tensor,
    /// Error over AlexNet's, `[corruptions]`.
    pub ce: Tensor,
    /// The same of what the error exceeds that on clean images by.
    pub relative_ce: Tensor,
}

/// Errors of ImageNet-C: `errors` [corruptions, severities] and `clean` `[1]` of a model, `alexnet` `[corruptions]`
/// (means over severities) and `alexnet_clean` `[1]`; all as fractions.
pub fn corruption_error(
    errors: &Tensor,
    alexnet: &Tensor,
    clean: &Tensor,
    alexnet_clean: &Tensor,
) -> Result<CorruptionError> {
    let mean = errors.mean(1)?;
    let ce = (&mean / alexnet)?;
    let relative_ce = (mean.broadcast_sub(clean)? / alexnet.broadcast_sub(alexnet_clean)?)?;
    Ok(CorruptionError { mean_ce: (ce.mean_all()? * 100.0)?, ce, relative_ce })
}
