//! The worker's side: trains one language model through its phases and evaluates it.

use candle_core::{Device, Result as Candle, Tensor};
use serde_json::Value as Json;

use super::eval::{Bits, Evaluation};
use super::plan::{Request, load, model};
use super::recipe::{Phase, optimizer};
use super::sample::Description;
use super::streams::Streams;
use super::witten_bell::witten_bell;
use crate::data;
use crate::data::corpus::Corpus;
use crate::model::evaluate;
use crate::model::family::{Loss, Resolved};
use crate::model::lm::{Cache, LanguageModel, LmConfig, next_symbol_loss, released_loss};
use crate::nn::dropout::Noise;
use crate::nn::params::Builder;
use crate::protocol::table::{Conditions, Given};
use crate::protocol::training::experiment::{Experiment, Laboratory, Train};
use crate::protocol::training::worker::{candle, failed, report};
use crate::protocol::training::{Answer, Done, Measure};
use crate::run::outcome::Ending;
use crate::run::worker::Link;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::Method;
use crate::train::schedule::Schedule;
use crate::train::session::{Files, Learner, Point, Score};

/// Trains until the last step or until the parent is gone.
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: Json, given: &Given) -> anyhow::Result<()> {
    let request: Request = serde_json::from_value(request)?;
    report(link, train(link, &request, &given.conditions))
}

/// Files of phase `index`.
fn files(conditions: &Conditions, index: usize) -> Files {
    let name = |what: &str| conditions.folder.join(format!("phase{}-{what}.safetensors", index + 1));
    Files { last: name("last"), best: name("best") }
}

fn train(link: &Link, request: &Request, conditions: &Conditions) -> Result<Done, Ending> {
    let corpus =
        load(&request.corpus, &conditions.data, request.allow_partial).map_err(|error| failed(&error))?;
    conditions.same(&request.corpus, &corpus.hash)?;
    let spec = &request.spec;
    let config = spec.choice().and_then(|choice| model(spec, &choice, corpus.vocabulary));
    let config = config.map_err(|error| failed(&error))?;
    let laboratory = Laboratory::open(spec, conditions)?;
    let device = laboratory.device();
    let (mut curve, mut before) = (Vec::new(), 0);
    let mut selected = None;
    let run = |index| Run { request, conditions, corpus: &corpus, device, config: &config, index };
    for index in 0..request.phases.len() {
        let train = Train { link, conditions, before: (&curve, before) };
        let state = train.run(&laboratory, &run(index))?;
        let shift = |point: &Point| Point { step: before + point.step, ..*point };
        selected = state.best_point().map(shift);
        curve.extend(state.curve.iter().map(shift));
        before += request.phases[index].steps;
    }
    let peak = laboratory.peak();
    let selected = selected.ok_or_else(|| failed(&"nothing was evaluated"))?;
    run(request.phases.len() - 1).test(link, (selected, selected.step == before), peak)
}

/// One phase of a run.
struct Run<'a> {
    request: &'a Request,
    conditions: &'a Conditions,
    corpus: &'a Corpus,
    device: &'a Device,
    config: &'a LmConfig,
    index: usize,
}

impl Experiment for Run<'_> {
    fn files(&self) -> Files {
        files(self.conditions, self.index)
    }

    fn description(&self) -> Result<Json, Ending> {
        let description = Description {
            request: self.request.clone(),
            alphabet: self.corpus.alphabet.clone(),
            vocab: self.corpus.vocabulary,
            phase: self.index,
        };
        serde_json::to_value(description).map_err(|error| failed(&error))
    }

    fn method(&self) -> Result<(Method, Schedule), Ending> {
        Ok((optimizer(&self.request.spec.preset).into(), self.about().schedule()))
    }

    fn steps(&self) -> (u64, u64) {
        (self.about().steps, self.request.every)
    }

    /// Symbols are predicted one stream at a time, at the end in blocks behind a longer cache or in windows.
    fn forwards(&self) -> (f64, f64) {
        let phase = self.about();
        let cost = |block: u64, cache: u64, symbols: f64| {
            let config = self.config.at(block as usize, cache as usize);
            let flops: u64 =
                config.layer_costs(1, block as usize, cache as usize).iter().map(|of| of.flops).sum();
            flops as f64 / block as f64 * symbols
        };
        let one = cost(phase.len, phase.len, (phase.len * phase.batch) as f64).max(1.0);
        let count = |part: usize| self.part(self.corpus.parts[part].clone()).len() as f64;
        let test = match self.request.evaluation {
            Evaluation::Stream { block, cache } => cost(block, cache, count(2)),
            Evaluation::Overlap { window, step } => cost(window, 0, count(2) * window as f64 / step as f64),
        };
        (cost(phase.len, phase.len, count(1)) / one, 2.0 * test / one)
    }

    fn model(&self) -> &dyn Resolved {
        self.config
    }

    /// The weights of the phase before, or new ones.
    fn begin(&self, device: &Device) -> Result<Builder, Ending> {
        if self.index == 0 {
            return Ok(Builder::seeded(self.request.spec.seed, device, true));
        }
        let before = files(self.conditions, self.index - 1);
        let file = if self.about().from_best { before.best } else { before.last };
        let checkpoint = Checkpoint::load(&file).map_err(|error| failed(&error))?;
        checkpoint.builder(device, true).map_err(candle)
    }

    fn learner<'a>(
        &'a self,
        builder: &Builder,
        restored: Option<&Checkpoint>,
    ) -> Result<Box<dyn Learner + 'a>, Ending> {
        let net = self.model(builder, (self.about().len, self.about().len))?;
        Ok(Box::new(self.task(net, restored)?))
    }
}

impl Run<'_> {
    fn about(&self) -> &Phase {
        &self.request.phases[self.index]
    }

    fn model(&self, builder: &Builder, (block, mem): (u64, u64)) -> Result<LanguageModel, Ending> {
        LanguageModel::new(&self.config.at(block as usize, mem as usize), builder).map_err(candle)
    }

    fn task(&self, net: LanguageModel, restored: Option<&Checkpoint>) -> Result<StreamLearner<'_>, Ending> {
        let (phase, request) = (self.about(), self.request);
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
        let layers = net.config().backbone.layers;
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
        let caches = caches.collect::<Candle<Vec<_>>>().map_err(candle)?;
        let noise = Noise::new(request.spec.seed.wrapping_add(self.index as u64));
        let validation = self.part(validation.clone());
        let next = caches.iter().map(|_| None).collect();
        Ok(StreamLearner { net, streams, caches, next, noise, validation, block: phase.len as usize })
    }

    /// Ids of a part of the corpus, up to the limit.
    fn part(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        let limit = self.request.limit.map_or(usize::MAX, |limit| limit as usize);
        self.corpus.symbols[range].iter().take(limit).map(|&symbol| u32::from(symbol)).collect()
    }

    /// Bits per character that the weights of `file` need for `ids`.
    fn bits(&self, link: &Link, file: &std::path::Path, ids: &[u32]) -> Result<Bits, Ending> {
        let weights = Checkpoint::load(file).map_err(|error| failed(&error))?;
        let builder = weights.builder(self.device, false).map_err(candle)?;
        let way = self.request.evaluation;
        let net = self.model(&builder, (self.about().len, way.cache()))?;
        let mut told = std::time::Instant::now();
        let progress = |done: usize| {
            if told.elapsed().as_secs() >= 1 {
                told = std::time::Instant::now();
                let what = format!("tests {} ({done} of {} symbols)", way.words(), ids.len());
                let _ = link.send(&Answer::Doing { what }); // a parent that is gone is noticed at the end
            }
        };
        way.bpc(&net, ids, progress).map_err(candle)
    }

    /// Evaluates the best weights of this phase on the test part, and the last ones where they are others.
    fn test(
        &self,
        link: &Link,
        (selected, is_last): (Point, bool),
        peak_bytes: Option<u64>,
    ) -> Result<Done, Ending> {
        let (request, corpus, way) = (self.request, self.corpus, self.request.evaluation);
        let files = files(self.conditions, self.index);
        let ids = self.part(corpus.parts[2].clone());
        let best = self.bits(link, &files.best, &ids)?;
        let last = if is_last { best } else { self.bits(link, &files.last, &ids)? };
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
            Measure::new(way.metric(), "bit", best.every),
            Measure::new(&format!("{}_last", way.metric()), "bit", last.every),
            Measure::new("predicted", "1", ids.len().saturating_sub(1) as f64),
            Measure::new("validation_bpc", "bit", bits(selected.score.loss)),
            Measure::new("train_loss", "nat", selected.train_loss),
            Measure::new("selected_step", "1", selected.step as f64),
            Measure::new("witten_bell_3_bpc", "bit", reference),
            Measure::new("steps", "1", steps as f64),
        ];
        let skipping = best.skipping.map(|bits| Measure::new("bpc_stream_skipping", "bit", bits));
        measures.extend(skipping);
        Ok(Done { measures, data_share, differs, peak_bytes })
    }
}

fn cache_name(part: usize, layer: usize) -> String {
    format!("cache/{part}/{layer}")
}

/// A model under training.
struct StreamLearner<'a> {
    net: LanguageModel,
    streams: Streams<'a>,
    /// One per micro-batch, in front of the last step.
    caches: Vec<Cache>,
    /// Those behind it, with its number: a step that is computed again starts from the same cache.
    next: Vec<Option<(u64, Cache)>>,
    noise: Noise,
    validation: Vec<u32>,
    block: usize,
}

impl Learner for StreamLearner<'_> {
    fn parts(&self) -> usize {
        self.caches.len()
    }

    /// The last symbol of a segment has no target but is counted, as in the released code.
    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let rows = self.streams.count() / self.caches.len();
        let ids = self.streams.at(step, part * rows..(part + 1) * rows, self.net.device())?;
        let dropout = self.net.config().backbone.drops(self.noise.branch(step).branch(part as u64));
        if let Some((_, cache)) = self.next[part].take_if(|(made, _)| *made != step) {
            self.caches[part] = cache;
        }
        let (logits, next) = self.net.forward_train(&ids, &self.caches[part], dropout)?;
        self.next[part] = Some((step, next));
        let n = ids.dim(1)?;
        let targets = Tensor::cat(&[ids.narrow(1, 1, n - 1)?, ids.narrow(1, 0, 1)?], 1)?.contiguous()?;
        Ok(Loss::mean(released_loss(&next_symbol_loss(&logits, &targets)?)?))
    }

    fn evaluate(&mut self, _: u64) -> Candle<Score> {
        let nll = evaluate::stream(&self.net, &self.validation, self.block, &mut |_| ())?;
        let loss = evaluate::nats(&nll) / (nll.len() - 1) as f64;
        Ok(Score { loss, value: -loss })
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
