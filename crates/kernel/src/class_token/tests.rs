use candle_core::{Device, Result, Tensor};

use super::class_token;
use crate::heads::{Heads, PackedLayout, Qkv};
use crate::testing::{assert_matches_composed, normal};

fn masks(b: usize, n: usize) -> Result<[Option<Tensor>; 3]> {
    let holes: Vec<f32> = (0..b * n).map(|i| if i % 3 == 1 || i % 7 > 4 { 0.0 } else { 1.0 }).collect();
    let nothing = Tensor::zeros((b, n), candle_core::DType::F32, &Device::Cpu)?;
    Ok([None, Some(Tensor::from_vec(holes, (b, n), &Device::Cpu)?), Some(nothing)])
}

#[test]
fn fused_equals_twin() -> Result<()> {
    for (b, n, heads, d) in [(1, 1, 1, 1), (2, 7, 2, 5), (3, 130, 2, 16), (1, 65, 3, 33)] {
        let e = heads * d;
        for mask in masks(b, n)? {
            for parts in [PackedLayout::QKV, PackedLayout { q: Some(2), k: Some(3), v: Some(0), count: 4 }] {
                let inputs = [normal("out", &[b, n, e])?, normal("cls", &[b, 1, parts.count * e])?];
                assert_matches_composed(
                    &format!("{b} {n} {heads} {d} {}", parts.count),
                    &inputs,
                    2e-5,
                    |x| {
                        let out = Heads::Merged { rows: x[0].clone(), heads };
                        let cls = Qkv::Packed { rows: x[1].clone(), heads, parts };
                        class_token(&out, &cls, mask.as_ref(), 0.3)?.merged()
                    },
                )?;
            }
        }
    }
    Ok(())
}

#[test]
fn separate_projections_and_split_outputs_are_taken() -> Result<()> {
    let (b, n, heads, d) = (2, 9, 2, 4);
    let own = |name: &str| normal(name, &[b, heads, 1, d]);
    let inputs = [normal("out", &[b, heads, n, d])?, own("q")?, own("k")?, own("v")?];
    assert_matches_composed("separate", &inputs, 1e-5, |x| {
        let cls = Qkv::separate(x[1].clone(), x[2].clone(), x[3].clone());
        class_token(&Heads::Split(x[0].clone()), &cls, None, 0.5)?.split()?.contiguous()
    })
}

#[test]
fn several_tokens_see_each_other() -> Result<()> {
    let inputs = [normal("out", &[2, 9, 8])?, normal("cls", &[2, 3, 24])?];
    assert_matches_composed("several", &inputs, 1e-5, |x| {
        let cls = Qkv::Packed { rows: x[1].clone(), heads: 2, parts: PackedLayout::QKV };
        class_token(&Heads::Merged { rows: x[0].clone(), heads: 2 }, &cls, None, 0.5)?.merged()
    })
}

#[test]
fn misfits_are_errors() -> Result<()> {
    let out = Heads::Merged { rows: normal("out", &[2, 5, 8])?, heads: 2 };
    for dims in [[1, 1, 24], [2, 1, 12]] {
        let cls = Qkv::Packed { rows: normal("cls", &dims)?, heads: 2, parts: PackedLayout::QKV };
        assert!(class_token(&out, &cls, None, 1.0).is_err());
    }
    Ok(())
}
