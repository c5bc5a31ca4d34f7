//! Views of matrices in slices, checked when they are made, and their product in f32, by our kernel or the `gemm` crate.

use gemm::Parallelism;

use super::{panel, par};
use crate::profile::{self, ProductKernel};

/// A matrix in a slice: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// A matrix to write to.
pub struct MatMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// Number of elements that a matrix reaches over.
fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 }
}

impl<'a> Mat<'a> {
    /// A contiguous row-major matrix at the start of `data`. Panics like indexing if `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` elements, `row_stride` apart. Panics like indexing if `data` is too short.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = &data[..extent(rows, cols, row_stride, 1)];
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, a view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Some consecutive rows, a view. Panics like indexing if there are not that many.
    #[must_use]
    pub fn lines(self, range: std::ops::Range<usize>) -> Self {
        self.t().columns(range).t()
    }

    /// Some consecutive columns, a view. Panics like indexing if there are not that many.
    #[must_use]
    pub fn columns(self, range: std::ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let cols = range.len();
        let reach = extent(self.rows, cols, self.row_stride, self.col_stride);
        let start = if reach == 0 { 0 } else { range.start * self.col_stride };
        Self { data: &self.data[start..start + reach], cols, ..self }
    }
}

impl<'a> MatMut<'a> {
    /// A contiguous row-major matrix at the start of `data`. Panics like indexing if `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` elements, `row_stride` apart. Panics if `data` is too short or rows overlap.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols || rows <= 1, "rows of {cols} elements overlap at stride {row_stride}");
        let data = &mut data[..extent(rows, cols, row_stride, 1)];
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, a view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// How many threads a product may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread only: for products inside a parallel loop.
    One,
    /// All threads of the current rayon pool.
    All,
}

/// c = alpha a b, or alpha a b + beta c, in f32 whatever the format of [`matmul_format`](super::matmul_format::matmul_format).
///
/// Panics if the shapes do not fit.
pub fn gemm_exact(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>, threads: Threads) {
    let [m, k, n] = check(&c, &a, &b);
    profile::count(ProductKernel::Gemm, m, k, n);
    if panel::is_used() {
        return match threads {
            Threads::One => panel::multiply(c, a, b, alpha, beta, false),
            Threads::All => multiply_on_all(c, a, b, alpha, beta),
        };
    }
    by_crate(c, a, b, alpha, beta, threads);
}

/// The sizes of the product. Panics if the shapes do not fit.
fn check(c: &MatMut, a: &Mat, b: &Mat) -> [usize; 3] {
    let (m, k, n) = (c.rows, a.cols, c.cols);
    let fits = (a.rows, b.rows, b.cols) == (m, k, n);
    assert!(fits, "product [{}, {k}] x [{}, {}] into [{m}, {n}]", a.rows, b.rows, b.cols);
    [m, k, n]
}

/// The same by the `gemm` crate, which chooses its vector instructions for itself, at any level.
pub fn by_crate(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>, threads: Threads) {
    let [m, k, n] = check(&c, &a, &b);
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: the constructors checked that every element of the three matrices lies inside its slice and that
    // the elements of c are distinct; c is borrowed exclusively. Where `read_dst` is false c is only written.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.data.as_mut_ptr(),
            c.col_stride as isize,
            c.row_stride as isize,
            beta.is_some(),
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            beta.unwrap_or(0.0),
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The same by our kernel, on all threads: each computes some rows.
fn multiply_on_all(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>) {
    const ROWS: usize = 96;
    if c.col_stride != 1 {
        return multiply_on_all(c.t(), b.t(), a.t(), alpha, beta);
    }
    let MatMut { data, rows, cols, row_stride, .. } = c;
    par::each_piece(data.chunks_mut((ROWS * row_stride).max(1)), |index, c| {
        let here = index * ROWS..rows.min((index + 1) * ROWS);
        let c = MatMut::strided(c, here.len(), cols, row_stride);
        panel::multiply(c, a.lines(here), b, alpha, beta, false);
    });
}
