//! The worker's side: trains one image classifier, or evaluates stored weights.

use std::path::Path;

use candle_core::{Device, Result as Candle};
use serde_json::Value;

use super::challenges;
use super::loader::{Ahead, Loader, Made};
use super::plan::{Request, classes, model};
use super::recipe::{self, Recipe};
use crate::data::images::challenge::{Challenge, challenge};
use crate::data::{Split, images};
use crate::model::family::vision::{ImageClassifier, ImageNet};
use crate::model::family::{Loss, Net, Resolved};
use crate::model::vision::Run as Forward;
use crate::model::vision::similarity::patch_cosine;
use crate::nn::dropout::Noise;
use crate::nn::params::Builder;
use crate::protocol::table::{Conditions, Given};
use crate::protocol::training::experiment::{Experiment, Laboratory, Train, Trained, mean, scores};
use crate::protocol::training::worker::{candle, failed, report};
use crate::protocol::training::{Answer, Done, Measure};
use crate::record::text::plural;
use crate::run::outcome::Ending;
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::Method;
use crate::train::order::Order;
use crate::train::schedule::Schedule;
use crate::train::session::{Files, Learner, Score};
use crate::train::warm_start;

/// Images that are named where they are left out; more are only counted.
const NAMED: usize = 20;

/// Trains until the last step or until the parent is gone, and evaluates.
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: Value, given: &Given) -> anyhow::Result<()> {
    let request: Request = serde_json::from_value(request)?;
    let result = Run::open(&request, &given.conditions).and_then(|run| match &request.weights {
        Some(file) => run.stored(link, Path::new(file)),
        None => run.trained(link),
    });
    report(link, result)
}

/// Images, model and device of a run.
struct Run<'a> {
    request: &'a Request,
    conditions: &'a Conditions,
    loader: Loader,
    laboratory: Laboratory,
    model: ImageClassifier,
    recipe: Recipe,
}

/// What is trained, as the loop sees it.
struct ImageLearner<'a> {
    run: &'a Run<'a>,
    net: ImageNet,
    order: Order,
    ahead: Ahead<(u64, usize), Made>,
    noise: Noise,
}

impl Learner for ImageLearner<'_> {
    fn parts(&self) -> usize {
        self.run.parts()
    }

    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let (loader, parts) = (&self.run.loader, self.run.parts());
        let made = match self.ahead.at(&(step, part)) {
            Some(made) => made?,
            None => {
                let made = loader.part(self.order, (step, part), parts, &mut None);
                made.map_err(candle_core::Error::wrap)?
            }
        };
        let batch = made.batch(self.run.laboratory.device())?;
        self.net.loss(&batch, self.noise.branch(step).branch(part as u64))
    }

    fn evaluate(&mut self, _: u64) -> Candle<Score> {
        let scores = self.run.scores(&mut self.net, Split::Validation)?;
        Ok(Score { loss: mean(&scores, "loss"), value: 100.0 * mean(&scores, "accuracy") })
    }
}

impl Experiment for Run<'_> {
    fn files(&self) -> Files {
        Files::in_folder(&self.conditions.folder)
    }

    fn description(&self) -> Result<Value, Ending> {
        serde_json::to_value(self.request).map_err(|error| failed(&error))
    }

    fn method(&self) -> Result<(Method, Schedule), Ending> {
        Ok(self.recipe.training(self.request.steps, self.request.rate))
    }

    fn steps(&self) -> (u64, u64) {
        (self.request.steps, self.request.every)
    }

    fn forwards(&self) -> (f64, f64) {
        let batches = |split: Split| self.count(split) as f64 / self.request.spec.batch as f64;
        (batches(Split::Validation), batches(Split::Test))
    }

    fn begin(&self, device: &Device) -> Result<Builder, Ending> {
        Ok(Builder::seeded(self.request.spec.seed, device, true))
    }

    fn model(&self) -> &dyn Resolved {
        &self.model
    }

    fn learner<'a>(
        &'a self,
        builder: &Builder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner + 'a>, Ending> {
        let Request { spec, task, .. } = self.request;
        let count = self.count(Split::Train);
        let order = Order::new(spec.seed, count, spec.batch as usize).ok_or_else(|| {
            failed(&format!(
                "{task}: {count} training images do not fill a batch of {}; give a smaller --batch",
                spec.batch
            ))
        })?;
        let from = restored.map_or(0, |checkpoint| checkpoint.updates);
        Ok(Box::new(ImageLearner {
            net: self.model.built(builder).map_err(candle)?,
            ahead: self.loader.training(order, from, self.parts()),
            noise: Noise::new(spec.seed),
            run: self,
            order,
        }))
    }
}

impl<'a> Run<'a> {
    fn open(request: &'a Request, conditions: &'a Conditions) -> Result<Self, Ending> {
        let choice = request.spec.choice().map_err(|error| failed(&error))?;
        let (set, classes) = match challenge(&request.task) {
            // its parts are opened one by one when they are tested
            Some(challenge) => {
                let first = challenge.parts().swap_remove(0);
                let root = challenge.root(&conditions.data).map_err(|error| failed(&error))?;
                let set = challenge.open(&root, &first, None).map_err(|error| failed(&error))?;
                let classes = classes(&request.task).unwrap_or_else(|| set.classes().len());
                (set, classes)
            }
            None => {
                let source = images::source(&request.task).map_err(|error| failed(&error))?;
                let set =
                    (source.load)(&conditions.data, request.allow_partial).map_err(|error| failed(&error))?;
                conditions.same(&request.task, set.hash())?;
                let classes = set.classes().len();
                (set, classes)
            }
        };
        let model = model(&request.spec, &choice, Some(classes)).map_err(|error| failed(&error))?;
        let recipe = recipe::find(&request.spec.preset).map_err(|error| failed(&error))?;
        let laboratory = Laboratory::open(&request.spec, conditions)?;
        let what = (request.spec.len as usize, request.spec.seed);
        let loader = Loader::new(set, recipe, what, request.allow_partial).map_err(|error| failed(&error))?;
        Ok(Self { request, conditions, loader, laboratory, model, recipe })
    }

    fn parts(&self) -> usize {
        self.request.accumulate as usize
    }

    /// Images of `split` that are used.
    fn count(&self, split: Split) -> usize {
        let all = self.loader.set.len(split);
        self.request.limit.map_or(all, |limit| all.min(limit as usize))
    }

    /// Images that are computed at a time.
    fn batch(&self) -> usize {
        (self.request.spec.batch as usize / self.parts()).clamp(1, 128)
    }

    fn scores(&self, net: &mut ImageNet, split: Split) -> Candle<Vec<crate::model::family::Metric>> {
        let device = self.laboratory.device();
        let made = self.loader.evaluation(split, self.count(split), self.batch());
        // a batch whose images were all left out has nothing to score
        let filled = made.filter(|made| made.as_ref().map_or(true, |made| !made.is_empty()));
        scores(net, filled.map(|made| made?.batch(device)))
    }

    fn trained(&self, link: &Link) -> Result<Done, Ending> {
        Train { link, conditions: self.conditions, before: (&[], 0) }.run(&self.laboratory, self)?;
        let peak_bytes = self.laboratory.peak();
        let trained = Trained::read(&self.files(), self)?;
        let builder = trained.weights.builder(self.laboratory.device(), false).map_err(candle)?;
        let mut net = self.model.built(&builder).map_err(candle)?;
        let mut measures = self.measures(link, &mut net)?;
        let selected = &trained.selected;
        let (steps, batch) = (self.request.steps, self.request.spec.batch);
        measures.extend([
            Measure::new("validation_accuracy", "%", selected.score.value),
            Measure::new("validation_loss", "nat", selected.score.loss),
            Measure::new("selected_step", "1", selected.step as f64),
            Measure::new("train_loss", "nat", selected.train_loss),
            Measure::new("steps", "1", steps as f64),
            Measure::new("epochs", "1", (steps * batch) as f64 / self.count(Split::Train).max(1) as f64),
        ]);
        Ok(self.done(measures, peak_bytes))
    }

    /// Weights of a file instead of trained ones.
    fn stored(&self, link: &Link, file: &Path) -> Result<Done, Ending> {
        link.send(&Answer::Started { step: 0, curve: Vec::new() }).map_err(|error| failed(&error))?;
        let device = self.laboratory.device();
        let mut started = warm_start::tensors(&self.model, file).map_err(|error| failed(&error))?;
        let fitted = self.model.fit(&mut started).map_err(candle)?;
        let names: Vec<String> = started.keys().cloned().collect();
        let builder = Builder::given(started, device, false);
        let net = self.model.built(&builder).map_err(|error| {
            failed(&format!(
                "{}: {error}; the preset, --len and the classes must be those of the weights",
                file.display()
            ))
        });
        let mut net = net?;
        let unused = warm_start::unused(names.iter(), &builder.finish());
        if let Some(first) = unused.first() {
            let count = plural(unused.len() as u64, "tensor");
            let what = format!("{}: {count} not used, such as {first}", file.display());
            link.send(&Answer::Warned { what }).map_err(|error| failed(&error))?;
        }
        let measures = self.measures(link, &mut net)?;
        let done = self.done(measures, self.laboratory.peak());
        let differs: Vec<String> = fitted.into_iter().chain(done.differs).collect();
        Ok(Done { differs: (!differs.is_empty()).then(|| differs.join("; ")), ..done })
    }

    /// What the row says of `net`; images that were left out on the way are named.
    fn measures(&self, link: &Link, net: &mut ImageNet) -> Result<Vec<Measure>, Ending> {
        let measures = self.measured(link, net)?;
        let left_out = self.loader.left_out();
        let shown = left_out.iter().take(NAMED).map(|what| format!("left out: {what}"));
        let more = (left_out.len() > NAMED).then(|| format!("left out: {} more", left_out.len() - NAMED));
        for what in shown.chain(more) {
            link.send(&Answer::Warned { what }).map_err(|error| failed(&error))?;
        }
        Ok(measures)
    }

    fn measured(&self, link: &Link, net: &mut ImageNet) -> Result<Vec<Measure>, Ending> {
        let tell =
            |what: &str| link.send(&Answer::Doing { what: what.to_owned() }).map_err(|error| failed(&error));
        if let Some(challenge) = challenge(&self.request.task) {
            let mut measures = self.challenged(challenge, (net, None), &tell)?;
            for other in self.others() {
                measures.extend(self.challenged(other, (net, None), &tell)?);
            }
            // the first is the cell's own
            measures.iter_mut().take(1).for_each(|measure| measure.task = None);
            return Ok(measures);
        }
        tell("is evaluated")?;
        let scores = self.scores(net, Split::Test).map_err(candle)?;
        let tested = scores.first().map_or(0.0, |metric| metric.count);
        if tested == 0.0 {
            return Err(failed(&format!("{}: no image could be evaluated", self.request.task)));
        }
        let accuracy = 100.0 * mean(&scores, "accuracy");
        let mut measures = vec![
            Measure::new("accuracy", "%", accuracy),
            Measure::new("top5", "%", 100.0 * mean(&scores, "top5")),
            Measure::new("loss", "nat", mean(&scores, "loss")),
            Measure::new("tested", "1", tested),
            Measure::new("left_out", "1", self.loader.left_out().len() as f64),
        ];
        if self.request.similarity > 0 {
            tell("compares patches")?;
            measures.extend(self.similarity(net).map_err(candle)?);
        }
        for other in self.others() {
            measures.extend(self.challenged(other, (net, Some(accuracy)), &tell)?);
        }
        Ok(measures)
    }

    /// What the weights are tested on besides.
    fn others(&self) -> impl Iterator<Item = &'static Challenge> {
        self.request.also.iter().filter_map(|name| challenge(name))
    }

    /// `net` on `challenge`; `clean` is its accuracy on clean images.
    fn challenged(
        &self,
        challenge: &Challenge,
        (net, clean): (&mut ImageNet, Option<f64>),
        tell: &dyn Fn(&str) -> Result<(), Ending>,
    ) -> Result<Vec<Measure>, Ending> {
        let trained = clean.map(|_| self.loader.set.classes());
        let (mut gone, limit) = (None, (self.request.limit, self.batch()));
        let data = (self.conditions.data.as_path(), trained);
        let device = self.laboratory.device();
        let outcome = challenges::tested(challenge, net, &self.loader, data, limit, device, |what| {
            tell(what).map_err(|ending| {
                gone = Some(ending);
                candle_core::Error::msg("the parent is gone")
            })
        });
        let outcome = outcome.map_err(|error| gone.unwrap_or_else(|| candle(error)))?;
        self.conditions.same(challenge.name, &outcome.hash)?;
        outcome.measures(challenge, clean).map_err(candle)
    }

    /// Figure 6: means over images of the patch cosine behind every block.
    fn similarity(&self, net: &ImageNet) -> Candle<Vec<Measure>> {
        let count = self.count(Split::Test).min(self.request.similarity as usize);
        let mut sums: Vec<[f64; 2]> = Vec::new();
        let mut images = 0;
        for made in self.loader.evaluation(Split::Test, count, self.batch().min(16)) {
            let made = made?;
            if made.is_empty() {
                continue;
            }
            images += made.len();
            let batch = made.batch(self.laboratory.device())?;
            let blocks = net.classify(batch.pixels()?, &Forward::LOOK)?.blocks;
            sums.resize(blocks.len(), [0.0; 2]);
            for (sum, (x, skip)) in sums.iter_mut().zip(&blocks) {
                let (absolute, signed) = patch_cosine(x, *skip)?;
                for (sum, values) in sum.iter_mut().zip([absolute, signed]) {
                    *sum += values.to_vec1::<f32>()?.into_iter().map(f64::from).sum::<f64>();
                }
            }
        }
        let measure = |(block, sum): (usize, &[f64; 2])| {
            let task = Some(format!("{} block {:02}", self.request.task, block + 1));
            let of = |metric: &str, sum: f64| {
                let value = sum / f64::max(images as f64, 1.0);
                Measure { task: task.clone(), ..Measure::new(metric, "1", value) }
            };
            [of("patch_cosine", sum[0]), of("patch_cosine_signed", sum[1])]
        };
        Ok(sums.iter().enumerate().flat_map(measure).collect())
    }

    fn done(&self, measures: Vec<Measure>, peak_bytes: Option<u64>) -> Done {
        let there = self.loader.set.len(Split::Train);
        let published = images::source(&self.request.task).ok().and_then(|source| source.published);
        let share = published.map_or(1.0, |published| (there as f64 / published as f64).min(1.0));
        let differs = published
            .filter(|_| share < 1.0)
            .map(|published| format!("{there} training images ({published})"));
        Done { measures, data_share: share, differs, peak_bytes }
    }
}
