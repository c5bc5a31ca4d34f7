//! Reading golden files.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value};

use super::{CheckError, Element, FileVerdict};

/// Most multiply-adds of an attention core that a golden file may ask for, a hundred times what shipped ones do.
const MOST_MACS: u64 = 1 << 26;
/// Most of a file that `effattn golden` wrote, at a shape that its user chose.
pub(super) const MOST_OWN_MACS: u64 = 1 << 32;
/// `origin` in the metadata of a file that `effattn golden` wrote.
pub(super) const ORIGIN: &str = "effattn";

/// A golden file in memory.
pub struct Golden {
    /// What messages call the file.
    pub file: String,
    /// Stem of the file name.
    pub stem: String,
    /// All tensors (floats as f32, whole numbers as i64).
    pub tensors: BTreeMap<String, Tensor>,
    /// All metadata.
    pub metadata: HashMap<String, String>,
    /// Metadata `config`.
    pub config: Map<String, Value>,
    /// Metadata `leaves`.
    pub leaves: Vec<String>,
    atol: HashMap<String, f64>,
    rtol: f64,
}

impl Golden {
    /// Reads `bytes`.
    pub fn read(file: &str, bytes: &[u8]) -> std::result::Result<Self, CheckError> {
        let wrong = |reason: String| CheckError::NotGolden { file: file.to_owned(), reason };
        let (_, header) = SafeTensors::read_metadata(bytes)
            .map_err(|error| wrong(format!("its safetensors header cannot be read ({error})")))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let text =
            |key: &str| metadata.get(key).ok_or_else(|| wrong(format!("its metadata have no {key:?} entry")));
        text("mechanism")?;
        let json = |key: &str| text(key).and_then(|text| parse(key, text).map_err(wrong));
        let config = match json("config")? {
            Value::Object(map) => map,
            _ => return Err(wrong("its config is not a JSON object".into())),
        };
        let leaves = serde_json::from_value(json("leaves")?)
            .map_err(|error| wrong(format!("its leaves are not a list of names ({error})")))?;
        let atol = serde_json::from_value(json("atol")?)
            .map_err(|error| wrong(format!("its atol is not a tolerance per tensor ({error})")))?;
        let rtol = text("rtol")?.parse().map_err(|_| wrong("its rtol is not a number".into()))?;
        let content = SafeTensors::deserialize(bytes)
            .map_err(|error| wrong(format!("its tensors cannot be read ({error})")))?;
        let tensors = content
            .iter()
            .map(|(name, view)| Ok((name.to_owned(), tensor(&view)?)))
            .collect::<Result<_>>()
            .map_err(|error| wrong(format!("a tensor cannot be read ({error})")))?;
        let stem = Path::new(file).file_stem().map_or(file.into(), |stem| stem.to_string_lossy());
        Ok(Self { file: file.into(), stem: stem.into(), tensors, metadata, config, leaves, atol, rtol })
    }

    /// A case of our own of `mechanism`, whose results are not known yet. `config` has its knobs and sizes.
    pub(super) fn unknown(file: &str, mechanism: &str, causal: bool, config: Map<String, Value>) -> Self {
        let metadata = [
            ("mechanism", mechanism.to_owned()),
            ("causal", causal.to_string()),
            ("origin", ORIGIN.to_owned()),
        ];
        Self {
            file: file.into(),
            stem: file.into(),
            tensors: BTreeMap::new(),
            metadata: metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            config,
            leaves: Vec::new(),
            atol: HashMap::new(),
            rtol: 0.0,
        }
    }

    /// One metadata entry, empty if absent.
    pub fn meta(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }

    /// Whether this program wrote it (`effattn golden`).
    pub fn is_own(&self) -> bool {
        self.meta("origin") == ORIGIN
    }

    /// A whole number of `config`; none where it is larger than any size of a golden file.
    pub fn int(&self, key: &str) -> Option<usize> {
        self.config
            .get(key)
            .and_then(Value::as_u64)
            .filter(|value| *value <= 1 << 20)
            .map(|value| value as usize)
    }

    /// Refuses what is more work than any golden file asks for: what is held at once grows with it, and a block of 65,536
    /// positions around a dozen takes 17 GB.
    pub(super) fn affordable(&self, core_macs: u64) -> std::result::Result<(), CheckError> {
        let most = if self.is_own() { MOST_OWN_MACS } else { MOST_MACS };
        if core_macs <= most {
            return Ok(());
        }
        Err(self.wrong(format!(
            "its config asks for {core_macs} multiply-adds of attention; a golden file has at most {most}"
        )))
    }

    /// A tensor, or an error that names it.
    pub fn tensor(&self, name: &str) -> std::result::Result<&Tensor, CheckError> {
        self.tensors.get(name).ok_or_else(|| CheckError::NotGolden {
            file: self.file.clone(),
            reason: format!("it has no tensor {name:?}"),
        })
    }

    /// Names of all tensors that have a tolerance.
    pub(super) fn compared(&self) -> Vec<String> {
        let mut names: Vec<String> = self.atol.keys().cloned().collect();
        names.sort();
        names
    }

    /// A verdict without comparisons.
    pub(super) fn verdict(&self) -> FileVerdict {
        FileVerdict {
            name: self.stem.clone(),
            mechanism: self.meta("mechanism").into(),
            error_over_tolerance: 0.0,
            worst: String::new(),
            element: None,
            problem: None,
            idle: Vec::new(),
        }
    }

    /// An error for something the file should have.
    pub(super) fn wrong(&self, reason: String) -> CheckError {
        CheckError::NotGolden { file: self.file.clone(), reason }
    }

    /// An error for something the code under test refused.
    pub(super) fn refused(&self, error: impl std::fmt::Display) -> CheckError {
        CheckError::Refused { file: self.file.clone(), reason: error.to_string() }
    }

    /// Compares `got` with the tensor called `name`. Rows whose `keep` is 0 need only be finite; `keep` has
    /// one entry per row of the last dimension.
    pub(super) fn compare(
        &self,
        verdict: &mut FileVerdict,
        name: &str,
        got: &Tensor,
        keep: Option<&[f32]>,
    ) -> std::result::Result<(), CheckError> {
        let atol = *self.atol.get(name).ok_or_else(|| CheckError::NotGolden {
            file: self.file.clone(),
            reason: format!("it has no tolerance for {name:?}"),
        })?;
        self.compare_within(verdict, name, (got, atol), keep)
    }

    /// Largest number of the tensor called `name`.
    pub(super) fn largest(&self, name: &str) -> std::result::Result<f64, CheckError> {
        let wrong = |error| self.refused(error);
        let flat = self.tensor(name)?.to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1::<f32>());
        Ok(largest(&flat.map_err(wrong)?))
    }

    /// [`Self::compare`] within `atol`.
    pub(super) fn compare_within(
        &self,
        verdict: &mut FileVerdict,
        name: &str,
        (got, atol): (&Tensor, f64),
        keep: Option<&[f32]>,
    ) -> std::result::Result<(), CheckError> {
        for (what, tolerance) in [("atol", atol), ("rtol", self.rtol)] {
            if !tolerance.is_finite() || tolerance < 0.0 {
                let is = format!("the {what} of {name} is {tolerance}");
                return Err(self.wrong(format!("{is}; a tolerance is 0 or above, and finite")));
            }
        }
        let want = self.tensor(name)?;
        if want.dims() != got.dims() {
            verdict.complain(format!("{name} has shape {:?}, expected {:?}", got.dims(), want.dims()));
            return Ok(());
        }
        let dims = want.dims().to_vec();
        let width = dims.last().copied().unwrap_or(1).max(1);
        let flat = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (want, got) = (
            flat(want).map_err(|error| self.refused(error))?,
            flat(got).map_err(|error| self.refused(error))?,
        );
        for (row, (want, got)) in want.chunks(width).zip(got.chunks(width)).enumerate() {
            let tolerance = atol + self.rtol * largest(want);
            let compared = keep.is_none_or(|keep| keep[row] != 0.0);
            for (column, (&want, &got)) in want.iter().zip(got).enumerate() {
                if compared && !want.is_finite() {
                    return Err(self.wrong(format!("its {name} has numbers that are not finite")));
                }
                if !got.is_finite() {
                    verdict.compare(name, f64::NAN);
                } else if compared {
                    let gap = f64::from((want - got).abs());
                    let ratio = if gap == 0.0 { 0.0 } else { gap / tolerance };
                    let worse = ratio > verdict.error_over_tolerance;
                    verdict.compare(name, ratio);
                    if worse {
                        let index = place(row * width + column, &dims);
                        verdict.element = Some(Element { index, got, want });
                    }
                }
            }
        }
        Ok(())
    }
}

fn largest(values: &[f32]) -> f64 {
    f64::from(values.iter().fold(0f32, |a, b| a.max(b.abs())))
}

/// The index of element number `flat` of a tensor of shape `dims`.
fn place(mut flat: usize, dims: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&size| {
            let here = flat % size;
            flat /= size;
            here
        })
        .collect();
    index.reverse();
    index
}

fn parse(key: &str, text: &str) -> std::result::Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("its {key} is not JSON ({error})"))
}

fn tensor(view: &TensorView) -> Result<Tensor> {
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::I64 => DType::I64,
        other => candle_core::bail!("type {other:?} is not used by golden files"),
    };
    Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)
}
