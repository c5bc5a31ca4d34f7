//! The fused kernel against its twin.

use candle_core::{Device, Result, Tensor};

use super::{Landmarks, Start, nystrom};
use crate::kernel::heads::{Parts, Qkv};
use crate::kernel::testing::{assert_twin, normal};

#[test]
fn fused_and_twin_agree() -> Result<()> {
    for (b, n, heads, d, count, iterations) in [
        (1, 2, 1, 1, 1, 0),
        (2, 5, 1, 3, 2, 1),
        (2, 17, 3, 5, 4, 6),
        (1, 300, 2, 16, 7, 6),
        (3, 1025, 1, 8, 16, 6),
        (1, 2100, 2, 20, 9, 3),
    ] {
        let input = normal("rows", &[b, n, 3 * heads * d])?;
        let masks = [
            None,
            Some((0..b * n).map(|i| f32::from(u8::from((i * 5) % 7 < 4))).collect::<Vec<_>>()),
            Some((0..b * n).map(|i| f32::from(u8::from(i % n < n - n / 3 && i / n == 0))).collect()),
        ];
        for (index, mask) in masks.into_iter().enumerate() {
            let mask = mask.map(|mask| Tensor::from_vec(mask, (b, n), &Device::Cpu)).transpose()?;
            for start in [Start::PerMatrix, Start::Original] {
                let label = format!("b={b} n={n} heads={heads} d={d} m={count} mask={index} {start:?}");
                let spec = Landmarks { count, iterations, start };
                assert_twin(&label, std::slice::from_ref(&input), 5e-5, |inputs| {
                    let parts = Parts { q: Some(1), k: Some(2), v: Some(0), count: 3 };
                    let rows = Qkv::Packed { rows: inputs[0].clone(), heads, parts };
                    nystrom(&rows, mask.as_ref(), spec)?.merged()
                })?;
            }
        }
    }
    Ok(())
}
