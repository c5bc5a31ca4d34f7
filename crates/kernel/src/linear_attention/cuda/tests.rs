//! The CUDA kernels without a GPU: run thread by thread on the CPU, by the operation that launches them on a device, they give the
//! values and gradients of the definition in f64; compiled by NVRTC where it is at hand, they are valid CUDA.

use candle_core::{DType, Device, Result, Tensor};

use super::launch::{Activation, DecayWidth, defines, memory_bytes};
use super::{NAME, SOURCE, fused};
use crate::cuda::Module;
use crate::cuda::emulated::{TRACED, with_seeded};
use crate::cuda::nvrtc::assert_compiles;
use crate::heads::{PackedLayout, Qkv, merge};
use crate::linear_attention::{
    Decay, Favor, FeatureActivation, Features, Guard, LinearAttention, RandomKernel, composed,
};
use crate::testing::{difference, randn, value_and_grads};

/// A call without its tensors.
#[derive(Clone, Debug)]
struct Case {
    /// Samples, heads, groups, queries, keys, width, value width.
    shape: [usize; 7],
    features: Map,
    guard: Option<Guard>,
    causal: bool,
    decay: Sums,
    holes: bool,
    packed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Map {
    Elementwise(FeatureActivation, bool),
    Favor(f64),
    Taylor,
    Random,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sums {
    Whole,
    PerHead,
    PerToken { separate: bool },
    PerChannel { separate: bool },
    Gate,
}

const IDENTITY: Map = Map::Elementwise(FeatureActivation::Identity, false);

impl Case {
    /// Samples, heads, length, width and value width.
    fn new([b, h, n, d, e]: [usize; 5], features: Map, causal: bool) -> Self {
        // denominators of features of both signs may be anywhere
        let guard = match features {
            Map::Elementwise(FeatureActivation::Identity | FeatureActivation::LeakyRelu(_), _) => {
                Guard::SignedClamp(3.0)
            }
            _ => Guard::ClampMin(0.2),
        };
        let guard = Some(guard);
        Self {
            shape: [b, h, h, n, n, d, e],
            features,
            guard,
            causal,
            decay: Sums::Whole,
            holes: false,
            packed: false,
        }
    }

    fn guarded(self, guard: Option<Guard>) -> Self {
        Self { guard, ..self }
    }

    fn decaying(self, decay: Sums) -> Self {
        Self { decay, ..self }
    }

    fn with_holes(self) -> Self {
        Self { holes: true, ..self }
    }

    fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    fn sharing(mut self, groups: usize) -> Self {
        self.shape[2] = groups;
        self
    }

    fn keys(mut self, keys: usize) -> Self {
        self.shape[4] = keys;
        self
    }

    /// q, k, v, then decays, then learned weights.
    fn inputs(&self) -> Vec<Tensor> {
        let [b, h, g, n, t, d, e] = self.shape;
        let mut inputs =
            vec![randn("q", &[b, g, n, d]), randn("k", &[b, g, t, d]), randn("v", &[b, h, t, e])];
        let log =
            |name: &str, shape: &[usize]| randn(name, shape).abs().unwrap().affine(-0.1, -1e-3).unwrap();
        match self.decay {
            Sums::Whole | Sums::PerHead => {}
            Sums::Gate => inputs.push(randn("gate", &[b, h, n])),
            Sums::PerToken { separate } => {
                inputs.push(log("forward", &[b, h, n]));
                inputs.extend(separate.then(|| log("backward", &[b, h, n])));
            }
            Sums::PerChannel { separate } => {
                inputs.push(log("forward", &[b, h, n, d]));
                inputs.extend(separate.then(|| log("backward", &[b, h, n, d])));
            }
        }
        if let Map::Random = self.features {
            inputs.push(randn("weight", &[h, 10, d]));
        }
        inputs
    }

    fn mask(&self) -> Option<Tensor> {
        let [b, _, _, _, t, ..] = self.shape;
        let keep = (0..b * t).map(|at| f32::from((at % t) % 5 != 2 + at / t && at % t + 2 != t));
        self.holes.then(|| Tensor::from_vec(keep.collect(), (b, t), &Device::Cpu).unwrap())
    }

    /// The result [b, h, n, e] by the kernels or by the twin.
    fn run(&self, x: &[Tensor], by_kernels: bool) -> Result<Tensor> {
        let [_, h, _, n, t, d, _] = self.shape;
        let qkv = match self.packed {
            true => {
                let rows = Tensor::cat(&[merge(&x[0])?, merge(&x[1])?, merge(&x[2])?], 2)?;
                Qkv::Packed { rows, heads: h, parts: PackedLayout::QKV }
            }
            false => Qkv::separate(x[0].clone(), x[1].clone(), x[2].clone()),
        };
        let features = match self.features {
            Map::Elementwise(activation, turned) => {
                Features::Elementwise { activation, reweight: turned.then_some(n.max(t) + 3) }
            }
            Map::Taylor => Features::Taylor,
            Map::Favor(eps) => Features::Favor(Favor {
                omega: randn("omega", &[24, d]),
                scale: (d as f64).powf(-0.25),
                feature_eps: eps,
                den_eps: eps,
                through: false,
                masked_as_zero: eps > 0.0,
            }),
            Map::Random => Features::Random {
                weight: x[x.len() - 1].clone(),
                kernel: RandomKernel::Gaussian,
                norm_eps: 1e-3,
                scale: 0.3,
            },
        };
        let logs: Vec<f64> = (0..h).map(|head| -0.05 * head as f64).collect();
        let decay = match self.decay {
            Sums::Whole => Decay::None,
            Sums::PerHead => Decay::PerHead(&logs),
            Sums::PerToken { separate } => Decay::PerToken { log: &x[3], backward: separate.then(|| &x[4]) },
            Sums::PerChannel { separate } => {
                Decay::PerChannel { log: &x[3], backward: separate.then(|| &x[4]) }
            }
            Sums::Gate => Decay::Gate(&x[3]),
        };
        let mask = self.mask();
        let call =
            LinearAttention { features, guard: self.guard, mask: mask.as_ref(), causal: self.causal, decay };
        let heads = if by_kernels { fused(&qkv, &call)?.expect("kernels") } else { composed(&qkv, &call)? };
        heads.split()?.contiguous()
    }

    fn prove(&self) {
        let inputs = self.inputs();
        let exact = value_and_grads(&inputs, DType::F64, &|x| self.run(x, false)).unwrap();
        let got = value_and_grads(&inputs, DType::F32, &|x| self.run(x, true)).unwrap();
        for (index, (got, exact)) in got.iter().zip(&exact).enumerate() {
            let found = difference(got, exact);
            assert!(found <= 2e-5, "{self:?}: result {index} differs by {found:e}");
        }
    }
}

/// A pass forward and backward over `len` positions of one head of 64 columns; decays have gradients if they are tensors.
pub(crate) fn pass(len: usize, decay: Sums, causal: bool) {
    let map = if decay == Sums::Whole { Map::Elementwise(FeatureActivation::Elu1, false) } else { IDENTITY };
    let case = Case::new([1, 1, len, 64, 64], map, causal).decaying(decay);
    let case = if decay == Sums::Whole { case } else { case.guarded(None) };
    value_and_grads(&case.inputs(), DType::F32, &|x| case.run(x, true)).unwrap();
}

const MAPS: &[Map] = &[
    IDENTITY,
    Map::Elementwise(FeatureActivation::Relu, true),
    Map::Elementwise(FeatureActivation::LeakyRelu(0.1), false),
    Map::Elementwise(FeatureActivation::Elu1, false),
    Map::Elementwise(FeatureActivation::Elu1, true),
];

/// Lengths around the ends of chunks, and widths of one and around the ends of tiles.
const SHAPES: &[[usize; 5]] =
    &[[1, 1, 1, 1, 1], [2, 1, 67, 1, 70], [1, 1, 65, 33, 65], [1, 1, 130, 64, 64], [2, 2, 63, 16, 8]];

const GUARDS: &[Option<Guard>] = &[
    None,
    Some(Guard::ClampMin(0.2)),
    Some(Guard::SignedClamp(3.0)),
    Some(Guard::AbsClampMin(0.5)),
    Some(Guard::Add(1.0)),
    Some(Guard::NonZero),
];

#[test]
fn every_feature_map_gives_the_results_of_the_cpu() {
    for &map in MAPS {
        for causal in [false, true] {
            Case::new([2, 1, 70, 7, 5], map, causal).with_holes().prove();
        }
        Case::new([1, 2, 66, 6, 6], map, true).packed().prove();
        Case::new([2, 1, 9, 6, 10], map, false).keys(300).prove();
        Case::new([1, 2, 300, 6, 3], map, false).keys(31).with_holes().prove();
    }
}

fn prove_shapes(shapes: &[[usize; 5]]) {
    for &shape in shapes {
        for causal in [false, true] {
            // far from the bend of a clamp, where narrow features would be
            let case = Case::new(shape, Map::Elementwise(FeatureActivation::Relu, true), causal);
            case.guarded(Some(Guard::Add(1.0))).prove();
            Case::new(shape, IDENTITY, causal).guarded(None).prove();
        }
    }
}

#[test]
fn shapes_give_the_results_of_the_cpu() {
    prove_shapes(&SHAPES[..3]);
}

#[test]
fn every_guard_gives_the_results_of_the_cpu() {
    for &guard in GUARDS {
        for causal in [false, true] {
            // denominators of Guard::NonZero and Guard::Add are positive
            let map = Map::Elementwise(FeatureActivation::Elu1, false);
            Case::new([1, 2, 66, 5, 6], map, causal).guarded(guard).prove();
            let signed = !matches!(guard, Some(Guard::NonZero | Guard::Add(_)));
            if signed {
                Case::new([1, 2, 66, 5, 6], IDENTITY, causal).guarded(guard).prove();
            }
        }
    }
}

#[test]
fn features_of_candles_operations_give_the_results_of_the_cpu() {
    for causal in [false, true] {
        for map in [Map::Favor(0.0), Map::Favor(1e-2), Map::Taylor, Map::Random] {
            let guard = if let Map::Random = map { Guard::AbsClampMin(0.2) } else { Guard::NonZero };
            Case::new([1, 2, 67, 6, 7], map, causal).guarded(Some(guard)).prove();
            Case::new([2, 1, 70, 6, 7], map, causal).guarded(Some(guard)).with_holes().prove();
        }
    }
    let gated = Case::new([2, 2, 67, 6, 6], Map::Random, true).decaying(Sums::Gate);
    gated.clone().guarded(Some(Guard::ClampMin(0.2))).with_holes().prove();
    gated.guarded(None).prove();
}

/// Decays of all kinds at `shapes`, then what goes with them: shared heads and holes at `more`, guards and features with half as many heads.
fn prove_decays(shapes: &[[usize; 5]], more: [usize; 5], causal: bool) {
    let both = if causal { &[false][..] } else { &[false, true] };
    let separate = |separate: bool| [Sums::PerToken { separate }, Sums::PerChannel { separate }];
    for decay in both.iter().flat_map(|&own| separate(own)).chain([Sums::PerHead]) {
        let case = |shape| Case::new(shape, IDENTITY, causal).decaying(decay);
        shapes.iter().for_each(|&shape| case(shape).guarded(None).prove());
        case(more).guarded(None).sharing(2).with_holes().prove();
        let [samples, heads, len, width, value_width] = more;
        let case = case([samples, heads / 2, len, width, value_width]);
        case.clone().guarded(Some(Guard::AbsClampMin(0.5))).with_holes().prove();
        if !matches!(decay, Sums::PerChannel { .. }) {
            Case { features: Map::Elementwise(FeatureActivation::Relu, true), ..case }.prove();
        }
    }
}

const DECAYING: &[[usize; 5]] = &[[1, 1, 1, 1, 1], [1, 1, 65, 5, 9]];

// Two tests, so that two processors share the emulation.
#[test]
fn causal_sums_that_decay_give_the_results_of_the_cpu() {
    prove_decays(DECAYING, [1, 4, 67, 3, 2], true);
}

#[test]
fn bidirectional_sums_that_decay_give_the_results_of_the_cpu() {
    prove_decays(DECAYING, [1, 4, 67, 3, 2], false);
}

#[test]
#[ignore = "the emulation takes minutes"]
fn every_shape_gives_the_results_of_the_cpu() {
    prove_shapes(SHAPES);
    for causal in [false, true] {
        prove_decays(SHAPES, [2, 4, 75, 7, 5], causal);
    }
}

#[test]
fn a_step_that_forgets_all_spoils_no_later_one() {
    for decay in [Sums::PerToken { separate: false }, Sums::PerChannel { separate: false }] {
        let case = Case::new([1, 2, 150, 8, 8], IDENTITY, true).guarded(None).decaying(decay);
        let mut inputs = case.inputs();
        let forget: Vec<f32> = (0..150).map(|t| if t % 40 == 5 { -1e30 } else { -0.01 }).collect();
        let forget = Tensor::from_vec(forget, (1, 1, 150), &Device::Cpu).unwrap();
        let forget = if inputs[3].rank() == 4 { forget.unsqueeze(3).unwrap() } else { forget };
        inputs[3] = forget.broadcast_as(inputs[3].shape()).unwrap().contiguous().unwrap();
        let exact = value_and_grads(&inputs, DType::F64, &|x| case.run(x, false)).unwrap();
        let got = value_and_grads(&inputs, DType::F32, &|x| case.run(x, true)).unwrap();
        for (index, (got, exact)) in got.iter().zip(&exact).enumerate() {
            assert!(difference(got, exact) <= 2e-5, "{decay:?}: result {index}");
        }
    }
}

/// A fault: the first place of a text, what it becomes, and what is to be found.
const SEEDS: &[(&str, &str, &str)] = &[
    // pairs are weighed before all of them are there
    (
        "= sums[a][b];\n    __syncthreads();\n    if (me < CHUNK) m->den",
        "= sums[a][b];\n    if (me < CHUNK) m->den",
        "shared memory",
    ),
    // the last row's products are formed while the next columns are loaded
    (
        "products(m->side.in.x, m->side.in.y, sums);\n#endif\n        __syncthreads();",
        "products(m->side.in.x, m->side.in.y, sums);\n#endif",
        "without a barrier",
    ),
    ("if (x < width && z < columns) to", "if (x <= width && z < columns) to", "another block"),
    ("if (i >= r->left || x", "if (i > r->left || x", "beyond the end"),
    ("if (z0 == 0) dens[place]", "dens[place]", "another block"),
    (
        "if (at >= size) return;\n    long long first",
        "if (at > size) return;\n    long long first",
        "another block",
    ),
    ("if (first + row + a >= count) continue;", "if (first + row + a > count) continue;", "beyond the end"),
    ("float *to = states + (home(g)", "float *to = states + 0 * (home(g)", "another block"),
];

#[test]
fn seeded_faults_are_found() {
    if !TRACED {
        return;
    }
    let case = Case::new([1, 2, 66, 40, 70], Map::Elementwise(FeatureActivation::Elu1, false), true);
    let inputs = case.inputs();
    for (text, instead, says) in SEEDS {
        let found = with_seeded(text, instead, || {
            let _ = value_and_grads(&inputs, DType::F32, &|x| case.run(x, true)).unwrap();
        });
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
fn every_block_has_the_memory_it_asks_for() {
    for decay in [DecayWidth::None, DecayWidth::Row, DecayWidth::Channel] {
        assert!(memory_bytes(decay) <= 99 << 10, "no block of an RTX card has so much shared memory");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    let forms = [
        (Activation::Leaky(0.0), true, DecayWidth::None),
        (Activation::Elu1, false, DecayWidth::None),
        (Activation::Elu1, true, DecayWidth::Row),
        (Activation::Identity, false, DecayWidth::Channel),
    ]
    .map(|(activation, turned, decay)| defines(activation, turned, decay));
    assert_compiles(forms.iter().map(|defines| Module { name: NAME, source: SOURCE, defines }));
}
