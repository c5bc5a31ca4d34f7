//! Sums that decay: the twin against the definition, the kernel against the twin, steps against the whole.

use super::*;
use crate::linear_attention::decode;
use crate::mode;
use crate::testing::{assert_fades_to_zero, check, randn};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Head,
    Token,
    Channel,
}

/// A call without its tensors.
#[derive(Clone, Debug)]
struct Sums {
    kind: Kind,
    causal: bool,
    /// Backward decays of their own.
    separate: bool,
    /// Samples, heads, groups, length, key channels, value channels.
    shape: [usize; 6],
    /// Mean size of the logarithms.
    strength: f64,
    mask: Option<Tensor>,
    logs: Vec<f64>,
    guard: Option<Guard>,
}

impl Sums {
    fn new(kind: Kind, causal: bool, shape: [usize; 6], strength: f64) -> Self {
        let logs = (0..shape[1]).map(|head| -strength / (head + 1) as f64).collect();
        Self { kind, causal, separate: false, shape, strength, mask: None, logs, guard: None }
    }

    fn separate(self) -> Self {
        Self { separate: true, ..self }
    }

    fn holes(self) -> Self {
        let [b, _, _, n, ..] = self.shape;
        let keep = (0..b * n).map(|at| f32::from((at % n) % 7 != 2 + at / n && at % n + 3 != n));
        let mask = Tensor::from_vec(keep.collect(), (b, n), &Device::Cpu).unwrap();
        Self { mask: Some(mask), ..self }
    }

    fn name(&self) -> String {
        format!("{self:?}")
    }

    /// q, k, v and the decays.
    fn inputs(&self) -> Vec<Tensor> {
        let [b, h, g, n, d, e] = self.shape;
        let mut inputs =
            vec![randn("q", &[b, g, n, d]), randn("k", &[b, g, n, d]), randn("v", &[b, h, n, e])];
        let shape = match self.kind {
            Kind::Head => return inputs,
            Kind::Token => vec![b, h, n],
            Kind::Channel => vec![b, h, n, d],
        };
        for name in &["forward", "backward"][..=usize::from(self.separate)] {
            inputs.push(randn(name, &shape).abs().unwrap().affine(-self.strength, -1e-3).unwrap());
        }
        inputs
    }

    fn call<'a>(&'a self, inputs: &'a [Tensor]) -> LinearAttention<'a> {
        let decay = match self.kind {
            Kind::Head => Decay::PerHead(&self.logs),
            Kind::Token => Decay::PerToken { log: &inputs[3], backward: inputs.get(4) },
            Kind::Channel => Decay::PerChannel { log: &inputs[3], backward: inputs.get(4) },
        };
        let features = Features::Elementwise { activation: FeatureActivation::Identity, reweight: None };
        LinearAttention { features, guard: self.guard, mask: self.mask.as_ref(), causal: self.causal, decay }
    }

    fn run(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let qkv = Qkv::separate(inputs[0].clone(), inputs[1].clone(), inputs[2].clone());
        let heads = linear_attention(&qkv, &self.call(inputs))?;
        let [_, h, groups, ..] = self.shape;
        let kernel = self.guard.is_none() || self.causal && self.kind != Kind::Channel && groups == h;
        let fused = mode() == KernelMode::Fused && inputs[0].dtype() == DType::F32 && kernel;
        assert_eq!(
            matches!(heads, Heads::Merged { .. }),
            fused,
            "{}: the other implementation ran",
            self.name()
        );
        heads.split()
    }

    /// The result by the definition, pair by pair.
    fn naive(&self, inputs: &[Tensor]) -> Vec<f64> {
        let [b, h, g, n, d, e] = self.shape;
        let flat =
            |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let all: Vec<Vec<f64>> = inputs.iter().map(flat).collect();
        let hidden = |i: usize, j: usize| {
            self.mask.as_ref().is_some_and(|mask| mask.to_vec2::<f32>().unwrap()[i][j] == 0.0)
        };
        let log = |index: usize, i: usize, j: usize, t: usize, c: usize| match self.kind {
            Kind::Head => self.logs[j],
            _ if hidden(i, t) => 0.0,
            Kind::Token => all[index][(i * h + j) * n + t],
            Kind::Channel => all[index][((i * h + j) * n + t) * d + c],
        };
        let later = if self.separate { 4 } else { 3 };
        let mut out = vec![0.0; b * h * n * e];
        for (i, j) in (0..b).flat_map(|i| (0..h).map(move |j| (i, j))) {
            let row = |x: &[f64], t: usize, c: usize| x[((i * g + j * g / h) * n + t) * d + c];
            for (t, s) in (0..n).flat_map(|t| (0..n).map(move |s| (t, s))) {
                if hidden(i, s) || self.causal && s > t {
                    continue;
                }
                let mut pair = 0.0;
                for c in 0..d {
                    let sum: f64 = if s <= t {
                        (s + 1..=t).map(|r| log(3, i, j, r, c)).sum()
                    } else {
                        (t..s).map(|r| log(later, i, j, r, c)).sum()
                    };
                    pair += row(&all[0], t, c) * row(&all[1], s, c) * sum.exp();
                }
                for c in 0..e {
                    out[((i * h + j) * n + t) * e + c] += pair * all[2][((i * h + j) * n + s) * e + c];
                }
            }
        }
        out
    }

    /// Twin against definition, kernel against twin.
    fn prove(&self) {
        let inputs = self.inputs();
        let doubles: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
        let twin = with_mode(KernelMode::Composed, || self.run(&doubles)).unwrap();
        let twin: Vec<f64> = twin.flatten_all().unwrap().to_vec1().unwrap();
        for (at, (twin, want)) in twin.iter().zip(self.naive(&inputs)).enumerate() {
            assert!(
                (twin - want).abs() < 1e-9 * (1.0 + want.abs()),
                "{}: {twin}, not {want} at {at}",
                self.name()
            );
        }
        check(&self.name(), &inputs, 1e-5, |inputs| self.run(inputs));
    }
}

/// Samples, heads, groups, length, key channels, value channels: single and odd lengths, and several chunks.
const SHAPES: [[usize; 6]; 6] = [
    [2, 2, 2, 1, 4, 3],
    [1, 1, 1, 17, 1, 1],
    [1, 2, 1, 64, 5, 7],
    [2, 4, 2, 65, 8, 6],
    [1, 1, 1, 131, 16, 16],
    [1, 2, 2, 199, 7, 3],
];

fn prove_all(kind: Kind) {
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for (causal, strength) in [(false, 0.02), (true, 0.3), (false, 4.0), (true, 30.0)] {
            if index >= 4 && causal == (strength < 1.0) {
                continue; // long ones: weak decays in both directions, strong ones causal
            }
            let sums = Sums::new(kind, causal, shape, strength);
            let sums = if index % 2 == usize::from(causal) { sums } else { sums.holes() };
            sums.prove();
        }
    }
}

#[test]
fn a_decay_per_head_equals_the_definition() {
    prove_all(Kind::Head);
}

#[test]
fn a_decay_per_token_equals_the_definition() {
    prove_all(Kind::Token);
    for shape in [SHAPES[3], SHAPES[5]] {
        Sums::new(Kind::Token, false, shape, 0.5).separate().holes().prove();
    }
}

#[test]
fn a_decay_per_channel_equals_the_definition() {
    prove_all(Kind::Channel);
    for shape in [SHAPES[3], SHAPES[5]] {
        Sums::new(Kind::Channel, false, shape, 0.5).separate().holes().prove();
    }
}

/// All kinds, causal or not.
fn kinds() -> impl Iterator<Item = (Kind, bool)> {
    [Kind::Head, Kind::Token, Kind::Channel].into_iter().flat_map(|kind| [(kind, false), (kind, true)])
}

#[test]
fn a_gradient_fades_to_zero() {
    for kind in [Kind::Head, Kind::Token, Kind::Channel] {
        let sums = Sums::new(kind, false, [1, 2, 2, 1501, 6, 5], 0.2);
        // keys, then values
        for of in [1, 2] {
            assert_fades_to_zero(&sums.name(), &sums.inputs(), of, |x| sums.run(x));
        }
    }
}

#[test]
fn the_twin_divides_what_decays() {
    for (kind, causal) in kinds() {
        let sums = Sums {
            guard: Some(Guard::AbsClampMin(0.5)),
            ..Sums::new(kind, causal, [1, 2, 2, 20, 3, 4], 0.3)
        };
        let inputs: Vec<Tensor> = sums.inputs().iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
        let out = sums.run(&inputs).unwrap();
        let plain = Sums { guard: None, ..sums.clone() };
        let mut ones = inputs.clone();
        ones[2] = inputs[2].narrow(3, 0, 1).unwrap().ones_like().unwrap();
        let (num, den) = (plain.run(&inputs).unwrap(), plain.run(&ones).unwrap());
        let want = num.broadcast_div(&den.abs().unwrap().maximum(0.5).unwrap()).unwrap();
        let error = (out - want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
        assert!(error < 1e-12, "{kind:?} {causal}: {error}");
    }
}

#[test]
fn causal_decays_take_a_normaliser() {
    for kind in [Kind::Head, Kind::Token] {
        for (n, strength) in [(1, 0.3), (67, 0.01), (331, 2.0)] {
            let sums = Sums::new(kind, true, [2, 2, 2, n, 6, 6], strength);
            let sums = Sums { guard: Some(Guard::AbsClampMin(2.0)), ..sums };
            for sums in [sums.clone(), sums.holes()] {
                check(&sums.name(), &sums.inputs(), 2e-5, |inputs| sums.run(inputs));
            }
        }
    }
}

#[test]
fn steps_equal_the_whole() {
    for kind in [Kind::Head, Kind::Token, Kind::Channel] {
        let sums = Sums::new(kind, true, [2, 4, 2, 70, 6, 5], 0.3);
        let inputs = sums.inputs();
        let whole = sums.run(&inputs).unwrap();
        let mut carried = None;
        for t in 0..70 {
            let token: Vec<Tensor> = inputs.iter().map(|x| x.narrow(2, t, 1).unwrap()).collect();
            let qkv = Qkv::separate(token[0].clone(), token[1].clone(), token[2].clone());
            let out = decode::step(&qkv, &sums.call(&token), &mut carried, t).unwrap().split().unwrap();
            let error = (out - whole.narrow(2, t, 1).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
            let error = error.to_scalar::<f32>().unwrap();
            assert!(error < 2e-5, "{kind:?} at {t}: {error}");
        }
    }
}

/// Value and gradients in f32, for a gradient of the result that is 0 at hidden positions.
fn outcome(sums: &Sums, inputs: &[Tensor]) -> Vec<Tensor> {
    let vars: Vec<Var> = inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let mut out = sums.run(&tensors).unwrap();
    if let Some(mask) = &sums.mask {
        let [b, _, _, n, ..] = sums.shape;
        out = out.broadcast_mul(&mask.reshape((b, 1, n, 1)).unwrap()).unwrap();
    }
    let cotangent = randn("cotangent", out.dims());
    let grads = (&out * cotangent).unwrap().sum_all().unwrap().backward().unwrap();
    std::iter::once(out).chain(vars.iter().map(|var| grads.get(var).unwrap().clone())).collect()
}

fn numbers(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn hidden_positions_are_inert() {
    for (kind, causal) in kinds() {
        let sums = Sums::new(kind, causal, [2, 2, 2, 150, 6, 5], 0.2).holes();
        let inputs = sums.inputs();
        let mask = sums.mask.as_ref().unwrap().reshape((2, 1, 150, 1)).unwrap();
        let garbage = |x: &Tensor| {
            let mask = if x.rank() == 3 { mask.squeeze(3).unwrap() } else { mask.clone() };
            let other = (1.0 - &mask).unwrap().affine(-1e4, 0.0).unwrap();
            x.broadcast_mul(&mask).unwrap().broadcast_add(&other).unwrap()
        };
        let others: Vec<Tensor> = inputs.iter().map(garbage).collect();
        let (a, b) = (outcome(&sums, &inputs), outcome(&sums, &others));
        for (index, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!(numbers(a) == numbers(b), "{kind:?} {causal}: tensor {index}");
            let mask = if b.rank() == 3 { mask.squeeze(3).unwrap() } else { mask.clone() };
            let hidden = b.broadcast_mul(&(1.0 - mask).unwrap()).unwrap();
            assert!(numbers(&hidden).iter().all(|x| *x == 0.0), "{kind:?} {causal}: tensor {index} is not 0");
        }
    }
}

#[test]
fn causal_sums_ignore_the_future_exactly() {
    for (kind, _) in kinds().filter(|(_, causal)| *causal) {
        let sums = Sums::new(kind, true, [1, 2, 2, 150, 6, 5], 0.2);
        let inputs = sums.inputs();
        for from in [1, 40, 64, 149] {
            let other = |x: &Tensor| {
                let (head, tail) = (x.narrow(2, 0, from).unwrap(), x.narrow(2, from, 150 - from).unwrap());
                Tensor::cat(&[head, (tail * 3.0).unwrap()], 2).unwrap()
            };
            let others: Vec<Tensor> = inputs.iter().map(other).collect();
            let before = |inputs: &[Tensor]| numbers(&sums.run(inputs).unwrap().narrow(2, 0, from).unwrap());
            assert!(before(&inputs) == before(&others), "{kind:?} from {from}");
        }
    }
}

#[test]
fn packed_rows_give_the_same() {
    for (kind, causal) in kinds() {
        let sums = Sums::new(kind, causal, [2, 3, 3, 100, 8, 8], 0.2).holes();
        let inputs = sums.inputs();
        let separate = outcome(&sums, &inputs);
        let parts: Vec<Tensor> = inputs[..3].iter().map(|x| merge(x).unwrap()).collect();
        let rows = Var::from_tensor(&Tensor::cat(&parts, 2).unwrap()).unwrap();
        let qkv = Qkv::Packed { rows: rows.as_tensor().clone(), heads: 3, parts: PackedLayout::QKV };
        let out = linear_attention(&qkv, &sums.call(&inputs)).unwrap().split().unwrap();
        let mask = sums.mask.as_ref().unwrap().reshape((2, 1, 100, 1)).unwrap();
        let out = out.broadcast_mul(&mask).unwrap();
        let cotangent = randn("cotangent", out.dims());
        let grads = (&out * cotangent).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(numbers(&out) == numbers(&separate[0]), "{kind:?} {causal}: result");
        let grad = grads.get(&rows).unwrap();
        for (part, want) in separate[1..4].iter().enumerate() {
            let part = split(&grad.narrow(2, part * 24, 24).unwrap().contiguous().unwrap(), 3).unwrap();
            assert!(numbers(&part) == numbers(want), "{kind:?} {causal}: gradient");
        }
    }
}

#[test]
fn decays_that_do_not_fit_are_refused() {
    let sums = Sums::new(Kind::Token, true, [1, 2, 2, 5, 3, 3], 0.2);
    let inputs = sums.separate().inputs();
    let qkv = Qkv::separate(inputs[0].clone(), inputs[1].clone(), inputs[2].clone());
    let features = Features::Elementwise { activation: FeatureActivation::Identity, reweight: None };
    let refused = |decay: Decay, causal: bool| {
        let call = LinearAttention { features: features.clone(), guard: None, mask: None, causal, decay };
        linear_attention(&qkv, &call).unwrap_err().to_string()
    };
    assert!(refused(Decay::PerHead(&[-0.1]), true).contains("1 decays were given for 2 heads"));
    assert!(refused(Decay::PerChannel { log: &inputs[3], backward: None }, true).contains("[1, 2, 5, 3]"));
    let both = Decay::PerToken { log: &inputs[3], backward: Some(&inputs[4]) };
    assert!(refused(both, true).contains("causal"));
    assert!(refused(Decay::Gate(&inputs[3]), false).contains("causal only"));
}
