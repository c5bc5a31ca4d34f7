//! A model that starts from stored weights: another run's checkpoint, or a safetensors file in a public format.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

use super::checkpoint::{Checkpoint, CheckpointError};
use effattn_model::family::Architecture;
use effattn_model::nn::params::Params;
use effattn_record::file;

/// Why a model cannot start from a file.
#[derive(Debug, thiserror::Error)]
pub enum WarmStartError {
    /// The file.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The file cannot be read.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file that is not safetensors, tensors that do not fit the model.
    #[error("{}: {reason}", .path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name.
        reason: String,
    },
}

/// The tensors of `path` under the names of `model`, without those that it never has a use for.
pub fn tensors(model: &dyn Architecture, path: &Path) -> Result<HashMap<String, Tensor>, WarmStartError> {
    let (stored, own) = read(path)?;
    let mut given = HashMap::new();
    for (theirs, tensor) in stored {
        let Some(ours) = (if own { Some(theirs.clone()) } else { model.map_tensor_name(&theirs) }) else {
            continue;
        };
        if given.insert(ours.clone(), tensor).is_some() {
            let reason = format!("{theirs} and another tensor are both {ours}");
            return Err(WarmStartError::Unfit { path: path.to_owned(), reason });
        }
    }
    Ok(given)
}

/// Names of the tensors of `given` that a model with `params` has no place for.
pub fn unused<'a>(given: impl Iterator<Item = &'a String>, params: &Params) -> Vec<String> {
    let known: BTreeSet<&str> = params.names().chain(params.constants().keys().map(String::as_str)).collect();
    let mut unused: Vec<String> = given.filter(|name| !known.contains(name.as_str())).cloned().collect();
    unused.sort();
    unused
}

/// Every tensor of a checkpoint of ours (its weights and constants) or of any other safetensors file, and whether it is
/// ours.
pub fn read(path: &Path) -> Result<(HashMap<String, Tensor>, bool), WarmStartError> {
    let bytes = file::read(path).map_err(|source| WarmStartError::Io { path: path.to_owned(), source })?;
    let unfit = |reason: String| WarmStartError::Unfit { path: path.to_owned(), reason };
    let refuse =
        |error: safetensors::SafeTensorError| unfit(format!("not a complete safetensors file ({error})"));
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(refuse)?;
    let ours = header.metadata().as_ref().and_then(|metadata| metadata.get("format"));
    if ours.is_some_and(|format| format == "effattn checkpoint") {
        return Ok((Checkpoint::read(path, &bytes)?.into_weights(), true));
    }
    SafeTensors::deserialize(&bytes).map_err(refuse)?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu);
    let tensors = tensors.map_err(|error| unfit(error.to_string()))?;
    let single = tensors.into_iter().map(|(name, tensor)| {
        let dtype = if tensor.dtype().is_float() { DType::F32 } else { tensor.dtype() };
        Ok((name, tensor.to_dtype(dtype)?))
    });
    let single = single.collect::<candle_core::Result<_>>().map_err(|error| unfit(error.to_string()))?;
    Ok((single, false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::choose::MechanismChoice;
    use effattn_model::family::{self, ModelRequest, SizeOverrides};
    use effattn_model::nn::params::ParamBuilder;

    fn model() -> Box<dyn Architecture> {
        let choice = MechanismChoice::default_of(effattn_model::attention::find("full").unwrap());
        let sizes = SizeOverrides { width: Some(16), ffn: Some(16), ..SizeOverrides::default() };
        let asked = ModelRequest { len: Some(8), ..ModelRequest::new("ls-lra", &choice, &sizes) };
        family::resolve(&family::families(), &asked).unwrap()
    }

    fn save(path: &Path, tensors: &[(&str, Tensor)]) {
        let tensors: HashMap<String, Tensor> =
            tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        candle_core::safetensors::save(&tensors, path).unwrap();
    }

    #[test]
    fn tensors_without_a_place_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let bias = Tensor::arange(0f32, 2.0, &Device::Cpu).unwrap();
        let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        save(&file, &[("head.fc2.bias", bias), ("decoder.bias", other)]);
        let given = tensors(model().as_ref(), &file).unwrap();
        let builder = ParamBuilder::given_or_seeded(3, given.clone(), &Device::Cpu, true);
        model().build(&builder).unwrap();
        let params = builder.finish();
        assert_eq!(params.value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap(), [0.0, 1.0]);
        assert_eq!(unused(given.keys(), &params), ["decoder.bias"]);
        let cold = ParamBuilder::seeded(3, &Device::Cpu, true);
        model().build(&cold).unwrap();
        let (cold, name) = (cold.finish(), "head.fc1.weight");
        let value = |params: &Params| params.value(name).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(value(&cold), value(&params), "what is new starts as it would without the file");
    }

    #[test]
    fn misfits_name_the_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        save(&file, &[("head.fc2.bias", Tensor::zeros(7, DType::F32, &Device::Cpu).unwrap())]);
        let given = tensors(model().as_ref(), &file).unwrap();
        let error = model()
            .build(&ParamBuilder::given_or_seeded(3, given, &Device::Cpu, true))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("\"head.fc2.bias\" has shape [7], expected [2]"), "{error}");
        std::fs::write(&file, b"nothing").unwrap();
        let error = tensors(model().as_ref(), &file).err().unwrap().to_string();
        assert!(error.contains("not a complete safetensors file"), "{error}");
    }
}
