//! Buckets and their order.

use pulp::Simd;

/// The bucket of one rotated row: per factor the index of the largest of [y, -y], the lowest one if there
/// are several, combined as b_1 + f_1 b_2 + f_1 f_2 b_3.
pub fn bucket_of(mut turned: &[f32], factors: &[usize]) -> u32 {
    let (mut bucket, mut unit) = (0, 1);
    for &factor in factors {
        let (mine, rest) = turned.split_at(factor / 2);
        let mut best = (f32::NEG_INFINITY, 0);
        let both = mine.iter().copied().chain(mine.iter().map(|y| -y));
        for (index, y) in both.enumerate() {
            if y > best.0 {
                best = (y, index);
            }
        }
        bucket += unit * best.1;
        unit *= factor;
        turned = rest;
    }
    bucket as u32
}

/// Writes the positions of one round sorted by (bucket, position), then the padding, to `order`.
pub fn sort(buckets: &[u32], order: &mut [u32]) {
    let last = buckets.iter().copied().max().unwrap_or(0) as usize;
    let mut starts = vec![0; last + 2];
    for &bucket in buckets {
        starts[bucket as usize + 1] += 1;
    }
    for index in 1..starts.len() {
        starts[index] += starts[index - 1];
    }
    for (position, &bucket) in buckets.iter().enumerate() {
        let place = &mut starts[bucket as usize];
        order[*place] = position as u32;
        *place += 1;
    }
    for (place, order) in order.iter_mut().enumerate().skip(buckets.len()) {
        *order = place as u32;
    }
}

/// [`bucket_of`] in vectors.
#[inline(always)]
pub fn bucket<S: Simd>(simd: S, mut turned: &[f32], factors: &[usize]) -> u32 {
    let (mut bucket, mut unit) = (0, 1);
    for &factor in factors {
        let (mine, rest) = turned.split_at(factor / 2);
        let (body, tail) = S::as_simd_f32s(mine);
        let mut high = simd.splat_f32s(f32::NEG_INFINITY);
        let mut low = simd.splat_f32s(f32::INFINITY);
        for &y in body {
            high = simd.max_f32s(high, y);
            low = simd.min_f32s(low, y);
        }
        let (mut high, mut low) = (simd.reduce_max_f32s(high), simd.reduce_min_f32s(low));
        for &y in tail {
            high = high.max(y);
            low = low.min(y);
        }
        let find = |value: f32| mine.iter().position(|&y| y == value).unwrap_or(0);
        bucket += unit * if high >= -low { find(high) } else { factor / 2 + find(low) };
        unit *= factor;
        turned = rest;
    }
    bucket as u32
}
