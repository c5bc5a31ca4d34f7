//! The fused kernel and the twin against the definition, pair by pair.

mod decay;
mod naive;
mod properties;
mod taylor;
mod token;

use candle_core::{DType, Device, Result, Tensor, Var};
use naive::{Head, Phi};

use super::*;
use crate::device::rng::RngStream;
use crate::heads::{PackedLayout, merge, split};
use crate::{KernelMode, with_mode};

/// One call with its inputs.
#[derive(Clone, Debug)]
struct Case {
    name: String,
    shape: [usize; 6], // b, h, n, t, d, e
    phi: Phi,
    guard: Guard,
    causal: bool,
    /// q, k, v, then W where learned, then the gate where gated; f32 numbers.
    inputs: Vec<Tensor>,
    mask: Option<Tensor>,
    gated: bool,
}

/// Gradients of all inputs and the result [b, h, n, e].
struct Outcome {
    out: Tensor,
    grads: Vec<Tensor>,
}

impl Case {
    fn new(name: &str, shape: [usize; 6], phi: &str, causal: bool) -> Self {
        let mut stream = RngStream::new(1, name);
        let [b, h, n, t, d, e] = shape;
        let mut draw = |shape: &[usize]| stream.normal_tensor(shape, 0.0, 1.0, &Device::Cpu).unwrap();
        let mut inputs = vec![draw(&[b, h, n, d]), draw(&[b, h, t, d]), draw(&[b, h, t, e])];
        let (m, p) = (24, 10);
        let elementwise = |activation| Phi::Elementwise(activation, None);
        let eps = if causal { 0.0 } else { 1e-4 };
        let favor = Favor {
            omega: draw(&[m, d]),
            scale: (d as f64).powf(-0.25),
            feature_eps: eps,
            den_eps: 0.0,
            through: false,
            masked_as_zero: false,
        };
        let omega: Vec<Vec<f64>> = favor.omega.to_dtype(DType::F64).unwrap().to_vec2().unwrap();
        let (phi, guard) = match phi {
            "cosformer" => (
                Phi::Elementwise(FeatureActivation::Relu, Some(n.max(t) + 3)),
                Guard::ClampMin(if n < 3 { 0.5 } else { 1e-6 }),
            ),
            "identity" => (elementwise(FeatureActivation::Identity), Guard::SignedClamp(3.0)),
            "leaky" => (elementwise(FeatureActivation::LeakyRelu(0.01)), Guard::SignedClamp(0.5)),
            "linear" => (elementwise(FeatureActivation::Elu1), Guard::Add(1e-2)),
            "performer" => (Phi::Favor(omega, favor), Guard::NonZero),
            "performer-through" => (Phi::Favor(omega, Favor { through: true, ..favor }), Guard::NonZero),
            "performer-zero" => {
                let favor = Favor { masked_as_zero: true, den_eps: 1e-2, through: true, ..favor };
                (Phi::Favor(omega, favor), Guard::NonZero)
            }
            "performer-stable" => {
                (Phi::Favor(omega, Favor { feature_eps: 0.0, masked_as_zero: true, ..favor }), Guard::NonZero)
            }
            "performer-leak" => {
                let favor = Favor { feature_eps: 1e-3, den_eps: 1e-2, ..favor };
                (Phi::Favor(omega, favor), Guard::NonZero)
            }
            random => {
                let weight = draw(&[h, p, d]);
                let plain = weight.to_dtype(DType::F64).unwrap().to_vec3().unwrap();
                inputs.push(weight);
                let kernel =
                    if random.contains("arccos") { RandomKernel::ArcCos } else { RandomKernel::Gaussian };
                let guard = if causal { Guard::ClampMin(0.2) } else { Guard::AbsClampMin(0.2) };
                (Phi::Random(plain, kernel, 1e-3, 0.3), guard)
            }
        };
        Self { name: name.into(), shape, phi, guard, causal, inputs, mask: None, gated: false }
    }

    /// Hides the keys that `hidden` names (sample, key).
    fn hide(mut self, hidden: impl Fn(usize, usize) -> bool) -> Self {
        let [b, _, _, t, ..] = self.shape;
        let keep = (0..b * t).map(|at| f32::from(!hidden(at / t, at % t))).collect();
        self.mask = Some(Tensor::from_vec(keep, (b, t), &Device::Cpu).unwrap());
        self
    }

    /// Adds gates around `mean`.
    fn gate(mut self, mean: f64) -> Self {
        let [b, h, n, ..] = self.shape;
        let gate = RngStream::new(2, &self.name).normal_tensor((b, h, n), mean, 2.0, &Device::Cpu).unwrap();
        self.inputs.push(gate);
        self.gated = true;
        self
    }

    fn keep(&self) -> Vec<Vec<bool>> {
        let [b, _, _, t, ..] = self.shape;
        match &self.mask {
            Some(mask) => {
                let rows = mask.to_vec2::<f32>().unwrap();
                rows.iter().map(|row| row.iter().map(|&keep| keep != 0.0).collect()).collect()
            }
            None => vec![vec![true; t]; b],
        }
    }

    /// Results and gradients by `run` at the precision of `dtype`.
    fn run(&self, dtype: DType, packed: bool) -> Result<Outcome> {
        let vars: Vec<Var> =
            self.inputs.iter().map(|x| Var::from_tensor(&x.to_dtype(dtype)?)).collect::<Result<_>>()?;
        let [_, h, ..] = self.shape;
        let rows = if packed {
            let parts = self.inputs[..3].iter().map(merge).collect::<Result<Vec<_>>>()?;
            Some(Var::from_tensor(&Tensor::cat(&parts, 2)?)?)
        } else {
            None
        };
        let input = |index: usize| vars[index].as_tensor().clone();
        let qkv = match &rows {
            Some(rows) => Qkv::Packed { rows: rows.as_tensor().clone(), heads: h, parts: PackedLayout::QKV },
            None => Qkv::separate(input(0), input(1), input(2)),
        };
        let features = match &self.phi {
            Phi::Elementwise(activation, reweight) => {
                Features::Elementwise { activation: *activation, reweight: *reweight }
            }
            Phi::Favor(_, favor) => Features::Favor(favor.clone()),
            Phi::Random(_, kernel, norm_eps, scale) => {
                Features::Random { weight: input(3), kernel: *kernel, norm_eps: *norm_eps, scale: *scale }
            }
        };
        let gate = self.gated.then(|| input(self.inputs.len() - 1));
        let call = LinearAttention {
            features,
            guard: Some(self.guard),
            mask: self.mask.as_ref(),
            causal: self.causal,
            decay: gate.as_ref().map_or(Decay::None, Decay::Gate),
        };
        let out = linear_attention(&qkv, &call)?.split()?.contiguous()?;
        let grads = (&out * self.cotangent()?.to_dtype(dtype)?)?.sum_all()?.backward()?;
        let grad = |var: &Var| grads.get(var).cloned().map_or_else(|| var.zeros_like(), Ok);
        let mut all = vars.iter().map(grad).collect::<Result<Vec<_>>>()?;
        if let Some(rows) = &rows {
            let width = rows.dim(2)? / 3;
            for (index, all) in all.iter_mut().take(3).enumerate() {
                *all = split(&grad(rows)?.narrow(2, index * width, width)?.contiguous()?, h)?;
            }
        }
        Ok(Outcome { out, grads: all })
    }

    /// The gradient of the result: zero at hidden queries where queries are keys.
    fn cotangent(&self) -> Result<Tensor> {
        let [b, h, n, t, _, e] = self.shape;
        let dout = RngStream::new(3, &self.name).normal_tensor((b, h, n, e), 0.0, 1.0, &Device::Cpu)?;
        match &self.mask {
            Some(mask) if n == t => dout.broadcast_mul(&mask.reshape((b, 1, n, 1))?),
            _ => Ok(dout),
        }
    }

    /// sum(out * cotangent) by the definition, inputs moved by `step` along `direction`.
    fn loss(&self, direction: &[Tensor], step: f64) -> (f64, Vec<f64>) {
        let moved: Vec<Tensor> = self
            .inputs
            .iter()
            .zip(direction)
            .map(|(x, u)| {
                (x.to_dtype(DType::F64).unwrap() + (u.to_dtype(DType::F64).unwrap() * step).unwrap()).unwrap()
            })
            .collect();
        let [_, h, ..] = self.shape;
        let head = |x: &Tensor, i: usize, j: usize| x.get(i).unwrap().get(j).unwrap();
        let phi = match &self.phi {
            Phi::Random(_, kernel, norm_eps, scale) => {
                Phi::Random(moved[3].to_vec3().unwrap(), *kernel, *norm_eps, *scale)
            }
            other => other.clone(),
        };
        let (keep, mut out) = (self.keep(), Vec::new());
        for (i, keep) in keep.iter().enumerate() {
            for j in 0..h {
                let rows = |index: usize| head(&moved[index], i, j).to_vec2().unwrap();
                let gate: Option<Vec<f64>> =
                    self.gated.then(|| head(&moved[moved.len() - 1], i, j).to_vec1().unwrap());
                let (q, k, v): (Vec<_>, Vec<_>, Vec<_>) = (rows(0), rows(1), rows(2));
                let x = Head { q: &q, k: &k, v: &v, keep, gate: gate.as_deref(), head: j };
                out.extend(naive::attend(&phi, self.guard, self.causal, &x).concat());
            }
        }
        let dout: Vec<f32> = self.cotangent().unwrap().flatten_all().unwrap().to_vec1().unwrap();
        (out.iter().zip(dout).map(|(out, dout)| out * f64::from(dout)).sum(), out)
    }

    /// Largest difference, relative to the largest entry (at least 0.1, for gradients that are 0 exactly).
    fn difference(&self, a: &Tensor, b: &Tensor) -> f64 {
        let flat =
            |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let (a, b) = (flat(a), flat(b));
        assert_eq!(a.len(), b.len());
        let size = b.iter().fold(0.1, |m: f64, x| m.max(x.abs()));
        a.iter()
            .zip(&b)
            .fold(0.0, |m: f64, (a, b)| if a.is_finite() { m.max((a - b).abs()) } else { f64::NAN })
            / size
    }

    /// The result without rows of hidden queries.
    fn visible(&self, out: &Tensor) -> Tensor {
        let [b, _, n, t, ..] = self.shape;
        match &self.mask {
            Some(mask) if n == t => {
                let mask = mask.to_dtype(out.dtype()).unwrap().reshape((b, 1, n, 1)).unwrap();
                out.broadcast_mul(&mask).unwrap()
            }
            _ => out.clone(),
        }
    }

    /// Twin in f64 against the definition (value and directional derivative), fused in f32 against the twin.
    fn prove(&self) {
        let twin = with_mode(KernelMode::Composed, || self.run(DType::F64, false)).unwrap();
        let zeros: Vec<Tensor> = self.inputs.iter().map(|x| x.zeros_like().unwrap()).collect();
        let (_, want) = self.loss(&zeros, 0.0);
        let want = Tensor::from_vec(want, twin.out.shape(), &Device::Cpu).unwrap();
        let error = self.difference(&self.visible(&twin.out), &self.visible(&want));
        assert!(error < 1e-9, "{}: twin differs from the definition by {error}", self.name);
        self.prove_derivative(&twin);
        let [_, _, n, t, d, e] = self.shape;
        for packed in [false, true] {
            if packed && (n, d) != (t, e) {
                continue;
            }
            let fused = with_mode(KernelMode::Fused, || self.run(DType::F32, packed)).unwrap();
            let error = self.difference(&self.visible(&fused.out), &self.visible(&twin.out));
            assert!(error < 3e-5, "{}: fused (packed {packed}) differs by {error}", self.name);
            for (index, (fused, twin)) in fused.grads.iter().zip(&twin.grads).enumerate() {
                let error = self.difference(fused, twin);
                assert!(error < 1e-4, "{}: gradient {index} (packed {packed}) differs by {error}", self.name);
            }
        }
    }

    fn prove_derivative(&self, twin: &Outcome) {
        if matches!(&self.phi, Phi::Favor(_, favor) if !favor.through && !favor.stable()) {
            return; // the maxima count as constants: not the derivative of the result
        }
        let mut stream = RngStream::new(4, &self.name);
        let direction: Vec<Tensor> = self
            .inputs
            .iter()
            .map(|x| stream.normal_tensor(x.shape(), 0.0, 1.0, &Device::Cpu).unwrap())
            .collect();
        let step = 1e-6;
        let numeric = (self.loss(&direction, step).0 - self.loss(&direction, -step).0) / (2.0 * step);
        let mut along = 0.0;
        for (grad, u) in twin.grads.iter().zip(&direction) {
            let product = (grad * u.to_dtype(DType::F64).unwrap()).unwrap();
            along += product.sum_all().unwrap().to_scalar::<f64>().unwrap();
        }
        let error = (numeric - along).abs() / along.abs().max(1.0);
        assert!(error < 1e-4, "{}: derivative {along}, by differences {numeric}", self.name);
    }
}

const MAPS: &[&str] = &[
    "cosformer",
    "identity",
    "leaky",
    "linear",
    "performer",
    "performer-through",
    "performer-zero",
    "performer-stable",
    "gaussian",
    "arccos",
];

#[test]
fn bidirectional_equals_the_definition() {
    for map in MAPS {
        for n in [1, 2, 17, 130] {
            Case::new(map, [2, 2, n, n, 8, 8], map, false).prove();
        }
        Case::new(map, [1, 1, 401, 401, 5, 5], map, false).prove();
        Case::new(map, [2, 3, 33, 33, 7, 7], map, false)
            .hide(|b, j| j % (b + 3) == 1 || (b == 1 && j > 20))
            .prove();
    }
}

#[test]
fn cross_attention_equals_the_definition() {
    for map in MAPS {
        Case::new(map, [2, 2, 9, 300, 6, 10], map, false).prove();
        Case::new(map, [1, 2, 150, 31, 16, 3], map, false).hide(|_, j| j % 4 == 0).prove();
    }
}

#[test]
fn causal_equals_the_definition() {
    for map in MAPS.iter().chain(&["performer-leak"]) {
        let map = if *map == "performer-zero" { "performer-stable" } else { map };
        for n in [1, 2, 63, 65] {
            Case::new(map, [2, 2, n, n, 8, 8], map, true).prove();
        }
        Case::new(map, [1, 1, 331, 331, 5, 5], map, true).prove();
        Case::new(map, [2, 2, 90, 90, 7, 7], map, true).hide(|b, j| j % 5 == 2 * b || j > 80).prove();
    }
}

#[test]
fn gated_sums_equal_the_definition() {
    for (kernel, mean) in [("gaussian", 0.0), ("arccos", 5.0), ("arccos", -4.0)] {
        for n in [1, 70, 321] {
            let case = Case::new(&format!("{kernel}{mean}{n}"), [2, 2, n, n, 6, 6], kernel, true).gate(mean);
            case.clone().hide(|_, j| j % 7 == 3).prove();
            case.prove();
        }
    }
}
