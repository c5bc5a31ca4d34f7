//! Checkpoints: weights, moments, constants and where the run stood, in one safetensors file.
//!
//! A checkpoint is written under a temporary name, flushed, and renamed, so that whatever happens a complete one
//! stands under its name. Training goes on from it bit for bit (same threads, same build).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, View};
use serde_json::Value as Json;

use super::optim::{Optimizer, OptimizerConfig};
use super::schedule::Schedule;
use super::step::Trainer;
use effattn_kernel::adamw::Moments;
use effattn_model::nn::params::{ParamBuilder, Params};
use effattn_record::file;

/// Version of the file format; a reader takes this and nothing newer.
pub const SCHEMA: u32 = 1;

const WEIGHT: &str = "weight/";
const FIRST: &str = "first/";
const SECOND: &str = "second/";
const CONSTANT: &str = "constant/";
const EXTRA: &str = "extra/";

/// What went wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Not a checkpoint, or one that is damaged.
    #[error("{} is not a complete checkpoint: {reason}; delete it or start over with --fresh", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Written by a newer version.
    #[error("{} has checkpoint schema {found}, this version reads up to {SCHEMA}; use the effattn that wrote it ({version})", .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: u32,
        /// Version of effattn that wrote it.
        version: String,
    },
    /// A checkpoint of another model.
    #[error("{} belongs to another model: {key} is {stored} there and {wanted} here; use the same settings or start over with --fresh", .path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The first setting that differs.
        key: String,
        /// Its value in the file.
        stored: String,
        /// Its value here.
        wanted: String,
    },
    /// Weights that do not fit the model.
    #[error("{} does not fit the model: {reason}", .path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What the model says.
        reason: String,
    },
}

/// A checkpoint in memory.
pub struct Checkpoint {
    path: PathBuf,
    /// Version of effattn that wrote it.
    pub version: String,
    /// Description of the model, vocabulary included, as given to [`save`].
    pub model: Json,
    /// Where the run stood, as given to [`save`].
    pub state: Json,
    /// Number of updates made.
    pub updates: u64,
    tensors: HashMap<String, Tensor>,
}

/// One tensor on its way into a file.
struct Stored {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The types that parameters and constants have.
const TYPES: &[(DType, safetensors::Dtype)] = &[
    (DType::F32, safetensors::Dtype::F32),
    (DType::F64, safetensors::Dtype::F64),
    (DType::I64, safetensors::Dtype::I64),
    (DType::U32, safetensors::Dtype::U32),
];

impl Stored {
    fn new(tensor: &Tensor) -> candle_core::Result<Self> {
        let Some((_, dtype)) = TYPES.iter().find(|(dtype, _)| *dtype == tensor.dtype()) else {
            candle_core::bail!("tensors of type {:?} cannot be stored", tensor.dtype());
        };
        let flat = tensor.flatten_all()?;
        let bytes = match tensor.dtype() {
            DType::F64 => bytemuck::cast_slice(&flat.to_vec1::<f64>()?).to_vec(),
            DType::I64 => bytemuck::cast_slice(&flat.to_vec1::<i64>()?).to_vec(),
            DType::U32 => bytemuck::cast_slice(&flat.to_vec1::<u32>()?).to_vec(),
            _ => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
        };
        Ok(Self { dtype: *dtype, shape: tensor.dims().to_vec(), bytes })
    }
}

impl View for Stored {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.as_slice().into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a checkpoint of `trainer` to `path`. `model` describes the model (its configuration and the
/// vocabulary), `state` where the run stands (data order, random streams, best result so far), `extra` tensors that
/// belong to the state (the cache of a language model).
///
/// # Errors
/// A folder that cannot be written, a full disk: what stood under `path` before is untouched.
pub fn save(
    path: &Path,
    trainer: &Trainer,
    model: &Json,
    state: &Json,
    extra: &[(String, Tensor)],
) -> Result<(), CheckpointError> {
    let tensors = collect(trainer, extra)
        .map_err(|error| CheckpointError::Unfit { path: path.into(), reason: error.to_string() })?;
    let metadata = HashMap::from([
        ("format".into(), "effattn checkpoint".into()),
        ("schema".into(), SCHEMA.to_string()),
        ("version".into(), env!("CARGO_PKG_VERSION").into()),
        ("updates".into(), trainer.optimizer().updates().to_string()),
        ("model".into(), model.to_string()),
        ("state".into(), state.to_string()),
    ]);
    write(path, tensors, metadata)
}

/// Replaces `path` by a safetensors file.
fn write(
    path: &Path,
    tensors: Vec<(String, Stored)>,
    metadata: HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let fill = |written: &Path| {
        safetensors::serialize_to_file(tensors, Some(metadata), written).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => std::io::Error::other(other),
        })?;
        sort_metadata(&mut std::fs::File::options().read(true).write(true).open(written)?)
    };
    file::write_by(path, fill).map_err(|source| CheckpointError::Io { path: path.into(), source })
}

/// Sorts the entries that stand in front of the tensors, which a hash map gave in any order: equal checkpoints are equal files.
fn sort_metadata(file: &mut std::fs::File) -> std::io::Result<()> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut header = vec![0; u64::from_le_bytes(length) as usize];
    file.read_exact(&mut header)?;
    let mut json: Json = serde_json::from_slice(&header)?;
    if let Some(entries) = json["__metadata__"].as_object_mut() {
        let sorted: BTreeMap<String, Json> = std::mem::take(entries).into_iter().collect();
        entries.extend(sorted);
    }
    let mut sorted = serde_json::to_vec(&json)?;
    if sorted.len() > header.len() {
        return Err(std::io::Error::other("its header grew by being sorted"));
    }
    sorted.resize(header.len(), b' ');
    file.seek(SeekFrom::Start(length.len() as u64))?;
    file.write_all(&sorted)
}

fn collect(trainer: &Trainer, extra: &[(String, Tensor)]) -> candle_core::Result<Vec<(String, Stored)>> {
    let params = trainer.params();
    let mut all = Vec::new();
    for (group, moments) in params.groups().iter().zip(trainer.optimizer().moments()) {
        let (first, second) = moments.tensors()?;
        for part in &group.parts {
            let slice =
                |flat: &Tensor| flat.narrow(0, part.offset, part.len())?.reshape(part.shape.as_slice());
            all.push((format!("{WEIGHT}{}", part.name), Stored::new(&params.value(&part.name)?)?));
            all.push((format!("{FIRST}{}", part.name), Stored::new(&slice(&first)?)?));
            all.push((format!("{SECOND}{}", part.name), Stored::new(&slice(&second)?)?));
        }
    }
    for (name, constant) in params.constants() {
        all.push((format!("{CONSTANT}{name}"), Stored::new(constant)?));
    }
    for (name, tensor) in extra {
        all.push((format!("{EXTRA}{name}"), Stored::new(tensor)?));
    }
    Ok(all)
}

impl Checkpoint {
    /// Reads the checkpoint at `path`.
    pub fn load(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = file::read(path).map_err(|source| CheckpointError::Io { path: path.into(), source })?;
        Self::read(path, &bytes)
    }

    /// Reads `bytes`; `path` is what messages call them.
    pub fn read(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
        let (_, header) = SafeTensors::read_metadata(bytes)
            .map_err(|error| damaged(format!("its header cannot be read ({error})")))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let text =
            |key: &str| metadata.get(key).cloned().ok_or_else(|| damaged(format!("it has no {key:?} entry")));
        if text("format")? != "effattn checkpoint" {
            return Err(damaged("it is a safetensors file of another kind".into()));
        }
        let version = text("version")?;
        let found: u32 = text("schema")?.parse().map_err(|_| damaged("its schema is not a number".into()))?;
        if found > SCHEMA {
            return Err(CheckpointError::Newer { path: path.into(), found, version });
        }
        let json = |key: &str| {
            serde_json::from_str(&text(key)?)
                .map_err(|error| damaged(format!("its {key} is not JSON ({error})")))
        };
        let updates = text("updates")?.parse().map_err(|_| damaged("its updates are not a number".into()))?;
        let (model, state) = (json("model")?, json("state")?);
        let content = SafeTensors::deserialize(bytes)
            .map_err(|error| damaged(format!("its tensors cannot be read ({error})")))?;
        let tensors = content.iter().map(|(name, view)| Ok((name.to_owned(), tensor(&view)?)));
        let tensors = tensors
            .collect::<candle_core::Result<_>>()
            .map_err(|error| damaged(format!("a tensor cannot be read ({error})")))?;
        Ok(Self { path: path.into(), version, model, state, updates, tensors })
    }

    /// Makes sure that it belongs to the model that `wanted` describes.
    pub fn expect_model(&self, wanted: &Json) -> Result<(), CheckpointError> {
        match difference("", &self.model, wanted) {
            None => Ok(()),
            Some((key, stored, wanted)) => {
                Err(CheckpointError::OtherModel { path: self.path.clone(), key, stored, wanted })
            }
        }
    }

    /// Its weights and constants by name.
    pub fn into_weights(self) -> HashMap<String, Tensor> {
        let own =
            |name: &str| name.strip_prefix(WEIGHT).or_else(|| name.strip_prefix(CONSTANT)).map(str::to_owned);
        self.tensors.into_iter().filter_map(|(name, tensor)| Some((own(&name)?, tensor))).collect()
    }

    /// A builder that hands out its weights and constants.
    pub fn builder(&self, device: &Device, train: bool) -> candle_core::Result<ParamBuilder> {
        let parts = self.tensors.iter().filter_map(|(name, tensor)| {
            let name = name.strip_prefix(WEIGHT).or_else(|| name.strip_prefix(CONSTANT))?;
            Some((name.to_owned(), tensor))
        });
        let tensors = parts.map(|(name, tensor)| Ok((name, tensor.to_device(device)?)));
        Ok(ParamBuilder::given(tensors.collect::<candle_core::Result<_>>()?, device, train))
    }

    /// The trainer as it was. `params` come from a model built with [`Self::builder`].
    pub fn trainer(
        &self,
        params: Params,
        optimizer: impl Into<OptimizerConfig>,
        schedule: Schedule,
    ) -> Result<Trainer, CheckpointError> {
        let unfit = |reason: String| CheckpointError::Unfit { path: self.path.clone(), reason };
        let flat = |prefix: &str, group: &effattn_model::nn::params::StoredGroup| {
            let parts =
                group.parts.iter().map(|part| match self.tensors.get(&format!("{prefix}{}", part.name)) {
                    Some(tensor) if tensor.dims() == part.shape => tensor.flatten_all(),
                    Some(tensor) => candle_core::bail!(
                        "{prefix}{} has shape {:?}, expected {:?}",
                        part.name,
                        tensor.dims(),
                        part.shape
                    ),
                    None => candle_core::bail!("{prefix}{} is missing", part.name),
                });
            let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
            Tensor::cat(&parts, 0)?.to_device(group.var.device())
        };
        let moments = params
            .groups()
            .iter()
            .map(|group| Moments::from_tensors(&flat(FIRST, group)?, &flat(SECOND, group)?));
        let moments =
            moments.collect::<candle_core::Result<_>>().map_err(|error| unfit(error.to_string()))?;
        let optimizer = Optimizer::restore(optimizer, &params, moments, self.updates)
            .map_err(|error| unfit(error.to_string()))?;
        Ok(Trainer::restore(params, optimizer, schedule))
    }

    /// The first weight, by name, with a value that is not finite.
    pub fn not_finite(&self) -> Option<&str> {
        let finite = |tensor: &Tensor| {
            let sum =
                tensor.to_dtype(DType::F64).and_then(|tensor| tensor.abs()?.sum_all()?.to_scalar::<f64>());
            sum.is_ok_and(f64::is_finite)
        };
        let weights =
            self.tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(WEIGHT)?, tensor)));
        weights.filter(|(_, tensor)| !finite(tensor)).map(|(name, _)| name).min()
    }

    /// Writes its weights and constants to `path` under their own names, for other programs. The header has the one entry
    /// that Hugging Face's readers ask for: entries have no fixed order, and the same weights are the same file.
    ///
    /// # Errors
    /// A folder that cannot be written, a full disk: what stood under `path` before is untouched.
    pub fn export(&self, path: &Path, about: HashMap<String, String>) -> Result<(), CheckpointError> {
        let own =
            |name: &str| name.strip_prefix(WEIGHT).or_else(|| name.strip_prefix(CONSTANT)).map(str::to_owned);
        let mut tensors = Vec::new();
        for (name, tensor) in self.tensors.iter().filter_map(|(name, tensor)| Some((own(name)?, tensor))) {
            let stored = Stored::new(tensor);
            let unfit = |error: candle_core::Error| CheckpointError::Unfit {
                path: path.into(),
                reason: error.to_string(),
            };
            tensors.push((name, stored.map_err(unfit)?));
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        write(path, tensors, metadata.into_iter().chain(about).collect())
    }

    /// A tensor of the state.
    pub fn extra(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(&format!("{EXTRA}{name}"))
    }
}

fn tensor(view: &TensorView) -> candle_core::Result<Tensor> {
    let Some((dtype, _)) = TYPES.iter().find(|(_, dtype)| *dtype == view.dtype()) else {
        candle_core::bail!("type {:?} is not used by checkpoints", view.dtype());
    };
    Tensor::from_raw_buffer(view.data(), *dtype, view.shape(), &Device::Cpu)
}

/// The first place where two descriptions differ: path, there, here.
fn difference(at: &str, stored: &Json, wanted: &Json) -> Option<(String, String, String)> {
    match (stored, wanted) {
        (Json::Object(a), Json::Object(b)) => {
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            let null = Json::Null;
            keys.map(|key| {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                difference(&at, a.get(key).unwrap_or(&null), b.get(key).unwrap_or(&null))
            })
            .find_map(|found| found)
        }
        _ if stored == wanted => None,
        _ => Some((at.to_owned(), stored.to_string(), wanted.to_string())),
    }
}
