//! The fused kernel against the definition in f64, the definition against differences, steps against the whole.

use candle_core::Device;

use super::*;
use crate::heads::PackedLayout;
use crate::testing::{check, randn};

/// A call: samples, heads, positions, head width.
type Shape = [usize; 4];

/// Window, length of its parameters, heads of the bias, rank of the factors (0: a dense bias).
type Window = (usize, usize, usize, usize);

fn draw(name: &str, shape: &[usize], scale: f64) -> Tensor {
    (randn(name, shape) * scale).unwrap()
}

/// Queries, keys, values, and the parameters of the bias.
fn inputs(name: &str, [b, h, n, d]: Shape, window: Option<Window>) -> Vec<Tensor> {
    let part = |part: &str| draw(&format!("{name} {part}"), &[b, h, n, d], 1.5);
    let mut all = vec![part("q"), part("k"), part("v")];
    match window {
        None => {}
        Some((_, len, heads, 0)) => all.push(draw(name, &[heads, len, len], 1.5)),
        Some((_, len, heads, rank)) => {
            all.extend(["u", "v"].map(|factor| draw(factor, &[heads, len, rank], 0.8)));
        }
    }
    all
}

/// Runs the operation on tensors in the order of [`inputs`].
fn run(x: &[Tensor], window: Option<Window>, mask: Option<&Tensor>, causal: bool) -> Result<Tensor> {
    let n = x[0].dim(2)?;
    let bias = match window {
        None => None,
        Some((window, _, _, 0)) => Some(WindowBias::from_bias(&x[3], n, window, causal)?),
        Some((window, ..)) => Some(WindowBias::from_factors(&x[3], &x[4], n, window, causal)?),
    };
    let qkv = Qkv::separate(x[0].clone(), x[1].clone(), x[2].clone());
    aft(&qkv, &Aft { bias: bias.as_ref(), mask, causal })?.split()?.contiguous()
}

/// The first two positions of the first sample, every third one, and the end of the others are hidden.
fn holes(samples: usize, len: usize) -> Tensor {
    let keep = |at: usize| {
        let (sample, position) = (at / len, at % len);
        f32::from(if sample == 0 { position > 1 && position % 3 != 1 } else { position < len.div_ceil(2) })
    };
    Tensor::from_vec((0..samples * len).map(keep).collect::<Vec<_>>(), (samples, len), &Device::Cpu).unwrap()
}

#[test]
fn equals_the_definition() {
    let cases: [(Shape, Option<Window>); 11] = [
        ([2, 2, 1, 4], None),
        ([2, 3, 37, 7], None),
        ([1, 1, 131, 70], None),
        ([1, 1, 1, 3], Some((3, 2, 1, 0))),
        ([2, 2, 37, 8], Some((5, 40, 1, 0))),
        ([2, 2, 41, 9], Some((4, 41, 2, 0))),
        ([1, 2, 30, 40], Some((50, 30, 2, 0))),
        ([6, 1, 13, 5], Some((1, 20, 1, 0))),
        ([2, 2, 29, 8], Some((6, 31, 1, 3))),
        ([1, 3, 67, 65], Some((17, 67, 3, 2))),
        ([1, 1, 70, 17], Some((69, 80, 1, 4))),
    ];
    for (shape, window) in cases {
        for causal in [true, false] {
            let name = format!("{shape:?} {window:?} {causal}");
            let inputs = inputs(&name, shape, window);
            check(&name, &inputs, 1e-5, |x| run(x, window, None, causal));
            let mask = holes(shape[0], shape[2]);
            check(&format!("{name} with holes"), &inputs, 1e-5, |x| run(x, window, Some(&mask), causal));
        }
    }
}

#[test]
fn packed_rows_are_read_in_place() {
    let parts = PackedLayout { q: Some(3), k: Some(0), v: Some(1), count: 4 };
    for heads in [1, 3] {
        let inputs = [randn("packed", &[2, 33, 4 * 3 * 6]), draw("packed bias", &[heads, 33, 33], 1.0)];
        check("packed rows", &inputs, 1e-5, |x| {
            let qkv = Qkv::Packed { rows: x[0].clone(), heads: 3, parts };
            let bias = WindowBias::from_bias(&x[1], 33, 4, true)?;
            aft(&qkv, &Aft { bias: Some(&bias), mask: None, causal: true })?.split()?.contiguous()
        });
    }
}

/// A key of about 60 at position 7 of some channels.
fn spike(x: &Tensor) -> Tensor {
    let (_, _, n, d) = x.dims4().unwrap();
    let add = (0..n * d).map(|at| if at / d == 7 && at % d % 2 == 0 { 60.0 } else { 0.0 }).collect();
    x.broadcast_add(&Tensor::from_vec::<_, f32>(add, (1, 1, n, d), &Device::Cpu).unwrap()).unwrap()
}

#[test]
fn a_large_key_hides_no_earlier_one() {
    for window in [None, Some((4, 29, 1, 0)), Some((9, 29, 1, 0))] {
        for causal in [true, false] {
            let mut inputs = inputs("spike", [1, 2, 29, 8], window);
            inputs[1] = spike(&inputs[1]);
            check(&format!("spike {window:?} {causal}"), &inputs, 1e-5, |x| run(x, window, None, causal));
        }
    }
    // by more than f32 spans: the rows before it are those of the sequence without it
    let window = Some((4, 29, 1, 0));
    for window in [None, window] {
        let mut inputs = inputs("spike", [1, 2, 29, 8], window);
        let without = run(&inputs, window, None, true).unwrap();
        inputs[1] = spike(&spike(&inputs[1]));
        let with = run(&inputs, window, None, true).unwrap();
        let first = |x: &Tensor| x.narrow(2, 0, 7).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(first(&with), first(&without));
    }
}

#[test]
fn biases_of_any_size() {
    for shift in [-120.0, 120.0] {
        let window = Some((3, 21, 1, 0));
        let mut inputs = inputs("biases", [1, 1, 21, 5], window);
        inputs[3] = (&inputs[3] + shift).unwrap();
        for causal in [true, false] {
            check(&format!("biases around {shift}"), &inputs, 1e-5, |x| run(x, window, None, causal));
        }
    }
}

#[test]
fn steps_equal_the_whole() {
    for (window, spiked) in [
        (None, false),
        (None, true),
        (Some((5, 40, 1, 0)), false),
        (Some((5, 40, 2, 0)), true),
        (Some((50, 37, 1, 2)), false),
    ] {
        let (b, h, n) = (2, 2, 37);
        let mut inputs = inputs("steps", [b, h, n, 6], window);
        if spiked {
            inputs[1] = spike(&inputs[1]);
        }
        let mask = holes(b, n);
        let whole = run(&inputs, window, Some(&mask), true).unwrap();
        let band = window.map(|(window, _, _, rank)| {
            if rank == 0 {
                WindowBias::from_bias(&inputs[3], n, window, true).unwrap()
            } else {
                WindowBias::from_factors(&inputs[3], &inputs[4], n, window, true).unwrap()
            }
        });
        let mut state = decode::AftState::default();
        for t in 0..n {
            let now = |x: &Tensor| x.narrow(2, t, 1).unwrap();
            let qkv = Qkv::separate(now(&inputs[0]), now(&inputs[1]), now(&inputs[2]));
            let bias = band.as_ref().map(|bias| bias.band().narrow(1, t, 1).unwrap().squeeze(1).unwrap());
            let keep = mask.narrow(1, t, 1).unwrap();
            let out = decode::step(&qkv, bias.as_ref(), Some(&keep), &mut state).unwrap().split().unwrap();
            let error = (out - now(&whole)).unwrap().abs().unwrap().max_all().unwrap();
            assert!(error.to_scalar::<f32>().unwrap() < 1e-5, "{window:?} at {t}");
        }
    }
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    let x = inputs("refused", [1, 2, 6, 4], Some((3, 8, 1, 0)));
    let qkv = Qkv::separate(x[0].clone(), x[1].clone(), x[2].clone());
    let error = |bias: &WindowBias, causal: bool| {
        aft(&qkv, &Aft { bias: Some(bias), mask: None, causal }).unwrap_err().to_string()
    };
    let bias = |len: usize| WindowBias::from_bias(&x[3], len, 3, true).unwrap();
    assert!(error(&bias(6), false).contains("(causal: false)"));
    assert!(error(&bias(7), true).contains("7 positions"));
    assert!(WindowBias::from_bias(&x[3], 9, 3, true).unwrap_err().to_string().contains("for 9 positions"));
    assert!(WindowBias::from_bias(&x[3], 6, 0, true).unwrap_err().to_string().contains("window of 0"));
    let factors = WindowBias::from_factors(&randn("u", &[1, 8, 2]), &randn("v", &[1, 8, 3]), 6, 3, true);
    assert!(factors.unwrap_err().to_string().contains("[1, 8, 2] and [1, 8, 3]"));
    let mask = randn("mask", &[1, 5]);
    let call = Aft { bias: None, mask: Some(&mask), causal: true };
    assert!(aft(&qkv, &call).unwrap_err().to_string().contains("mask of shape [1, 5]"));
    let qkv = Qkv::separate(x[0].clone(), x[1].narrow(2, 0, 5).unwrap(), x[2].clone());
    assert!(
        aft(&qkv, &Aft { bias: None, mask: None, causal: true })
            .unwrap_err()
            .to_string()
            .contains("one shape")
    );
}
