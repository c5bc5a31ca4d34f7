//! Launching the kernels of [`crate::delta_rule::normalize()`].

use candle_core::Result;

use crate::cuda::{Arg, BufferView, KernelDevice, Launch, Module, THREADS};
use crate::delta_rule::NormalizeConfig;

/// The kernels.
pub const MODULE: Module =
    Module { name: "delta-normalize", source: include_str!("normalize.cu"), defines: &[] };

/// Threads of a warp; WARP of the source.
const WARP: usize = 32;

/// Sizes of rows `[q heads | k heads | v heads]`.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub rows: usize,
    pub heads: usize,
    pub key_width: usize,
    pub value_width: usize,
}

impl Sizes {
    fn launch<M: KernelDevice>(
        &self,
        machine: &M,
        kernel: &str,
        inputs: &[BufferView<M>],
        config: &NormalizeConfig,
    ) -> Result<M::Floats> {
        let Self { rows, heads, key_width, value_width } = *self;
        let mut out = machine.fresh(rows * heads * (2 * key_width + value_width))?;
        let mut arguments: Vec<Arg<M>> = inputs.iter().map(|view| Arg::In(*view)).collect();
        arguments.push(Arg::Long(rows));
        let words = [heads, key_width, value_width, config.silu_qk.into(), config.silu_v.into()];
        arguments.extend(words.map(Arg::Int));
        arguments.extend([config.eps, config.query_scale].map(|number| Arg::Float(number as f32)));
        arguments.push(Arg::Out(&mut out));
        let grid = [(rows * 3 * heads).div_ceil(THREADS / WARP), 1, 1];
        machine.launch(&Launch { module: MODULE, kernel, grid, shared: 0 }, arguments)?;
        Ok(out)
    }

    /// The rows after the activations and divisions.
    pub fn forward<M: KernelDevice>(
        &self,
        machine: &M,
        x: BufferView<M>,
        config: &NormalizeConfig,
    ) -> Result<M::Floats> {
        self.launch(machine, "delta_normalize", &[x], config)
    }

    /// The gradient of the rows.
    pub fn backward<M: KernelDevice>(
        &self,
        machine: &M,
        inputs: [BufferView<M>; 2],
        config: &NormalizeConfig,
    ) -> Result<M::Floats> {
        self.launch(machine, "delta_normalize_backward", &inputs, config)
    }
}
