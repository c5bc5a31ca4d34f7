//! The halves of a transformer block, whose factors are packed where they are computed: odd widths, several chunks and blocks
//! of rows, scaled branches.

use candle_core::{Result, Tensor, Var};
use effattn::kernel::block::{self, FfnCall, Projection, Residual};
use effattn::kernel::cpu::matmul_format::{MatmulFormat, set_products};
use effattn::kernel::group::{ParamGroup, ParamPart};
use effattn::kernel::{linear::linear, tape};

/// Numbers between -1 and 1.
pub fn numbers(dims: &[usize], seed: u64) -> Tensor {
    let count: usize = dims.iter().product();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = std::iter::repeat_with(next).take(count).collect();
    Tensor::from_vec(data, dims, &candle_core::Device::Cpu).expect("as many numbers as the shape has")
}

fn group(flat: &Tensor, shapes: &[Vec<usize>]) -> ParamGroup {
    let mut offset = 0;
    let parts = shapes.iter().map(|shape| {
        let part = ParamPart { name: String::new(), shape: shape.clone(), offset };
        offset += shape.iter().product::<usize>();
        part
    });
    ParamGroup { parts: parts.collect(), flat: flat.clone() }
}

/// The result and the gradients of a sum of it with fixed weights.
fn run(format: MatmulFormat, vars: &[Var], f: &dyn Fn(&[Var]) -> Result<Tensor>) -> Vec<Vec<f32>> {
    set_products(format);
    let (y, tape) = tape::record(|| f(vars)).expect("forward");
    let loss = (&y * numbers(y.dims(), 7)).and_then(|y| y.sum_all()).expect("loss");
    let grads = tape.backward(&loss).expect("backward");
    set_products(MatmulFormat::F32);
    let flat = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers");
    std::iter::once(flat(&y))
        .chain(vars.iter().map(|var| flat(grads.get(var).expect("a gradient"))))
        .collect()
}

/// Compares bf16 with f32, and one thread with three.
pub fn check(pools: &[rayon::ThreadPool; 2]) {
    let (mut worst, mut least) = (0.0_f64, f64::INFINITY);
    let mut near = |name: &str, vars: &[Var], f: &(dyn Fn(&[Var]) -> Result<Tensor> + Sync)| {
        let want = run(MatmulFormat::F32, vars, f);
        let [got, again] = [0, 1].map(|pool: usize| pools[pool].install(|| run(MatmulFormat::Bf16, vars, f)));
        assert!(got == again, "{name}: threads change the bits");
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let gap = super::norm(got.iter().zip(want).map(|(got, want)| got - want));
            let gap = gap / super::norm(want.iter().copied());
            assert!(gap < 0.01, "{name}: result {index} is {gap} from f32");
            (worst, least) = (worst.max(gap), least.min(gap));
        }
    };
    for (dims, hidden) in
        [([1, 1, 9], 1), ([2, 131, 17], 33), ([3, 67, 64], 128), ([1, 37, 70], 65), ([2, 700, 16], 1024)]
    {
        let d = dims[2];
        let var = |dims: &[usize], seed| Var::from_tensor(&numbers(dims, seed)).expect("a variable");
        let flat = |shapes: &[Vec<usize>]| {
            let count: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
            var(&[count], 3)
        };
        let x = var(&dims, 1);
        let name = format!("{dims:?} {hidden}");
        let scales: Vec<f32> = [1.25, 0.5, 0.0].into_iter().take(dims[0]).collect();
        let shapes = [vec![d], vec![d], vec![hidden, d], vec![hidden], vec![d, hidden], vec![d]];
        let inputs = [x.clone(), flat(&shapes)];
        for (residual, scales) in [(Residual::Raw, None), (Residual::Normed, Some(&scales[..]))] {
            let call = FfnCall { scales, ..FfnCall::new(residual, 1e-5) };
            near(&format!("ffn {name} {residual:?}"), &inputs, &|x| {
                block::ffn(x[0].as_tensor(), &group(x[1].as_tensor(), &shapes), call)
            });
        }
        for norm in [true, false] {
            let spec = Projection { norm, outputs: 2, bias: norm };
            let weights = [vec![hidden, d], vec![hidden], vec![3, d], vec![3]];
            let norms = [vec![d], vec![d]];
            let shapes: Vec<_> = if norm {
                norms.iter().chain(&weights).cloned().collect()
            } else {
                weights.iter().step_by(2).cloned().collect()
            };
            near(&format!("project {name} {norm}"), &[x.clone(), flat(&shapes)], &|x| {
                block::project(x[0].as_tensor(), &group(x[1].as_tensor(), &shapes), spec, norm)
            });
        }
        let shapes = [vec![hidden, d], vec![hidden]];
        let residual = var(&[dims[0], dims[1], hidden], 2);
        near(&format!("output {name}"), &[x.clone(), residual, flat(&shapes)], &|x| {
            block::output(
                x[0].as_tensor(),
                x[1].as_tensor(),
                &group(x[2].as_tensor(), &shapes),
                Some(&scales),
            )
        });
        near(&format!("linear {name}"), &[x.clone(), var(&[hidden, d], 4)], &|x| {
            linear(x[0].as_tensor(), x[1].as_tensor(), None)
        });
    }
    assert!(worst > 1e-4, "nothing was rounded: {worst} {least}");
}
