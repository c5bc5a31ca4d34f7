use candle_core::{Device, Result, Tensor};

use super::{Dynamic, dynamic, dynamic_mask, learned};
use crate::group::{ParamGroup, ParamPart};
use crate::testing::{assert_matches_composed, evaluate, normal};
use crate::{KernelMode, with_mode};

fn group(flat: &Tensor, slots: usize, width: usize) -> ParamGroup {
    let part =
        |name: &str, shape: &[usize], offset| ParamPart { name: name.into(), shape: shape.into(), offset };
    let parts = vec![part("weight", &[slots, width], 0), part("bias", &[slots], slots * width)];
    ParamGroup { flat: flat.clone(), parts }
}

fn matrix(x: &Tensor) -> Result<ParamGroup> {
    let part = ParamPart { name: String::new(), shape: x.dims().to_vec(), offset: 0 };
    Ok(ParamGroup { flat: x.flatten_all()?, parts: vec![part] })
}

fn holes(b: usize, t: usize) -> Result<Tensor> {
    let hidden = |i: usize| i % 5 == 2 || i % 11 > 7 || i / t == 1 && i % t < t / 2;
    let mask: Vec<f32> = (0..b * t).map(|i| if hidden(i) { 0.0 } else { 1.0 }).collect();
    Tensor::from_vec(mask, (b, t), &Device::Cpu)
}

/// b, t, heads, head_dim, rank, width; segment
type Case = ([usize; 6], Option<usize>);

const SHAPES: &[Case] = &[
    ([1, 1, 1, 1, 1, 1], None),
    ([2, 7, 2, 3, 5, 4], None),
    ([1, 700, 2, 8, 3, 16], None),
    ([3, 301, 2, 16, 32, 32], None),
    ([17, 33, 1, 5, 2, 7], None),
    ([1, 1, 2, 4, 2, 8], Some(3)),
    ([2, 50, 2, 4, 2, 8], Some(8)),
    ([1, 513, 2, 8, 1, 16], Some(16)),
    ([2, 700, 1, 4, 3, 5], Some(300)),
    ([20, 37, 2, 3, 1, 6], Some(2)),
];

#[test]
fn dynamic_fused_equals_twin() -> Result<()> {
    for &([b, t, heads, d, rank, width], segment) in SHAPES {
        for (parts, count) in [(&[1usize, 2][..], 3), (&[0, 1], 2), (&[0], 1)] {
            for mask in [None, Some(holes(b, t)?)] {
                let slots = heads * rank;
                let inputs = [
                    normal("rows", &[b, t, count * heads * d])?,
                    normal("x", &[b, t, width])?,
                    normal("flat", &[slots * (width + 1)])?,
                ];
                let label = format!("{b} {t} {heads} {d} {rank} {segment:?} {count} {}", mask.is_some());
                assert_matches_composed(&label, &inputs, 3e-5, |x| {
                    let spec = Dynamic { heads, rank, segment, parts, count, mask: mask.as_ref() };
                    dynamic(&x[0], &x[1], &group(&x[2], slots, width), &spec)
                })?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_bias_gets_no_gradient_at_all() -> Result<()> {
    let (heads, rank, width) = (2, 3, 4);
    let inputs =
        [normal("rows", &[2, 20, 12])?, normal("x", &[2, 20, 4])?, normal("flat", &[6 * (width + 1)])?];
    let results = evaluate(KernelMode::Fused, &inputs, |x| {
        let spec = Dynamic { heads, rank, segment: None, parts: &[1, 2], count: 3, mask: None };
        dynamic(&x[0], &x[1], &group(&x[2], 6, width), &spec)
    })?;
    assert!(results[3][..24].iter().all(|&grad| grad != 0.0));
    assert_eq!(results[3][24..], [0.0; 6]);
    Ok(())
}

#[test]
fn far_apart_logits_stay_finite() -> Result<()> {
    let t = 600; // more than one tile
    let ramp: Vec<f32> = (0..t).map(|i| (i as f32 - 300.0) * 100.0).collect();
    let inputs = [
        normal("rows", &[1, t, 2])?,
        Tensor::from_vec(ramp, (1, t, 1), &Device::Cpu)?,
        Tensor::new(&[1f32, -1.0, 0.0, 0.0], &Device::Cpu)?,
    ];
    assert_matches_composed("ramp", &inputs, 1e-5, |x| {
        let spec = Dynamic { heads: 2, rank: 1, segment: None, parts: &[0], count: 1, mask: None };
        dynamic(&x[0], &x[1], &group(&x[2], 2, 1), &spec)
    })
}

#[test]
fn slots_without_valid_positions_do_not_exist() -> Result<()> {
    let mask = Tensor::new(&[[0f32, 0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]], &Device::Cpu)?;
    let exist = dynamic_mask(&mask, 2, Some(2))?.to_vec2::<f32>()?;
    assert_eq!(exist, [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]);
    assert_eq!(dynamic_mask(&mask, 1, None)?.to_vec2::<f32>()?, [[1.0], [1.0]]);
    Ok(())
}

#[test]
fn learned_fused_equals_twin() -> Result<()> {
    for (b, n, heads, d, k, n_max) in
        [(1, 1, 1, 1, 1, 1), (2, 7, 2, 3, 4, 9), (1, 300, 4, 8, 16, 512), (3, 129, 2, 5, 33, 129)]
    {
        for (parts, count) in [(&[1usize, 2][..], 3), (&[0, 1], 2), (&[1], 2)] {
            for shape in [&[heads, k, n_max][..], &[k, n_max]] {
                for shared in [false, true] {
                    let inputs = [
                        normal("rows", &[b, n, count * heads * d])?,
                        normal("e", shape)?,
                        normal("f", shape)?,
                    ];
                    let label = format!("{b} {n} {heads} {d} {k} {count} {shape:?} {shared}");
                    assert_matches_composed(&label, &inputs, 3e-5, |x| {
                        let [e, f] = [matrix(&x[1])?, matrix(&x[2])?];
                        let matrices = if shared { [&e, &e] } else { [&e, &f] };
                        learned(&x[0], &matrices[..parts.len()], parts, count)
                    })?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn misfits_are_errors() -> Result<()> {
    let (rows, x, flat) = (normal("rows", &[1, 5, 8])?, normal("x", &[1, 4, 3])?, normal("flat", &[8])?);
    let spec = Dynamic { heads: 2, rank: 1, segment: None, parts: &[0], count: 1, mask: None };
    let e = normal("e", &[2, 4])?;
    for mode in [KernelMode::Fused, KernelMode::Composed] {
        with_mode(mode, || {
            assert!(dynamic(&rows, &x, &group(&flat, 2, 3), &spec).is_err());
            let error =
                learned(&rows, &[&matrix(&e).unwrap()], &[0], 1).expect_err("five positions, four columns");
            assert!(error.to_string().contains("5 positions"), "{error}");
        });
    }
    Ok(())
}
