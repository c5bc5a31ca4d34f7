//! The worker's side: trains one model at every rate, chooses, and tests.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::{D, Device, Result as Candle, Tensor};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::recipe::{Recipe, numbers};
use super::request::{RecallRequest, model};
use super::{ACCURACY, HELD_OUT_SEED, MACRO_ACCURACY, RATE_ACCURACY, SEGMENT_ACCURACY, selection};
use crate::protocol::training::experiment::{
    EarlierPhases, Experiment, StepCounts, TrainingDevice, classifier_score,
};
use crate::protocol::training::worker::{Job, failed};
use crate::protocol::training::{EvalCost, MetricValue, TrainingResult};
use crate::run::outcome::CellFailure;
use crate::train::checkpoint::Checkpoint;
use crate::train::optim::OptimizerConfig;
use crate::train::schedule::Schedule;
use crate::train::training_loop::{CheckpointFiles, EvalPoint, EvalScore, Trainable, TrainingState};
use effattn_data::Split;
use effattn_data::position_labels::{self, PositionExample, PositionTask, Segment};
use effattn_model::batch::{Batch, IGNORED, ModelInput, SyntheticInput, Tokens};
use effattn_model::family::{Architecture, Loss, Model};
use effattn_model::labeler::LabelerConfig;
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::params::ParamBuilder;
use effattn_record::Outcome;
use effattn_record::stats::Summary;

/// Most tokens of a batch that is only evaluated.
const EVAL_TOKENS: usize = 1 << 14;
/// Steps that the time of a decoded token is the median of.
const DECODED: usize = 64;
/// Validation losses above this share of that of a guess among the values of the context are on the plateau.
const PLATEAU: f64 = 0.9;

/// `examples` padded with zeros to the longest.
pub fn batch(examples: &[PositionExample], device: &Device) -> Candle<Batch> {
    let len = examples.iter().map(|example| example.tokens.len()).max().unwrap_or(0);
    let shape = (examples.len(), len);
    let (mut ids, mut labels) = (vec![0; shape.0 * len], vec![IGNORED; shape.0 * len]);
    for (row, example) in examples.iter().enumerate() {
        ids[row * len..row * len + example.tokens.len()].copy_from_slice(&example.tokens);
        example.labels.iter().for_each(|(position, label)| labels[row * len + position] = *label);
    }
    let ids = Tensor::from_vec(ids, shape, device)?;
    let labels = Tensor::from_vec(labels, shape, device)?;
    // causal models do not see the padding behind their last label
    Ok(Batch { input: ModelInput::Tokens(Tokens { ids, mask: None }), labels })
}

/// Task, model and device of a cell.
struct Setup<'a> {
    job: &'a Job<'a, RecallRequest>,
    task: &'static PositionTask,
    recipe: Recipe,
    config: LabelerConfig,
    device: TrainingDevice,
}

/// Trains until the last step at the last rate or until the parent is gone, and tests the model of the best rate.
pub fn train(job: &Job<RecallRequest>) -> Result<TrainingResult, CellFailure> {
    let request = &job.request;
    let (_, task) = position_labels::task(&request.task)?;
    job.context.same(&request.task, &task.fingerprint().map_err(|error| failed(&error))?)?;
    let recipe = Recipe::find(&request.spec.preset, &request.task).map_err(|error| failed(&error))?;
    let layers = request.layers.as_deref();
    let config = request
        .spec
        .choice()
        .and_then(|choice| model(&request.spec, &choice, (layers, request.alphabet, task)))?;
    let device = TrainingDevice::open(&request.spec, job.context)?;
    let setup = Setup { job, task, recipe, config, device };
    let tried = setup.try_rates()?;
    let peak_bytes = setup.device.training_peak();
    let best = selection::best(tried.iter().filter_map(|tried| Some((tried, tried.best()?))));
    let Some((chosen, selected)) = best else {
        return Err(CellFailure::new(Outcome::Diverged, "training diverged at every rate"));
    };
    job.tell(format!("tests the model of rate {:e}", chosen.rate))?;
    let measures = setup.measures(&tried, chosen, &selected)?;
    Ok(TrainingResult { measures, data_share: 1.0, differs: None, peak_bytes })
}

/// Training at one rate.
struct TriedRate {
    rate: f64,
    files: CheckpointFiles,
    /// `None`: it diverged.
    state: Option<TrainingState>,
}

impl TriedRate {
    fn best(&self) -> Option<EvalPoint> {
        self.state.as_ref()?.best_point().copied()
    }

    /// Updates that were made.
    fn steps(&self) -> u64 {
        self.state.as_ref().and_then(|state| state.curve.last()).map_or(0, |point| point.step)
    }
}

impl Setup<'_> {
    fn request(&self) -> &RecallRequest {
        &self.job.request
    }

    /// Trains at every rate, one after another.
    fn try_rates(&self) -> Result<Vec<TriedRate>, CellFailure> {
        let (mut tried, mut curve, mut before) = (Vec::new(), Vec::new(), 0);
        for &rate in &self.request().rates {
            let run = RateExperiment { setup: self, rate };
            let earlier = EarlierPhases { points: &curve, steps: before, rate: Some(rate) };
            let state = match earlier.train(&self.device, &run) {
                Ok(state) => Some(state),
                Err(failure) if failure.outcome == Outcome::Diverged => {
                    self.job.warn(format!("rate {rate:e}: {}", failure.reason))?;
                    None
                }
                Err(failure) => return Err(failure),
            };
            let points = state.iter().flat_map(|state| &state.curve).map(|point| earlier.placed(point));
            let points: Vec<EvalPoint> = points.collect();
            curve.extend(points);
            before += self.request().steps;
            tried.push(TriedRate { rate, files: run.files(), state });
        }
        Ok(tried)
    }

    /// Examples of `segment` in `split` by their numbers, in that order.
    fn draw(
        &self,
        segment: &Segment,
        (seed, split): (u64, Split),
        numbers: impl IntoParallelIterator<Item = u64>,
    ) -> Vec<PositionExample> {
        let alphabet = self.request().alphabet;
        let draw = |index| self.task.example((segment, alphabet), (seed, split), index);
        numbers.into_par_iter().map(draw).collect()
    }

    /// Loss and accuracy in percent of `net` on every segment of a held-out split.
    fn scores(&self, net: &mut dyn Model, split: Split, count: u64) -> Candle<Vec<EvalScore>> {
        let count = self.request().limit.map_or(count, |limit| limit.min(count));
        let score = |segment: &Segment| {
            let size = (EVAL_TOKENS / segment.longest.max(1)).clamp(1, 256) as u64;
            let batches = (0..count).step_by(size as usize).map(|first| {
                let range = first..count.min(first + size);
                batch(&self.draw(segment, (HELD_OUT_SEED, split), range), self.device.device())
            });
            classifier_score(net, batches)
        };
        self.request().test.iter().map(score).collect()
    }

    /// Accuracy on the test split by classes, in percent: of every batch of `size` examples the mean over the classes that occur or are
    /// given, then the mean over batches and segments (MAD).
    fn macro_accuracy(&self, net: &mut dyn Model, size: usize) -> Candle<f64> {
        let count =
            self.request().limit.map_or(self.recipe.counts[1], |limit| limit.min(self.recipe.counts[1]));
        let mut segments = Vec::new();
        for segment in &self.request().test {
            let mut batches = Vec::new();
            for first in (0..count).step_by(size) {
                let numbers = first..count.min(first + size as u64);
                let examples = self.draw(segment, (HELD_OUT_SEED, Split::Test), numbers);
                let labels = examples.iter().flat_map(|example| example.labels.iter().map(|label| label.1));
                let labels: Vec<u32> = labels.collect();
                let logits = net.forward(&batch(&examples, self.device.device())?)?.detach();
                batches.push(by_class(&labels, &logits.argmax(D::Minus1)?.to_vec1::<u32>()?));
            }
            segments.push(batches.iter().sum::<f64>() / batches.len().max(1) as f64);
        }
        Ok(100.0 * segments.iter().sum::<f64>() / segments.len().max(1) as f64)
    }

    fn measures(
        &self,
        tried: &[TriedRate],
        chosen: &TriedRate,
        selected: &EvalPoint,
    ) -> Result<Vec<MetricValue>, CellFailure> {
        let request = self.request();
        let weights = Checkpoint::load(&chosen.files.best)?;
        let device = self.device.device();
        let mut net = self.config.build(&weights.builder(device, false)?)?;
        let scores = self.scores(net.as_mut(), Split::Test, self.recipe.counts[1])?;
        let by_class =
            self.recipe.macro_batch.map(|size| self.macro_accuracy(net.as_mut(), size)).transpose()?;
        drop(net);
        let plateau = plateau(&request.test);
        if let Some(plateau) = plateau.filter(|plateau| selected.score.loss > PLATEAU * plateau) {
            self.job.warn(format!(
                "never left the plateau: a validation loss of {:.3} at rate {:e}; a guess among the values of the context has {plateau:.3}. It may need other rates or more steps",
                selected.score.loss, chosen.rate
            ))?;
        }
        let number = |name: &str, unit: &str, value: f64| MetricValue::new(name, unit, value);
        // the first one is the metric of the protocol
        let mut all: Vec<MetricValue> =
            by_class.into_iter().map(|value| number(MACRO_ACCURACY.name, "%", value)).collect();
        all.extend([
            number(ACCURACY.name, "%", mean(&scores).value),
            number("validation_accuracy", "%", selected.score.value),
            number("validation_loss", "nat", selected.score.loss),
            number("test_loss", "nat", mean(&scores).loss),
            number("train_loss", "nat", selected.train_loss),
            number("selected_rate", "1", chosen.rate),
            number("selected_step", "1", selected.step as f64),
            number("steps", "1", tried.iter().map(TriedRate::steps).sum::<u64>() as f64),
        ]);
        all.push(number(
            "zoology_state_bytes",
            "B",
            self.config.zoology_state_bytes(request.spec.len as usize) as f64,
        ));
        all.extend(plateau.map(|plateau| number("plateau_loss", "nat", plateau)));
        all.extend(self.decode_time(&weights)?.map(|seconds| number("decode_time", "s", seconds)));
        let named = |metric: &str, part: String, value: f64| MetricValue {
            task: Some(format!("{} {part}", request.task)),
            ..number(metric, "%", value)
        };
        let segments = request.test.iter().zip(&scores);
        all.extend(segments.map(|(segment, score)| MetricValue {
            len: Some(segment.longest as u64),
            ..named(SEGMENT_ACCURACY, segment.to_string(), score.value)
        }));
        // what diverged has none
        let rated = tried.iter().filter_map(|tried| Some((tried.rate, tried.best()?.score.value)));
        all.extend(rated.map(|(rate, value)| named(RATE_ACCURACY, format!("rate={rate:e}"), value)));
        Ok(all)
    }

    /// Median seconds of the next token of one sequence behind as many tokens as the longest test has; nothing where the model
    /// cannot go on token by token.
    fn decode_time(&self, weights: &Checkpoint) -> Result<Option<f64>, CellFailure> {
        let device = self.device.device();
        let Some(mut decoder) = self.config.build_decoder(&weights.builder(device, false)?, 1)? else {
            return Ok(None);
        };
        let input = SyntheticInput { text: b"token", batch: 1, len: 1, seed: 0 };
        let batches = self.config.synthetic_batches(&input, device)?;
        let mut times = Vec::new();
        for token in batches.iter().cycle().take(DECODED / 4 + DECODED) {
            let start = Instant::now();
            decoder.forward(token)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(Summary::of(&times[DECODED / 4..]).map(|times| times.median))
    }
}

/// The mean over segments, which count alike.
fn mean(scores: &[EvalScore]) -> EvalScore {
    let count = scores.len().max(1) as f64;
    let sum = |of: fn(&EvalScore) -> f64| scores.iter().map(of).sum::<f64>() / count;
    EvalScore { loss: sum(|score| score.loss), value: sum(|score| score.value) }
}

/// The mean over the classes that are in `labels` or in `answers` of the share of their labels that is answered right.
fn by_class(labels: &[u32], answers: &[u32]) -> f64 {
    let mut classes = BTreeMap::<u32, (f64, f64)>::new();
    for (label, answer) in labels.iter().zip(answers) {
        classes.entry(*answer).or_default();
        let class = classes.entry(*label).or_default();
        *class = (class.0 + f64::from(u8::from(label == answer)), class.1 + 1.0);
    }
    classes.values().map(|(right, count)| right / count.max(1.0)).sum::<f64>() / classes.len().max(1) as f64
}

/// The mean loss of a guess among the values of the context; nothing for a task without pairs.
fn plateau(segments: &[Segment]) -> Option<f64> {
    let logs: Option<Vec<f64>> = segments.iter().map(|segment| Some((segment.items? as f64).ln())).collect();
    logs.map(|logs| logs.iter().sum::<f64>() / logs.len().max(1) as f64)
}

/// Training at one rate.
struct RateExperiment<'a> {
    setup: &'a Setup<'a>,
    rate: f64,
}

impl Experiment for RateExperiment<'_> {
    type Request = RecallRequest;

    fn job(&self) -> &Job<'_, RecallRequest> {
        self.setup.job
    }

    fn files(&self) -> CheckpointFiles {
        selection::files(&self.setup.job.context.folder, self.rate)
    }

    fn description(&self) -> Result<Value, CellFailure> {
        Ok(json!({ "request": serde_json::to_value(self.setup.request())?, "rate": self.rate }))
    }

    fn optimizer_and_schedule(&self) -> Result<(OptimizerConfig, Schedule), CellFailure> {
        let (optimizer, schedule) = self.setup.recipe.training(self.rate, self.setup.request().steps);
        Ok((optimizer.into(), schedule))
    }

    fn steps(&self) -> StepCounts {
        let RecallRequest { steps, every, .. } = *self.setup.request();
        StepCounts { total: steps, eval_every: every }
    }

    fn enough(&self) -> Option<f64> {
        self.setup.recipe.enough
    }

    fn eval_cost(&self) -> EvalCost {
        let request = self.setup.request();
        let limit = request.limit.unwrap_or(u64::MAX);
        let trained = request.train.iter().map(|part| part.segment.longest).max().unwrap_or(1) as f64;
        let tokens: f64 = request.test.iter().map(|segment| segment.longest as f64).sum();
        let forwards = |count: u64| tokens * limit.min(count) as f64 / (request.spec.batch as f64 * trained);
        let [validated, tested] = self.setup.recipe.counts;
        EvalCost { per_eval: forwards(validated), final_test: forwards(tested) }
    }

    fn model(&self) -> &dyn Architecture {
        &self.setup.config
    }

    fn trainable<'a>(
        &'a self,
        builder: &ParamBuilder,
        _: Option<&Checkpoint>,
    ) -> Result<Box<dyn Trainable + 'a>, CellFailure> {
        let dropout = DropoutRng::new(self.setup.request().spec.seed);
        Ok(Box::new(RecallTrainable { net: self.setup.config.build(builder)?, setup: self.setup, dropout }))
    }
}

/// The model under training.
struct RecallTrainable<'a> {
    net: Box<dyn Model>,
    setup: &'a Setup<'a>,
    dropout: DropoutRng,
}

impl Trainable for RecallTrainable<'_> {
    fn loss(&mut self, step: u64, _: usize) -> Candle<Loss> {
        let RecallRequest { train, spec, .. } = self.setup.request();
        let (segment, numbers) = numbers(train, (spec.batch, step, spec.seed), self.setup.recipe.order);
        let examples = self.setup.draw(&train[segment].segment, (spec.seed, Split::Train), numbers);
        let batch = batch(&examples, self.setup.device.device())?;
        self.net.loss(&batch, self.dropout.branch(step))
    }

    fn evaluate(&mut self, _: u64) -> Candle<EvalScore> {
        let scores = self.setup.scores(self.net.as_mut(), Split::Validation, self.setup.recipe.counts[0])?;
        Ok(mean(&scores))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_of_several_lengths_are_padded_and_keep_their_labels() {
        let examples = [
            PositionExample { tokens: vec![1, 2], labels: vec![(1, 2)] },
            PositionExample { tokens: vec![2, 2, 1], labels: vec![(0, 1), (2, 1)] },
        ];
        let batch = batch(&examples, &Device::Cpu).unwrap();
        assert_eq!(batch.tokens().unwrap().ids.to_vec2::<u32>().unwrap(), [[1, 2, 0], [2, 2, 1]]);
        assert_eq!(batch.labels.to_vec2::<u32>().unwrap(), [[IGNORED, 2, IGNORED], [1, IGNORED, 1]]);
    }

    #[test]
    fn classes_that_are_only_answered_count_too() {
        assert_eq!(by_class(&[1, 1, 1, 2], &[1, 1, 2, 2]), (2.0 / 3.0 + 1.0) / 2.0);
        assert_eq!(by_class(&[1, 1, 1, 2], &[1, 1, 3, 2]), (2.0 / 3.0 + 1.0 + 0.0) / 3.0);
        assert_eq!(by_class(&[1, 2], &[1, 1]), 0.5);
    }

    #[test]
    fn the_plateau_is_a_guess_among_the_values_of_the_context() {
        let segments = Segment::list(["64:4", "64:16"]).unwrap();
        assert!((plateau(&segments).unwrap() - 8f64.ln()).abs() < 1e-12);
        assert_eq!(plateau(&Segment::list(["64:4", "40"]).unwrap()), None);
    }
}
