//! Words to next words: the language model of [`crate::word_lm`] (cosFormer Table 2).

use candle_core::{Device, Result, Tensor};

use super::causal::{Cache, CausalArchitecture, CausalModel};
use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
    tasks_of,
};
use crate::Backbone;
use crate::attention;
use crate::attention::decode::DecodeState;
use crate::attention::knobs::Knobs;
use crate::batch::{Batch, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::nn::adaptive::{AdaptiveConfig, Tie};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::params::ParamBuilder;
use crate::word_lm::{WordLm, WordLmConfig};
use effattn_kernel::embedding::PADDING;
use effattn_record::config::unknown;

/// The table line.
pub static FAMILY: Family = Family {
    name: "word-lm",
    title: "words to next words, adaptive input and softmax",
    input: InputKind::Tokens,
    objective: Objective::NextToken,
    sample: "words",
    presets,
    serves: |preset, task| find(preset).is_some() && task.is_none(),
    usual_task: |_, _| None,
    usual: |_| None,
    resolve,
};

/// A named model.
struct WordLmPreset {
    about: PresetInfo,
    backbone: Backbone,
    vocab: usize,
    cutoffs: [usize; 2],
    block: usize,
}

const fn backbone(layers: usize, width: usize, heads: usize, ffn: usize) -> Backbone {
    let mut backbone = Backbone::new(layers, width, heads, ffn);
    backbone.dropout = 0.3;
    backbone.attention_dropout = 0.1;
    backbone
}

static PRESETS: &[WordLmPreset] = &[
    WordLmPreset {
        about: PresetInfo {
            name: "wikitext103",
            title: "cosFormer Table 2: 16 layers, d 1024, 8 heads, FFN 4096, 267,744 words",
            description: "fairseq's transformer_lm_wiki103: adaptive input and softmax, tied, cutoffs 20000 and 60000, \
                          sinusoids, ReLU, no norm behind the last layer.",
            source: "Baevski & Auli 2019; fairseq; cosFormer, Table 2",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(16, 1024, 8, 4096),
        vocab: 267_744,
        cutoffs: [20_000, 60_000],
        block: 512,
    },
    WordLmPreset {
        about: PresetInfo {
            name: "wikitext103-small",
            title: "4 layers, d 256, 4 heads, FFN 1024, 8,125 words: a small stand-in for cosFormer Table 2",
            description: "The form of wikitext103 at a size that two CPU cores train in minutes; its perplexities \
                          compare with nothing but one another.",
            source: "docs/spec/SPEC-text.md, section 10",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(4, 256, 4, 1024),
        vocab: 8125,
        cutoffs: [2000, 5000],
        block: 256,
    },
];

fn find(name: &str) -> Option<&'static WordLmPreset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}

fn presets() -> Vec<PresetInfo> {
    let entries = attention::entries();
    let fixed = entries.iter().filter_map(|entry| entry.in_models.follows_length.map(|knob| knob.name()));
    let knobs: Vec<_> = fixed.collect();
    PRESETS.iter().map(|preset| PresetInfo { knobs: knobs.clone(), ..preset.about.clone() }).collect()
}

fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    Ok(Box::new(config(request)?))
}

/// The model that is asked for, not validated. Cutoffs that a smaller vocabulary does not reach keep their share of it.
pub fn config(request: &ModelRequest) -> std::result::Result<WordLmConfig, ResolveError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset = find(request.preset)
        .ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    tasks_of(request, preset.about.name)?;
    let mut backbone = preset.backbone.clone();
    request.sizes.apply(&mut backbone);
    let block = request.len.unwrap_or(preset.block);
    let vocab = request.vocab.unwrap_or(preset.vocab);
    let reached = preset.cutoffs.iter().all(|cutoff| *cutoff < vocab);
    let [first, second] =
        preset.cutoffs.map(|cutoff| if reached { cutoff } else { cutoff * vocab / preset.vocab });
    let first = first.max(1); // no band is empty, however few words there are
    let cutoffs = vec![first, second.max(first + 1)];
    Ok(WordLmConfig {
        entry: request.choice.entry,
        knobs: reaching(request, block)?,
        adaptive: AdaptiveConfig { vocab, cutoffs, width: backbone.width, factor: 4, tie: Tie::All },
        backbone,
        block,
        final_norm: false,
        activation_dropout: 0.1,
        softmax_dropout: 0.2,
    })
}

/// The settings that are asked for; a distance that would follow the length (cosFormer's M) is the block's, so that a
/// result does not depend on how long a window happens to be.
pub(super) fn reaching(request: &ModelRequest, block: usize) -> std::result::Result<Knobs, ResolveError> {
    let entry = request.choice.entry;
    let given = request.choice.given();
    let given = given.iter().map(|(name, value)| (*name, value.as_str()));
    let whole = block.to_string();
    let fixed = fixed_by_length(request, block)?.map(|name| (name, whole.as_str()));
    let knobs = Knobs::parse(entry.name, entry.knobs, fixed.into_iter().chain(given.clone()));
    Ok(knobs.map_err(ResolveError::wrong)?.naming(given.map(|(name, _)| name)))
}

/// The knob of the mechanism that would follow the length of its input, where it has one that changes something.
pub(super) fn fixed_by_length(
    request: &ModelRequest,
    block: usize,
) -> std::result::Result<Option<&'static str>, ResolveError> {
    let entry = request.choice.entry;
    let given = request.choice.given();
    let given = given.iter().map(|(name, value)| (*name, value.as_str()));
    let asked = Knobs::parse(entry.name, entry.knobs, given).map_err(ResolveError::wrong)?;
    // any shape of this length: where a setting of its own changes nothing, setting it would be refused
    let shape = Backbone::new(1, 64, 1, 64).shape(1, block, true);
    let idle = |name: &str| entry.without_effect(&asked, &shape).any(|idle| idle.knob == name);
    Ok(entry.in_models.follows_length.map(|knob| knob.name()).filter(|name| !idle(name)))
}

impl Architecture for WordLmConfig {
    fn max_len(&self) -> usize {
        self.block
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    /// The adaptive softmax counts its head; a tail is computed for its own words only.
    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let tails = self.adaptive.cutoffs.len();
        let head = self.adaptive.cutoffs.first().copied().unwrap_or(self.adaptive.vocab) + tails;
        let flops = (len * self.backbone.width * head) as u64;
        let mut all = self.backbone.plain_layers((self.entry, &self.knobs), batch, len, true);
        all.push(StageCost { name: "softmax".to_owned(), flops, ..StageCost::default() });
        all
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(WordLm::new(self, builder)?))
    }

    fn causal(&self) -> Option<Box<dyn CausalArchitecture>> {
        Some(Box::new(self.clone()))
    }

    /// Every band of words is met, the first one most.
    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let (vocab, first) = (self.adaptive.vocab as u32, self.adaptive.bands()[0].0.end as u32);
        let word = |byte: u8| match u32::from(byte) {
            byte if byte.is_multiple_of(8) => 4 + byte.wrapping_mul(40_503) % (vocab - 4),
            byte => 4 + byte.wrapping_mul(2_654_435) % (first - 4).max(1),
        };
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, word, device)?;
            let labels = Tensor::cat(&[ids.narrow(1, 1, wanted.len - 1)?, ids.narrow(1, 0, 1)?], 1)?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels: labels.contiguous()? })
        });
        batches.collect()
    }
}

/// Blocks are read on their own: positions start again, nothing is cached.
impl CausalArchitecture for WordLmConfig {
    fn cached(&self) -> usize {
        0
    }

    fn resized(&self, block: usize, _cached: usize) -> Box<dyn CausalArchitecture> {
        Box::new(Self { block, ..self.clone() })
    }

    fn build_causal(&self, builder: &ParamBuilder) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(WordLm::new(self, builder)?))
    }
}

impl WordLm {
    fn drops(&self, rng: Option<DropoutRng>) -> Dropout<'static> {
        rng.map_or(Dropout::NONE, |rng| self.config().backbone.drops(rng))
    }
}

impl CausalModel for WordLm {
    fn start(&self, _batch: usize) -> Result<Cache> {
        Ok(Cache::default())
    }

    /// Log-probabilities of all words, which are logits, too.
    fn segment(&self, ids: &Tensor, _cache: &Cache, rng: Option<DropoutRng>) -> Result<(Tensor, Cache)> {
        Ok((self.log_probabilities(&self.hidden(ids, self.drops(rng))?)?, Cache::default()))
    }

    fn segment_loss(&self, nll: &Tensor) -> Result<Loss> {
        let (b, n) = nll.dims2()?;
        // a segment of one word scores none: its loss is 0
        Ok(Loss { sum: nll.narrow(1, 0, n - 1)?.sum_all()?, count: (b * (n - 1)).max(1) as f64 })
    }

    fn start_decoding(&self, batch: usize, room: usize) -> Result<Option<Vec<Box<dyn DecodeState>>>> {
        Self::start_decoding(self, batch, room)
    }

    fn decode(&self, ids: &Tensor, states: &mut [Box<dyn DecodeState>]) -> Result<Tensor> {
        Self::decode(self, ids, states)
    }

    /// A distribution over all words is never made.
    fn nll(&self, ids: &Tensor, targets: &Tensor, rng: Option<DropoutRng>) -> Result<Tensor> {
        Self::nll(self, ids, targets, self.drops(rng))
    }

    fn layers(&self) -> usize {
        0
    }

    fn device(&self) -> &Device {
        Self::device(self)
    }
}

/// Number of targets that are not padding.
fn count(labels: &Tensor) -> Result<f64> {
    let labels = labels.flatten_all()?.to_vec1::<u32>()?;
    Ok(labels.iter().filter(|label| **label != PADDING).count() as f64)
}

impl Model for WordLm {
    /// The last layer's output: a distribution over all words is never made.
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        self.hidden(&batch.tokens()?.ids, Dropout::NONE)
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let dropout = self.config().backbone.drops(rng);
        let nll = Self::nll(self, &batch.tokens()?.ids, &batch.labels, dropout)?;
        Ok(Loss { sum: nll.sum_all()?, count: count(&batch.labels)? })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let nll = Self::nll(self, &batch.tokens()?.ids, &batch.labels, Dropout::NONE)?.detach();
        let sum = f64::from(nll.sum_all()?.to_scalar::<f32>()?);
        Ok(vec![Metric { name: "loss", sum, count: count(&batch.labels)? }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::choose::choose;
    use crate::family::{SizeOverrides, families, resolve};

    #[test]
    fn the_published_model_has_its_parameters_to_the_digit() {
        for (model, parameters) in [("full", 246_933_504), ("cosformer", 246_933_504)] {
            let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
            let (preset, sizes) = ("wikitext103", &SizeOverrides::default());
            let asked = ModelRequest::new(preset, &choice, sizes);
            let resolved = resolve(&families(), &asked).unwrap();
            assert_eq!(resolved.parameters().unwrap(), parameters);
            assert_eq!(resolved.max_len(), 512);
        }
    }

    #[test]
    fn a_word_after_another_is_the_forward_pass_at_every_position() {
        const LEN: usize = 21;
        for name in ["full", "cosformer", "linear"] {
            let choice = choose(&name.parse().unwrap()).unwrap().remove(0);
            let sizes = SizeOverrides {
                layers: Some(2),
                width: Some(16),
                heads: Some(2),
                ffn: Some(24),
                ..SizeOverrides::default()
            };
            let asked = ModelRequest {
                len: Some(LEN),
                vocab: Some(37),
                ..ModelRequest::new("wikitext103-small", &choice, &sizes)
            };
            let builder = ParamBuilder::seeded(3, &Device::Cpu, false);
            let model = WordLm::new(&config(&asked).unwrap(), &builder).unwrap();
            let ids: Vec<u32> = (0..2 * LEN as u32).map(|at| at * at % 37).collect();
            let ids = Tensor::from_vec(ids, (2, LEN), &Device::Cpu).unwrap();
            let (whole, _) = model.segment(&ids, &Cache::default(), None).unwrap();
            let mut states = model.start_decoding(2, LEN).unwrap().unwrap();
            for at in 0..LEN {
                let word = ids.narrow(1, at, 1).unwrap().contiguous().unwrap();
                let logits = model.decode(&word, &mut states).unwrap();
                let apart = (logits - whole.narrow(1, at, 1).unwrap()).unwrap().abs().unwrap();
                let apart = apart.max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(apart <= 1e-4, "{name} at {at}: {apart}");
            }
        }
    }

    /// The losses of words are those of their log-probabilities; padding counts nothing.
    #[test]
    fn both_ways_to_a_loss_agree() {
        let choice = choose(&"full".parse().unwrap()).unwrap().remove(0);
        let sizes =
            SizeOverrides { layers: Some(1), width: Some(16), heads: Some(2), ..SizeOverrides::default() };
        let asked = ModelRequest {
            len: Some(6),
            vocab: Some(37),
            ..ModelRequest::new("wikitext103-small", &choice, &sizes)
        };
        let model =
            WordLm::new(&config(&asked).unwrap(), &ParamBuilder::seeded(3, &Device::Cpu, false)).unwrap();
        let ids = Tensor::new(&[[2u32, 9, 30, 4, 4, 36]], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[[9u32, 30, 4, 4, 36, PADDING]], &Device::Cpu).unwrap();
        let own = CausalModel::nll(&model, &ids, &targets, None).unwrap().to_vec2::<f32>().unwrap();
        let (logits, _) = model.segment(&ids, &Cache::default(), None).unwrap();
        let other = crate::char_lm::next_symbol_loss(&logits, &targets).unwrap().to_vec2::<f32>().unwrap();
        for at in 0..5 {
            assert!((own[0][at] - other[0][at]).abs() < 1e-5, "{own:?} {other:?}");
        }
        assert_eq!(own[0][5], 0.0);
    }
}
