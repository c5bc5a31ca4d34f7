//! Permuting heads.

use std::collections::HashMap;

use candle_core::{Result, Tensor};

use super::run::Inputs;
use super::zoo::{BATCH, HEAD_DIM, HEADS};

/// Head h becomes head (h + 1) mod `HEADS` along `dim`, whose entries lie in `HEADS` equal blocks.
fn turn_dim(x: &Tensor, dim: usize) -> Result<Tensor> {
    let block = x.dim(dim)? / HEADS;
    Tensor::cat(&[x.narrow(dim, block * (HEADS - 1), block)?, x.narrow(dim, 0, block * (HEADS - 1))?], dim)
}

/// Inputs and parameters with their heads moved on by one. A parameter belongs to heads if its leading
/// dimension is a multiple of their number: the small variants are built so.
pub fn turn(inputs: &Inputs, params: &HashMap<String, Tensor>) -> Result<(Inputs, HashMap<String, Tensor>)> {
    let turned = inputs.0.iter().map(|(&name, x)| {
        // rows without heads, and heads that all queries share, stay as they are
        let shared = ["x", "stream"].contains(&name) || !x.dim(1)?.is_multiple_of(HEADS);
        let x = if shared { x.clone() } else { turn_dim(x, 1)?.contiguous()? };
        Ok((name, x))
    });
    let inputs = Inputs(turned.collect::<Result<_>>()?);
    let params = params.iter().map(|(name, value)| {
        // the first map of GLA's gates starts at the layer input
        let of_heads = value.dim(0)?.is_multiple_of(HEADS) && !name.contains("w_gk1");
        Ok((name.clone(), if of_heads { turn_dim(value, 0)?.contiguous()? } else { value.clone() }))
    });
    Ok((inputs, params.collect::<Result<_>>()?))
}

/// The same for rows [b, h, n, d].
pub fn turn_rows(out: &[f32], n: usize) -> Vec<f32> {
    let head = n * HEAD_DIM;
    let mut turned = Vec::with_capacity(out.len());
    for sample in 0..BATCH {
        for target in 0..HEADS {
            let source = (target + HEADS - 1) % HEADS;
            turned.extend_from_slice(&out[(sample * HEADS + source) * head..][..head]);
        }
    }
    turned
}
