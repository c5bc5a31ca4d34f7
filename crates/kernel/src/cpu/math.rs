//! Vector mathematics to inline into kernels: call from the body of a [`simd_fn!`](crate::simd_fn) only,
//! outside of one it is compiled without vector instructions.
//!
//! The same holds for closures: write `#[inline(always)] |x| ...` when handing one to these functions. A
//! closure that the compiler does not inline loses the vector instructions (a softmax then takes 40 times as long).

use pulp::Simd;

use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E};

/// Independent accumulators of a reduction, enough to hide the latency of an addition.
const LANES: usize = 4;

/// Elements `at..` of `x`, as many as a vector holds; zeros beyond the end.
#[inline(always)]
pub fn load<S: Simd>(simd: S, x: &[f32], at: usize) -> S::f32s {
    match x.get(at..at + S::F32_LANES) {
        Some(full) => S::as_simd_f32s(full).0[0],
        None => simd.partial_load_f32s(&x[at..]),
    }
}

/// Writes elements `at..` of `y`, as many as a vector holds and `y` has.
#[inline(always)]
pub fn store<S: Simd>(simd: S, y: &mut [f32], at: usize, value: S::f32s) {
    let end = y.len().min(at + S::F32_LANES);
    let y = &mut y[at..end];
    if y.len() == S::F32_LANES {
        S::as_mut_simd_f32s(y).0[0] = value;
    } else {
        simd.partial_store_f32s(y, value);
    }
}

/// [`load`] of `N` vectors that lie one behind another; zeros beyond the end.
#[inline(always)]
pub fn loads<S: Simd, const N: usize>(simd: S, x: &[f32], at: usize) -> [S::f32s; N] {
    let mut vectors = [simd.splat_f32s(0.0); N];
    match x.get(at..at + N * S::F32_LANES) {
        Some(full) => vectors.copy_from_slice(S::as_simd_f32s(full).0),
        None => {
            for (index, vector) in vectors.iter_mut().enumerate() {
                *vector = load(simd, x, x.len().min(at + index * S::F32_LANES));
            }
        }
    }
    vectors
}

/// [`store`] of `N` vectors, one behind another.
#[inline(always)]
pub fn stores<S: Simd, const N: usize>(simd: S, y: &mut [f32], at: usize, values: [S::f32s; N]) {
    match y.get_mut(at..at + N * S::F32_LANES) {
        Some(full) => S::as_mut_simd_f32s(full).0.copy_from_slice(&values),
        None => {
            for (index, &value) in values.iter().enumerate() {
                let at = y.len().min(at + index * S::F32_LANES);
                store(simd, y, at, value);
            }
        }
    }
}

/// Vector by vector x y.
#[inline(always)]
pub fn products<S: Simd, const N: usize>(simd: S, x: [S::f32s; N], mut y: [S::f32s; N]) -> [S::f32s; N] {
    for (y, &x) in y.iter_mut().zip(&x) {
        *y = simd.mul_f32s(x, *y);
    }
    y
}

/// What is smaller than this, 2^-80, in the state of a recurrence is taken for nothing: see [`flush`].
const FAINT: f32 = 1.0 / ((1u128 << 80) as f32);

/// x, but 0 where |x| < 2^-80.
///
/// Recurrences with a decay call it on the state that they carry. A gradient that enters at one position (a classifier that reads the
/// first) fades along the sequence into subnormal numbers, on which Intel's processors take a hundred times as long, in every
/// product of the layers below; rounding to nearest never lets it reach 0. No weight in f32 is changed by so small a gradient.
#[inline(always)]
pub fn flush<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let faint = simd.less_than_f32s(simd.abs_f32s(x), simd.splat_f32s(FAINT));
    simd.select_f32s(faint, simd.splat_f32s(0.0), x)
}

/// e^x, within 1.5 units in the last place; 0 where e^x is below the smallest normal number, infinity from
/// 88.38 on (a little early), NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    exps(simd, [x])[0]
}

/// [`exp`] of several vectors, step by step for all of them: the processor then finds what does not wait for the step before, and
/// coefficients are loaded once.
#[inline(always)]
pub fn exps<S: Simd, const N: usize>(simd: S, x: [S::f32s; N]) -> [S::f32s; N] {
    // Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits; 127 makes it an exponent.
    let round = simd.splat_f32s(12_582_912.0 + 127.0);
    let (mut r, mut shifted) = (x, x);
    for (r, shifted) in r.iter_mut().zip(&mut shifted) {
        *r = simd.min_f32s(simd.splat_f32s(88.7), *r);
        *shifted = simd.mul_add_e_f32s(*r, simd.splat_f32s(LOG2_E), round);
    }
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first exact in few bits.
    for (r, shifted) in r.iter_mut().zip(&shifted) {
        let n = simd.sub_f32s(*shifted, round);
        *r = simd.negate_mul_add_e_f32s(n, simd.splat_f32s(0.693_359_4), *r);
        *r = simd.negate_mul_add_e_f32s(n, simd.splat_f32s(-2.121_944_4e-4), *r);
    }
    // Minimax polynomial of (e^r - 1 - r) / r^2.
    let mut y = [simd.splat_f32s(1.987_569_1e-4); N];
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        step(simd, &mut y, &r, c);
    }
    for ((y, r), (shifted, x)) in y.iter_mut().zip(&r).zip(shifted.iter().zip(&x)) {
        let p = simd.mul_add_e_f32s(*y, simd.mul_f32s(*r, *r), *r);
        let p = simd.add_f32s(p, simd.splat_f32s(1.0));
        let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(*shifted), simd.splat_u32s(23));
        let power = simd.mul_f32s(p, simd.transmute_f32s_u32s(power));
        let tiny = simd.less_than_f32s(*x, simd.splat_f32s(-87.336_54));
        *y = simd.select_f32s(tiny, simd.splat_f32s(0.0), power);
    }
    y
}

/// p = p x + c: a step of polynomials.
#[inline(always)]
fn step<S: Simd, const N: usize>(simd: S, p: &mut [S::f32s; N], x: &[S::f32s; N], c: f32) {
    let c = simd.splat_f32s(c);
    for (p, &x) in p.iter_mut().zip(x) {
        *p = simd.mul_add_e_f32s(*p, x, c);
    }
}

/// Distribution function and density of the standard normal distribution at `x`, the first within 2e-7.
#[inline(always)]
pub fn normal<S: Simd, const N: usize>(simd: S, x: [S::f32s; N]) -> ([S::f32s; N], [S::f32s; N]) {
    // erfc(z) = e^(-z^2) t q(t), t = 1 / (1 + 0.38 z); q interpolates at Chebyshev nodes (relative error 3e-8).
    let mut t = x;
    for t in &mut t {
        let z = simd.mul_f32s(simd.abs_f32s(*t), simd.splat_f32s(FRAC_1_SQRT_2));
        let below = simd.mul_add_e_f32s(z, simd.splat_f32s(0.38), simd.splat_f32s(1.0));
        *t = simd.div_f32s(simd.splat_f32s(1.0), below);
    }
    let mut q = [simd.splat_f32s(5.922_297_4e-2); N];
    for c in [
        -0.263_608_96,
        0.366_777_4,
        -0.164_989,
        0.232_591_47,
        0.137_507_04,
        0.204_209_91,
        0.213_875_65,
        0.214_413_57,
    ] {
        step(simd, &mut q, &t, c);
    }
    let mut gauss = x;
    for gauss in &mut gauss {
        *gauss = simd.mul_f32s(simd.mul_f32s(*gauss, *gauss), simd.splat_f32s(-0.5));
    }
    let mut gauss = exps(simd, gauss);
    for ((q, t), (gauss, x)) in q.iter_mut().zip(&t).zip(gauss.iter_mut().zip(&x)) {
        let tail = simd.mul_f32s(simd.mul_f32s(*gauss, simd.splat_f32s(0.5)), simd.mul_f32s(*t, *q));
        let positive = simd.greater_than_f32s(*x, simd.splat_f32s(0.0));
        *q = simd.select_f32s(positive, simd.sub_f32s(simd.splat_f32s(1.0), tail), tail);
        *gauss = simd.mul_f32s(*gauss, simd.splat_f32s(0.398_942_3));
    }
    (q, gauss)
}

/// x Phi(x): the exact GELU.
#[inline(always)]
pub fn gelu<S: Simd, const N: usize>(simd: S, x: [S::f32s; N]) -> [S::f32s; N] {
    let (cdf, _) = normal(simd, x);
    products(simd, x, cdf)
}

/// GELU and its derivative Phi(x) + x phi(x).
#[inline(always)]
pub fn gelu_grad<S: Simd, const N: usize>(simd: S, x: [S::f32s; N]) -> ([S::f32s; N], [S::f32s; N]) {
    let (mut cdf, mut density) = normal(simd, x);
    for ((cdf, density), &x) in cdf.iter_mut().zip(&mut density).zip(&x) {
        *density = simd.mul_add_e_f32s(x, *density, *cdf);
        *cdf = simd.mul_f32s(x, *cdf);
    }
    (cdf, density)
}

/// GELU with tanh in the place of erf, x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative.
#[inline(always)]
pub fn gelu_tanh_grad<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    const TWICE: f32 = 1.595_769; // 2 sqrt(2 / pi)
    let (one, square) = (simd.splat_f32s(1.0), simd.mul_f32s(x, x));
    let factor = simd.mul_add_e_f32s(square, simd.splat_f32s(-0.044_715 * TWICE), simd.splat_f32s(-TWICE));
    let tail = exp(simd, simd.mul_f32s(x, factor)); // e^-2u
    let share = simd.div_f32s(one, simd.add_f32s(one, tail));
    let rest = simd.mul_f32s(tail, share); // 1 - share
    let slope = simd.mul_add_e_f32s(square, simd.splat_f32s(3.0 * 0.044_715 * TWICE), simd.splat_f32s(TWICE));
    let bend = simd.mul_f32s(simd.mul_f32s(x, slope), simd.mul_f32s(share, rest));
    // far out the product would be infinity times 0
    let flat = simd.greater_than_f32s(square, simd.splat_f32s(100.0));
    (simd.mul_f32s(x, share), simd.add_f32s(share, simd.select_f32s(flat, simd.splat_f32s(0.0), bend)))
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + u), u = e^-|x|, relative to its own size within a few units in the last place.
#[inline(always)]
pub fn softplus<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let u = exp(simd, simd.neg_f32s(simd.abs_f32s(x)));
    // ln(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3, by its series in s^2
    let s = simd.div_f32s(u, simd.add_f32s(u, simd.splat_f32s(2.0)));
    let square = simd.mul_f32s(s, s);
    let mut series = simd.splat_f32s(1.0 / 15.0);
    for c in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        series = simd.mul_add_e_f32s(series, square, simd.splat_f32s(c));
    }
    let log = simd.mul_f32s(simd.add_f32s(s, s), series);
    simd.add_f32s(simd.max_f32s(x, simd.splat_f32s(0.0)), log)
}

/// y_i = f(x_i).
#[inline(always)]
pub fn map<S: Simd>(simd: S, x: &[f32], y: &mut [f32], f: impl Fn(S::f32s) -> S::f32s) {
    let (x, x_tail) = S::as_simd_f32s(x);
    let (y, y_tail) = S::as_mut_simd_f32s(y);
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f(x);
    }
    if !y_tail.is_empty() {
        simd.partial_store_f32s(y_tail, f(simd.partial_load_f32s(x_tail)));
    }
}

/// y_i = f(y_i).
#[inline(always)]
pub fn map_in_place<S: Simd>(simd: S, y: &mut [f32], f: impl Fn(S::f32s) -> S::f32s) {
    let (y, tail) = S::as_mut_simd_f32s(y);
    for y in y {
        *y = f(*y);
    }
    if !tail.is_empty() {
        let last = f(simd.partial_load_f32s(tail));
        simd.partial_store_f32s(tail, last);
    }
}

/// y_i = f(x_i, y_i).
#[inline(always)]
pub fn update<S: Simd>(simd: S, x: &[f32], y: &mut [f32], f: impl Fn(S::f32s, S::f32s) -> S::f32s) {
    let (x, x_tail) = S::as_simd_f32s(x);
    let (y, y_tail) = S::as_mut_simd_f32s(y);
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f(x, *y);
    }
    if !y_tail.is_empty() {
        let last = f(simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail));
        simd.partial_store_f32s(y_tail, last);
    }
}

/// y += a x.
#[inline(always)]
pub fn axpy<S: Simd>(simd: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = simd.splat_f32s(a);
    update(
        simd,
        x,
        y,
        #[inline(always)]
        |x, y| simd.mul_add_e_f32s(a, x, y),
    );
}

/// y += x.
#[inline(always)]
pub fn add<S: Simd>(simd: S, x: &[f32], y: &mut [f32]) {
    update(
        simd,
        x,
        y,
        #[inline(always)]
        |x, y| simd.add_f32s(x, y),
    );
}

/// y *= a.
#[inline(always)]
pub fn scale<S: Simd>(simd: S, a: f32, y: &mut [f32]) {
    let a = simd.splat_f32s(a);
    map_in_place(
        simd,
        y,
        #[inline(always)]
        |y| simd.mul_f32s(a, y),
    );
}

/// Folds `x` with four accumulators: `step(accumulator, x_i)`, then `join` in a fixed order. `rest` stands in
/// for the missing elements of the last vector.
#[inline(always)]
fn fold<S: Simd>(
    simd: S,
    x: &[f32],
    start: f32,
    rest: f32,
    step: impl Fn(S, S::f32s, S::f32s) -> S::f32s,
    join: impl Fn(S, S::f32s, S::f32s) -> S::f32s,
) -> S::f32s {
    let (body, tail) = S::as_simd_f32s(x);
    let mut sums = [simd.splat_f32s(start); LANES];
    let mut fours = body.chunks_exact(LANES);
    for four in &mut fours {
        for (sum, &x) in sums.iter_mut().zip(four) {
            *sum = step(simd, *sum, x);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(fours.remainder()) {
        *sum = step(simd, *sum, x);
    }
    if !tail.is_empty() {
        let mut last = simd.splat_f32s(rest);
        bytemuck::cast_slice_mut::<S::f32s, f32>(std::slice::from_mut(&mut last))[..tail.len()]
            .copy_from_slice(tail);
        sums[LANES - 1] = step(simd, sums[LANES - 1], last);
    }
    join(simd, join(simd, sums[0], sums[1]), join(simd, sums[2], sums[3]))
}

/// Sum of `x`.
#[inline(always)]
pub fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    simd.reduce_sum_f32s(fold(simd, x, 0.0, 0.0, S::add_f32s, S::add_f32s))
}

/// Sum of f(x_i); f(0) must be 0.
#[inline(always)]
pub fn sum_map<S: Simd>(simd: S, x: &[f32], f: impl Fn(S::f32s) -> S::f32s) -> f32 {
    simd.reduce_sum_f32s(fold(
        simd,
        x,
        0.0,
        0.0,
        #[inline(always)]
        |simd, sum, x| simd.add_f32s(sum, f(x)),
        S::add_f32s,
    ))
}

/// Sum of (x_i - centre)^2.
#[inline(always)]
pub fn sum_squares_around<S: Simd>(simd: S, x: &[f32], centre: f32) -> f32 {
    let around = simd.splat_f32s(centre);
    simd.reduce_sum_f32s(fold(
        simd,
        x,
        0.0,
        centre,
        #[inline(always)]
        |simd, sum, x| {
            let distance = simd.sub_f32s(x, around);
            simd.mul_add_e_f32s(distance, distance, sum)
        },
        S::add_f32s,
    ))
}

/// Largest element; negative infinity if there is none.
#[inline(always)]
pub fn max<S: Simd>(simd: S, x: &[f32]) -> f32 {
    simd.reduce_max_f32s(fold(simd, x, f32::NEG_INFINITY, f32::NEG_INFINITY, S::max_f32s, S::max_f32s))
}

/// Scalar product; both slices have the same length.
#[inline(always)]
pub fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let (x, x_tail) = S::as_simd_f32s(x);
    let (y, y_tail) = S::as_simd_f32s(y);
    let mut sums = [simd.splat_f32s(0.0); LANES];
    let (mut xs, mut ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    for (x, y) in (&mut xs).zip(&mut ys) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum = simd.mul_add_e_f32s(x, y, *sum);
        }
    }
    for ((sum, &x), &y) in sums.iter_mut().zip(xs.remainder()).zip(ys.remainder()) {
        *sum = simd.mul_add_e_f32s(x, y, *sum);
    }
    if !x_tail.is_empty() {
        let (x, y) = (simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail));
        sums[LANES - 1] = simd.mul_add_e_f32s(x, y, sums[LANES - 1]);
    }
    let pairs = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
    simd.reduce_sum_f32s(pairs)
}

/// y_i = e^(y_i - shift).
#[inline(always)]
pub fn exp_in_place<S: Simd>(simd: S, shift: f32, y: &mut [f32]) {
    let shift = simd.splat_f32s(shift);
    let (y, tail) = S::as_mut_simd_f32s(y);
    for y in y {
        *y = exp(simd, simd.sub_f32s(*y, shift));
    }
    if !tail.is_empty() {
        let last = exp(simd, simd.sub_f32s(simd.partial_load_f32s(tail), shift));
        simd.partial_store_f32s(tail, last);
    }
}

/// y_i = e^(x_i - shift); returns the sum of y.
#[inline(always)]
pub fn exp_sum<S: Simd>(simd: S, shift: f32, x: &[f32], y: &mut [f32]) -> f32 {
    let shift = simd.splat_f32s(shift);
    let (x, x_tail) = S::as_simd_f32s(x);
    let (y, y_tail) = S::as_mut_simd_f32s(y);
    let mut total = simd.splat_f32s(0.0);
    for (y, &x) in y.iter_mut().zip(x) {
        *y = exp(simd, simd.sub_f32s(x, shift));
        total = simd.add_f32s(total, *y);
    }
    let mut sum = simd.reduce_sum_f32s(total);
    if !y_tail.is_empty() {
        let last = exp(simd, simd.sub_f32s(simd.partial_load_f32s(x_tail), shift));
        simd.partial_store_f32s(y_tail, last);
        for y in y_tail {
            sum += *y;
        }
    }
    sum
}

#[cfg(test)]
mod tests;
