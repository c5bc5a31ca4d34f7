//! The initial state matrix of S5: eigenvalues and eigenvectors of HiPPO-N (Smith et al. 2023, section 4.3).

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Eigenvalues with real part -1/2 of the normal part of the HiPPO-LegS matrix of size n, and their unit eigenvectors.
pub(super) struct Hippo {
    /// Imaginary parts, ascending; the first n / 2 (those below zero) if only one of each conjugate pair is wanted.
    pub frequencies: Vec<f64>,
    /// One eigenvector per frequency: real and imaginary parts of its n entries.
    pub vectors: Vec<Vec<[f64; 2]>>,
}

impl Hippo {
    /// Of size `n`; `halved` keeps one of each conjugate pair. Layers share it: of size 256 it takes a third of a second.
    pub fn of(n: usize, halved: bool) -> Arc<Self> {
        type Known = HashMap<(usize, bool), Arc<Hippo>>;
        static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry((n, halved)).or_insert_with(|| Arc::new(Self::new(n, halved))))
    }

    fn new(n: usize, halved: bool) -> Self {
        // the matrix is -1/2 + S, S skew: S u = w v and S v = -w u for pairs of real vectors, so u spans S^T S u = w^2 u
        let root = |i: usize| (i as f64 + 0.5).sqrt();
        let skew = |i: usize, j: usize| match i.cmp(&j) {
            std::cmp::Ordering::Greater => -root(i) * root(j),
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Less => root(i) * root(j),
        };
        let square = |i, j| (0..n).map(|k| skew(k, i) * skew(k, j)).sum::<f64>();
        let (values, vectors) = eigen((0..n).map(|i| (0..n).map(|j| square(i, j)).collect()).collect());
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
        let single = if n.is_multiple_of(2) { None } else { order.pop() }; // the eigenvalue 0 of an odd size
        let mut hippo = Self { frequencies: Vec::new(), vectors: Vec::new() };
        for &index in order.iter().step_by(2) {
            let u = &vectors[index];
            let image: Vec<f64> = (0..n).map(|i| (0..n).map(|j| skew(i, j) * u[j]).sum()).collect();
            // the root of a small eigenvalue has half of the digits of its vector
            let frequency = image.iter().map(|x| x * x).sum::<f64>().sqrt();
            let half = std::f64::consts::FRAC_1_SQRT_2;
            // S (u + i v) = -i w (u + i v)
            hippo.frequencies.push(-frequency);
            hippo.vectors.push(u.iter().zip(&image).map(|(u, v)| [u * half, v / frequency * half]).collect());
        }
        if halved {
            return hippo;
        }
        if let Some(index) = single {
            hippo.frequencies.push(0.0);
            hippo.vectors.push(vectors[index].iter().map(|x| [*x, 0.0]).collect());
        }
        for pair in (0..n / 2).rev() {
            hippo.frequencies.push(-hippo.frequencies[pair]);
            hippo.vectors.push(hippo.vectors[pair].iter().map(|[re, im]| [*re, -im]).collect());
        }
        hippo
    }
}

/// Eigenvalues and unit eigenvectors of a symmetric matrix, by Jacobi rotations.
fn eigen(mut a: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let n = a.len();
    let mut vectors: Vec<Vec<f64>> =
        (0..n).map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for _ in 0..60 {
        let mut turned = false;
        for p in 0..n {
            for q in p + 1..n {
                // relative to its own diagonal: the smallest eigenvalues are 1e-9 of the largest ones
                if a[p][q].abs() <= f64::EPSILON * (a[p][p] * a[q][q]).abs().sqrt() {
                    continue;
                }
                turned = true;
                let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let c = 1.0 / t.hypot(1.0);
                let s = t * c;
                let turn = |x: &mut f64, y: &mut f64| (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
                let (low, high) = a.split_at_mut(q);
                low[p].iter_mut().zip(&mut high[0]).for_each(|(x, y)| turn(x, y));
                for row in &mut a {
                    let (low, high) = row.split_at_mut(q);
                    turn(&mut low[p], &mut high[0]);
                }
                let (low, high) = vectors.split_at_mut(q);
                low[p].iter_mut().zip(&mut high[0]).for_each(|(x, y)| turn(x, y));
            }
        }
        if !turned {
            break;
        }
    }
    ((0..n).map(|i| a[i][i]).collect(), vectors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_belong_to_their_frequencies_and_are_orthonormal() {
        for n in [2, 7, 32, 128] {
            let Hippo { frequencies, vectors } = Hippo::new(n, false);
            assert_eq!((frequencies.len(), vectors.len()), (n, n));
            assert!(frequencies.is_sorted());
            let entry = |i: usize, j: usize| {
                let size = ((i as f64 + 0.5) * (j as f64 + 0.5)).sqrt();
                if i > j {
                    -size
                } else if i < j {
                    size
                } else {
                    0.0
                }
            };
            for (frequency, vector) in frequencies.iter().zip(&vectors) {
                for i in 0..n {
                    let product = |part: usize| (0..n).map(|j| entry(i, j) * vector[j][part]).sum::<f64>();
                    let [re, im] = vector[i];
                    assert!((product(0) + frequency * im).abs() < 1e-9 * n as f64, "{n}: {frequency}");
                    assert!((product(1) - frequency * re).abs() < 1e-9 * n as f64, "{n}: {frequency}");
                }
            }
            for (i, a) in vectors.iter().enumerate() {
                for (j, b) in vectors.iter().enumerate() {
                    let re: f64 = a.iter().zip(b).map(|(x, y)| x[0] * y[0] + x[1] * y[1]).sum();
                    assert!((re - f64::from(u8::from(i == j))).abs() < 1e-9, "{n}: {i} {j}");
                }
            }
        }
    }
}
