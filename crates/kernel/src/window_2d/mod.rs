//! Softmax attention of image tokens over a window of the grid, slots and global tokens (Transformer-LS for images;
//! `SPEC-vision.md` section 2).
//!
//! Queries are grouped by squares of w x w; all of a square see the same keys: the square and s = max(w / 2, 1) rows and
//! columns around it, as far as the grid reaches.

mod composed;
mod cpu;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::softmax::softmax;
use effattn_record::pattern::Grid2d;

/// Logit of what is not a key: its weight is exactly 0.
const HIDDEN: f32 = -1e30;

/// Keys and values [b, h, k, d] of one kind.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

/// What image tokens see.
pub struct Window2d<'a> {
    /// Rows and columns of the image tokens.
    pub grid: Grid2d,
    /// Side w of a square of queries; 0: no window.
    pub w: usize,
    /// Bias of the window's logits by distance and head [[`bias_rows`], h].
    pub bias: Option<&'a Tensor>,
    /// Keys that every query sees: slots and global tokens.
    pub everywhere: Vec<Keys<'a>>,
}

/// Rows and columns around a square that its queries see.
fn reach(w: usize) -> usize {
    (w / 2).max(1)
}

/// Side of the square of keys.
pub fn key_side(w: usize) -> usize {
    w + 2 * reach(w)
}

/// Rows of the released code's bias table. Distances take 2 (w + p) - 1 values, p = floor(w / 2), but a row of the table
/// has w + 2 p: different distances share an entry, and released weights need it so.
pub fn bias_rows(w: usize) -> usize {
    let p = w / 2;
    2 * (w + p).saturating_sub(1) * (w + 2 * p + 1) + 1
}

/// The entry of the released table for query minus key (dy, dx).
fn bias_row(w: usize, dy: isize, dx: isize) -> usize {
    let p = (w / 2) as isize;
    let w = w as isize;
    ((dy + w + p - 1) * (w + 2 * p) + dx + w + p - 1) as usize
}

/// Squares of queries and their keys, as places on the grid; the place behind the last token stands for none.
struct Squares {
    count: usize,
    queries: Vec<u32>,
    keys: Vec<u32>,
    /// For every token its place among the queries.
    back: Vec<u32>,
}

impl Squares {
    fn new(grid: Grid2d, w: usize) -> Self {
        let (rows, cols, none) = (grid.rows.div_ceil(w), grid.cols.div_ceil(w), grid.len() as u32);
        let s = reach(w) as isize;
        let place = |y: isize, x: isize| {
            let inside = (0..grid.rows as isize).contains(&y) && (0..grid.cols as isize).contains(&x);
            if inside { (y as usize * grid.cols + x as usize) as u32 } else { none }
        };
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        for square in 0..rows * cols {
            let (y, x) = ((square / cols * w) as isize, (square % cols * w) as isize);
            let side = w as isize;
            queries.extend((0..side * side).map(|at| place(y + at / side, x + at % side)));
            let wide = side + 2 * s;
            keys.extend((0..wide * wide).map(|at| place(y - s + at / wide, x - s + at % wide)));
        }
        let mut back = vec![0; grid.len()];
        for (at, &token) in queries.iter().enumerate().filter(|(_, token)| **token != none) {
            back[token as usize] = at as u32;
        }
        Self { count: rows * cols, queries, keys, back }
    }
}

/// Results [b, h, n, d] for scaled queries `q` [b, h, n, d] and keys and values of the n image tokens.
pub fn window_2d(q: &Tensor, own: Keys, call: &Window2d) -> Result<Tensor> {
    let (_, _, n, _) = q.dims4()?;
    if n != call.grid.len() {
        bail!("{n} tokens are not a grid of {} x {}", call.grid.rows, call.grid.cols);
    }
    if super::fused_cpu(q.device()) && q.dtype() == DType::F32 && call.w > 0 {
        return cpu::window_2d(q, own, call);
    }
    composed::window_2d(q, own, call)
}

/// The keys and values that every query sees, side by side.
fn everywhere(all: &[Keys]) -> Result<(Tensor, Tensor)> {
    let cat =
        |pick: fn(&Keys) -> Tensor| Tensor::cat(&all.iter().map(pick).collect::<Vec<_>>(), 2)?.contiguous();
    if all.is_empty() {
        bail!("neither a window nor slots: nothing is attended to; set w or r");
    }
    Ok((cat(|keys| keys.k.clone())?, cat(|keys| keys.v.clone())?))
}

/// The row of the bias table for every query of a square and every key.
fn bias_rows_of(w: usize) -> Vec<u32> {
    let (wide, s) = (key_side(w), reach(w) as isize);
    let row = |at: usize| {
        let (query, key) = (at / (wide * wide), at % (wide * wide));
        let away = |query: usize, key: usize| query as isize - (key as isize - s);
        bias_row(w, away(query / w, key / wide), away(query % w, key % wide)) as u32
    };
    (0..w * w * wide * wide).map(row).collect()
}

/// Softmax attention over all tokens with a bias [h, n, n]: results [b, h, n, d] for scaled queries (`SPEC-vision.md`
/// section 3).
pub fn biased(q: &Tensor, keys: Keys, bias: &Tensor) -> Result<Tensor> {
    let logits = q.contiguous()?.matmul(&keys.k.t()?.contiguous()?)?.broadcast_add(bias)?;
    softmax(&logits)?.matmul(&keys.v.contiguous()?)
}

/// The bias of image tokens for one another [h, n, n] from a table [(2 rows - 1)(2 cols - 1), h].
pub fn grid_bias(table: &Tensor, grid: Grid2d) -> Result<Tensor> {
    let n = grid.len();
    let row = |query: usize, key: usize| {
        let away = |query: usize, key: usize, len: usize| query + len - 1 - key;
        let y = away(query / grid.cols, key / grid.cols, grid.rows);
        (y * (2 * grid.cols - 1) + away(query % grid.cols, key % grid.cols, grid.cols)) as u32
    };
    let rows: Vec<u32> = (0..n * n).map(|at| row(at / n, at % n)).collect();
    let rows = Tensor::from_vec(rows, n * n, &Device::Cpu)?.to_device(table.device())?;
    let bias = table.index_select(&rows, 0)?;
    let h = bias.dim(1)?;
    bias.t()?.contiguous()?.reshape((h, n, n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn the_released_table_has_colliding_rows() {
        assert_eq!((bias_rows(7), bias_rows(8)), (253, 375));
        assert_eq!(bias_row(7, 0, 9), bias_row(7, 1, -4), "different distances share an entry");
        for w in [2isize, 3, 7, 8] {
            let p = w / 2;
            let end = bias_row(w as usize, w + p - 1, w + p - 1);
            assert_eq!(end + 1, bias_rows(w as usize), "the last row is the furthest distance");
        }
    }

    #[test]
    fn squares_see_their_neighbourhood_as_far_as_the_grid_reaches() {
        let grid = Grid2d { rows: 5, cols: 7 };
        let squares = Squares::new(grid, 4);
        assert_eq!((squares.count, squares.keys.len()), (4, 4 * 64));
        let seen: Vec<u32> = squares.keys[..64].iter().copied().filter(|place| *place < 35).collect();
        // square (0, 0): rows and columns -2..6 cut to the grid: 5 x 6 places
        assert_eq!(seen.len(), 30);
        for token in 0..grid.len() {
            assert_eq!(squares.queries[squares.back[token] as usize], token as u32);
        }
    }

    #[test]
    fn fused_is_the_twin() {
        for (b, h, rows, cols, d, w, extra, bias) in [
            (1, 1, 1, 1, 1, 1, 0, false),
            (2, 3, 6, 6, 8, 1, 3, false),
            (1, 2, 14, 14, 8, 7, 9, true),
            (2, 2, 9, 13, 5, 4, 2, true),
            (1, 3, 5, 3, 16, 8, 0, true),
        ] {
            let (grid, n) = (Grid2d { rows, cols }, rows * cols);
            let image = ["q", "k", "v"].map(|name| randn(name, &[b, h, n, d]));
            let far = ["far k", "far v"].map(|name| randn(name, &[b, h, extra.max(1), d]));
            let table = randn("bias", &[bias_rows(w), h]);
            let inputs: Vec<Tensor> = image.into_iter().chain(far).chain([table]).collect();
            check(&format!("{rows} x {cols}, w {w}, {extra} more, bias {bias}"), &inputs, 2e-5, |x| {
                let far = Keys { k: &x[3], v: &x[4] };
                let everywhere = if extra > 0 { vec![far] } else { Vec::new() };
                let call = Window2d { grid, w, bias: bias.then_some(&x[5]), everywhere };
                // what this call does not use must have a gradient all the same
                let unused = ((x[3].sum_all()? + x[4].sum_all()?)? + x[5].sum_all()?)?;
                window_2d(&x[0], Keys { k: &x[1], v: &x[2] }, &call)?.broadcast_add(&(unused * 1e-3)?)
            });
        }
    }

    #[test]
    fn a_window_over_the_whole_grid_is_full_attention() {
        let grid = Grid2d { rows: 3, cols: 4 };
        let [q, k, v] = ["q", "k", "v"].map(|name| randn(name, &[2, 2, 12, 5]));
        let keys = Keys { k: &k, v: &v };
        let call = Window2d { grid, w: 4, bias: None, everywhere: Vec::new() };
        let got = window_2d(&q, keys, &call).unwrap();
        let want = biased(&q, keys, &Tensor::zeros((2, 12, 12), DType::F32, &Device::Cpu).unwrap()).unwrap();
        let error = (got - want).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        assert!(error.to_scalar::<f32>().unwrap() < 1e-5);
    }
}
