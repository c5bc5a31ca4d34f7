//! The worker's side: trains one word language model and tests it in blocks and behind a context.

use candle_core::{Device, Result as Candle, Tensor};
use serde_json::{Value as Json, json};

use super::recipe::{self, Recipe};
use super::request::{VALIDATION, WordLmRequest, load};
use super::{BLOCK, CONTEXT};
use crate::protocol::training::experiment::{
    self as training, Experiment, MicroBatches, StepCounts, TrainedWeights, TrainingDevice, WeightChoice,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::order::BatchOrder;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{EvalScore, Trainable};
use effattn_data as data;
use effattn_data::word_corpus::{END, UNKNOWN, WordCorpus, unigram};
use effattn_kernel::embedding::PADDING;
use effattn_model::evaluate::{EvalWindows, perplexity, stream_nll};
use effattn_model::family::causal::{CausalArchitecture, CausalModel};
use effattn_model::family::{Architecture, Loss};
use effattn_model::nn::params::ParamBuilder;

/// Words that are evaluated at a time.
const AT_A_TIME: usize = 2048;

/// Trains until the last step or until the parent is gone, and tests.
pub fn train(job: &Job<WordLmRequest>) -> Result<TrainingResult, CellFailure> {
    let Job { request, context, .. } = job;
    let (set, _) = data::words(&request.corpus)?;
    let recipe = recipe::find(set.name);
    let corpus = load(&request.corpus, &context.data, request.allow_partial)?;
    context.same(&request.corpus, &corpus.hash)?;
    let spec = &request.spec;
    let config = spec.resolve_causal(&spec.choice()?, corpus.vocabulary.len())?;
    let laboratory = TrainingDevice::open(spec, context)?;
    let run = WordLmExperiment { job, recipe: &recipe, corpus: &corpus, config: config.as_ref() };
    let (trained, peak_bytes) = training::train(&laboratory, &run)?;
    run.test(laboratory.device(), trained, peak_bytes)
}

/// A run: what is trained on what.
struct WordLmExperiment<'a> {
    job: &'a Job<'a, WordLmRequest>,
    recipe: &'a Recipe,
    corpus: &'a WordCorpus,
    config: &'a dyn CausalArchitecture,
}

impl Experiment for WordLmExperiment<'_> {
    type Request = WordLmRequest;

    fn job(&self) -> &Job<'_, WordLmRequest> {
        self.job
    }

    fn description(&self) -> Result<Json, CellFailure> {
        let vocabulary = self.corpus.vocabulary.len();
        Ok(json!({ "request": serde_json::to_value(&self.job.request)?, "vocabulary": vocabulary }))
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        Ok(self.recipe.training(self.job.request.steps, self.job.request.rate))
    }

    fn steps(&self) -> StepCounts {
        StepCounts { total: self.job.request.steps, eval_every: self.job.request.every }
    }

    /// A window behind context scores only a part of its words.
    fn eval_cost(&self) -> EvalCost {
        let (spec, corpus) = (&self.job.request.spec, self.corpus);
        let batches = |words: &[u32]| self.part(words).len() as f64 / (spec.batch * spec.len) as f64;
        let scored = spec.len.saturating_sub(Recipe::context(spec.len)).max(1) as f64;
        let ways = 1.0 + spec.len as f64 / scored;
        let validated = if corpus.test.is_some() { batches(&corpus.validation) } else { 0.0 };
        EvalCost {
            per_eval: batches(&corpus.validation),
            final_test: ways * (batches(corpus.tested()) + validated),
        }
    }

    fn select(&self) -> WeightChoice {
        self.recipe.select
    }

    fn model(&self) -> &dyn Architecture {
        self.config
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        _: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let spec = &self.job.request.spec;
        let blocks = Blocks { stream: &self.corpus.train, len: spec.len as usize };
        let few = || {
            failed(&format!(
                "{} training words are too few for {} blocks of {}; take a smaller --batch or --len",
                blocks.stream.len(),
                spec.batch,
                spec.len
            ))
        };
        let order = BatchOrder::new(spec.seed, blocks.count(), spec.batch as usize).ok_or_else(few)?;
        Ok(Box::new(WordLmTrainable {
            net: self.config.build_causal(builder)?,
            blocks,
            batches: MicroBatches::new(order, spec.seed, self.job.request.accumulate),
            validation: self.part(&self.corpus.validation),
        }))
    }
}

impl WordLmExperiment<'_> {
    /// A text up to the limit.
    fn part<'a>(&self, stream: &'a [u32]) -> &'a [u32] {
        let limit = self.job.request.limit.map_or(usize::MAX, |limit| limit as usize);
        &stream[..stream.len().min(limit)]
    }

    /// The selected weights on the test text, and on the validation text where the paper has both.
    fn test(
        &self,
        device: &Device,
        TrainedWeights { selected, weights, .. }: TrainedWeights,
        peak_bytes: Option<u64>,
    ) -> Result<TrainingResult, CellFailure> {
        let builder = weights.builder(device, false)?;
        let net = self.config.build_causal(&builder)?;
        drop(weights);
        let len = self.job.request.spec.len;
        let context = Recipe::context(len) as usize;
        let mut told = std::time::Instant::now();
        let mut ppl = |name: &str, stream: &[u32], context: usize| -> Result<f64, CellFailure> {
            let window = EvalWindows { window: len as usize, context };
            let progress = |done: usize| {
                if told.elapsed().as_secs() >= 1 {
                    told = std::time::Instant::now();
                    let what = format!("{name}, {context} words of context ({done} of {})", stream.len());
                    let _ = self.job.tell(what); // a parent that is gone is noticed at the end
                }
            };
            let nll = stream_nll(net.as_ref(), stream, window, at_a_time(len), progress)?;
            Ok(perplexity(&nll))
        };
        let (corpus, train) = (self.corpus, &self.corpus.train);
        let tested = self.part(corpus.tested());
        let unknown = tested.iter().filter(|id| **id == UNKNOWN).count() as f64;
        let plain = |metric: &str, value: f64| MetricValue::new(metric, "1", value);
        let ppl_of = |metric: &str, value: f64| MetricValue::new(metric, CONTEXT.unit, value);
        let mut measures = vec![
            ppl_of(CONTEXT.name, ppl("tests", tested, context)?),
            ppl_of(BLOCK.name, ppl("tests", tested, 0)?),
        ];
        if corpus.test.is_some() {
            let validation = self.part(&corpus.validation);
            let name = format!("{}{VALIDATION}", self.job.request.corpus);
            for (metric, context) in [(CONTEXT.name, context), (BLOCK.name, 0)] {
                let value = ppl("validates", validation, context)?;
                measures.push(MetricValue { task: Some(name.clone()), ..ppl_of(metric, value) });
            }
        }
        measures.extend([
            ppl_of("unigram_ppl", unigram(train, tested, corpus.vocabulary.len())),
            plain("unknown_share", unknown / tested.len().max(1) as f64),
            plain("predicted", tested.len() as f64),
            plain("trained_words", train.len() as f64),
            plain("vocabulary", corpus.vocabulary.len() as f64),
            MetricValue::new("validation_loss", "nat", selected.score.loss),
            MetricValue::new("train_loss", "nat", selected.train_loss),
            plain("selected_step", selected.step as f64),
            plain("steps", self.job.request.steps as f64),
        ]);
        let (data_share, differs) = self.data_share();
        Ok(TrainingResult { measures, data_share, differs, peak_bytes })
    }

    /// Share of the protocol's training words that are there, and in words what is not as published.
    fn data_share(&self) -> (f64, Option<String>) {
        let words = data::words(&self.job.request.corpus).ok();
        let complete = words.and_then(|(_, words)| words.complete);
        let share = complete.map_or(1.0, |complete| self.corpus.train.len() as f64 / complete as f64);
        (share.min(1.0), complete.and_then(|_| self.corpus.partial.clone()))
    }
}

/// Windows that are evaluated at a time.
fn at_a_time(len: u64) -> usize {
    (AT_A_TIME / len as usize).max(1)
}

/// Consecutive blocks of a stream: every word is a target once, the last block may be short.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    pub(super) stream: &'a [u32],
    pub(super) len: usize,
}

impl Blocks<'_> {
    pub(super) fn count(&self) -> usize {
        self.stream.len().div_ceil(self.len)
    }

    /// Words that are read and words that are predicted of the blocks `chosen`, each [blocks, len], padded on the right, and
    /// how many are predicted.
    pub(super) fn at(&self, chosen: &[usize]) -> ([Vec<u32>; 2], usize) {
        let size = chosen.len() * self.len;
        let (mut ids, mut targets, mut count) = (Vec::with_capacity(size), Vec::with_capacity(size), 0);
        for &block in chosen {
            let words = block * self.len..((block + 1) * self.len).min(self.stream.len());
            count += words.len();
            let padding = std::iter::repeat_n(PADDING, self.len - words.len());
            ids.extend(words.clone().map(|at| if at == 0 { END } else { self.stream[at - 1] }));
            ids.extend(padding.clone());
            targets.extend(self.stream[words].iter().copied().chain(padding));
        }
        ([ids, targets], count)
    }
}

/// A model under training.
struct WordLmTrainable<'a> {
    net: Box<dyn CausalModel>,
    blocks: Blocks<'a>,
    batches: MicroBatches,
    validation: &'a [u32],
}

impl Trainable for WordLmTrainable<'_> {
    fn micro_batches(&self) -> usize {
        self.batches.count
    }

    fn loss(&mut self, step: u64, part: usize) -> Candle<Loss> {
        let chosen = self.batches.examples(step, part);
        let (words, count) = self.blocks.at(&chosen);
        let [ids, targets] =
            words.map(|words| Tensor::from_vec(words, (chosen.len(), self.blocks.len), self.net.device()));
        let nll = self.net.nll(&ids?, &targets?, Some(self.batches.dropout(step, part)))?;
        Ok(Loss { sum: nll.sum_all()?, count: count as f64 })
    }

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let window = EvalWindows { window: self.blocks.len, context: 0 };
        let batch = at_a_time(self.blocks.len as u64);
        let nll = stream_nll(self.net.as_ref(), self.validation, window, batch, |_| ())?;
        let loss = nll.iter().map(|&nll| f64::from(nll)).sum::<f64>() / nll.len().max(1) as f64;
        Ok(EvalScore { loss, value: -loss })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_predicted_once_behind_the_one_before() {
        let stream: Vec<u32> = (10..20).collect();
        let blocks = Blocks { stream: &stream, len: 4 };
        assert_eq!(blocks.count(), 3);
        let ([ids, targets], count) = blocks.at(&[2, 0]);
        assert_eq!(ids, [17, 18, PADDING, PADDING, END, 10, 11, 12]);
        assert_eq!((targets.as_slice(), count), (&[18, 19, PADDING, PADDING, 10, 11, 12, 13][..], 6));
    }
}
