//! The worker's side: trains one image classifier, or evaluates stored weights.

use std::path::Path;

use candle_core::Result as Candle;

use super::loader::{Ahead, Loader, Made};
use super::recipe::{self, Recipe};
use super::request::{VisionRequest, classes, model};
use super::test_only;
use crate::protocol::training::experiment::{
    self as training, Experiment, StepCounts, TrainingDevice, mean, scores,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingMessage, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{EvalScore, Trainable};
use crate::train::warm_start;
use effattn_data::content_hash::file_hash;
use effattn_data::images::test_only::{TestOnlySet, challenge};
use effattn_data::{Split, images};
use effattn_model::family::vision::{ImageClassifier, ImageModel};
use effattn_model::family::{Architecture, Loss, Model};
use effattn_model::message;
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::vision::ForwardOptions as Forward;
use effattn_model::vision::similarity::patch_cosine;
use effattn_record::text::plural;

/// Images that are named where they are left out; more are only counted.
const NAMED: usize = 20;

/// Images, model and device of a run.
pub struct VisionExperiment<'a> {
    job: &'a Job<'a, VisionRequest>,
    loader: Loader,
    laboratory: TrainingDevice,
    model: ImageClassifier,
    recipe: Recipe,
    /// Training images that are there, used or not.
    there: usize,
}

/// What is trained, as the loop sees it.
struct VisionTrainable<'a> {
    run: &'a VisionExperiment<'a>,
    net: ImageModel,
    order: BatchOrder,
    ahead: Ahead<(u64, usize), Made>,
    noise: DropoutRng,
}

impl Trainable for VisionTrainable<'_> {
    fn micro_batches(&self) -> usize {
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

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let scores = self.run.scores(&mut self.net, Split::Validation)?;
        Ok(EvalScore { loss: mean(&scores, "loss"), value: 100.0 * mean(&scores, "accuracy") })
    }
}

impl Experiment for VisionExperiment<'_> {
    type Request = VisionRequest;

    fn job(&self) -> &Job<'_, VisionRequest> {
        self.job
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        Ok(self.recipe.training(self.job.request.steps, self.job.request.rate))
    }

    fn steps(&self) -> StepCounts {
        StepCounts { total: self.job.request.steps, eval_every: self.job.request.every }
    }

    fn eval_cost(&self) -> EvalCost {
        let batches = |split: Split| self.count(split) as f64 / self.job.request.spec.batch as f64;
        EvalCost { per_eval: batches(Split::Validation), final_test: batches(Split::Test) }
    }

    fn model(&self) -> &dyn Architecture {
        &self.model
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let VisionRequest { spec, task, .. } = &self.job.request;
        let count = self.count(Split::Train);
        let order = BatchOrder::new(spec.seed, count, spec.batch as usize).ok_or_else(|| {
            failed(&format!(
                "{task}: {count} training images do not fill a batch of {}; give a smaller --batch",
                spec.batch
            ))
        })?;
        let from = restored.map_or(0, |checkpoint| checkpoint.updates);
        Ok(Box::new(VisionTrainable {
            net: self.model.built(builder)?,
            ahead: self.loader.training(order, from, self.parts()),
            noise: DropoutRng::new(spec.seed),
            run: self,
            order,
        }))
    }
}

impl<'a> VisionExperiment<'a> {
    /// Reads the images and opens the device.
    pub fn open(job: &'a Job<'a, VisionRequest>) -> Result<Self, CellFailure> {
        let request = &job.request;
        let choice = request.spec.choice()?;
        let (set, classes) = match challenge(&request.task) {
            // its parts are opened one by one when they are tested
            Some(challenge) => {
                let first = challenge.parts().swap_remove(0);
                let root = challenge.root(&job.context.data)?;
                let set = challenge.open(&root, &first, None)?;
                let classes = classes(&request.task).unwrap_or_else(|| set.classes().len());
                (set, classes)
            }
            None => {
                let source = images::source(&request.task)?;
                let set = (source.load)(&job.context.data, request.allow_partial)?;
                job.context.same(&request.task, set.hash())?;
                let classes = set.classes().len();
                (set, classes)
            }
        };
        let model = model(&request.spec, &choice, Some(classes))?;
        let recipe = recipe::find(&request.spec.preset).map_err(|error| failed(&error))?;
        let laboratory = TrainingDevice::open(&request.spec, job.context)?;
        let what = (request.spec.len as usize, request.spec.seed);
        let there = set.len(Split::Train);
        let loader = Loader::new(set, recipe, what, request.allow_partial)?;
        let loader = request.limit.map_or_else(|| loader.clone(), |limit| loader.limited(limit));
        Ok(Self { job, loader, laboratory, model, recipe, there })
    }

    fn parts(&self) -> usize {
        self.job.request.accumulate as usize
    }

    /// Images of `split` that are used.
    fn count(&self, split: Split) -> usize {
        self.loader.set.len(split)
    }

    /// Images that are computed at a time.
    fn batch(&self) -> usize {
        (self.job.request.spec.batch as usize / self.parts()).clamp(1, 128)
    }

    fn scores(&self, net: &mut ImageModel, split: Split) -> Candle<Vec<effattn_model::family::Metric>> {
        let device = self.laboratory.device();
        let made = self.loader.evaluation(split, self.batch());
        // a batch whose images were all left out has nothing to score
        let filled = made.filter(|made| made.as_ref().map_or(true, |made| !made.is_empty()));
        scores(net, filled.map(|made| made?.batch(device)))
    }

    /// Trains until the last step or until the parent is gone, and evaluates.
    pub fn trained(&self) -> Result<TrainingResult, CellFailure> {
        let (trained, peak_bytes) = training::train(&self.laboratory, self)?;
        let builder = trained.weights.builder(self.laboratory.device(), false)?;
        let mut net = self.model.built(&builder)?;
        let mut measures = self.measures(&mut net)?;
        let (steps, batch) = (self.job.request.steps, self.job.request.spec.batch);
        let epochs = (steps * batch) as f64 / self.count(Split::Train).max(1) as f64;
        measures.extend(training::selection(&trained.selected, steps));
        measures.push(MetricValue::new("epochs", "1", epochs));
        Ok(self.done(measures, peak_bytes))
    }

    /// Weights of a file instead of trained ones.
    pub fn stored(&self, file: &Path) -> Result<TrainingResult, CellFailure> {
        self.job.link.send(&TrainingMessage::Started { step: 0, resumed: false, curve: Vec::new() })?;
        let device = self.laboratory.device();
        let mut started = warm_start::tensors(&self.model, file)?;
        let read = file_hash(file).map_err(|error| failed(&format!("{}: {error}", file.display())))?;
        if self.job.request.weights_sha256.as_ref() != Some(&read) {
            let what = "changed since the plan was made; run the command again";
            return Err(failed(&format!("{} {what}", file.display())));
        }
        let fitted = self.model.fit(&mut started)?;
        let names: Vec<String> = started.keys().cloned().collect();
        let builder = ParamBuilder::given(started, device, false);
        let net = self.model.built(&builder).map_err(|error| {
            failed(&format!(
                "{}: {}; the preset, --len and the classes must be those of the weights",
                file.display(),
                message(&error)
            ))
        });
        let mut net = net?;
        let unused = warm_start::unused(names.iter(), &builder.finish());
        if let Some(first) = unused.first() {
            let count = plural(unused.len() as u64, "tensor");
            let what = format!("{}: {count} not used, such as {first}", file.display());
            self.job.warn(what)?;
        }
        let measures = self.measures(&mut net)?;
        let done = self.done(measures, self.laboratory.peak());
        let differs: Vec<String> = fitted.into_iter().chain(done.differs).collect();
        Ok(TrainingResult { differs: (!differs.is_empty()).then(|| differs.join("; ")), ..done })
    }

    /// What the row says of `net`; images that were left out on the way are named.
    fn measures(&self, net: &mut ImageModel) -> Result<Vec<MetricValue>, CellFailure> {
        let measures = self.measured(net)?;
        let left_out = self.loader.left_out();
        let shown = left_out.iter().take(NAMED).map(|what| format!("left out: {what}"));
        let more = (left_out.len() > NAMED).then(|| format!("left out: {} more", left_out.len() - NAMED));
        for what in shown.chain(more) {
            self.job.warn(what)?;
        }
        Ok(measures)
    }

    fn measured(&self, net: &mut ImageModel) -> Result<Vec<MetricValue>, CellFailure> {
        let tell = |what: &str| self.job.tell(what);
        if let Some(challenge) = challenge(&self.job.request.task) {
            let mut measures = self.challenged(challenge, (net, None), &tell)?;
            for other in self.others() {
                measures.extend(self.challenged(other, (net, None), &tell)?);
            }
            // the first is the cell's own
            measures.iter_mut().take(1).for_each(|measure| measure.task = None);
            return Ok(measures);
        }
        tell("is evaluated")?;
        let scores = self.scores(net, Split::Test)?;
        let tested = scores.first().map_or(0.0, |metric| metric.count);
        if tested == 0.0 {
            return Err(failed(&format!("{}: no image could be evaluated", self.job.request.task)));
        }
        let accuracy = 100.0 * mean(&scores, "accuracy");
        let mut measures = vec![
            MetricValue::new("accuracy", "%", accuracy),
            MetricValue::new("top5", "%", 100.0 * mean(&scores, "top5")),
            MetricValue::new("loss", "nat", mean(&scores, "loss")),
            MetricValue::new("tested", "1", tested),
            MetricValue::new("left_out", "1", self.loader.left_out().len() as f64),
        ];
        if self.job.request.similarity > 0 {
            tell("compares patches")?;
            measures.extend(self.similarity(net)?);
        }
        for other in self.others() {
            measures.extend(self.challenged(other, (net, Some(accuracy)), &tell)?);
        }
        Ok(measures)
    }

    /// What the weights are tested on besides.
    fn others(&self) -> impl Iterator<Item = &'static TestOnlySet> {
        self.job.request.also.iter().filter_map(|name| challenge(name))
    }

    /// `net` on `challenge`; `clean` is its accuracy on clean images.
    fn challenged(
        &self,
        challenge: &TestOnlySet,
        (net, clean): (&mut ImageModel, Option<f64>),
        tell: &dyn Fn(&str) -> Result<(), CellFailure>,
    ) -> Result<Vec<MetricValue>, CellFailure> {
        let trained = clean.map(|_| self.loader.set.classes());
        let (mut gone, limit) = (None, (self.job.request.limit, self.batch()));
        let data = (self.job.context.data.as_path(), trained);
        let device = self.laboratory.device();
        let outcome = test_only::tested(challenge, net, &self.loader, data, limit, device, |what| {
            tell(what).map_err(|ending| {
                gone = Some(ending);
                candle_core::Error::msg("the parent is gone")
            })
        });
        let outcome = outcome.map_err(|error| gone.unwrap_or_else(|| error.into()))?;
        self.job.context.same(challenge.name, &outcome.hash)?;
        Ok(outcome.measures(challenge, clean)?)
    }

    /// Figure 6: means over images of the patch cosine behind every block.
    fn similarity(&self, net: &ImageModel) -> Candle<Vec<MetricValue>> {
        let some = self.loader.limited(self.job.request.similarity);
        let mut sums: Vec<[f64; 2]> = Vec::new();
        let mut images = 0;
        for made in some.evaluation(Split::Test, self.batch().min(16)) {
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
            let task = Some(format!("{} block {:02}", self.job.request.task, block + 1));
            let of = |metric: &str, sum: f64| {
                let value = sum / f64::max(images as f64, 1.0);
                MetricValue { task: task.clone(), ..MetricValue::new(metric, "1", value) }
            };
            [of("patch_cosine", sum[0]), of("patch_cosine_signed", sum[1])]
        };
        Ok(sums.iter().enumerate().flat_map(measure).collect())
    }

    fn done(&self, measures: Vec<MetricValue>, peak_bytes: Option<u64>) -> TrainingResult {
        let there = self.there;
        let published = images::source(&self.job.request.task).ok().and_then(|source| source.published);
        let share = published.map_or(1.0, |published| (there as f64 / published as f64).min(1.0));
        let differs = published
            .filter(|_| share < 1.0)
            .map(|published| format!("{there} training images ({published})"));
        TrainingResult { measures, data_share: share, differs, peak_bytes }
    }
}
