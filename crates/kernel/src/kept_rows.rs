//! Some rows of a batch (those that are no padding, or those that something reads) packed one after another, so that what works row
//! by row computes no others.

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::{self, par};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;

/// Elements that one thread copies at a time, about.
const CHUNK: usize = 1 << 15;

/// Least share of padding for which packing pays: rows are copied at every attention.
const LEAST_PADDING: f64 = 1.0 / 16.0;

/// Which rows of [b, n] there are.
#[derive(Clone, Debug)]
pub struct KeptRows(Arc<Places>);

#[derive(Debug)]
struct Places {
    batch: usize,
    len: usize,
    /// The kept rows, of b * n, in order.
    rows: Vec<u32>,
    /// Where every row of b * n lies among the kept ones; [`PADDING`] where it does not.
    at: Vec<u32>,
}

/// No place.
const PADDING: u32 = u32::MAX;

impl KeptRows {
    /// The rows that `mask` [b, n] keeps (1; 0 is padding), where they are on the CPU and few enough.
    pub fn of(mask: &Tensor) -> Result<Option<Self>> {
        let (batch, len) = mask.dims2()?;
        if !mask.device().is_cpu() {
            return Ok(None);
        }
        let keeps = mask.to_dtype(DType::U8)?.flatten_all()?.to_vec1::<u8>()?;
        let rows: Vec<u32> =
            (0u32..).zip(&keeps).filter(|(_, keep)| **keep != 0).map(|(row, _)| row).collect();
        let padding = keeps.len() - rows.len();
        let pays = !rows.is_empty() && padding as f64 >= LEAST_PADDING * keeps.len() as f64;
        Ok(pays.then(|| Self::at(batch, len, rows)))
    }

    /// The first row of every sample of [batch, len].
    pub fn first(batch: usize, len: usize) -> Self {
        Self::at(batch, len, (0..batch).map(|sample| (sample * len) as u32).collect())
    }

    /// `rows` of [batch, len], counted row by row, in ascending order.
    pub fn at(batch: usize, len: usize, rows: Vec<u32>) -> Self {
        let mut at = vec![PADDING; batch * len];
        for (place, row) in rows.iter().enumerate() {
            at[*row as usize] = place as u32;
        }
        Self(Arc::new(Places { batch, len, rows, at }))
    }

    /// Which they are, of all rows of the batch, in ascending order.
    pub fn rows(&self) -> &[u32] {
        &self.0.rows
    }

    /// Whether all rows of `other`, of the same batch, are among them.
    pub fn holds(&self, other: &Self) -> bool {
        other.rows().iter().all(|row| self.0.at[*row as usize] != PADDING)
    }

    /// The kept rows [1, kept, width] of `x` [b, n, width].
    pub fn pack(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, Direction::Pack)
    }

    /// `x` [1, kept, width] where it was, [b, n, width]; zeros at padding.
    pub fn unpack(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, Direction::Unpack)
    }

    fn run(&self, x: &Tensor, direction: Direction) -> Result<Tensor> {
        let [from, _] = direction.shapes(&self.0, x.dim(2)?);
        if x.dims() != from {
            bail!("rows {:?} were given where {from:?} are needed", x.dims());
        }
        if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
            return tape::apply(&[&x.contiguous()?], Move { places: self.0.clone(), direction });
        }
        self.composed(x, direction)
    }

    /// The definition in plain candle operations: rows are selected, padding from a row of zeros.
    fn composed(&self, x: &Tensor, direction: Direction) -> Result<Tensor> {
        let width = x.dim(2)?;
        let [_, to] = direction.shapes(&self.0, width);
        let x = x.reshape(((), width))?;
        let (x, rows) = match direction {
            Direction::Pack => (x, self.0.rows.clone()),
            Direction::Unpack => {
                let zeros = Tensor::zeros((1, width), x.dtype(), x.device())?;
                let last = self.0.rows.len() as u32;
                (Tensor::cat(&[x, zeros], 0)?, self.0.at.iter().map(|&at| at.min(last)).collect())
            }
        };
        x.contiguous()?.index_select(&Tensor::from_vec(rows, to[0] * to[1], x.device())?, 0)?.reshape(&to)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Pack,
    Unpack,
}

impl Direction {
    const fn back(self) -> Self {
        match self {
            Self::Pack => Self::Unpack,
            Self::Unpack => Self::Pack,
        }
    }

    /// What is read and what is made.
    fn shapes(self, places: &Places, width: usize) -> [[usize; 3]; 2] {
        let (wide, packed) = ([places.batch, places.len, width], [1, places.rows.len(), width]);
        match self {
            Self::Pack => [wide, packed],
            Self::Unpack => [packed, wide],
        }
    }
}

/// Copies rows to where they are packed, or back.
struct Move {
    places: Arc<Places>,
    direction: Direction,
}

impl Move {
    fn rows(&self, x: &[f32], width: usize, direction: Direction) -> Vec<f32> {
        let from = match direction {
            Direction::Pack => &self.places.rows,
            Direction::Unpack => &self.places.at,
        };
        let at_once = (CHUNK / width.max(1)).max(1);
        par::build(from.len() * width, at_once * width, |index, out| {
            for (to, &row) in out.chunks_exact_mut(width).zip(&from[index * at_once..]) {
                if row != PADDING {
                    to.copy_from_slice(&x[row as usize * width..][..width]);
                }
            }
        })
    }
}

impl FusedOp for Move {
    fn name(&self) -> &'static str {
        match self.direction {
            Direction::Pack => "pack-rows",
            Direction::Unpack => "unpack-rows",
        }
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let width = operands[0].1.dims()[2];
        let [x] = cpu::slices(operands)?;
        let [_, to] = self.direction.shapes(&self.places, width);
        Ok((self.rows(x, width, self.direction), Shape::from(&to)))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let width = x.dim(2)?;
        let dx = cpu::with_slices([grad], |[grad]| Ok(self.rows(grad, width, self.direction.back())))?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    fn mask(rows: &[&[u8]]) -> Tensor {
        Tensor::new(rows.concat(), &Device::Cpu).unwrap().reshape((rows.len(), rows[0].len())).unwrap()
    }

    fn numbers(shape: (usize, usize, usize)) -> Tensor {
        Tensor::arange(1.0, 1.0 + (shape.0 * shape.1 * shape.2) as f32, &Device::Cpu)
            .unwrap()
            .reshape(shape)
            .unwrap()
    }

    #[test]
    fn values_and_gradients_are_those_of_the_composed_form() {
        let mask = mask(&[&[1, 1, 0, 0, 0], &[0, 1, 0, 1, 1], &[0, 0, 0, 0, 0]]);
        let kept = KeptRows::of(&mask).unwrap().unwrap();
        for (direction, shape) in [(Direction::Pack, (3, 5, 4)), (Direction::Unpack, (1, 5, 4))] {
            let x = Var::from_tensor(&numbers(shape)).unwrap();
            let [fused, composed] = [kept.run(&x, direction).unwrap(), kept.composed(&x, direction).unwrap()]
                .map(|out| {
                    let weights = numbers(out.dims3().unwrap());
                    let grads = (&out * weights).unwrap().sum_all().unwrap().backward().unwrap();
                    let gradient = grads.get(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    (out.to_vec3::<f32>().unwrap(), gradient)
                });
            assert_eq!(fused, composed, "{direction:?}");
        }
        let x = numbers((3, 5, 4));
        let back = kept.unpack(&kept.pack(&x).unwrap()).unwrap();
        let keep = mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
        let want = x.broadcast_mul(&keep).unwrap();
        assert_eq!(back.to_vec3::<f32>().unwrap(), want.to_vec3::<f32>().unwrap());
    }

    #[test]
    fn little_padding_or_nothing_kept_is_not_packed() {
        assert!(KeptRows::of(&mask(&[&[1; 17], &[1; 17]])).unwrap().is_none());
        assert!(KeptRows::of(&mask(&[&[0; 4]])).unwrap().is_none());
        let kept = KeptRows::of(&mask(&[&[1, 1, 0]])).unwrap().unwrap();
        let error = kept.pack(&numbers((1, 4, 2))).unwrap_err().to_string();
        assert!(error.contains("[1, 4, 2]") && error.contains("[1, 3, 2]"), "{error}");
    }
}
