//! CUDA kernels: C functions compiled at run time, and what launches them.
//!
//! Launching code is written once, over a [`KernelDevice`]: a CUDA device, or in the tests the CPU, which compiles the same
//! sources with the C compiler, runs them thread by thread and holds every argument against the function's signature.

#[cfg(test)]
#[allow(unsafe_code)]
mod counts;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod device;
#[cfg(test)]
#[allow(unsafe_code)]
pub mod emulated;
#[cfg(test)]
#[allow(unsafe_code)]
pub mod nvrtc;
pub mod rows;
pub mod tensor_device;
#[cfg(feature = "cuda")]
pub mod tensors;
#[cfg(test)]
mod tests;

use candle_core::Result;

/// Threads of a block; THREADS of every source.
pub const THREADS: usize = 128;

/// Kernels that are compiled together.
#[derive(Clone, Copy)]
pub struct Module<'a> {
    /// Name, different for different sources.
    pub name: &'a str,
    /// CUDA C.
    pub source: &'a str,
    /// Macros that are defined.
    pub defines: &'a [(&'a str, usize)],
}

/// One start of a kernel.
pub struct Launch<'a> {
    /// Where the kernel is.
    pub module: Module<'a>,
    /// Its name.
    pub kernel: &'a str,
    /// Blocks in each direction.
    pub grid: [usize; 3],
    /// Bytes of shared memory per block that the kernel does not declare itself.
    pub shared: usize,
}

/// An argument of a kernel.
pub enum Arg<'a, M: KernelDevice> {
    /// `const float *`
    In(BufferView<'a, M>),
    /// `float *`
    Out(&'a mut M::Floats),
    /// `const int *`, or structs of such
    Ints(&'a M::Ints),
    /// Structs of `long long`.
    Longs(&'a M::Longs),
    /// `float`
    Float(f32),
    /// `int`
    Int(usize),
    /// `long long`
    Long(usize),
}

/// Floats of a buffer from one on.
pub struct BufferView<'a, M: KernelDevice> {
    /// The buffer.
    pub floats: &'a M::Floats,
    /// Its first float that belongs to the view.
    pub start: usize,
}

impl<M: KernelDevice> Clone for BufferView<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: KernelDevice> Copy for BufferView<'_, M> {}

impl<'a, M: KernelDevice> BufferView<'a, M> {
    /// All of a buffer.
    pub fn all(floats: &'a M::Floats) -> Self {
        Self { floats, start: 0 }
    }
}

/// A row-major matrix in a buffer, perhaps transposed.
pub struct Matrix<'a, M: KernelDevice> {
    /// From its first element on.
    pub view: BufferView<'a, M>,
    /// Rows, as stored.
    pub rows: usize,
    /// Columns, as stored.
    pub cols: usize,
    /// Distance of two rows.
    pub stride: usize,
    /// Whether the transpose is meant.
    pub turned: bool,
}

impl<'a, M: KernelDevice> Matrix<'a, M> {
    /// Rows of `cols` elements, one after another.
    pub fn new(view: BufferView<'a, M>, rows: usize, cols: usize) -> Self {
        Self { view, rows, cols, stride: cols, turned: false }
    }

    /// Some of the columns, as stored.
    #[must_use]
    pub fn columns(self, range: std::ops::Range<usize>) -> Self {
        let view = BufferView { start: self.view.start + range.start, ..self.view };
        Self { view, cols: range.len(), ..self }
    }

    /// The transpose.
    #[must_use]
    pub fn t(self) -> Self {
        Self { turned: !self.turned, ..self }
    }

    /// Rows and columns of what is meant.
    pub fn dims(&self) -> (usize, usize) {
        if self.turned { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Elements from the first to the last.
    pub fn extent(&self) -> usize {
        if self.rows * self.cols == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols }
    }
}

/// Where a product goes.
pub struct MatmulTarget<'a, M: KernelDevice> {
    /// The buffer.
    pub floats: &'a mut M::Floats,
    /// Its first element that is written.
    pub start: usize,
    /// Distance of two rows.
    pub stride: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
}

/// Something that holds buffers and runs kernels on them, in the order in which they are launched.
pub trait KernelDevice: Sized {
    /// Buffer of f32.
    type Floats;
    /// Buffer of i32.
    type Ints;
    /// Buffer of i64.
    type Longs;

    /// `len` zeros.
    fn zeros(&self, len: usize) -> Result<Self::Floats>;

    /// `len` elements that a kernel is to write; what stands in them is unspecified.
    fn fresh(&self, len: usize) -> Result<Self::Floats>;

    /// A copy of `words`.
    fn ints(&self, words: &[i32]) -> Result<Self::Ints>;

    /// A copy of `words`.
    fn longs(&self, words: &[i64]) -> Result<Self::Longs>;

    /// The product of two matrices, summed in f32; a device rounds its factors as [`crate::cpu::matmul_format`] says. With an inner dimension of 0 nothing is written.
    fn multiply(&self, a: Matrix<Self>, b: Matrix<Self>, to: MatmulTarget<Self>) -> Result<()>;

    /// Starts a kernel; a grid without blocks is nothing to do.
    fn launch(&self, launch: &Launch, arguments: Vec<Arg<Self>>) -> Result<()>;
}
