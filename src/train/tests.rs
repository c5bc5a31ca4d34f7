use std::path::Path;

use candle_core::{Device, Result, Tensor};
use serde_json::json;

use super::checkpoint::{Checkpoint, CheckpointError, save};
use super::optim::{AdamW, Nesterov, OptimizerConfig};
use super::schedule::Schedule;
use super::step::{StepError, Trainer};
use effattn_model::attention::find;
use effattn_model::attention::knobs::Knobs;
use effattn_model::family::Loss;
use effattn_model::family::classifier::classification_loss;
use effattn_model::nn::dropout::Dropout;
use effattn_model::nn::params::{Init, ParamBuilder};
use effattn_model::preset::ClassifierPreset;
use effattn_model::{Backbone, Classifier, ClassifierConfig};

const ADAMW: AdamW = AdamW { beta2: 0.98, eps: 1e-9, weight_decay: 0.0, clip: None };
const CONSTANT: Schedule = Schedule::WarmupConstant { peak_lr: 1e-3, warmup: 1 };

fn config(mechanism: &str) -> ClassifierConfig {
    let entry = find(mechanism).unwrap();
    let form = ClassifierPreset::find("ls-lra").unwrap().form(Some("listops"), mechanism).unwrap();
    ClassifierConfig {
        backbone: Backbone::new(2, 16, 2, 32),
        vocab: 20,
        ..form.model(entry, Knobs::defaults(entry.knobs), 24)
    }
}

fn model(mechanism: &str) -> (Classifier, Trainer) {
    let config = config(mechanism);
    let builder = ParamBuilder::seeded(7, &Device::Cpu, true);
    let model = Classifier::new(&config, &builder).unwrap();
    (model, Trainer::new(builder.finish(), ADAMW, CONSTANT).unwrap())
}

/// Ids below 12 only: rows 12..20 of the embedding are never used (but for the class id, 19).
fn batch(from: u32, rows: usize) -> (Tensor, Tensor) {
    let ids: Vec<u32> = (0..rows as u32 * 24).map(|i| (i * 7 + from + i / 5) % 12).collect();
    let labels: Vec<u32> = (0..rows as u32).map(|i| (i + from) % 10).collect();
    let ids = Tensor::from_vec(ids, (rows, 24), &Device::Cpu).unwrap();
    (ids, Tensor::from_vec(labels, rows, &Device::Cpu).unwrap())
}

fn loss(model: &Classifier, (ids, labels): &(Tensor, Tensor)) -> Result<Loss> {
    let mask = ids.ne(0u32)?.to_dtype(candle_core::DType::F32)?;
    classification_loss(&model.forward(ids, Some(&mask))?, labels)
}

#[test]
fn loss_falls_and_unused_rows_stay_exactly() {
    for mechanism in ["full", "ls"] {
        let (model, mut trainer) = model(mechanism);
        let table = |trainer: &Trainer| trainer.params().value("token_embedding.weight").unwrap();
        let before = table(&trainer);
        let data = batch(0, 4);
        let losses: Vec<f64> = (0..30).map(|_| trainer.step(|| loss(&model, &data)).unwrap().loss).collect();
        assert!(losses[29] < 0.7 * losses[0], "{mechanism}: {losses:?}");
        let rows = |x: &Tensor| x.narrow(0, 12, 7).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(rows(&before), rows(&table(&trainer)), "{mechanism}");
    }
}

#[test]
fn micro_batches_make_the_update_of_the_whole_batch() {
    let (whole_model, mut whole) = model("full");
    let (parts_model, mut parts) = model("full");
    for step in 0..3 {
        let (ids, labels) = batch(step, 4);
        let a = whole.step(|| loss(&whole_model, &(ids.clone(), labels.clone()))).unwrap();
        let part = |i: usize| {
            loss(&parts_model, &(ids.narrow(0, 2 * i, 2)?.contiguous()?, labels.narrow(0, 2 * i, 2)?))
        };
        let b = parts.accumulate(2, part).unwrap();
        assert!((a.loss - b.loss).abs() < 1e-6 * a.loss);
        assert_eq!(a.rates, b.rates);
    }
    let value = |trainer: &Trainer| {
        trainer.params().value("head.fc1.weight").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    for (a, b) in value(&whole).iter().zip(value(&parts)) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn a_model_that_shares_parameters_follows_the_training() {
    let (model, mut trainer) = model("full");
    let shared =
        Classifier::new(&config("full"), &ParamBuilder::sharing(trainer.params(), &Device::Cpu)).unwrap();
    let data = batch(0, 2);
    let logits = |model: &Classifier| model.forward(&data.0, None).unwrap();
    let before = logits(&shared).to_vec2::<f32>().unwrap();
    trainer.step(|| loss(&model, &data)).unwrap();
    let after = logits(&shared).to_vec2::<f32>().unwrap();
    assert_eq!(after, logits(&model).to_vec2::<f32>().unwrap());
    assert_ne!(before, after);
    assert!(!logits(&shared).track_op() && logits(&model).track_op());
}

#[test]
fn a_loss_that_is_not_finite_stops_before_the_update() {
    let (model, mut trainer) = model("full");
    let before = trainer.params().value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap();
    let error = trainer.step(|| Ok(Loss::mean((loss(&model, &batch(0, 2))?.sum * f64::NAN)?))).unwrap_err();
    assert!(matches!(error, StepError::Diverged { step: 0, .. }), "{error}");
    assert_eq!(trainer.params().value("head.fc2.bias").unwrap().to_vec1::<f32>().unwrap(), before);
    assert_eq!(trainer.optimizer().updates(), 0);
}

#[test]
fn what_is_not_finite_first_is_named() {
    let (model, mut trainer) = model("ls");
    let group = trainer
        .params()
        .groups()
        .iter()
        .find(|group| group.parts.iter().any(|part| part.name == "layers.1.ffn.fc1.weight"));
    let var = group.unwrap().var.clone();
    let good = var.as_detached_tensor().copy().unwrap();
    var.set(&(&good * f64::INFINITY).unwrap()).unwrap();
    let error = trainer.step(|| loss(&model, &batch(0, 2))).unwrap_err().to_string();
    assert!(error.contains("step 0: the loss is NaN; first in layer 2 (ls), feed-forward half, "), "{error}");
    var.set(&good).unwrap();
    // a finite loss whose gradient is not
    let wrong = |scale: f64| {
        let loss = loss(&model, &batch(0, 2))?.sum;
        Ok(Loss::mean((&loss + ((&loss - &loss.detach())? * scale)?.sqrt()?)?)) as Result<Loss>
    };
    let error = trainer.step(|| wrong(1.0)).unwrap_err();
    assert!(matches!(error, StepError::Diverged { .. }), "{error}");
    assert!(error.to_string().contains("the gradient of "), "{error}");
    assert_eq!(trainer.optimizer().updates(), 0);
    assert!(trainer.step(|| loss(&model, &batch(0, 2))).is_ok());
}

fn weights(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    let bits = |name: &str| {
        let value = trainer.params().value(name).unwrap().flatten_all().unwrap();
        value.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    trainer.params().names().map(|name| (name.to_owned(), bits(name))).collect()
}

fn run(model: &Classifier, trainer: &mut Trainer, steps: std::ops::Range<u32>) -> Vec<u64> {
    steps.map(|s| trainer.step(|| loss(model, &batch(s, 3))).unwrap().loss.to_bits()).collect()
}

#[test]
fn a_resumed_run_is_the_same_to_the_last_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    for mechanism in ["full", "ls", "performer", "reformer"] {
        let (whole, mut undisturbed) = model(mechanism);
        let expected = run(&whole, &mut undisturbed, 0..7);
        let (half, mut trainer) = model(mechanism);
        let mut got = run(&half, &mut trainer, 0..4);
        let description = json!({"mechanism": mechanism, "width": 16, "vocabulary": ["a", "b"]});
        let extra = [
            ("cache".to_owned(), Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap()),
            ("blocks".to_owned(), Tensor::new(&[[-7i64], [1 << 40]], &Device::Cpu).unwrap()),
        ];
        save(&path, &trainer, &description, &json!({"epoch": 3}), &extra).unwrap();
        drop((half, trainer));
        let stored = Checkpoint::load(&path).unwrap();
        stored.expect_model(&description).unwrap();
        assert_eq!((stored.updates, &stored.state), (4, &json!({"epoch": 3})));
        assert_eq!(stored.extra("cache").unwrap().to_vec1::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(stored.extra("blocks").unwrap().to_vec2::<i64>().unwrap(), [[-7], [1 << 40]]);
        let builder = stored.builder(&Device::Cpu, true).unwrap();
        let resumed = Classifier::new(&config(mechanism), &builder).unwrap();
        let mut trainer = stored.trainer(builder.finish(), ADAMW, CONSTANT).unwrap();
        got.extend(run(&resumed, &mut trainer, 4..7));
        assert_eq!(got, expected, "{mechanism}");
        assert_eq!(weights(&trainer), weights(&undisturbed), "{mechanism}");
    }
}

#[test]
fn checkpoints_that_do_not_fit_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let (_, trainer) = model("full");
    let description = json!({"mechanism": "full", "knobs": {"w": 8}, "width": 16});
    save(&path, &trainer, &description, &json!(null), &[]).unwrap();
    let stored = Checkpoint::load(&path).unwrap();
    let other = stored.expect_model(&json!({"mechanism": "full", "knobs": {"w": 16}, "width": 16}));
    let text = other.unwrap_err().to_string();
    assert!(text.contains("knobs.w is 8 there and 16 here") && text.contains("--fresh"), "{text}");
    let builder = stored.builder(&Device::Cpu, true).unwrap();
    let error = Classifier::new(&config("ls"), &builder).err().unwrap().to_string();
    assert!(error.contains("missing"), "{error}");
    let (_, larger) = model("ls");
    let refused = stored.trainer(larger.params().clone(), ADAMW, CONSTANT).err().unwrap();
    assert!(matches!(refused, CheckpointError::Unfit { .. }), "{refused}");
    let absent = folder.path().join("no/such/folder/run.safetensors");
    assert!(matches!(save(&absent, &trainer, &description, &json!(0), &[]), Err(CheckpointError::Io { .. })));
    assert!(matches!(Checkpoint::load(&absent), Err(CheckpointError::Io { .. })));
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "no temporary file stays");
}

#[test]
fn a_damaged_checkpoint_is_refused_wherever_it_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let (_, trainer) = model("full");
    save(&path, &trainer, &json!({}), &json!({}), &[]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| Checkpoint::read(Path::new("x"), bytes);
    assert!(read(&bytes).is_ok());
    for at in (0..bytes.len()).step_by(997).chain([1, 7, 8, 9, bytes.len() - 1]) {
        assert!(matches!(read(&bytes[..at]), Err(CheckpointError::Damaged { .. })), "cut at {at}");
    }
    let newer = String::from_utf8_lossy(&bytes[8..2000]).find("\"schema\":\"1\"").unwrap() + 8 + 10;
    let mut changed = bytes.clone();
    changed[newer] = b'9';
    assert!(matches!(read(&changed), Err(CheckpointError::Newer { found: 9, .. })));
}

#[test]
fn dropout_trains_reproducibly_and_is_off_in_evaluation() {
    for mechanism in ["full", "ls"] {
        let train = |(rate, attention): (f64, f64), seed: u64| {
            let (model, mut trainer) = model(mechanism);
            let (ids, labels) = batch(0, 4);
            let losses: Vec<f64> = (0..40)
                .map(|step| {
                    let dropout = Dropout::new(rate, seed).with_attention(attention).branch(step);
                    let logits = || model.forward_train(&ids, None, dropout);
                    trainer.step(|| classification_loss(&logits()?, &labels)).unwrap().loss
                })
                .collect();
            let after = loss(&model, &(ids, labels)).unwrap().sum.to_scalar::<f32>().unwrap();
            (losses, f64::from(after))
        };
        let whole = train((0.0, 0.0), 5).0;
        for rates in [(0.2, 0.0), (0.0, 0.2)] {
            let (dropped, after) = train(rates, 5);
            assert_eq!(dropped, train(rates, 5).0, "{mechanism} {rates:?}");
            assert_ne!(dropped, train(rates, 6).0, "{mechanism} {rates:?}");
            assert_ne!(dropped, whole, "{mechanism} {rates:?}");
            let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
            assert!(after < 0.8 * mean(&dropped[..5]), "{mechanism} {rates:?}: {dropped:?}, {after}");
        }
    }
}

/// Two parameters of one variable under a loss with a constant gradient.
fn two(method: impl Into<OptimizerConfig>, gradient: f64) -> (Trainer, impl FnMut() -> Result<Loss>) {
    let builder = ParamBuilder::seeded(1, &Device::Cpu, true);
    let specs =
        ["weight", "bias"].map(|name| effattn_model::nn::params::ParamSpec::new(name, &[2], Init::ONE));
    let flat = builder.group(&specs).unwrap().flat;
    let trainer = Trainer::new(builder.finish(), method, CONSTANT).unwrap();
    (trainer, move || Ok(Loss { sum: (flat.sum_all()? * (4.0 * gradient))?, count: 4.0 }))
}

fn value(trainer: &Trainer, name: &str) -> f64 {
    f64::from(trainer.params().value(name).unwrap().to_vec1::<f32>().unwrap()[1])
}

#[test]
fn nesterov_looks_ahead_and_sums_are_divided_by_counts() {
    let (m, g) = (0.9, 0.5);
    let settings = Nesterov { momentum: m, weight_decay: 0.0, clip: None };
    let (mut trainer, mut loss) = two(OptimizerConfig::Nesterov(settings), g);
    let (mut p, mut u) = (1.0, 0.0);
    for _ in 0..3 {
        let step = trainer.step(&mut loss).unwrap();
        u = m * u + g;
        p -= step.rates.lr * (g + m * u);
        assert!((value(&trainer, "weight") - p).abs() < 1e-6, "{p}");
    }
}

#[test]
fn eps_before_the_correction_and_parameters_without_decay() {
    let settings = AdamW { beta2: 0.98, eps: 0.1, weight_decay: 0.5, clip: None };
    let (trainer, mut loss) = two(OptimizerConfig::Adam(settings), 0.25);
    let mut trainer = trainer.decay_only(&|name| name == "weight").unwrap();
    let (mut weight, mut bias, mut first, mut second) = (1.0, 1.0, 0.0, 0.0);
    for k in 1..4 {
        let rates = trainer.step(&mut loss).unwrap().rates;
        first = rates.beta1 * first + (1.0 - rates.beta1) * 0.25;
        second = 0.98 * second + 0.02 * 0.25 * 0.25;
        let correction = (1.0 - 0.98f64.powi(k)).sqrt() / (1.0 - rates.beta1.powi(k));
        let step = rates.lr * correction * first / (f64::sqrt(second) + 0.1);
        weight -= rates.lr * 0.5 * weight + step;
        bias -= step;
        assert!(
            (value(&trainer, "weight") - weight).abs() < 1e-6
                && (value(&trainer, "bias") - bias).abs() < 1e-6
        );
    }
}

#[test]
fn decay_behind_the_update_takes_its_share_of_both() {
    let settings = AdamW { beta2: 0.98, eps: 1e-8, weight_decay: 0.5, clip: None };
    let all = two(OptimizerConfig::Late(settings), 0.25);
    let some = two(OptimizerConfig::Late(settings), 0.25);
    let some = (some.0.decay_only(&|name| name == "weight").unwrap(), some.1);
    for (decays, (mut trainer, mut loss)) in [(true, all), (false, some)] {
        let (mut weight, mut bias) = (1.0, 1.0);
        for _ in 0..3 {
            // a constant gradient: corrected moments are 0.25 and 0.25^2
            let lr = trainer.step(&mut loss).unwrap().rates.lr;
            weight = (weight - lr) * (1.0 - lr * 0.5);
            bias = (bias - lr) * if decays { 1.0 - lr * 0.5 } else { 1.0 };
            let got = [value(&trainer, "weight"), value(&trainer, "bias")];
            assert!(
                (got[0] - weight).abs() < 1e-5 && (got[1] - bias).abs() < 1e-5,
                "{got:?} {weight} {bias}"
            );
        }
    }
}
