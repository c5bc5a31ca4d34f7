//! The row-wise CUDA kernels, run thread by thread on the CPU, give the results of the fused CPU kernels.

use candle_core::{Device, Result, Tensor, Var};

use super::*;
use crate::cuda::emulated::{Emulated, TRACED, here};
use crate::cuda::nvrtc::assert_compiles;
use crate::testing::{evaluate, normal, randn};
use crate::{KernelMode, activation, adamw as optimiser, embedding, loss, norm};

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Value and gradients by the fused CPU kernel, and the gradient that came from above.
fn expected(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> (Vec<Vec<f32>>, Vec<f32>) {
    let dims = f(inputs).unwrap().dims().to_vec();
    (evaluate(KernelMode::Fused, inputs, f).unwrap(), flat(&normal("cotangent", &dims).unwrap()))
}

fn assert_close(label: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{label}");
    let largest = want.iter().fold(0.1f32, |largest, x| largest.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-5 * largest, "{label} at {at}: {got} instead of {want}");
    }
}

fn view(floats: &Vec<f32>) -> BufferView<'_, Emulated> {
    BufferView::all(floats)
}

/// Row-wise kernels on `len` rows of 512 elements, and an update of as many parameters.
pub(crate) fn pass(len: usize) {
    let (count, dims) = (512 * len, [len, 512]);
    let (x, row) = (vec![0.5; count], vec![1.0; 512]);
    let labels = vec![3; len];
    here(|machine| {
        layer_norm(machine, view(&x), [view(&row), view(&row)], dims, 1e-5)?;
        layer_norm_backward(machine, [view(&x), view(&row), view(&x)], dims, 1e-5)?;
        bias_gelu(machine, [view(&x), view(&row)], dims)?;
        cross_entropy(machine, view(&x), &labels, 512)?;
        cross_entropy_backward(machine, [view(&x), view(&x)], &labels, 512)?;
        let hyper = optimiser::Hyper {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-9,
            weight_decay: 0.1,
            grad_scale: 0.5,
            step: 1,
        };
        let update = Update { grad: view(&x), count, factors: optimiser::factors(&hyper) };
        let [mut p, mut m, mut v] = [(); 3].map(|()| vec![0.0; count]);
        adamw(machine, update, &mut p, 0, [&mut m, &mut v])
    })
    .unwrap();
}

#[test]
fn layer_norm_and_its_gradients() {
    let machine = Emulated::default();
    for (rows, width, shift) in [(1, 1, 0.0), (3, 8, 2.0), (7, 17, 0.0), (161, 33, 5.0), (5, 256, 0.0)] {
        let x = (randn("x", &[rows, width]) + shift).unwrap();
        let inputs = [x, randn("weight", &[width]), randn("bias", &[width])];
        let (want, dy) = expected(&inputs, |x| norm::layer_norm(&x[0], &x[1], &x[2], norm::EPS));
        let [x, weight, bias] = inputs.each_ref().map(flat);
        let (dims, eps) = ([rows, width], norm::EPS as f32);
        let y = layer_norm(&machine, view(&x), [view(&weight), view(&bias)], dims, eps).unwrap();
        let [dx, parameters] =
            layer_norm_backward(&machine, [view(&x), view(&weight), view(&dy)], dims, eps).unwrap();
        assert_close("y", &y, &want[0]);
        assert_close("dx", &dx, &want[1]);
        assert_close("weight and bias", &parameters, &[want[2].clone(), want[3].clone()].concat());
    }
}

#[test]
fn column_sums_of_any_number_of_rows() {
    let machine = Emulated::default();
    for (rows, width) in [(0, 3), (1, 1), (64, 40), (65, 31), (300, 7)] {
        let x: Vec<f32> = (0..rows * width).map(|i| (i % 101) as f32 - 37.0).collect();
        let mut want = vec![0.0; width];
        for row in x.chunks(width) {
            want.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        // whole numbers: exact
        assert_eq!(column_sums(&machine, view(&x), [rows, width]).unwrap(), want, "[{rows}, {width}]");
    }
}

#[test]
fn gelu_and_its_gradient() {
    let machine = Emulated::default();
    for (rows, width) in [(1, 1), (3, 17), (9, 100)] {
        let x = (randn("x", &[rows, width]) * 2.0).unwrap();
        let data = flat(&x);
        let (want, dy) = expected(std::slice::from_ref(&x), |x| activation::gelu(&x[0]));
        assert_close("gelu", &gelu(&machine, view(&data), data.len()).unwrap(), &want[0]);
        let dx = gelu_backward(&machine, [view(&data), view(&dy)], data.len()).unwrap();
        assert_close("gelu's gradient", &dx, &want[1]);
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    let machine = Emulated::default();
    for (rows, classes) in [(1, 1), (7, 2), (21, 40)] {
        let labels: Vec<u32> = (0..rows).map(|i| ((i * 7 + 3) % classes) as u32).collect();
        let given = Tensor::new(labels.as_slice(), &Device::Cpu).unwrap();
        let logits = (randn("logits", &[rows, classes]) * 4.0).unwrap();
        let data = flat(&logits);
        let (want, grad) = expected(&[logits], |x| loss::cross_entropy(&x[0], &given));
        let losses = cross_entropy(&machine, view(&data), &labels, classes).unwrap();
        let dx = cross_entropy_backward(&machine, [view(&data), view(&grad)], &labels, classes).unwrap();
        assert_close("losses", &losses, &want[0]);
        assert_close("gradient", &dx, &want[1]);
    }
}

#[test]
fn rows_of_a_table_and_its_gradient() {
    let machine = Emulated::default();
    for (len, count, width) in [(1, 1, 1), (6, 5, 8), (700, 3, 17), (10, 100, 140)] {
        let ids: Vec<u32> = (0..len).map(|i| ((i * i + i / 3) % count) as u32).collect();
        let given = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
        let table = randn("table", &[count, width]);
        let data = flat(&table);
        let (want, dy) = expected(&[table], |x| embedding::embedding(&given, &x[0]));
        assert_close("rows", &table_rows(&machine, view(&data), &ids, width).unwrap(), &want[0]);
        let gradient = table_gradient(&machine, view(&dy), &ids, [count, width]).unwrap();
        assert_close("gradient", &gradient, &want[1]);
    }
    assert!(table_gradient(&machine, view(&vec![0.0; 4]), &[0, 2], [2, 2]).is_err());
}

#[test]
fn updates_of_a_part_of_a_buffer() {
    let machine = Emulated::default();
    let start = randn("p", &[300]);
    let var = Var::from_tensor(&start).unwrap();
    let mut moments = optimiser::Moments::zeros(&var).unwrap();
    let mut p = [vec![7.0; 5], flat(&start)].concat();
    let (mut m, mut v) = (vec![0.0; 300], vec![0.0; 300]);
    for step in 1..=3 {
        let grad = randn(&format!("grad {step}"), &[300]);
        let hyper = optimiser::Hyper {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-9,
            weight_decay: 0.1,
            grad_scale: 0.5,
            step,
        };
        optimiser::update(&var, &grad, &mut moments, &hyper).unwrap();
        let grad = flat(&grad);
        let update = Update { grad: view(&grad), count: 300, factors: optimiser::factors(&hyper) };
        adamw(&machine, update, &mut p, 5, [&mut m, &mut v]).unwrap();
    }
    assert_eq!(p[..5], [7.0; 5]);
    assert_close("p", &p[5..], &flat(var.as_tensor()));
    let (want_m, want_v) = moments.tensors().unwrap();
    assert_close("m", &m, &flat(&want_m));
    assert_close("v", &v, &flat(&want_v));
}

/// A fault: the first place of a text, what it becomes, what runs it, and what is to be found.
type Seed = (&'static str, &'static str, fn(&Emulated), &'static str);

fn run_layer_norm(machine: &Emulated) {
    let (x, ones) = (vec![0.5; 70 * 40], vec![1.0; 40]);
    layer_norm_backward(machine, [view(&x), view(&ones), view(&x)], [70, 40], 1e-5).unwrap();
}

fn run_column_sums(machine: &Emulated) {
    column_sums(machine, view(&vec![1.0; 300 * 7]), [300, 7]).unwrap();
}

fn run_gelu(machine: &Emulated) {
    gelu(machine, view(&vec![1.0; 51]), 51).unwrap();
}

fn run_cross_entropy(machine: &Emulated) {
    cross_entropy(machine, view(&vec![1.0; 21 * 20]), &[3; 21], 20).unwrap();
}

const BARRIER: &str = "__syncthreads();";

const SEEDS: &[Seed] = &[
    // the barrier before what the others have written is read
    (BARRIER, ";", run_column_sums, "reads what nobody wrote"),
    // the barrier before it is written again
    ("    __syncthreads();\n    return total;", "    return total;", run_layer_norm, "without a barrier"),
    (
        "    __syncthreads();\n    float",
        "    if (threadIdx.x < WARP) __syncthreads();\n    float",
        run_column_sums,
        "reached by 32 of 128",
    ),
    ("0xffffffffu", "0x0000ffffu", run_layer_norm, "in which it is not"),
    ("distance = WARP / 2;", "distance = WARP;", run_layer_norm, "takes a value of lane"),
    (
        "    sum = warp_sum(sum);\n    if (live &&",
        "    if (threadIdx.x % WARP < live) sum = warp_sum(sum);\n    if (live &&",
        run_cross_entropy,
        "is reached by 20 lanes",
    ),
    ("if (at < count) y[at] = 0.5f", "if (at <= count) y[at] = 0.5f", run_gelu, "beyond the end"),
    (
        "parts[(long long)width * blockIdx.x + column] = sum;",
        "parts[column] = sum;",
        run_column_sums,
        "another block writes",
    ),
    (
        "sums[LINES][WARP];",
        "sums[100 * LINES][WARP];",
        run_column_sums,
        "bytes of shared memory are declared",
    ),
];

#[test]
fn seeded_faults_are_found() {
    let by_access = |says: &str| {
        ["nobody wrote", "without", "beyond", "another block", "declared"]
            .iter()
            .any(|one| says.contains(one))
    };
    for (text, instead, run, says) in SEEDS.iter().filter(|(.., says)| TRACED || !by_access(says)) {
        let machine = Emulated::seeded(text, instead);
        run(&machine);
        let found = machine.found();
        assert!(found.iter().any(|fault| fault.contains(says)), "{text} -> {instead}: {found:#?}");
    }
}

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_row_wise_kernels() {
    assert_compiles([MODULE]);
}
