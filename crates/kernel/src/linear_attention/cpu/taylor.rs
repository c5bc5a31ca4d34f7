//! Features of the second-order Taylor polynomial of exp on tiles (Based).

use super::map::{At, Map, Mask, Peak, Side, Tile};
use super::rows::{Rows, RowsMut};
use crate::cpu::math;
use crate::linear_attention::features::{TaylorFactors, taylor_width};

/// [1, x / d^(1/4), x_i^2 / sqrt(2 d) and x_i x_j / sqrt(d) for j > i, by i].
pub(super) struct TaylorMap {
    pub(super) head_dim: usize,
    pub(super) mask: Mask,
}

impl Map for TaylorMap {
    fn width(&self) -> usize {
        taylor_width(self.head_dim)
    }

    fn queries(&self, _: At, x: Rows, f: &mut [f32], _: &mut Vec<f32>) {
        expand(x, TaylorFactors::new(self.head_dim), f);
    }

    fn keys(&self, at: At, x: Rows, f: &mut [f32], _: &mut Vec<f32>, _: &mut Peak, _: bool) {
        expand(x, TaylorFactors::new(self.head_dim), f);
        let width = self.width();
        self.mask.clear_hidden(at, RowsMut { data: f, stride: width, count: x.count, width });
    }

    fn back(&self, side: Side, at: At, tile: Tile, dx: RowsMut, _: &mut [f32]) -> f64 {
        let mut dx = dx;
        contract(tile.x, TaylorFactors::new(self.head_dim), tile.df, dx.reborrow());
        if side == Side::Key {
            self.mask.clear_hidden(at, dx);
        }
        0.0
    }
}

crate::simd_fn! {
    /// The features of every row.
    fn expand<S>(simd, x: Rows<'a>, factors: TaylorFactors, f: &'a mut [f32]) {
        let width = x.width;
        let TaylorFactors { linear, square, product } = factors.map(|factor| factor as f32);
        for (row, f) in f.chunks_exact_mut(taylor_width(width)).take(x.count).enumerate() {
            let x = x.row(row);
            let (one, rest) = f.split_at_mut(1);
            one[0] = 1.0;
            let (first, mut rest) = rest.split_at_mut(width);
            first.copy_from_slice(x);
            math::scale(simd, linear, first);
            for i in 0..width {
                let (run, others) = std::mem::take(&mut rest).split_at_mut(width - i);
                let factor = simd.splat_f32s(product * x[i]);
                math::map(
                    simd,
                    &x[i..],
                    run,
                    #[inline(always)]
                    |x| simd.mul_f32s(factor, x),
                );
                run[0] = square * x[i] * x[i];
                rest = others;
            }
        }
    }
}

crate::simd_fn! {
    /// The gradient of every row from that of its features, which is overwritten.
    fn contract<S>(simd, x: Rows<'a>, factors: TaylorFactors, df: &'a mut [f32], dx: RowsMut<'a>) {
        let (width, mut dx) = (x.width, dx);
        let TaylorFactors { linear, square, product } = factors.map(|factor| factor as f32);
        for (row, df) in df.chunks_exact_mut(taylor_width(width)).take(x.count).enumerate() {
            let (x, dx) = (x.row(row), dx.row(row));
            let (first, mut rest) = df[1..].split_at_mut(width);
            dx.copy_from_slice(first);
            math::scale(simd, linear, dx);
            for i in 0..width {
                let (run, others) = std::mem::take(&mut rest).split_at_mut(width - i);
                run[0] *= square / product;
                dx[i] += product * math::dot(simd, &x[i..], run);
                math::axpy(simd, product * x[i], run, &mut dx[i..]);
                rest = others;
            }
        }
    }
}
