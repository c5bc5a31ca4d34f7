//! Products x W^T of few rows, in which every weight is read once, where it lies: packing it would take longer than the product.
//!
//! Up to eight rows are multiplied by scalar products; more are turned, so that a vector holds an element of each of them and
//! a weight is multiplied by all at once. Threads share the outputs.

#[allow(unsafe_code)]
mod tile;

use std::cell::Cell;
use std::ops::Range;

use super::columns::{self, ColumnsMut};
use super::matmul_format::{MatmulFormat, matmul_format};
use super::matrix::Mat;
use super::panel::{copy_rows, has_vectors, round_in_place};
use super::par::{self, Chunks, Scratch};
use super::simd::arch;
use super::transpose::transpose_apart;
use crate::profile::{self, ProductKernel};
use tile::{Lanes, Outputs};

/// Most rows.
const ROWS: usize = 32;

/// Most rows that are not turned.
const TURNED: usize = 8;

/// Elements of a weight that a thread takes at a time: they stay in the second cache.
const CHUNK: usize = 1 << 15;

thread_local! {
    static TOKENS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, which computes one token of some sequences: its products of few rows are made here. Elsewhere all rows are summed in
/// the same order, however many they are.
pub fn of_tokens<T>(f: impl FnOnce() -> T) -> T {
    /// Puts back what was there before, also when `f` panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            TOKENS.set(self.0);
        }
    }
    let _restore = Restore(TOKENS.replace(true));
    f()
}

/// Whether a product of `count` rows is one of few, in [`of_tokens`].
pub fn are(count: usize) -> bool {
    TOKENS.get() && fit(count)
}

fn fit(count: usize) -> bool {
    (1..=ROWS).contains(&count) && has_vectors()
}

/// A weight [out, inp], and the columns of the result that it gives.
pub struct Layer<'a> {
    /// The weight.
    pub weight: &'a [f32],
    /// The columns, `out` of them.
    pub columns: Range<usize>,
}

/// Few rows that are multiplied by weights, in the number format of the process.
pub struct FewRows {
    data: Scratch,
    count: usize,
    inp: usize,
    /// Elements of a line, the rows with padding, if they are turned to lines.
    line: Option<usize>,
    round: bool,
}

impl FewRows {
    /// The rows of `x`, [count, inp]. Panics if they are none or more than [few](are).
    pub fn new(x: &[f32], inp: usize) -> Self {
        Self::rounded(x, inp, matmul_format() == MatmulFormat::Bf16)
    }

    /// [`Self::new`] for products of factors as they are or rounded to bf16.
    fn rounded(x: &[f32], inp: usize, round: bool) -> Self {
        let count = x.len() / inp.max(1);
        assert!(fit(count) && x.len() == count * inp, "{} elements are not few rows of {inp}", x.len());
        if count <= TURNED {
            let mut data = par::scratch(x.len());
            copy_rows(Mat::new(x, count, inp), round, (&mut data, inp));
            return Self { data, count, inp, line: None, round };
        }
        let line = count.next_multiple_of(arch().dispatch(Lanes));
        let mut data = par::scratch(inp * line);
        if count < line {
            data.fill(0.0);
        }
        transpose_apart((x, inp), count, inp, (&mut data, line));
        if round {
            round_in_place(&mut data);
        }
        Self { data, count, inp, line: Some(line), round }
    }

    /// [x W^T of the first layer | of the second | ...], rows of `width`. `finish(columns, row, part)` completes what was computed
    /// of a row in these columns. The columns of the layers ascend; there are zeros in those of none. Panics if they overlap.
    pub fn multiply(
        &self,
        layers: &[Layer],
        width: usize,
        finish: impl Fn(Range<usize>, usize, &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let mut y = vec![0.0; self.count * width];
        let size = tile::OUTPUTS * (CHUNK / (self.inp * tile::OUTPUTS)).clamp(4, 64);
        let mut jobs = Vec::new();
        for Layer { weight, columns } in layers {
            profile::count(ProductKernel::Gemm, self.count, self.inp, columns.len());
            for index in 0..Chunks::of(columns.len(), size).count() {
                let some = index * size..columns.len().min((index + 1) * size);
                let weight = &weight[some.start * self.inp..some.end * self.inp];
                jobs.push((weight, columns.start + some.start..columns.start + some.end));
            }
        }
        let blocks = columns::cut(&mut y, width, jobs.iter().map(|(_, columns)| columns.clone()));
        let space = || (par::scratch(size * self.line.unwrap_or(self.count)), par::scratch(self.room()));
        let jobs = jobs.into_iter().zip(blocks);
        par::each_piece_with(jobs, space, |(sums, room), _, ((weight, columns), mut block)| {
            self.block(weight, sums, room, &mut block);
            for row in 0..self.count {
                finish(columns.clone(), row, block.row(row));
            }
        });
        y
    }

    /// Elements of the rounded weights of a tile.
    fn room(&self) -> usize {
        if self.round { tile::OUTPUTS * self.inp } else { 0 }
    }

    /// What is to be computed of `weight`.
    fn outputs<'a>(&'a self, weight: &'a [f32], sums: &'a mut [f32]) -> Outputs<'a> {
        let (line, turned) = (self.line.unwrap_or(self.count), self.line.is_some());
        Outputs { weight, depth: self.inp, rows: &self.data, count: line, turned, sums }
    }

    /// The product with the weights of some outputs.
    fn block(&self, weight: &[f32], sums: &mut [f32], room: &mut [f32], to: &mut ColumnsMut) {
        let line = self.line.unwrap_or(self.count);
        let sums = &mut sums[..to.width() * line];
        if self.round {
            let some = weight.chunks(tile::OUTPUTS * self.inp).zip(sums.chunks_mut(tile::OUTPUTS * line));
            for (weight, sums) in some {
                let room = &mut room[..weight.len()];
                copy_rows(Mat::new(weight, sums.len() / line, self.inp), true, (&mut *room, self.inp));
                arch().dispatch(self.outputs(room, sums));
            }
        } else {
            arch().dispatch(self.outputs(weight, sums));
        }
        for row in 0..self.count {
            let sums = sums[row..].iter().step_by(line);
            to.row(row).iter_mut().zip(sums).for_each(|(to, sum)| *to = *sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_odd_shapes_are_those_of_the_definition() {
        for (inp, outs) in
            [(1, [1, 0, 1]), (3, [5, 7, 1]), (40, [13, 2, 30]), (130, [3, 300, 5]), (517, [11, 70, 1])]
        {
            for count in (1..=ROWS).filter(|&count| fit(count)) {
                let number = |i: usize, seed: usize| ((i * 31 + seed * 17) % 19) as f32 - 9.0;
                let x: Vec<f32> = (0..count * inp).map(|i| number(i, 1)).collect();
                let weights: Vec<Vec<f32>> =
                    outs.iter().map(|out| (0..out * inp).map(|i| number(i, *out)).collect()).collect();
                let (mut first, mut layers) = (1, Vec::new());
                for (weight, out) in weights.iter().zip(outs) {
                    layers.push(Layer { weight, columns: first..first + out });
                    first += out;
                }
                let width = first + 2;
                for round in [false, true] {
                    let y =
                        FewRows::rounded(&x, inp, round).multiply(&layers, width, |columns, row, part| {
                            assert_eq!(part.len(), columns.len());
                            for (column, y) in columns.zip(part) {
                                *y += (column * row) as f32;
                            }
                        });
                    for (row, y) in y.chunks(width).enumerate() {
                        assert_eq!((y[0], &y[width - 2..]), (0.0, &[0.0; 2][..]));
                        for Layer { weight, columns } in &layers {
                            for (weight, column) in weight.chunks(inp).zip(columns.clone()) {
                                // whole numbers: exact in any order, and in bf16
                                let exact: f32 = weight.iter().zip(&x[row * inp..]).map(|(w, x)| w * x).sum();
                                let exact = exact + (column * row) as f32;
                                assert_eq!(y[column], exact, "{count} x {inp} to {outs:?} at {row} {column}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn factors_are_rounded_where_products_are_of_bf16() {
        let (inp, out) = (37, 9);
        for count in [1, 5, 16, 32].into_iter().filter(|&count| fit(count)) {
            let number = |i: usize| ((i * 31) % 19) as f32 * 0.37 - i as f32 * 1e-3;
            let (x, w): (Vec<f32>, Vec<f32>) =
                ((0..count * inp).map(number).collect(), (0..out * inp).map(|i| number(i + 7)).collect());
            let round = |x: &f32| f64::from(half::bf16::from_f32(*x).to_f32());
            let layer = Layer { weight: &w, columns: 0..out };
            let y = FewRows::rounded(&x, inp, true).multiply(&[layer], out, |_, _, _| ());
            for (at, y) in y.iter().enumerate() {
                let (x, w) = (&x[at / out * inp..][..inp], &w[at % out * inp..][..inp]);
                let exact: f64 = x.iter().zip(w).map(|(x, w)| round(x) * round(w)).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-3, "{count} at {at}: {y}, not {exact}");
            }
        }
    }

    #[test]
    fn rows_are_few_in_tokens_only() {
        assert!(!are(1));
        of_tokens(|| assert!(are(1) == has_vectors() && !are(0) && !are(ROWS + 1)));
        assert!(!are(1));
    }
}
