//! Element-wise pieces between the products of recent mixers, each in one pass forward and one backward.
//!
//! ```text
//! add:            x + y
//! skip:           y + c x, or silu(y + c x), c per channel
//! weigh_heads:    s x, s per head and position
//! silu_affine:    silu(x) gamma + beta, gamma and beta per channel
//! gated_residual: r + sigmoid(u) (silu(h + y) - r)
//! ```

use candle_core::{CpuStorage, D, DType, Layout, Result, Shape, Tensor, bail};

use super::activation::silu;
use super::cpu::elements::dot;
use super::cpu::math::{load, store};
use super::cpu::rows::{self, sigmoid, silu_and_slope};
use super::cpu::{self, jobs, par, par::Chunks};
use super::op::{self, FusedOp, SavedOutput};
use super::{simd_fn, tape};

fn fused(x: &Tensor) -> bool {
    super::fused_cpu(x.device()) && x.dtype() == DType::F32
}

/// The result of `op` for operands in one piece each.
fn apply<const N: usize>(operands: [&Tensor; N], op: Gating) -> Result<Tensor> {
    let operands = operands.map(tape::contiguous).into_iter().collect::<Result<Vec<_>>>()?;
    tape::apply(&operands.iter().collect::<Vec<_>>(), op)
}

/// x + y, both of one shape.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if fused(x) && x.dims() == y.dims() {
        return apply([x, y], Gating::Add);
    }
    x + y
}

/// y + c x over rows of `y` and `x` `[.., e]` with `c` `[e]`; with `activate` its SiLU.
pub fn skip(y: &Tensor, x: &Tensor, c: &Tensor, activate: bool) -> Result<Tensor> {
    if y.dims() != x.dims() || c.dims() != [x.dim(D::Minus1)?] {
        bail!("{:?} and factors {:?} cannot be added to {:?}", x.dims(), c.dims(), y.dims());
    }
    if fused(y) {
        return apply([y, x, c], Gating::Skip { activate });
    }
    let sum = (y + x.broadcast_mul(c)?)?;
    if activate { silu(&sum) } else { Ok(sum) }
}

/// Rows `x` [b, n, h d] whose heads are weighed with `s` [b, n, h].
pub fn weigh_heads(x: &Tensor, s: &Tensor) -> Result<Tensor> {
    let ((b, n, width), (_, _, heads)) = (x.dims3()?, s.dims3()?);
    if s.dims() != [b, n, heads] || !width.is_multiple_of(heads.max(1)) {
        bail!("weights {:?} do not fit rows {:?}", s.dims(), x.dims());
    }
    if fused(x) {
        return apply([x, s], Gating::WeighHeads);
    }
    let x = x.reshape((b, n, heads, width / heads.max(1)))?;
    x.broadcast_mul(&s.unsqueeze(3)?)?.flatten_from(2)
}

/// silu(x) gamma + beta over rows of `x` `[.., e]`, `gamma` and `beta` `[e]`.
pub fn silu_affine(x: &Tensor, gamma: &Tensor, beta: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if gamma.dims() != [width] || beta.dims() != [width] {
        bail!("factors {:?} and biases {:?} for rows of {width}", gamma.dims(), beta.dims());
    }
    if fused(x) {
        return apply([x, gamma, beta], Gating::SiluAffine);
    }
    silu(x)?.broadcast_mul(gamma)?.broadcast_add(beta)
}

/// r + sigmoid(u) (silu(h + y) - r), all of one shape (Ma et al. 2023, equation 15).
pub fn gated_residual(r: &Tensor, u: &Tensor, h: &Tensor, y: &Tensor) -> Result<Tensor> {
    if [u, h, y].iter().any(|x| x.dims() != r.dims()) {
        let [r, u, h, y] = [r, u, h, y].map(Tensor::dims);
        bail!("a residual {r:?}, its gate {u:?} and {h:?} with {y:?} have different shapes");
    }
    if fused(r) {
        return apply([r, u, h, y], Gating::GatedResidual);
    }
    let open = (u * 0.5)?.tanh()?.affine(0.5, 0.5)?; // the sigmoid: 1 / (1 + exp(-u)) has no gradient where exp overflows
    r + (open * (silu(&(h + y)?)? - r)?)?
}

#[derive(Clone, Copy)]
enum Gating {
    Add,
    Skip { activate: bool },
    WeighHeads,
    SiluAffine,
    GatedResidual,
}

impl Gating {
    /// The result for rows of all operands, those per channel whole.
    fn rows(self, operands: &[&[f32]], width: usize, out: &mut [f32]) {
        match (self, operands) {
            (Self::Add, [x, y]) => {
                out.copy_from_slice(x);
                rows::add(y, out);
            }
            (Self::Skip { activate }, [y, x, c]) => {
                let rows = y.chunks_exact(width).zip(x.chunks_exact(width));
                rows.zip(out.chunks_exact_mut(width))
                    .for_each(|((y, x), out)| skip_row(y, x, c, activate, out));
            }
            (Self::WeighHeads, [x, s]) => {
                let head = x.len() / s.len().max(1);
                let heads = x.chunks_exact(head).zip(*s);
                heads.zip(out.chunks_exact_mut(head)).for_each(|((x, s), out)| rows::axpy(*s, x, out));
            }
            (Self::SiluAffine, [x, gamma, beta]) => {
                let rows = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
                rows.for_each(|(x, out)| silu_affine_row(x, gamma, beta, out));
            }
            (Self::GatedResidual, [r, u, h, y]) => gated_rows(r, u, h, y, out),
            _ => {}
        }
    }

    /// Gradients of rows: those of two operands as large as the result, and of one that is small.
    fn rows_back(
        self,
        operands: &[&[f32]],
        dy: &[f32],
        width: usize,
        [first, second, small]: [&mut [f32]; 3],
    ) {
        match (self, operands) {
            (Self::Skip { activate }, [y, x, c]) => {
                for at in (0..dy.len()).step_by(width) {
                    let row = at..at + width;
                    let operands = (&y[row.clone()], &x[row.clone()], *c);
                    let dy = &dy[row.clone()];
                    skip_row_back(operands, dy, activate, &mut first[row.clone()], &mut second[row], small);
                }
            }
            (Self::WeighHeads, [x, s]) => {
                let head = x.len() / s.len().max(1);
                for (index, (s, ds)) in s.iter().zip(small).enumerate() {
                    let here = index * head..(index + 1) * head;
                    rows::axpy(*s, &dy[here.clone()], &mut first[here.clone()]);
                    *ds = dot(&dy[here.clone()], &x[here]);
                }
            }
            (Self::SiluAffine, [x, gamma, _]) => {
                let (dgamma, dbeta) = small.split_at_mut(width);
                for at in (0..dy.len()).step_by(width) {
                    let (row, dx) = (at..at + width, &mut first[at..at + width]);
                    silu_affine_row_back(&x[row.clone()], gamma, &dy[row], dx, dgamma, dbeta);
                }
            }
            _ => {}
        }
    }

    /// Of each operand, how it is cut beside `chunk` elements of rows of `width`: elements per piece, 0 where whole.
    fn pieces(self, lens: &[usize], total: usize, chunk: usize) -> Vec<usize> {
        lens.iter()
            .enumerate()
            .map(|(index, len)| match (self, index) {
                (Self::Skip { .. }, 2) | (Self::SiluAffine, 1 | 2) => 0,
                _ => len * chunk / total.max(1),
            })
            .collect()
    }
}

/// Piece `index` of each operand.
fn cut<'a>(operands: &[&'a [f32]], pieces: &[usize], index: usize) -> Vec<&'a [f32]> {
    let piece = |(x, &size): (&&'a [f32], &usize)| match size {
        0 => *x,
        _ => &x[index * size..x.len().min((index + 1) * size)],
    };
    operands.iter().zip(pieces).map(piece).collect()
}

impl FusedOp for Gating {
    fn name(&self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Skip { .. } => "skip",
            Self::WeighHeads => "weigh-heads",
            Self::SiluAffine => "silu-affine",
            Self::GatedResidual => "gated-residual",
        }
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let shape = operands[0].1.shape();
        let (count, width) = cpu::matrix_dims(shape.dims())?;
        let data =
            operands.iter().map(|(data, layout)| cpu::slice(data, layout)).collect::<Result<Vec<_>>>()?;
        let chunk = Chunks::rows(count, width).size * width;
        let pieces = self.pieces(&data.iter().map(|x| x.len()).collect::<Vec<_>>(), count * width, chunk);
        let out = par::build(count * width, chunk, |index, out| {
            self.rows(&cut(&data, &pieces, index), width, out);
        });
        Ok((out, shape.clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        match (self, operands) {
            (Self::Add, _) => Ok(vec![Some(grad.clone()), Some(grad.clone())]),
            (Self::GatedResidual, _) => gated_back(op::operands(operands)?, grad),
            (_, &[a, b, c]) => {
                cpu::with_slices([a, b, c, grad], |[x, y, z, dy]| self.back(operands, &[x, y, z], dy))
            }
            (_, &[a, b]) => cpu::with_slices([a, b, grad], |[x, y, dy]| self.back(operands, &[x, y], dy)),
            _ => bail!("{} operands were given to {}", operands.len(), self.name()),
        }
    }
}

impl Gating {
    fn back(self, operands: &[&Tensor], data: &[&[f32]], dy: &[f32]) -> Result<Vec<Option<Tensor>>> {
        let (count, width) = cpu::matrix_dims(operands[0].dims())?;
        let chunks = Chunks::rows(count, width);
        let chunk = chunks.size * width;
        let pieces = self.pieces(&data.iter().map(|x| x.len()).collect::<Vec<_>>(), dy.len(), chunk);
        let large: Vec<usize> = (0..chunks.count()).map(|index| chunks.range(index).len() * width).collect();
        let none = vec![0; large.len()];
        let small: Vec<usize> = match self {
            Self::WeighHeads => {
                let heads = data[1].len() / count.max(1);
                (0..chunks.count()).map(|index| chunks.range(index).len() * heads).collect()
            }
            Self::SiluAffine => vec![2 * width; large.len()],
            _ => vec![width; large.len()],
        };
        let second = if matches!(self, Self::Skip { .. }) { &large } else { &none };
        let [first, second, parts] = jobs::build_jobs(
            [&large, second, &small],
            || (),
            |(), index, [first, second, small]| {
                let dy = &dy[index * chunk..dy.len().min((index + 1) * chunk)];
                self.rows_back(&cut(data, &pieces, index), dy, width, [first, second, small]);
            },
        );
        let first = cpu::gradient(operands[0], first)?;
        Ok(match self {
            Self::WeighHeads => vec![first, cpu::gradient(operands[1], parts)?],
            Self::SiluAffine => {
                let mut sums = par::sum_parts(&parts, 2 * width);
                let dbeta = sums.split_off(width);
                vec![first, cpu::gradient(operands[1], sums)?, cpu::gradient(operands[2], dbeta)?]
            }
            _ => {
                let sums = par::sum_parts(&parts, width);
                vec![first, cpu::gradient(operands[1], second)?, cpu::gradient(operands[2], sums)?]
            }
        })
    }
}

/// Gradients of r, u, h and y; those of h and y are one tensor.
fn gated_back(operands: [&Tensor; 4], grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
    let [r, u, h, y] = operands;
    let (count, width) = cpu::matrix_dims(r.dims())?;
    let chunks = Chunks::rows(count, width);
    let lens: Vec<usize> = (0..chunks.count()).map(|index| chunks.range(index).len() * width).collect();
    let [dr, du, dsum] = cpu::with_slices([r, u, h, y, grad], |operands| {
        Ok(jobs::build_jobs(
            [&lens, &lens, &lens],
            || (),
            |(), index, [dr, du, dsum]| {
                let at = index * chunks.size * width;
                let [r, u, h, y, dy] = operands.map(|x| &x[at..at + dr.len()]);
                gated_rows_back((r, u), (h, y), dy, dr, du, dsum);
            },
        ))
    })?;
    let dsum = cpu::gradient(h, dsum)?;
    Ok(vec![cpu::gradient(r, dr)?, cpu::gradient(u, du)?, dsum.clone(), dsum])
}

simd_fn! {
    fn skip_row<S>(simd, y: &'a [f32], x: &'a [f32], c: &'a [f32], activate: bool, out: &'a mut [f32]) {
        for at in (0..out.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, c, at), load(simd, x, at), load(simd, y, at));
            let sum = if activate { silu_and_slope(simd, sum).0 } else { sum };
            store(simd, out, at, sum);
        }
    }
}

simd_fn! {
    /// `operands`: y, x and c; dc is added to.
    fn skip_row_back<S>(
        simd,
        operands: (&'a [f32], &'a [f32], &'a [f32]),
        grad: &'a [f32],
        activate: bool,
        dy: &'a mut [f32],
        dx: &'a mut [f32],
        dc: &'a mut [f32],
    ) {
        let (y, x, c) = operands;
        for at in (0..grad.len()).step_by(S::F32_LANES) {
            let (x, c, mut grad) = (load(simd, x, at), load(simd, c, at), load(simd, grad, at));
            if activate {
                let sum = simd.mul_add_e_f32s(c, x, load(simd, y, at));
                grad = simd.mul_f32s(grad, silu_and_slope(simd, sum).1);
            }
            store(simd, dy, at, grad);
            store(simd, dx, at, simd.mul_f32s(grad, c));
            store(simd, dc, at, simd.mul_add_e_f32s(grad, x, load(simd, dc, at)));
        }
    }
}

simd_fn! {
    fn silu_affine_row<S>(simd, x: &'a [f32], gamma: &'a [f32], beta: &'a [f32], out: &'a mut [f32]) {
        for at in (0..out.len()).step_by(S::F32_LANES) {
            let (silu, _) = silu_and_slope(simd, load(simd, x, at));
            store(simd, out, at, simd.mul_add_e_f32s(silu, load(simd, gamma, at), load(simd, beta, at)));
        }
    }
}

simd_fn! {
    fn silu_affine_row_back<S>(
        simd,
        x: &'a [f32],
        gamma: &'a [f32],
        dy: &'a [f32],
        dx: &'a mut [f32],
        dgamma: &'a mut [f32],
        dbeta: &'a mut [f32],
    ) {
        for at in (0..dy.len()).step_by(S::F32_LANES) {
            let (silu, slope) = silu_and_slope(simd, load(simd, x, at));
            let dy = load(simd, dy, at);
            store(simd, dx, at, simd.mul_f32s(simd.mul_f32s(dy, load(simd, gamma, at)), slope));
            store(simd, dgamma, at, simd.mul_add_e_f32s(dy, silu, load(simd, dgamma, at)));
            store(simd, dbeta, at, simd.add_f32s(dy, load(simd, dbeta, at)));
        }
    }
}

simd_fn! {
    fn gated_rows<S>(
        simd, r: &'a [f32], u: &'a [f32], h: &'a [f32], y: &'a [f32], out: &'a mut [f32],
    ) {
        for at in (0..out.len()).step_by(S::F32_LANES) {
            let (r, open) = (load(simd, r, at), sigmoid(simd, load(simd, u, at)));
            let (new, _) = silu_and_slope(simd, simd.add_f32s(load(simd, h, at), load(simd, y, at)));
            store(simd, out, at, simd.mul_add_e_f32s(open, simd.sub_f32s(new, r), r));
        }
    }
}

simd_fn! {
    /// `dsum` is the gradient of h and of y.
    fn gated_rows_back<S>(
        simd,
        gated: (&'a [f32], &'a [f32]),
        summed: (&'a [f32], &'a [f32]),
        dy: &'a [f32],
        dr: &'a mut [f32],
        du: &'a mut [f32],
        dsum: &'a mut [f32],
    ) {
        let ((r, u), (h, y), one) = (gated, summed, simd.splat_f32s(1.0));
        for at in (0..dy.len()).step_by(S::F32_LANES) {
            let (r, open, dy) = (load(simd, r, at), sigmoid(simd, load(simd, u, at)), load(simd, dy, at));
            let (new, slope) = silu_and_slope(simd, simd.add_f32s(load(simd, h, at), load(simd, y, at)));
            let (closed, through) = (simd.sub_f32s(one, open), simd.mul_f32s(dy, open));
            store(simd, dr, at, simd.mul_f32s(dy, closed));
            let dopen = simd.mul_f32s(through, simd.sub_f32s(new, r));
            store(simd, du, at, simd.mul_f32s(dopen, closed));
            store(simd, dsum, at, simd.mul_f32s(through, slope));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for (b, n, heads, head) in [(1, 1, 1, 1), (2, 3, 2, 5), (1, 70, 3, 17), (2, 1100, 2, 8)] {
            let (rows, width) = ([b, n, heads * head], heads * head);
            let what = format!("{rows:?}");
            let channels = |name: &str| randn(name, &[width]);
            let inputs = [randn("y", &rows), randn("x", &rows), channels("c")];
            check(&format!("add {what}"), &inputs[..2], 2e-6, |x| add(&x[0], &x[1]));
            for activate in [false, true] {
                check(&format!("skip {what}"), &inputs, 2e-6, |x| skip(&x[0], &x[1], &x[2], activate));
            }
            let inputs = [randn("x", &rows), randn("s", &[b, n, heads])];
            check(&format!("weights {what}"), &inputs, 2e-6, |x| weigh_heads(&x[0], &x[1]));
            let inputs = [randn("x", &rows), channels("gamma"), channels("beta")];
            check(&format!("affine {what}"), &inputs, 2e-6, |x| silu_affine(&x[0], &x[1], &x[2]));
            let inputs = ["r", "u", "h", "y"].map(|name| randn(name, &rows));
            let gated = |x: &[Tensor]| gated_residual(&x[0], &x[1], &x[2], &x[3]);
            check(&format!("residual {what}"), &inputs, 2e-6, gated);
        }
    }

    #[test]
    fn misfits_are_errors() {
        let (x, wide) = (randn("x", &[1, 2, 4]), randn("wide", &[1, 2, 6]));
        let (c, s) = (randn("c", &[5]), randn("s", &[1, 2, 3]));
        assert!(add(&x, &wide).is_err());
        assert!(skip(&x, &wide, &c, false).is_err());
        assert!(skip(&x, &x, &c, false).is_err());
        assert!(weigh_heads(&x, &s).is_err());
        assert!(silu_affine(&x, &c, &c).is_err());
        assert!(gated_residual(&x, &x, &wide, &x).is_err());
    }
}
