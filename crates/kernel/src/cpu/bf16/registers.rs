//! The tile registers of AMX: their shapes, and blocks of a result in them.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __mmask16, _mm512_fmadd_ps, _mm512_load_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_mul_ps, _mm512_set1_ps, _mm512_store_ps,
};

use super::operands::LANES;

/// Rows of a tile.
pub const ROWS: usize = 16;

/// Pairs in a row of a tile.
pub const PAIRS: usize = 16;

/// Bytes of a row of a tile.
pub const BYTES: usize = 64;

/// A row of a tile, where tiles are loaded from whole lines of the cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [u32; PAIRS]);

/// A row of zeros.
pub const ZEROS: Line = Line([0; PAIRS]);

/// What a product is multiplied by, and what the result there is multiplied by before it is added.
pub type Scales = (f32, Option<f32>);

/// Where tiles of the result lie.
#[derive(Clone, Copy)]
pub struct Place {
    /// The first element of the first tile.
    pub data: *mut f32,
    /// Elements between rows.
    pub row: usize,
    /// Tiles beside each other.
    pub vectors: usize,
    /// Columns of the last of them that exist.
    pub mask: __mmask16,
    /// Rows before this one are left as they are.
    pub skip: usize,
    /// Number of rows of a tile.
    pub height: usize,
}

impl Place {
    /// One of the tiles.
    pub fn tile(self, band: usize, vector: usize) -> Self {
        let data = self.data.wrapping_add(band * ROWS * self.row + vector * LANES);
        Self { data, mask: if vector + 1 == self.vectors { self.mask } else { u16::MAX }, ..self }
    }

    /// Whether all of the tile is part of the result.
    fn is_whole(&self) -> bool {
        self.skip == 0 && self.mask == u16::MAX
    }

    /// Sets register `T` to zeros, or to what lies here.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn start<const T: usize>(&self, adds: bool) {
        // SAFETY: rows and columns of the result are within its slice, as the caller holds; the mask keeps those that are none out.
        unsafe {
            if !adds {
                return asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags));
            }
            if self.is_whole() {
                return load::<T>(self.data.cast(), 4 * self.row);
            }
            let mut sums = [ZEROS; ROWS];
            for (line, row) in sums[self.skip..self.height].iter_mut().zip(self.skip..) {
                let from = self.data.wrapping_add(row * self.row);
                _mm512_store_ps(line.0.as_mut_ptr().cast(), _mm512_maskz_loadu_ps(self.mask, from));
            }
            load::<T>(sums.as_ptr().cast(), BYTES);
        }
    }

    /// Writes what register `T` holds, scaled.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn end<const T: usize>(&self, (alpha, beta): Scales) {
        // SAFETY: as in `start`.
        unsafe {
            if self.is_whole() && alpha == 1.0 && beta.is_none() {
                return store::<T>(self.data.cast(), 4 * self.row);
            }
            let mut sums = [ZEROS; ROWS];
            store::<T>(sums.as_mut_ptr().cast(), BYTES);
            let (alpha, adds, beta) =
                (_mm512_set1_ps(alpha), beta.is_some(), _mm512_set1_ps(beta.unwrap_or(0.0)));
            for (line, row) in sums[self.skip..self.height].iter().zip(self.skip..) {
                let to = self.data.wrapping_add(row * self.row);
                let mut sum: __m512 = _mm512_mul_ps(alpha, _mm512_load_ps(line.0.as_ptr().cast()));
                if adds {
                    sum = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(self.mask, to), sum);
                }
                _mm512_mask_storeu_ps(to, self.mask, sum);
            }
        }
    }
}

/// Loads register `T` from rows that are `row` bytes apart.
#[inline(always)]
unsafe fn load<const T: usize>(from: *const u8, row: usize) {
    // SAFETY: the caller has every row of the tile.
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {row}*1]", t = const T, from = in(reg) from, row = in(reg) row,
            options(nostack, readonly, preserves_flags));
    }
}

/// Stores register `T` to rows that are `row` bytes apart.
#[inline(always)]
unsafe fn store<const T: usize>(to: *mut u8, row: usize) {
    // SAFETY: the caller has a place for every row of the tile.
    unsafe {
        asm!("tilestored [{to} + {row}*1], tmm{t}", t = const T, to = in(reg) to, row = in(reg) row,
            options(nostack, preserves_flags));
    }
}

/// Sets the shapes of the registers: sums in 0 to 3 and a left factor in 4 have `height` rows, as has 5 where there are two bands.
pub unsafe fn configure(height: usize) {
    /// What `ldtilecfg` reads: palette, first row, reserved; bytes of rows and numbers of rows of 16 registers.
    #[repr(C, align(64))]
    struct Shapes {
        palette: [u8; 16],
        bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut shapes = Shapes { palette: [0; 16], bytes: [0; 16], rows: [0; 16] };
    shapes.palette[0] = 1;
    shapes.bytes[..8].fill(BYTES as u16);
    shapes.rows[..8].fill(ROWS as u8);
    shapes.rows[..5].fill(height as u8);
    // SAFETY: the shapes are those of palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly, preserves_flags)) }
}

/// Gives the registers back.
pub unsafe fn release() {
    // SAFETY: changes nothing but the tiles.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}
