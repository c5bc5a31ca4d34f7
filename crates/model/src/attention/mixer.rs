//! What mixers on the layer input x share: they have no queries, keys and values.

use candle_core::{Result, Tensor};

use super::knobs::Knobs;
use super::{AttentionInput, Shape};
use effattn_kernel::masking::zero_hidden_rows;

/// x [b, n, e] with hidden positions set to 0.
pub(super) fn visible(input: &AttentionInput) -> Result<Tensor> {
    let x = input.layer_input()?;
    match input.mask {
        Some(_) => zero_hidden_rows(&x.unsqueeze(1)?, input.mask)?.squeeze(1),
        None => Ok(x.clone()),
    }
}

/// Refuses a class token and other keys than queries.
pub(super) fn validate(_: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    let Shape { queries, keys, .. } = shape;
    if queries != keys {
        return Err(format!(
            "{queries} queries and {keys} keys; this mechanism mixes the rows of one sequence"
        ));
    }
    Ok(())
}
