//! Golden files of level `classifier` (`SPEC-models.md` section 3): one document or a pair.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::Golden;
use super::whole::{Checked, Computed, bounded, entry, knobs, size, weights};
use effattn_kernel::loss::cross_entropy;
use effattn_model::pair::{Document, Pair};
use effattn_model::{Backbone, Classifier, ClassifierConfig, Pooling};

/// What the specification fixes for every classifier of mechanisms that have these knobs.
const FIXED: &[(&str, Value)] = &[("dual_ln", Value::Bool(true))];

/// The model of a classifier file.
pub(super) fn config(golden: &Golden) -> Checked<ClassifierConfig> {
    let entry = entry(golden)?;
    let size = |key| size(golden, key);
    let pooling = golden.config.get("pooling").and_then(Value::as_str).unwrap_or_default();
    let pooling = Pooling::find(pooling)
        .ok_or_else(|| golden.wrong(format!("its pooling {pooling:?} is not known")))?;
    let config = ClassifierConfig {
        entry,
        knobs: knobs(golden, entry, FIXED, false)?,
        backbone: Backbone::new(size("layers")?, size("d")?, size("H")?, size("F")?),
        vocab: size("V")?,
        max_len: size("n_max")?,
        classes: size("classes")?,
        pooling,
        towers: golden.int("towers").unwrap_or(1),
    };
    bounded(golden, config)
}

/// Inputs of one document of every example.
struct Inputs {
    ids: Tensor,
    mask: Tensor,
}

impl Inputs {
    fn read(golden: &Golden, suffix: &str, device: &Device) -> Checked<Self> {
        let ids = golden.tensor(&format!("ids{suffix}"))?;
        let mask = golden.tensor(&format!("mask{suffix}"))?;
        let on_device = |x: &Tensor, dtype| x.to_dtype(dtype)?.to_device(device);
        Ok(Self {
            ids: on_device(ids, DType::U32).map_err(|error| golden.refused(error))?,
            mask: on_device(mask, DType::F32).map_err(|error| golden.refused(error))?,
        })
    }

    fn document(&self) -> Document<'_> {
        Document { ids: &self.ids, mask: Some(&self.mask) }
    }

    /// Rows of `hidden_*` that are compared.
    fn kept(&self, pooling: Pooling) -> Result<Vec<f32>> {
        let (b, n) = self.mask.dims2()?;
        let tokens = match pooling {
            Pooling::ClsFront => n - 1,
            Pooling::ClsVector => n,
            Pooling::Mean | Pooling::ClsLastLayer | Pooling::First => {
                return self.mask.flatten_all()?.to_vec1();
            }
        };
        let one = Tensor::ones((b, 1), DType::F32, self.mask.device())?;
        Tensor::cat(&[&one, &self.mask.narrow(1, 0, tokens)?], 1)?.flatten_all()?.to_vec1()
    }
}

/// What this build computes for the file.
pub(super) fn compute(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = config(golden)?;
    let towers = if config.towers == 2 { &["_u", "_v"][..] } else { &[""][..] };
    let inputs =
        towers.iter().map(|suffix| Inputs::read(golden, suffix, device)).collect::<Checked<Vec<_>>>()?;
    let labels = golden.tensor("labels")?;
    let builder = weights(golden, device)?;
    let run = || {
        let labels = labels.to_dtype(DType::U32)?.to_device(device)?;
        let mut computed = Computed::default();
        let (logits, pooled, hidden) = match inputs.as_slice() {
            [first, second, ..] => {
                let trace = Pair::new(&config, &builder)?.trace(first.document(), second.document())?;
                (trace.logits, Vec::from(trace.pooled), Vec::from(trace.hidden))
            }
            one => {
                let trace = Classifier::new(&config, &builder)?.trace(&one[0].ids, Some(&one[0].mask))?;
                (trace.logits, vec![trace.pooled], vec![trace.hidden])
            }
        };
        let loss = cross_entropy(&logits, &labels)?.mean_all()?;
        computed.gradients(golden, &builder, &loss)?;
        computed.put("logits", logits);
        computed.put("loss", loss);
        for (tower, suffix) in towers.iter().enumerate() {
            computed.put(&format!("pooled{suffix}"), pooled[tower].clone());
            let keep = inputs[tower].kept(config.pooling)?;
            for (layer, hidden) in hidden[tower].iter().enumerate() {
                computed.put_rows(&format!("hidden_{layer}{suffix}"), hidden.clone(), keep.clone());
            }
        }
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}
