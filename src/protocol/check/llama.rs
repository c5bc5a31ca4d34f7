//! Golden files of levels `llama`, `llama-decode` and `llama-checkpoint` (`SPEC-llama.md`).

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::Golden;
use super::whole::{Checked, Computed, bounded, entry, knobs, size, weights};
use crate::train::pretrained::llama::LlamaFolder;
use effattn_kernel::loss::cross_entropy;
use effattn_model::Backbone;
use effattn_model::attention;
use effattn_model::attention::decode::{Carried, KeyValueCache};
use effattn_model::family::causal::CausalModel;
use effattn_model::family::llama::{Llama, LlamaConfig};
use effattn_model::nn::ffn::FfnActivation;
use effattn_model::nn::params::ParamBuilder;

/// The model of a file. A `window` stands for the mechanism that has one.
pub(super) fn config(golden: &Golden) -> Checked<LlamaConfig> {
    let size = |key| size(golden, key);
    let (mut entry, mut fixed) = (entry(golden)?, Vec::new());
    if let Some(window) = golden.int("window") {
        entry = attention::find("window").ok_or_else(|| golden.refused("there is no mechanism window"))?;
        fixed.push(("w", Value::from(window)));
    }
    let number = |key: &str| {
        let value = golden.config.get(key).and_then(Value::as_f64);
        value.ok_or_else(|| golden.wrong(format!("its config has no number {key:?}")))
    };
    let flag = |key: &str| golden.config.get(key).and_then(Value::as_bool).unwrap_or(false);
    let heads = size("H")?;
    let config = LlamaConfig {
        entry,
        knobs: knobs(golden, entry, &fixed, true)?,
        backbone: Backbone {
            inner: heads * size("D")?,
            bias: flag("qkv_bias"),
            activation: FfnActivation::SwiGlu,
            ..Backbone::new(size("layers")?, size("d")?, heads, size("F")?)
        },
        kv_heads: golden.int("kv").unwrap_or(heads),
        vocab: size("V")?,
        block: size("n")?,
        theta: number("theta")?,
        eps: number("eps")?,
        tied: flag("tied"),
    };
    bounded(golden, config)
}

/// Cross entropies of next tokens [b, n - 1], 0 where none is scored, and how many are.
pub(super) struct NextTokens {
    pub values: Tensor,
    pub count: f64,
}

/// The logits [b, n, vocab] at t against `labels` [b, n] (i64, negative: not scored) at t + 1.
pub(super) fn nll(logits: &Tensor, labels: &Tensor) -> Result<NextTokens> {
    let (b, n, vocab) = logits.dims3()?;
    let targets: Vec<i64> = labels.narrow(1, 1, n - 1)?.flatten_all()?.to_vec1()?;
    let keep: Vec<f32> = targets.iter().map(|target| f32::from(u8::from(*target >= 0))).collect();
    let targets: Vec<u32> = targets.iter().map(|target| (*target).max(0) as u32).collect();
    let place = |shape| (shape, logits.device());
    let (shape, device) = place((b, n - 1));
    let rows = logits.narrow(1, 0, n - 1)?.reshape((b * (n - 1), vocab))?;
    let values = cross_entropy(&rows, &Tensor::from_vec(targets, b * (n - 1), device)?)?;
    let count = keep.iter().sum::<f32>();
    let values = (values.reshape(shape)? * Tensor::from_vec(keep, shape, device)?)?;
    Ok(NextTokens { values, count: f64::from(count) })
}

fn ids(golden: &Golden, device: &Device) -> Checked<Tensor> {
    let ids = golden.tensor("ids")?.to_dtype(DType::U32).and_then(|ids| ids.to_device(device));
    ids.map_err(|error| golden.refused(error))
}

/// Results of a forward pass, but for gradients; rows at padding are not compared.
fn forward(golden: &Golden, model: &Llama, ids: &Tensor) -> Result<(Computed, Tensor)> {
    let mut computed = Computed::default();
    let [labels, mask] = ["labels", "mask"].map(|name| golden.tensors.get(name));
    let (Some(labels), Some(mask)) = (labels, mask) else { candle_core::bail!("it has no labels and mask") };
    let keep: Vec<f32> = mask.flatten_all()?.to_vec1()?;
    let hidden = model.trace(ids)?;
    let logits = model.logits(&hidden[hidden.len() - 1])?;
    let NextTokens { values, count } = nll(&logits, labels)?;
    let loss = (values.sum_all()? / count)?;
    for (layer, hidden) in hidden.into_iter().enumerate() {
        computed.put_rows(&format!("hidden_{layer}"), hidden, keep.clone());
    }
    computed.put_rows("logits", logits, keep);
    computed.put("nll", values);
    computed.put("loss", loss.clone());
    Ok((computed, loss))
}

/// What this build computes for a file of level `llama`.
pub(super) fn compute(golden: &Golden, device: &Device) -> Checked<Computed> {
    let (config, builder) = (config(golden)?, weights(golden, device)?);
    let ids = ids(golden, device)?;
    let run = || {
        let model = Llama::new(&config, &builder)?;
        let (mut computed, loss) = forward(golden, &model, &ids)?;
        computed.gradients(golden, &builder, &loss)?;
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// What this build computes for a file of level `llama-decode`: one token after another.
pub(super) fn decode(golden: &Golden, device: &Device) -> Checked<Computed> {
    let (config, builder) = (config(golden)?, weights(golden, device)?);
    let ids = ids(golden, device)?;
    let run = || {
        let model = Llama::new(&config, &builder)?;
        let (b, n) = ids.dims2()?;
        let Some(mut states) = model.start_decoding(b, n)? else {
            candle_core::bail!("{} has no form that goes on token by token", config.entry.name)
        };
        let steps = (0..n).map(|at| model.decode(&ids.narrow(1, at, 1)?.contiguous()?, &mut states));
        let mut computed = Computed::default();
        computed.put("logits", Tensor::cat(&steps.collect::<Result<Vec<_>>>()?, 1)?);
        for (layer, state) in states.iter_mut().enumerate() {
            let [k, v] = state.downcast::<Carried<KeyValueCache>>()?.held()?;
            for (name, x) in [("k", k), ("v", v)] {
                let x = x.reshape((b, config.kv_heads, n, config.backbone.head_dim()))?;
                computed.put(&format!("cache_{name}.{layer}"), x);
            }
        }
        computed.count(&builder.finish());
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// What this build computes for a file of level `llama-checkpoint` in `folder`, where the checkpoint that it names lies too.
pub(super) fn checkpoint(golden: &Golden, folder: Option<&Path>, device: &Device) -> Checked<Computed> {
    let Some(folder) = folder else {
        return Err(golden.refused("it is about a checkpoint beside it; name its folder with --golden"));
    };
    let name = golden.meta("checkpoint");
    if name.is_empty() || name.contains(['/', '\\']) || name == ".." {
        return Err(golden.wrong(format!("its checkpoint {name:?} is not a folder beside it")));
    }
    let folder = LlamaFolder::open(&folder.join(name)).map_err(|error| golden.refused(error))?;
    let entry = entry(golden)?;
    let config = folder.config(entry, knobs(golden, entry, &[], true)?, size(golden, "n")?);
    let config = bounded(golden, config.map_err(|error| golden.refused(error))?)?;
    let tensors = folder.weights(&config).map_err(|error| golden.refused(error))?;
    let ids = ids(golden, device)?;
    let run = || {
        let tensors = tensors.into_iter().map(|(name, x)| Ok((name, x.to_device(device)?)));
        let builder = ParamBuilder::given(tensors.collect::<Result<_>>()?, device, false);
        let model = Llama::new(&config, &builder)?;
        let (mut computed, _) = forward(golden, &model, &ids)?;
        computed.count(&builder.finish());
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}
