//! The micro-kernel: tiles of c = a b that are summed in registers.
//!
//! Every element of the result is one chain of multiply-adds over k in order, however the result is cut into tiles.

use pulp::{Simd, WithSimd};

/// Asks for the most rows of a tile and the columns of a panel: sums, a line of the right factor and a scalar fill the vector
/// registers.
pub struct ShapeOf;

impl WithSimd for ShapeOf {
    type Output = [usize; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> [usize; 2] {
        [if S::F32_LANES == 16 { 12 } else { 6 }, S::F32_LANES * vectors::<S>()]
    }
}

/// Vectors of a row of a tile.
#[inline(always)]
const fn vectors<S: Simd>() -> usize {
    if S::F32_LANES < 8 && S::REGISTER_COUNT >= 32 { 4 } else { 2 }
}

/// The left factor.
#[derive(Clone, Copy)]
pub enum Left<'a> {
    /// Rows, `stride` apart.
    Rows {
        /// Where element (0, 0) is the first.
        data: &'a [f32],
        /// Distance of two rows.
        stride: usize,
    },
    /// Columns, `stride` apart.
    Columns {
        /// Where element (0, 0) is the first.
        data: &'a [f32],
        /// Distance of two columns.
        stride: usize,
    },
}

/// The result: element (i, j) is `data[i * row + j]`; it becomes alpha a b + beta c, or alpha a b without `beta`.
pub struct TileOut<'a> {
    /// Where element (0, 0) is the first.
    pub data: &'a mut [f32],
    /// Distance of two rows.
    pub row: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of what is there.
    pub beta: Option<f32>,
}

/// Rows cut into those of tiles, up to `most`: first row and number of rows.
fn strips(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let left = rows - first;
        let height = if left >= most { most } else { [8, 4, 2, 1].into_iter().find(|&h| h <= left)? };
        first += height;
        Some((first - height, height))
    })
}

/// The right factor: element (k, j) of panel p is `data[p * panel + k * step + j]`.
#[derive(Clone, Copy)]
pub struct Right<'a> {
    /// Where element (0, 0) is the first.
    pub data: &'a [f32],
    /// Distance of two panels.
    pub panel: usize,
    /// Distance of two lines.
    pub step: usize,
}

/// c = a b of `rows` x `width` elements summed over `depth`. The last panel is as wide as the others, with whatever behind `width`.
pub struct Block<'a> {
    /// The result.
    pub c: TileOut<'a>,
    /// Left factor.
    pub a: Left<'a>,
    /// Right factor.
    pub b: Right<'a>,
    /// Rows of the result.
    pub rows: usize,
    /// Summed elements.
    pub depth: usize,
    /// Columns of the result.
    pub width: usize,
}

impl Block<'_> {
    /// Panics if a slice is too short for panels of `columns`.
    pub fn check(&self, columns: usize) {
        let Self { ref c, a, b, rows, depth, width } = *self;
        assert!(c.row >= width || rows == 1, "rows of the result overlap");
        assert!(rows > 0 && width > 0 && (rows - 1) * c.row + width <= c.data.len(), "result");
        let left = match a {
            Left::Rows { data, stride } => depth == 0 || (rows - 1) * stride + depth <= data.len(),
            Left::Columns { data, stride } => depth == 0 || (depth - 1) * stride + rows <= data.len(),
        };
        assert!(left, "left factor");
        let last = (width.div_ceil(columns) - 1) * b.panel + (depth.max(1) - 1) * b.step + columns;
        assert!(depth == 0 || last <= b.data.len(), "right factor");
    }
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        self.check(S::F32_LANES * vectors::<S>());
        match (vectors::<S>(), S::F32_LANES) {
            (4, _) => self.panels::<S, 6, 4>(simd),
            (_, 16) => self.panels::<S, 12, 2>(simd),
            _ => self.panels::<S, 6, 2>(simd),
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn panels<S: Simd, const R: usize, const V: usize>(&mut self, simd: S) {
        let columns = V * S::F32_LANES;
        for first in (0..self.width).step_by(columns) {
            let width = columns.min(self.width - first);
            match self.a {
                Left::Rows { .. } => self.panel::<S, R, V, true>(simd, first, width),
                Left::Columns { .. } => self.panel::<S, R, V, false>(simd, first, width),
            }
        }
    }

    /// The columns of one panel.
    #[inline(always)]
    fn panel<S: Simd, const R: usize, const V: usize, const ROWS: bool>(
        &mut self,
        simd: S,
        column: usize,
        width: usize,
    ) {
        for (row, height) in strips(self.rows, R) {
            match height {
                8 if R > 8 => self.tile::<S, 8, V, ROWS>(simd, (row, column), width),
                4 => self.tile::<S, 4, V, ROWS>(simd, (row, column), width),
                2 => self.tile::<S, 2, V, ROWS>(simd, (row, column), width),
                1 => self.tile::<S, 1, V, ROWS>(simd, (row, column), width),
                _ => self.tile::<S, R, V, ROWS>(simd, (row, column), width),
            }
        }
    }

    /// `R` rows of a panel.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize, const ROWS: bool>(
        &mut self,
        simd: S,
        (row, column): (usize, usize),
        width: usize,
    ) {
        let (depth, c_row, columns) = (self.depth, self.c.row, V * S::F32_LANES);
        let (data, stride) = match self.a {
            Left::Rows { data, stride } => (&data[if depth == 0 { 0 } else { row * stride }..], stride),
            Left::Columns { data, stride } => (&data[if depth == 0 { 0 } else { row }..], stride),
        };
        let tile = Tile {
            a: data.as_ptr(),
            stride,
            b: self.b.data[if depth == 0 { 0 } else { column / columns * self.b.panel }..].as_ptr(),
            b_step: self.b.step,
            depth,
            alpha: self.c.alpha,
            beta: self.c.beta,
        };
        let to = &mut self.c.data[row * c_row + column..];
        // SAFETY: `check` held `rows` x `depth` elements of a, whole panels of b and `rows` x `width` elements of c within their
        // slices, and `row` + R, `column` + `width` stay below; c is borrowed exclusively, and `part` has R whole rows.
        unsafe {
            if width == columns {
                tile.run::<S, R, V, ROWS>(simd, to.as_mut_ptr(), c_row);
                return;
            }
            let apart = c_row.max(width); // of a single row it may be anything
            let mut part = [[0.0f32; 32]; R];
            for (part, to) in part.iter_mut().zip(to.chunks(apart)) {
                part[..width].copy_from_slice(&to[..width]);
            }
            tile.run::<S, R, V, ROWS>(simd, part.as_mut_ptr().cast(), 32);
            for (part, to) in part.iter().zip(to.chunks_mut(apart)) {
                to[..width].copy_from_slice(&part[..width]);
            }
        }
    }
}

/// What a tile is computed from.
struct Tile {
    a: *const f32,
    /// Distance of two rows of a left factor in rows, or of two columns of one in columns.
    stride: usize,
    b: *const f32,
    b_step: usize,
    depth: usize,
    alpha: f32,
    beta: Option<f32>,
}

impl Tile {
    /// Computes `R` rows of `V` vectors to `c`, whose rows are `row` apart.
    ///
    /// # Safety
    /// `R` rows of `depth` elements of a, a panel of b, and these rows of c can be read, c be written.
    #[inline(always)]
    unsafe fn run<S: Simd, const R: usize, const V: usize, const ROWS: bool>(
        &self,
        simd: S,
        c: *mut f32,
        row: usize,
    ) {
        let line = self.b_step;
        // distance of two rows and of two columns
        let (stride, step) = if ROWS { (self.stride, 1) } else { (1, self.stride) };
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        let (mut a, mut b) = (self.a, self.b);
        // SAFETY: the caller vouches for it; f32s is plain data of its lanes, read and written unaligned.
        unsafe {
            for _ in 0..self.depth / 4 {
                add_line::<S, R, V>(simd, a, stride, b, &mut sums);
                add_line::<S, R, V>(simd, a.add(step), stride, b.add(line), &mut sums);
                add_line::<S, R, V>(simd, a.add(2 * step), stride, b.add(2 * line), &mut sums);
                add_line::<S, R, V>(simd, a.add(3 * step), stride, b.add(3 * line), &mut sums);
                (a, b) = (a.wrapping_add(4 * step), b.wrapping_add(4 * line));
            }
            for _ in 0..self.depth % 4 {
                add_line::<S, R, V>(simd, a, stride, b, &mut sums);
                (a, b) = (a.wrapping_add(step), b.wrapping_add(line));
            }
            let alpha = simd.splat_f32s(self.alpha);
            let at = |i: usize, j: usize| c.add(i * row + j * S::F32_LANES).cast::<S::f32s>();
            if let Some(beta) = self.beta {
                let beta = simd.splat_f32s(beta);
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        let before = simd.mul_f32s(beta, at(i, j).read_unaligned());
                        at(i, j).write_unaligned(simd.mul_add_e_f32s(alpha, *sum, before));
                    }
                }
            } else {
                for (i, sums) in sums.iter().enumerate() {
                    for (j, &sum) in sums.iter().enumerate() {
                        at(i, j).write_unaligned(simd.mul_f32s(alpha, sum));
                    }
                }
            }
        }
    }
}

/// Adds the products of a column of the left factor, elements `stride` apart, and a line of the right one.
///
/// # Safety
/// `R` such elements and `V` vectors can be read.
#[inline(always)]
pub unsafe fn add_line<S: Simd, const R: usize, const V: usize>(
    simd: S,
    a: *const f32,
    stride: usize,
    b: *const f32,
    sums: &mut [[S::f32s; V]; R],
) {
    let mut vectors = [simd.splat_f32s(0.0); V];
    // SAFETY: the caller vouches for it; f32s is plain data, read unaligned.
    unsafe {
        for (j, vector) in vectors.iter_mut().enumerate() {
            *vector = b.add(j * S::F32_LANES).cast::<S::f32s>().read_unaligned();
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let scalar = simd.splat_f32s(*a.add(i * stride));
            for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                *sum = simd.mul_add_e_f32s(scalar, vector, *sum);
            }
        }
    }
}
