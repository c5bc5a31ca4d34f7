//! A model that starts from stored weights: another run's checkpoint, or a safetensors file in a public format.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

use super::checkpoint::{Checkpoint, CheckpointError};
use crate::model::family::{Net, Resolved};
use crate::nn::params::{Builder, Params};
use crate::record::file;

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

/// A model that started from a file.
pub struct Started {
    /// The model.
    pub net: Box<dyn Net>,
    /// Its parameters.
    pub params: Params,
    /// Parameters that the file does not have: drawn from the seed.
    pub fresh: Vec<String>,
    /// Tensors of the file that the model has no place for, as they are called there.
    pub unused: Vec<String>,
}

/// Builds `model` with the tensors of `path`, and what it lacks from `seed`.
///
/// # Errors
/// A file that cannot be read, two tensors for one parameter, a tensor of another shape.
pub fn start(
    model: &dyn Resolved,
    path: &Path,
    (seed, device, train): (u64, &Device, bool),
) -> Result<Started, WarmStartError> {
    let unfit = |reason: String| WarmStartError::Unfit { path: path.to_owned(), reason };
    let (given, names, mut unused) = named(model, path)?;
    let builder = Builder::warm(seed, given, device, train);
    let net = model.build(&builder).map_err(|error| unfit(error.to_string()))?;
    let params = builder.finish();
    let known: BTreeSet<&str> = params.names().chain(params.constants().keys().map(String::as_str)).collect();
    let fresh = params.names().filter(|name| !names.contains_key(*name)).map(str::to_owned).collect();
    unused.extend(
        names.iter().filter(|(ours, _)| !known.contains(ours.as_str())).map(|(_, name)| name.clone()),
    );
    unused.sort();
    Ok(Started { net, params, fresh, unused })
}

/// The tensors of `path` under the names of `model`, which needs no other.
///
/// # Errors
/// A file that cannot be read, two tensors for one parameter.
pub fn tensors(model: &dyn Resolved, path: &Path) -> Result<HashMap<String, Tensor>, WarmStartError> {
    Ok(named(model, path)?.0)
}

/// Tensors under our names, what those are called in the file, and what the model has no use for.
type Named = (HashMap<String, Tensor>, HashMap<String, String>, Vec<String>);

fn named(model: &dyn Resolved, path: &Path) -> Result<Named, WarmStartError> {
    let (stored, own) = read(path)?;
    let (mut given, mut names, mut unused) = (HashMap::new(), HashMap::new(), Vec::new());
    for (theirs, tensor) in stored {
        let Some(ours) = (if own { Some(theirs.clone()) } else { model.own_name(&theirs) }) else {
            unused.push(theirs);
            continue;
        };
        if let Some(other) = names.insert(ours.clone(), theirs.clone()) {
            let reason = format!("{other} and {theirs} are both {ours}");
            return Err(WarmStartError::Unfit { path: path.to_owned(), reason });
        }
        given.insert(ours, tensor);
    }
    Ok((given, names, unused))
}

/// Every tensor of a checkpoint of ours (its weights and constants) or of any other safetensors file, and whether it is
/// ours.
///
/// # Errors
/// A file that cannot be read.
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
    use crate::attention::choose::Choice;
    use crate::model::family::{self, Asked, Sizes};

    fn model() -> Box<dyn Resolved> {
        let choice = Choice::default_of(crate::attention::find("full").unwrap());
        let sizes = Sizes { width: Some(16), ffn: Some(16), ..Sizes::default() };
        let asked = Asked {
            preset: "ls-lra",
            task: None,
            choice: &choice,
            sizes: &sizes,
            len: Some(8),
            cached: None,
            vocab: None,
            examples: None,
        };
        family::resolve(&family::families(), &asked).unwrap()
    }

    fn save(path: &Path, tensors: &[(&str, Tensor)]) {
        let tensors: HashMap<String, Tensor> =
            tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        candle_core::safetensors::save(&tensors, path).unwrap();
    }

    #[test]
    fn given_tensors_are_taken_and_the_rest_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let bias = Tensor::arange(0f32, 2.0, &Device::Cpu).unwrap();
        let other = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        save(&file, &[("head.fc2.bias", bias), ("decoder.bias", other)]);
        let started = start(model().as_ref(), &file, (3, &Device::Cpu, true)).unwrap();
        assert_eq!(started.params.value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap(), [0.0, 1.0]);
        assert_eq!(started.unused, ["decoder.bias"]);
        assert_eq!(started.fresh.len() + 1, started.params.names().count());
        let cold = Builder::seeded(3, &Device::Cpu, true);
        model().build(&cold).unwrap();
        let (cold, name) = (cold.finish(), "head.fc1.weight");
        let value = |params: &Params| params.value(name).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(value(&cold), value(&started.params), "what is new starts as it would without the file");
    }

    #[test]
    fn misfits_name_the_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        save(&file, &[("head.fc2.bias", Tensor::zeros(7, DType::F32, &Device::Cpu).unwrap())]);
        let says = || start(model().as_ref(), &file, (3, &Device::Cpu, true)).err().unwrap().to_string();
        assert!(says().contains("\"head.fc2.bias\" has shape [7], expected [2]"), "{}", says());
        std::fs::write(&file, b"nothing").unwrap();
        assert!(says().contains("not a complete safetensors file"), "{}", says());
    }
}
