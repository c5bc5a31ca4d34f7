use super::*;
use crate::testing::{assert_fades_to_zero, assert_matches_composed, check as check_fused, randn};
use crate::{KernelMode, with_mode};

/// Decays of modulus 0.3 to `largest`, [2, p].
fn decays_up_to(largest: f32, p: usize) -> Tensor {
    let parts = (0..2).flat_map(|part| {
        (0..p).map(move |state| {
            let (modulus, angle) =
                (largest - (largest - 0.3) * state as f32 / p as f32, 0.1 + 2.9 * state as f32);
            modulus * if part == 0 { angle.cos() } else { angle.sin() }
        })
    });
    Tensor::from_iter(parts, &candle_core::Device::Cpu).unwrap().reshape((2, p)).unwrap()
}

pub(super) fn decays(p: usize) -> Tensor {
    decays_up_to(0.97, p)
}

pub(super) const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::Reverse, Direction::Both];

#[test]
fn fused_matches_composed() {
    for (b, n, p) in [(1, 1, 1), (2, 7, 3), (1, 37, 17), (3, 128, 16), (2, 397, 35)] {
        for direction in DIRECTIONS {
            let inputs = [randn("u", &[b, n, 2 * p]), decays(p)];
            check_fused(&format!("{b} x {n} x {p}, {direction:?}"), &inputs, 1e-5, |x| {
                diagonal_scan(&x[0], &x[1], direction)
            });
        }
    }
}

#[test]
fn slow_decays_keep_their_digits() {
    let inputs = [randn("u", &[2, 1031, 10]), decays_up_to(0.9999, 5)];
    assert_matches_composed("slow", &inputs, 2e-5, |x| diagonal_scan(&x[0], &x[1], Direction::Both)).unwrap();
}

#[test]
fn a_gradient_fades_to_zero() {
    let inputs = [randn("u", &[1, 1501, 10]), decays_up_to(0.9, 5)];
    assert_fades_to_zero("scan", &inputs, 0, |x| diagonal_scan(&x[0], &x[1], Direction::Both));
}

/// The recurrence itself, in f64.
#[test]
fn composed_is_the_recurrence() {
    let (n, p) = (23, 5);
    let (u, a) = (randn("u", &[1, n, 2 * p]), decays(p));
    let both = with_mode(KernelMode::Composed, || diagonal_scan(&u, &a, Direction::Both)).unwrap();
    let (both, u, a) = (both.squeeze(0).unwrap(), u.squeeze(0).unwrap(), a.to_vec2::<f32>().unwrap());
    let (both, u) = (both.to_vec2::<f32>().unwrap(), u.to_vec2::<f32>().unwrap());
    for state in 0..p {
        let (a_re, a_im) = (f64::from(a[0][state]), f64::from(a[1][state]));
        for side in 0..2 {
            let (mut re, mut im) = (0.0, 0.0);
            for step in 0..n {
                let row = if side == 1 { n - 1 - step } else { step };
                let (u_re, u_im) = (f64::from(u[row][state]), f64::from(u[row][p + state]));
                (re, im) = (a_re * re - a_im * im + u_re, a_re * im + a_im * re + u_im);
                let found = [both[row][2 * side * p + state], both[row][(2 * side + 1) * p + state]];
                assert!((f64::from(found[0]) - re).abs() < 1e-5 && (f64::from(found[1]) - im).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn decoding_is_the_forward_pass() {
    let (b, n, p) = (2, 19, 9);
    let (u, a) = (randn("u", &[b, n, 2 * p]), decays(p));
    let all = diagonal_scan(&u, &a, Direction::Forward).unwrap();
    let mut state = None;
    for t in 0..n {
        let h = step(&u.narrow(1, t, 1).unwrap(), &a, &mut state).unwrap();
        let difference = (h - all.narrow(1, t, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-5, "position {t}");
    }
    assert!(step(&u, &a, &mut state).is_err());
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let (u, a) = (randn("u", &[1, 4, 6]), decays(2));
    let message = diagonal_scan(&u, &a, Direction::Forward).unwrap_err().to_string();
    assert!(message.contains("[b, n, 2 p]"), "{message}");
    let empty = diagonal_scan(&randn("u", &[1, 3, 4]).narrow(1, 0, 0).unwrap(), &a, Direction::Both).unwrap();
    assert_eq!(empty.dims(), [1, 0, 8]);
}
