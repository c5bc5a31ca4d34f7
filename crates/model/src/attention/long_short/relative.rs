//! Relative positions of the language models.
//!
//! S(n) = [sin(n f), cos(n f)], f_i = 10000^(-2i/E): all sines, then all cosines. R(n) = S(n) r_net^T for keys,
//! C(n) = S(n) r_net_chunk^T + bias for slots (SPEC-ls section 5; Transformer-XL sec. 3.3).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};

use crate::attention::MechanismConfig;
use crate::nn::params::{Init, ParamBuilder};
use effattn_kernel::attend::{Relative, SlotTable};
use effattn_kernel::linear::linear;

/// Parameters of relative positions.
pub struct Positions {
    r_net: Tensor,
    chunk: Option<(Tensor, Tensor)>,
    content_bias: Tensor,
    position_bias: Tensor,
    heads: usize,
    /// Factor on both biases: attention multiplies whole logits by 1 / sqrt(D), which the autoregressive
    /// code of Transformer-LS applies to the queries before the biases are added.
    bias_factor: f64,
}

impl Positions {
    /// Builds `r_net.weight`, `r_w_bias`, `r_r_bias` and, with `chunks`, `r_net_chunk.*`. `scaled_biases`: the
    /// biases are divided by sqrt(D) like the rest of the logit (Transformer-XL).
    pub fn build(
        config: &MechanismConfig,
        builder: &ParamBuilder,
        chunks: bool,
        scaled_biases: bool,
    ) -> Result<Self> {
        let (heads, d) = (config.heads, config.head_dim);
        let e = heads * d;
        let init = Init::normal(0.02);
        let r_net = builder.param("r_net.weight", &[e, e], init)?;
        let chunk = if chunks {
            let weight = builder.param("r_net_chunk.weight", &[e, e], init)?;
            Some((weight, builder.param("r_net_chunk.bias", &[e], Init::ZERO)?))
        } else {
            None
        };
        Ok(Self {
            r_net,
            chunk,
            content_bias: builder.param("r_w_bias", &[heads, d], init)?,
            position_bias: builder.param("r_r_bias", &[heads, d], init)?,
            heads,
            bias_factor: if scaled_biases { 1.0 } else { (d as f64).sqrt() },
        })
    }

    /// Terms for `distances` key distances and `segments` (count, length, slots per segment).
    pub fn relative(
        &self,
        distances: usize,
        segments: Option<(usize, usize, usize)>,
        device: &Device,
    ) -> Result<Relative> {
        let e = self.r_net.dim(0)?;
        let split = |rows: Tensor| {
            let (n, d) = (rows.dim(0)?, e / self.heads);
            rows.reshape((n, self.heads, d))?.transpose(0, 1)?.contiguous() // [h, n, d]
        };
        let table = |count: usize, weight: &Tensor, bias: Option<&Tensor>| {
            split(linear(&sinusoids(count, e, device)?, weight, bias)?)
        };
        let slots = match (&self.chunk, segments) {
            (Some((weight, bias)), Some((count, segment, rank))) => {
                Some(SlotTable { table: table((count * rank).max(1), weight, Some(bias))?, segment, rank })
            }
            _ => None,
        };
        Ok(Relative {
            table: table(distances, &self.r_net, None)?,
            content_bias: (&self.content_bias * self.bias_factor)?,
            position_bias: (&self.position_bias * self.bias_factor)?,
            slots,
        })
    }
}

/// The longest table made so far, by width; layers and steps share it.
static TABLES: Mutex<BTreeMap<usize, Tensor>> = Mutex::new(BTreeMap::new());

/// S(0), ..., S(count - 1): [count, e].
fn sinusoids(count: usize, e: usize, device: &Device) -> Result<Tensor> {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let table = match tables.get(&e) {
        Some(table) if table.dim(0)? >= count => table.clone(),
        _ => {
            let table = make_sinusoids(count, e)?;
            tables.insert(e, table.clone());
            table
        }
    };
    table.narrow(0, 0, count)?.to_device(device)
}

fn make_sinusoids(count: usize, e: usize) -> Result<Tensor> {
    let frequency = |i: usize| 10_000f64.powf(-2.0 * i as f64 / e as f64);
    let frequencies: Vec<f64> = (0..e.div_ceil(2)).map(frequency).collect();
    let (sines, cosines) = (&frequencies[..e / 2], &frequencies[..e - e / 2]);
    let mut data = Vec::with_capacity(count * e);
    for position in 0..count {
        let position = position as f64;
        data.extend(sines.iter().map(|frequency| (position * frequency).sin() as f32));
        data.extend(cosines.iter().map(|frequency| (position * frequency).cos() as f32));
    }
    Tensor::from_vec(data, (count, e), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoids_have_all_sines_first_and_do_not_depend_on_history() -> Result<()> {
        let long = sinusoids(50, 6, &Device::Cpu)?.to_vec2::<f32>()?;
        let short = sinusoids(3, 6, &Device::Cpu)?.to_vec2::<f32>()?;
        assert_eq!(short, long[..3]);
        let f = 10_000f64.powf(-2.0 / 6.0);
        for (n, row) in short.iter().enumerate() {
            let n = n as f64;
            assert_eq!([row[0], row[1]], [n.sin() as f32, (n * f).sin() as f32]);
            assert_eq!([row[3], row[4]], [n.cos() as f32, (n * f).cos() as f32]);
        }
        Ok(())
    }
}
