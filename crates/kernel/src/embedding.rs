//! Rows of a table by index, optionally with a row per position added.

use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::par::{self, Chunks};
use super::cpu::{self, rows};
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::op::{FusedOp, SavedOutput};
use super::tape;

/// The id of padding in fairseq's vocabularies: words of the word language model and of RoBERTa.
pub const PADDING: u32 = 1;

/// `table` [rows, d] at `ids` (any shape, u32): ids' shape + `[d]`.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    if super::fused(table) {
        return tape::apply(&[&table.contiguous()?], Embedding::new(ids, table)?);
    }
    composed(ids, table)
}

/// The definition in plain candle operations.
pub fn composed(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    table.index_select(&ids.flatten_all()?, 0)?.reshape(output_dims(ids, table)?)
}

/// `table[ids] + positions[0..n]` for `ids` [b, n]: [b, n, d]. `positions` [n_max, d] with n_max >= n.
pub fn with_positions(ids: &Tensor, table: &Tensor, positions: &Tensor) -> Result<Tensor> {
    let (_, n) = ids.dims2()?;
    if positions.dim(0)? < n || positions.dim(1)? != table.dim(1)? {
        bail!("positions {:?} do not fit {n} rows of table {:?}", positions.dims(), table.dims());
    }
    if super::fused_cpu(table.device()) && table.dtype() == DType::F32 {
        return tape::apply(&[&table.contiguous()?, &positions.contiguous()?], Embedding::new(ids, table)?);
    }
    with_positions_composed(ids, table, positions)
}

/// [`with_positions`] as [`embedding`] and an addition.
pub fn with_positions_composed(ids: &Tensor, table: &Tensor, positions: &Tensor) -> Result<Tensor> {
    embedding(ids, table)?.broadcast_add(&positions.narrow(0, 0, ids.dim(1)?)?)
}

fn output_dims(ids: &Tensor, table: &Tensor) -> Result<Vec<usize>> {
    let mut dims = ids.dims().to_vec();
    dims.push(table.dim(1)?);
    Ok(dims)
}

struct Embedding {
    ids: Vec<u32>,
    /// Length n of a sequence (1 without positions).
    length: usize,
    d: usize,
    /// Shape of the result.
    dims: Vec<usize>,
}

impl Embedding {
    fn new(ids: &Tensor, table: &Tensor) -> Result<Self> {
        let (count, d) = table.dims2()?;
        let dims = output_dims(ids, table)?;
        let length = ids.dims().last().copied().unwrap_or(1);
        let ids = ids.flatten_all()?.to_vec1::<u32>()?;
        match ids.iter().find(|&&id| id as usize >= count) {
            Some(id) => bail!("id {id} is outside a table of {count} rows"),
            None => Ok(Self { ids, length, d, dims }),
        }
    }

    fn forward(&self, table: &[f32], positions: Option<&[f32]>) -> (Vec<f32>, Shape) {
        let d = self.d;
        let size = Chunks::rows(self.ids.len(), d).size;
        let y = par::build(self.ids.len() * d, size * d, |index, y| {
            let first = index * size;
            for (offset, y) in y.chunks_exact_mut(d.max(1)).enumerate() {
                let row = self.ids[first + offset] as usize * d;
                match positions {
                    Some(positions) => {
                        let position = (first + offset) % self.length * d;
                        rows::add_row(&table[row..row + d], &positions[position..position + d], y);
                    }
                    None => y.copy_from_slice(&table[row..row + d]),
                }
            }
        });
        (y, self.dims.clone().into())
    }

    /// Sums the rows of `dy` by id. Each part takes consecutive rows and has a table of its own; a part has at
    /// least twice as many rows as the table, so that adding the tables costs little.
    fn table_gradient(&self, dy: &[f32], table: &Tensor) -> Result<Tensor> {
        let d = self.d;
        let count = table.dim(0)?;
        let chunks = Chunks::balanced(self.ids.len(), (2 * count).max(self.ids.len().div_ceil(16)), 1);
        let parts = par::build(chunks.count() * count * d, count * d, |index, part| {
            for at in chunks.range(index) {
                let row = self.ids[at] as usize * d;
                rows::add(&dy[at * d..(at + 1) * d], &mut part[row..row + d]);
            }
        });
        Tensor::from_vec(par::sum_parts(&parts, count * d), table.shape(), &Device::Cpu)
    }

    /// Sums the rows of `dy` over the batch; positions beyond the sequence get zeros.
    fn position_gradient(&self, dy: &[f32], positions: &Tensor) -> Result<Tensor> {
        let (d, used) = (self.d, self.length * self.d);
        let chunk = Chunks::rows(positions.dim(0)?, d).size * d;
        let sum = par::build(positions.elem_count(), chunk, |index, sum| {
            let first = (index * chunk).min(used);
            let last = (index * chunk + sum.len()).min(used);
            for sample in dy.chunks_exact(used.max(1)) {
                rows::add(&sample[first..last], &mut sum[..last - first]);
            }
        });
        Tensor::from_vec(sum, positions.shape(), &Device::Cpu)
    }
}

impl FusedOp for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        if let [_] = operands {
            let [table] = cpu::slices(operands)?;
            return Ok(self.forward(table, None));
        }
        let [table, positions] = cpu::slices(operands)?;
        Ok(self.forward(table, Some(positions)))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        tensors::forward(operands, self.dims.as_slice(), |device, [table]| {
            device_rows::table_rows(device, table, &self.ids, self.d)
        })
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let table = operands[0];
        #[cfg(feature = "cuda")]
        if table.device().is_cuda() {
            return tensors::with_views([grad], |device, [dy]| {
                let (count, width) = table.dims2()?;
                let gradient = device_rows::table_gradient(device, dy, &self.ids, [count, width])?;
                Ok(vec![Some(tensors::tensor(device, gradient, table.shape()))])
            });
        }
        cpu::with_slices([grad], |[dy]| {
            let mut grads = vec![table.track_op().then(|| self.table_gradient(dy, table)).transpose()?];
            for positions in &operands[1..] {
                let gradient = positions.track_op().then(|| self.position_gradient(dy, positions));
                grads.push(gradient.transpose()?);
            }
            Ok(grads)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    fn ids(b: usize, n: usize, rows: usize) -> Tensor {
        let data = (0..b * n).map(|i| ((i * i + i / 3) % rows) as u32).collect();
        Tensor::from_vec(data, (b, n), &Device::Cpu).unwrap()
    }

    #[test]
    fn fused_is_the_twin() {
        for (b, n, count, d) in [(1, 1, 1, 1), (2, 3, 5, 8), (3, 701, 7, 17), (2, 5, 100, 64)] {
            let ids = ids(b, n, count);
            let inputs = [randn("table", &[count, d]), randn("positions", &[n + 2, d])];
            let what = format!("[{b}, {n}] of [{count}, {d}]");
            check(&what, &inputs[..1], 1e-5, |x| embedding(&ids, &x[0]));
            check(&what, &inputs, 1e-5, |x| with_positions(&ids, &x[0], &x[1]));
        }
    }

    #[test]
    fn bad_ids_and_short_positions_are_errors() {
        let table = randn("table", &[3, 4]);
        let ids = Tensor::new(&[[0u32, 3, 1, 2, 0]], &Device::Cpu).unwrap();
        assert!(embedding(&ids, &table).is_err());
        assert!(with_positions(&ids, &randn("table", &[4, 4]), &randn("positions", &[4, 4])).is_err());
    }
}
