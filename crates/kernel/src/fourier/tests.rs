use candle_core::Device;

use super::*;
use crate::testing::{check, randn};

#[test]
fn fused_matches_composed() {
    for (b, n, e) in [
        (1, 1, 1),
        (2, 1, 5),
        (3, 5, 1),
        (2, 2, 2),
        (2, 37, 12),
        (1, 45, 15),
        (1, 64, 7),
        (1, 151, 38),
        (3, 128, 64),
    ] {
        for norm in [Norm::None, Norm::Ortho] {
            let x = [randn("x", &[b, n, e])];
            check(&format!("{b} x {n} x {e}, {norm:?}"), &x, 2e-6, |x| fourier_mix(&x[0], norm));
        }
    }
}

#[test]
fn the_unitary_transform_twice_is_a_mean_with_the_mirror_image() {
    // Re F is (F + conj F) / 2, and F F mirrors: applied twice, (x + mirrored x) / 2
    let (n, e) = (29, 10);
    let x = randn("x", &[n, e]);
    let twice =
        fourier_mix(&fourier_mix(&x.unsqueeze(0).unwrap(), Norm::Ortho).unwrap(), Norm::Ortho).unwrap();
    let twice = twice.squeeze(0).unwrap().to_vec2::<f32>().unwrap();
    let x = x.to_vec2::<f32>().unwrap();
    for row in 0..n {
        for column in 0..e {
            let want = 0.5 * (x[row][column] + x[(n - row) % n][(e - column) % e]);
            assert!((twice[row][column] - want).abs() < 1e-5, "{row}, {column}");
        }
    }
}

#[test]
fn nothing_is_mixed_to_nothing() {
    let none = Tensor::zeros((2, 0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(fourier_mix(&none, Norm::None).unwrap().dims(), [2, 0, 3]);
    assert!(fourier_mix(&none.flatten_all().unwrap(), Norm::None).is_err());
}
