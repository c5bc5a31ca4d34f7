//! The fused kernel against its twin.

use candle_core::{Device, Result, Tensor};

use super::{Sinkhorn, SortNorm, Sorting, sinkhorn};
use crate::dropout::AttentionDropout;
use crate::group::{ParamGroup, ParamPart};
use crate::heads::{PackedLayout, Qkv};
use crate::testing::{assert_matches_composed, normal};

/// The parts of a network for `most` blocks.
fn parts(heads: usize, d: usize, hidden: usize, most: usize) -> Vec<ParamPart> {
    let shapes = match hidden {
        0 => vec![vec![heads, d, most], vec![heads, most]],
        _ => vec![vec![heads, d, hidden], vec![heads, hidden], vec![heads, hidden, most], vec![heads, most]],
    };
    let mut offset = 0;
    let place = |(index, shape): (usize, Vec<usize>)| {
        let part = ParamPart { name: format!("part{index}"), shape, offset };
        offset += part.len();
        part
    };
    shapes.into_iter().enumerate().map(place).collect()
}

#[test]
fn fused_and_twin_agree() -> Result<()> {
    for (b, n, heads, d, block, hidden) in [
        (1, 1usize, 1, 1, 1, 0),
        (2, 5, 1, 3, 8, 0),
        (2, 50, 2, 4, 8, 5),
        (1, 67, 3, 5, 3, 0),
        (1, 200, 2, 16, 64, 0),
        (2, 131, 1, 20, 16, 7),
    ] {
        let most = usize::div_ceil(n, block) + 2;
        let parts = parts(heads, d, hidden, most);
        let count = parts.iter().map(ParamPart::len).sum::<usize>();
        let inputs = [normal("rows", &[b, n, 3 * heads * d])?, (normal("flat", &[count])? * 0.3)?];
        let masks = [
            None,
            Some((0..b * n).map(|i| f32::from(u8::from((i * 5) % 7 < 4))).collect::<Vec<_>>()),
            Some((0..b * n).map(|i| f32::from(u8::from(i % n < n - n / 3 && i / n == 0))).collect()),
        ];
        for (index, mask) in masks.into_iter().enumerate() {
            let mask = mask.map(|mask| Tensor::from_vec(mask, (b, n), &Device::Cpu)).transpose()?;
            for activation in [SortNorm::Sinkhorn(0), SortNorm::Sinkhorn(5), SortNorm::Softmax] {
                for (concat, rate) in [(false, 0.0), (true, 0.0), (false, 0.3), (true, 0.3)] {
                    let label = format!(
                        "b={b} n={n} heads={heads} d={d} block={block} mask={index} {activation:?} concat={concat} rate={rate}"
                    );
                    if activation == SortNorm::Sinkhorn(0) && n > 8 {
                        continue; // weights that nothing normalises are out of all bounds
                    }
                    assert_matches_composed(&label, &inputs, 2e-5, |inputs| {
                        let group = ParamGroup { flat: inputs[1].clone(), parts: parts.clone() };
                        let sorting = Sorting::Net { group: &group, temperature: 0.75, activation };
                        let packed = PackedLayout { q: Some(1), k: Some(2), v: Some(0), count: 3 };
                        let qkv = Qkv::Packed { rows: inputs[0].clone(), heads, parts: packed };
                        let dropout = AttentionDropout::new(rate, 2)?;
                        sinkhorn(&qkv, mask.as_ref(), &Sinkhorn { block, sorting, concat, dropout })?.merged()
                    })?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn more_blocks_than_the_network_scores_are_refused() -> Result<()> {
    let (parts, rows) = (parts(1, 2, 0, 2), normal("rows", &[1, 9, 6])?);
    let group = ParamGroup { flat: normal("flat", &[6])?, parts };
    let sorting = Sorting::Net { group: &group, temperature: 1.0, activation: SortNorm::Softmax };
    let qkv = Qkv::Packed { rows, heads: 1, parts: PackedLayout::QKV };
    let error = sinkhorn(&qkv, None, &Sinkhorn { block: 4, sorting, concat: false, dropout: None })
        .err()
        .map(|e| e.to_string());
    assert!(error.is_some_and(|error| error.contains("raise max_blocks")));
    Ok(())
}
