//! The iterated pseudo-inverse of one [m, m] matrix, and its gradient.

use crate::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};

/// The products of one step from Z: Y = A Z, U = 7 I - Y, V = 15 I - Y U, W = 13 I - Y V; then Z' = Z W / 4.
struct Step {
    m: usize,
    y: Vec<f32>,
    u: Vec<f32>,
    v: Vec<f32>,
    w: Vec<f32>,
}

/// c = alpha a b + beta c for [m, m] matrices, transposed where asked; in f32, as the steps amplify rounding.
fn times(c: &mut [f32], (a, ta): (&[f32], bool), (b, tb): (&[f32], bool), alpha: f32, beta: f32, m: usize) {
    let turn = |x, turned| if turned { Mat::new(x, m, m).t() } else { Mat::new(x, m, m) };
    let (a, b, c) = (turn(a, ta), turn(b, tb), MatMut::new(c, m, m));
    gemm_exact(c, a, b, alpha, (beta != 0.0).then_some(beta), Threads::One);
}

impl Step {
    fn new(m: usize) -> Self {
        let square = || vec![0.0; m * m];
        Self { m, y: square(), u: square(), v: square(), w: square() }
    }

    fn products(&mut self, a: &[f32], z: &[f32]) {
        let Self { m, y, u, v, w } = self;
        let m = *m;
        let diagonal = |x: &mut [f32], value: f32| x.iter_mut().step_by(m + 1).for_each(|x| *x += value);
        times(y, (a, false), (z, false), 1.0, 0.0, m);
        u.iter_mut().zip(&*y).for_each(|(u, y)| *u = -y);
        diagonal(u, 7.0);
        times(v, (y, false), (u, false), -1.0, 0.0, m);
        diagonal(v, 15.0);
        times(w, (y, false), (v, false), -1.0, 0.0, m);
        diagonal(w, 13.0);
    }
}

/// All iterates Z_0 = A^T / c, Z_1, ..., one after another.
pub fn iterates(a: &[f32], m: usize, c: f32, iterations: usize) -> Vec<f32> {
    let size = m * m;
    let mut all = vec![0.0; (iterations + 1) * size];
    for (index, z) in all[..size].iter_mut().enumerate() {
        *z = a[index % m * m + index / m] / c;
    }
    let mut step = Step::new(m);
    for index in 0..iterations {
        let (old, new) = all.split_at_mut((index + 1) * size);
        let z = &old[index * size..];
        step.products(a, z);
        times(&mut new[..size], (z, false), (&step.w, false), 0.25, 0.0, m);
    }
    all
}

/// From the gradient of the last iterate: the gradient of A with c held fixed, and that of c.
pub fn backward(a: &[f32], m: usize, c: f32, iterates: &[f32], mut dz: Vec<f32>) -> (Vec<f32>, f32) {
    let size = m * m;
    let square = || vec![0.0; size];
    let (mut da, mut dw, mut dy, mut dv, mut du, mut old) =
        (square(), square(), square(), square(), square(), square());
    let mut step = Step::new(m);
    for z in iterates.chunks_exact(size).rev().skip(1) {
        step.products(a, z);
        let Step { y, u, v, w, .. } = &step;
        times(&mut old, (&dz, false), (w, true), 0.25, 0.0, m);
        times(&mut dw, (z, true), (&dz, false), 0.25, 0.0, m);
        times(&mut dy, (&dw, false), (v, true), -1.0, 0.0, m);
        times(&mut dv, (y, true), (&dw, false), -1.0, 0.0, m);
        times(&mut dy, (&dv, false), (u, true), -1.0, 1.0, m);
        times(&mut du, (y, true), (&dv, false), -1.0, 0.0, m);
        dy.iter_mut().zip(&du).for_each(|(dy, du)| *dy -= du);
        times(&mut da, (&dy, false), (z, true), 1.0, 1.0, m);
        times(&mut old, (a, true), (&dy, false), 1.0, 1.0, m);
        std::mem::swap(&mut dz, &mut old);
    }
    let first = &iterates[..size];
    let dc = -dz.iter().zip(first).map(|(dz, z)| dz * z).sum::<f32>() / c;
    for (index, dz) in dz.iter().enumerate() {
        da[index % m * m + index / m] += dz / c;
    }
    (da, dc)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a softmax that favours the diagonal.
    fn matrix(m: usize) -> Vec<f32> {
        let mut a: Vec<f32> = (0..m * m)
            .map(|i| (0.3 * ((i * 7) % 5) as f32 + if i % (m + 1) == 0 { 2.0 } else { 0.0 }).exp())
            .collect();
        for row in a.chunks_exact_mut(m) {
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|x| *x /= sum);
        }
        a
    }

    #[test]
    fn iterates_tend_to_the_inverse() {
        for m in [1, 2, 5] {
            let a = matrix(m);
            let all = iterates(&a, m, 1.7, 12);
            let mut product = vec![0.0; m * m];
            times(&mut product, (&a, false), (&all[12 * m * m..], false), 1.0, 0.0, m);
            for (index, value) in product.iter().enumerate() {
                let want = if index % (m + 1) == 0 { 1.0 } else { 0.0 };
                assert!((value - want).abs() < 1e-4, "{m}: {value} at {index}");
            }
        }
    }

    #[test]
    fn gradients_are_finite_differences() {
        let (m, c, iterations) = (4, 1.9, 3);
        let a = matrix(m);
        let weight: Vec<f32> = (0..m * m).map(|i| ((i * 5) % 7) as f32 - 3.0).collect();
        let loss = |a: &[f32], c: f32| -> f64 {
            let all = iterates(a, m, c, iterations);
            let last = &all[iterations * m * m..];
            last.iter().zip(&weight).map(|(z, w)| f64::from(z * w)).sum()
        };
        let (da, dc) = backward(&a, m, c, &iterates(&a, m, c, iterations), weight.clone());
        let step = 1e-2;
        for index in 0..m * m {
            let moved = |by: f32| {
                let mut a = a.clone();
                a[index] += by;
                loss(&a, c)
            };
            let want = (moved(step) - moved(-step)) / f64::from(2.0 * step);
            assert!((f64::from(da[index]) - want).abs() < 2e-2 * want.abs().max(1.0), "{} {want}", da[index]);
        }
        let want = (loss(&a, c + step) - loss(&a, c - step)) / f64::from(2.0 * step);
        assert!((f64::from(dc) - want).abs() < 1e-2 * want.abs().max(1.0), "{dc} {want}");
    }
}
