//! The weights R of the mixture of blocks for one sample and head, over its valid blocks only, and their gradient.

use super::SortNorm;
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm, gemm_add};
use crate::cpu::math;
use crate::cpu::softmax::{softmax_rows, softmax_rows_backward};

/// The sorting network of one head.
#[derive(Clone, Copy)]
pub struct Net<'a> {
    /// Width of the blocks' summed keys.
    pub d: usize,
    /// Width of the hidden layer, 0 if there is none.
    pub hidden: usize,
    /// Columns of `w`.
    pub most: usize,
    /// [d, hidden] and [hidden].
    pub first: (&'a [f32], &'a [f32]),
    /// [d or hidden, most] and [most].
    pub last: (&'a [f32], &'a [f32]),
}

/// Everything between summed keys and R.
pub struct Mixture {
    /// R, [count, count]: row = destination, column = source.
    pub r: Vec<f32>,
    /// relu(pooled w1 + b1), [count, hidden].
    inner: Vec<f32>,
    /// Scores before the temperature; negative ones were cut with a hidden layer.
    scores: Vec<f32>,
    /// Logarithms after every normalisation, rows and columns in turn; absent for a softmax.
    steps: Option<Vec<Vec<f32>>>,
}

crate::simd_fn! {
    /// Every row minus its log-sum-exp.
    fn normalise_rows<S>(simd, x: &'a mut [f32], width: usize) {
        let mut scratch = vec![0.0; width];
        for row in x.chunks_exact_mut(width) {
            let max = math::max(simd, row);
            let sum = math::exp_sum(simd, max, row, &mut scratch);
            let shift = simd.splat_f32s(max + sum.ln());
            math::map_in_place(simd, row, #[inline(always)] |x| simd.sub_f32s(x, shift));
        }
    }
}

crate::simd_fn! {
    /// Every column minus its log-sum-exp.
    fn normalise_columns<S>(simd, x: &'a mut [f32], width: usize) {
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; width], vec![0.0; width]);
        let mut scratch = vec![0.0; width];
        for row in x.chunks_exact(width) {
            math::update(simd, row, &mut max, #[inline(always)] |x, max| simd.max_f32s(x, max));
        }
        for row in x.chunks_exact(width) {
            scratch.copy_from_slice(row);
            math::update(simd, &max, &mut scratch, #[inline(always)] |max, x| math::exp(simd, simd.sub_f32s(x, max)));
            math::add(simd, &scratch, &mut sum);
        }
        max.iter_mut().zip(&sum).for_each(|(max, sum)| *max += sum.ln());
        for row in x.chunks_exact_mut(width) {
            math::update(simd, &max, row, #[inline(always)] |shift, x| simd.sub_f32s(x, shift));
        }
    }
}

crate::simd_fn! {
    /// Gradient before a normalisation from the one after it: g - e^x sum(g), the sum over the rows or columns that
    /// were normalised; `x` are the logarithms after it.
    fn normalise_backward<S>(simd, x: &'a [f32], grad: &'a mut [f32], width: usize, rows: bool) {
        let (mut sums, mut scratch) = (vec![0.0; width], vec![0.0; width]);
        if !rows {
            grad.chunks_exact(width).for_each(|row| math::add(simd, row, &mut sums));
        }
        for (x, grad) in x.chunks_exact(width).zip(grad.chunks_exact_mut(width)) {
            if rows {
                sums.fill(math::sum(simd, grad));
            }
            math::map(simd, x, &mut scratch, #[inline(always)] |x| math::exp(simd, x));
            math::update(simd, &sums, &mut scratch, #[inline(always)] |sum, p| simd.mul_f32s(sum, p));
            math::update(simd, &scratch, grad, #[inline(always)] |p, g| simd.sub_f32s(g, p));
        }
    }
}

crate::simd_fn! {
    /// y_i = e^(x_i).
    fn exp_all<S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        math::map(simd, x, y, #[inline(always)] |x| math::exp(simd, x));
    }
}

/// x w + b, [rows, outputs]; rows of `w` are `stride` apart.
fn affine(x: &[f32], (inputs, outputs): (usize, usize), w: &[f32], stride: usize, b: &[f32]) -> Vec<f32> {
    let rows = x.len() / inputs;
    let mut y: Vec<f32> = (0..rows).flat_map(|_| &b[..outputs]).copied().collect();
    let (x, w) = (Mat::new(x, rows, inputs), Mat::strided(w, inputs, outputs, stride));
    gemm_add(MatMut::new(&mut y, rows, outputs), x, w, 1.0, 1.0, Threads::One);
    y
}

fn relu(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = x.max(0.0));
}

impl Mixture {
    /// R from the summed keys [valid.len(), d]; `valid` are the blocks with a kept key, of `blocks`. The backward pass
    /// needs `keep_steps`.
    pub fn new(
        pooled: &[f32],
        valid: &[usize],
        blocks: usize,
        net: &Net,
        temperature: f32,
        activation: SortNorm,
        keep_steps: bool,
    ) -> Self {
        let count = valid.len();
        if count == 0 {
            return Self { r: Vec::new(), inner: Vec::new(), scores: Vec::new(), steps: None };
        }
        let mut inner = Vec::new();
        let mut full = if net.hidden > 0 {
            inner = affine(pooled, (net.d, net.hidden), net.first.0, net.hidden, net.first.1);
            relu(&mut inner);
            affine(&inner, (net.hidden, blocks), net.last.0, net.most, net.last.1)
        } else {
            affine(pooled, (net.d, blocks), net.last.0, net.most, net.last.1)
        };
        if count < blocks {
            full = full.chunks_exact(blocks).flat_map(|row| valid.iter().map(|&at| row[at])).collect();
        }
        let scores = full.clone();
        if net.hidden > 0 {
            relu(&mut full);
        }
        full.iter_mut().for_each(|score| *score /= temperature);
        let SortNorm::Sinkhorn(iterations) = activation else {
            softmax_rows(&mut full, count);
            return Self { r: full, inner, scores, steps: None };
        };
        let mut steps = Vec::new();
        for _ in 0..iterations {
            normalise_rows(&mut full, count);
            steps.extend(keep_steps.then(|| full.clone()));
            normalise_columns(&mut full, count);
            steps.extend(keep_steps.then(|| full.clone()));
        }
        let mut r = vec![0.0; count * count];
        exp_all(&full, &mut r);
        Self { r, inner, scores, steps: Some(steps) }
    }

    /// From the gradient of R: the gradient of the summed keys, and of `[w1, b1, w, b]` (as far as there are) added to
    /// `params`.
    pub fn backward(
        &self,
        mut grad: Vec<f32>,
        pooled: &[f32],
        (valid, blocks): (&[usize], usize),
        net: &Net,
        temperature: f32,
        params: &mut [f32],
    ) -> Vec<f32> {
        let count = valid.len();
        if count == 0 {
            return Vec::new();
        }
        if let Some(steps) = &self.steps {
            grad.iter_mut().zip(&self.r).for_each(|(grad, r)| *grad *= r);
            for (index, step) in steps.iter().enumerate().rev() {
                normalise_backward(step, &mut grad, count, index % 2 == 0);
            }
        } else {
            softmax_rows_backward(&self.r, &mut grad, count);
        }
        for (grad, score) in grad.iter_mut().zip(&self.scores) {
            *grad = if net.hidden > 0 && *score <= 0.0 { 0.0 } else { *grad / temperature };
        }
        let mut full = vec![0.0; count * blocks];
        for (row, grad) in full.chunks_exact_mut(blocks).zip(grad.chunks_exact(count)) {
            valid.iter().zip(grad).for_each(|(&at, grad)| row[at] = *grad);
        }
        let Net { d, hidden, most, first, last } = *net;
        let inputs = if hidden > 0 { hidden } else { d };
        let (params_first, params_last) = params.split_at_mut(if hidden > 0 { (d + 1) * hidden } else { 0 });
        let x = if hidden > 0 { &self.inner } else { pooled };
        let mut dx = affine_backward(x, (inputs, blocks), last.0, most, &full, params_last);
        if hidden == 0 {
            return dx;
        }
        dx.iter_mut().zip(&self.inner).filter(|(_, inner)| **inner <= 0.0).for_each(|(dx, _)| *dx = 0.0);
        affine_backward(pooled, (d, hidden), first.0, hidden, &dx, params_first)
    }
}

/// The gradient of x; those of w [inputs, stride] and b [stride] are added to `params`.
fn affine_backward(
    x: &[f32],
    (inputs, outputs): (usize, usize),
    w: &[f32],
    stride: usize,
    grad: &[f32],
    params: &mut [f32],
) -> Vec<f32> {
    let rows = x.len() / inputs;
    let (dw, db) = params.split_at_mut(inputs * stride);
    let dy = Mat::new(grad, rows, outputs);
    let (x, w) = (Mat::new(x, rows, inputs), Mat::strided(w, inputs, outputs, stride));
    gemm_add(MatMut::strided(dw, inputs, outputs, stride), x.t(), dy, 1.0, 1.0, Threads::One);
    for row in grad.chunks_exact(outputs) {
        db.iter_mut().zip(row).for_each(|(db, grad)| *db += grad);
    }
    let mut dx = vec![0.0; rows * inputs];
    gemm(MatMut::new(&mut dx, rows, inputs), dy, w.t(), 1.0, Threads::One);
    dx
}
