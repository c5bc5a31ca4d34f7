//! The worker's side: fine-tunes one encoder and tests it.

use candle_core::{Device, Result as Candle, Tensor};

use super::recipe::{self, Recipe};
use super::request::{FinetuneRequest, model, tokenizer, words_name};
use crate::protocol::pretrained_start::unchanged;
use crate::protocol::training::experiment::{
    self as training, Experiment, MicroBatches, StepCounts, TrainingDevice, WeightChoice,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::pretrained::{CALIBRATION, Pretrained};
use crate::train::schedule::Schedule;
use crate::train::training_loop::{EvalScore, Trainable};
use effattn_data as data;
use effattn_data::tokenizer::TokenEncoder;
use effattn_data::{Split, Text};
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::embedding::PADDING;
use effattn_model::batch::{Batch, ModelInput, Tokens};
use effattn_model::family::{Architecture, Loss, Model};
use effattn_model::nn::params::ParamBuilder;
use effattn_model::roberta::{Roberta, RobertaConfig};

/// The inputs of one split: ids of every text, not padded, and its class.
struct Side {
    ids: Vec<Vec<u32>>,
    labels: Vec<u32>,
    /// Texts that were too long.
    cut: usize,
}

impl Side {
    /// The first `limit` (drawn) of `texts` in at most `most` ids each.
    fn new(texts: &[Text], encoder: &mut TokenEncoder, (most, limit): (usize, usize), name: &str) -> Self {
        let mut chosen: Vec<usize> = (0..texts.len()).collect();
        if limit < chosen.len() {
            chosen = RngStream::new(0, &format!("limit/{name}")).permutation(texts.len());
            chosen.truncate(limit);
        }
        let mut side = Self { ids: Vec::new(), labels: Vec::new(), cut: 0 };
        for text in chosen.into_iter().map(|at| &texts[at]) {
            let mut input = |most: usize| match &text.second {
                Some(second) => encoder.pair(&text.first, second, most),
                None => encoder.single(&text.first, most),
            };
            let whole = input(usize::MAX);
            let cut = whole.len() > most;
            side.cut += usize::from(cut);
            side.ids.push(if cut { input(most) } else { whole });
            side.labels.push(text.label);
        }
        side
    }

    /// The texts at `chosen`, padded to the longest of them.
    fn batch(&self, chosen: &[usize], device: &Device) -> Candle<Batch> {
        let longest = chosen.iter().map(|&at| self.ids[at].len()).max().unwrap_or(1);
        let padded =
            |at: &usize| self.ids[*at].iter().copied().chain(std::iter::repeat(PADDING)).take(longest);
        let ids: Vec<u32> = chosen.iter().flat_map(padded).collect();
        let ids = Tensor::from_vec(ids, (chosen.len(), longest), device)?;
        let labels: Vec<u32> = chosen.iter().map(|&at| self.labels[at]).collect();
        let input = ModelInput::Tokens(Tokens { ids, mask: None }); // padding is known by its id
        Ok(Batch { input, labels: Tensor::from_vec(labels, chosen.len(), device)? })
    }

    /// Everything in batches of texts of about one length.
    fn sorted(&self, batch: usize) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_by_key(|&at| (self.ids[at].len(), at));
        order.chunks(batch.max(1)).map(<[usize]>::to_vec).collect()
    }
}

/// Loss and accuracy in per cent of `net` on everything of `side`.
fn score(net: &mut Roberta, side: &Side, batch: usize, device: &Device) -> Candle<EvalScore> {
    let batches = side.sorted(batch);
    training::classifier_score(net, batches.iter().map(|chosen| side.batch(chosen, device)))
}

/// Data, model and device of a run.
pub struct FinetuneExperiment<'a> {
    job: &'a Job<'a, FinetuneRequest>,
    recipe: Recipe,
    config: RobertaConfig,
    start: Option<Pretrained>,
    train: Side,
    /// Selected on; absent: what is reported.
    held_out: Option<Side>,
    test: Side,
    data_share: (f64, Option<String>),
    laboratory: TrainingDevice,
}

impl<'a> FinetuneExperiment<'a> {
    /// Reads data, tokenizer and description of the encoder, and opens the device.
    pub fn open(job: &'a Job<'a, FinetuneRequest>) -> Result<Self, CellFailure> {
        let request = &job.request;
        let choice = request.spec.choice()?;
        let config = model(request, &choice)?;
        let (_, texts) = data::text_task(&request.task)?;
        let recipe = recipe::find(&request.spec.preset, &request.task, Some(request.spec.len));
        let recipe = recipe?;
        let set = (texts.load)(&job.context.data, request.reading)?;
        job.context.same(&request.task, set.hash())?;
        let start = request.from.as_deref().zip(request.encoder.as_deref());
        let start = start.map(|(folder, hash)| unchanged(folder, hash)).transpose();
        let start = start.map_err(|error| failed(&error))?;
        job.tell("cuts its texts into words")?;
        let tokenizer = tokenizer(request, start.as_ref(), &set).map_err(|error| failed(&error))?;
        job.context.same(&words_name(request), tokenizer.hash())?;
        let mut encoder = tokenizer.encoder();
        let limit = request.limit.map_or(usize::MAX, |limit| limit as usize);
        let mut side = |split: Split| {
            Side::new(set.side(split), &mut encoder, (request.spec.len as usize, limit), split.name())
        };
        let apart = !std::ptr::eq(set.side(Split::Validation), set.side(Split::Test));
        let (train, test) = (side(Split::Train), side(Split::Test));
        let held_out = apart.then(|| side(Split::Validation));
        if test.labels.is_empty() {
            return Err(failed(&format!("the test split of {} is empty", request.task)));
        }
        let there = set.side(Split::Train).len();
        let share = there as f64 / texts.train as f64;
        let whole = share >= 1.0 || (request.reading.strict && set.partial().is_none());
        let data_share = if whole {
            (1.0, None)
        } else {
            (share, Some(format!("{there} training texts ({})", texts.train)))
        };
        let laboratory = TrainingDevice::open(&request.spec, job.context)?;
        Ok(Self { job, recipe, config, start, train, held_out, test, data_share, laboratory })
    }

    /// Trains until the last step or until the parent is gone, and tests.
    pub fn train(&self) -> Result<TrainingResult, CellFailure> {
        let (trained, peak_bytes) = training::train(&self.laboratory, self)?;
        let tested = |weights: &Checkpoint| -> Result<EvalScore, CellFailure> {
            let builder = weights.builder(self.laboratory.device(), false)?;
            let mut net = Roberta::new(&self.config, &builder)?;
            Ok(score(&mut net, &self.test, self.batch(), self.laboratory.device())?)
        };
        let test = tested(&trained.weights)?;
        let last = trained.last.as_ref().map_or(Ok(test), tested)?;
        let classes = self.classes();
        let texts = self.test.labels.len();
        let mut measures = vec![
            MetricValue::new("accuracy", "%", test.value),
            MetricValue::new("loss", "nat", test.loss),
            MetricValue::new("accuracy_last", "%", last.value),
            MetricValue::new("loss_last", "nat", last.loss),
            MetricValue::new("largest_class", "%", self.largest_class()),
            MetricValue::new("chance", "%", 100.0 / classes as f64),
            MetricValue::new("tested", "1", texts as f64),
            MetricValue::new("cut", "%", 100.0 * self.test.cut as f64 / texts.max(1) as f64),
        ];
        measures.extend(training::selection(&trained.selected, self.job.request.steps));
        let (data_share, differs) = self.data_share.clone();
        Ok(TrainingResult { measures, data_share, differs, peak_bytes })
    }

    fn batch(&self) -> usize {
        self.job.request.spec.batch as usize
    }

    fn classes(&self) -> usize {
        data::text_task(&self.job.request.task).map_or(1, |(_, texts)| texts.classes.len())
    }

    /// Accuracy of the most frequent class among the training texts, in per cent.
    fn largest_class(&self) -> f64 {
        let count = |labels: &[u32], class: u32| labels.iter().filter(|label| **label == class).count();
        let classes = 0..self.classes() as u32;
        let most = classes.rev().max_by_key(|class| count(&self.train.labels, *class)).unwrap_or(0);
        100.0 * count(&self.test.labels, most) as f64 / self.test.labels.len().max(1) as f64
    }

    /// The order of the training texts.
    fn order(&self) -> Result<BatchOrder, CellFailure> {
        let order = BatchOrder::new(self.job.request.spec.seed, self.train.ids.len(), self.batch());
        order.ok_or_else(|| {
            let (there, batch) = (self.train.ids.len(), self.batch());
            failed(&format!(
                "{there} training texts are too few for a batch of {batch}; take a smaller --batch"
            ))
        })
    }
}

impl Experiment for FinetuneExperiment<'_> {
    type Request = FinetuneRequest;

    fn job(&self) -> &Job<'_, FinetuneRequest> {
        self.job
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        Ok(self.recipe.training(self.job.request.steps, self.job.request.rate))
    }

    /// An evaluation per epoch; a run that was made short has four at least.
    fn steps(&self) -> StepCounts {
        let steps = self.job.request.steps;
        let epoch = (self.train.ids.len() as u64 / self.job.request.spec.batch).max(1);
        let short = steps < self.recipe.steps;
        let usual = if short { epoch.min(steps.div_ceil(4)) } else { epoch };
        StepCounts { total: steps, eval_every: self.job.request.every.unwrap_or(usual) }
    }

    /// Tests are sorted by length, so that they have next to no padding.
    fn eval_cost(&self) -> EvalCost {
        let ids = |side: &Side| side.ids.iter().map(Vec::len).sum::<usize>() as f64;
        let longest = |chosen: &[usize]| chosen.iter().map(|&at| self.train.ids[at].len()).max().unwrap_or(1);
        let padded = self.order().map_or(1.0, |order| {
            let steps = order.per_epoch().clamp(1, 20);
            let all: usize = (0..steps).map(|step| longest(&order.batch(step, &mut None))).sum();
            (all * self.batch()) as f64 / steps as f64
        });
        let tests = if self.recipe.select == WeightChoice::Best { 2.0 } else { 1.0 };
        let each = ids(self.held_out.as_ref().unwrap_or(&self.test));
        EvalCost { per_eval: each / padded, final_test: tests * ids(&self.test) / padded }
    }

    fn select(&self) -> WeightChoice {
        self.recipe.select
    }

    fn model(&self) -> &dyn Architecture {
        &self.config
    }

    fn initial_weights(&self, device: &Device) -> Result<ParamBuilder, CellFailure> {
        let seed = self.job.request.spec.seed;
        let Some(start) = &self.start else { return Ok(ParamBuilder::seeded(seed, device, true)) };
        let mut weights = start.weights()?;
        let order = self.order()?;
        let batches =
            (0..CALIBRATION.min(usize::try_from(order.per_epoch()).unwrap_or(CALIBRATION))).map(|step| {
                let batch = self.train.batch(&order.batch(step as u64, &mut None), &Device::Cpu)?;
                let ids = batch.tokens()?.ids.clone();
                let known = ids.dim(1)?.min(start.positions);
                ids.narrow(1, 0, known)?.contiguous()
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
        let net = Roberta::new(&self.config, builder)?;
        let FinetuneRequest { spec, accumulate, .. } = &self.job.request;
        let batches = MicroBatches::new(self.order()?, spec.seed, *accumulate);
        Ok(Box::new(FinetuneTrainable { run: self, net, batches }))
    }
}

/// A model under training.
struct FinetuneTrainable<'a> {
    run: &'a FinetuneExperiment<'a>,
    net: Roberta,
    batches: MicroBatches,
}

impl Trainable for FinetuneTrainable<'_> {
    fn micro_batches(&self) -> usize {
        self.batches.count
    }

    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let chosen = self.batches.examples(step, part);
        let batch = self.run.train.batch(&chosen, self.run.laboratory.device())?;
        self.net.loss(&batch, self.batches.dropout(step, part))
    }

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let side = self.run.held_out.as_ref().unwrap_or(&self.run.test);
        score(&mut self.net, side, self.run.batch(), self.run.laboratory.device())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_data::tokenizer::Tokenizer;

    #[test]
    fn texts_are_cut_and_padded_to_the_longest_of_a_batch() {
        let text = |first: &str, second: Option<&str>, label| Text {
            first: first.to_owned(),
            second: second.map(str::to_owned),
            label,
        };
        let texts = [text("ab", None, 1), text("abcdefgh", None, 0), text("a", Some("b"), 1)];
        let tokenizer = Tokenizer::train(["xyz"].into_iter(), 300).unwrap(); // a word per byte
        let side = Side::new(&texts, &mut tokenizer.encoder(), (6, usize::MAX), "train");
        assert_eq!((side.cut, side.ids[1].len(), side.ids[2].len()), (1, 6, 6));
        let batch = side.batch(&[0, 1], &Device::Cpu).unwrap();
        let ids = batch.tokens().unwrap().ids.to_vec2::<u32>().unwrap();
        assert_eq!((ids[0].len(), &ids[0][4..]), (6, &[PADDING, PADDING][..]));
        assert_eq!(batch.labels.to_vec1::<u32>().unwrap(), [1, 0]);
        assert_eq!(side.sorted(2), [vec![0, 1], vec![2]]);
        assert_eq!(Side::new(&texts, &mut tokenizer.encoder(), (6, 2), "train").ids.len(), 2);
    }
}
