//! A bag of bytes: the mean of the embeddings of a document's bytes decides on its class.

use candle_core::{Device, Result, Tensor};
use effattn::kernel::embedding::embedding;
use effattn::kernel::linear::linear;
use effattn::kernel::loss::cross_entropy;
use effattn::model::batch::{Batch, Input, InputKind, MadeUp, Tokens};
use effattn::model::family::{About, Asked, Family, Loss, Metric, Net, Resolved, SpecError, StageCost};
use effattn::nn::dropout::Noise;
use effattn::nn::params::{Builder, Init};

/// The table line.
pub static FAMILY: Family = Family {
    name: "bag",
    title: "bags of bytes to classes",
    input: InputKind::Tokens,
    sample: "text",
    presets,
    serves: |preset, task| preset == "bag" && task.is_none(),
    usual_task: |_, _| None,
    usual: |_| None,
    resolve,
};

fn presets() -> Vec<About> {
    vec![About {
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
}

const BYTES: usize = 256;
const CLASSES: usize = 2;

fn resolve(asked: &Asked) -> std::result::Result<Box<dyn Resolved>, SpecError> {
    let width = asked.sizes.width.unwrap_or(16) as usize;
    Ok(Box::new(Bag { width, len: asked.len.unwrap_or(1024) }))
}

impl Resolved for Bag {
    fn longest(&self) -> usize {
        self.len
    }

    fn validate(&self) -> std::result::Result<(), SpecError> {
        if self.width == 0 { Err(SpecError::wrong("the width is 0; it must be at least 1")) } else { Ok(()) }
    }

    fn stages(&self, _batch: usize, _len: usize) -> Vec<StageCost> {
        let flops = (self.width * CLASSES) as u64;
        vec![StageCost { name: "head".to_owned(), flops, ..StageCost::default() }]
    }

    fn build(&self, builder: &Builder) -> Result<Box<dyn Net>> {
        let table = builder.param("embedding.weight", &[BYTES, self.width], Init::normal(0.02))?;
        let weight = builder.param("head.weight", &[CLASSES, self.width], Init::fan_in(self.width))?;
        let bias = builder.param("head.bias", &[CLASSES], Init::ZERO)?;
        Ok(Box::new(Built { table, weight, bias }))
    }

    fn decays(&self, name: &str) -> bool {
        !name.ends_with(".bias")
    }

    fn made_up(&self, wanted: &MadeUp, device: &Device) -> Result<Vec<Batch>> {
        let bytes = &mut wanted.bytes();
        let batches = (0..MadeUp::BATCHES).map(|_| {
            let ids = wanted.ids(bytes, u32::from, device)?;
            let labels = wanted.classes(CLASSES, device)?;
            Ok(Batch { input: Input::Tokens(Tokens { ids, mask: None }), labels })
        });
        batches.collect()
    }
}

/// The model with its parameters.
struct Built {
    table: Tensor,  // [bytes, width]
    weight: Tensor, // [classes, width]
    bias: Tensor,   // [classes]
}

impl Net for Built {
    fn forward(&mut self, batch: &Batch) -> Result<Tensor> {
        let mean = embedding(&batch.tokens()?.ids, &self.table)?.mean(1)?; // [b, width]
        linear(&mean, &self.weight, Some(&self.bias))
    }

    fn loss(&mut self, batch: &Batch, _: Noise) -> Result<Loss> {
        let losses = cross_entropy(&self.forward(batch)?, &batch.labels)?;
        Ok(Loss { sum: losses.sum_all()?, count: losses.elem_count() as f64 })
    }

    fn metrics(&mut self, batch: &Batch) -> Result<Vec<Metric>> {
        let losses = cross_entropy(&self.forward(batch)?.detach(), &batch.labels)?;
        let sum = f64::from(losses.sum_all()?.to_scalar::<f32>()?);
        Ok(vec![Metric { name: "loss", sum, count: losses.elem_count() as f64 }])
    }
}
