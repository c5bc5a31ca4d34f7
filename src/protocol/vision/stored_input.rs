//! A stored image classifier and an image.

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::Device;

use super::loader::Loader;
use super::recipe;
use super::request::{VisionRequest, model};
use crate::protocol::stored_input::{
    Input, InputRequest, Positions, StoredInput, check_example, checkpoint, described, source,
};
use effattn_data::{Split, images};

/// See [`Protocol::stored_input`](crate::protocol::Protocol::stored_input).
pub fn stored_input(cell: &Path, asked: &InputRequest) -> Result<StoredInput> {
    let weights = checkpoint(cell, true)?;
    let request: VisionRequest = described(&weights.model)?;
    let Input::Example(index) = asked.input else {
        bail!("the model reads images; give --example instead of --text");
    };
    let (task, spec) = (&request.task, &request.spec);
    let set = (images::source(task)?.load)(asked.data, request.allow_partial)?;
    check_example(index, set.len(Split::Test), &format!("images in the test split of {task}"))?;
    let model = model(spec, &spec.choice()?, Some(set.classes().len()))?;
    let recipe = recipe::find(&spec.preset).map_err(anyhow::Error::msg)?;
    let loader = Loader::new(set, recipe, (spec.len as usize, spec.seed), request.allow_partial)?;
    let image = loader.evaluate(Split::Test, &[index])?;
    if image.is_empty() {
        bail!("image {index} of {task} is damaged; give another --example");
    }
    let (batch, source) = (image.batch(&Device::Cpu)?, source(spec, task, &weights));
    Ok(StoredInput { model: Box::new(model), weights, batch, positions: Positions::Patches, source })
}
