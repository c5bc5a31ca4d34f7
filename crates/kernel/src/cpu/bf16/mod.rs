//! Matrix products of operands rounded to bf16, summed in f32.
//!
//! On processors with AVX512-BF16 operands are packed to pairs of bf16 and multiplied by the processor's dot product,
//! twice as many at a time as in f32, or by the tiles of AMX. Elsewhere they are rounded where they are packed and multiplied in f32: the same numbers
//! up to the order of additions.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod block;
#[cfg(target_arch = "x86_64")]
mod native;
#[cfg(target_arch = "x86_64")]
mod operands;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod pack;
#[cfg(target_arch = "x86_64")]
mod packed;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod registers;
mod stored;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod tiles;

use std::cell::RefCell;

use super::exact::gemm_exact;
use super::matrix::{Mat, MatMut, Threads};
use super::panel;
use crate::device::simd::{SimdLevel, level};
use crate::profile::{self, ProductKernel};
#[cfg(target_arch = "x86_64")]
pub use native::{Factor, PANEL, Panels, pack_columns, pack_lines, pack_rows, product};
#[cfg(target_arch = "x86_64")]
pub use packed::{Lines, add_lines, lines_len, lines_room, pack_left, pairs};
pub use stored::{load, load_rows, round, store};

/// c = a b of contiguous packed pairs, a [rows, depth] and b [depth, width] with rows padded to multiples of 16:
/// to measure how long a product of this shape takes.
#[cfg(target_arch = "x86_64")]
pub(crate) fn pairs_product(c: &mut [f32], a: &[u32], b: &[u32], [rows, depth, width]: [usize; 3]) {
    let row = width.next_multiple_of(operands::LANES);
    let to = operands::BlockOut { data: c, row: width, alpha: 1.0, beta: None };
    let left = operands::Left { data: a, row: depth, step: 1 };
    block::multiply(to, left, operands::Right { data: b, row }, rows, depth, width);
}

/// Whether this processor multiplies bf16 itself.
pub fn is_native() -> bool {
    matches!(level(), SimdLevel::Avx512Bf16 | SimdLevel::Amx)
}

/// Whether it does so tile by tile.
#[cfg(target_arch = "x86_64")]
fn has_tiles() -> bool {
    level() == SimdLevel::Amx
}

/// Rows of a result that are computed together tile by tile, if products are in the format that is set.
pub fn tile_rows() -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::matmul_format::{MatmulFormat, matmul_format};
        if matmul_format() == MatmulFormat::Bf16 && has_tiles() {
            return Some(2 * registers::ROWS);
        }
    }
    None
}

/// c = alpha a b, or alpha a b + beta c, of rounded a and b, on this thread.
pub fn gemm(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>) {
    #[cfg(target_arch = "x86_64")]
    if is_native() {
        return native::gemm(c, a, b, alpha, beta);
    }
    gemm_emulated(c, a, b, alpha, beta);
}

thread_local! {
    static ROUNDED: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// The same by products in f32.
pub fn gemm_emulated(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>) {
    if panel::has_vectors() {
        profile::count(ProductKernel::Gemm, a.rows, a.cols, b.cols);
        return panel::multiply(c, a, b, alpha, beta, true);
    }
    ROUNDED.with_borrow_mut(|[left, right]| {
        let (a, b) = (rounded(a, left), rounded(b, right));
        gemm_exact(c, a, b, alpha, beta, Threads::One);
    });
}

/// `x` rounded to bf16, as f32 in `to`.
fn rounded<'a>(x: Mat, to: &'a mut Vec<f32>) -> Mat<'a> {
    to.clear();
    to.extend(x.data.iter().map(|&x| half::bf16::from_f32(x).to_f32()));
    Mat { data: to, ..x }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "x86_64")]
    use crate::cpu::par::Chunks;

    /// Whole numbers, which bf16 holds.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 31 + seed * 17) % 19) as f32 - 9.0).collect()
    }

    /// Numbers that are rounded.
    fn fractions(count: usize, seed: usize) -> Vec<f32> {
        numbers(count, seed).iter().enumerate().map(|(i, x)| x * 0.37 + i as f32 * 1e-3).collect()
    }

    type Gemm = fn(MatMut, Mat, Mat, f32, Option<f32>);

    /// The product of one shape by `gemm`, all four layouts of the factors, with the gap between rows of c.
    fn products(
        gemm: Gemm,
        (m, k, n): (usize, usize, usize),
        draw: fn(usize, usize) -> Vec<f32>,
    ) -> Vec<f32> {
        let (a, b) = (draw(m * (k + 3) + k * m, 1), draw(k * (n + 2) + n * k, 2));
        let mut all = Vec::new();
        for a in [Mat::strided(&a, m, k, k + 3), Mat::new(&a, k, m).t()] {
            for b in [Mat::strided(&b, k, n, n + 2), Mat::new(&b, n, k).t()] {
                let mut c = numbers(m * (n + 2), 3);
                gemm(MatMut::strided(&mut c, m, n, n + 2), a, b, 0.5, None);
                gemm(MatMut::strided(&mut c, m, n, n + 2), a, b, 1.0, Some(2.0));
                all.extend(c);
                let mut c = numbers(n * (m + 2), 3);
                gemm(MatMut::strided(&mut c, n, m, m + 2).t(), a, b, 1.0, Some(1.0));
                all.extend(c);
            }
        }
        all
    }

    const SHAPES: &[(usize, usize, usize)] = &[
        (1, 1, 1),
        (3, 7, 5),
        (17, 64, 33),
        (65, 3, 130),
        (2, 0, 3),
        (0, 3, 4),
        (50, 101, 1),
        (250, 9, 70),
        (5, 1030, 20),
        (13, 2, 16),
        (49, 8, 48),
        (100, 5, 65),
    ];

    fn exact(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>) {
        gemm_exact(c, a, b, alpha, beta, Threads::One);
    }

    #[test]
    fn whole_numbers_are_multiplied_exactly() {
        for &shape in SHAPES {
            let want = products(exact, shape, numbers);
            for (name, by) in [("gemm", gemm as Gemm), ("emulated", gemm_emulated)] {
                assert!(products(by, shape, numbers) == want, "{name} {shape:?}");
            }
        }
    }

    #[test]
    fn the_processor_and_the_emulation_agree_and_round() {
        for &shape in SHAPES.iter().filter(|(m, k, n)| m * k * n > 100) {
            let [got, want, f32] =
                [gemm as Gemm, gemm_emulated, exact].map(|by| products(by, shape, fractions));
            let gap = |x: &[f32], y: &[f32]| {
                let gap = x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                gap / y.iter().fold(0.0, |a: f32, b| a.max(b.abs()))
            };
            assert!(gap(&got, &want) < 2e-6, "{shape:?}: {}", gap(&got, &want));
            assert!((1e-5..1e-2).contains(&gap(&got, &f32)), "{shape:?}: {}", gap(&got, &f32));
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn panels_and_gradients_of_weights_are_the_same_products() {
        if !is_native() {
            return;
        }
        for &(m, k, n) in SHAPES.iter().filter(|(m, k, n)| m * k * n > 0) {
            let (x, w) = (numbers(m * (k + 1), 1), numbers(k * n, 2));
            let x = Mat::strided(&x, m, k, k + 1);
            let mut want = numbers(m * n, 3);
            let mut got = want.clone();
            exact(MatMut::new(&mut want, m, n), x, Mat::new(&w, k, n), 1.0, Some(1.0));
            Panels::new(Mat::new(&w, k, n)).multiply(x, &mut got, n, true);
            assert!(got == want, "{m} {k} {n}");
            Panels::new(Mat::new(&w, n, k).t()).multiply(x, &mut got, n, false);
            exact(MatMut::new(&mut want, m, n), x, Mat::new(&w, n, k).t(), 1.0, None);
            assert!(got == want, "{m} {k} {n} turned");
            let dy = numbers(m * n, 4);
            let dy = Mat::new(&dy, m, n);
            let mut tiles = vec![0.0; k * n];
            let chunks = Chunks::of(m, 16);
            let [left, right] = [x, dy].map(|mat| {
                let mut to = vec![0; lines_len(chunks, mat.cols)];
                let room = lines_room(chunks.size, mat.cols);
                for (index, to) in to.chunks_mut(room).enumerate() {
                    Lines::pack(mat.lines(chunks.range(index)), 0, to);
                }
                to
            });
            let lines = |data, width| Lines { data, width };
            add_lines(&mut tiles, lines(&left, k), lines(&right, n), chunks, false);
            add_lines(&mut tiles, lines(&left, k), lines(&right, n), chunks, true);
            let mut outer = vec![0.0; k * n];
            exact(MatMut::new(&mut outer, k, n), x.t(), dy, 2.0, None);
            for (index, tile) in tiles.chunks(64 * k).enumerate() {
                let width = tile.len() / k;
                for (row, tile) in tile.chunks(width).enumerate() {
                    assert!(tile == &outer[row * n + index * 64..][..width], "{m} {k} {n} tile {index}");
                }
            }
        }
    }
}
