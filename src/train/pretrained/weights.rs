//! What becomes of an encoder's weights where a model reads longer inputs or attends otherwise (`docs/spec/SPEC-text.md`
//! section 8).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use candle_core::{DType, Device, Result as Candle, Tensor};

use super::{Pretrained, Result, unfit};
use effattn_kernel::embedding::PADDING;
use effattn_kernel::linear::linear;
use effattn_model::message;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::roberta::{Roberta, RobertaConfig};

/// Batches that DualLN is calibrated on.
pub const CALIBRATION: usize = 64;

/// Weights on their way into a model.
pub struct Weights<'a> {
    pub(super) of: &'a Pretrained,
    pub(super) tensors: HashMap<String, Tensor>,
}

pub(super) const POSITIONS: &str = "roberta.embeddings.position_embeddings.weight";
pub(super) const TYPES: &str = "roberta.embeddings.token_type_embeddings.weight";

impl Weights<'_> {
    /// Starts DualLN of `target` where the weights have none, so that keys and values keep their usual size: weight, the
    /// mean over positions of the deviation across channels; bias, the mean of the mean; over keys and values together, in
    /// the model that the weights come from, on `batches` of ids [b, n]. Does nothing for other models.
    pub fn calibrate(
        &mut self,
        target: &RobertaConfig,
        batches: impl Iterator<Item = Candle<Tensor>>,
    ) -> Candle<()> {
        let norm = |layer: usize, name: &str| layer_name(layer, &format!("{}.{name}", target.entry.name));
        if !self.wants_calibration(target) {
            return Ok(());
        }
        let source = Roberta::new(
            &self.of.source(),
            &ParamBuilder::given_or_seeded(0, self.tensors.clone(), &Device::Cpu, false),
        )?;
        let mut sums = vec![(0.0, 0.0); self.of.backbone.layers];
        let mut count = 0.0;
        for ids in batches.take(CALIBRATION) {
            let ids = ids?.to_device(&Device::Cpu)?;
            let keep = ids.ne(PADDING)?.to_dtype(DType::F64)?;
            count += 2.0 * keep.sum_all()?.to_scalar::<f64>()?;
            let inputs = source.trace(&ids)?;
            for (layer, (sum, x)) in sums.iter_mut().zip(&inputs).enumerate() {
                for part in ["key", "value"] {
                    let tensor = |kind: &str| {
                        let name = layer_name(layer, &format!("{part}.{kind}"));
                        self.tensors
                            .get(&name)
                            .ok_or_else(|| candle_core::Error::Msg(format!("{name} is missing")))
                    };
                    let rows = linear(x, tensor("weight")?, Some(tensor("bias")?))?.to_dtype(DType::F64)?;
                    let mean = rows.mean_keepdim(2)?;
                    let deviation = rows.broadcast_sub(&mean)?.sqr()?.mean(2)?.sqrt()?;
                    let kept = |values: Tensor| (values * &keep)?.sum_all()?.to_scalar::<f64>();
                    sum.0 += kept(deviation)?;
                    sum.1 += kept(mean.squeeze(2)?)?;
                }
            }
        }
        for (layer, (deviation, mean)) in sums.into_iter().enumerate() {
            for name in ["ln_local", "ln_global"] {
                for (part, sum) in [("weight", deviation), ("bias", mean)] {
                    let value = (sum / f64::max(count, 1.0)) as f32;
                    let value = Tensor::full(value, self.of.backbone.inner, &Device::Cpu)?;
                    self.tensors.insert(norm(layer, &format!("{name}.{part}")), value);
                }
            }
        }
        Ok(())
    }

    /// Whether [`Self::calibrate`] has something to do.
    pub fn wants_calibration(&self, target: &RobertaConfig) -> bool {
        let dual = target.entry.in_models.dual_norm.is_some_and(|knob| target.knobs.get(&knob));
        let norm = format!("{}.ln_local.weight", target.entry.name);
        dual && !self.tensors.contains_key(&layer_name(0, &norm))
    }

    /// The weights as `target` takes them: positions repeated up to its length, global projections of Longformer copied.
    /// What they lack (the head of a classifier, the projection of `ls`) the model draws.
    pub fn fit(mut self, target: &RobertaConfig) -> Result<HashMap<String, Tensor>> {
        let folder = &self.of.folder;
        let device = |error: candle_core::Error| unfit(folder, message(&error));
        self.lengthen(target.positions).map_err(device)?;
        if !self.tensors.contains_key(TYPES) {
            // fairseq has none
            let zeros =
                Tensor::zeros((1, self.of.backbone.width), DType::F32, &Device::Cpu).map_err(device)?;
            self.tensors.insert(TYPES.to_owned(), zeros);
        }
        if (target.entry.needs)(&target.knobs).global {
            for layer in 0..self.of.backbone.layers {
                for (part, kind) in
                    ["query", "key", "value"].iter().flat_map(|part| [(part, "weight"), (part, "bias")])
                {
                    let own = self.tensors.get(&layer_name(layer, &format!("{part}.{kind}"))).cloned();
                    let name = layer_name(layer, &format!("{part}_global.{kind}"));
                    if let (Some(own), false) = (own, self.tensors.contains_key(&name)) {
                        self.tensors.insert(name, own);
                    }
                }
            }
        }
        let own = |name: String| format!(".{}.{name}", target.entry.name);
        let redrawn: Vec<String> = self.redrawn(target).map_err(device)?.into_iter().map(own).collect();
        self.tensors.retain(|name, _| !redrawn.iter().any(|constant| name.ends_with(constant)));
        self.check(target, &redrawn)?;
        Ok(self.tensors)
    }

    /// Constants that a longer `target` draws although the weights were trained with its mechanism, by their names in a layer: those
    /// that it and the weights do without at their length, and those that follow the length where no setting keeps them.
    pub fn redrawn(&self, target: &RobertaConfig) -> Candle<Vec<String>> {
        if self.of.attention.entry.name != target.entry.name || target.positions <= self.of.positions {
            return Ok(Vec::new());
        }
        let kept = target.entry.in_models.kept_by_weights.is_some();
        let short = constants(&self.of.at_its_length(target))?;
        let trained = |name: &str| {
            let own = format!(".{}.{name}", target.entry.name);
            self.tensors.keys().any(|known| known.ends_with(&own))
        };
        let is_new = |(name, here): &(String, Tensor)| match short.get(name) {
            Some(short) => !kept && short.shape() != here.shape(),
            None => !trained(name),
        };
        Ok(constants(target)?.into_iter().filter(is_new).map(|(name, _)| name).collect())
    }

    /// Row 2 + p of the positions is row 2 + (p modulo the old number); rows 0 and 1 stay.
    fn lengthen(&mut self, positions: usize) -> Candle<()> {
        let Some(table) = self.tensors.get(POSITIONS) else { return Ok(()) };
        let Ok((rows, _)) = table.dims2() else { return Ok(()) };
        if rows <= 2 || positions + 2 <= rows {
            return Ok(());
        }
        let old = rows - 2;
        let wanted = (0..positions + 2).map(|row| if row < 2 { row } else { 2 + (row - 2) % old } as u32);
        let wanted = Tensor::from_iter(wanted, &Device::Cpu)?;
        let longer = table.index_select(&wanted, 0)?;
        self.tensors.insert(POSITIONS.to_owned(), longer);
        Ok(())
    }

    /// Whether they fit a `target` that is longer than the encoder, but for its length.
    fn serves_its_length(&self, target: &RobertaConfig, redrawn: &[String]) -> bool {
        let mut tensors = self.tensors.clone();
        // they were lengthened: the first are those of the encoder
        let own = |table: &Tensor| table.narrow(0, 0, table.dim(0)?.min(self.of.positions + 2));
        if let Some(Ok(table)) = tensors.get(POSITIONS).map(own) {
            tensors.insert(POSITIONS.to_owned(), table);
        }
        let short = Weights { of: self.of, tensors };
        target.positions > self.of.positions && short.place(&self.of.at_its_length(target), redrawn).is_ok()
    }

    /// As [`Self::place`], with the length that the weights serve where `target` is too long for them.
    fn check(&self, target: &RobertaConfig, redrawn: &[String]) -> Result<()> {
        self.place(target, redrawn).map_err(|problem| {
            let positions = self.of.positions;
            let hint = self.serves_its_length(target, redrawn).then(|| {
                format!(
                    "; these weights are of inputs of at most {positions} positions: give --len {positions}"
                )
            });
            unfit(&self.of.folder, format!("{problem}{}", hint.unwrap_or_default()))
        })
    }

    /// Compares names and shapes with those of `target`, but for the constants whose names end with one of `redrawn`.
    fn place(&self, target: &RobertaConfig, redrawn: &[String]) -> std::result::Result<(), String> {
        let builder = ParamBuilder::given_or_seeded(0, self.tensors.clone(), &Device::Cpu, false);
        Roberta::new(target, &builder).map_err(|error| message(&error))?;
        let params = builder.finish();
        let known: BTreeSet<&str> =
            params.names().chain(params.constants().keys().map(String::as_str)).collect();
        let own = format!("attention.self.{}.", target.entry.name);
        let trained = self.of.attention.entry.name == target.entry.name;
        let drawn = |name: &str| name.starts_with("classifier.") || (!trained && name.contains(&own));
        // random features belong to the weights that were trained with them
        let constants = params.constants().keys().map(String::as_str);
        let wanted = |name: &&str| !redrawn.iter().any(|constant| name.ends_with(constant));
        let mut constants = constants.filter(|_| trained).filter(wanted);
        if let Some(missing) = constants.find(|name| !self.tensors.contains_key(*name)) {
            return Err(format!("the weights have no tensor {missing}"));
        }
        if let Some(missing) = params.names().find(|name| !self.tensors.contains_key(*name) && !drawn(name)) {
            return Err(format!("the weights have no tensor {missing}, which config.json asks for"));
        }
        let heads = |name: &str| name.starts_with("classifier.") || name.starts_with("lm_head.");
        let mut left: Vec<&String> =
            self.tensors.keys().filter(|name| !known.contains(name.as_str()) && !heads(name)).collect();
        left.sort();
        match left.first() {
            Some(name) => Err(format!("the tensor {name} has no place in the model of config.json")),
            None => Ok(()),
        }
    }
}

impl Pretrained {
    /// `target`, as long as the encoder.
    fn at_its_length(&self, target: &RobertaConfig) -> RobertaConfig {
        RobertaConfig { positions: self.positions, ..target.clone() }
    }
}

/// Constants of the mechanism in `config`, by their names in a layer.
fn constants(config: &RobertaConfig) -> Candle<BTreeMap<String, Tensor>> {
    let builder = ParamBuilder::counting();
    Roberta::new(config, &builder)?;
    Ok(builder.constants())
}

pub(super) fn layer_name(layer: usize, name: &str) -> String {
    format!("roberta.encoder.layer.{layer}.attention.self.{name}")
}
