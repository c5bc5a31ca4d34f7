//! Matrix products in the number format of the process: in f32, or of operands rounded to bf16.

pub use super::exact::{by_crate, gemm_exact};
use super::matmul_format::{MatmulFormat, matmul_format};
pub use super::matrix::{Mat, MatMut, Threads};
use super::{bf16, panel};

/// Lets every thread of the pool make a product. The first one of a thread allocates working memory that it keeps (about
/// a megabyte): without this it is chance when, and whether, a thread does.
pub fn warm() {
    const SIDE: usize = 192;
    let own = own().is_some();
    rayon::broadcast(|_| {
        if own {
            panel::reserve();
        }
        let (a, mut c) = (vec![1.0; SIDE * SIDE], vec![0.0; SIDE * SIDE]);
        let a = Mat::new(&a, SIDE, SIDE);
        gemm_exact(MatMut::new(&mut c, SIDE, SIDE), a, a, 1.0, None, Threads::One);
    });
}

/// Whether products in the format that is set are made by our kernel for f32, and then whether it rounds their factors to bf16.
pub fn own() -> Option<bool> {
    match matmul_format() {
        MatmulFormat::F32 => panel::is_used().then_some(false),
        MatmulFormat::Bf16 => (!bf16::is_native() && panel::has_vectors()).then_some(true),
    }
}

/// c = alpha a b, in the format of [`matmul_format`].
///
/// Each element is summed in an order that depends on the shapes only. Panics if the shapes do not fit.
pub fn gemm(c: MatMut, a: Mat, b: Mat, alpha: f32, threads: Threads) {
    call(c, a, b, alpha, None, threads);
}

/// c = alpha a b + beta c, in the format of [`matmul_format`].
///
/// Panics if the shapes do not fit.
pub fn gemm_add(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: f32, threads: Threads) {
    call(c, a, b, alpha, Some(beta), threads);
}

fn call(c: MatMut, a: Mat, b: Mat, alpha: f32, beta: Option<f32>, threads: Threads) {
    match matmul_format() {
        MatmulFormat::F32 => gemm_exact(c, a, b, alpha, beta, threads),
        MatmulFormat::Bf16 => bf16::gemm(c, a, b, alpha, beta),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 31 + seed * 17) % 19) as f32 - 9.0).collect()
    }

    fn at(mat: &Mat, i: usize, j: usize) -> f32 {
        mat.data[i * mat.row_stride + j * mat.col_stride]
    }

    #[test]
    fn products_of_odd_shapes_views_and_accumulation() {
        for (m, k, n) in
            [(1, 1, 1), (3, 7, 5), (17, 64, 33), (65, 3, 130), (2, 0, 3), (0, 3, 4), (50, 101, 1)]
        {
            let (a, b) = (numbers(m * (k + 3), 1), numbers(k * n, 2));
            for (a, b) in [
                (Mat::strided(&a, m, k, k + 3), Mat::new(&b, k, n)),
                (Mat::new(&a, k, m).t(), Mat::new(&b, n, k).t()),
            ] {
                let start = numbers(m * (n + 2), 3);
                let (mut c, mut d) = (start.clone(), start.clone());
                gemm(MatMut::strided(&mut c, m, n, n + 2), a, b, 0.5, Threads::One);
                gemm_add(MatMut::strided(&mut d, m, n, n + 2), a, b, 1.0, 2.0, Threads::All);
                for i in 0..m {
                    for j in 0..n {
                        let sum: f32 = (0..k).map(|l| at(&a, i, l) * at(&b, l, j)).sum();
                        let index = i * (n + 2) + j;
                        assert_eq!(c[index], 0.5 * sum, "{m} {k} {n} at {i} {j}");
                        assert_eq!(d[index], sum + 2.0 * start[index], "{m} {k} {n} at {i} {j}");
                    }
                    if i + 1 < m {
                        assert_eq!(c[i * (n + 2) + n], start[i * (n + 2) + n], "the gap was written");
                    }
                }
            }
        }
    }

    #[test]
    fn the_number_of_threads_does_not_change_the_bits() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let (m, k, n) = (301, 517, 129);
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let scaled: Vec<f32> = a.iter().map(|a| a * 0.37).collect();
        let run = |threads| {
            let mut c = vec![0.0; m * n];
            gemm(MatMut::new(&mut c, m, n), Mat::new(&scaled, m, k), Mat::new(&b, k, n), 1.0, threads);
            c
        };
        assert_eq!(run(Threads::One), pool.install(|| run(Threads::All)));
    }

    #[test]
    #[should_panic(expected = "range")]
    fn a_short_slice_is_refused() {
        Mat::new(&[0.0; 5], 2, 3);
    }
}
