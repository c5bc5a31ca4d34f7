use candle_core::{Device, Result, Tensor};

use super::{hide, norm_parts};
use crate::group::{ParamGroup, ParamPart};
use crate::testing::{assert_matches_composed, normal};

fn group(flat: &Tensor, e: usize) -> ParamGroup {
    let part = |name: &str, offset| ParamPart { name: name.into(), shape: vec![e], offset };
    ParamGroup { flat: flat.clone(), parts: vec![part("weight", 0), part("bias", e)] }
}

fn holes(b: usize, n: usize) -> Result<Tensor> {
    let mask: Vec<f32> = (0..b * n).map(|i| if i % 5 == 2 || i % 7 > 4 { 0.0 } else { 1.0 }).collect();
    Tensor::from_vec(mask, (b, n), &Device::Cpu)
}

#[test]
fn fused_equals_twin() -> Result<()> {
    for (b, n, e) in [(1, 1, 1), (2, 7, 5), (1, 300, 16), (3, 129, 33), (2, 64, 64)] {
        for (parts, count) in [(vec![1, 2], 3), (vec![0, 1], 2), (vec![], 1), (vec![2], 4)] {
            for mask in [None, Some(holes(b, n)?)] {
                let label = format!("{b} {n} {e} {parts:?} {count} {}", mask.is_some());
                let flat = (normal("flat", &[2 * e])? + 1.0)?;
                let inputs = [normal("rows", &[b, n, count * e])?, flat];
                assert_matches_composed(&label, &inputs, 2e-5, |x| {
                    norm_parts(&x[0], Some(&group(&x[1], e)), &parts, count, mask.as_ref())
                })?;
                assert_matches_composed(&label, &inputs[..1], 0.0, |x| hide(&x[0], mask.as_ref()))?;
            }
        }
    }
    Ok(())
}

#[test]
fn strided_rows_are_taken() -> Result<()> {
    let inputs = [normal("rows", &[12, 2, 9])?, normal("flat", &[6])?];
    assert_matches_composed("transposed", &inputs, 1e-5, |x| {
        norm_parts(&x[0].transpose(0, 1)?, Some(&group(&x[1], 3)), &[1, 2], 3, None)
    })
}

#[test]
fn misfits_are_errors() -> Result<()> {
    let rows = normal("rows", &[2, 3, 12])?;
    let flat = normal("flat", &[8])?;
    assert!(norm_parts(&rows, Some(&group(&flat, 4)), &[3], 3, None).is_err());
    assert!(norm_parts(&rows, Some(&group(&flat, 3)), &[1], 3, None).is_err());
    assert!(norm_parts(&rows, None, &[1], 3, Some(&holes(2, 4)?)).is_err());
    Ok(())
}
