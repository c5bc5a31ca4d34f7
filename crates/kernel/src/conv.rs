//! Convolutions over images as rows of tokens: `[b, rows * cols, channels]`, row by row.
//!
//! A dense convolution is [`unfold`] (the patch under every output, side by side) and a matrix product; a depthwise one
//! is [`depthwise_2d`].

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::cpu;
use super::cpu::par::{self, Chunks};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;
use effattn_record::pattern::Grid2d;

/// Where the kernel of a convolution stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    /// Side of the kernel.
    pub size: usize,
    /// Distance between outputs.
    pub stride: usize,
    /// Zeros on every side of the image.
    pub pad: usize,
}

impl ConvGeometry {
    /// The grid of outputs over `grid`; surplus rows and columns are dropped.
    pub fn over(self, grid: Grid2d) -> Grid2d {
        let side = |len: usize| (len + 2 * self.pad).saturating_sub(self.size) / self.stride.max(1) + 1;
        let none = grid.rows + 2 * self.pad < self.size || grid.cols + 2 * self.pad < self.size;
        if none {
            Grid2d { rows: 0, cols: 0 }
        } else {
            Grid2d { rows: side(grid.rows), cols: side(grid.cols) }
        }
    }
}

/// The patch under every output, [b, outputs, size^2 * c] with taps row by row and channels innermost, of `x` [b, n, c].
pub fn unfold(x: &Tensor, grid: Grid2d, window: ConvGeometry) -> Result<Tensor> {
    let (_, n, c) = x.dims3()?;
    if n != grid.len() {
        bail!("{n} tokens are not a grid of {} x {}", grid.rows, grid.cols);
    }
    if super::fused_cpu(x.device()) && x.dtype() == candle_core::DType::F32 {
        return tape::apply(&[&x.contiguous()?], Unfold { grid, window, c });
    }
    unfold_composed(x, grid, window)
}

/// The definition in plain candle operations: padding, and a row of tokens by index per tap.
pub fn unfold_composed(x: &Tensor, grid: Grid2d, window: ConvGeometry) -> Result<Tensor> {
    let (b, n, c) = x.dims3()?;
    let (out, taps) = (window.over(grid), window.size * window.size);
    let nothing = Tensor::zeros((b, 1, c), x.dtype(), x.device())?;
    let padded = Tensor::cat(&[x, &nothing], 1)?;
    let places = (0..out.len()).flat_map(|output| {
        (0..taps).map(move |tap| token(grid, window, out, output, tap).unwrap_or(n) as u32)
    });
    let places = Tensor::from_iter(places, x.device())?;
    padded.index_select(&places, 1)?.reshape((b, out.len(), taps * c))
}

/// The token under tap `tap` of output `output`, if it is on the grid.
fn token(grid: Grid2d, window: ConvGeometry, out: Grid2d, output: usize, tap: usize) -> Option<usize> {
    let place = |at: usize, tap: usize, len: usize| {
        (at * window.stride + tap).checked_sub(window.pad).filter(|place| *place < len)
    };
    let row = place(output / out.cols, tap / window.size, grid.rows)?;
    Some(row * grid.cols + place(output % out.cols, tap % window.size, grid.cols)?)
}

struct Unfold {
    grid: Grid2d,
    window: ConvGeometry,
    c: usize,
}

impl FusedOp for Unfold {
    fn name(&self) -> &'static str {
        "unfold"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let Self { grid, window, c } = *self;
        let (out, taps) = (window.over(grid), window.size * window.size);
        let (images, width) = (operands[0].1.dims()[0], taps * c);
        let count = images * out.len();
        let size = Chunks::rows(count, width).size;
        let y = par::build(count * width, size * width, |index, y| {
            for (offset, y) in y.chunks_exact_mut(width.max(1)).enumerate() {
                let row = index * size + offset;
                let (image, output) = (row / out.len(), row % out.len());
                for (tap, y) in y.chunks_exact_mut(c.max(1)).enumerate() {
                    match token(grid, window, out, output, tap) {
                        Some(token) => y.copy_from_slice(&x[(image * grid.len() + token) * c..][..c]),
                        None => y.fill(0.0),
                    }
                }
            }
        });
        Ok((y, (images, out.len(), width).into()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let Self { grid, window, c } = *self;
        let (out, taps) = (window.over(grid), window.size * window.size);
        let tokens = x.dim(0)? * grid.len();
        let size = Chunks::rows(tokens, taps * c).size;
        // every token collects from the outputs whose patch it is in
        let output = |at: usize, tap: usize, len: usize| {
            let from = (at + window.pad).checked_sub(tap)?;
            (from % window.stride == 0).then_some(from / window.stride).filter(|place| *place < len)
        };
        let dx = cpu::with_slices([grad], |[dy]| {
            Ok(par::build(tokens * c, size * c, |index, dx| {
                for (offset, dx) in dx.chunks_exact_mut(c.max(1)).enumerate() {
                    let (image, token) =
                        ((index * size + offset) / grid.len(), (index * size + offset) % grid.len());
                    for tap in 0..taps {
                        let row = output(token / grid.cols, tap / window.size, out.rows);
                        let col = output(token % grid.cols, tap % window.size, out.cols);
                        if let (Some(row), Some(col)) = (row, col) {
                            let at = ((image * out.len() + row * out.cols + col) * taps + tap) * c;
                            cpu::rows::add(&dy[at..at + c], dx);
                        }
                    }
                }
            }))
        })?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

/// Each channel with its own 3 x 3 kernel, stride 1, zeros around: `x` [b, n, c], `weight` [c, 1, 3, 3], `bias` `[c]`.
pub fn depthwise_2d(x: &Tensor, weight: &Tensor, bias: &Tensor, grid: Grid2d) -> Result<Tensor> {
    let (_, n, c) = x.dims3()?;
    if n != grid.len() || weight.dims() != [c, 1, 3, 3] || bias.dims() != [c] {
        bail!("weight {:?} and {n} tokens of {c} do not fit {} x {}", weight.dims(), grid.rows, grid.cols);
    }
    let taps = weight.reshape((c, 9))?.t()?.contiguous()?; // [9, c]
    if super::fused_cpu(x.device()) && x.dtype() == candle_core::DType::F32 {
        return tape::apply(&[&x.contiguous()?, &taps, &bias.contiguous()?], Depthwise { grid });
    }
    depthwise_2d_composed(x, &taps, bias, grid)
}

const AROUND: ConvGeometry = ConvGeometry { size: 3, stride: 1, pad: 1 };

/// The definition: the patches, weighted and summed. `taps` [9, c].
pub fn depthwise_2d_composed(x: &Tensor, taps: &Tensor, bias: &Tensor, grid: Grid2d) -> Result<Tensor> {
    let (b, n, c) = x.dims3()?;
    let patches = unfold_composed(x, grid, AROUND)?.reshape((b, n, 9, c))?;
    patches.broadcast_mul(taps)?.sum(2)?.broadcast_add(bias)
}

struct Depthwise {
    grid: Grid2d,
}

impl Depthwise {
    /// Adds to `y` (image `image`, token `token`) the taps of `x`; with `turned` taps the gradient.
    fn add(&self, x: &[f32], taps: &[f32], (image, token): (usize, usize), turned: bool, y: &mut [f32]) {
        let c = y.len();
        for tap in 0..9 {
            if let Some(other) = self::token(self.grid, AROUND, self.grid, token, tap) {
                let weight = if turned { 8 - tap } else { tap };
                let x = &x[(image * self.grid.len() + other) * c..][..c];
                for ((y, x), weight) in y.iter_mut().zip(x).zip(&taps[weight * c..][..c]) {
                    *y += x * weight;
                }
            }
        }
    }

    /// All tokens of `x` with `taps`; `start` is what every sum starts from.
    fn sums(&self, x: &[f32], taps: &[f32], start: Option<&[f32]>, turned: bool) -> Vec<f32> {
        let c = taps.len() / 9;
        let tokens = x.len() / c.max(1);
        let size = Chunks::rows(tokens, 9 * c).size;
        par::build(x.len(), size * c, |index, y| {
            for (offset, y) in y.chunks_exact_mut(c.max(1)).enumerate() {
                let at = index * size + offset;
                match start {
                    Some(start) => y.copy_from_slice(start),
                    None => y.fill(0.0),
                }
                self.add(x, taps, (at / self.grid.len(), at % self.grid.len()), turned, y);
            }
        })
    }
}

impl FusedOp for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise-2d"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, taps, bias] = cpu::slices(operands)?;
        Ok((self.sums(x, taps, Some(bias), false), operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, taps, bias] = op::operands(operands)?;
        let c = bias.elem_count();
        let (dx, mut sums) = cpu::with_slices([x, taps, grad], |[x, taps, dy]| {
            let dx = self.sums(dy, taps, None, true);
            // gradients of the nine taps, then of the bias, summed over tokens in parts of fixed size
            let tokens = dy.len() / c.max(1);
            let chunks = Chunks::rows(tokens, 10 * c);
            let parts = par::build(chunks.count() * 10 * c, 10 * c, |index, part| {
                part.fill(0.0);
                for at in chunks.range(index) {
                    let (image, here) = (at / self.grid.len(), at % self.grid.len());
                    let dy = &dy[at * c..][..c];
                    for tap in 0..9 {
                        if let Some(other) = token(self.grid, AROUND, self.grid, here, tap) {
                            let x = &x[(image * self.grid.len() + other) * c..][..c];
                            for ((sum, x), dy) in part[tap * c..][..c].iter_mut().zip(x).zip(dy) {
                                *sum += x * dy;
                            }
                        }
                    }
                    cpu::rows::add(dy, &mut part[9 * c..]);
                }
            });
            Ok((dx, par::sum_parts(&parts, 10 * c)))
        })?;
        let dbias = sums.split_off(9 * c);
        Ok(vec![cpu::gradient(x, dx)?, cpu::gradient(taps, sums)?, cpu::gradient(bias, dbias)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (b, rows, cols, c) in [(1, 1, 1, 1), (2, 5, 7, 3), (1, 13, 4, 17), (3, 9, 9, 64)] {
            let grid = Grid2d { rows, cols };
            let x = randn("x", &[b, rows * cols, c]);
            for (size, stride, pad) in [(1, 1, 0), (2, 2, 0), (3, 1, 1), (3, 2, 1), (7, 4, 3)] {
                let window = ConvGeometry { size, stride, pad };
                if !window.over(grid).is_empty() {
                    let what = format!("{rows} x {cols}, {window:?}");
                    check(&what, std::slice::from_ref(&x), 1e-6, |x| unfold(&x[0], grid, window));
                }
            }
            let inputs = [x, randn("weight", &[c, 1, 3, 3]), randn("bias", &[c])];
            check(&format!("{rows} x {cols}"), &inputs, 1e-5, |x| depthwise_2d(&x[0], &x[1], &x[2], grid));
        }
    }

    #[test]
    fn surplus_rows_are_dropped() {
        let out = |side, window: ConvGeometry| window.over(Grid2d { rows: side, cols: side }).rows;
        assert_eq!(out(224, ConvGeometry { size: 7, stride: 4, pad: 2 }), 56);
        assert_eq!(out(5, ConvGeometry { size: 2, stride: 2, pad: 0 }), 2);
        assert_eq!(out(1, ConvGeometry { size: 2, stride: 2, pad: 0 }), 0);
    }
}
