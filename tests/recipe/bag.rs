//! A bag of bytes: the mean of the embeddings of a document's bytes decides on its class.

use candle_core::{Device, Result, Tensor};
use effattn::kernel::embedding::embedding;
use effattn::kernel::linear::linear;
use effattn::model::batch::{Batch, InputKind, ModelInput, SyntheticInput, Tokens};
use effattn::model::family::classifier::{classification_loss, classification_scores};
use effattn::model::family::{
    Architecture, Family, Loss, Metric, Model, ModelRequest, Objective, PresetInfo, ResolveError, StageCost,
};
use effattn::nn::dropout::DropoutRng;
use effattn::nn::params::{Init, ParamBuilder};

/// The table line.
pub static FAMILY: Family = Family {
    name: "bag",
    title: "bags of bytes to classes",
    input: InputKind::Tokens,
    objective: Objective::Class,
    sample: "text",
    presets,
    serves: |preset, _| preset == "bag",
    usual_task: |_, _| None,
    usual: |_| None,
    resolve,
};

fn presets() -> Vec<PresetInfo> {
    vec![PresetInfo {
        name: "bag",
        title: "a bag of bytes, d 16",
        description: "No order and no attention: the mechanism changes nothing.",
        source: "our choice",
        tasks: Vec::new(),
        knobs: Vec::new(),
    }]
}

/// A request, resolved.
struct Bag {
    width: usize,
    len: usize,
    vocab: usize,
    classes: usize,
}

/// Bytes and two classes, where the data of a task do not say otherwise.
fn resolve(request: &ModelRequest) -> std::result::Result<Box<dyn Architecture>, ResolveError> {
    let width = request.sizes.width.unwrap_or(16) as usize;
    let (vocab, classes) = request.examples.map_or((257, 2), |data| (data.vocab, data.classes));
    Ok(Box::new(Bag { width, len: request.len.unwrap_or(1024), vocab, classes }))
}

impl Architecture for Bag {
    fn max_len(&self) -> usize {
        self.len
    }

    fn validate(&self) -> std::result::Result<(), ResolveError> {
        if self.width == 0 {
            Err(ResolveError::wrong("the width is 0; it must be at least 1"))
        } else {
            Ok(())
        }
    }

    fn stages(&self, _batch: usize, _len: usize) -> Vec<StageCost> {
        let flops = (self.width * self.classes) as u64;
        vec![StageCost { name: "head".to_owned(), flops, ..StageCost::default() }]
    }

    fn build(&self, builder: &ParamBuilder) -> Result<Box<dyn Model>> {
        let table = builder.param("embedding.weight", &[self.vocab, self.width], Init::normal(0.02))?;
        let weight = builder.param("head.weight", &[self.classes, self.width], Init::fan_in(self.width))?;
        let bias = builder.param("head.bias", &[self.classes], Init::ZERO)?;
        Ok(Box::new(Built { table, weight, bias }))
    }

    fn decays(&self, name: &str) -> bool {
        !name.ends_with(".bias")
    }

    fn synthetic_batches(&self, wanted: &SyntheticInput, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let batches = (0..SyntheticInput::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, |byte| 1 + u32::from(byte), device)?;
            let labels = wanted.classes(self.classes, device)?;
            Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
        });
        batches.collect()
    }
}

/// The model with its parameters.
struct Built {
    table: Tensor,  // [ids, width]
    weight: Tensor, // [classes, width]
    bias: Tensor,   // [classes]
}

impl Model for Built {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let mean = embedding(&batch.tokens()?.ids, &self.table)?.mean(1)?; // [b, width]
        linear(&mean, &self.weight, Some(&self.bias))
    }

    fn loss(&mut self, batch: &Batch, _: DropoutRng) -> Result<Loss> {
        classification_loss(&self.forward(batch)?, &batch.labels)
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        classification_scores(&self.forward(batch)?, &batch.labels)
    }
}
