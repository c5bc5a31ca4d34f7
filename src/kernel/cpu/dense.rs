//! Linear layers y = x W^T + b with W [out, inp] on row-major slices.

use rayon::prelude::*;

use super::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use super::rows;

/// The transpose [inp, out] of a weight [out, inp]. A product with many chunks of rows packs it much faster than
/// the weight itself.
pub fn transposed(weight: &[f32], out: usize, inp: usize) -> Vec<f32> {
    let mut all = vec![0.0; weight.len()];
    transpose_into(weight, out, inp, out, &mut all);
    all
}

/// Writes the transpose of a weight [out, inp] into rows `stride` apart that start at `all[0]`.
pub fn transpose_into(weight: &[f32], out: usize, inp: usize, stride: usize, all: &mut [f32]) {
    const BAND: usize = 16;
    all.par_chunks_mut(BAND * stride.max(1)).enumerate().for_each(|(band, all)| {
        for first in (0..out).step_by(BAND) {
            for (row, all) in all.chunks_mut(stride).enumerate().take(inp.saturating_sub(band * BAND)) {
                let column = band * BAND + row;
                for (index, y) in (first..out.min(first + BAND)).zip(&mut all[first..]) {
                    *y = weight[index * inp + column];
                }
            }
        }
    });
}

/// dW = dy^T x, summed over blocks of rows that are added one after another.
pub struct WeightGradient {
    /// Tiles of `size` outputs each, as [inp, size] if `turned` (which packs less where inp is large), else
    /// as [size, inp].
    tiles: Vec<f32>,
    out: usize,
    inp: usize,
    size: usize,
    turned: bool,
    empty: bool,
}

impl WeightGradient {
    /// Zero, for a weight [out, inp].
    pub fn new(out: usize, inp: usize) -> Self {
        let turned = inp > 64;
        let size = if turned { 64 } else { 32 };
        Self { tiles: vec![0.0; out * inp], out, inp, size, turned, empty: true }
    }

    /// Adds dy^T x over the rows of `dy` [rows, out] and `x` [rows, inp].
    pub fn add(&mut self, dy: Mat, x: Mat) {
        let Self { inp, size, turned, empty, .. } = *self;
        self.tiles.par_chunks_mut((size * inp).max(1)).enumerate().for_each(|(index, tile)| {
            let outputs = tile.len() / inp;
            let dy = dy.columns(index * size..index * size + outputs);
            let (tile, a, b) = if turned {
                (MatMut::new(tile, inp, outputs), x.t(), dy)
            } else {
                (MatMut::new(tile, outputs, inp), dy.t(), x)
            };
            if empty {
                gemm(tile, a, b, 1.0, Threads::One);
            } else {
                gemm_add(tile, a, b, 1.0, 1.0, Threads::One);
            }
        });
        self.empty = false;
    }

    /// Writes the gradient, in the layout of the weight.
    pub fn finish(&self, gradient: &mut [f32]) {
        let Self { inp, size, .. } = *self;
        let tile = (size * inp).max(1);
        gradient[..self.out * inp].par_chunks_mut(tile).zip(self.tiles.par_chunks(tile)).for_each(
            |(gradient, tile)| {
                if self.turned {
                    rows::transpose(tile, inp, tile.len() / inp, gradient);
                } else {
                    gradient.copy_from_slice(tile);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_gradients_of_odd_shapes_in_blocks() {
        for (out, inp) in [(1, 1), (5, 3), (33, 64), (70, 65), (130, 100)] {
            let (first, second) = (7, 12);
            let rows = first + second;
            let dy: Vec<f32> = (0..rows * out).map(|i| ((i * 7) % 11) as f32 - 5.0).collect();
            let x: Vec<f32> = (0..rows * inp).map(|i| ((i * 5) % 13) as f32 - 6.0).collect();
            let mut sum = WeightGradient::new(out, inp);
            sum.add(Mat::new(&dy, first, out), Mat::new(&x, first, inp));
            sum.add(Mat::new(&dy[first * out..], second, out), Mat::new(&x[first * inp..], second, inp));
            let mut gradient = vec![0.0; out * inp];
            sum.finish(&mut gradient);
            for o in 0..out {
                for i in 0..inp {
                    let exact: f32 = (0..rows).map(|row| dy[row * out + o] * x[row * inp + i]).sum();
                    assert_eq!(gradient[o * inp + i], exact, "[{out}, {inp}] at {o} {i}");
                }
            }
        }
    }

    #[test]
    fn transposes_of_odd_shapes() {
        for (out, inp) in [(1, 1), (3, 40), (33, 17), (16, 50)] {
            let weight: Vec<f32> = (0..out * inp).map(|i| i as f32).collect();
            let stride = out + 2;
            let mut all = vec![-1.0; inp * stride];
            transpose_into(&weight, out, inp, stride, &mut all);
            for i in 0..inp {
                for o in 0..out {
                    assert_eq!(all[i * stride + o], weight[o * inp + i]);
                }
                assert_eq!(all[i * stride + out], -1.0);
            }
        }
    }
}
