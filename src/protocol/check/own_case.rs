//! Golden files of our own definition, at any shape: `effattn golden`. They prove that other code computes what this program
//! does; the shipped files, which were made without it, prove this program.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Result, Tensor};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::golden::MOST_OWN_MACS;
use super::mechanism::{Case, NamedResults};
use super::{CheckError, Golden};
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::{KernelMode, with_mode};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::{HeadShape, Needs, Projections, Shape};
use effattn_model::nn::params::ParamBuilder;

/// What is said of such files in tables.
pub fn note(count: usize) -> Option<String> {
    (count > 0).then(|| {
        format!("{count} of the files were written by effattn golden: they show that two programs agree, not that effattn is right")
    })
}

/// Standard deviation of what is added to every weight: many start at 0 or 1, where a mistake shows nothing.
const STIR: f64 = 0.1;
/// Tolerance of a tensor: so many times the error of plain f32, at least such a share of its largest number, at least so much
/// (`docs/spec/SPEC-ls.md`).
const TOLERANCE: (f64, f64, f64) = (20.0, 1e-5, 1e-6);
/// The share where the definition has no f64 form, and the error of f32 is not known.
const TOLERANCE_F32: f64 = 1e-4;

/// What a file is about.
pub struct OwnCase<'a> {
    /// The mechanism and its knobs.
    pub choice: &'a MechanismChoice,
    /// Samples, heads, width of a head, positions.
    pub sizes: CaseSizes,
    /// The causal form.
    pub causal: bool,
    /// With padding, and a hole in the mask.
    pub masked: bool,
    /// Seed of inputs and weights.
    pub seed: u64,
}

/// Sizes of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct CaseSizes {
    /// Samples.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions.
    pub len: usize,
}

/// A file that is ready to be written.
pub struct OwnFile {
    /// safetensors.
    pub bytes: Vec<u8>,
    /// Number format that it was computed in.
    pub computed_in: &'static str,
    /// Tensors in it.
    pub tensors: usize,
}

impl OwnCase<'_> {
    /// Computes the file called `name`.
    pub fn write(&self, name: &str) -> std::result::Result<OwnFile, CheckError> {
        let entry = self.choice.entry;
        let mut golden = self.inputs(name)?;
        let wrong = |golden: &Golden, error: candle_core::Error| golden.refused(error);
        let case = Case::in_format(&golden, entry, &Device::Cpu, DType::F32)?;
        let macs = (entry.cost)(&case.config.knobs, &case.shape).core_macs;
        let weights = self.weights(&case).map_err(|error| wrong(&golden, error))?;
        let keep = case.kept_rows().map_err(|error| wrong(&golden, error))?;
        drop(case);
        golden.leaves = golden.tensors.keys().filter(|name| *name != "mask").cloned().collect();
        for (name, tensor, trained) in weights {
            golden.leaves.extend(trained.then(|| name.clone()));
            golden.tensors.insert(name, tensor);
        }
        let outputs = self.weigh_outputs(&mut golden)?;
        let plain = self.evaluate(&golden, DType::F32)?;
        let (exact, computed_in) = match self.evaluate(&golden, DType::F64) {
            Ok(exact) => (exact, "f64"),
            Err(error) => {
                log::info!("{} has no f64 form: {error}", entry.name);
                (plain.clone(), "f32")
            }
        };
        let exact = hide(exact, keep.as_deref()).map_err(|error| wrong(&golden, error))?;
        let plain = hide(plain, keep.as_deref()).map_err(|error| wrong(&golden, error))?;
        let tolerances = tolerances(&exact, &plain, computed_in).map_err(|error| wrong(&golden, error))?;
        let version = env!("CARGO_PKG_VERSION");
        let form = if self.causal { "causal" } else { "bidir" };
        let metadata = [
            ("variant", format!("own-{form}")),
            (
                "source",
                format!(
                    "effattn {version}, its own definition in plain operations: not independent of effattn"
                ),
            ),
            ("note", format!("computed in {computed_in}, stored in f32")),
            ("seed", self.seed.to_string()),
            ("macs", macs.to_string()),
            ("config", Value::Object(golden.config.clone()).to_string()),
            ("leaves", json!(golden.leaves).to_string()),
            ("outputs", json!(outputs).to_string()),
            ("atol", json!(tolerances.atol).to_string()),
            ("f32_error", json!(tolerances.error).to_string()),
            ("rtol", "0".to_owned()),
            ("tolerance", tolerance_rule(computed_in)),
        ];
        golden.metadata.extend(metadata.map(|(key, value)| (key.to_owned(), value)));
        golden.tensors.extend(exact);
        let tensors = golden.tensors.len();
        let bytes = to_bytes(&golden).map_err(|error| wrong(&golden, error))?;
        Ok(OwnFile { bytes, computed_in, tensors })
    }

    /// The case with its inputs.
    fn inputs(&self, name: &str) -> std::result::Result<Golden, CheckError> {
        let (entry, knobs) = (self.choice.entry, &self.choice.knobs);
        let CaseSizes { batch, heads, head_dim, len } = self.sizes;
        let needs = (entry.needs)(knobs);
        let mixer = needs.projections == Projections::NONE;
        let width = heads * head_dim;
        let mut config = knobs.to_json();
        config.retain(|key, _| key != "compat" || knobs.differs(entry.knobs, key)); // without it: the paper's
        let sizes = [("B", batch), ("H", heads), ("N", len), ("D", head_dim), ("E", width)];
        let sizes = sizes.into_iter().filter(|(key, _)| !mixer || !matches!(*key, "H" | "D"));
        config.extend(sizes.map(|(key, size)| (key.to_owned(), size.into())));
        let mut golden = Golden::unknown(name, entry.name, self.causal, config);
        let heads = if mixer { 1 } else { heads };
        let head_dim = if mixer { width } else { head_dim };
        let (queries, keys, causal) = (len, len, self.causal);
        let shape = Shape { batch, heads, head_dim, width, queries, keys, causal, cls: false, grid: None };
        let refused = |reason: String| CheckError::Refused { file: entry.name.to_owned(), reason };
        entry.admits(knobs, &shape).map_err(refused)?;
        let macs = (entry.cost)(knobs, &shape).core_macs;
        if macs > MOST_OWN_MACS {
            return Err(refused(format!(
                "a golden file has at most {MOST_OWN_MACS} multiply-adds of attention, this one {macs}; choose a smaller \
                 --len, --batch, --heads or --dim"
            )));
        }
        let draw = |name: &str, dims: &[usize]| {
            RngStream::new(self.seed, &format!("golden.{name}")).normal_tensor(dims, 0.0, 1.0, &Device::Cpu)
        };
        for (name, dims) in input_shapes(&needs, &shape) {
            let tensor = draw(name, &dims).map_err(|error| golden.refused(error))?;
            golden.tensors.insert(name.to_owned(), tensor);
        }
        if self.masked {
            let mask = mask(batch, len).map_err(|error| golden.refused(error))?;
            golden.tensors.insert("mask".to_owned(), mask);
        }
        Ok(golden)
    }

    /// Weights and constants of the mechanism by name, and which of them are trained.
    fn weights(&self, case: &Case) -> Result<Vec<(String, Tensor, bool)>> {
        let builder = ParamBuilder::seeded(self.seed, &Device::Cpu, false);
        let mechanism = (self.choice.entry.build)(&case.config, &builder)?;
        let params = builder.finish();
        drop(mechanism);
        let mut all = Vec::new();
        for name in params.names() {
            let value = params.value(name)?;
            let mut stream = RngStream::new(self.seed, &format!("golden.stir.{name}"));
            let noise = stream.normal_tensor(value.dims(), 0.0, STIR, &Device::Cpu)?;
            all.push((name.to_owned(), (value + noise)?, true));
        }
        let constants = params.constants().iter();
        all.extend(constants.map(|(name, tensor)| (name.clone(), tensor.clone(), false)));
        Ok(all)
    }

    /// Adds the weights of the outputs, whose shapes a first evaluation gives; the names of the outputs.
    fn weigh_outputs(&self, golden: &mut Golden) -> std::result::Result<Vec<String>, CheckError> {
        let leaves = std::mem::take(&mut golden.leaves);
        let outputs = self.evaluate(golden, DType::F32)?;
        golden.leaves = leaves;
        for (name, tensor) in &outputs {
            let mut stream = RngStream::new(self.seed, &format!("golden.grad_{name}"));
            let weight = stream.normal_tensor(tensor.dims(), 0.0, 1.0, &Device::Cpu);
            let weight = weight.map_err(|error| golden.refused(error))?;
            golden.tensors.insert(format!("grad_{name}"), weight);
        }
        Ok(outputs.into_keys().collect())
    }

    /// Outputs and gradients of the definition in plain operations, in `dtype`.
    fn evaluate(&self, golden: &Golden, dtype: DType) -> std::result::Result<NamedResults, CheckError> {
        let case = Case::in_format(golden, self.choice.entry, &Device::Cpu, dtype)?;
        with_mode(KernelMode::Composed, || case.results(false)).map_err(|error| golden.refused(error))
    }
}

/// Names and shapes of what a mechanism with `needs` reads besides its weights.
fn input_shapes(needs: &Needs, shape: &Shape) -> Vec<(&'static str, Vec<usize>)> {
    let Shape { batch, heads, head_dim, width, queries, .. } = *shape;
    let part = |part: HeadShape| {
        let (heads, dim) = part.of(heads, head_dim);
        vec![batch, heads, queries, dim]
    };
    let mut all: Vec<_> = needs.projections.read().map(|(name, form)| (name, part(form))).collect();
    let rows = vec![batch, queries, width];
    if needs.x || needs.projections == Projections::NONE {
        all.push(("x", rows.clone()));
    }
    if needs.residual {
        all.push(("res", rows));
    }
    all.extend(needs.stream.map(|rows| ("p", vec![batch, rows, width])));
    if needs.global {
        all.extend(["q_global", "k_global", "v_global"].map(|name| (name, part(HeadShape::LAYER))));
    }
    all
}

/// The last quarter of the last sample is padding, and one position of the first sample.
fn mask(batch: usize, len: usize) -> Result<Tensor> {
    let keep = |sample: usize, at: usize| {
        let padding = sample + 1 == batch && at >= len - len / 4;
        let hole = sample == 0 && at == len / 3;
        if padding || hole { 0f32 } else { 1.0 }
    };
    let all: Vec<f32> = (0..batch * len).map(|i| keep(i / len, i % len)).collect();
    Tensor::from_vec(all, (batch, len), &Device::Cpu)
}

/// `results` in f32, with zeros in the rows of `out` that are not compared.
fn hide(mut results: NamedResults, keep: Option<&[f32]>) -> Result<NamedResults> {
    if let (Some(keep), Some(out)) = (keep, results.get_mut("out")) {
        let mut dims = out.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = 1;
        }
        let keep = Tensor::from_slice(keep, dims, out.device())?.to_dtype(out.dtype())?;
        *out = keep.broadcast_as(out.shape())?.ne(0.0)?.where_cond(out, &out.zeros_like()?)?;
    }
    Ok(results)
}

struct Tolerances {
    atol: BTreeMap<String, f64>,
    /// Largest error of the plain f32 evaluation.
    error: BTreeMap<String, f64>,
}

fn tolerances(exact: &NamedResults, plain: &NamedResults, computed_in: &str) -> Result<Tolerances> {
    let (times, share, least) = TOLERANCE;
    let share = if computed_in == "f64" { share } else { TOLERANCE_F32 };
    let (mut atol, mut errors) = (BTreeMap::new(), BTreeMap::new());
    for (name, exact) in exact {
        let exact = values(exact)?;
        let plain = plain.get(name).map(values).transpose()?.unwrap_or_default();
        let far = |(a, b): (&f64, &f64)| (a - b).abs();
        let error = exact.iter().zip(&plain).map(far).fold(0.0, f64::max);
        let largest = exact.iter().fold(0f64, |a, b| a.max(b.abs()));
        if !largest.is_finite() || !error.is_finite() {
            candle_core::bail!("{name} is not finite");
        }
        atol.insert(name.clone(), rounded(f64::max(times * error, share * largest).max(least)));
        errors.insert(name.clone(), rounded(error));
    }
    Ok(Tolerances { atol, error: errors })
}

fn tolerance_rule(computed_in: &str) -> String {
    let (times, share, least) = TOLERANCE;
    let first = match computed_in {
        "f64" => format!("{times}x the largest error of a plain float32 evaluation, at least {share:e}"),
        _ => format!("{TOLERANCE_F32:e}"),
    };
    format!(
        "every element: abs(a-b) <= atol[tensor]; atol is {first} of the tensor's largest entry and at least {least:e}; rows \
         of out at padded queries are stored as 0 and need not be compared"
    )
}

/// To three digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The whole file: floats as f32, whole numbers as i64.
fn to_bytes(golden: &Golden) -> Result<Vec<u8>> {
    let mut data = BTreeMap::new();
    for (name, tensor) in &golden.tensors {
        let flat = tensor.flatten_all()?;
        let (dtype, bytes): (_, Vec<u8>) = if tensor.dtype().is_float() {
            let flat = flat.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            (Dtype::F32, flat.iter().flat_map(|x| x.to_le_bytes()).collect())
        } else {
            let flat = flat.to_dtype(DType::I64)?.to_vec1::<i64>()?;
            (Dtype::I64, flat.iter().flat_map(|x| x.to_le_bytes()).collect())
        };
        data.insert(name, (dtype, tensor.dims().to_vec(), bytes));
    }
    let wrap = candle_core::Error::wrap;
    let views = data.iter().map(|(name, (dtype, dims, bytes))| {
        TensorView::new(*dtype, dims.clone(), bytes).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>().map_err(wrap)?;
    let metadata: HashMap<String, String> = golden.metadata.clone();
    safetensors::serialize(views, Some(metadata)).map_err(wrap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::check::check_bytes;
    use effattn_model::attention::TABLE;

    const SIZES: CaseSizes = CaseSizes { batch: 2, heads: 2, head_dim: 8, len: 40 };

    /// Every mechanism in every form reads back green, and names what has no f64 form.
    #[test]
    fn every_mechanism_writes_a_file_that_check_reads_and_finds_green() {
        let (mut in_f32, mut refused, mut red) = (Vec::new(), Vec::new(), Vec::new());
        for entry in TABLE {
            let choice = MechanismChoice::default_of(entry);
            for (causal, masked) in [(false, false), (false, true), (true, true)] {
                if !(if causal { entry.support.causal } else { entry.support.bidirectional }) {
                    continue;
                }
                let case = OwnCase { choice: &choice, sizes: SIZES, causal, masked, seed: 1 };
                let file = match case.write("case") {
                    Ok(file) => file,
                    Err(error) => {
                        refused.push(format!("{} {causal} {masked}: {error}", entry.name));
                        continue;
                    }
                };
                if file.computed_in != "f64" {
                    in_f32.push(format!("{} {causal} {masked}", entry.name));
                }
                match check_bytes("case", &file.bytes, &Device::Cpu) {
                    Ok(verdict) if verdict.passed() => {}
                    Ok(verdict) => red.push(format!("{} {causal} {masked}: {}", entry.name, verdict.fault())),
                    Err(error) => red.push(format!("{} {causal} {masked}: {error}", entry.name)),
                }
            }
        }
        assert!(red.is_empty(), "{red:#?}");
        assert!(refused.iter().all(|said| said.contains("reads images")), "{refused:#?}");
        assert_eq!(in_f32, ["transformer-xl true true"], "its table of sines is f32");
    }
}
