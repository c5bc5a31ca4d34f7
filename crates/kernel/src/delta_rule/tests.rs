//! The fused kernel against the recurrence in f64, the recurrence against differences, steps against the whole.

use candle_core::Device;

use super::*;
use crate::testing::{check, randn};
use crate::{KernelMode, with_mode};

/// Shape of a call: samples, heads, positions, key width, value width.
pub(super) type Shape = [usize; 5];

/// How strong the decays are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Strength {
    None,
    Slow,
    Strong,
}

fn sigmoid(x: &Tensor) -> Tensor {
    (x.neg().unwrap().exp().unwrap() + 1.0).unwrap().recip().unwrap()
}

/// Unit queries and keys, values, beta and log decay.
pub(super) fn inputs(name: &str, shape: Shape, strength: Strength) -> Vec<Tensor> {
    let [b, h, n, dk, d] = shape;
    let draw = |part: &str, shape: &[usize]| randn(&format!("{name} {part}"), shape);
    let unit = |x: Tensor| {
        let length = x.sqr().unwrap().sum_keepdim(3).unwrap().sqrt().unwrap();
        x.broadcast_div(&length).unwrap()
    };
    let beta = draw("beta", &[b, h, n]).affine(3.0, 0.0).unwrap();
    let beta = (sigmoid(&beta) * 2.0).unwrap(); // near 0, near 2 and between
    let mut all = vec![
        unit(draw("q", &[b, h, n, dk])),
        unit(draw("k", &[b, h, n, dk])),
        draw("v", &[b, h, n, d]),
        beta,
    ];
    let size = draw("decay", &[b, h, n]).abs().unwrap();
    match strength {
        Strength::None => {}
        Strength::Slow => all.push((size * -0.05).unwrap()),
        // every fifth step forgets all
        Strength::Strong => {
            let step: Vec<f32> = (0..n).map(|t| if t % 5 == 3 { -60.0 } else { -1.5 }).collect();
            all.push(size.broadcast_mul(&Tensor::from_vec(step, n, &Device::Cpu).unwrap()).unwrap());
        }
    }
    all
}

pub(super) fn rows(tensors: &[Tensor]) -> Result<DeltaRows> {
    DeltaRows::new(&Qkv::separate(tensors[0].clone(), tensors[1].clone(), tensors[2].clone()))
}

/// Runs the operation on tensors in the order of [`inputs`].
fn run(tensors: &[Tensor], mask: Option<&Tensor>) -> Result<Tensor> {
    let call = DeltaRule { beta: &tensors[3], log_decay: tensors.get(4), mask };
    delta_rule(&rows(tensors)?, &call)?.split()?.contiguous()
}

/// Every third position of the first sample and the end of the others is hidden.
pub(super) fn holes(samples: usize, len: usize) -> Tensor {
    let keep = |at: usize| {
        let (sample, position) = (at / len, at % len);
        f32::from(if sample == 0 { position % 3 != 1 } else { position < len.div_ceil(2) })
    };
    let keep: Vec<f32> = (0..samples * len).map(keep).collect();
    Tensor::from_vec(keep, (samples, len), &Device::Cpu).unwrap()
}

#[test]
fn equals_the_recurrence() {
    for (index, shape) in [
        [2, 2, 1, 4, 4],
        [1, 2, 2, 8, 3],
        [2, 1, 31, 5, 7],
        [1, 1, 32, 16, 16],
        [2, 2, 33, 7, 5],
        [1, 2, 131, 8, 20],
        [1, 1, 97, 67, 70],
    ]
    .into_iter()
    .enumerate()
    {
        for strength in [Strength::None, Strength::Slow, Strength::Strong] {
            let name = format!("{shape:?} {strength:?}");
            let inputs = inputs(&name, shape, strength);
            check(&name, &inputs, 2e-5, |tensors| run(tensors, None));
            if index % 2 == 0 {
                let mask = holes(shape[0], shape[2]);
                check(&format!("{name} with holes"), &inputs, 2e-5, |tensors| run(tensors, Some(&mask)));
            }
        }
    }
}

#[test]
fn packed_rows_are_read_in_place() {
    let (b, h, n, d) = (2, 3, 70, 6);
    let beta = sigmoid(&randn("packed beta", &[b, h, n]));
    let inputs = [randn("packed", &[b, n, 3 * h * d]).affine(0.3, 0.0).unwrap(), beta];
    for parts in [PackedLayout::QKV, PackedLayout { q: Some(2), k: Some(0), v: Some(1), count: 3 }] {
        check("packed rows", &inputs, 2e-5, |tensors| {
            let rows = DeltaRows::new(&Qkv::Packed { rows: tensors[0].clone(), heads: h, parts })?;
            delta_rule(&rows, &DeltaRule { beta: &tensors[1], log_decay: None, mask: None })?
                .split()?
                .contiguous()
        });
    }
}

#[test]
fn zero_and_equal_keys() {
    let inputs = inputs("zero rows", [1, 1, 80, 4, 4], Strength::Slow);
    let zero: Vec<f32> = (0..80).map(|t| f32::from(t % 7 != 2)).collect();
    let zero = Tensor::from_vec(zero, (1, 1, 80, 1), &Device::Cpu).unwrap();
    let same =
        inputs[1].narrow(2, 0, 1).unwrap().broadcast_as(inputs[1].shape()).unwrap().contiguous().unwrap();
    for keys in [inputs[1].broadcast_mul(&zero).unwrap(), same] {
        let mut inputs = inputs.clone();
        inputs[0] = inputs[0].broadcast_mul(&zero).unwrap();
        inputs[1] = keys;
        check("zero and equal keys", &inputs, 2e-5, |tensors| run(tensors, None));
    }
}

#[test]
fn a_step_that_forgets_all_spoils_no_later_one() {
    let mut inputs = inputs("forgets", [1, 2, 150, 8, 8], Strength::Slow);
    let forget: Vec<f32> = (0..300).map(|t| if t % 40 == 5 { -1e30 } else { -0.01 }).collect();
    inputs[4] = Tensor::from_vec(forget, (1, 2, 150), &Device::Cpu).unwrap();
    let fused = run(&inputs, None).unwrap();
    let double: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let exact = with_mode(KernelMode::Composed, || run(&double, None)).unwrap();
    let error = (fused.to_dtype(DType::F64).unwrap() - &exact).unwrap().abs().unwrap().max_all().unwrap();
    assert!(error.to_scalar::<f64>().unwrap() < 1e-5);
}

#[test]
fn hidden_steps_are_no_steps() {
    let inputs = inputs("holes", [1, 2, 90, 8, 8], Strength::Slow);
    let mask = holes(1, 90);
    let kept: Vec<u32> = (0..90).filter(|t| t % 3 != 1).collect();
    let kept = Tensor::from_vec(kept, 60, &Device::Cpu).unwrap();
    let shorter: Vec<Tensor> = inputs.iter().map(|x| x.index_select(&kept, 2).unwrap()).collect();
    let with_holes = run(&inputs, Some(&mask)).unwrap().index_select(&kept, 2).unwrap();
    let without = run(&shorter, None).unwrap();
    let error = (with_holes - without).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(error < 1e-5, "{error}");
}

#[test]
fn steps_equal_the_whole() {
    for strength in [Strength::None, Strength::Slow, Strength::Strong] {
        let (b, h, n) = (2, 2, 75);
        let inputs = inputs("steps", [b, h, n, 8, 5], strength);
        let mask = holes(b, n);
        let whole = run(&inputs, Some(&mask)).unwrap();
        for mode in [KernelMode::Fused, KernelMode::Composed] {
            let mut state = None;
            for t in 0..n {
                let now: Vec<Tensor> =
                    inputs.iter().map(|x| x.narrow(2, t, 1).unwrap().contiguous().unwrap()).collect();
                let mask = mask.narrow(1, t, 1).unwrap();
                let call = DeltaRule { beta: &now[3], log_decay: now.get(4), mask: Some(&mask) };
                let out = with_mode(mode, || decode::step(&rows(&now).unwrap(), &call, &mut state)).unwrap();
                assert_eq!(matches!(out, Heads::Merged { .. }), mode == KernelMode::Fused);
                let error = out.split().unwrap() - whole.narrow(2, t, 1).unwrap();
                let error = error.unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(error < 1e-5, "{strength:?} at {t}");
            }
            assert_eq!(state.unwrap().dims(), [b, h, 8, 5]);
        }
    }
}

#[test]
fn normalization_equals_its_definition() {
    for (silu_qk, silu_v, heads, dk, d) in
        [(true, true, 2, 16, 16), (false, true, 1, 5, 3), (true, false, 3, 7, 33)]
    {
        let mut x = vec![randn("normalize", &[2, 9, heads * (2 * dk + d)])];
        let config = NormalizeConfig { silu_qk, silu_v, eps: 1e-2, query_scale: (dk as f64).powf(-0.5) };
        let apply = |tensors: &[Tensor]| {
            let rows = DeltaRows { rows: tensors[0].clone(), heads, key_width: dk, value_width: d };
            Ok(normalize(&rows, &config)?.rows)
        };
        check("normalize", &x, 1e-5, apply);
        x[0] = x[0].zeros_like().unwrap();
        check("normalize zeros", &x, 1e-5, apply);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let inputs = inputs("refused", [1, 2, 6, 4, 4], Strength::Slow);
    let refused = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut inputs = inputs.clone();
        change(&mut inputs);
        run(&inputs, None).unwrap_err().to_string()
    };
    assert!(refused(&|x| x[3] = randn("beta", &[1, 6, 2])).contains("beta of shape [1, 6, 2]"));
    assert!(refused(&|x| x[4] = randn("decay", &[1, 2, 5])).contains("expected [1, 2, 6]"));
    assert!(refused(&|x| x[1] = randn("keys", &[1, 2, 5, 4])).contains("do not fit together"));
    let mask = randn("mask", &[1, 5]);
    assert!(run(&inputs, Some(&mask)).unwrap_err().to_string().contains("mask of shape [1, 5]"));
    let call = DeltaRule { beta: &inputs[3], log_decay: None, mask: None };
    let error = decode::step(&rows(&inputs).unwrap(), &call, &mut None).unwrap_err().to_string();
    assert!(error.contains("one token, got 6"), "{error}");
}
