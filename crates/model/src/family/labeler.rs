//! Tokens to labels at some of their positions: the causal models of [`crate::labeler`].

use candle_core::{D, DType, Device, Result, Tensor};

use super::definition::NextToken;
use super::word_lm::reaching;
use super::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
    tasks_of,
};
use crate::Backbone;
use crate::attention::choose::choose;
use crate::batch::{Batch, IGNORED, InputKind, ModelInput, SyntheticInput, Tokens};
use crate::labeler::{Drawn, Labeler, LabelerConfig, LayerForm, TAPS};
use crate::layer::RotaryForm;
use crate::nn::dropout::{Dropout, DropoutRng};
use crate::nn::ffn::FfnActivation;
use crate::nn::norm::NormForm;
use crate::nn::params::ParamBuilder;
use crate::nn::position_reader::PositionReader;
use effattn_kernel::loss::cross_entropy;
use effattn_kernel::rotary::Pairing;
use effattn_record::config::lists::Models;
use effattn_record::config::unknown;

/// The table line.
pub static FAMILY: Family = Family {
    name: "labeler",
    title: "tokens to labels at some of their positions, causal",
    input: InputKind::Tokens,
    objective: Objective::Other,
    sample: "labelled-positions",
    presets: || PRESETS.iter().map(|preset| preset.about.clone()).collect(),
    serves: |preset, task| find(preset).is_some() && task.is_none(),
    usual_task: |_, _| None,
    usual: |_| None,
    resolve: |request| Ok(Box::new(config(request, None)?)),
};

struct LabelerPreset {
    about: PresetInfo,
    backbone: Backbone,
    /// `shortconv` and `mixer`, from the first layer.
    layers: &'static [&'static str],
    vocab: usize,
    echo: bool,
    tied: bool,
    drawn: Drawn,
    /// Whether mechanisms that leave it to the block have rotary positions.
    rotary: bool,
}

const fn sizes(width: usize, heads: usize, ffn: usize, dropout: f64) -> Backbone {
    let mut backbone = Backbone::new(0, width, heads, ffn);
    backbone.bias = false;
    backbone.dropout = dropout;
    backbone
}

const fn about(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    source: &'static str,
) -> PresetInfo {
    PresetInfo { name, title, description, source, tasks: Vec::new(), knobs: Vec::new() }
}

const CONV_THEN_MIXER: &[&str] = &[LayerForm::SHORT_CONV, LayerForm::MIXER];
const OWN: &str = "this program, at a size for two CPU cores";

static PRESETS: &[LabelerPreset] = &[
    LabelerPreset {
        about: about(
            "recall-small",
            "short convolution, then the mixer; d 64, one head",
            "LayerNorm in front, tied head, no positions, no feed-forward halves",
            OWN,
        ),
        backbone: sizes(64, 1, 0, 0.0),
        layers: CONV_THEN_MIXER,
        vocab: 256,
        echo: false,
        tied: true,
        drawn: Drawn::Zoology,
        rotary: false,
    },
    LabelerPreset {
        about: about(
            "recall-based",
            "short convolution, then the mixer; d 128, one head, 8,192 tokens",
            "Zoology's model: after every layer LN(x) is added to x; no biases in the projections",
            "Based (Arora et al. 2024), Figure 2; Zoology's code",
        ),
        backbone: sizes(128, 1, 0, 0.1),
        layers: CONV_THEN_MIXER,
        vocab: 8192,
        echo: true,
        tied: true,
        drawn: Drawn::Zoology,
        rotary: false,
    },
    LabelerPreset {
        about: about(
            "recall-zoology",
            "two layers of the mixer; d 128, one head, 8,192 tokens",
            "Zoology's model: after every layer LN(x) is added to x; no biases in the projections, no learned positions",
            "Zoology (Arora et al. 2023), Figure 2; its code",
        ),
        backbone: sizes(128, 1, 0, 0.1),
        layers: &[LayerForm::MIXER, LayerForm::MIXER],
        vocab: 8192,
        echo: true,
        tied: true,
        drawn: Drawn::Zoology,
        rotary: false,
    },
    LabelerPreset {
        about: about(
            "tracking-small",
            "one block of the mixer; d 64, 4 heads, FFN 256",
            "LayerNorm in front, GELU, head of its own, no positions",
            OWN,
        ),
        backbone: sizes(64, 4, 256, 0.0),
        layers: &[LayerForm::MIXER],
        vocab: 16,
        echo: false,
        tied: false,
        drawn: Drawn::Torch,
        rotary: false,
    },
    LabelerPreset {
        about: about(
            "tracking",
            "two blocks of the mixer; d 128, 4 heads, FFN 512",
            "RMSNorm, SwiGLU, head of its own, no positions",
            "Grazzi et al. 2024, appendix E.1; its code",
        ),
        backbone: Backbone { activation: FfnActivation::SwiGlu, ..sizes(128, 4, 512, 0.0) },
        layers: &[LayerForm::MIXER, LayerForm::MIXER],
        vocab: 16,
        echo: false,
        tied: false,
        drawn: Drawn::Torch,
        rotary: false,
    },
    LabelerPreset {
        about: about(
            "mad",
            "two blocks of the mixer; d 128, 16 heads, FFN 352",
            "RMSNorm, SwiGLU, head of its own; rotary positions in attention",
            "MAD (Poli et al. 2024); its code",
        ),
        backbone: Backbone { activation: FfnActivation::SwiGlu, ..sizes(128, 16, 352, 0.0) },
        layers: &[LayerForm::MIXER, LayerForm::MIXER],
        vocab: 16,
        echo: false,
        tied: false,
        drawn: Drawn::Torch,
        rotary: true,
    },
    LabelerPreset {
        about: about(
            "mad-small",
            "two blocks of the mixer; d 64, 4 heads, FFN 128",
            "RMSNorm, SwiGLU, head of its own; rotary positions in attention",
            OWN,
        ),
        backbone: Backbone { activation: FfnActivation::SwiGlu, ..sizes(64, 4, 128, 0.0) },
        layers: &[LayerForm::MIXER, LayerForm::MIXER],
        vocab: 16,
        echo: false,
        tied: false,
        drawn: Drawn::Torch,
        rotary: true,
    },
];

fn find(name: &str) -> Option<&'static LabelerPreset> {
    PRESETS.iter().find(|preset| preset.about.name == name)
}

/// The model that is asked for, not validated. `kinds` says what its layers are, in the place of the preset's: `shortconv`, `mixer`
/// (the request's mechanism) or the name of a mechanism.
pub fn config(
    request: &ModelRequest,
    kinds: Option<&[String]>,
) -> std::result::Result<LabelerConfig, ResolveError> {
    let names = PRESETS.iter().map(|preset| preset.about.name);
    let preset = find(request.preset)
        .ok_or_else(|| ResolveError::Invalid(unknown("preset", request.preset, names)))?;
    tasks_of(&ModelRequest { task: None, ..*request }, preset.about.name)?;
    let max_len = request.len.unwrap_or(1024);
    let layers = match kinds {
        Some(kinds) => kinds.to_vec(),
        None => stacked(preset.layers, request.sizes.layers),
    };
    let layers = layers
        .iter()
        .map(|kind| layer(kind, request, max_len))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let own = |form: &LayerForm| matches!(form, LayerForm::Mixer(entry, _) if entry.name == request.choice.entry.name);
    if !layers.iter().any(own) {
        let (model, kinds) = (request.choice.label(), kinds.unwrap_or_default().join(","));
        return Err(ResolveError::Invalid(format!(
            "--layers {kinds} has no layer of --model {model}; write {} where it belongs",
            LayerForm::MIXER
        )));
    }
    let mut backbone = preset.backbone.clone();
    request.sizes.apply(&mut backbone);
    backbone.layers = layers.len();
    let vocab = request.vocab.unwrap_or(preset.vocab);
    let LabelerPreset { echo, tied, drawn, rotary, .. } = *preset;
    // SwiGLU stands behind an RMSNorm
    let swiglu = backbone.activation == FfnActivation::SwiGlu;
    let norm = if swiglu { NormForm::Rms { eps: 1e-6 } } else { NormForm::Layer };
    Ok(LabelerConfig {
        layers,
        backbone,
        vocab,
        max_len,
        echo,
        tied,
        embedding_dropout_only: echo,
        drawn,
        norm,
        rotary: rotary.then_some(RotaryForm { pairing: Pairing::Half, base: 10_000.0 }),
        read_at_end: false,
    })
}

/// `count` layers: the last of the preset's, repeated.
fn stacked(own: &[&str], count: Option<u64>) -> Vec<String> {
    let count = count.map_or(own.len(), |count| count as usize);
    let whole = count.next_multiple_of(own.len());
    (whole - count..whole).map(|number| own[number % own.len()].to_owned()).collect()
}

fn layer(kind: &str, request: &ModelRequest, max_len: usize) -> std::result::Result<LayerForm, ResolveError> {
    if kind == LayerForm::SHORT_CONV {
        return Ok(LayerForm::ShortConv);
    }
    if kind == LayerForm::MIXER || kind == request.choice.entry.name {
        return Ok(LayerForm::Mixer(request.choice.entry, reaching(request, max_len)?));
    }
    let one = kind.parse::<Models>().map_err(ResolveError::wrong)?;
    let choice = choose(&one).ok().filter(|choices| choices.len() == 1).and_then(|mut choices| choices.pop());
    let choice = choice.ok_or_else(|| {
        let known = crate::attention::entries();
        let known =
            [LayerForm::SHORT_CONV, LayerForm::MIXER].into_iter().chain(known.iter().map(|entry| entry.name));
        ResolveError::Invalid(unknown("layer", kind, known.collect::<Vec<_>>()))
    })?;
    let knobs = reaching(&ModelRequest { choice: &choice, ..*request }, max_len)?;
    Ok(LayerForm::Mixer(choice.entry, knobs))
}

impl LabelerConfig {
    /// Cost of one layer; the short convolution keeps the inputs of its taps but the current one.
    fn stage(&self, form: &LayerForm, batch: usize, len: usize) -> StageCost {
        let d = self.backbone.width;
        match form {
            LayerForm::ShortConv => {
                let flops = (len * d * (d + TAPS + 5)) as u64;
                StageCost { flops, state_bytes: (4 * (TAPS - 1) * d) as u64, ..StageCost::default() }
            }
            LayerForm::Mixer(entry, knobs) => {
                let one = Backbone { layers: 1, ..self.backbone.clone() };
                let mut cost = one.plain_layers((entry, knobs), batch, len, true).pop().unwrap_or_default();
                if self.backbone.activation == FfnActivation::SwiGlu {
                    cost.flops += (len * d * self.backbone.ffn) as u64; // of its third product
                }
                cost.state_bytes += one.convolved_bytes((entry.needs)(knobs), cost.state_bytes);
                cost
            }
        }
    }
}

impl LabelerConfig {
    /// Bytes of the state behind `len` tokens as Zoology counts them: with all taps of short convolutions in front, without those
    /// inside mechanisms, 4 bytes a number.
    pub fn zoology_state_bytes(&self, len: usize) -> u64 {
        let counted = |form: &LayerForm| match form {
            LayerForm::ShortConv => (4 * TAPS * self.backbone.width) as u64,
            LayerForm::Mixer(entry, knobs) => {
                let layer = self.backbone.plain_layers((entry, knobs), 1, len, true).pop();
                layer.map_or(0, |layer| layer.state_bytes)
            }
        };
        self.layers.iter().map(counted).sum()
    }
}

impl Architecture for LabelerConfig {
    fn max_len(&self) -> usize {
        self.max_len
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        Ok(Self::validate(self)?)
    }

    /// No layer has a state where one has none: the model could not decode.
    fn stages(&self, batch: usize, len: usize) -> Vec<StageCost> {
        let mut all: Vec<StageCost> = self.layers.iter().map(|form| self.stage(form, batch, len)).collect();
        let decodes = all.iter().all(|stage| stage.state_bytes > 0);
        for (number, stage) in all.iter_mut().enumerate() {
            stage.name = format!("layer {number}");
            stage.state_bytes = if decodes { stage.state_bytes } else { 0 };
        }
        let width = self.backbone.width;
        let read = if self.read_at_end { PositionReader::flops(len, width) } else { 0 };
        let flops = (len * width * (5 + self.vocab) + read) as u64;
        all.push(StageCost { name: "logits".to_owned(), flops, ..StageCost::default() });
        all
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Labeler::new(self, builder)?))
    }

    /// Nothing where everything is read at the end: there is no next token.
    fn build_decoder(&self, builder: &ParamBuilder, batch: usize) -> Result<Option<Box<dyn Model>>> {
        if self.read_at_end {
            return Ok(None);
        }
        let model = Labeler::new(self, builder)?;
        let Some(mut states) = model.start_decoding(batch, self.max_len)? else { return Ok(None) };
        let behind = self.max_len - 1;
        states.iter_mut().for_each(|state| state.set_position(behind));
        Ok(Some(Box::new(NextToken(move |ids: &Tensor| {
            let logits = model.decode(ids, &mut states)?;
            states.iter_mut().for_each(|state| state.set_position(behind));
            Ok(logits)
        }))))
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, |byte| u32::from(byte) % self.vocab as u32, device)?;
            let flat = ids.flatten_all()?.to_vec1::<u32>()?;
            let chosen = |(at, id): (usize, u32)| if at.is_multiple_of(LABELLED) { id } else { IGNORED };
            let labels: Vec<u32> = flat.into_iter().enumerate().map(chosen).collect();
            let labels = Tensor::from_vec(labels, (wanted.batch, wanted.len), device)?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
        });
        batches.collect()
    }
}

/// Logits and labels of the labelled positions of `batch`.
fn labelled(model: &Labeler, batch: &Batch, dropout: Dropout) -> Result<(Tensor, Tensor)> {
    let hidden = model.hidden(&batch.tokens()?.ids, dropout)?;
    let labels = batch.labels.flatten_all()?.to_vec1::<u32>()?;
    let chosen = labels.iter().enumerate().filter(|(_, label)| **label != IGNORED);
    let (places, labels): (Vec<u32>, Vec<u32>) = chosen.map(|(at, label)| (at as u32, *label)).unzip();
    Ok((model.logits(&hidden, &places)?, Tensor::new(labels.as_slice(), hidden.device())?))
}

impl Model for Labeler {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        Ok(labelled(self, batch, Dropout::NONE)?.0)
    }

    /// The cross entropy of all labelled positions; each counts once.
    fn loss(&mut self, batch: &Batch, rng: DropoutRng) -> Result<Loss> {
        let (logits, labels) = labelled(self, batch, self.config().backbone.drops(rng))?;
        Ok(Loss { sum: cross_entropy(&logits, &labels)?.sum_all()?, count: labels.elem_count() as f64 })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let (logits, labels) = labelled(self, batch, Dropout::NONE)?;
        let (logits, count) = (logits.detach(), labels.elem_count() as f64);
        let metric = |name, sum: Tensor| -> Result<Metric> {
            Ok(Metric { name, sum: f64::from(sum.to_scalar::<f32>()?), count })
        };
        let right = logits.argmax(D::Minus1)?.eq(&labels)?.to_dtype(DType::F32)?;
        Ok(vec![
            metric("loss", cross_entropy(&logits, &labels)?.sum_all()?)?,
            metric("accuracy", right.sum_all()?)?,
        ])
    }
}

/// One position in so many of a synthetic batch has a label: the share of queries where keys and values fill half a sequence.
const LABELLED: usize = 4;

#[cfg(test)]
mod tests;
