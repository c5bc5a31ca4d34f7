//! Transposes of row-major matrices.

#[cfg(target_arch = "x86_64")]
use crate::device::simd::{SimdLevel, level};

/// Rows and columns of a tile: a cache line.
const TILE: usize = 16;

type Tile = [[f32; TILE]; TILE];

/// Elements from the first of a tile on, and the distance of its rows.
type Source<'a> = (&'a [f32], usize);

/// The same, to write.
type Target<'a> = (&'a mut [f32], usize);

/// The transpose of a row-major [rows, width] matrix.
///
/// Tile by tile, each read and written in whole lines: lines of a matrix whose width is a power of two push each other out
/// of the first cache when they are visited element by element. Panics like indexing if a slice is too short.
pub fn transpose(x: &[f32], rows: usize, width: usize, y: &mut [f32]) {
    transpose_apart((x, width), rows, width, (y, rows));
}

/// [`transpose`] of rows that are as far apart as stands beside `x` to rows that are as far apart as stands beside `y`; what lies
/// between those is left as it is.
pub fn transpose_apart(
    (x, stride): (&[f32], usize),
    rows: usize,
    width: usize,
    (y, apart): (&mut [f32], usize),
) {
    let matrix = Matrix { x, stride, rows, width, y, apart };
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V4::try_new().filter(|_| level() >= SimdLevel::Avx512) {
            pulp::Simd::vectorize(simd, wide::Wide(matrix, simd));
            return;
        }
        if let Some(simd) = pulp::x86::V3::try_new().filter(|_| level() >= SimdLevel::Avx2) {
            pulp::Simd::vectorize(simd, eights::Eights(matrix, simd));
            return;
        }
    }
    matrix.tiles(whole(plain));
}

struct Matrix<'a> {
    x: &'a [f32],
    stride: usize,
    rows: usize,
    width: usize,
    y: &'a mut [f32],
    apart: usize,
}

impl Matrix<'_> {
    #[inline(always)]
    fn tiles(self, turn: impl Fn(Source<'_>, Target<'_>)) {
        let Self { x, stride, rows, width, y, apart } = self;
        for top in (0..rows).step_by(TILE) {
            for left in (0..width).step_by(TILE) {
                let (height, across) = (TILE.min(rows - top), TILE.min(width - left));
                if (height, across) == (TILE, TILE) {
                    turn((&x[top * stride + left..], stride), (&mut y[left * apart + top..], apart));
                    continue;
                }
                for column in left..left + across {
                    for row in top..top + height {
                        y[column * apart + row] = x[row * stride + column];
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn line<const N: usize>(x: &[f32]) -> [f32; N] {
    std::array::from_fn({
        let x = &x[..N];
        move |i| x[i]
    })
}

/// Reads a tile, turns it, and writes it.
#[inline(always)]
fn whole(turn: impl Fn(&Tile) -> Tile) -> impl Fn(Source<'_>, Target<'_>) {
    #[inline(always)]
    move |(x, stride), (y, apart)| {
        let tile = std::array::from_fn(|row| line(&x[row * stride..]));
        for (column, line) in turn(&tile).iter().enumerate() {
            y[column * apart..][..TILE].copy_from_slice(line);
        }
    }
}

fn plain(tile: &Tile) -> Tile {
    std::array::from_fn(|column| std::array::from_fn(|row| tile[row][column]))
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{__m512, __m512d};

    use pulp::x86::V4;
    use pulp::{Simd, WithSimd, cast};

    use super::{Matrix, Tile};

    /// A transpose with AVX-512.
    pub struct Wide<'a>(pub Matrix<'a>, pub V4);

    impl WithSimd for Wide<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            let Self(matrix, simd) = self;
            matrix.tiles(super::whole(
                #[inline(always)]
                |tile| turn(simd, tile),
            ));
        }
    }

    /// In four rounds of pairs: elements, pairs of them, quarters of a line, halves.
    #[inline(always)]
    fn turn(simd: V4, tile: &Tile) -> Tile {
        let avx = simd.avx512f;
        let lines: [__m512; 16] = std::array::from_fn(|i| cast(tile[i]));
        let mut quads = lines;
        for four in 0..4 {
            let [a, b, c, d]: [__m512; 4] = std::array::from_fn(|i| lines[4 * four + i]);
            let low: [__m512d; 2] = [cast(avx._mm512_unpacklo_ps(a, b)), cast(avx._mm512_unpacklo_ps(c, d))];
            let high: [__m512d; 2] = [cast(avx._mm512_unpackhi_ps(a, b)), cast(avx._mm512_unpackhi_ps(c, d))];
            quads[4 * four] = cast(avx._mm512_unpacklo_pd(low[0], low[1]));
            quads[4 * four + 1] = cast(avx._mm512_unpackhi_pd(low[0], low[1]));
            quads[4 * four + 2] = cast(avx._mm512_unpacklo_pd(high[0], high[1]));
            quads[4 * four + 3] = cast(avx._mm512_unpackhi_pd(high[0], high[1]));
        }
        // quarter q of quads[4 f + c] holds rows 4 f .. 4 f + 4 of column 4 q + c
        let mut turned = [[0.0; 16]; 16];
        for column in 0..4 {
            let [a, b, c, d]: [__m512; 4] = std::array::from_fn(|four| quads[4 * four + column]);
            let even = [avx._mm512_shuffle_f32x4::<0x88>(a, b), avx._mm512_shuffle_f32x4::<0x88>(c, d)];
            let odd = [avx._mm512_shuffle_f32x4::<0xdd>(a, b), avx._mm512_shuffle_f32x4::<0xdd>(c, d)];
            turned[column] = cast(avx._mm512_shuffle_f32x4::<0x88>(even[0], even[1]));
            turned[column + 8] = cast(avx._mm512_shuffle_f32x4::<0xdd>(even[0], even[1]));
            turned[column + 4] = cast(avx._mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]));
            turned[column + 12] = cast(avx._mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]));
        }
        turned
    }
}

#[cfg(target_arch = "x86_64")]
mod eights {
    use std::arch::x86_64::__m256;

    use pulp::x86::V3;
    use pulp::{Simd, WithSimd, cast};

    use super::{Matrix, TILE, line};

    /// A transpose with AVX2.
    pub struct Eights<'a>(pub Matrix<'a>, pub V3);

    impl WithSimd for Eights<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            let Self(matrix, simd) = self;
            matrix.tiles(
                #[inline(always)]
                |(x, stride), (y, apart)| {
                    for (row, column) in [(0, 0), (8, 0), (0, 8), (8, 8)] {
                        let rows =
                            std::array::from_fn(|i| cast(line::<8>(&x[(row + i) * stride + column..])));
                        for (i, line) in turn(simd, rows).into_iter().enumerate() {
                            let line: [f32; 8] = cast(line);
                            y[(column + i) * apart + row..][..TILE / 2].copy_from_slice(&line);
                        }
                    }
                },
            );
        }
    }

    /// In three rounds of pairs: elements, pairs of them, halves of a vector.
    #[inline(always)]
    fn turn(simd: V3, rows: [__m256; 8]) -> [__m256; 8] {
        let avx = simd.avx;
        let mut quads = rows;
        for half in [0, 4] {
            let [a, b, c, d] = [rows[half], rows[half + 1], rows[half + 2], rows[half + 3]];
            let low = [cast(avx._mm256_unpacklo_ps(a, b)), cast(avx._mm256_unpacklo_ps(c, d))];
            let high = [cast(avx._mm256_unpackhi_ps(a, b)), cast(avx._mm256_unpackhi_ps(c, d))];
            quads[half] = cast(avx._mm256_unpacklo_pd(low[0], low[1]));
            quads[half + 1] = cast(avx._mm256_unpackhi_pd(low[0], low[1]));
            quads[half + 2] = cast(avx._mm256_unpacklo_pd(high[0], high[1]));
            quads[half + 3] = cast(avx._mm256_unpackhi_pd(high[0], high[1]));
        }
        // half h of quads[4 f + c] holds rows 4 f .. 4 f + 4 of column 4 h + c
        let mut turned = rows;
        for column in 0..4 {
            let (first, last) = (quads[column], quads[4 + column]);
            turned[column] = avx._mm256_permute2f128_ps::<0x20>(first, last);
            turned[4 + column] = avx._mm256_permute2f128_ps::<0x31>(first, last);
        }
        turned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_of_odd_shapes() {
        for (rows, width) in [(0, 3), (1, 1), (3, 40), (16, 16), (33, 17), (64, 48)] {
            let x: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
            let turned = |y: &[f32]| {
                let columns = (0..width).flat_map(|column| (0..rows).map(move |row| (row, column)));
                y.iter().zip(columns).all(|(y, (row, column))| *y == x[row * width + column])
            };
            let (mut y, mut plainly) = (vec![-1.0; x.len()], vec![-1.0; x.len()]);
            transpose(&x, rows, width, &mut y);
            Matrix { x: &x, stride: width, rows, width, y: &mut plainly, apart: rows }.tiles(whole(plain));
            assert!(turned(&y) && turned(&plainly), "[{rows}, {width}]");
        }
    }

    #[test]
    fn rows_with_gaps_are_transposed_to_rows_with_gaps() {
        let (rows, width, stride, apart) = (19, 33, 40, 21);
        let x: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
        let mut y = vec![-1.0; width * apart];
        transpose_apart((&x, stride), rows, width, (&mut y, apart));
        for (index, y) in y.iter().enumerate() {
            let (column, row) = (index / apart, index % apart);
            assert_eq!(*y, if row < rows { x[row * stride + column] } else { -1.0 });
        }
    }
}
