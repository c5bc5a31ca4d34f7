//! Dropout: every element is kept with probability 1 - rate and then divided by 1 - rate, or set to 0.
//!
//! What is kept is a function of a seed and the element's number alone. Nothing is stored for the backward pass,
//! and every backend drops the same elements. The weights of an attention, which no fused kernel stores, are told
//! apart by their row and key ([`AttentionDropout`]).

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;
use candle_core::{CpuStorage, D, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::{self, par};
#[cfg(any(feature = "cuda", test))]
use super::cuda::rows::DropoutTerms;
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::kept_rows::KeptRows;
use super::op::{FusedOp, SavedOutput};
use super::tape;

/// Elements that one thread handles at a time, about.
const CHUNK: usize = 1 << 15;

/// `x` with elements dropped at `rate`, chosen by `seed`; at rate 0 `x` itself. Elements are numbered as they lie in `x`; where
/// `x` [1, kept, width] has only rows `of` a batch, as they lie in the batch.
pub fn dropout(x: &Tensor, rate: f64, seed: u64, of: Option<&KeptRows>) -> Result<Tensor> {
    check(rate)?;
    if rate == 0.0 {
        return Ok(x.clone());
    }
    let drop = Dropout { of: of.cloned(), width: x.dim(D::Minus1)?, ..Dropout::new(rate, seed) };
    if let Some(of) = of
        && of.rows().len() * drop.width != x.elem_count()
    {
        bail!("{:?} are not {} packed rows", x.dims(), of.rows().len());
    }
    if of.is_none() && super::fused(x) || super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&x.contiguous()?], drop);
    }
    drop.composed(x)
}

fn check(rate: f64) -> Result<()> {
    if !(0.0..1.0).contains(&rate) {
        bail!("a dropout of {rate} is not allowed; it must be at least 0 and below 1");
    }
    Ok(())
}

/// Of 2^32 draws those that drop, and what the others are scaled by.
fn terms(rate: f64) -> (u32, f32) {
    ((rate * (f64::from(u32::MAX) + 1.0)) as u32, (1.0 / (1.0 - rate)) as f32)
}

#[derive(Clone)]
struct Dropout {
    /// Draws below this drop.
    threshold: u32,
    scale: f32,
    seed: u64,
    /// The rows that there are; absent: all.
    of: Option<KeptRows>,
    width: usize,
}

impl Dropout {
    fn new(rate: f64, seed: u64) -> Self {
        let (threshold, scale) = terms(rate);
        Self { threshold, scale, seed, of: None, width: 1 }
    }

    /// What kernels of a device read.
    #[cfg(any(feature = "cuda", test))]
    const fn terms(&self) -> DropoutTerms {
        DropoutTerms { threshold: self.threshold, scale: self.scale, seed: self.seed }
    }

    /// The definition in plain candle operations: a product with a mask made on the host.
    fn composed(&self, x: &Tensor) -> Result<Tensor> {
        let mask = Tensor::from_vec(self.map(&vec![1.0; x.elem_count()]), x.shape(), x.device())?;
        x * mask.to_dtype(x.dtype())?
    }

    /// Drops and scales `values`, which start at element number `first`; one draw decides two elements.
    fn apply(&self, first: usize, values: &mut [f32]) {
        let (odd, even) = values.split_at_mut((first % 2).min(values.len()));
        if let [value] = odd {
            self.decide(value, (self.draw(first) >> 32) as u32);
        }
        for (pair, values) in even.chunks_mut(2).enumerate() {
            let draw = self.draw(first + odd.len() + 2 * pair);
            for (value, draw) in values.iter_mut().zip([draw as u32, (draw >> 32) as u32]) {
                self.decide(value, draw);
            }
        }
    }

    fn draw(&self, element: usize) -> u64 {
        mix(self.seed.wrapping_add((element / 2) as u64))
    }

    fn decide(&self, value: &mut f32, draw: u32) {
        *value = if draw < self.threshold { 0.0 } else { *value * self.scale };
    }

    fn map(&self, x: &[f32]) -> Vec<f32> {
        let width = self.width.max(1);
        let at_once = (CHUNK / width).max(1);
        par::build(x.len(), at_once * width, |index, y| {
            let first = index * at_once;
            y.copy_from_slice(&x[first * width..][..y.len()]);
            let Some(of) = &self.of else { return self.apply(first * width, y) };
            for (values, row) in y.chunks_mut(width).zip(&of.rows()[first..]) {
                self.apply(*row as usize * width, values);
            }
        })
    }
}

/// 64 well mixed bits of a counter (SplitMix64: Steele, Lea, Flood 2014).
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Dropout of attention weights behind their softmax: a weight is kept with probability 1 - rate and then divided by
/// 1 - rate. Which ones is a function of the seed, the number of the query's row (over samples and heads) and the
/// number of the key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    threshold: u32,
    scale: f32,
    seed: u64,
}

impl AttentionDropout {
    /// Dropout at `rate`; nothing at rate 0.
    pub fn new(rate: f64, seed: u64) -> Result<Option<Self>> {
        check(rate)?;
        let (threshold, scale) = terms(rate);
        Ok((rate > 0.0).then_some(Self { threshold, scale, seed }))
    }

    /// What kernels of a device read: the threshold, the bits of the scale, the seed.
    pub const fn words(self) -> [i64; 3] {
        [self.threshold as i64, self.scale.to_bits() as i64, self.seed as i64]
    }

    /// What tells row number `row` from others.
    pub fn row(self, row: usize) -> u32 {
        (mix(self.seed.wrapping_add(row as u64)) >> 32) as u32
    }

    /// What tells key number `key` from others.
    #[inline(always)]
    pub const fn key(key: usize) -> u32 {
        (key as u32).wrapping_mul(0x9e37_79b9)
    }

    /// What the weight of a row and a key is multiplied by.
    #[inline(always)]
    pub const fn factor(self, row: u32, key: u32) -> f32 {
        // a permutation of 32 bits without visible pattern (Wellons 2018, "lowbias32")
        let mut x = row.wrapping_add(key);
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        x ^= x >> 16;
        if x < self.threshold { 0.0 } else { self.scale }
    }

    /// `weights` [..., keys] with some of them dropped, in plain candle operations; rows and keys are counted from 0.
    pub fn composed(dropout: Option<Self>, weights: Tensor) -> Result<Tensor> {
        let Some(dropout) = dropout else { return Ok(weights) };
        let keys = weights.dim(D::Minus1)?;
        let rows = weights.elem_count() / keys.max(1);
        let factors = (0..rows).flat_map(|row| dropout.factors(row, 0..keys)).collect();
        dropout.scaled(&weights, factors)
    }

    /// The factors of `keys` in row number `row`.
    pub fn factors(self, row: usize, keys: impl Iterator<Item = usize>) -> impl Iterator<Item = f32> {
        let row = self.row(row);
        keys.map(move |key| self.factor(row, Self::key(key)))
    }

    /// `weights` times factors in the same order.
    pub fn scaled(self, weights: &Tensor, factors: Vec<f32>) -> Result<Tensor> {
        weights * Tensor::from_vec(factors, weights.shape(), weights.device())?.to_dtype(weights.dtype())?
    }
}

impl FusedOp for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        Ok((self.map(x), operands[0].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let shape = operands[0].1.shape();
        tensors::forward(operands, shape, |device, [x]| {
            device_rows::dropout(device, x, shape.elem_count(), self.terms())
        })
    }

    fn backward(&self, _: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        #[cfg(feature = "cuda")]
        if grad.device().is_cuda() {
            return tensors::with_views([grad], |device, [dy]| {
                let dx = device_rows::dropout(device, dy, grad.elem_count(), self.terms())?;
                Ok(vec![Some(tensors::tensor(device, dx, grad.shape()))])
            });
        }
        Ok(vec![cpu::gradient(grad, cpu::with_slices([grad], |[grad]| Ok(self.map(grad)))?)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for dims in [vec![1], vec![3, 17], vec![2, 40_001]] {
            check(&format!("{dims:?}"), &[randn("x", &dims)], 1e-7, |x| dropout(&x[0], 0.3, 99, None));
        }
    }

    #[test]
    fn the_cuda_kernel_drops_what_the_cpu_drops() {
        use crate::cuda::emulated::here;
        use crate::cuda::{BufferView, rows};
        let x: Vec<f32> = (1..1002).map(|number| number as f32).collect();
        let drop = Dropout::new(0.3, u64::MAX - 100);
        let got = here(|machine| rows::dropout(machine, BufferView::all(&x), x.len(), drop.terms()));
        assert_eq!(got.unwrap(), drop.map(&x));
    }

    #[test]
    fn packed_rows_drop_what_they_drop_in_their_batch() {
        for width in [4, 5] {
            let mask = Tensor::new(&[[1u8, 1, 0, 0], [0, 1, 0, 1]], &candle_core::Device::Cpu).unwrap();
            let kept = KeptRows::of(&mask).unwrap().unwrap();
            let x = randn("x", &[2, 4, width]);
            let packed = kept.pack(&x).unwrap();
            let want = kept.pack(&dropout(&x, 0.4, 3, None).unwrap()).unwrap();
            let got = dropout(&packed, 0.4, 3, Some(&kept)).unwrap();
            assert_eq!(got.to_vec3::<f32>().unwrap(), want.to_vec3::<f32>().unwrap());
            check("packed", &[packed], 1e-7, |x| dropout(&x[0], 0.3, 99, Some(&kept)));
            assert!(dropout(&x, 0.4, 3, Some(&kept)).is_err());
        }
    }

    #[test]
    fn the_kept_share_is_the_rate_and_the_mean_stays() {
        let x = Tensor::ones(400_001, DType::F32, &candle_core::Device::Cpu).unwrap();
        for rate in [0.1, 0.5, 0.9] {
            let y = dropout(&x, rate, 7, None).unwrap().to_vec1::<f32>().unwrap();
            let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / y.len() as f64;
            assert!((kept - (1.0 - rate)).abs() < 4e-3, "{rate}: {kept}");
            let scale = (1.0 / (1.0 - rate)) as f32;
            assert!(y.iter().all(|y| *y == 0.0 || *y == scale));
        }
    }

    #[test]
    fn weights_are_dropped_at_the_rate_in_every_row_and_column_and_no_two_look_alike() {
        let (rate, side) = (0.3, 1200);
        let dropout = AttentionDropout::new(rate, 5).unwrap().unwrap();
        let ones = Tensor::ones((side, side), DType::F32, &candle_core::Device::Cpu).unwrap();
        let rows = AttentionDropout::composed(Some(dropout), ones).unwrap().to_vec2::<f32>().unwrap();
        let columns: Vec<Vec<f32>> = (0..side).map(|at| rows.iter().map(|row| row[at]).collect()).collect();
        let scale = (1.0 / (1.0 - rate)) as f32;
        for lines in [&rows, &columns] {
            let mut kept = 0;
            for pair in lines.windows(2) {
                assert!(pair[0].iter().all(|x| *x == 0.0 || *x == scale));
                let count = pair[0].iter().filter(|x| **x > 0.0).count();
                // six standard deviations
                assert!((count as f64 - 840.0).abs() < 96.0, "{count} of {side}");
                let both = pair[0].iter().zip(&pair[1]).filter(|(a, b)| **a > 0.0 && **b > 0.0).count();
                assert!((both as f64 - 588.0).abs() < 105.0, "{both} of {side} in two lines");
                kept += count;
            }
            let share = kept as f64 / (side * (side - 1)) as f64;
            assert!((share - (1.0 - rate)).abs() < 3e-3, "{share}");
        }
        assert!(AttentionDropout::new(0.0, 5).unwrap().is_none());
        assert!(AttentionDropout::new(1.0, 5).is_err());
    }

    #[test]
    fn seeds_choose_different_elements_and_the_same_again() {
        let x = randn("x", &[1000]);
        let draw = |seed| dropout(&x, 0.5, seed, None).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(draw(1), draw(1));
        let (a, b) = (draw(1), draw(2));
        let agree = a.iter().zip(&b).filter(|(a, b)| (**a == 0.0) == (**b == 0.0)).count();
        assert!((400..600).contains(&agree), "{agree} of 1000 agree");
    }

    #[test]
    fn a_rate_of_zero_is_free_and_rates_of_one_are_refused() {
        let x = randn("x", &[3]);
        assert_eq!(dropout(&x, 0.0, 1, None).unwrap().id(), x.id());
        for rate in [1.0, -0.1, f64::NAN] {
            assert!(dropout(&x, rate, 1, None).is_err());
        }
    }
}
