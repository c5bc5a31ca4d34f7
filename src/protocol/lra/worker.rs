//! The worker's side: trains one model and tells how it goes.

use candle_core::{Device, Result as Candle};

use super::floor;
use super::recipe::Recipe;
use super::request::{LraRequest, model};
use super::tasks;
use super::weights::keep_reading;
use crate::protocol::training::experiment::{
    self as training, Experiment, StepCounts, TrainedWeights, TrainingDevice, WeightChoice,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{CheckpointFiles, EvalPoint, EvalScore, Trainable};
use effattn_data::own::is_own;
use effattn_data::subset::{Change, LimitedDataset, Perturbed};
use effattn_data::{Dataset, Split};
use effattn_model::batch::Batch;
use effattn_model::family::{Architecture, Loss, Model};
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;

/// How documents become a batch, and where it is computed.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    /// Tokens of a document that are kept.
    pub keep: usize,
    /// Positions of the model.
    pub len: usize,
    pub device: &'a Device,
}

impl Reader<'_> {
    fn batch(&self, data: &dyn Dataset, split: Split, indices: &[usize]) -> Candle<Batch> {
        tasks::batch(data, (split, indices), (self.keep, self.len), self.device)
    }

    /// Mean loss and accuracy over the examples, and how many examples that was.
    pub fn score(
        &self,
        (net, data, split): (&mut dyn Model, &dyn Dataset, Split),
        batches: impl Iterator<Item = Vec<usize>>,
    ) -> Candle<(EvalScore, u64)> {
        let mut examples = 0;
        let batches = batches.map(|indices| {
            examples += indices.len() as u64;
            self.batch(data, split, &indices)
        });
        let score = training::classifier_score(net, batches)?;
        Ok((score, examples))
    }
}

/// Data and model of a run.
struct LraTrainable<'a> {
    recipe: Recipe,
    data: LimitedDataset<'a>,
    net: Box<dyn Model>,
    reader: Reader<'a>,
    noise: DropoutRng,
    train: BatchOrder,
    memo: Option<(u64, Vec<usize>)>,
    validation: BatchOrder,
    validation_memo: Option<(u64, Vec<usize>)>,
    batch: usize,
    /// Whether validation takes the examples that fill no batch, too.
    every_example: bool,
}

/// `count` examples in their order in batches of `batch`, or in one where they fill none; what is left behind the last full
/// batch makes one of its own where `rest` is set.
pub(super) fn test_batches(count: usize, batch: usize, rest: bool) -> impl Iterator<Item = Vec<usize>> {
    let batch = batch.clamp(1, count.max(1));
    let end = if rest { count } else { count / batch * batch };
    (0..end).step_by(batch).map(move |from| (from..end.min(from + batch)).collect())
}

impl Trainable for LraTrainable<'_> {
    fn loss(&mut self, step: u64, _: usize) -> Candle<Loss> {
        let indices = self.train.batch(step, &mut self.memo);
        let batch = self.reader.batch(&self.data, Split::Train, &indices)?;
        self.net.loss(&batch, self.noise.branch(step))
    }

    fn evaluate(&mut self, number: u64) -> Candle<EvalScore> {
        if self.every_example {
            let batches = test_batches(self.data.len(Split::Validation), self.batch, true);
            return Ok(self.reader.score((self.net.as_mut(), &self.data, Split::Validation), batches)?.0);
        }
        let (order, mut memo) = (self.validation, self.validation_memo.take());
        let (first, count) = match self.recipe.batches {
            Some(count) => (number * count.min(order.per_epoch()), count.min(order.per_epoch())),
            None => (0, order.per_epoch()),
        };
        let batches = (first..first + count).map(|index| order.batch(index, &mut memo));
        let score = self.reader.score((self.net.as_mut(), &self.data, Split::Validation), batches);
        self.validation_memo = memo;
        Ok(score?.0)
    }
}

/// Data and device of a run: what it is trained and tested on.
pub struct LraExperiment<'a> {
    job: &'a Job<'a, LraRequest>,
    data: Box<dyn Dataset>,
    laboratory: TrainingDevice,
    model: Box<dyn Architecture>,
    recipe: Recipe,
}

/// Weights that were selected.
pub struct Tested {
    net: Box<dyn Model>,
    /// Those of the last update, where others were selected.
    last: Option<Box<dyn Model>>,
    /// The evaluation they were selected by.
    pub selected: EvalPoint,
    peak_bytes: Option<u64>,
}

impl Experiment for LraExperiment<'_> {
    type Request = LraRequest;

    fn job(&self) -> &Job<'_, LraRequest> {
        self.job
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        let (optimizer, schedule) = self.recipe.training(self.job.request.steps, self.job.request.rate);
        Ok((optimizer.into(), schedule))
    }

    fn steps(&self) -> StepCounts {
        let total = self.job.request.steps;
        StepCounts { total, eval_every: self.recipe.every_of(total) }
    }

    fn eval_cost(&self) -> EvalCost {
        let (data, batch) = (self.limited(), self.job.request.spec.batch.max(1) as f64);
        let all = data.len(Split::Validation) as f64 / batch;
        let each = self.recipe.batches.map_or(all, |count| all.min(count as f64));
        let tests = if self.recipe.select { 2.0 } else { 1.0 }; // the selected weights, and the last
        EvalCost { per_eval: each, final_test: tests * data.len(Split::Test) as f64 / batch }
    }

    fn select(&self) -> WeightChoice {
        if self.recipe.select { WeightChoice::Best } else { WeightChoice::Last }
    }

    fn model(&self) -> &dyn Architecture {
        self.model.as_ref()
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        _: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let (spec, data) = (&self.job.request.spec, self.limited());
        let empty = |split: Split| {
            failed(&format!("the {} split of {} is empty", split.name(), self.job.request.task))
        };
        let order = |split: Split, seed: u64| {
            let count = data.len(split);
            let batch = (spec.batch as usize).min(count.max(1));
            BatchOrder::new(seed, count, batch).ok_or_else(|| empty(split))
        };
        if data.is_empty(Split::Test) {
            return Err(empty(Split::Test)); // said before training
        }
        Ok(Box::new(LraTrainable {
            recipe: self.recipe,
            net: self.model.build(builder)?,
            reader: self.reader(),
            noise: DropoutRng::new(spec.seed),
            train: order(Split::Train, spec.seed)?,
            memo: None,
            validation: order(Split::Validation, spec.seed ^ 0x5eed_da7a)?,
            validation_memo: None,
            batch: spec.batch as usize,
            every_example: is_own(&self.job.request.task),
            data,
        }))
    }
}

impl<'a> LraExperiment<'a> {
    /// Reads the data and opens the device.
    pub fn open(job: &'a Job<'a, LraRequest>) -> Result<Self, CellFailure> {
        let Job { request, context, .. } = job;
        let model = request.spec.choice().and_then(|choice| model(&request.spec, &choice, &request.task));
        let model = model?;
        let recipe = request.recipe().map_err(|error| failed(&error))?;
        let data = tasks::load(&request.task, &context.data, request.reading)?;
        context.same(&request.task, data.hash())?;
        let laboratory = TrainingDevice::open(&request.spec, context)?;
        Ok(Self { job, data, laboratory, model, recipe })
    }

    /// Trains, or goes on training, in the folder of the cell.
    pub fn train(&self) -> Result<Tested, CellFailure> {
        keep_reading(self.job.context, self.data.as_ref())?;
        let (trained, peak_bytes) = training::train(&self.laboratory, self)?;
        self.tested(trained, peak_bytes)
    }

    /// The selected weights of a finished run.
    pub fn load(&self, files: &CheckpointFiles) -> Result<Tested, CellFailure> {
        self.tested(TrainedWeights::read(files, self)?, None)
    }

    fn tested(&self, trained: TrainedWeights, peak_bytes: Option<u64>) -> Result<Tested, CellFailure> {
        let net = |weights: &Checkpoint| -> Result<Box<dyn Model>, CellFailure> {
            let builder = weights.builder(self.laboratory.device(), false)?;
            Ok(self.model.build(&builder)?)
        };
        let last = trained.last.as_ref().map(net).transpose()?;
        Ok(Tested { net: net(&trained.weights)?, last, selected: trained.selected, peak_bytes })
    }

    fn reader(&self) -> Reader<'_> {
        let LraRequest { keep, spec, .. } = &self.job.request;
        Reader { keep: *keep as usize, len: spec.len as usize, device: self.laboratory.device() }
    }

    /// The examples of each split that are used.
    fn limited(&self) -> LimitedDataset<'_> {
        let limit = self.job.request.limit.map_or(usize::MAX, |limit| limit as usize);
        LimitedDataset::new(self.data.as_ref(), limit)
    }

    /// The test split in order, of the papers' tasks its full batches; changed by `change` where something is said.
    pub fn test(
        &self,
        trained: &mut Tested,
        change: Option<(Change, &[u8])>,
    ) -> Result<(EvalScore, u64), CellFailure> {
        self.score(trained.net.as_mut(), change)
    }

    fn score(
        &self,
        net: &mut dyn Model,
        change: Option<(Change, &[u8])>,
    ) -> Result<(EvalScore, u64), CellFailure> {
        let request = &self.job.request;
        let limited = self.limited();
        let perturbed = change.map(|(change, characters)| Perturbed { data: &limited, change, characters });
        let data: &dyn Dataset = match &perturbed {
            Some(perturbed) => perturbed,
            None => &limited,
        };
        let batch = request.spec.batch as usize;
        let batches = test_batches(data.len(Split::Test), batch, is_own(&request.task));
        Ok(self.reader().score((net, data, Split::Test), batches)?)
    }

    /// Share of the protocol's training examples that are there, and in words where some are missing.
    pub fn data_share(&self) -> (f64, Option<String>) {
        // --strict holds some out, which is said elsewhere
        if self.job.request.reading.strict && self.data.partial().is_none() {
            return (1.0, None);
        }
        match tasks::missing(&self.job.request.task, self.data.len(Split::Train)) {
            Some((share, words)) => (share, Some(words)),
            None => (1.0, None),
        }
    }

    /// The result of a run with the weights `trained`.
    pub fn done(&self, mut trained: Tested) -> Result<TrainingResult, CellFailure> {
        let (test, tested) = self.test(&mut trained, None)?;
        let last = match &mut trained.last {
            Some(net) => self.score(net.as_mut(), None)?.0,
            None => test,
        };
        let LraRequest { task, spec, .. } = &self.job.request;
        let limited = self.limited().in_whole_batches(if is_own(task) { 1 } else { spec.batch as usize });
        let mut measures = vec![
            MetricValue::new("accuracy", "%", test.value),
            MetricValue::new("loss", "nat", test.loss),
            MetricValue::new("accuracy_last", "%", last.value),
            MetricValue::new("loss_last", "nat", last.loss),
            MetricValue::new("largest_class", "%", floor::largest_class(&limited)),
            MetricValue::new("tested", "1", tested as f64),
        ];
        measures.extend(training::selection(&trained.selected, self.job.request.steps));
        let (data_share, differs) = self.data_share();
        Ok(TrainingResult { measures, data_share, differs, peak_bytes: trained.peak_bytes })
    }
}
