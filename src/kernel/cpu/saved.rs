//! Activations saved from forward to backward: in f32, or rounded to bf16 where products round their operands anyway.

use super::products::{Products, products};

/// Rows of one activation, in chunks.
pub struct Saved {
    data: Vec<f32>,
    format: Format,
}

/// How activations are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As they are.
    F32,
    /// Two in the place of one.
    Bf16,
}

impl Format {
    /// That of the products that are set.
    pub fn of_products() -> Self {
        match products() {
            Products::F32 => Self::F32,
            Products::Bf16 => Self::Bf16,
        }
    }

    /// Floats that `len` activations take.
    pub fn room(self, len: usize) -> usize {
        match self {
            Self::F32 => len,
            Self::Bf16 => len.div_ceil(2),
        }
    }

    /// Activations of chunks, as many floats each as [`Self::room`] says of a chunk.
    pub fn save(self, data: Vec<f32>) -> Saved {
        Saved { data, format: self }
    }
}

impl Saved {
    /// The bf16 of chunk `index`, of chunks of `len`, and what follows it.
    pub fn chunk(&self, index: usize, len: usize) -> &[u16] {
        bytemuck::cast_slice(&self.data[index * self.format.room(len)..])
    }

    /// The activations themselves, if they were saved as they are.
    pub fn into_f32(self) -> Result<Vec<f32>, Self> {
        if self.format == Format::F32 { Ok(self.data) } else { Err(self) }
    }
}

/// Places of bf16 in a chunk of floats.
pub fn as_bf16_mut(chunk: &mut [f32]) -> &mut [u16] {
    bytemuck::cast_slice_mut(chunk)
}

crate::simd_fn! {
    /// A row plus its bias, rounded to bf16.
    pub fn store<S>(_simd, x: &'a [f32], bias: &'a [f32], to: &'a mut [u16]) {
        for ((to, &x), &bias) in to.iter_mut().zip(x).zip(bias) {
            let x = x + bias;
            // `half::bf16::from_f32` without its branch, which would keep the loop scalar
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            *to = if x.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16;
        }
    }
}

crate::simd_fn! {
    /// A row that was stored.
    pub fn load<S>(_simd, x: &'a [u16], to: &'a mut [f32]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = f32::from_bits(u32::from(x) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_kind_of_number_is_rounded_as_by_half() {
        let ends =
            [f32::MAX, f32::MIN_POSITIVE, 1e-41, 0.0, f32::INFINITY, f32::NAN, 1.003_906_3, 1.011_718_8];
        let powers = (0..999).map(|i| 1.7f32.powi(i - 500));
        let all: Vec<f32> = ends.iter().flat_map(|&x| [x, -x]).chain(powers).collect();
        let (mut got, mut back) = (vec![0; all.len()], vec![0.0; all.len()]);
        store(&all, &vec![0.0; all.len()], &mut got);
        load(&got, &mut back);
        for ((x, got), back) in all.iter().zip(got).zip(back) {
            let want = bf16::from_f32(x + 0.0);
            assert_eq!((got, back.to_bits()), (want.to_bits(), want.to_f32().to_bits()), "{x}");
        }
    }

    #[test]
    fn chunks_of_odd_lengths_come_back() {
        let rows: Vec<f32> = (0..17).map(|i| i as f32).collect();
        let room = Format::Bf16.room(7);
        let mut data = vec![0.0; 2 * room + Format::Bf16.room(3)];
        for (x, to) in rows.chunks(7).zip(data.chunks_mut(room)) {
            store(x, &vec![1.0; x.len()], as_bf16_mut(to));
        }
        let saved = Format::Bf16.save(data);
        for (index, x) in rows.chunks(7).enumerate() {
            let mut got = vec![0.0; x.len()];
            load(saved.chunk(index, 7), &mut got);
            assert_eq!(got, x.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        }
        assert!(saved.into_f32().is_err());
        assert_eq!(Format::F32.save(vec![2.0; Format::F32.room(3)]).into_f32().ok(), Some(vec![2.0; 3]));
    }
}
