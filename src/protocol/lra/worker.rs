//! The worker's side: trains one model and tells how it goes.

use candle_core::{Device, Result as Candle};
use serde_json::Value;

use super::floor;
use super::plan::{Request, model};
use super::recipe::Recipe;
use super::tasks;
use crate::data::select::{Change, Limited, Perturbed};
use crate::data::{Dataset, Split};
use crate::model::batch::Batch;
use crate::model::family::{Loss, Net, Resolved};
use crate::nn::dropout::Noise;
use crate::nn::params::Builder;
use crate::protocol::table::{Conditions, Given};
use crate::protocol::training::experiment::{Experiment, Laboratory, Select, Train, Trained, mean, scores};
use crate::protocol::training::worker::{candle, failed, report};
use crate::protocol::training::{Done, Measure};
use crate::run::outcome::Ending;
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::Method;
use crate::train::order::Order;
use crate::train::schedule::Schedule;
use crate::train::session::{Files, Learner, Point, Score};

/// How documents become a batch, and where it is computed.
#[derive(Clone, Copy)]
struct Reader<'a> {
    keep: usize,
    len: usize,
    device: &'a Device,
}

impl Reader<'_> {
    fn batch(&self, data: &dyn Dataset, split: Split, indices: &[usize]) -> Candle<Batch> {
        tasks::batch(data, (split, indices), (self.keep, self.len), self.device)
    }

    /// Mean over the batches of loss and of accuracy, and how many examples that was.
    fn score(
        &self,
        (net, data, split): (&mut dyn Net, &dyn Dataset, Split),
        batches: impl Iterator<Item = Vec<usize>>,
    ) -> Candle<(Score, u64)> {
        let mut examples = 0;
        let all = scores(
            net,
            batches.map(|indices| {
                examples += indices.len() as u64;
                self.batch(data, split, &indices)
            }),
        )?;
        Ok((Score { loss: mean(&all, "loss"), value: 100.0 * mean(&all, "accuracy") }, examples))
    }
}

/// Data and model of a run.
struct ClassifierLearner<'a> {
    recipe: Recipe,
    data: Limited<'a>,
    net: Box<dyn Net>,
    reader: Reader<'a>,
    noise: Noise,
    train: Order,
    memo: Option<(u64, Vec<usize>)>,
    validation: Order,
    validation_memo: Option<(u64, Vec<usize>)>,
}

impl Learner for ClassifierLearner<'_> {
    fn loss(&mut self, step: u64, _: usize) -> Candle<Loss> {
        let indices = self.train.batch(step, &mut self.memo);
        let batch = self.reader.batch(&self.data, Split::Train, &indices)?;
        self.net.loss(&batch, self.noise.branch(step))
    }

    fn evaluate(&mut self, number: u64) -> Candle<Score> {
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

/// Trains until the last step or until the parent is gone, and tests.
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: Value, given: &Given) -> anyhow::Result<()> {
    let request: Request = serde_json::from_value(request)?;
    let result = Run::open(&request, &given.conditions).and_then(|run| {
        let trained = run.train(link)?;
        run.done(trained)
    });
    report(link, result)
}

/// Data and device of a run: what it is trained and tested on.
pub struct Run<'a> {
    request: &'a Request,
    conditions: &'a Conditions,
    data: Box<dyn Dataset>,
    laboratory: Laboratory,
    model: Box<dyn Resolved>,
    recipe: Recipe,
}

/// Weights that were selected.
pub struct Tested {
    net: Box<dyn Net>,
    /// Those of the last update, where others were selected.
    last: Option<Box<dyn Net>>,
    /// The evaluation they were selected by.
    pub selected: Point,
    peak_bytes: Option<u64>,
}

impl Experiment for Run<'_> {
    fn files(&self) -> Files {
        Files::in_folder(&self.conditions.folder)
    }

    fn description(&self) -> Result<Value, Ending> {
        serde_json::to_value(self.request).map_err(|error| failed(&error))
    }

    fn method(&self) -> Result<(Method, Schedule), Ending> {
        let (optimizer, schedule) = self.recipe.training(self.request.steps, self.request.rate);
        Ok((optimizer.into(), schedule))
    }

    fn steps(&self) -> (u64, u64) {
        (self.request.steps, self.recipe.every_of(self.request.steps))
    }

    fn forwards(&self) -> (f64, f64) {
        let (data, batch) = (self.limited(), self.request.spec.batch.max(1) as f64);
        let all = data.len(Split::Validation) as f64 / batch;
        let each = self.recipe.batches.map_or(all, |count| all.min(count as f64));
        let tests = if self.recipe.select { 2.0 } else { 1.0 }; // the selected weights, and the last
        (each, tests * data.len(Split::Test) as f64 / batch)
    }

    fn select(&self) -> Select {
        if self.recipe.select { Select::Best } else { Select::Last }
    }

    fn begin(&self, device: &Device) -> Result<Builder, Ending> {
        Ok(Builder::seeded(self.request.spec.seed, device, true))
    }

    fn model(&self) -> &dyn Resolved {
        self.model.as_ref()
    }

    fn learner<'a>(
        &'a self,
        builder: &Builder,
        _: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner + 'a>, Ending> {
        let (spec, data) = (&self.request.spec, self.limited());
        let order = |split: Split, seed: u64| {
            let count = data.len(split);
            let batch = (spec.batch as usize).min(count.max(1));
            let empty = || failed(&format!("the {} split of {} is empty", split.name(), self.request.task));
            Order::new(seed, count, batch).ok_or_else(empty)
        };
        Ok(Box::new(ClassifierLearner {
            recipe: self.recipe,
            net: self.model.build(builder).map_err(candle)?,
            reader: self.reader(),
            noise: Noise::new(spec.seed),
            train: order(Split::Train, spec.seed)?,
            memo: None,
            validation: order(Split::Validation, spec.seed ^ 0x5eed_da7a)?,
            validation_memo: None,
            data,
        }))
    }
}

impl<'a> Run<'a> {
    /// Reads the data and opens the device.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn open(request: &'a Request, conditions: &'a Conditions) -> Result<Self, Ending> {
        let model = request.spec.choice().and_then(|choice| model(&request.spec, &choice, &request.task));
        let model = model.map_err(|error| failed(&error))?;
        let recipe = request.recipe().map_err(|error| failed(&error))?;
        let data =
            tasks::load(&request.task, &conditions.data, request.reading).map_err(|error| failed(&error))?;
        conditions.same(&request.task, data.hash())?;
        let laboratory = Laboratory::open(&request.spec, conditions)?;
        Ok(Self { request, conditions, data, laboratory, model, recipe })
    }

    /// Trains, or goes on training, in the folder of the cell.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn train(&self, link: &Link) -> Result<Tested, Ending> {
        Train { link, conditions: self.conditions, before: (&[], 0) }.run(&self.laboratory, self)?;
        let peak_bytes = self.laboratory.peak();
        Ok(Tested { peak_bytes, ..self.load(&self.files())? })
    }

    /// The selected weights of a finished run.
    ///
    /// # Errors
    /// Checkpoints that are not there, of another run, or of one that is not finished.
    pub fn load(&self, files: &Files) -> Result<Tested, Ending> {
        let trained = Trained::read(files, self)?;
        let net = |weights: &Checkpoint| {
            let builder = weights.builder(self.laboratory.device(), false).map_err(candle)?;
            self.model.build(&builder).map_err(candle)
        };
        let last = trained.last.as_ref().map(net).transpose()?;
        Ok(Tested { net: net(&trained.weights)?, last, selected: trained.selected, peak_bytes: None })
    }

    fn reader(&self) -> Reader<'_> {
        let Request { keep, spec, .. } = self.request;
        Reader { keep: *keep as usize, len: spec.len as usize, device: self.laboratory.device() }
    }

    /// The examples of each split that are used.
    fn limited(&self) -> Limited<'_> {
        let limit = self.request.limit.map_or(usize::MAX, |limit| limit as usize);
        Limited::new(self.data.as_ref(), limit)
    }

    /// Full batches of the test split in order, or the only one, changed by `change` where something is said.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn test(
        &self,
        trained: &mut Tested,
        change: Option<(Change, &[u8])>,
    ) -> Result<(Score, u64), Ending> {
        self.score(trained.net.as_mut(), change)
    }

    fn score(&self, net: &mut dyn Net, change: Option<(Change, &[u8])>) -> Result<(Score, u64), Ending> {
        let request = self.request;
        let limited = self.limited();
        let perturbed = change.map(|(change, characters)| Perturbed { data: &limited, change, characters });
        let data: &dyn Dataset = match &perturbed {
            Some(perturbed) => perturbed,
            None => &limited,
        };
        let count = data.len(Split::Test);
        let batch = (request.spec.batch as usize).clamp(1, count.max(1));
        let batches = (0..count / batch).map(|index| (index * batch..(index + 1) * batch).collect());
        self.reader().score((net, data, Split::Test), batches).map_err(candle)
    }

    /// Share of the protocol's training examples that are there, and in words where some are missing.
    pub fn data_share(&self) -> (f64, Option<String>) {
        // --strict holds some out, which is said elsewhere
        if self.request.reading.strict && self.data.partial().is_none() {
            return (1.0, None);
        }
        match tasks::missing(&self.request.task, self.data.len(Split::Train)) {
            Some((share, words)) => (share, Some(words)),
            None => (1.0, None),
        }
    }

    fn done(&self, mut trained: Tested) -> Result<Done, Ending> {
        let (test, tested) = self.test(&mut trained, None)?;
        let last = match &mut trained.last {
            Some(net) => self.score(net.as_mut(), None)?.0,
            None => test,
        };
        let selected = &trained.selected;
        let limited = self.limited();
        let measures = vec![
            Measure::new("accuracy", "%", test.value),
            Measure::new("loss", "nat", test.loss),
            Measure::new("accuracy_last", "%", last.value),
            Measure::new("loss_last", "nat", last.loss),
            Measure::new("largest_class", "%", floor::largest_class(&limited)),
            Measure::new("tested", "1", tested as f64),
            Measure::new("validation_accuracy", "%", selected.score.value),
            Measure::new("validation_loss", "nat", selected.score.loss),
            Measure::new("selected_step", "1", selected.step as f64),
            Measure::new("train_loss", "nat", selected.train_loss),
            Measure::new("steps", "1", self.request.steps as f64),
        ];
        let (data_share, differs) = self.data_share();
        Ok(Done { measures, data_share, differs, peak_bytes: trained.peak_bytes })
    }
}
