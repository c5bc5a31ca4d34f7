//! The fused kernel against its twin.

use candle_core::{Device, Result, Tensor, Var};

use super::{InverseInit, Landmarks, nystrom};
use crate::heads::{PackedLayout, Qkv};
use crate::testing::{assert_matches_composed, evaluate, normal};
use crate::{KernelMode, tape};

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
            for start in [InverseInit::PerMatrix, InverseInit::Original] {
                let label = format!("b={b} n={n} heads={heads} d={d} m={count} mask={index} {start:?}");
                let spec = Landmarks { count, iterations, start };
                assert_matches_composed(&label, std::slice::from_ref(&input), 5e-5, |inputs| {
                    let parts = PackedLayout { q: Some(1), k: Some(2), v: Some(0), count: 3 };
                    let rows = Qkv::Packed { rows: inputs[0].clone(), heads, parts };
                    nystrom(&rows, mask.as_ref(), spec)?.merged()
                })?;
            }
        }
    }
    Ok(())
}

/// The rows of the tests below, with every third position hidden: its numbers are `hidden`.
fn rows_with(hidden: f32) -> Result<(Tensor, Tensor)> {
    let (b, n, row) = (2, 23, 3 * 8);
    let keep: Vec<f32> = (0..b * n).map(|i| f32::from(u8::from(i % 3 > 0))).collect();
    let mut data = normal("rows", &[b, n, row])?.flatten_all()?.to_vec1::<f32>()?;
    for (row, _) in data.chunks_exact_mut(row).zip(&keep).filter(|(_, keep)| **keep == 0.0) {
        row.fill(hidden);
    }
    let mask = Tensor::from_vec(keep, (b, n), &Device::Cpu)?;
    Ok((Tensor::from_vec(data, (b, n, row), &Device::Cpu)?, mask))
}

fn call(rows: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let spec = Landmarks { count: 4, iterations: 6, start: InverseInit::PerMatrix };
    nystrom(&Qkv::Packed { rows: rows.clone(), heads: 2, parts: PackedLayout::QKV }, mask, spec)?.merged()
}

#[test]
fn what_stands_at_hidden_positions_does_not_matter() -> Result<()> {
    let run = |hidden: f32| {
        let (rows, mask) = rows_with(hidden)?;
        evaluate(KernelMode::Fused, &[rows], |inputs| call(&inputs[0], Some(&mask)))
    };
    let clean = run(0.0)?;
    assert!(clean.iter().flatten().all(|x| x.is_finite()));
    assert_eq!(clean, run(f32::NAN)?);
    Ok(())
}

/// The tape adds the gradients of the rows up in place, candle's graph does not.
#[test]
fn gradients_on_the_tape_are_those_of_the_graph() -> Result<()> {
    let (rows, mask) = rows_with(0.5)?;
    for mask in [None, Some(&mask)] {
        let rows = Var::from_tensor(&rows)?;
        let loss = || (call(rows.as_tensor(), mask)?.sqr()?).sum_all();
        let (value, tape) = tape::record(loss)?;
        let grads = [tape.backward(&value)?, loss()?.backward()?];
        let [taped, graph] = grads.each_ref().map(|grads| grads.get(&rows).expect("a gradient"));
        let largest = graph.abs()?.max_all()?.to_scalar::<f32>()?;
        let error = (taped - graph)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(largest > 0.01 && error <= 1e-5 * largest, "{error} of {largest}");
    }
    Ok(())
}
