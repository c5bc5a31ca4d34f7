//! The worker's side: trains one masked language model and writes it down.

use candle_core::{Device, Result as Candle, Tensor};
use serde_json::{Value, json};

use super::recipe::Recipe;
use super::request::{MlmData, MlmRequest, data_names, load, model};
use super::{BITS, NATS, hf_export};
use crate::protocol::pretrained_start::unchanged;
use crate::protocol::training::experiment::{
    self as training, Experiment, MicroBatches, StepCounts, TrainedWeights, TrainingDevice, WeightChoice,
    mean, scores,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::pretrained::CALIBRATION;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{EvalScore, Trainable};
use effattn_data::masked::{Blocks, VALIDATION_SEED};
use effattn_kernel::embedding::PADDING;
use effattn_model::batch::{Batch, IGNORED, ModelInput, Tokens};
use effattn_model::family::{Architecture, Loss, Model};
use effattn_model::nn::params::ParamBuilder;
use effattn_model::roberta::RobertaConfig;

/// Blocks `indices` as they are hidden under `seed` in `epoch`, padded to the longest.
fn batch(blocks: &Blocks, indices: &[usize], (seed, epoch): (u64, u64), device: &Device) -> Candle<Batch> {
    let hidden: Vec<_> = indices.iter().map(|index| blocks.hidden(*index, seed, epoch)).collect();
    let (rows, len) = (hidden.len(), hidden.iter().map(|block| block.ids.len()).max().unwrap_or(0));
    let (mut ids, mut labels) = (vec![PADDING; rows * len], vec![IGNORED; rows * len]);
    for (row, block) in hidden.iter().enumerate() {
        ids[row * len..row * len + block.ids.len()].copy_from_slice(&block.ids);
        block.chosen.iter().for_each(|(at, id)| labels[row * len + at] = *id);
    }
    let ids = Tensor::from_vec(ids, (rows, len), device)?;
    let labels = Tensor::from_vec(labels, (rows, len), device)?;
    Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
}

/// Held-out blocks in batches of `size`: hidden alike in every run.
fn held_out<'a>(
    blocks: &'a Blocks,
    size: usize,
    device: &'a Device,
) -> impl Iterator<Item = Candle<Batch>> + 'a {
    let firsts = (0..blocks.len()).step_by(size.max(1));
    firsts.map(move |first| {
        let indices: Vec<usize> = (first..blocks.len().min(first + size)).collect();
        batch(blocks, &indices, (VALIDATION_SEED, 0), device)
    })
}

/// Data, model and device of a run.
struct MlmExperiment<'a> {
    job: &'a Job<'a, MlmRequest>,
    recipe: &'static Recipe,
    config: RobertaConfig,
    /// Checksum of the tokenizer.
    words: String,
    train: Blocks,
    /// Held-out texts by their names.
    held_out: Vec<(String, Blocks)>,
    laboratory: TrainingDevice,
}

/// Trains until the last step or until the parent is gone, and tests.
pub fn train(job: &Job<MlmRequest>) -> Result<TrainingResult, CellFailure> {
    let Job { request, context, .. } = job;
    job.tell("reads its text")?;
    let MlmData { prose, tokenizer } = load(request, &context.data).map_err(|error| failed(&error))?;
    let [text, words] = data_names(request);
    context.same(&text, &prose.hash)?;
    context.same(&words, tokenizer.hash())?;
    let recipe = Recipe::find(&request.spec.preset).map_err(|error| failed(&error))?;
    let config =
        request.spec.choice().and_then(|choice| model(&request.spec, request.start.as_ref(), &choice));
    let config = config?;
    let blocks = |texts: &[String]| {
        let texts = texts.iter().map(String::as_str);
        let mut blocks = Blocks::new(&tokenizer, texts, request.spec.len as usize, recipe.cut);
        request.limit.iter().for_each(|limit| blocks.truncate(*limit as usize));
        blocks
    };
    let train = blocks(&prose.train);
    let held_out = prose.held_out.iter().map(|held| (held.name.clone(), blocks(&held.texts))).collect();
    drop(prose);
    let words = tokenizer.hash().to_owned();
    let laboratory = TrainingDevice::open(&request.spec, context)?;
    let run = MlmExperiment { job, recipe, config, words, train, held_out, laboratory };
    let (trained, peak_bytes) = training::train(&run.laboratory, &run)?;
    job.tell("validates")?;
    let measures = run.measures(&trained)?;
    hf_export::write(&context.folder, &trained.weights, (&run.config, &tokenizer))
        .map_err(|error| failed(&error))?;
    Ok(TrainingResult { measures, data_share: 1.0, differs: None, peak_bytes })
}

impl MlmExperiment<'_> {
    fn measures(&self, trained: &TrainedWeights) -> Result<Vec<MetricValue>, CellFailure> {
        let device = self.laboratory.device();
        let builder = trained.weights.builder(device, false)?;
        let mut net = self.config.build(&builder)?;
        let mut measures = Vec::new();
        for (number, (name, blocks)) in self.held_out.iter().enumerate() {
            let all = scores(net.as_mut(), held_out(blocks, self.micro(), device))?;
            let nats = mean(&all, "loss");
            let hidden = all.iter().find(|metric| metric.name == "loss").map_or(0.0, |metric| metric.count);
            let task = (number > 0).then(|| name.clone());
            let values = [
                (NATS, "nat", nats),
                (BITS, "bit", nats / std::f64::consts::LN_2),
                ("unigram_loss", "nat", self.train.unigram(blocks)),
                ("hidden_words", "1", hidden),
            ];
            let measure = |(metric, unit, value)| MetricValue {
                task: task.clone(),
                ..MetricValue::new(metric, unit, value)
            };
            measures.extend(values.map(measure));
        }
        let trained_words = self.train.ids().len() as f64;
        measures.extend([
            MetricValue::new("train_loss", "nat", trained.selected.train_loss),
            MetricValue::new("steps", "1", self.job.request.steps as f64),
            MetricValue::new("epochs", "1", self.job.request.steps as f64 / self.order()?.per_epoch() as f64),
            MetricValue::new("training_words", "1", trained_words),
        ]);
        Ok(measures)
    }

    /// Blocks of a micro-batch.
    fn micro(&self) -> usize {
        (self.job.request.spec.batch / self.job.request.accumulate).max(1) as usize
    }

    fn order(&self) -> Result<BatchOrder, CellFailure> {
        let (seed, batch) = (self.job.request.spec.seed, self.job.request.spec.batch as usize);
        BatchOrder::new(seed, self.train.len(), batch).ok_or_else(|| {
            failed(&format!(
                "{} has {} blocks of {} words, too few for a batch of {batch}; take a smaller --batch or --len",
                self.job.request.task,
                self.train.len(),
                self.job.request.spec.len
            ))
        })
    }
}

impl Experiment for MlmExperiment<'_> {
    type Request = MlmRequest;

    fn job(&self) -> &Job<'_, MlmRequest> {
        self.job
    }

    fn description(&self) -> Result<Value, CellFailure> {
        Ok(json!({ "request": serde_json::to_value(&self.job.request)?, "tokenizer": self.words }))
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        Ok(self.recipe.training(self.job.request.steps, self.job.request.rate))
    }

    fn steps(&self) -> StepCounts {
        StepCounts { total: self.job.request.steps, eval_every: self.job.request.every }
    }

    fn eval_cost(&self) -> EvalCost {
        let batches = |blocks: &Blocks| blocks.len() as f64 / self.job.request.spec.batch as f64;
        let each = self.held_out.first().map_or(0.0, |(_, blocks)| batches(blocks));
        let final_test = self.held_out.iter().map(|(_, blocks)| batches(blocks)).sum();
        EvalCost { per_eval: each, final_test }
    }

    fn select(&self) -> WeightChoice {
        WeightChoice::Last
    }

    fn model(&self) -> &dyn Architecture {
        &self.config
    }

    fn initial_weights(&self, device: &Device) -> Result<ParamBuilder, CellFailure> {
        let seed = self.job.request.spec.seed;
        let Some(begin) = &self.job.request.start else {
            return Ok(ParamBuilder::seeded(seed, device, true));
        };
        let start = unchanged(&begin.folder, &begin.encoder).map_err(|error| failed(&error))?;
        let mut weights = start.weights()?;
        let order = self.order()?;
        let batches = (0..order.per_epoch().min(CALIBRATION as u64)).map(|step| {
            let batch = batch(&self.train, &order.batch(step, &mut None), (seed, 0), &Device::Cpu)?;
            start.known(&batch.tokens()?.ids)
        });
        weights.calibrate(&self.config, batches)?;
        let tensors = weights.fit(&self.config)?;
        Ok(ParamBuilder::given_or_seeded(seed, tensors, device, true))
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        _: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let empty = || failed(&format!("nothing of {} is held out", self.job.request.task));
        let (_, held_out) =
            self.held_out.first().filter(|(_, blocks)| !blocks.is_empty()).ok_or_else(empty)?;
        let (order, seed) = (self.order()?, self.job.request.spec.seed);
        let batches = MicroBatches::new(order, seed, self.job.request.accumulate);
        let per_epoch = order.per_epoch();
        Ok(Box::new(MlmTrainable {
            net: self.config.build(builder)?,
            run: self,
            batches,
            per_epoch,
            held_out,
        }))
    }
}

/// The model under training.
struct MlmTrainable<'a> {
    net: Box<dyn Model>,
    run: &'a MlmExperiment<'a>,
    batches: MicroBatches,
    /// Steps per epoch.
    per_epoch: u64,
    held_out: &'a Blocks,
}

impl Trainable for MlmTrainable<'_> {
    fn micro_batches(&self) -> usize {
        self.batches.count
    }

    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let (indices, epoch) = (self.batches.examples(step, part), step / self.per_epoch);
        let seed = self.run.job.request.spec.seed;
        let batch = batch(&self.run.train, &indices, (seed, epoch), self.run.laboratory.device())?;
        self.net.loss(&batch, self.batches.dropout(step, part))
    }

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let batches = held_out(self.held_out, self.run.micro(), self.run.laboratory.device());
        let all = scores(self.net.as_mut(), batches)?;
        let loss = mean(&all, "loss");
        Ok(EvalScore { loss, value: -loss })
    }
}
