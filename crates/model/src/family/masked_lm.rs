//! Masked words to words: RoBERTa's encoder of [`crate::roberta`] (cosFormer Table 1 and Figure 4).

use candle_core::{D, DType, Device, Result, Tensor};

use super::word_lm::reaching;
use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
    tasks_of,
};
use crate::Backbone;
use crate::batch::{Batch, IGNORED, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::params::ParamBuilder;
use crate::roberta::{Roberta, RobertaConfig, Top};
use effattn_kernel::kept_rows::KeptRows;
use effattn_kernel::loss::cross_entropy;
use effattn_record::config::unknown;

/// The table line.
pub static FAMILY: Family = Family {
    name: "masked-lm",
    title: "masked words to words, post-norm",
    input: InputKind::Tokens,
    objective: Objective::Other,
    sample: "masked-words",
    presets,
    serves: |preset, task| find(preset).is_some() && task.is_none(),
    usual_task: |_, _| None,
    usual: |_| None,
    resolve,
};

/// A named model.
struct MaskedLmPreset {
    about: PresetInfo,
    backbone: Backbone,
    vocab: usize,
    positions: usize,
}

const fn backbone(layers: usize, width: usize, heads: usize, ffn: usize) -> Backbone {
    let mut backbone = Backbone::new(layers, width, heads, ffn);
    backbone.dropout = 0.1;
    backbone.attention_dropout = 0.1;
    backbone
}

const DESCRIPTION: &str = "RoBERTa's encoder under the names of the public checkpoints, with the head of a masked language \
                           model.";

static PRESETS: &[MaskedLmPreset] = &[
    MaskedLmPreset {
        about: PresetInfo {
            name: "roberta-base",
            title: "RoBERTa base: 12 layers, d 768, 12 heads, FFN 3072, 50,265 words",
            description: DESCRIPTION,
            source: "Liu et al. 2019; cosFormer, Table 1",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(12, 768, 12, 3072),
        vocab: 50_265,
        positions: 512,
    },
    MaskedLmPreset {
        about: PresetInfo {
            name: "roberta-large",
            title: "RoBERTa large: 24 layers, d 1024, 16 heads, FFN 4096, 50,265 words",
            description: DESCRIPTION,
            source: "Liu et al. 2019; Transformer-LS, Table 3",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(24, 1024, 16, 4096),
        vocab: 50_265,
        positions: 512,
    },
    MaskedLmPreset {
        about: PresetInfo {
            name: "roberta-small",
            title: "4 layers, d 128, 4 heads, FFN 512, 8,192 words: a small stand-in for RoBERTa",
            description: DESCRIPTION,
            source: "docs/spec/SPEC-text.md, section 10",
            tasks: Vec::new(),
            knobs: Vec::new(),
        },
        backbone: backbone(4, 128, 4, 512),
        vocab: 8_192,
        positions: 128,
    },
];

/// Share of positions that are predicted.
const MASKED: usize = 7; // one in seven: 15 %

fn find(name: &str) -> Option<&'static MaskedLmPreset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}

fn presets() -> Vec<PresetInfo> {
    PRESETS.iter().map(|preset| preset.about.clone()).collect()
}

/// The model that is asked for.
pub fn config(request: &ModelRequest) -> std::result::Result<RobertaConfig, ResolveError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset = find(request.preset)
        .ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    tasks_of(request, preset.about.name)?;
    let mut backbone = preset.backbone.clone();
    request.sizes.apply(&mut backbone);
    let positions = request.len.unwrap_or(preset.positions);
    Ok(RobertaConfig {
        entry: request.choice.entry,
        knobs: reaching(request, positions)?,
        backbone,
        vocab: request.vocab.unwrap_or(preset.vocab),
        positions,
        eps: 1e-5,
        top: Top::Masked,
    })
}

fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    let mut config = config(request)?;
    // what is measured is all of every layer, as others measure it
    config.backbone.whole_last_layer = true;
    Ok(Box::new(config))
}

/// Sizes, number of ids and of positions of the preset called `name`.
pub fn preset(name: &str) -> Option<(&'static Backbone, usize, usize)> {
    find(name).map(|preset| (&preset.backbone, preset.vocab, preset.positions))
}

/// The preset with these sizes, where there is one.
pub fn preset_of(backbone: &Backbone, vocab: usize) -> Option<&'static str> {
    let sizes = |of: &Backbone| (of.layers, of.width, of.heads, of.ffn);
    let same = |preset: &&MaskedLmPreset| sizes(&preset.backbone) == sizes(backbone) && preset.vocab == vocab;
    PRESETS.iter().find(same).map(|preset| preset.about.name)
}

impl Architecture for RobertaConfig {
    fn max_len(&self) -> usize {
        self.positions
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let d = self.backbone.width;
        let mut all = self.backbone.plain_layers((self.entry, &self.knobs), batch, len, false);
        let head = match self.top {
            Top::Masked => len.div_ceil(MASKED) * (d * d + 5 * d + d * self.vocab),
            Top::Classes(classes) => d * d + d * classes,
        };
        let embedding =
            StageCost { name: "embedding".to_owned(), flops: (5 * len * d) as u64, ..StageCost::default() };
        all.insert(0, embedding);
        all.push(StageCost { name: "head".to_owned(), flops: head as u64, ..StageCost::default() });
        all
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Roberta::new(self, builder)?))
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let word = |byte: u8| 4 + u32::from(byte).wrapping_mul(40_503) % (self.vocab as u32 - 4);
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, word, device)?;
            let flat = ids.flatten_all()?.to_vec1::<u32>()?;
            let chosen = |(at, id): (usize, u32)| if at.is_multiple_of(MASKED) { id } else { IGNORED };
            let labels: Vec<u32> = flat.into_iter().enumerate().map(chosen).collect();
            let labels = Tensor::from_vec(labels, (wanted.batch, wanted.len), device)?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
        });
        batches.collect()
    }
}

/// Logits and labels of what is predicted: chosen positions, or whole inputs.
fn predicted(model: &Roberta, batch: &Batch, dropout: Dropout) -> Result<(Tensor, Tensor)> {
    let ids = &batch.tokens()?.ids;
    let (b, n) = ids.dims2()?;
    if let Top::Classes(_) = model.config().top {
        let first = model.encode_at(ids, &KeptRows::first(b, n), dropout)?;
        return Ok((model.class_logits(&first, dropout.branch(1))?, batch.labels.clone()));
    }
    let labels = batch.labels.flatten_all()?.to_vec1::<u32>()?;
    let chosen = labels.iter().enumerate().filter(|(_, label)| **label != IGNORED);
    let (places, labels): (Vec<u32>, Vec<u32>) = chosen.map(|(at, label)| (at as u32, *label)).unzip();
    let rows = model.encode_at(ids, &KeptRows::at(b, n, places), dropout)?;
    Ok((model.masked_logits(&rows)?, Tensor::new(labels.as_slice(), ids.device())?))
}

impl Model for Roberta {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        Ok(predicted(self, batch, Dropout::NONE)?.0)
    }

    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let (logits, labels) = predicted(self, batch, self.config().backbone.drops(rng))?;
        Ok(Loss { sum: cross_entropy(&logits, &labels)?.sum_all()?, count: labels.elem_count() as f64 })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let (logits, labels) = predicted(self, batch, Dropout::NONE)?;
        let logits = logits.detach();
        let count = labels.elem_count() as f64;
        let metric = |name, sum: Tensor| -> Result<Metric> {
            Ok(Metric { name, sum: f64::from(sum.to_scalar::<f32>()?), count })
        };
        let mut all = vec![metric("loss", cross_entropy(&logits, &labels)?.sum_all()?)?];
        if let Top::Classes(_) = self.config().top {
            let right = logits.argmax(D::Minus1)?.eq(&labels)?.to_dtype(DType::F32)?;
            all.push(metric("accuracy", right.sum_all()?)?);
        }
        Ok(all)
    }
}
