//! Characters to next characters: the causal language model with cache of [`crate::char_lm`].

use candle_core::{DType, Device, Result, Tensor};

use super::causal::{CausalArchitecture, CausalModel};
use super::word_lm::fixed_by_length;
use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
};
use crate::attention;
use crate::attention::decode::DecodeState;
use crate::batch::{Batch, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::char_lm::{Cache, CharLm, CharLmConfig, next_symbol_loss, released_loss};
use crate::char_lm_preset::{CharLmPreset, TABLE};
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;
use effattn_record::config::unknown;

/// Symbols of the corpora that have a published number of them, the code's four special ones included. A model that is
/// only measured has the first one's.
const CORPORA: [(&str, usize); 2] = [("enwik8", 208), ("text8", 32)];

/// The table line.
pub static FAMILY: Family = Family {
    name: "character-lm",
    title: "characters to next characters, behind a cache",
    input: InputKind::Tokens,
    objective: Objective::NextToken,
    sample: "charlm",
    presets,
    serves: |preset, _| CharLmPreset::find(preset).is_some(),
    usual_task: |preset, _| CharLmPreset::find(preset).map(|_| CORPORA[0].0),
    usual: |_| None,
    resolve,
};

fn presets() -> Vec<PresetInfo> {
    let entries = attention::entries();
    let set = entries.iter().flat_map(|entry| entry.in_models.language).map(|(knob, _)| *knob);
    let fixed = entries.iter().filter_map(|entry| entry.in_models.follows_length.map(|knob| knob.name()));
    let knobs: Vec<&str> = set.chain(fixed).collect();
    let about = |preset: &CharLmPreset| {
        let CharLmPreset { name, title, description, source, .. } = *preset;
        let tasks = CORPORA.map(|(name, _)| name).to_vec();
        PresetInfo { name, title, description, source, tasks, knobs: knobs.clone() }
    };
    TABLE.iter().map(about).collect()
}

fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    Ok(Box::new(config(request)?))
}

/// The model that is asked for, not validated. A distance that would follow the length (cosFormer's M) is that of `request`, however
/// short the segments are that the model is then given.
pub fn config(request: &ModelRequest) -> std::result::Result<CharLmConfig, ResolveError> {
    let names = TABLE.iter().map(|preset| preset.name);
    let preset = CharLmPreset::find(request.preset);
    let preset = preset.ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    if request.sizes.pooling.is_some() {
        return Err(ResolveError::Invalid(format!(
            "preset {} has no pooling: it predicts every position",
            preset.name
        )));
    }
    let of_task = |task: &str| CORPORA.iter().find(|(name, _)| *name == task).map(|(_, vocab)| *vocab);
    let vocab = match (request.vocab, request.task) {
        (Some(vocab), _) => vocab,
        (None, None) => CORPORA[0].1,
        (None, Some(task)) => {
            let names = CORPORA.iter().map(|(name, _)| *name);
            of_task(task).ok_or_else(|| ResolveError::Invalid(unknown("corpus", task, names)))?
        }
    };
    let entry = request.choice.entry;
    let given = request.choice.given();
    let given = given.iter().map(|(name, value)| (*name, value.as_str()));
    let block = request.len.unwrap_or(preset.block);
    let whole = block.to_string();
    let fixed = fixed_by_length(request, block)?.map(|name| (name, whole.as_str()));
    let config = preset.model(entry, fixed.into_iter().chain(given.clone()), vocab);
    let mut config = config.map_err(ResolveError::wrong)?;
    config.knobs = config.knobs.naming(given.map(|(name, _)| name));
    request.sizes.apply(&mut config.backbone);
    Ok(config.at(block, request.cached.unwrap_or(preset.block.min(block))))
}

impl Architecture for CharLmConfig {
    fn max_len(&self) -> usize {
        self.block
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        self.layer_costs(batch, len, self.mem.min(len))
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Segments { model: CharLm::new(self, builder)?, cache: None }))
    }

    /// Behind a full cache from the first step on.
    fn build_measured(&self, builder: &ParamBuilder, batch: usize) -> Result<Box<dyn Model>> {
        let model = CharLm::new(self, builder)?;
        let rows = |_| match self.mem {
            0 => Ok(None),
            mem => Tensor::ones((batch, mem, self.backbone.width), DType::F32, model.device()).map(Some),
        };
        let cache = Cache::of((0..self.backbone.layers).map(rows).collect::<Result<_>>()?);
        Ok(Box::new(Segments { model, cache: Some(cache) }))
    }

    fn causal(&self) -> Option<Box<dyn CausalArchitecture>> {
        Some(Box::new(self.clone()))
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, |byte| u32::from(byte) % self.vocab as u32, device)?;
            let labels = Tensor::cat(&[ids.narrow(1, 1, wanted.len - 1)?, ids.narrow(1, 0, 1)?], 1)?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels: labels.contiguous()? })
        });
        batches.collect()
    }
}

impl CausalArchitecture for CharLmConfig {
    fn cached(&self) -> usize {
        self.mem
    }

    fn resized(&self, block: usize, cached: usize) -> Box<dyn CausalArchitecture> {
        Box::new(self.at(block, cached))
    }

    fn segment_flops(&self) -> u64 {
        self.layer_costs(1, self.block, self.mem).iter().map(|stage| stage.flops).sum()
    }

    fn build_causal(&self, builder: &ParamBuilder) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(CharLm::new(self, builder)?))
    }
}

impl CausalModel for CharLm {
    fn start(&self, batch: usize) -> Result<Cache> {
        Self::start(self, batch)
    }

    fn segment(&self, ids: &Tensor, cache: &Cache, rng: Option<DropoutRng>) -> Result<(Tensor, Cache)> {
        match rng {
            Some(rng) => self.forward_train(ids, cache, self.config().backbone.drops(rng)),
            None => self.forward(ids, cache),
        }
    }

    /// The released code's: the last symbol of a segment has no target but is counted.
    fn segment_loss(&self, nll: &Tensor) -> Result<Loss> {
        Ok(Loss::mean(released_loss(nll)?))
    }

    fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>> {
        Self::start_decoding(self, batch, room)
    }

    fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor> {
        Self::decode(self, ids, states)
    }

    fn layers(&self) -> usize {
        self.config().backbone.layers
    }

    fn device(&self) -> &Device {
        Self::device(self)
    }
}

/// A model on its way through streams, one segment after another.
struct Segments {
    model: CharLm,
    /// In front of the next segment; absent before the first.
    cache: Option<Cache>,
}

impl Segments {
    fn cache(&mut self, batch: usize) -> Result<Cache> {
        self.cache.take().map_or_else(|| self.model.start(batch), Ok)
    }
}

impl Model for Segments {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let ids = &batch.tokens()?.ids;
        let cache = self.cache(ids.dim(0)?)?;
        let (logits, next) = self.model.forward(ids, &cache)?;
        self.cache = Some(next);
        Ok(logits)
    }

    /// The released code's: the last symbol of a segment has no target but is counted.
    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let ids = &batch.tokens()?.ids;
        let cache = self.cache(ids.dim(0)?)?;
        let rng = self.model.config().backbone.drops(rng);
        let (logits, next) = self.model.forward_train(ids, &cache, rng)?;
        self.cache = Some(next);
        Ok(Loss::mean(released_loss(&next_symbol_loss(&logits, &batch.labels)?)?))
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let logits = self.forward(batch)?.detach();
        let nll = next_symbol_loss(&logits, &batch.labels)?;
        let sum = f64::from(nll.sum_all()?.to_scalar::<f32>()?);
        Ok(vec![Metric { name: "loss", sum, count: nll.elem_count() as f64 }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::choose::choose;
    use crate::family::resolve;

    const LEN: usize = 41;

    fn config(model: &str) -> CharLmConfig {
        let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
        let sizes = super::super::SizeOverrides {
            layers: Some(2),
            width: Some(16),
            heads: Some(2),
            ffn: Some(24),
            ..Default::default()
        };
        let asked = ModelRequest {
            len: Some(LEN),
            cached: Some(0),
            vocab: Some(13),
            ..ModelRequest::new("charlm-small", &choice, &sizes)
        };
        super::config(&asked).unwrap()
    }

    /// Variants of mechanisms that go on token by token.
    const VARIANTS: [&str; 24] = [
        "streaming:window=3,sinks=2,rotary_dim=2,offset=9",
        "retention:rotary=rope-half,gamma=0.5+0.9",
        "gla:clamp_min=-0.05,gate=none",
        "mamba2:groups=auto,Dk=5,conv=0,out_norm=gated-rms",
        "streaming:window=3,sinks=2",
        "streaming:window=4,sinks=1,positions=absolute,groups=1,sink_logit=true",
        "gqa:groups=1",
        "window:w=5",
        "cosformer:m=50",
        "rfa:gate=true",
        "rfa:kernel=arccos",
        "deltanet:conv=0,norm=ln",
        "gated-deltanet:conv=0",
        "mega:chunk=5",
        "mega:chunk=4,attn=laplace,rel_pos=rotary,residual=x",
        "s5:discretization=bilinear,conj_sym=false",
        "aft-local:window=1,factor=auto",
        "aft-local:window=4,per_head=true",
        "aft-local:window=4,factor=2",
        "ls:w=3,l=4,r=2",
        "ls:w=5,l=3,r=2,rel_pos=false,dp_input=normed",
        "ls:w=3,l=4,r=1,compat=code",
        "ls:w=5,r=0,dual_ln=false",
        "dp:l=4,r=2",
    ];

    fn decodes(name: &str) -> bool {
        config(name).build_decoder(&ParamBuilder::counting(), 1).unwrap().is_some()
    }

    #[test]
    fn a_token_after_another_is_the_forward_pass_at_every_position() {
        let all = crate::attention::entries();
        let causal = all.iter().filter(|entry| entry.support.causal).map(|entry| entry.name);
        // the usual window of aft-local is not full at this length, as its bytes are counted
        let causal = causal.filter(|name| *name != "aft-local");
        let names: Vec<&str> = causal.filter(|name| decodes(name)).chain(VARIANTS).collect();
        assert!(names.len() >= 25, "fewer decode than before: {names:?}");
        for name in names {
            let config = config(name);
            // weights of usual size: those of a new model make all logits alike
            let draw = |spec: &crate::nn::params::ParamSpec| match spec.shape.len() {
                2 => crate::nn::params::Init::Uniform { bound: 0.5 },
                _ => spec.init,
            };
            let builder = ParamBuilder::seeded(3, &Device::Cpu, false).with_init(draw);
            let model = CharLm::new(&config.at(LEN, 0), &builder).unwrap();
            let ids: Vec<u32> = (0..2 * LEN as u32).map(|at| at * at % 13).collect();
            let ids = Tensor::from_vec(ids, (2, LEN), &Device::Cpu).unwrap();
            let (whole, _) = model.forward(&ids, &Cache::default()).unwrap();
            let largest = whole.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            let mut states = model.start_decoding(2, LEN).unwrap().unwrap();
            for at in 0..LEN {
                let token = ids.narrow(1, at, 1).unwrap().contiguous().unwrap();
                let logits = model.decode(&token, &mut states).unwrap();
                let apart = (logits - whole.narrow(1, at, 1).unwrap()).unwrap().abs().unwrap();
                let apart = apart.max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(apart <= 1e-4 * largest, "{name} at {at}: {apart} of {largest}");
                assert!(states.iter().all(|state| (state.position(), state.batch()) == (at + 1, 2)));
            }
            let held: usize = states.iter().map(|state| state.bytes()).sum();
            let said: u64 = config.layer_costs(1, LEN, 0).iter().map(|stage| stage.state_bytes).sum();
            assert_eq!(held as u64, 2 * said, "{name}: two sequences hold something else than its cost says");
        }
    }

    #[test]
    fn the_state_of_another_mechanism_is_refused() {
        let model = |name| CharLm::new(&config(name).at(LEN, 0), &ParamBuilder::counting()).unwrap();
        let mut states = model("linear").start_decoding(1, LEN).unwrap().unwrap();
        let error = model("full").decode(&Tensor::new(&[[1u32]], &Device::Cpu).unwrap(), &mut states);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("is not a") && error.contains("KeyValueCache"), "{error}");
    }

    #[test]
    fn what_cannot_go_on_token_by_token_says_so() {
        for name in ["performer:feature_eps=1e-4", "mega"] {
            assert!(!decodes(name), "{name}");
        }
        let choice = choose(&"full".parse().unwrap()).unwrap().remove(0);
        let sizes = Default::default();
        let asked = ModelRequest { len: Some(8), ..ModelRequest::new("lra-repo", &choice, &sizes) };
        let classifier = resolve(&super::super::families(), &asked).unwrap();
        assert!(classifier.build_decoder(&ParamBuilder::counting(), 1).unwrap().is_none());
    }
}
