//! The worker's side: trains one language model through its phases and evaluates it.

use candle_core::{Device, Result as Candle, Tensor};
use serde_json::Value as Json;

use super::eval::{Bits, Evaluation};
use super::generate::Description;
use super::recipe::{Phase, optimizer};
use super::request::{CharLmRequest, load};
use super::streams::Streams;
use super::witten_bell::witten_bell;
use crate::protocol::definition::WorkerContext;
use crate::protocol::training::experiment::{EarlierPhases, Experiment, StepCounts, TrainingDevice};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{CheckpointFiles, EvalPoint, EvalScore, Trainable};
use effattn_data as data;
use effattn_data::corpus::CharCorpus;
use effattn_model::char_lm::next_symbol_loss;
use effattn_model::evaluate;
use effattn_model::family::causal::{Cache, CausalArchitecture, CausalModel};
use effattn_model::family::{Architecture, Loss};
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;

/// Files of phase `index`.
fn files(context: &WorkerContext, index: usize) -> CheckpointFiles {
    let name = |what: &str| context.folder.join(format!("phase{}-{what}.safetensors", index + 1));
    CheckpointFiles { last: name("last"), best: name("best") }
}

/// Trains until the last step or until the parent is gone, and tests.
pub fn train(job: &Job<CharLmRequest>) -> Result<TrainingResult, CellFailure> {
    let Job { request, context, .. } = job;
    let corpus = load(&request.corpus, &context.data, request.allow_partial)?;
    context.same(&request.corpus, &corpus.hash)?;
    let spec = &request.spec;
    let config = request.model(corpus.vocabulary)?;
    let laboratory = TrainingDevice::open(spec, context)?;
    let device = laboratory.device();
    let (mut curve, mut before) = (Vec::new(), 0);
    let mut selected = None;
    let run = |index| CharLmExperiment { job, corpus: &corpus, device, config: config.as_ref(), index };
    for index in 0..request.phases.len() {
        let earlier = EarlierPhases { points: &curve, steps: before, rate: None };
        let state = earlier.train(&laboratory, &run(index))?;
        let shift = |point: &EvalPoint| EvalPoint { step: before + point.step, ..*point };
        selected = state.best_point().map(shift);
        curve.extend(state.curve.iter().map(shift));
        before += request.phases[index].steps;
    }
    let peak = laboratory.training_peak();
    let selected = selected.ok_or_else(|| failed(&"nothing was evaluated"))?;
    run(request.phases.len() - 1).test((selected, selected.step == before), peak)
}

/// One phase of a run.
struct CharLmExperiment<'a> {
    job: &'a Job<'a, CharLmRequest>,
    corpus: &'a CharCorpus,
    device: &'a Device,
    config: &'a dyn CausalArchitecture,
    index: usize,
}

impl Experiment for CharLmExperiment<'_> {
    type Request = CharLmRequest;

    fn job(&self) -> &Job<'_, CharLmRequest> {
        self.job
    }

    fn files(&self) -> CheckpointFiles {
        files(self.job.context, self.index)
    }

    fn description(&self) -> Result<Json, CellFailure> {
        let description = Description {
            request: self.job.request.clone(),
            alphabet: self.corpus.alphabet.clone(),
            vocab: self.corpus.vocabulary,
            phase: self.index,
        };
        Ok(serde_json::to_value(description)?)
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        Ok((optimizer(&self.job.request.spec.preset).into(), self.about().schedule()))
    }

    fn steps(&self) -> StepCounts {
        StepCounts { total: self.about().steps, eval_every: self.job.request.every }
    }

    /// Symbols are predicted one stream at a time, at the end in blocks behind a longer cache or in windows.
    fn eval_cost(&self) -> EvalCost {
        let phase = self.about();
        let cost = |block: u64, cache: u64, symbols: f64| {
            let config = self.config.resized(block as usize, cache as usize);
            config.segment_flops() as f64 / block as f64 * symbols
        };
        let one = cost(phase.len, phase.len, (phase.len * phase.batch) as f64).max(1.0);
        let count = |part: usize| self.part(self.corpus.parts[part].clone()).len() as f64;
        let test = match self.job.request.evaluation {
            Evaluation::Stream { block, cache } => cost(block, cache, count(2)),
            Evaluation::Overlap { window, step } => cost(window, 0, count(2) * window as f64 / step as f64),
        };
        EvalCost { per_eval: cost(phase.len, phase.len, count(1)) / one, final_test: 2.0 * test / one }
    }

    fn model(&self) -> &dyn Architecture {
        self.config
    }

    /// The weights of the phase before, or new ones.
    fn initial_weights(&self, device: &Device) -> Result<ParamBuilder, CellFailure> {
        if self.index == 0 {
            return Ok(ParamBuilder::seeded(self.job.request.spec.seed, device, true));
        }
        let before = files(self.job.context, self.index - 1);
        let file = if self.about().from_best { before.best } else { before.last };
        let checkpoint = Checkpoint::load(&file)?;
        Ok(checkpoint.builder(device, true)?)
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let net = self.model(builder, self.about().len)?;
        Ok(Box::new(self.task(net, restored)?))
    }
}

impl CharLmExperiment<'_> {
    fn about(&self) -> &Phase {
        &self.job.request.phases[self.index]
    }

    fn model(&self, builder: &ParamBuilder, cached: u64) -> Result<Box<dyn CausalModel>, CellFailure> {
        let block = self.about().len as usize;
        Ok(self.config.resized(block, cached as usize).build_causal(builder)?)
    }

    fn task(
        &self,
        net: Box<dyn CausalModel>,
        restored: Option<&Checkpoint>,
    ) -> Result<CharLmTrainable<'_>, CellFailure> {
        let (phase, request) = (self.about(), &self.job.request);
        let [train, validation, _] = &self.corpus.parts;
        let symbols = &self.corpus.symbols[train.clone()];
        let streams = Streams::new(symbols, phase.len as usize, phase.batch as usize).ok_or_else(|| {
            failed(&format!(
                "{} training symbols are too few for {} streams of {}; take a smaller --batch or --len",
                symbols.len(),
                phase.batch,
                phase.len
            ))
        })?;
        let parts = request.accumulate as usize;
        let layers = net.layers();
        let caches = (0..parts).map(|part| {
            let rows = |layer: usize| restored?.extra(&cache_name(part, layer)).cloned();
            let stored: Vec<Option<Tensor>> = (0..layers).map(rows).collect();
            if stored.iter().all(Option::is_none) {
                return net.start(phase.batch as usize / parts);
            }
            let moved =
                stored.into_iter().map(|rows| rows.map(|rows| rows.to_device(self.device)).transpose());
            Ok(Cache::of(moved.collect::<Candle<_>>()?))
        });
        let caches = caches.collect::<Candle<Vec<_>>>()?;
        let noise = DropoutRng::new(request.spec.seed.wrapping_add(self.index as u64));
        let validation = self.part(validation.clone());
        let next = caches.iter().map(|_| None).collect();
        Ok(CharLmTrainable { net, streams, caches, next, noise, validation, block: phase.len as usize })
    }

    /// Ids of a part of the corpus, up to the limit.
    fn part(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        let limit = self.job.request.limit.map_or(usize::MAX, |limit| limit as usize);
        self.corpus.symbols[range].iter().take(limit).map(|&symbol| u32::from(symbol)).collect()
    }

    /// Bits per character that the weights of `file` need for `ids`.
    fn bits(&self, file: &std::path::Path, ids: &[u32]) -> Result<Bits, CellFailure> {
        let weights = Checkpoint::load(file)?;
        let builder = weights.builder(self.device, false)?;
        let way = self.job.request.evaluation;
        let net = self.model(&builder, way.cache())?;
        let mut told = std::time::Instant::now();
        let progress = |done: usize| {
            if told.elapsed().as_secs() >= 1 {
                told = std::time::Instant::now();
                let what = format!("tests {} ({done} of {} symbols)", way.words(), ids.len());
                let _ = self.job.tell(what); // a parent that is gone is noticed at the end
            }
        };
        Ok(way.bpc(net.as_ref(), ids, progress)?)
    }

    /// Evaluates the best weights of this phase on the test part, and the last ones where they are others.
    fn test(
        &self,
        (selected, is_last): (EvalPoint, bool),
        peak_bytes: Option<u64>,
    ) -> Result<TrainingResult, CellFailure> {
        let (request, corpus, way) = (&self.job.request, self.corpus, self.job.request.evaluation);
        let files = files(self.job.context, self.index);
        let ids = self.part(corpus.parts[2].clone());
        let best = self.bits(&files.best, &ids)?;
        let last = if is_last { best } else { self.bits(&files.last, &ids)? };
        let dev = self.bits(&files.best, &self.part(corpus.parts[1].clone()))?;
        let [train, ..] = &corpus.parts;
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        let reference = witten_bell(&corpus.symbols[train.clone()], &bytes, corpus.vocabulary, 3);
        let there = corpus.symbols.len();
        let complete = data::corpus(&request.corpus).ok().and_then(|(_, symbols)| symbols.complete);
        let complete = complete.filter(|complete| there < *complete);
        let data_share = complete.map_or(1.0, |complete| there as f64 / complete as f64);
        let differs = complete.map(|complete| format!("{there} symbols of the corpus ({complete})"));
        let steps: u64 = request.phases.iter().map(|phase| phase.steps).sum();
        let bits = |nats: f64| nats / std::f64::consts::LN_2;
        let mut measures = vec![
            MetricValue::new(way.metric(), "bit", best.every),
            MetricValue::new(&format!("{}_last", way.metric()), "bit", last.every),
            MetricValue::new("dev_bpc", "bit", dev.every),
            MetricValue::new("predicted", "1", ids.len().saturating_sub(1) as f64),
            MetricValue::new("validation_bpc", "bit", bits(selected.score.loss)),
            MetricValue::new("train_loss", "nat", selected.train_loss),
            MetricValue::new("selected_step", "1", selected.step as f64),
            MetricValue::new("witten_bell_3_bpc", "bit", reference),
            MetricValue::new("steps", "1", steps as f64),
        ];
        let skipping = best.skipping.map(|bits| MetricValue::new("bpc_stream_skipping", "bit", bits));
        measures.extend(skipping);
        Ok(TrainingResult { measures, data_share, differs, peak_bytes })
    }
}

fn cache_name(part: usize, layer: usize) -> String {
    format!("cache/{part}/{layer}")
}

/// A model under training.
struct CharLmTrainable<'a> {
    net: Box<dyn CausalModel>,
    streams: Streams<'a>,
    /// One per micro-batch, in front of the last step.
    caches: Vec<Cache>,
    /// Those behind it, with its number: a step that is computed again starts from the same cache.
    next: Vec<Option<(u64, Cache)>>,
    noise: DropoutRng,
    validation: Vec<u32>,
    block: usize,
}

impl Trainable for CharLmTrainable<'_> {
    fn micro_batches(&self) -> usize {
        self.caches.len()
    }

    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let rows = self.streams.count() / self.caches.len();
        let ids = self.streams.at(step, part * rows..(part + 1) * rows, self.net.device())?;
        let noise = self.noise.branch(step).branch(part as u64);
        if let Some((_, cache)) = self.next[part].take_if(|(made, _)| *made != step) {
            self.caches[part] = cache;
        }
        let (logits, next) = self.net.segment(&ids, &self.caches[part], Some(noise))?;
        self.next[part] = Some((step, next));
        let n = ids.dim(1)?;
        let targets = Tensor::cat(&[ids.narrow(1, 1, n - 1)?, ids.narrow(1, 0, 1)?], 1)?.contiguous()?;
        self.net.segment_loss(&next_symbol_loss(&logits, &targets)?)
    }

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let nll = evaluate::stream(self.net.as_ref(), &self.validation, self.block, &mut |_| ())?;
        let loss = evaluate::nats(&nll) / (nll.len() - 1) as f64;
        Ok(EvalScore { loss, value: -loss })
    }

    fn extra(&self) -> Vec<(String, Tensor)> {
        let caches = self.caches.iter().zip(&self.next).enumerate();
        let rows = caches.flat_map(|(part, (before, next))| {
            let cache = next.as_ref().map_or(before, |(_, cache)| cache);
            let layers = cache.layers().iter().enumerate();
            layers.filter_map(move |(layer, rows)| Some((cache_name(part, layer), rows.clone()?)))
        });
        rows.collect()
    }
}
