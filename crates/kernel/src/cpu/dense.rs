//! Linear layers y = x W^T + b with W [out, inp] on row-major slices.

use super::gemm::{Mat, MatMut, Threads, gemm, gemm_add, own};
use super::matmul_format::{MatmulFormat, matmul_format};
use super::par::{self, Chunks};
use super::transpose::transpose;
use super::{bf16, panel};

/// Columns of a panel. The widest micro-kernel of `gemm` (AVX-512) takes as many at a time.
const PANEL: usize = 64;

/// Rows per product: up to here `gemm` reads a panel in place instead of packing it again.
const BAND: usize = 48;

/// Chunks of rows for a linear layer whose input and output together are `width` wide: enough rows to pay for packing the weights,
/// few enough that the rows stay in the cache of one core.
pub fn chunks(rows: usize, width: usize) -> Chunks {
    let most = (131_072 / width.max(1)).clamp(96, 480);
    let size = most.min(rows.div_ceil(8)).max(24);
    // whole bands of the micro-kernel are best, but of a few chunks none may be much smaller than the others
    let unit = bf16::tile_rows().unwrap_or(if rows / size < 16 { 6 } else { 48 });
    Chunks::balanced(rows, size, unit)
}

/// A matrix [depth, columns] on the right of many products, packed once for all of them, for products in the format
/// that is set when it is packed.
pub struct Panels {
    packed: Packed,
    depth: usize,
    columns: usize,
}

enum Packed {
    /// Panel after panel, each [depth, up to PANEL columns].
    F32(Vec<f32>),
    /// For our kernel.
    Own(panel::Panels),
    /// Pairs of bf16.
    #[cfg(target_arch = "x86_64")]
    Bf16(bf16::Panels),
}

impl Panels {
    /// `weight` [out, inp] for x W: depth out, columns inp.
    pub fn new(weight: &[f32], out: usize, inp: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_packed() {
            let packed = Packed::Bf16(bf16::Panels::new(Mat::new(weight, out, inp)));
            return Self { packed, depth: out, columns: inp };
        }
        if let Some(round) = own() {
            let packed = Packed::Own(panel::Panels::new(Mat::new(weight, out, inp), round));
            return Self { packed, depth: out, columns: inp };
        }
        let data = par::build(weight.len(), (PANEL * out).max(1), |index, panel| {
            let width = panel.len() / out;
            for (row, panel) in weight.chunks_exact(inp).zip(panel.chunks_exact_mut(width)) {
                panel.copy_from_slice(&row[index * PANEL..][..width]);
            }
        });
        Self { packed: Packed::F32(data), depth: out, columns: inp }
    }

    /// `weight` [out, inp] for x W^T: depth inp, columns out.
    pub fn turned(weight: &[f32], out: usize, inp: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_packed() {
            let packed = Packed::Bf16(bf16::Panels::new(Mat::new(weight, out, inp).t()));
            return Self { packed, depth: inp, columns: out };
        }
        if let Some(round) = own() {
            let packed = Packed::Own(panel::Panels::new(Mat::new(weight, out, inp).t(), round));
            return Self { packed, depth: inp, columns: out };
        }
        let data = par::build(weight.len(), (PANEL * inp).max(1), |index, panel| {
            let width = panel.len() / inp;
            transpose(&weight[index * PANEL * inp..][..width * inp], width, inp, panel);
        });
        Self { packed: Packed::F32(data), depth: inp, columns: out }
    }

    /// Columns of the result.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Columns of the left factor.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// y = x M, or y += x M, on this thread. Rows of `y` are `stride` apart.
    pub fn multiply(&self, x: Mat, y: &mut [f32], stride: usize, add: bool) {
        let Self { ref packed, depth, columns } = *self;
        let data = match packed {
            Packed::F32(data) => data,
            Packed::Own(panels) => return panels.multiply(x, y, stride, add),
            #[cfg(target_arch = "x86_64")]
            Packed::Bf16(panels) => return panels.multiply(x, y, stride, add),
        };
        for first in (0..columns).step_by(PANEL) {
            let width = PANEL.min(columns - first);
            let panel = Mat::new(&data[first * depth..], depth, width);
            for top in (0..x.rows()).step_by(BAND) {
                let height = BAND.min(x.rows() - top);
                let x = x.lines(top..top + height);
                let y = MatMut::strided(&mut y[top * stride + first..], height, width, stride);
                if add {
                    gemm_add(y, x, panel, 1.0, 1.0, Threads::One);
                } else {
                    gemm(y, x, panel, 1.0, Threads::One);
                }
            }
        }
    }
}

/// Whether factors are packed as pairs of bf16.
pub fn is_packed() -> bool {
    matmul_format() == MatmulFormat::Bf16 && bf16::is_native()
}

/// Floats that hold the packed rows of all `chunks` of a matrix `width` columns wide, as [`WeightGradient::add_packed`] takes
/// them; 0 if they are not packed.
pub fn lines_len(chunks: Chunks, width: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_packed() {
        return bf16::lines_len(chunks, width);
    }
    let _ = (chunks, width);
    0
}

/// Packs a chunk for [`WeightGradient::add_packed`], if factors are packed.
pub fn pack_lines(x: Mat, to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_packed() {
        return bf16::Lines::pack(x, 0, bytemuck::cast_slice_mut(to));
    }
    let _ = (x, to);
}

/// dW = dy^T x, summed over blocks of rows that are added one after another.
pub struct WeightGradient {
    /// Tiles of `size` outputs each, as [inp, size] if `turned` (which packs less, but one tile of 64 outputs would leave
    /// all threads but one idle), else as [size, inp].
    tiles: Vec<f32>,
    out: usize,
    inp: usize,
    size: usize,
    turned: bool,
    empty: bool,
    /// Whether our kernel adds to it, in the layout of the weight, and then whether it rounds factors.
    own: Option<bool>,
}

impl WeightGradient {
    /// Zero, for a weight [out, inp].
    pub fn new(out: usize, inp: usize) -> Self {
        let own = own();
        let turned = own.is_none() && ((inp > 64 && out > 64) || is_packed());
        let size = if turned { 64 } else { 32 };
        Self { tiles: vec![0.0; out * inp], out, inp, size, turned, empty: true, own }
    }

    /// Adds dy^T x over the rows of `dy` [rows, out] and `x` [rows, inp].
    pub fn add(&mut self, dy: Mat, x: Mat) {
        let Self { inp, size, turned, empty, .. } = *self;
        if let Some(round) = self.own {
            panel::add_outer(&mut self.tiles, dy, x, !empty, round);
            self.empty = false;
            return;
        }
        par::each_piece(self.tiles.chunks_mut((size * inp).max(1)), |index, tile| {
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

    /// [`Self::add`] of the rows of `chunks` as [`pack_lines`] packed them. Panics if factors are not packed.
    pub fn add_packed(&mut self, dy: &[f32], x: &[f32], chunks: Chunks) {
        assert!(self.turned && is_packed(), "factors are not packed");
        #[cfg(target_arch = "x86_64")]
        {
            let lines = |data, width| bf16::Lines { data: bytemuck::cast_slice(data), width };
            let (dy, x) = (lines(dy, self.out), lines(x, self.inp));
            bf16::add_lines(&mut self.tiles, x, dy, chunks, !self.empty);
        }
        let _ = (dy, x, chunks);
        self.empty = false;
    }

    /// Writes the gradient, in the layout of the weight.
    pub fn finish(&self, gradient: &mut [f32]) {
        let Self { inp, size, .. } = *self;
        let tile = (size * inp).max(1);
        let tiles = gradient[..self.out * inp].chunks_mut(tile).zip(self.tiles.chunks(tile));
        par::each_piece(tiles, |_, (gradient, tile)| {
            if self.turned {
                transpose(tile, inp, tile.len() / inp, gradient);
            } else {
                gradient.copy_from_slice(tile);
            }
        });
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
    fn products_with_panels_of_odd_shapes() {
        for (rows, out, inp) in [(1, 1, 1), (5, 3, 40), (49, 70, 17), (100, 130, 65)] {
            let weight: Vec<f32> = (0..out * inp).map(|i| ((i * 7) % 11) as f32 - 5.0).collect();
            let (forward, back) = (Panels::turned(&weight, out, inp), Panels::new(&weight, out, inp));
            let x: Vec<f32> = (0..rows * inp).map(|i| ((i * 5) % 13) as f32 - 6.0).collect();
            let stride = out + 2;
            let mut y = vec![-1.0; rows * stride];
            forward.multiply(Mat::new(&x, rows, inp), &mut y, stride, false);
            let mut back_x = vec![1.0; rows * inp];
            back.multiply(Mat::strided(&y, rows, out, stride), &mut back_x, inp, true);
            for row in 0..rows {
                let line = &y[row * stride..];
                for o in 0..out {
                    let exact: f32 = (0..inp).map(|i| x[row * inp + i] * weight[o * inp + i]).sum();
                    assert_eq!(line[o], exact, "[{out}, {inp}] at {row} {o}");
                }
                assert_eq!(line[out..stride], [-1.0, -1.0]);
                for i in 0..inp {
                    let exact: f32 = (0..out).map(|o| line[o] * weight[o * inp + i]).sum();
                    assert_eq!(back_x[row * inp + i], 1.0 + exact, "[{out}, {inp}] at {row} {i}");
                }
            }
        }
    }
}
