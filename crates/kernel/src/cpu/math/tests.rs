//! Vector arithmetic against f64.

use super::*;
use crate::simd_fn;

simd_fn! {
    fn exp_slice<S>(simd, x: &'a [f32], y: &'a mut [f32]) { map(simd, x, y, #[inline(always)] |x| exp(simd, x)) }
}
simd_fn! {
    fn gelu_slice<S>(simd, x: &'a [f32], y: &'a mut [f32], dy: &'a mut [f32]) {
        map(simd, x, y, #[inline(always)] |x| gelu_grad(simd, [x]).0[0]);
        map(simd, x, dy, #[inline(always)] |x| gelu_grad(simd, [x]).1[0]);
    }
}
simd_fn! {
    fn gelu_tanh_slice<S>(simd, x: &'a [f32], y: &'a mut [f32], dy: &'a mut [f32]) {
        map(simd, x, y, #[inline(always)] |x| gelu_tanh_grad(simd, x).0);
        map(simd, x, dy, #[inline(always)] |x| gelu_tanh_grad(simd, x).1);
    }
}
simd_fn! { fn dot_slice<S>(simd, x: &'a [f32], y: &'a [f32]) -> f32 { dot(simd, x, y) } }
simd_fn! { fn sum_slice<S>(simd, x: &'a [f32]) -> f32 { sum(simd, x) } }
simd_fn! { fn max_slice<S>(simd, x: &'a [f32]) -> f32 { max(simd, x) } }
simd_fn! {
    fn exp_sum_slice<S>(simd, shift: f32, x: &'a [f32], y: &'a mut [f32]) -> f32 {
        exp_sum(simd, shift, x, y)
    }
}

simd_fn! { fn exp_in_place_slice<S>(simd, shift: f32, y: &'a mut [f32]) { exp_in_place(simd, shift, y) } }

fn grid(low: f32, high: f32, count: usize) -> Vec<f32> {
    (0..count).map(|i| low + (high - low) * i as f32 / (count - 1) as f32).collect()
}

#[test]
fn exp_is_within_one_and_a_half_ulp() {
    let x = grid(-87.3, 88.37, 1_000_003);
    let mut y = vec![0.0; x.len()];
    exp_slice(&x, &mut y);
    for (&x, &y) in x.iter().zip(&y) {
        let exact = f64::from(x).exp();
        let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
        assert!((f64::from(y) - exact).abs() <= 1.5 * ulp, "exp({x}) = {y}, exactly {exact}");
    }
}

#[test]
fn exp_of_extremes() {
    let x = [0.0, -0.0, -88.0, -1e9, f32::NEG_INFINITY, 88.8, f32::INFINITY, f32::NAN, f32::MIN];
    let mut y = [0.0; 9];
    exp_slice(&x, &mut y);
    assert_eq!(y[..7], [1.0, 1.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY]);
    assert!(y[7].is_nan());
    assert_eq!(y[8], 0.0);
}

/// Phi(x) in f64 by integrating the density with Simpson's rule.
fn cdf(x: f64) -> f64 {
    let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let steps = 4000;
    let h = x.abs() / f64::from(steps);
    let inner = (1..steps).map(|i| density(h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 });
    let half = h / 3.0 * (density(0.0) + inner.sum::<f64>() + density(x));
    if x > 0.0 { 0.5 + half } else { 0.5 - half }
}

#[test]
fn gelu_and_its_derivative_are_exact_to_two_in_ten_million() {
    let x = grid(-12.0, 12.0, 4801);
    let (mut y, mut dy) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    gelu_slice(&x, &mut y, &mut dy);
    for i in 0..x.len() {
        let t = f64::from(x[i]);
        let phi = (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let (value, slope) = (t * cdf(t), cdf(t) + t * phi);
        let close = |got: f32, exact: f64| (f64::from(got) - exact).abs() <= 2e-7 * exact.abs().max(1.0);
        assert!(close(y[i], value), "gelu({t}) = {}, exactly {value}", y[i]);
        assert!(close(dy[i], slope), "gelu'({t}) = {}, exactly {slope}", dy[i]);
    }
}

#[test]
fn gelu_by_tanh_and_its_derivative_are_exact_to_a_millionth() {
    let x = grid(-12.0, 12.0, 4801);
    let (mut y, mut dy) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    gelu_tanh_slice(&x, &mut y, &mut dy);
    for i in 0..x.len() {
        let t = f64::from(x[i]);
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let tanh = (root * (t + 0.044_715 * t.powi(3))).tanh();
        let value = 0.5 * t * (1.0 + tanh);
        let slope =
            0.5 * (1.0 + tanh) + 0.5 * t * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044_715 * t * t);
        let close = |got: f32, exact: f64| (f64::from(got) - exact).abs() <= 1e-6 * exact.abs().max(1.0);
        assert!(close(y[i], value), "gelu({t}) = {}, exactly {value}", y[i]);
        assert!(close(dy[i], slope), "gelu'({t}) = {}, exactly {slope}", dy[i]);
    }
}

#[test]
fn gelu_of_extremes() {
    let x = [0.0, 1e20, -1e20, f32::NAN];
    let (mut y, mut dy) = ([1.0; 4], [1.0; 4]);
    for gelu in [gelu_slice, gelu_tanh_slice] {
        gelu(&x, &mut y, &mut dy);
        assert_eq!((y[0], dy[0], y[1], dy[1]), (0.0, 0.5, 1e20, 1.0));
        assert_eq!((y[2].abs(), dy[2].abs()), (0.0, 0.0));
        assert!(y[3].is_nan() && dy[3].is_nan());
    }
}

#[test]
fn reductions_of_every_length() {
    for n in 0..150 {
        let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 23) as f32 - 30.0).collect();
        let y: Vec<f32> = (0..n).map(|i| ((i * 13) % 7) as f32).collect();
        assert_eq!(sum_slice(&x), x.iter().sum::<f32>(), "length {n}");
        assert_eq!(dot_slice(&x, &y), x.iter().zip(&y).map(|(x, y)| x * y).sum::<f32>(), "length {n}");
        assert_eq!(max_slice(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max), "length {n}");
        let mut e = vec![9.0; n];
        let total = exp_sum_slice(-10.0, &x, &mut e);
        let exact: f64 = x.iter().map(|&x| f64::from(x + 10.0).exp()).sum();
        assert!((f64::from(total) - exact).abs() <= 1e-6 * exact, "length {n}");
        let mut in_place = x.clone();
        exp_in_place_slice(-10.0, &mut in_place);
        assert_eq!(in_place, e, "length {n}");
        assert_eq!(e.iter().filter(|&&e| e == 9.0).count(), 0);
    }
}
