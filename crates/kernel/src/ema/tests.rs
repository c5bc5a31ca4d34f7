use candle_core::{DType, Device};

use super::*;
use crate::testing::{assert_fades_to_zero, check as check_fused, randn};
use crate::{KernelMode, with_mode};

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::Reverse, Direction::Both];

/// Decays between 0 and 0.99, [k, ndim].
fn decays(k: usize, ndim: usize) -> Tensor {
    let values = (0..k * ndim).map(|at| 0.99 * (at * 7 % 23) as f32 / 22.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((k, ndim)).unwrap()
}

#[test]
fn fused_matches_composed() {
    for (b, n, e, ndim) in [(1, 1, 1, 1), (2, 7, 3, 2), (1, 37, 17, 3), (2, 141, 16, 4), (1, 397, 35, 1)] {
        for direction in DIRECTIONS {
            for truncation in [None, Some(1), Some(8), Some(130)] {
                let k = direction.count() * e;
                let inputs = [randn("x", &[b, n, e]), randn("coefficient", &[k, ndim]), decays(k, ndim)];
                let what = format!("{b} x {n} x {e}, {ndim}, {direction:?}, {truncation:?}");
                check_fused(&what, &inputs, 2e-5, |x| ema(&x[0], &x[1], &x[2], direction, truncation));
            }
        }
    }
}

#[test]
fn a_gradient_fades_to_zero() {
    let decay = (Tensor::ones((6, 2), DType::F32, &Device::Cpu).unwrap() * 0.9).unwrap();
    let inputs = [randn("x", &[1, 1501, 3]), randn("coefficient", &[6, 2]), decay];
    for truncation in [None, Some(1400)] {
        let f = |x: &[Tensor]| ema(&x[0], &x[1], &x[2], Direction::Both, truncation);
        assert_fades_to_zero(&format!("{truncation:?}"), &inputs, 0, f);
    }
}

/// The convolution itself, in f64.
#[test]
fn composed_is_the_convolution() {
    let (n, e, ndim) = (75, 3, 4);
    let (x, coefficient, decay) = (randn("x", &[n, e]), randn("w", &[2 * e, ndim]), decays(2 * e, ndim));
    for truncation in [None, Some(10), Some(40)] {
        let input = x.unsqueeze(0).unwrap();
        let y = with_mode(KernelMode::Composed, || {
            ema(&input, &coefficient, &decay, Direction::Both, truncation)
        });
        let y = y.unwrap().squeeze(0).unwrap().to_vec2::<f32>().unwrap();
        let [x, w, c] = [&x, &coefficient, &decay].map(|x| x.to_vec2::<f32>().unwrap());
        let kernel = |row: usize, lag: usize| -> f64 {
            let terms =
                w[row].iter().zip(&c[row]).map(|(&w, &c)| f64::from(w) * f64::from(c).powi(lag as i32));
            if truncation.is_some_and(|end| lag >= end) { 0.0 } else { terms.sum() }
        };
        for (t, y) in y.iter().enumerate() {
            for channel in 0..e {
                let before = (0..=t).map(|s| kernel(channel, t - s) * f64::from(x[s][channel]));
                let after = (t..n).map(|s| kernel(e + channel, s - t) * f64::from(x[s][channel]));
                let want = before.sum::<f64>() + after.sum::<f64>();
                let found = f64::from(y[channel]);
                assert!((found - want).abs() < 2e-4, "{truncation:?}, {t}, {channel}: {found}, not {want}");
            }
        }
    }
}

#[test]
fn decoding_is_the_forward_pass() {
    let (b, n, e, ndim) = (2, 29, 5, 4);
    let (x, coefficient, decay) = (randn("x", &[b, n, e]), randn("w", &[e, ndim]), decays(e, ndim));
    for truncation in [None, Some(1), Some(6), Some(n)] {
        let all = ema(&x, &coefficient, &decay, Direction::Forward, truncation).unwrap();
        let mut state = EmaState::default();
        for t in 0..n {
            let y = step(&x.narrow(1, t, 1).unwrap(), &coefficient, &decay, truncation, &mut state).unwrap();
            let difference = (y - all.narrow(1, t, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 2e-5, "{truncation:?}, position {t}");
        }
        assert!(step(&x, &coefficient, &decay, truncation, &mut state).is_err());
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (x, w, c) = (randn("x", &[1, 4, 3]), randn("w", &[3, 2]), decays(3, 2));
    let message = ema(&x, &w, &c, Direction::Both, None).unwrap_err().to_string();
    assert!(message.contains("[6, ndim]"), "{message}");
    assert!(ema(&x, &w, &c, Direction::Forward, Some(0)).is_err());
    let empty = ema(&x.narrow(1, 0, 0).unwrap(), &w, &c, Direction::Forward, None).unwrap();
    assert_eq!(empty.dims(), [1, 0, 3]);
}
