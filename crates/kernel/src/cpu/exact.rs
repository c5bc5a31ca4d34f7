//! Matrix products in f32 whatever the number format, by our kernel or the `gemm` crate.

use gemm::Parallelism;

use super::matrix::{Mat, MatMut, Threads};
use super::{panel, par};
use crate::profile::{self, ProductKernel};

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
