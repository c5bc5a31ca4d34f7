//! The feed-forward half in bf16, on processors that multiply it: every factor is packed where it is computed, a panel of hidden
//! columns at a time, so that the hidden layer is never whole in f32.

use super::Ffn;
use crate::cpu::bf16::{self, Lines, PANEL, Panels, lines_len, lines_room, pack_left, pairs};
use crate::cpu::compact::Elements;
use crate::cpu::dense::{self, WeightGradient};
use crate::cpu::matrix::Mat;
use crate::cpu::par::{self, Chunks};
use crate::cpu::rows;

/// Memory for floats as places for pairs.
fn as_pairs(memory: &mut [f32]) -> &mut [u32] {
    bytemuck::cast_slice_mut(memory)
}

/// Panels of hidden columns: number, first column, width.
fn panels(f: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..f).step_by(PANEL).enumerate().map(move |(index, first)| (index, first, PANEL.min(f - first)))
}

impl Ffn {
    /// Working memory of a thread for a chunk: rows of `x` if they wait, rows of the model's width as they are and (scaled) once
    /// more, the same packed, packed rows of the hidden width, and panels of hidden columns.
    fn places(&self, rows: usize, x: Elements) -> [usize; 8] {
        let (d, f) = (self.width, self.hidden);
        let scaled = if self.scales.is_some() { rows * d } else { 0 };
        let tile = rows * PANEL.min(f);
        [x.room(rows * d), rows * d, scaled, rows * pairs(d), rows * pairs(f), tile, tile, tile]
    }

    fn scratch(&self, size: usize, x: Elements) -> par::Scratch {
        par::scratch(self.places(size, x).iter().sum())
    }

    /// Room of what is kept of a chunk of `rows`: the input of the GELU as bf16, later the gradient of x.
    fn room(&self, rows: usize) -> usize {
        (rows * self.hidden).div_ceil(2).max(rows * self.width)
    }

    /// The same of `rows` in chunks of `size`.
    fn kept(&self, rows: usize, size: usize) -> usize {
        rows / size * self.room(size) + self.room(rows % size)
    }

    /// As [`Ffn::rows`]. Kept is, chunk after chunk and in each panel after panel, the input of the GELU as bf16.
    pub(super) fn rows_packed(&self, x: &[f32], flat: &[f32], keep: bool) -> (Vec<f32>, Vec<f32>) {
        let (d, f) = (self.width, self.hidden);
        let p = self.parameters(flat);
        let turned = |w, out, inp| Panels::new(Mat::new(w, out, inp).t());
        let (w1, w2) = (turned(p.w1, f, d), turned(p.w2, d, f));
        let count = x.len() / d.max(1);
        let size = dense::chunks(count, f).size;
        let saved = if keep { (self.kept(count, size), self.room(size)) } else { (0, 0) };
        par::build_two(
            (x.len(), size * d),
            saved,
            || self.scratch(size, Elements::F32(x)),
            |scratch, index, y, saved| {
                let rows = y.len() / d;
                let x = &x[index * size * d..][..y.len()];
                let places = self.places(rows, Elements::F32(x));
                let [_, normal, _, left, active, tile, ..] = par::carve(scratch, places);
                let (left, active) = (as_pairs(left), as_pairs(active));
                rows::layer_norm(x, p.norm.0, p.norm.1, self.eps, normal);
                pack_left(normal, d, left, pairs(d));
                for (panel, first, width) in panels(f) {
                    let (tile, bias) = (&mut tile[..rows * width], &p.b1[first..first + width]);
                    w1.multiply_packed(left, panel..panel + 1, (tile, width), false);
                    if keep {
                        bf16::store(tile, bias, &mut bytemuck::cast_slice_mut(saved)[rows * first..]);
                    }
                    rows::bias_gelu_in_place(tile, bias);
                    pack_left(tile, width, &mut active[first / 2..], pairs(f));
                }
                let fc2 = |y: &mut [f32]| w2.multiply_packed(active, w2.all(), (y, d), true);
                self.join((x, normal), p.b2, y, (index * size, count), fc2);
            },
        )
    }

    /// As [`Ffn::gradients`]; the gradient of x takes the memory of what was `saved`.
    pub(super) fn gradients_packed(
        &self,
        x: Elements,
        flat: &[f32],
        dy: &[f32],
        mut saved: Vec<f32>,
    ) -> (Vec<f32>, Vec<f32>) {
        let (d, f) = (self.width, self.hidden);
        let count = x.count() / d.max(1);
        let chunks = dense::chunks(count, f);
        let blocks = chunks.blocks(2 * f); // both factors of a weight's gradient are kept
        let parts = 3 * d + f;
        let mut sums = vec![0.0; chunks.count() * parts];
        let p = self.parameters(flat);
        let (w1, w2) = (Panels::new(Mat::new(p.w1, f, d)), Panels::new(Mat::new(p.w2, d, f)));
        let (mut dw1, mut dw2) = (WeightGradient::new(f, d), WeightGradient::new(d, f));
        // what is summed over rows: LN(x), dy, the output of the GELU, the gradient of its input
        let widths = [d, d, f, f];
        let most = Chunks::of(blocks.size, chunks.size);
        let mut lines = widths.map(|width| par::scratch(lines_len(most, width)));
        let step = Step { op: self, norm: p.norm, w1: &w1, w2: &w2, x, dy, chunks };
        let mut rest = saved.as_mut_slice();
        for block in (0..blocks.count()).map(|index| blocks.range(index)) {
            let (first, here) = (block.start / chunks.size, Chunks::of(block.len(), chunks.size));
            let (saved, others) = rest.split_at_mut(self.kept(block.len(), chunks.size));
            rest = others;
            let sums = &mut sums[first * parts..][..here.count() * parts];
            let mut index = 0..;
            let places = lines.each_mut().map(|lines| {
                let width = index.next().map_or(0, |index: usize| widths[index]);
                (&mut lines[..lines_len(here, width)], lines_room(chunks.size, width))
            });
            step.run((first, here), saved, places, sums);
            let [normal, dy, active, hidden] = &lines;
            rayon::join(|| dw1.add_packed(hidden, normal, here), || dw2.add_packed(dy, active, here));
        }
        drop(lines); // before the gradient of the weights is put together
        for chunk in 0..chunks.count() {
            let (from, rows) = (chunk * self.room(chunks.size), chunks.range(chunk));
            saved.copy_within(from..from + rows.len() * d, rows.start * d);
        }
        saved.truncate(count * d);
        saved.shrink_to_fit();
        (saved, self.assemble(flat.len(), &par::sum_parts(&sums, parts), &dw1, &dw2))
    }
}

/// The row-wise part of backward.
struct Step<'a> {
    op: &'a Ffn,
    norm: (&'a [f32], &'a [f32]),
    w1: &'a Panels,
    w2: &'a Panels,
    x: Elements<'a>,
    dy: &'a [f32],
    chunks: Chunks,
}

impl Step<'_> {
    /// Does the block of chunks `here`, which begins with chunk `first`: fills its places (with the lengths of their chunks), and
    /// adds to `sums`. The gradient of the rows of a chunk comes to stand where its `saved` begins.
    fn run(
        &self,
        (first, here): (usize, Chunks),
        saved: &mut [f32],
        [normal, dy, active, hidden]: [(&mut [f32], usize); 4],
        sums: &mut [f32],
    ) {
        let (op, size) = (self.op, here.size);
        let (d, f) = (op.width, op.hidden);
        par::each_beside(
            [(saved, op.room(size)), normal, dy, active, hidden, (sums, 3 * d + f)],
            || op.scratch(size, self.x),
            |scratch, index, [saved, normal, dy, active, hidden, sums]| {
                let lines = [normal, dy, active, hidden].map(as_pairs);
                self.chunk(scratch, first + index, saved, lines, sums);
            },
        );
    }

    fn chunk(
        &self,
        scratch: &mut [f32],
        chunk: usize,
        saved: &mut [f32],
        [to_normal, to_dy, to_active, to_hidden]: [&mut [u32]; 4],
        sums: &mut [f32],
    ) {
        let (op, range) = (self.op, self.chunks.range(chunk));
        let (d, f, rows) = (op.width, op.hidden, range.len());
        let here = range.start * d..range.end * d;
        let places = op.places(rows, self.x);
        let [room, normal, scaled, left, gradient, mut tiles @ ..] = par::carve(scratch, places);
        let (x, whole) = (self.x.read(here.clone(), room), &self.dy[here]);
        let (norm_sums, rest) = sums.split_at_mut(2 * d);
        let (db2, db1) = rest.split_at_mut(d);
        let (left, gradient) = (as_pairs(left), as_pairs(gradient));
        let dy = op.scaled(whole, (range.start, self.chunks.len), scaled);
        rows::add_column_sums(dy, db2);
        Lines::pack(Mat::new(dy, rows, d), 0, to_dy);
        pack_left(dy, d, left, pairs(d));
        rows::layer_norm(x, self.norm.0, self.norm.1, op.eps, normal);
        Lines::pack(Mat::new(normal, rows, d), 0, to_normal);

        let kept: &[u16] = bytemuck::cast_slice(saved);
        for (panel, first, width) in panels(f) {
            let [active, dactive, hidden] = tiles.each_mut().map(|tile| &mut tile[..rows * width]);
            self.w2.multiply_packed(left, panel..panel + 1, (dactive, width), false);
            bf16::load(&kept[rows * first..][..rows * width], hidden);
            rows::gelu_and_gradient(hidden, dactive, active);
            rows::add_column_sums(hidden, &mut db1[first..first + width]);
            Lines::pack(Mat::new(active, rows, width), first, to_active);
            Lines::pack(Mat::new(hidden, rows, width), first, to_hidden);
            pack_left(hidden, width, &mut gradient[first / 2..], pairs(f));
        }
        let dnormal = normal;
        self.w1.multiply_packed(gradient, self.w1.all(), (dnormal, d), false);
        let dx = &mut saved[..rows * d];
        dx.fill(0.0);
        op.through_norm((x, whole), self.norm.0, dnormal, dx, norm_sums);
    }
}
