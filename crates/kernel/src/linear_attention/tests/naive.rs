//! The definition of SPEC-cos 1, 2 and SPEC-ls 8, pair by pair in f64.

use crate::linear_attention::{Favor, FeatureActivation, Guard, RandomKernel};

/// A feature map with plain numbers.
#[derive(Clone, Debug)]
pub enum Phi {
    Elementwise(FeatureActivation, Option<usize>),
    /// omega [m][d] and the settings (whose own omega is not read).
    Favor(Vec<Vec<f64>>, Favor),
    /// W [h][p][d], kernel, norm_eps, scale.
    Random(Vec<Vec<Vec<f64>>>, RandomKernel, f64, f64),
}

/// One head of one sample.
pub struct Head<'a> {
    pub q: &'a [Vec<f64>],
    pub k: &'a [Vec<f64>],
    pub v: &'a [Vec<f64>],
    pub keep: &'a [bool],
    pub gate: Option<&'a [f64]>,
    pub head: usize,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn activate(x: f64, activation: FeatureActivation) -> f64 {
    match activation {
        FeatureActivation::Relu => x.max(0.0),
        FeatureActivation::Identity => x,
        FeatureActivation::LeakyRelu(slope) => {
            if x > 0.0 {
                x
            } else {
                slope * x
            }
        }
        FeatureActivation::Elu1 => {
            if x > 0.0 {
                x + 1.0
            } else {
                x.exp()
            }
        }
    }
}

fn favor_dots(omega: &[Vec<f64>], scale: f64, x: &[f64]) -> (Vec<f64>, f64) {
    let x: Vec<f64> = x.iter().map(|x| x * scale).collect();
    (omega.iter().map(|row| dot(row, &x)).collect(), dot(&x, &x) / 2.0)
}

fn largest(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Features of queries and keys.
fn features(phi: &Phi, x: &Head) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    match phi {
        Phi::Elementwise(activation, _) => {
            let map = |rows: &[Vec<f64>]| {
                let row = |row: &Vec<f64>| row.iter().map(|&x| activate(x, *activation)).collect();
                rows.iter().map(row).collect()
            };
            (map(x.q), map(x.k))
        }
        Phi::Random(weight, kernel, norm_eps, scale) => {
            let map = |rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
                let row = |row: &Vec<f64>| {
                    let norm = dot(row, row).sqrt() + norm_eps;
                    let p: Vec<f64> = weight[x.head].iter().map(|w| dot(w, row) / norm).collect();
                    match kernel {
                        RandomKernel::Gaussian => {
                            let sin = p.iter().map(|p| scale * p.sin());
                            sin.chain(p.iter().map(|p| scale * p.cos())).collect()
                        }
                        RandomKernel::ArcCos => p.iter().map(|p| scale * p.max(0.0)).collect(),
                    }
                };
                rows.iter().map(row).collect()
            };
            (map(x.q), map(x.k))
        }
        Phi::Favor(omega, favor) => {
            let root = (omega.len() as f64).sqrt();
            let logits = |row: &[f64]| favor_dots(omega, favor.scale, row);
            let finish = |dots: &[f64], half: f64, c: f64| -> Vec<f64> {
                dots.iter().map(|dot| ((dot - half - c).exp() + favor.feature_eps) / root).collect()
            };
            let q = x.q.iter().map(|row| {
                let (dots, half) = logits(row);
                finish(&dots, half, largest(&dots))
            });
            let zero = vec![0.0; x.k[0].len()];
            let keys: Vec<_> =
                x.k.iter().zip(x.keep).map(|(row, keep)| logits(if *keep { row } else { &zero })).collect();
            let counted = |j: usize| x.keep[j] || favor.masked_as_zero;
            let c = (0..keys.len()).filter(|&j| counted(j)).map(|j| largest(&keys[j].0));
            let c = c.fold(f64::NEG_INFINITY, f64::max);
            (q.collect(), keys.iter().map(|(dots, half)| finish(dots, *half, c)).collect())
        }
    }
}

/// The result rows of one head.
pub fn attend(phi: &Phi, guard: Guard, causal: bool, x: &Head) -> Vec<Vec<f64>> {
    let (fq, fk) = features(phi, x);
    let zero_values = matches!(phi, Phi::Favor(_, favor) if favor.masked_as_zero);
    let den_eps = if let Phi::Favor(_, favor) = phi { favor.den_eps } else { 0.0 };
    let rows = fq.iter().enumerate().map(|(i, q)| {
        let (mut num, mut den) = (vec![0.0; x.v[0].len()], den_eps * q.iter().sum::<f64>());
        for (j, k) in fk.iter().enumerate() {
            if (causal && j > i) || (!x.keep[j] && !zero_values) {
                continue;
            }
            let turn = match phi {
                Phi::Elementwise(_, Some(m)) => {
                    (std::f64::consts::FRAC_PI_2 * (i as f64 - j as f64) / *m as f64).cos()
                }
                _ => 1.0,
            };
            let gate = x.gate.map_or(1.0, |logits| {
                let keep = |r: usize| 1.0 / (1.0 + (-logits[r]).exp());
                let kept: f64 = (j + 1..=i).filter(|&r| x.keep[r]).map(keep).product();
                kept * (1.0 - keep(j))
            });
            let a = turn * gate * dot(q, k);
            den += a;
            if x.keep[j] {
                num.iter_mut().zip(&x.v[j]).for_each(|(num, v)| *num += a * v);
            }
        }
        let divisor = match guard {
            Guard::ClampMin(eps) => den.max(eps),
            Guard::AbsClampMin(eps) => den.abs().max(eps),
            Guard::SignedClamp(eps) => {
                if den.abs() >= eps {
                    den
                } else if den >= 0.0 {
                    eps
                } else {
                    -eps
                }
            }
            Guard::Add(eps) => den + eps,
            Guard::NonZero if den == 0.0 => 1.0,
            Guard::NonZero => den,
        };
        num.into_iter().map(|num| num / divisor).collect()
    });
    rows.collect()
}
