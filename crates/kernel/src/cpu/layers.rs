//! Gradients of linear layers of the same rows, perhaps behind a LayerNorm, in one pass over the rows.

use super::compact::Elements;
use super::dense::{self, Panels, WeightGradient};
use super::matrix::Mat;
use super::par::{self, Chunks};
use super::rows;

/// Linear layers x W^T + b of the same x, [count, inp], with their outputs side by side.
pub struct Layers<'a> {
    /// Width of x.
    pub inp: usize,
    /// Weight, bias and epsilon of the LayerNorm that x goes through first.
    pub norm: Option<(&'a [f32], &'a [f32], f32)>,
    /// The weights, [out, inp] each.
    pub weights: Vec<&'a [f32]>,
    /// Whether the gradient of x is needed; it always is of a LayerNorm.
    pub needs_x: bool,
    /// Whether the sums of dy over rows, the gradients of the biases, are needed.
    pub needs_bias: bool,
}

impl Layers<'_> {
    /// Sum of the widths of the outputs.
    fn width(&self) -> usize {
        self.weights.iter().map(|weight| weight.len() / self.inp.max(1)).sum()
    }

    /// The gradient of x (empty if not needed) and sums over rows: the gradients of the norm's weight and bias, if there is one,
    /// and of all biases, if needed. Adds those of the weights, [width, inp], to `gradient`.
    pub fn gradients(&self, x: Elements, dy: &[f32], gradient: &mut WeightGradient) -> (Vec<f32>, Vec<f32>) {
        let (inp, width) = (self.inp, self.width());
        let count = x.count() / inp.max(1);
        let chunks = dense::chunks(count, inp + width);
        let packed = dense::is_packed();
        let blocks = match (&self.norm, packed) {
            (_, true) => chunks.blocks(inp + width),
            (Some(_), false) => chunks.blocks(inp),
            (None, false) if x.room(inp) > 0 => chunks.blocks(inp),
            (None, false) => Chunks::of(count, count),
        };
        let needs_x = self.needs_x || self.norm.is_some();
        let weights = self.weights.iter().filter(|_| needs_x);
        let panels: Vec<_> = weights.map(|w| Panels::new(w, w.len() / inp.max(1), inp)).collect();
        let step = Step { layers: self, panels: &panels, x, dy, chunks, width };
        let mut sums = vec![0.0; chunks.count() * step.parts()];
        let mut dx = Vec::with_capacity(if needs_x { x.count() } else { 0 });
        let mut kept = step.kept(Chunks::of(blocks.size, chunks.size)).map(par::scratch);
        for block in (0..blocks.count()).map(|index| blocks.range(index)) {
            let here = Chunks::of(block.len(), chunks.size);
            let first = block.start / chunks.size;
            let [x_len, dy_len] = step.kept(here);
            let [kept_x, kept_dy] = &mut kept;
            let (kept_x, kept_dy) = (&mut kept_x[..x_len], &mut kept_dy[..dy_len]);
            let sums = &mut sums[first * step.parts()..][..here.count() * step.parts()];
            step.run(&mut dx, (first, here), [&mut *kept_x, &mut *kept_dy], sums);
            if packed {
                gradient.add_packed(kept_dy, kept_x, here);
            } else {
                let rows = match x {
                    Elements::F32(x) if self.norm.is_none() => &x[block.start * inp..block.end * inp],
                    _ => &*kept_x,
                };
                let dy = Mat::new(&dy[block.start * width..], block.len(), width);
                gradient.add(dy, Mat::new(rows, block.len(), inp));
            }
        }
        (dx, par::sum_parts(&sums, step.parts()))
    }
}

/// The row-wise part.
struct Step<'a> {
    layers: &'a Layers<'a>,
    /// None if the gradient of x is not needed.
    panels: &'a [Panels],
    x: Elements<'a>,
    dy: &'a [f32],
    chunks: Chunks,
    width: usize,
}

impl Step<'_> {
    /// Sums per chunk.
    fn parts(&self) -> usize {
        let norm = if self.layers.norm.is_some() { 2 * self.layers.inp } else { 0 };
        norm + if self.layers.needs_bias { self.width } else { 0 }
    }

    /// Elements of x and of dy that are kept of `here` until the rows are summed over: packed both, in f32 only what the norm
    /// makes of x, or x if it waits.
    fn kept(&self, here: Chunks) -> [usize; 2] {
        let inp = self.layers.inp;
        match dense::is_packed() {
            true => [inp, self.width].map(|width| dense::lines_len(here, width)),
            false if self.layers.norm.is_some() => [here.len * inp, 0],
            false => [self.x.room(here.len * inp), 0],
        }
    }

    /// Working memory for rows of `len` elements: they, if they wait, what the norm makes of them, if that is packed, and the
    /// gradient of that.
    fn places(&self, len: usize) -> [usize; 3] {
        let norm = self.layers.norm.is_some();
        [self.x.room(len), if norm && dense::is_packed() { len } else { 0 }, if norm { len } else { 0 }]
    }

    /// Does the block of chunks `here`, which begins with chunk `first`: appends to `dx`, fills what is `kept` of x and dy, and
    /// adds to `sums`.
    fn run(
        &self,
        dx: &mut Vec<f32>,
        (first, here): (usize, Chunks),
        [x, dy]: [&mut [f32]; 2],
        sums: &mut [f32],
    ) {
        let (inp, size) = (self.layers.inp, here.size);
        let wide = if self.panels.is_empty() { 0 } else { inp };
        let [x_len, dy_len] = self.kept(Chunks::of(size, size));
        let places = [(x, x_len), (dy, dy_len), (sums, self.parts())];
        let scratch = || par::scratch(self.places(size * inp).iter().sum());
        par::extend_beside(
            dx,
            (here.len * wide, size * wide),
            places,
            scratch,
            |scratch, index, dx, kept| {
                self.chunk(scratch, first + index, dx, kept);
            },
        );
    }

    fn chunk(
        &self,
        scratch: &mut [f32],
        index: usize,
        dx: &mut [f32],
        [x_kept, dy_kept, sums]: [&mut [f32]; 3],
    ) {
        let (inp, width, range) = (self.layers.inp, self.width, self.chunks.range(index));
        let rows = range.len();
        let [room, normal, dnormal] = par::carve(scratch, self.places(rows * inp));
        let x = self.x.read(range.start * inp..range.end * inp, room);
        let dy = &self.dy[range.start * width..range.end * width];
        let (norm_sums, bias_sums) = sums.split_at_mut(if self.layers.norm.is_some() { 2 * inp } else { 0 });
        rows::add_column_sums(dy, bias_sums);
        let packed = dense::is_packed();
        if packed {
            dense::pack_lines(Mat::new(dy, rows, width), dy_kept);
        }
        let Some((weight, bias, eps)) = self.layers.norm else {
            if packed {
                dense::pack_lines(Mat::new(x, rows, inp), x_kept);
            } else if !x_kept.is_empty() {
                x_kept.copy_from_slice(x);
            }
            return self.input_gradient(dy, rows, dx);
        };
        if packed {
            rows::layer_norm(x, weight, bias, eps, normal);
            dense::pack_lines(Mat::new(normal, rows, inp), x_kept);
        } else {
            rows::layer_norm(x, weight, bias, eps, x_kept);
        }
        self.input_gradient(dy, rows, dnormal);
        let (dweight, dbias) = norm_sums.split_at_mut(inp);
        rows::layer_norm_backward(x, weight, eps, dnormal, rows::LayerNormGrads { dx, dweight, dbias });
    }

    /// dx = sum over the linear layers of dy W; nothing if it is not needed.
    fn input_gradient(&self, dy: &[f32], rows: usize, dx: &mut [f32]) {
        let dy = Mat::new(dy, rows, self.width);
        let mut first = 0;
        for (index, panels) in self.panels.iter().enumerate() {
            let end = first + panels.depth();
            panels.multiply(dy.columns(first..end), dx, self.layers.inp, index > 0);
            first = end;
        }
    }
}
