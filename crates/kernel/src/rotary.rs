//! Rotary position embedding (Su et al. 2021, section 3.2): pairs of channels turn by an angle that grows with the position, so
//! that products of rotated queries and keys depend on distances alone.
//!
//! ```text
//! (a, b) at position p  ->  (a cos t - b sin t, b cos t + a sin t),  t = p * frequency of the pair
//! ```
//!
//! Angles, sines and cosines are computed in f64 and rounded once.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, D, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::cpu::{self, par, par::Chunks};
use super::heads::Qkv;
use super::op::{self, FusedOp, SavedOutput};
use super::tape;

/// Which channels turn together, of the R that turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// m and m + R/2 (Llama, NeoX).
    Half,
    /// 2m and 2m + 1 (RoFormer, GPT-J, RetNet).
    Interleaved,
}

/// A rotation of the first channels of every head; the rest passes through.
#[derive(Debug)]
pub struct Rotary {
    pairing: Pairing,
    /// Radians per position of every pair.
    frequencies: Vec<f64>,
    /// Cosines and sines [positions, pairs] (f64), as far as they were needed.
    table: Mutex<Option<[Tensor; 2]>>,
}

impl Rotary {
    /// The rotation of `width` channels, pair m with frequency base^(-2m / width).
    pub fn new(pairing: Pairing, width: usize, base: f64) -> Result<Self> {
        if !width.is_multiple_of(2) {
            bail!("{width} channels do not form pairs; rotate an even number");
        }
        let frequency = |pair: usize| base.powf(-((2 * pair) as f64) / width as f64);
        Ok(Self::with_frequencies(pairing, (0..width / 2).map(frequency).collect()))
    }

    /// The rotation of as many pairs as there are `frequencies`, in radians per position.
    pub const fn with_frequencies(pairing: Pairing, frequencies: Vec<f64>) -> Self {
        Self { pairing, frequencies, table: Mutex::new(None) }
    }

    /// Channels that turn.
    pub fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Turns `x` [.., n, d], row i of which stands at position `start` + i.
    pub fn rotate(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let n = x.dim(D::Minus2)?;
        self.turn(x, &self.rows(start, n)?)
    }

    /// [`Self::rotate`] at one position per row.
    pub fn rotate_at(&self, x: &Tensor, positions: &[usize]) -> Result<Tensor> {
        if positions.len() != x.dim(D::Minus2)? {
            bail!("{} positions for rows of shape {:?}", positions.len(), x.dims());
        }
        let last = positions.iter().max().map_or(0, |last| last + 1);
        let index = positions.iter().map(|&position| position as u32).collect::<Vec<_>>();
        let index = Tensor::from_vec(index, positions.len(), &Device::Cpu)?;
        self.turn(x, &self.table(last)?.map(|table| table.index_select(&index, 0)))
    }

    /// Queries and keys turned, values as they are. The first key stands at position `start`, the last query beside the last
    /// key.
    pub fn rotate_qk(&self, qkv: &Qkv, start: usize) -> Result<Qkv> {
        if let Qkv::Packed { rows, heads, parts } = qkv {
            let (Some(q), Some(k)) = (parts.q, parts.k) else { bail!("no queries and keys to rotate") };
            let (_, n, width) = rows.dims3()?;
            let turned = (0..parts.count).flat_map(|part| vec![part == q || part == k; *heads]).collect();
            let tables = self.rows(start, n)?;
            if super::fused_cpu(rows.device()) && rows.dtype() == DType::F32 {
                let head = width / parts.count / heads;
                let rows = self.fused(rows, &tables, head, turned)?;
                return Ok(Qkv::Packed { rows, heads: *heads, parts: *parts });
            }
        }
        let (q, k) = (qkv.q()?, qkv.k()?);
        let held = k.dim(2)?.saturating_sub(q.dim(2)?);
        let v = qkv.v().ok();
        Ok(Qkv::Separate { q: Some(self.rotate(&q, start + held)?), k: Some(self.rotate(&k, start)?), v })
    }

    /// Cosines and sines [positions, pairs] of at least the first `len` positions.
    fn table(&self, len: usize) -> Result<[Tensor; 2]> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = table.as_ref().filter(|table| table[0].dims()[0] >= len) {
            return Ok(table.clone());
        }
        Ok(table.insert(self.waves(0, len.next_power_of_two())?).clone())
    }

    /// Cosines and sines [n, pairs] of `n` positions from `start` on. One position behind others, as decoding asks for it, is
    /// computed alone: no table grows with the context.
    fn rows(&self, start: usize, n: usize) -> Result<[Result<Tensor>; 2]> {
        match n {
            1 if start > 0 => Ok(self.waves(start, 1)?.map(Ok)),
            _ => Ok(self.table(start + n)?.map(|table| table.narrow(0, start, n))),
        }
    }

    /// Cosines and sines [n, pairs] of `n` positions from `start` on.
    fn waves(&self, start: usize, n: usize) -> Result<[Tensor; 2]> {
        let angles = (start..start + n)
            .flat_map(|position| self.frequencies.iter().map(move |frequency| position as f64 * frequency));
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.map(f64::sin_cos).unzip();
        let tensor = |values| Tensor::from_vec(values, (n, self.frequencies.len()), &Device::Cpu);
        Ok([tensor(cos)?, tensor(sin)?])
    }

    /// `x` [.., n, d] by `tables`, cosines and sines [n, pairs] (f64).
    fn turn(&self, x: &Tensor, tables: &[Result<Tensor>; 2]) -> Result<Tensor> {
        let head = x.dim(D::Minus1)?;
        if !super::fused_cpu(x.device()) || x.dtype() != DType::F32 {
            return self.composed(x, tables);
        }
        // heads [b, h, n, d] that are a view of rows [b, n, h d]
        if x.rank() == 4 && !x.is_contiguous() {
            let rows = x.transpose(1, 2)?;
            if rows.is_contiguous() {
                let shape = rows.shape().clone();
                let turned = vec![true; rows.dim(2)?];
                let rows = self.fused(&rows.flatten_from(2)?, tables, head, turned)?;
                return rows.reshape(shape)?.transpose(1, 2);
            }
        }
        self.fused(&x.contiguous()?, tables, head, vec![true])
    }

    fn fused(
        &self,
        x: &Tensor,
        tables: &[Result<Tensor>; 2],
        head: usize,
        turned: Vec<bool>,
    ) -> Result<Tensor> {
        let tables = Tables::new(tables, x.device(), DType::F32)?;
        let pairing = self.pairing;
        if self.width() > head {
            bail!("{} channels are to turn, but a head has {head}", self.width());
        }
        let op = Rotate { pairing, pairs: self.frequencies.len(), head, turned };
        tape::apply(&[&x.contiguous()?, &tables.cos, &tables.sin], op)
    }

    fn composed(&self, x: &Tensor, tables: &[Result<Tensor>; 2]) -> Result<Tensor> {
        let Tables { cos, sin } = Tables::new(tables, x.device(), x.dtype())?;
        let (pairs, head) = (self.frequencies.len(), x.dim(D::Minus1)?);
        if self.width() > head {
            bail!("{} channels are to turn, but a head has {head}", self.width());
        }
        let turned = |a: &Tensor, b: &Tensor| -> Result<[Tensor; 2]> {
            let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
            Ok([first, (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?])
        };
        let own = x.narrow(D::Minus1, 0, 2 * pairs)?;
        let rest = x.narrow(D::Minus1, 2 * pairs, head - 2 * pairs)?;
        let own = match self.pairing {
            Pairing::Half => {
                let part = |start| own.narrow(D::Minus1, start, pairs);
                Tensor::cat(&turned(&part(0)?, &part(pairs)?)?, D::Minus1)?
            }
            Pairing::Interleaved => {
                let mut dims = own.dims().to_vec();
                dims.pop();
                dims.extend([pairs, 2]);
                let split = own.contiguous()?.reshape(dims)?;
                let part = |index| split.narrow(D::Minus1, index, 1)?.squeeze(D::Minus1);
                Tensor::stack(&turned(&part(0)?, &part(1)?)?, D::Minus1)?.flatten_from(x.rank() - 1)?
            }
        };
        if rest.elem_count() == 0 { Ok(own) } else { Tensor::cat(&[own, rest], D::Minus1) }
    }
}

/// Cosines and sines [n, pairs] in the type and on the device of what turns.
struct Tables {
    cos: Tensor,
    sin: Tensor,
}

impl Tables {
    fn new(tables: &[Result<Tensor>; 2], device: &Device, dtype: DType) -> Result<Self> {
        let place = |table: &Result<Tensor>| match table {
            Ok(table) => table.to_dtype(dtype)?.contiguous()?.to_device(device),
            Err(error) => bail!("{error}"),
        };
        Ok(Self { cos: place(&tables[0])?, sin: place(&tables[1])? })
    }
}

/// Rotation of rows [.., n, heads * head]; operands x, cosines and sines [n, pairs].
struct Rotate {
    pairing: Pairing,
    pairs: usize,
    head: usize,
    /// Which heads of a row turn.
    turned: Vec<bool>,
}

impl Rotate {
    /// Turns by the angles of the tables, or back with `sign` -1.
    fn run(&self, x: &[f32], [cos, sin]: [&[f32]; 2], sign: f32) -> Vec<f32> {
        let (width, pairs) = (self.head * self.turned.len(), self.pairs);
        let n = (cos.len() / pairs.max(1)).max(1);
        let size = Chunks::rows(x.len() / width.max(1), width).size;
        par::build(x.len(), size * width, |index, y| {
            y.copy_from_slice(&x[index * size * width..][..y.len()]);
            for (row, y) in y.chunks_exact_mut(width).enumerate() {
                let at = (index * size + row) % n * pairs;
                let (cos, sin) = (&cos[at..at + pairs], &sin[at..at + pairs]);
                for (y, turned) in y.chunks_exact_mut(self.head).zip(&self.turned) {
                    if *turned {
                        self.turn(y, cos, sin, sign);
                    }
                }
            }
        })
    }

    fn turn(&self, y: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
        let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
            (*a, *b) = (*a * cos - *b * sin * sign, *b * cos + *a * sin * sign);
        };
        let angles = cos.iter().zip(sin);
        match self.pairing {
            Pairing::Half => {
                let (first, second) = y[..2 * self.pairs].split_at_mut(self.pairs);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    turn(a, b, *cos, *sin);
                }
            }
            Pairing::Interleaved => {
                for (pair, (cos, sin)) in y.chunks_exact_mut(2).zip(angles) {
                    let (a, b) = pair.split_at_mut(1);
                    turn(&mut a[0], &mut b[0], *cos, *sin);
                }
            }
        }
    }
}

impl FusedOp for Rotate {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x, cos, sin] = cpu::slices(operands)?;
        Ok((self.run(x, [cos, sin], 1.0), operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, cos, sin] = op::operands(operands)?;
        let dx = cpu::with_slices([cos, sin, grad], |[cos, sin, dy]| Ok(self.run(dy, [cos, sin], -1.0)))?;
        Ok(vec![cpu::gradient(x, dx)?, None, None])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::{PackedLayout, split};
    use crate::testing::{check, randn};

    const PAIRINGS: [Pairing; 2] = [Pairing::Half, Pairing::Interleaved];

    #[test]
    fn fused_is_the_definition() {
        for pairing in PAIRINGS {
            for (dims, width, start) in [(vec![2, 3, 5, 8], 8, 0), (vec![1, 2, 37, 6], 4, 11)] {
                let rotary = Rotary::new(pairing, width, 100.0).unwrap();
                let what = format!("{pairing:?} {dims:?}");
                check(&what, &[randn("x", &dims)], 1e-6, |x| rotary.rotate(&x[0], start));
            }
            let rotary = Rotary::new(pairing, 4, 10.0).unwrap();
            for part in 0..3 {
                check(&format!("{pairing:?} part {part}"), &[randn("rows", &[2, 9, 24])], 1e-6, |x| {
                    let parts = PackedLayout { q: Some(2), k: Some(0), v: Some(1), count: 3 };
                    let qkv = Qkv::Packed { rows: x[0].clone(), heads: 2, parts };
                    let qkv = rotary.rotate_qk(&qkv, 3)?;
                    [qkv.q()?, qkv.k()?, qkv.v()?][part].contiguous()
                });
            }
        }
    }

    #[test]
    fn products_depend_on_distances_and_views_give_what_copies_give() {
        for pairing in PAIRINGS {
            let rotary = Rotary::new(pairing, 8, 10_000.0).unwrap();
            let [q, k] = ["q", "k"].map(|name| randn(name, &[1, 8]));
            let product = |i: usize, j: usize| -> f32 {
                let [q, k] = [(&q, i), (&k, j)].map(|(x, at)| rotary.rotate_at(x, &[at]).unwrap());
                (q * k).unwrap().sum_all().unwrap().to_scalar().unwrap()
            };
            assert!((product(9, 4) - product(1005, 1000)).abs() < 1e-4);
            assert!((product(9, 4) - product(9, 5)).abs() > 1e-3);
            let view = split(&randn("rows", &[2, 5, 24]), 3).unwrap();
            let [a, b] = [&view, &view.contiguous().unwrap()]
                .map(|x| rotary.rotate(x, 2).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
            assert_eq!(a, b);
        }
    }

    #[test]
    fn angles_are_exact_at_far_positions() {
        let rotary = Rotary::new(Pairing::Half, 2, 10_000.0).unwrap();
        let x = Tensor::new(&[[1f32, 0.0]], &Device::Cpu).unwrap();
        let y: Vec<f32> = rotary.rotate(&x, 1_000_003).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(y, [1_000_003f64.cos() as f32, 1_000_003f64.sin() as f32]);
        assert!(rotary.rotate(&x.narrow(1, 0, 1).unwrap(), 0).is_err());
        assert!(Rotary::new(Pairing::Half, 3, 10.0).is_err());
    }
}
