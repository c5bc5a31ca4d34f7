//! One token after another: the kernel against plain operations, at every position.

use super::*;
use crate::linear_attention::decode;
use crate::testing::{difference, randn};

const TOKENS: usize = 9;

/// Every kind of features.
fn all_features(d: usize) -> Vec<Features> {
    let elementwise = |activation, reweight| Features::Elementwise { activation, reweight };
    let favor = Favor {
        omega: randn("omega", &[7, d]),
        scale: 0.8,
        feature_eps: 0.0,
        den_eps: 0.0,
        through: false,
        masked_as_zero: false,
    };
    let random = |kernel| {
        let weight = randn("weight", &[4, 5, d]);
        Features::Random { weight, kernel, norm_eps: 1e-3, scale: 0.5 }
    };
    vec![
        elementwise(FeatureActivation::Relu, Some(TOKENS + 2)),
        elementwise(FeatureActivation::Elu1, None),
        elementwise(FeatureActivation::Elu1, Some(TOKENS)),
        elementwise(FeatureActivation::LeakyRelu(0.2), None),
        elementwise(FeatureActivation::Identity, None),
        Features::Favor(favor),
        Features::Taylor,
        random(RandomKernel::Gaussian),
        random(RandomKernel::ArcCos),
    ]
}

/// Results of all tokens, one after another, and the sums behind them.
fn run(inputs: &[Tensor; 3], gate: &Tensor, call: &LinearAttention) -> Result<Vec<f64>> {
    let (mut carried, mut all) = (None, Vec::new());
    for t in 0..TOKENS {
        let [q, k, v] = inputs.each_ref().map(|x| x.narrow(2, t, 1).unwrap());
        let gate = gate.narrow(2, t, 1)?;
        let decay = match call.decay {
            Decay::Gate(_) => Decay::Gate(&gate),
            decay => decay,
        };
        let call = LinearAttention { decay, ..call.clone() };
        let heads = decode::step(&Qkv::separate(q, k, v), &call, &mut carried, t)?;
        let merged = matches!(heads, Heads::Merged { .. });
        assert_eq!(merged, crate::mode() == KernelMode::Fused, "the other implementation ran");
        all.push(heads.split()?.contiguous()?);
    }
    all.extend(carried.iter().flat_map(|state| state.tensors().cloned()));
    let flat = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    Ok(all.iter().map(flat).collect::<Result<Vec<_>>>()?.concat())
}

#[test]
fn a_step_of_the_kernel_is_that_of_the_definition() {
    for (b, groups, d, e) in [(1, 4, 1, 1), (2, 4, 5, 3), (3, 2, 16, 17), (1, 1, 19, 40)] {
        let inputs = [("q", groups, d), ("k", groups, d), ("v", 4, e)]
            .map(|(name, heads, width)| randn(name, &[b, heads, TOKENS, width]));
        let gate = randn("gate", &[b, 4, TOKENS]);
        for features in all_features(d) {
            for guard in [None, Some(Guard::ClampMin(0.5)), Some(Guard::SignedClamp(0.5))] {
                for decay in [Decay::None, Decay::PerHead(&[-0.3, -0.1, -2.0, 0.0]), Decay::Gate(&gate)] {
                    let features = features.clone();
                    let call = LinearAttention { features, guard, mask: None, causal: true, decay };
                    let run = || run(&inputs, &gate, &call).unwrap();
                    let apart = difference(&run(), &with_mode(KernelMode::Composed, run));
                    assert!(apart < 2e-5, "{b} {groups} {d} {e} {call:?}: {apart}");
                }
            }
        }
    }
}

#[test]
fn a_position_behind_the_last_is_refused() {
    let one = randn("x", &[1, 1, 1, 2]);
    let features = Features::Elementwise { activation: FeatureActivation::Relu, reweight: Some(3) };
    let call = LinearAttention { features, guard: None, mask: None, causal: true, decay: Decay::None };
    for mode in [KernelMode::Fused, KernelMode::Composed] {
        let qkv = Qkv::separate(one.clone(), one.clone(), one.clone());
        let error = with_mode(mode, || decode::step(&qkv, &call, &mut None, 3)).unwrap_err().to_string();
        assert!(error.contains("position 3") && error.contains("m = 3"), "{error}");
    }
}
