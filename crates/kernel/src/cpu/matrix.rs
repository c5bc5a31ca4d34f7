//! Views of matrices in slices, checked when they are made.

/// A matrix in a slice: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// A matrix to write to.
pub struct MatMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

/// Number of elements that a matrix reaches over.
fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 }
}

impl<'a> Mat<'a> {
    /// A contiguous row-major matrix at the start of `data`. Panics like indexing if `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` elements, `row_stride` apart. Panics like indexing if `data` is too short.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = &data[..extent(rows, cols, row_stride, 1)];
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, a view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Some consecutive rows, a view. Panics like indexing if there are not that many.
    #[must_use]
    pub fn lines(self, range: std::ops::Range<usize>) -> Self {
        self.t().columns(range).t()
    }

    /// Some consecutive columns, a view. Panics like indexing if there are not that many.
    #[must_use]
    pub fn columns(self, range: std::ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let cols = range.len();
        let reach = extent(self.rows, cols, self.row_stride, self.col_stride);
        let start = if reach == 0 { 0 } else { range.start * self.col_stride };
        Self { data: &self.data[start..start + reach], cols, ..self }
    }
}

impl<'a> MatMut<'a> {
    /// A contiguous row-major matrix at the start of `data`. Panics like indexing if `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` elements, `row_stride` apart. Panics if `data` is too short or rows overlap.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols || rows <= 1, "rows of {cols} elements overlap at stride {row_stride}");
        let data = &mut data[..extent(rows, cols, row_stride, 1)];
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, a view.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// How many threads a product may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread only: for products inside a parallel loop.
    One,
    /// All threads of the current rayon pool.
    All,
}
