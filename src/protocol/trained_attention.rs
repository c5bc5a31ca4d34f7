//! Attention matrices of a stored model for one input: a matrix for every head of every layer.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::attention_matrix::of_call;
use super::stored_input::InputRequest;
use super::stored_model::find_cell;
use effattn_record::matrix::Matrix;

/// Most positions of a layer that is drawn.
const MOST: usize = 1024;

/// The matrices of a trained model.
pub struct TrainedMatrices {
    /// Layer by layer, head by head.
    pub matrices: Vec<Matrix>,
    /// The model and what it was trained on, in words.
    pub source: String,
}

/// The matrices of the first cell with weights of the run in the folder `run`, for an input.
pub fn matrices(run: &Path, input: &InputRequest) -> Result<TrainedMatrices> {
    let (protocol, cell) = find_cell(run)?;
    let stored = protocol.stored_input(&cell, input)?;
    let calls = stored.calls()?;
    ensure!(
        !calls.is_empty(),
        "{}: no layer has an attention matrix of all its positions; train another mechanism, as in effattn {} --quick --model full, and name its run",
        stored.source,
        protocol.name()
    );
    let mut matrices = Vec::new();
    for call in &calls {
        let (n, layer) = (call.positions, call.config.layer + 1);
        ensure!(n <= MOST, "layer {layer} has {n} positions; a picture has at most {MOST}");
        let names = stored.names(n);
        for head in 0..call.config.heads {
            let matrix = of_call(call, head).with_context(|| {
                format!(
                    "the weights of this model cannot be drawn; train one of another mechanism, as in effattn {} --quick --model full, and name its run",
                    protocol.name()
                )
            })?;
            let label = format!("layer {layer}, head {}", head + 1);
            matrices.push(Matrix { label, head: Some((layer, head + 1)), tokens: names.clone(), ..matrix });
        }
    }
    Ok(TrainedMatrices { matrices, source: stored.source })
}
