use super::*;
use crate::testing::{check, randn};

#[test]
fn fused_matches_composed() {
    for (b, n, e, taps) in
        [(1, 1, 1, 1), (2, 3, 5, 4), (1, 37, 17, 3), (2, 29, 16, 4), (1, 1201, 35, 7), (2, 4, 3, 9)]
    {
        for silu in [false, true] {
            let what = format!("{b} x {n} x {e}, {taps} taps, {silu}");
            let inputs = [randn("x", &[b, n, e]), randn("weight", &[e, taps]), randn("bias", &[e])];
            check(&what, &inputs, 1e-5, |x| {
                short_conv(&x[0], ShortConv { weight: &x[1], bias: Some(&x[2]), silu })
            });
            check(&format!("{what}, no bias"), &inputs[..2], 1e-5, |x| {
                short_conv(&x[0], ShortConv { weight: &x[1], bias: None, silu })
            });
        }
    }
}

#[test]
fn the_last_tap_is_the_current_position() {
    let (x, weight) = (randn("x", &[1, 6, 1]), randn("w", &[1, 3]));
    let y = short_conv(&x, ShortConv { weight: &weight, bias: None, silu: false }).unwrap();
    let [x, y, w] = [&x, &y, &weight].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    assert!((y[0] - w[2] * x[0]).abs() < 1e-6);
    assert!((y[5] - (w[0] * x[3] + w[1] * x[4] + w[2] * x[5])).abs() < 1e-6);
}

#[test]
fn decoding_is_the_forward_pass() {
    let (b, n, e) = (2, 11, 5);
    for taps in [1, 4] {
        let (x, weight, bias) = (randn("x", &[b, n, e]), randn("w", &[e, taps]), randn("bias", &[e]));
        let conv = ShortConv { weight: &weight, bias: Some(&bias), silu: true };
        let all = short_conv(&x, conv).unwrap();
        let mut state = None;
        for t in 0..n {
            let y = step(&x.narrow(1, t, 1).unwrap(), conv, &mut state).unwrap();
            let difference = (y - all.narrow(1, t, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 1e-6, "{taps} taps, position {t}");
            assert_eq!(state.as_ref().map(Tensor::dims), Some(&[b, taps - 1, e][..]));
        }
        assert!(step(&x, conv, &mut state).is_err());
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let (x, weight) = (randn("x", &[1, 4, 3]), randn("w", &[2, 4]));
    let message =
        short_conv(&x, ShortConv { weight: &weight, bias: None, silu: true }).unwrap_err().to_string();
    assert!(message.contains("[3, taps]"), "{message}");
}
