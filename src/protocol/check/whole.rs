//! Golden files of whole models (`SPEC-models.md`): what their levels share.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use serde_json::{Map, Value};

use super::{CheckError, FileVerdict, Golden, IdleKnob};
use effattn_model::attention::knobs::Knobs;
use effattn_model::attention::{self, MechanismEntry, Shape};
use effattn_model::family::Architecture;
use effattn_model::nn::params::{ParamBuilder, Params};

pub(super) type Checked<T> = std::result::Result<T, CheckError>;

/// The mechanism a file names.
pub(super) fn entry(golden: &Golden) -> Checked<&'static MechanismEntry> {
    let name = golden.meta("mechanism");
    attention::find(name)
        .ok_or_else(|| CheckError::UnknownMechanism { file: golden.file.clone(), mechanism: name.to_owned() })
}

/// The settings of `entry` in the file's config, over those that the specification fixes. The config names only what the model
/// sets, so that a knob without effect is refused as on the command line.
pub(super) fn knobs(
    golden: &Golden,
    entry: &MechanismEntry,
    fixed: &[(&str, Value)],
    causal: bool,
) -> Checked<Knobs> {
    // compat stands for three other keys, which are in the config too
    let known = |name: &str| name != "compat" && entry.knobs.iter().any(|knob| knob.name == name);
    let fixed = fixed.iter().map(|(name, value)| (String::from(*name), value.clone()));
    let given = golden.config.iter().map(|(name, value)| (name.clone(), value.clone()));
    let settings: Map<String, Value> = fixed.chain(given).filter(|(name, _)| known(name)).collect();
    let knobs =
        Knobs::from_json(entry.name, entry.knobs, &settings).map_err(|error| golden.refused(error))?;
    let (heads, width) = (size(golden, "H")?.max(1), size(golden, "d")?);
    let (batch, queries, keys, cls, grid) = (1, 1, 1, false, None);
    let shape = Shape { batch, heads, head_dim: width / heads, width, queries, keys, causal, cls, grid };
    match IdleKnob::of(golden, entry, &knobs, &shape).first() {
        Some(idle) => Err(golden.refused(format!("{}: {idle}; leave it out", entry.name))),
        None => Ok(knobs),
    }
}

/// A whole number that the config must have.
pub(super) fn size(golden: &Golden, key: &str) -> Checked<usize> {
    golden.int(key).ok_or_else(|| golden.wrong(format!("its config has no whole number {key:?}")))
}

/// `config`, if it can be built and is no larger than the model of a golden file.
pub(super) fn bounded<C: Architecture>(golden: &Golden, config: C) -> Checked<C> {
    Architecture::validate(&config).map_err(|error| golden.wrong(error.to_string()))?;
    golden.affordable(config.core_macs(1, config.max_len()))?;
    Ok(config)
}

/// A builder that hands out the file's weights.
pub(super) fn weights(golden: &Golden, device: &Device) -> Checked<ParamBuilder> {
    given(golden, golden.leaves.iter(), device)
}

/// A builder that hands out the file's weights and running statistics.
pub(super) fn weights_and_states(golden: &Golden, device: &Device) -> Checked<ParamBuilder> {
    let running = |name: &&String| name.ends_with("running_mean") || name.ends_with("running_var");
    let states = golden.tensors.keys().filter(running).filter(|name| !name.starts_with("new_"));
    given(golden, golden.leaves.iter().chain(states), device)
}

fn given<'a>(
    golden: &Golden,
    names: impl Iterator<Item = &'a String>,
    device: &Device,
) -> Checked<ParamBuilder> {
    let tensors = names.map(|name| {
        let tensor = golden.tensor(name)?.to_device(device).map_err(|error| golden.refused(error))?;
        Ok((name.clone(), tensor))
    });
    Ok(ParamBuilder::given(tensors.collect::<Checked<_>>()?, device, true))
}

/// Everything this build computed for a file.
#[derive(Default)]
pub(super) struct Computed {
    tensors: BTreeMap<String, (Tensor, Option<Vec<f32>>)>,
    parameters: usize,
}

impl Computed {
    /// One result.
    pub fn of(name: &str, tensor: Tensor) -> Self {
        let mut computed = Self::default();
        computed.put(name, tensor);
        computed
    }

    pub fn get(&self, name: &str) -> Result<Tensor> {
        match self.tensors.get(name) {
            Some((tensor, _)) => Ok(tensor.clone()),
            None => candle_core::bail!("{name} is not a result of this level"),
        }
    }

    /// Adds a result.
    pub fn put(&mut self, name: &str, tensor: Tensor) {
        self.tensors.insert(name.to_owned(), (tensor, None));
    }

    /// Adds a result of which only the rows with a non-zero `keep` are compared.
    pub fn put_rows(&mut self, name: &str, tensor: Tensor, keep: Vec<f32>) {
        self.tensors.insert(name.to_owned(), (tensor, Some(keep)));
    }

    /// The tolerance that the file's `extra` results have, for those that are compared although `results` does not list them.
    pub fn extras(&self, golden: &Golden, verdict: &mut FileVerdict) -> Checked<()> {
        let extra = golden.meta("extra");
        if extra.is_empty() {
            return Ok(());
        }
        let extra: BTreeMap<String, f64> = serde_json::from_str(extra)
            .map_err(|error| golden.wrong(format!("its extra is not a tolerance per tensor ({error})")))?;
        for (name, atol) in extra {
            match self.tensors.get(&name) {
                Some((tensor, keep)) => {
                    golden.compare_within(verdict, &name, (tensor, atol), keep.as_deref())?;
                }
                None => verdict.complain(format!("{name} is not a result of this level")),
            }
        }
        Ok(())
    }

    /// Adds the number of trained numbers.
    pub fn count(&mut self, params: &Params) {
        self.parameters = params.count();
    }

    /// Takes `count` trained numbers back: leaves that are inputs of a level, not weights of a model.
    pub fn discount(&mut self, count: usize) {
        self.parameters -= count;
    }

    /// Ends building and adds the gradient of `loss` for every weight.
    pub fn gradients(&mut self, golden: &Golden, builder: &ParamBuilder, loss: &Tensor) -> Result<()> {
        let params = builder.finish();
        self.count(&params);
        let grads = loss.backward()?;
        for leaf in &golden.leaves {
            self.put(&format!("grad_{leaf}"), params.grad(&grads, leaf)?);
        }
        Ok(())
    }

    /// Compares every result that the file lists, and the number of parameters.
    pub fn verdict(&self, golden: &Golden) -> Checked<FileVerdict> {
        let mut verdict = golden.verdict();
        let (got, want) = (self.parameters, golden.meta("parameters"));
        if want != got.to_string() {
            verdict.complain(format!("the model has {got} parameters, expected {want}"));
        }
        let results: Vec<String> = serde_json::from_str(golden.meta("results"))
            .map_err(|error| golden.wrong(format!("its results are not a list of names ({error})")))?;
        self.compare(golden, &mut verdict, &results)?;
        self.extras(golden, &mut verdict)?;
        Ok(verdict)
    }

    /// Compares everything that the file has a tolerance for.
    pub fn all(&self, golden: &Golden) -> Checked<FileVerdict> {
        let mut verdict = golden.verdict();
        self.compare(golden, &mut verdict, &golden.compared())?;
        Ok(verdict)
    }

    fn compare(&self, golden: &Golden, verdict: &mut FileVerdict, names: &[String]) -> Checked<()> {
        for name in names {
            match self.tensors.get(name) {
                Some((tensor, keep)) => golden.compare(verdict, name, tensor, keep.as_deref())?,
                None => verdict.complain(format!("{name} is not a result of this level")),
            }
        }
        Ok(())
    }
}
