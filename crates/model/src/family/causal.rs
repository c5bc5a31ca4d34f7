//! Causal language models as protocols of running text see them: segments of a stream, one after another.

use candle_core::{Device, Result, Tensor, bail};

use super::{
    Architecture, Loss, Metric, Model, ModelRequest, Objective, ResolveError, families, names,
    resolve as find,
};
use crate::attention::decode::DecodeState;
use crate::batch::Batch;
pub use crate::char_lm::Cache;
use crate::char_lm::next_symbol_loss;
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use effattn_kernel::embedding::PADDING;

/// The architecture of a causal language model, which [`Architecture::causal`] gives.
pub trait CausalArchitecture: Architecture {
    /// Cached positions in front of a segment; 0: segments are read on their own.
    fn cached(&self) -> usize;

    /// The same model for segments of `block` behind `cached` positions, of which a model without cache has none.
    fn resized(&self, block: usize, cached: usize) -> Box<dyn CausalArchitecture>;

    /// FLOPs of one forward of a segment behind a full cache.
    fn segment_flops(&self) -> u64 {
        self.flops(self.max_len())
    }

    /// The model with its parameters.
    fn build_causal(&self, builder: &ParamBuilder) -> Result<Box<dyn CausalModel>>;
}

/// A built causal language model: segments of a stream to logits of the next symbols.
pub trait CausalModel {
    /// The cache in front of a stream of `batch` sequences.
    fn start(&self, batch: usize) -> Result<Cache>;

    /// One segment: `ids` [b, n] (u32) behind `cache` to logits [b, n, vocab] and the next segment's cache. `rng` says what is
    /// dropped; `None`: nothing.
    fn segment(&self, ids: &Tensor, cache: &Cache, rng: Option<DropoutRng>) -> Result<(Tensor, Cache)>;

    /// What training makes small, from the cross entropies [b, n] of a segment, of which the last position's target is another
    /// segment's and must not count.
    fn segment_loss(&self, nll: &Tensor) -> Result<Loss>;

    /// What every layer carries in front of the first of up to `room` tokens of `batch` sequences; nothing where the mechanism
    /// has no form that goes on token by token.
    fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>>;

    /// The next token `ids` [b, 1] (u32) of sequences behind `states` to logits [b, 1, vocab].
    fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor>;

    /// -log p of every target [b, n] (u32) behind `ids` [b, n], in nats; 0 where the target is [`PADDING`]. Nothing stands in
    /// front of the first.
    fn nll(&self, ids: &Tensor, targets: &Tensor, rng: Option<DropoutRng>) -> Result<Tensor> {
        let (logits, _) = self.segment(ids, &self.start(ids.dim(0)?)?, rng)?;
        let nll = next_symbol_loss(&logits, targets)?;
        let keep = targets.ne(PADDING)?.to_dtype(nll.dtype())?;
        nll * keep
    }

    /// Number of layers that [`Cache`] has rows of.
    fn layers(&self) -> usize;

    /// The device of the parameters.
    fn device(&self) -> &Device;
}

/// The causal language model that `request` asks for, validated.
pub fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn CausalArchitecture>, ResolveError> {
    let model = find(&families(), request)?;
    model.validate()?;
    model.causal().ok_or_else(|| {
        let presets = presets().join(", ");
        let preset = request.preset;
        ResolveError::Invalid(format!("preset {preset} is no causal language model; choose one of {presets}"))
    })
}

/// Presets of causal language models.
pub fn presets() -> Vec<&'static str> {
    names(|family| family.objective == Objective::NextToken)
}

/// `architecture` as it makes one token after another behind as many tokens as its longest input has, for `batch` sequences;
/// nothing where its mechanism has no form that does so.
pub fn decoder(
    architecture: &dyn CausalArchitecture,
    builder: &ParamBuilder,
    batch: usize,
) -> Result<Option<Box<dyn Model>>> {
    let room = architecture.max_len();
    let model = architecture.resized(room, 0).build_causal(builder)?;
    let Some(mut states) = model.start_decoding(batch, room)? else { return Ok(None) };
    states.iter_mut().for_each(|state| state.set_position(room - 1));
    Ok(Some(Box::new(Decoder { model, states, behind: room - 1 })))
}

/// A model that makes the next token of sequences, always the same one: what it costs does not depend on what was before.
struct Decoder {
    model: Box<dyn CausalModel>,
    states: Vec<Box<dyn DecodeState>>,
    behind: usize,
}

impl Model for Decoder {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let ids = batch.tokens()?.ids.narrow(1, 0, 1)?.contiguous()?;
        let logits = self.model.decode(&ids, &mut self.states)?;
        self.states.iter_mut().for_each(|state| state.set_position(self.behind));
        Ok(logits)
    }

    fn loss(&mut self, _: &Batch, _: DropoutRng) -> Result<Loss> {
        bail!("tokens that are made one after another are not trained on")
    }

    fn metrics(&mut self, _: &Batch) -> Result<Vec<Metric>> {
        bail!("tokens that are made one after another have no score")
    }
}
