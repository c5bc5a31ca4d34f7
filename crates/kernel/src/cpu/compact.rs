//! Tensors that wait as bf16.
//!
//! In bf16 mode products round their operands to bf16 anyway, and what else reads an activation in the backward pass is held
//! to no more. So a tensor that the forward pass has finished with gives up half of its memory: its elements are rounded
//! where they are, behind all handles to it, and become f32 again when a kernel reads them. The handles say f32 all the
//! time; candle's own operations, which look at the elements, take it for a tensor of bf16 and refuse to mix it with f32.

use std::ops::Range;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;

use super::{bf16, par, rows, with_slices};

/// Elements that one thread converts at a time.
const CHUNK: usize = 1 << 15;

/// Rounds the elements of an f32 tensor on the CPU to bf16, until [`expand`].
pub fn compress(tensor: &Tensor) -> Result<()> {
    tensor.inplace_op1(&Compress)
}

/// Makes `tensor` f32 again, if it waits.
pub fn expand(tensor: &Tensor) -> Result<()> {
    let waits = tensor.dtype() == DType::F32
        && matches!(&*tensor.storage_and_layout().0, Storage::Cpu(CpuStorage::BF16(_)));
    if waits { tensor.inplace_op1(&Expand) } else { Ok(()) }
}

/// Elements that may wait.
#[derive(Clone, Copy)]
pub enum Elements<'a> {
    /// They do not.
    F32(&'a [f32]),
    /// They do.
    Bf16(&'a [u16]),
}

impl<'a> Elements<'a> {
    /// Number of elements.
    pub fn count(self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    /// The elements, which do not wait.
    pub fn f32(self) -> Result<&'a [f32]> {
        match self {
            Self::F32(data) => Ok(data),
            Self::Bf16(_) => bail!("an operand waits as bf16 that is read as f32"),
        }
    }

    /// Some of them.
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(data) => Self::F32(&data[range]),
            Self::Bf16(data) => Self::Bf16(&data[range]),
        }
    }

    /// Room that [`Self::read`] needs for `count` elements.
    pub fn room(self, count: usize) -> usize {
        match self {
            Self::F32(_) => 0,
            Self::Bf16(_) => count,
        }
    }

    /// Copies rows of `width` elements, `step` apart and the first at `start`, to the rows of `to`, which are `row` apart; what lies
    /// between those is left as it is.
    pub fn copy_rows(self, (start, step): (usize, usize), width: usize, to: &mut [f32], row: usize) {
        match self {
            Self::F32(data) => rows::copy_rows(&data[start..], step, width, to, row),
            Self::Bf16(data) => bf16::load_rows(&data[start..], step, width, to, row),
        }
    }

    /// Elements in f32, in `room` if they wait.
    pub fn read<'b>(self, range: Range<usize>, room: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::F32(data) => &data[range],
            Self::Bf16(data) => {
                let room = &mut room[..range.len()];
                bf16::load(&data[range], room);
                room
            }
        }
    }
}

/// Runs `f` on the elements of contiguous f32 tensors on the CPU, of which the first may wait; the `plain` ones are made f32.
pub fn with_elements<T, const M: usize, const N: usize>(
    first: [&Tensor; M],
    plain: [&Tensor; N],
    f: impl FnOnce([Elements; M], [&[f32]; N]) -> Result<T>,
) -> Result<T> {
    with_slices(plain, |plain| {
        let guards = first.map(Tensor::storage_and_layout);
        let mut parts = [Elements::F32(&[]); M];
        for (part, (storage, layout)) in parts.iter_mut().zip(&guards) {
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("a fused kernel was given a strided operand of layout {layout:?}")
            };
            *part = elements(storage)?.slice(start..end);
        }
        f(parts, plain)
    })
}

/// What stands behind an f32 tensor on the CPU.
pub fn elements(storage: &Storage) -> Result<Elements<'_>> {
    match storage {
        Storage::Cpu(CpuStorage::F32(data)) => Ok(Elements::F32(data)),
        Storage::Cpu(CpuStorage::BF16(data)) => Ok(Elements::Bf16(data.reinterpret_cast())),
        _ => bail!("a CPU kernel of f32 was given a tensor of another device or type"),
    }
}

struct Compress;

impl InplaceOp1 for Compress {
    fn name(&self) -> &'static str {
        "compress"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::F32(data) = &*storage else { return Ok(()) };
        let rounded = par::build_bits(data.len(), CHUNK, |index, to| {
            bf16::round(&data[index * CHUNK..][..to.len()], to);
        });
        *storage = CpuStorage::BF16(rounded.reinterpret_into());
        Ok(())
    }
}

struct Expand;

impl InplaceOp1 for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::BF16(data) = &*storage else { bail!("only bf16 is expanded") };
        let data = data.reinterpret_cast();
        let expanded = par::build(data.len(), CHUNK, |index, to| {
            bf16::load(&data[index * CHUNK..][..to.len()], to);
        });
        *storage = CpuStorage::F32(expanded);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn all_handles_see_what_was_rounded() {
        let x = Tensor::arange(0.0f32, 1e5, &Device::Cpu).unwrap();
        let handle = x.reshape((2, 50_000)).unwrap();
        let want = x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        compress(&x).unwrap();
        assert!((&handle + &handle.ones_like().unwrap()).is_err(), "it is not mixed with f32");
        assert!(handle.to_vec2::<f32>().is_err(), "nor read as f32");
        with_elements([&handle], [], |[rows], []| {
            let mut room = vec![0.0; rows.room(7)];
            assert_eq!(
                (rows.count(), rows.read(99_000..99_007, &mut room)),
                (want.len(), &want[99_000..99_007])
            );
            Ok(())
        })
        .unwrap();
        expand(&handle).unwrap();
        expand(&handle).unwrap();
        assert_eq!(x.to_vec1::<f32>().unwrap(), want);
    }

    #[test]
    fn whole_numbers_stay_as_they_are() {
        let ids = Tensor::arange(0u32, 9, &Device::Cpu).unwrap();
        compress(&ids).unwrap();
        assert_eq!(ids.to_vec1::<u32>().unwrap(), (0..9).collect::<Vec<_>>());
    }
}
