//! Activations saved from forward to backward, rounded to bf16.

crate::simd_fn! {
    /// Rows plus their bias, rounded to bf16.
    pub fn store<S>(_simd, x: &'a [f32], bias: &'a [f32], to: &'a mut [u16]) {
        let width = bias.len().max(1);
        for (x, to) in x.chunks_exact(width).zip(to.chunks_exact_mut(width)) {
            to.iter_mut().zip(x).zip(bias).for_each(|((to, &x), &bias)| *to = rounded(x + bias));
        }
    }
}

crate::simd_fn! {
    /// Elements rounded to bf16.
    pub fn round<S>(_simd, x: &'a [f32], to: &'a mut [u16]) {
        to.iter_mut().zip(x).for_each(|(to, &x)| *to = rounded(x));
    }
}

/// `half::bf16::from_f32` without its branch, which would keep a loop scalar.
#[inline(always)]
fn rounded(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

crate::simd_fn! {
    /// What was stored.
    pub fn load<S>(_simd, x: &'a [u16], to: &'a mut [f32]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to = f32::from_bits(u32::from(x) << 16);
        }
    }
}

crate::simd_fn! {
    /// Rows of `width` stored elements, `step` apart, to rows `row` apart.
    pub fn load_rows<S>(_simd, x: &'a [u16], step: usize, width: usize, to: &'a mut [f32], row: usize) {
        for (number, to) in to.chunks_exact_mut(row).enumerate() {
            for (to, &x) in to[..width].iter_mut().zip(&x[number * step..][..width]) {
                *to = f32::from_bits(u32::from(x) << 16);
            }
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
        for ((x, &got), back) in all.iter().zip(&got).zip(back) {
            let want = bf16::from_f32(x + 0.0);
            assert_eq!((got, back.to_bits()), (want.to_bits(), want.to_f32().to_bits()), "{x}");
        }
        let mut plain = vec![0; all.len()];
        round(&all.iter().map(|x| x + 0.0).collect::<Vec<_>>(), &mut plain);
        assert_eq!(plain, got);
    }
}
