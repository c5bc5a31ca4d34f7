//! Golden files of words (`SPEC-text.md`): levels `adaptive`, `wordlm`, `wordlm-eval`, `mlm` and `cls`.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::Golden;
use super::whole::{Checked, Computed, bounded, entry, knobs, size, weights};
use effattn_kernel::embedding::PADDING;
use effattn_kernel::kept_rows::KeptRows;
use effattn_kernel::loss::cross_entropy;
use effattn_model::Backbone;
use effattn_model::evaluate::{EvalWindows, perplexity, stream_nll};
use effattn_model::nn::adaptive::{AdaptiveConfig, AdaptiveSoftmax, Tie};
use effattn_model::nn::dropout::Dropout;
use effattn_model::roberta::{Roberta, RobertaConfig, Top};
use effattn_model::word_lm::{WordLm, WordLmConfig};

/// A tensor of ids on `device`.
fn ids(golden: &Golden, name: &str, device: &Device) -> Checked<Tensor> {
    let ids = golden.tensor(name)?.to_dtype(DType::U32).and_then(|ids| ids.to_device(device));
    ids.map_err(|error| golden.refused(error))
}

fn adaptive_config(golden: &Golden) -> Checked<AdaptiveConfig> {
    let tie = golden.config.get("tie").and_then(Value::as_str).unwrap_or_default();
    let known = Tie::ALL.iter().copied().find(|known| known.name() == tie);
    let cutoffs = golden.config.get("cutoffs").and_then(Value::as_array).into_iter().flatten();
    Ok(AdaptiveConfig {
        vocab: size(golden, "V")?,
        cutoffs: cutoffs.filter_map(Value::as_u64).map(|cutoff| cutoff as usize).collect(),
        width: size(golden, "d")?,
        factor: size(golden, "factor")?,
        tie: known.ok_or_else(|| golden.wrong(format!("its tie {tie:?} is not known")))?,
    })
}

/// Mean over the targets that are not padding.
fn mean(nll: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let count = targets.ne(PADDING)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
    nll.sum_all()? / f64::from(count)
}

/// `values` where `targets` are not padding, else 0.
fn without_padding(values: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let mut keep = targets.ne(PADDING)?.to_dtype(DType::F32)?;
    while keep.rank() < values.rank() {
        keep = keep.unsqueeze(keep.rank())?;
    }
    values.broadcast_mul(&keep)
}

/// What this build computes for a file of level `adaptive`.
pub(super) fn adaptive(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = adaptive_config(golden)?;
    let (inputs, targets) = (ids(golden, "ids", device)?, ids(golden, "targets", device)?);
    let grad_embedded = golden.tensor("grad_embedded")?.to_device(device);
    let grad_embedded = grad_embedded.map_err(|error| golden.refused(error))?;
    let builder = weights(golden, device)?;
    let run = || {
        let adaptive = AdaptiveSoftmax::new(&config, &builder)?;
        let (b, n) = inputs.dims2()?;
        let hidden = builder.param("hidden", &[b, n, config.width], effattn_model::nn::params::Init::ZERO)?;
        let rows = hidden.reshape((b * n, config.width))?;
        let embedded = adaptive.embed(&inputs)?;
        let flat = targets.flatten_all()?.to_vec1::<u32>()?;
        let nll = without_padding(&adaptive.nll(&rows, &flat, Dropout::NONE)?.reshape((b, n))?, &targets)?;
        let loss = mean(&nll, &targets)?;
        let mut computed = Computed::default();
        let logprob = adaptive.log_probabilities(&rows)?.reshape((b, n, config.vocab))?;
        computed.put("logprob", logprob);
        computed.gradients(golden, &builder, &(&loss + (&embedded * grad_embedded)?.sum_all()?)?)?;
        computed.discount(hidden.elem_count()); // the hidden rows are a leaf, not a weight
        computed.put("embedded", embedded);
        computed.put("nll", nll);
        computed.put("loss", loss);
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// The word language model of a file.
pub(super) fn word_lm_config(golden: &Golden) -> Checked<WordLmConfig> {
    let entry = entry(golden)?;
    let size = |key| size(golden, key);
    let config = WordLmConfig {
        entry,
        knobs: knobs(golden, entry, &[], true)?,
        backbone: Backbone::new(size("layers")?, size("d")?, size("H")?, size("F")?),
        adaptive: adaptive_config(golden)?,
        block: size("n")?,
        final_norm: golden.config.get("final_norm").and_then(Value::as_bool).unwrap_or(false),
        activation_dropout: 0.0,
        softmax_dropout: 0.0,
    };
    bounded(golden, config)
}

/// The loss of a batch of words: mean over the targets.
pub(super) fn word_lm_loss(model: &WordLm, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
    mean(&model.nll(ids, targets, Dropout::NONE)?, targets)
}

/// What this build computes for a file of level `wordlm`.
pub(super) fn word_lm(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = word_lm_config(golden)?;
    let (inputs, targets) = (ids(golden, "ids", device)?, ids(golden, "targets", device)?);
    let builder = weights(golden, device)?;
    let run = || {
        let model = WordLm::new(&config, &builder)?;
        let (b, n) = inputs.dims2()?;
        let hidden = model.trace(&inputs)?;
        let last = &hidden[hidden.len() - 1];
        let nll = model.nll_of(last, &targets, Dropout::NONE)?;
        let loss = mean(&nll, &targets)?;
        let mut computed = Computed::default();
        let logprob = model.adaptive().log_probabilities(&last.reshape((b * n, config.backbone.width))?)?;
        computed.put("logprob", without_padding(&logprob.reshape((b, n, config.adaptive.vocab))?, &targets)?);
        computed.gradients(golden, &builder, &loss)?;
        for (layer, hidden) in hidden.iter().enumerate() {
            computed.put(&format!("hidden_{layer}"), without_padding(hidden, &inputs)?);
        }
        computed.put("nll", nll);
        computed.put("loss", loss);
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// What this build computes for a file of level `wordlm-eval`.
pub(super) fn word_lm_eval(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = word_lm_config(golden)?;
    let (window, context) = (size(golden, "window")?, size(golden, "context")?);
    let stream = ids(golden, "stream", &Device::Cpu)?;
    let builder = weights(golden, device)?;
    let run = || {
        let stream = stream.to_vec1::<u32>()?;
        let model = WordLm::new(&config, &builder)?;
        let mut computed = Computed::default();
        computed.count(&builder.finish());
        for (name, context) in [("block", 0), ("context", context)] {
            let nll = stream_nll(&model, &stream, EvalWindows { window, context }, 3, |_| ())?;
            computed.put(&format!("ppl_{name}"), Tensor::new(perplexity(&nll) as f32, &Device::Cpu)?);
            computed.put(&format!("nll_{name}"), Tensor::new(nll.as_slice(), &Device::Cpu)?);
        }
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// What the specification fixes for mechanisms in the encoder that have these knobs.
fn fixed() -> [(&'static str, Value); 2] {
    [("dual_ln", true.into()), ("dp_input", "normed".into())]
}

/// The encoder of a file.
pub(super) fn roberta_config(golden: &Golden) -> Checked<RobertaConfig> {
    let entry = entry(golden)?;
    let size = |key| size(golden, key);
    let config = RobertaConfig {
        entry,
        knobs: knobs(golden, entry, &fixed(), false)?,
        backbone: Backbone::new(size("layers")?, size("d")?, size("H")?, size("F")?),
        vocab: size("V")?,
        positions: size("n_max")?,
        eps: 1e-5,
        top: golden.int("classes").map_or(Top::Masked, Top::Classes),
    };
    bounded(golden, config)
}

/// Logits and labels of a batch: at the masked places, or of every input.
fn roberta_logits(model: &Roberta, ids: &Tensor, labels: &Tensor) -> Result<(Tensor, Tensor)> {
    let labels: Vec<i64> = labels.flatten_all()?.to_vec1()?;
    let (b, n) = ids.dims2()?;
    let at = |rows: KeptRows| model.encode_at(ids, &rows, Dropout::NONE);
    let logits = match model.config().top {
        Top::Classes(_) => model.class_logits(&at(KeptRows::first(b, n))?, Dropout::NONE)?,
        Top::Masked => {
            let chosen = labels.iter().enumerate().filter(|(_, label)| **label >= 0);
            model.masked_logits(&at(KeptRows::at(b, n, chosen.map(|(place, _)| place as u32).collect()))?)?
        }
    };
    let wanted: Vec<u32> = labels.iter().filter(|label| **label >= 0).map(|label| *label as u32).collect();
    Ok((logits, Tensor::new(wanted.as_slice(), ids.device())?))
}

/// The loss of a batch of an encoder: mean over what is predicted.
pub(super) fn roberta_loss(model: &Roberta, ids: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let (logits, wanted) = roberta_logits(model, ids, labels)?;
    cross_entropy(&logits, &wanted)?.mean_all()
}

/// What this build computes for a file of level `mlm` or `cls`.
pub(super) fn roberta(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = roberta_config(golden)?;
    let inputs = ids(golden, "ids", device)?;
    let labels = golden.tensor("labels")?;
    let builder = weights(golden, device)?;
    let run = || {
        let model = Roberta::new(&config, &builder)?;
        let hidden = model.trace(&inputs)?;
        let (logits, wanted) = roberta_logits(&model, &inputs, labels)?;
        let loss = cross_entropy(&logits, &wanted)?.mean_all()?;
        let mut computed = Computed::default();
        computed.gradients(golden, &builder, &loss)?;
        for (layer, hidden) in hidden.iter().enumerate() {
            computed.put(&format!("hidden_{layer}"), without_padding(hidden, &inputs)?);
        }
        computed.put("logits", logits);
        computed.put("loss", loss);
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}
