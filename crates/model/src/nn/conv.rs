//! Convolutions and batch normalisation over images as rows of tokens [b, rows * cols, channels].

use candle_core::{D, Result, Tensor, Var, bail};

use super::params::{Init, ParamBuilder};
use effattn_kernel::batch_norm::{By, Statistics, batch_norm};
use effattn_kernel::conv::{self, ConvGeometry};
use effattn_kernel::linear::linear;
use effattn_record::pattern::Grid2d;

/// A convolution, `weight` [out, in, size, size].
pub struct Conv {
    weight: Tensor, // [out, in, size, size]
    bias: Option<Tensor>,
    window: ConvGeometry,
}

impl Conv {
    /// Parameters `<name>.weight` and, with `bias`, `<name>.bias`; PyTorch's start.
    pub fn new(
        builder: &ParamBuilder,
        name: &str,
        (inputs, outputs): (usize, usize),
        window: ConvGeometry,
        bias: bool,
    ) -> Result<Self> {
        let fan = inputs * window.size * window.size;
        let shape = [outputs, inputs, window.size, window.size];
        let weight = builder.param(&format!("{name}.weight"), &shape, Init::fan_in(fan))?;
        let bias = bias
            .then(|| builder.param(&format!("{name}.bias"), &[outputs], Init::fan_in(fan)))
            .transpose()?;
        Ok(Self { weight, bias, window })
    }

    /// `x` [b, n, in] on `grid` to [b, m, out] and its grid.
    pub fn forward(&self, x: &Tensor, grid: Grid2d) -> Result<(Tensor, Grid2d)> {
        let out = self.window.over(grid);
        if out.is_empty() {
            bail!(
                "an image of {} x {} is smaller than a kernel of {}",
                grid.rows,
                grid.cols,
                self.window.size
            );
        }
        let trivial = self.window == ConvGeometry { size: 1, stride: 1, pad: 0 };
        let patches = if trivial { x.clone() } else { conv::unfold(x, grid, self.window)? };
        // the taps of a patch lie outermost, its channels innermost; a copy made beforehand would not follow the weights
        // through training
        let weight = self.weight.permute((0, 2, 3, 1))?.contiguous()?.flatten_from(1)?;
        Ok((linear(&patches, &weight, self.bias.as_ref())?, out))
    }
}

/// A 3 x 3 convolution of every channel alone.
pub struct Depthwise {
    weight: Tensor,
    bias: Tensor,
}

impl Depthwise {
    /// Parameters `<name>.weight` [c, 1, 3, 3] and `<name>.bias`.
    pub fn new(builder: &ParamBuilder, name: &str, channels: usize) -> Result<Self> {
        let weight = builder.param(&format!("{name}.weight"), &[channels, 1, 3, 3], Init::fan_in(9))?;
        let bias = builder.param(&format!("{name}.bias"), &[channels], Init::fan_in(9))?;
        Ok(Self { weight, bias })
    }

    /// `x` [b, n, c] on `grid` to the same shape.
    pub fn forward(&self, x: &Tensor, grid: Grid2d) -> Result<Tensor> {
        conv::depthwise_2d(x, &self.weight, &self.bias, grid)
    }
}

/// Batch normalisation of channels: by the batch while training, by running statistics otherwise.
pub struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    mean: Var,
    variance: Var,
}

/// Added to the variance.
const EPS: f64 = 1e-5;
/// Share of the new statistics.
const MOMENTUM: f64 = 0.1;

impl BatchNorm {
    /// Parameters `weight` and `bias` below `builder`; statistics `running_mean` and `running_var`, which start at 0 and 1.
    pub fn new(builder: &ParamBuilder, channels: usize) -> Result<Self> {
        Ok(Self {
            weight: builder.param("weight", &[channels], Init::ONE)?,
            bias: builder.param("bias", &[channels], Init::ZERO)?,
            mean: builder.buffer("running_mean", &[channels], 0.0)?,
            variance: builder.buffer("running_var", &[channels], 1.0)?,
        })
    }

    /// `x` [b, n, c] to the same shape. With `train` the batch's statistics are used, and move the running ones.
    pub fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let running =
            Statistics { mean: self.mean.as_detached_tensor(), variance: self.variance.as_detached_tensor() };
        let parameters = [&self.weight, &self.bias];
        if !train {
            return Ok(batch_norm(x, parameters, By::Given(&running), EPS)?.0);
        }
        let (y, batch) = batch_norm(x, parameters, By::Batch, EPS)?;
        let moved =
            |old: &Tensor, new: &Tensor, scale: f64| (old * (1.0 - MOMENTUM))? + (new * (MOMENTUM * scale))?;
        let count = x.elem_count() / x.dim(D::Minus1)?;
        let unbiased = count as f64 / count.saturating_sub(1).max(1) as f64;
        self.mean.set(&moved(&running.mean, &batch.mean, 1.0)?)?;
        self.variance.set(&moved(&running.variance, &batch.variance, unbiased)?)?;
        Ok(y)
    }
}

/// Images [b, c, rows, cols] as rows of tokens [b, rows * cols, c], and their grid.
pub fn tokens(images: &Tensor) -> Result<(Tensor, Grid2d)> {
    let (_, _, rows, cols) = images.dims4()?;
    Ok((images.flatten_from(2)?.transpose(1, 2)?.contiguous()?, Grid2d { rows, cols }))
}

/// Largest of every 3 x 3 window, stride 2, of `x` [b, n, c], which must not be negative: what is outside counts as 0.
pub fn max_pool(x: &Tensor, grid: Grid2d) -> Result<(Tensor, Grid2d)> {
    let window = ConvGeometry { size: 3, stride: 2, pad: 1 };
    let (b, _, c) = x.dims3()?;
    let out = window.over(grid);
    Ok((conv::unfold(x, grid, window)?.reshape((b, out.len(), 9, c))?.max(2)?, out))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn running_statistics_move_a_tenth_of_the_way() {
        let builder = ParamBuilder::seeded(1, &Device::Cpu, false);
        let norm = BatchNorm::new(&builder.pp("bn"), 1).unwrap();
        let x = Tensor::new(&[[[1f32], [3.0]], [[5.0], [7.0]]], &Device::Cpu).unwrap();
        let y = norm.forward(&x, true).unwrap();
        assert!(y.sum_all().unwrap().to_scalar::<f32>().unwrap().abs() < 1e-5);
        let params = builder.finish();
        let value = |name: &str| params.constants()[name].to_vec1::<f32>().unwrap()[0];
        assert!((value("bn.running_mean") - 0.4).abs() < 1e-6);
        assert!((value("bn.running_var") - (0.9 + 0.1 * 20.0 / 3.0)).abs() < 1e-5);
    }
}
