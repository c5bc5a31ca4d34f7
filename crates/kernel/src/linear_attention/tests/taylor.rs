//! Second-order Taylor features.

use super::*;
use crate::linear_attention::decode;
use crate::testing::{check, randn};

fn call(causal: bool, guard: Option<Guard>, mask: Option<&Tensor>) -> LinearAttention<'_> {
    LinearAttention { features: Features::Taylor, guard, mask, causal, decay: Decay::None }
}

/// sum_j a_ij v_j / (sum_j a_ij + eps), a = 1 + s + s^2 / 2, in f64.
fn definition(inputs: &[Tensor], call: &LinearAttention) -> Result<Tensor> {
    let double = |x: &Tensor| x.to_dtype(DType::F64);
    let (q, k, v) = (double(&inputs[0])?, double(&inputs[1])?, double(&inputs[2])?);
    let (b, _, n, d) = q.dims4()?;
    let s = (q.matmul(&k.t()?)? / (d as f64).sqrt())?;
    let mut a = ((&s + (s.sqr()? * 0.5)?)? + 1.0)?;
    if call.causal {
        a = a.broadcast_mul(&Tensor::tril2(n, DType::F64, &Device::Cpu)?)?;
    }
    if let Some(mask) = call.mask {
        a = a.broadcast_mul(&double(mask)?.reshape((b, 1, 1, ()))?)?;
    }
    match call.guard {
        Some(Guard::Add(eps)) => a.matmul(&v)?.broadcast_div(&(a.sum_keepdim(3)? + eps)?),
        _ => a.matmul(&v),
    }
}

#[test]
fn taylor_features_equal_the_definition() {
    for (index, [b, h, n, t, d, e]) in
        [[1, 1, 1, 1, 1, 2], [2, 2, 67, 67, 5, 3], [1, 2, 331, 331, 16, 8], [1, 1, 9, 130, 4, 6]]
            .into_iter()
            .enumerate()
    {
        let inputs = [randn("q", &[b, h, n, d]), randn("k", &[b, h, t, d]), randn("v", &[b, h, t, e])];
        let keep = (0..b * t).map(|at| f32::from(at % 6 != 4)).collect();
        let mask = Tensor::from_vec(keep, (b, t), &Device::Cpu).unwrap();
        for (causal, guard) in [(false, None), (true, None), (false, Some(1e-6)), (true, Some(1e-3))] {
            let call = call(causal, guard.map(Guard::Add), (index % 2 == 1).then_some(&mask));
            if causal && n != t {
                continue;
            }
            let name = format!("taylor {n} {t} {d} {causal} {guard:?}");
            let run = |inputs: &[Tensor]| {
                let qkv = Qkv::separate(inputs[0].clone(), inputs[1].clone(), inputs[2].clone());
                let heads = linear_attention(&qkv, &call)?;
                let fused = crate::mode() == KernelMode::Fused && inputs[0].dtype() == DType::F32;
                assert_eq!(
                    matches!(heads, Heads::Merged { .. }),
                    fused,
                    "{name}: the other implementation ran"
                );
                heads.split()
            };
            let doubles: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
            let twin = with_mode(KernelMode::Composed, || run(&doubles)).unwrap();
            let error =
                (twin - definition(&inputs, &call).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            assert!(error.to_scalar::<f64>().unwrap() < 1e-10, "{name}: twin differs by {error}");
            check(&name, &inputs, 2e-5, run);
        }
    }
}

#[test]
fn taylor_steps_equal_the_whole() {
    let inputs = [randn("q", &[1, 2, 20, 4]), randn("k", &[1, 2, 20, 4]), randn("v", &[1, 2, 20, 3])];
    for guard in [None, Some(Guard::Add(1e-6))] {
        let call = call(true, guard, None);
        let qkv = |x: &[Tensor]| Qkv::separate(x[0].clone(), x[1].clone(), x[2].clone());
        let whole = linear_attention(&qkv(&inputs), &call).unwrap().split().unwrap();
        let mut carried = None;
        for t in 0..20 {
            let token: Vec<Tensor> = inputs.iter().map(|x| x.narrow(2, t, 1).unwrap()).collect();
            let out = decode::step(&qkv(&token), &call, &mut carried, t).unwrap().split().unwrap();
            let error = (out - whole.narrow(2, t, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            assert!(error.to_scalar::<f32>().unwrap() < 2e-5, "{guard:?} at {t}: {error}");
        }
    }
}
