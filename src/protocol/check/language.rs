//! Golden files of levels `lm` and `eval` (`SPEC-models.md` sections 5 and 6), and the language models of
//! level `train`.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::Golden;
use super::whole::{Checked, Computed, bounded, entry, knobs, size, weights};
use effattn_kernel::block::Residual;
use effattn_model::Backbone;
use effattn_model::char_lm::{
    Cache, CharLm, CharLmConfig, LmVariant, Start, next_symbol_loss, released_loss,
};
use effattn_model::evaluate::{bits_per_symbol, nats, overlap, single, stream};
use effattn_model::family::Loss;

/// The model of a language model's file.
pub(super) fn config(golden: &Golden) -> Checked<CharLmConfig> {
    let entry = entry(golden)?;
    let size = |key| size(golden, key);
    let word = |key: &str, words: [&str; 2]| {
        let word = golden.config.get(key).and_then(Value::as_str).unwrap_or_default();
        let index = words.iter().position(|known| *known == word);
        index.ok_or_else(|| golden.wrong(format!("its {key} {word:?} is not known")))
    };
    let form = LmVariant {
        residual: [Residual::Raw, Residual::Normed][word("residual", ["raw", "normed"])?],
        start: [Start::Absent, Start::Zeros][word("start", ["absent", "zeros"])?],
    };
    let fixed: Vec<_> =
        entry.in_models.language.iter().map(|(name, value)| (*name, Value::from(*value))).collect();
    let config = CharLmConfig {
        entry,
        knobs: knobs(golden, entry, &fixed, true)?,
        backbone: Backbone::new(size("layers")?, size("d")?, size("H")?, size("F")?),
        vocab: size("V")?,
        block: size("block")?,
        mem: size("mem")?,
        form,
    };
    // keys and values of everything that is cached are projected in every layer
    let [layers, width] = [config.backbone.layers, config.backbone.width].map(|size| size as u64);
    let rows = (config.mem + config.block) as u64;
    golden.affordable(rows.saturating_mul(layers).saturating_mul(width).saturating_mul(2 * width))?;
    bounded(golden, config)
}

/// Segment `number` of a stream: inputs and targets [b, block].
pub(super) fn segment(
    ids: &Tensor,
    number: usize,
    block: usize,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let part = |from| ids.narrow(1, from, block)?.to_dtype(DType::U32)?.contiguous()?.to_device(device);
    Ok((part(number * block)?, part(number * block + 1)?))
}

/// What this build computes for a file of level `lm`.
pub(super) fn compute(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = config(golden)?;
    let (block, segments) = (config.block, size(golden, "segments")?);
    if segments == 0 {
        return Err(golden.wrong("it has no segments".into()));
    }
    let builder = weights(golden, device)?;
    let ids = golden.tensor("ids")?;
    let run = || {
        let model = CharLm::new(&config, &builder)?;
        let mut cache = model.start(ids.dim(0)?)?;
        let (mut logits, mut nll, mut losses, mut released) = (vec![], vec![], vec![], vec![]);
        let mut hidden: Vec<Vec<Tensor>> = vec![Vec::new(); config.backbone.layers + 1];
        for number in 0..segments {
            let (inputs, targets) = segment(ids, number, block, device)?;
            let (z, next, trace) = model.trace(&inputs, &cache)?;
            cache = next;
            let loss = next_symbol_loss(&z, &targets)?;
            losses.push(loss.mean_all()?);
            released.push(released_loss(&loss)?);
            logits.push(z);
            nll.push(loss);
            hidden.iter_mut().zip(trace).for_each(|(all, x)| all.push(x));
        }
        let mut computed = Computed::default();
        computed.gradients(golden, &builder, &losses[segments - 1])?;
        computed.put("logits", Tensor::cat(&logits, 1)?);
        computed.put("nll", Tensor::cat(&nll, 1)?);
        computed.put("loss", Tensor::stack(&losses, 0)?);
        computed.put("loss_released", Tensor::stack(&released, 0)?);
        for (layer, hidden) in hidden.iter().enumerate() {
            computed.put(&format!("hidden_{layer}"), Tensor::cat(hidden, 1)?);
        }
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// The losses of a training stream: segment after segment, the cache carried over.
pub(super) struct Stream<'a> {
    pub model: CharLm,
    pub ids: &'a Tensor,
    pub block: usize,
    pub released: bool,
    pub cache: Cache,
}

impl Stream<'_> {
    /// The loss of segment `number`, behind what the segments before have cached.
    pub fn loss(&mut self, number: usize) -> Result<Loss> {
        let (inputs, targets) = segment(self.ids, number, self.block, self.model.device())?;
        let (logits, next) = self.model.forward(&inputs, &self.cache)?;
        self.cache = next;
        let nll = next_symbol_loss(&logits, &targets)?;
        Ok(Loss::mean(if self.released { released_loss(&nll)? } else { nll.mean_all()? }))
    }
}

/// What this build computes for a file of level `eval`.
pub(super) fn evaluate(golden: &Golden, device: &Device) -> Checked<Computed> {
    let config = config(golden)?;
    let (window, step) = (size(golden, "window")?, size(golden, "step")?);
    let builder = weights(golden, device)?;
    let ids = golden.tensor("ids")?;
    let run = || {
        let ids: Vec<u32> = ids.to_dtype(DType::U32)?.to_vec1()?;
        let model = CharLm::new(&config, &builder)?;
        let mut computed = Computed::default();
        computed.count(&builder.finish());
        let protocols = [
            ("stream", stream(&model, &ids, config.block, &mut |_| ())?),
            ("overlap", overlap(&model, &ids, window, step, &mut |_| ())?),
            ("single", single(&model, &ids)?),
        ];
        let scalar = |x: f64| Tensor::new(x as f32, &Device::Cpu);
        for (name, nll) in &protocols {
            computed.put(&format!("nll_{name}"), Tensor::new(nll.as_slice(), &Device::Cpu)?);
            computed.put(&format!("sum_{name}"), scalar(nats(nll))?);
            computed.put(&format!("bpc_{name}"), scalar(bits_per_symbol(nll))?);
        }
        let released = |t: usize| !t.is_multiple_of(config.block);
        let flags = |set: &dyn Fn(usize) -> bool| {
            let flags: Vec<f32> = (0..ids.len()).map(|t| f32::from(u8::from(set(t)))).collect();
            Tensor::new(flags.as_slice(), &Device::Cpu)
        };
        // a loss of exactly 0 would be a symbol that nothing predicted
        let streamed = &protocols[0].1;
        computed.put("predicted", flags(&|t| streamed[t] != 0.0)?);
        computed.put("predicted_released", flags(&released)?);
        let scored = streamed.iter().enumerate().filter(|(t, _)| released(*t));
        computed.put("sum_stream_released", scalar(scored.map(|(_, &x)| f64::from(x)).sum())?);
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}
