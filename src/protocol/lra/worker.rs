//! The worker's side: trains one model and tells how it goes.

use candle_core::Result as Candle;
use serde_json::Value;

use super::floor;
use super::plan::{Request, model};
use super::recipe::Recipe;
use super::tasks;
use crate::data::select::{Change, Limited, Perturbed};
use crate::data::{self, Dataset, Split};
use crate::device::{Backend, alloc};
use crate::model::batch::Batch;
use crate::model::family::{Loss, Net, Resolved};
use crate::nn::dropout::Noise;
use crate::nn::params::Builder;
use crate::protocol::table::{Conditions, Given};
use crate::protocol::training::worker::{candle, choose_kernels, drive, failed, report, restore};
use crate::protocol::training::{Answer, Done, Measure};
use crate::record::Outcome;
use crate::run::outcome::Ending;
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::order::Order;
use crate::train::session::{Course, Files, Learner, Point, Score, State};
use crate::train::step::Trainer;

/// How documents become a batch, and where it is computed.
#[derive(Clone, Copy)]
struct Reader<'a> {
    keep: usize,
    len: usize,
    backend: &'a Backend,
}

impl Reader<'_> {
    fn batch(&self, data: &dyn Dataset, split: Split, indices: &[usize]) -> Candle<Batch> {
        tasks::batch(data, (split, indices), (self.keep, self.len), self.backend.device())
    }

    /// Mean over the batches of loss and of accuracy, and how many examples that was.
    fn score(
        &self,
        (net, data, split): (&mut dyn Net, &dyn Dataset, Split),
        batches: impl Iterator<Item = Vec<usize>>,
    ) -> Candle<(Score, u64)> {
        let (mut sums, mut examples) = ([(0.0, 0.0); 2], 0u64);
        for indices in batches {
            let metrics = net.metrics(&self.batch(data, split, &indices)?)?;
            for (sum, name) in sums.iter_mut().zip(["loss", "accuracy"]) {
                for metric in metrics.iter().filter(|metric| metric.name == name) {
                    *sum = (sum.0 + metric.sum, sum.1 + metric.count);
                }
            }
            examples += indices.len() as u64;
        }
        let [loss, right] = sums.map(|(sum, count)| sum / f64::max(count, 1.0));
        Ok((Score { loss, value: 100.0 * right }, examples))
    }
}

/// Data and model of a run.
struct ClassifierLearner<'a> {
    recipe: Recipe,
    data: &'a dyn Dataset,
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
        let batch = self.reader.batch(self.data, Split::Train, &indices)?;
        self.net.loss(&batch, self.noise.branch(step))
    }

    fn evaluate(&mut self, number: u64) -> Candle<Score> {
        let (order, mut memo) = (self.validation, self.validation_memo.take());
        let (first, count) = match self.recipe.batches {
            Some(count) => (number * count.min(order.per_epoch()), count.min(order.per_epoch())),
            None => (0, order.per_epoch()),
        };
        let batches = (first..first + count).map(|index| order.batch(index, &mut memo));
        let score = self.reader.score((self.net.as_mut(), self.data, Split::Validation), batches);
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
    let result = Experiment::open(&request, &given.conditions).and_then(|experiment| {
        let trained = experiment.train(link, &given.conditions)?;
        experiment.done(trained)
    });
    report(link, result)
}

/// Data and device of a run: what it is trained and tested on.
pub struct Experiment<'a> {
    request: &'a Request,
    data: Box<dyn Dataset>,
    backend: Backend,
    model: Box<dyn Resolved>,
}

/// Weights that were selected.
pub struct Trained {
    net: Box<dyn Net>,
    /// Those of the last update, where others were selected.
    last: Option<Box<dyn Net>>,
    /// The evaluation they were selected by.
    pub selected: Point,
    peak_bytes: Option<u64>,
}

impl<'a> Experiment<'a> {
    /// Reads the data and opens the device.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn open(request: &'a Request, conditions: &Conditions) -> Result<Self, Ending> {
        let model = request.spec.choice().and_then(|choice| model(&request.spec, &choice, &request.task));
        let model = model.map_err(|error| failed(&error))?;
        choose_kernels(&request.spec, conditions);
        let data =
            tasks::load(&request.task, &conditions.data, request.reading).map_err(|error| failed(&error))?;
        conditions.same(&request.task, data.hash())?;
        let backend = Backend::open(request.spec.device).map_err(|error| failed(&error))?;
        Ok(Self { request, data, backend, model })
    }

    /// Trains, or goes on training, in the folder of the cell.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn train(&self, link: &Link, conditions: &Conditions) -> Result<Trained, Ending> {
        let request = self.request;
        let baseline = alloc::live();
        let files = Files::in_folder(&conditions.folder);
        let limited = Limited::new(self.data.as_ref(), limit(request));
        let model = serde_json::to_value(request).map_err(|error| failed(&error))?;
        let restored = restore(&files, &model)?;
        let (mut task, mut trainer, mut state) = open(self, &limited, (&files, restored.as_ref()))?;
        drop(restored);
        let started = Answer::Started { step: trainer.optimizer().updates(), curve: state.curve.clone() };
        link.send(&started).map_err(|error| failed(&error))?;
        let course = Course {
            steps: request.steps,
            every: task.recipe.every_of(request.steps),
            save: conditions.save(),
        };
        drive(link, (&mut trainer, &mut task, &mut state), (&course, &files, &model), 0)?;
        drop(trainer);
        let peak = alloc::peak().saturating_sub(baseline) as u64;
        let cpu = request.spec.device == crate::config::settings::DeviceName::Cpu;
        if task.recipe.select {
            let trained = self.load(&files)?;
            return Ok(Trained { peak_bytes: cpu.then_some(peak), ..trained });
        }
        let selected = state.curve.last().copied().ok_or_else(|| failed(&"nothing was evaluated"))?;
        Ok(Trained { net: task.net, last: None, selected, peak_bytes: cpu.then_some(peak) })
    }

    /// The selected weights of a finished run.
    ///
    /// # Errors
    /// Checkpoints that are not there, of another run, or of one that is not finished.
    pub fn load(&self, files: &Files) -> Result<Trained, Ending> {
        let request = self.request;
        let recipe = request.recipe().map_err(|error| failed(&error))?;
        let model = serde_json::to_value(request).map_err(|error| failed(&error))?;
        let last = Checkpoint::load(&files.last).map_err(|error| failed(&error))?;
        last.expect_model(&model).map_err(|error| failed(&error))?;
        let state = State::read(&last, &files.last).map_err(|error| failed(&error))?;
        if last.updates < request.steps {
            return Err(failed(&format!("{} is not trained to its end", files.last.display())));
        }
        let selected = if recipe.select { state.best_point() } else { state.curve.last() };
        let selected = *selected.ok_or_else(|| failed(&"nothing was evaluated"))?;
        let net = |weights: &Checkpoint| {
            let builder = weights.builder(self.backend.device(), false).map_err(candle)?;
            self.model.build(&builder).map_err(candle)
        };
        let last = net(&last)?;
        if !recipe.select {
            return Ok(Trained { net: last, last: None, selected, peak_bytes: None });
        }
        let best = Checkpoint::load(&files.best).map_err(|error| failed(&error))?;
        Ok(Trained { net: net(&best)?, last: Some(last), selected, peak_bytes: None })
    }

    /// Full batches of the test split in order, or the only one, changed by `change` where something is said.
    ///
    /// # Errors
    /// How the cell ended instead.
    pub fn test(
        &self,
        trained: &mut Trained,
        change: Option<(Change, &[u8])>,
    ) -> Result<(Score, u64), Ending> {
        self.score(trained.net.as_mut(), change)
    }

    fn score(&self, net: &mut dyn Net, change: Option<(Change, &[u8])>) -> Result<(Score, u64), Ending> {
        let request = self.request;
        let limited = Limited::new(self.data.as_ref(), limit(request));
        let perturbed = change.map(|(change, characters)| Perturbed { data: &limited, change, characters });
        let data: &dyn Dataset = match &perturbed {
            Some(perturbed) => perturbed,
            None => &limited,
        };
        let count = data.len(Split::Test);
        let batch = (request.spec.batch as usize).clamp(1, count.max(1));
        let batches = (0..count / batch).map(|index| (index * batch..(index + 1) * batch).collect());
        reader(request, &self.backend).score((net, data, Split::Test), batches).map_err(candle)
    }

    /// Share of the protocol's training examples that are there, and in words where some are missing.
    pub fn data_share(&self) -> (f64, Option<String>) {
        // --strict holds some out, which is said elsewhere
        if self.request.reading.strict && self.data.partial().is_none() {
            return (1.0, None);
        }
        match missing(&self.request.task, self.data.len(Split::Train)) {
            Some((share, words)) => (share, Some(words)),
            None => (1.0, None),
        }
    }

    fn done(&self, mut trained: Trained) -> Result<Done, Ending> {
        let (test, tested) = self.test(&mut trained, None)?;
        let last = match &mut trained.last {
            Some(net) => self.score(net.as_mut(), None)?.0,
            None => test,
        };
        let selected = &trained.selected;
        let limited = Limited::new(self.data.as_ref(), limit(self.request));
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

/// Where `there` training examples are not all of the published split: their share, and that in words.
pub fn missing(task: &str, there: usize) -> Option<(f64, String)> {
    let published = data::task(task).ok()?.1.train;
    let share = there as f64 / published as f64;
    (share < 1.0).then(|| (share, format!("{there} training examples ({published})")))
}

/// Examples of each split that are used at most.
fn limit(request: &Request) -> usize {
    request.limit.map_or(usize::MAX, |limit| limit as usize)
}

fn reader<'a>(request: &Request, backend: &'a Backend) -> Reader<'a> {
    Reader { keep: request.keep as usize, len: request.spec.len as usize, backend }
}

/// Data, model and optimizer, from the beginning or from a checkpoint.
fn open<'a>(
    experiment: &'a Experiment,
    data: &'a dyn Dataset,
    (files, restored): (&Files, Option<&Checkpoint>),
) -> Result<(ClassifierLearner<'a>, Trainer, State), Ending> {
    let Experiment { request, backend, model, .. } = experiment;
    let spec = &request.spec;
    let recipe = request.recipe().map_err(|error| failed(&error))?;
    let (optimizer, schedule) = recipe.training(request.steps, request.rate);
    let builder = match restored {
        Some(checkpoint) => checkpoint.builder(backend.device(), true).map_err(candle)?,
        None => Builder::seeded(spec.seed, backend.device(), true),
    };
    let net = model.build(&builder).map_err(candle)?;
    let params = builder.finish();
    let (trainer, state) = match restored {
        Some(checkpoint) => {
            let state = State::read(checkpoint, &files.last);
            let trainer = checkpoint.trainer(params, optimizer, schedule);
            (trainer.map_err(|error| failed(&error))?, state.map_err(|error| failed(&error))?)
        }
        None => (Trainer::new(params, optimizer, schedule).map_err(candle)?, State::default()),
    };
    let trainer = trainer.decay_only(&|name| model.decays(name)).map_err(candle)?;
    let order = |split: Split, seed: u64| {
        let count = data.len(split);
        let batch = (spec.batch as usize).min(count.max(1));
        Order::new(seed, count, batch).ok_or_else(|| {
            Ending::new(Outcome::Failed, format!("the {} split of {} is empty", split.name(), request.task))
        })
    };
    let task = ClassifierLearner {
        recipe,
        data,
        net,
        reader: reader(request, backend),
        noise: Noise::new(spec.seed),
        train: order(Split::Train, spec.seed)?,
        memo: None,
        validation: order(Split::Validation, spec.seed ^ 0x5eed_da7a)?,
        validation_memo: None,
    };
    Ok((task, trainer, state))
}
