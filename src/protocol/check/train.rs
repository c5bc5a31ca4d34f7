//! Golden files of level `train` (`SPEC-models.md` sections 4 and 5, `SPEC-text.md` sections 3 and 6): a training
//! trajectory, step by step.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::language::Stream;
use super::whole::{Checked, Computed, weights};
use super::{Golden, classifier, language, words};
use crate::train::optim::{AdamW, Nesterov, OptimizerConfig};
use crate::train::schedule::Schedule;
use crate::train::step::{Step, Trainer};
use effattn_model::Classifier;
use effattn_model::char_lm::CharLm;
use effattn_model::family::Loss;
use effattn_model::family::classifier::classification_loss;
use effattn_model::family::llama::Llama;
use effattn_model::nn::dropout::Dropout;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::roberta::Roberta;
use effattn_model::word_lm::WordLm;

/// What `config.optimizer` says.
struct TrajectoryConfig {
    optimizer: OptimizerConfig,
    schedule: Schedule,
    steps: usize,
    snapshots: Vec<usize>,
}

impl TrajectoryConfig {
    fn read(golden: &Golden) -> Checked<Self> {
        let settings = golden.config.get("optimizer").cloned().unwrap_or_default();
        let number = |key: &str| {
            let value = settings.get(key).and_then(Value::as_f64);
            value.ok_or_else(|| golden.wrong(format!("its optimizer has no number {key:?}")))
        };
        let (steps, warmup) = (number("steps")? as u64, number("warmup")? as u64);
        let schedule = match settings.get("schedule").and_then(Value::as_str) {
            Some("onecycle") => {
                Schedule::Onecycle { peak_lr: number("peak_lr")?, warmup, steps, cycle_momentum: true }
            }
            Some("rsqrt") => Schedule::Rsqrt { base_lr: number("base_lr")?, warmup },
            Some("warmup-constant") => Schedule::WarmupConstant { peak_lr: number("peak_lr")?, warmup },
            Some("polynomial") => Schedule::Polynomial {
                peak_lr: number("lr")?,
                warmup,
                total: number("total")? as u64,
                power: number("power")?,
                end_lr: number("end_lr")?,
            },
            Some("cosine") => Schedule::CosineRestarts {
                peak_lr: number("lr")?,
                start_lr: number("warmup_init")?,
                min_lr: number("min_lr")?,
                warmup,
                cycle: number("period")? as u64,
                growth: number("t_mult")?,
                shrink: number("shrink")?,
            },
            other => return Err(golden.wrong(format!("its schedule {other:?} is not known"))),
        };
        let weight_decay = number("weight_decay")?;
        let clip = settings.get("clip").and_then(Value::as_f64).filter(|clip| *clip > 0.0); // 0: no clipping
        let adam = || Ok(AdamW { beta2: number("beta2")?, eps: number("eps")?, weight_decay, clip });
        let optimizer = match settings.get("optimizer").and_then(Value::as_str) {
            None | Some("adamw") => OptimizerConfig::AdamW(adam()?),
            Some("adam") => OptimizerConfig::Adam(adam()?),
            Some("nag") => {
                OptimizerConfig::Nesterov(Nesterov { momentum: number("momentum")?, weight_decay, clip })
            }
            Some(other) => return Err(golden.wrong(format!("its optimizer {other:?} is not known"))),
        };
        let snapshots = settings.get("snapshots").and_then(Value::as_array).into_iter().flatten();
        let snapshots = snapshots.filter_map(Value::as_u64).map(|step| step as usize).collect();
        Ok(Self { optimizer, schedule, steps: steps as usize, snapshots })
    }
}

/// What this build computes for the file.
pub(super) fn compute(golden: &Golden, device: &Device) -> Checked<Computed> {
    let plan = TrajectoryConfig::read(golden)?;
    match golden.meta("family") {
        "text" => return text(golden, &plan, device),
        "llama" => return llama(golden, &plan, device),
        _ => {}
    }
    if golden.int("block").is_some() { stream(golden, &plan, device) } else { batches(golden, &plan, device) }
}

/// A classifier: batch s is used in step s.
fn batches(golden: &Golden, plan: &TrajectoryConfig, device: &Device) -> Checked<Computed> {
    let builder = weights(golden, device)?;
    let config = classifier::config(golden)?;
    let inputs = [golden.tensor("ids")?, golden.tensor("mask")?, golden.tensor("labels")?];
    let run = || {
        let model = Classifier::new(&config, &builder)?;
        let trainer = Trainer::new(builder.finish(), plan.optimizer, plan.schedule)?;
        follow(golden, plan, trainer, |step| {
            let batch = |x: &Tensor, dtype| x.get(step)?.to_dtype(dtype)?.to_device(device);
            let (ids, mask) = (batch(inputs[0], DType::U32)?, batch(inputs[1], DType::F32)?);
            classification_loss(&model.forward(&ids, Some(&mask))?, &batch(inputs[2], DType::U32)?)
        })
    };
    run().map_err(|error| golden.refused(error))
}

/// A language model: segment s is used in step s, the cache is carried over.
fn stream(golden: &Golden, plan: &TrajectoryConfig, device: &Device) -> Checked<Computed> {
    let config = language::config(golden)?;
    let released = match golden.config.get("targets").and_then(Value::as_str) {
        Some("all") => false,
        Some("released") => true,
        other => return Err(golden.wrong(format!("its targets {other:?} are not known"))),
    };
    let builder = weights(golden, device)?;
    let ids = golden.tensor("ids")?;
    let run = || {
        let model = CharLm::new(&config, &builder)?;
        let cache = model.start(ids.dim(0)?)?;
        let mut stream = Stream { model, ids, block: config.block, released, cache };
        let trainer = Trainer::new(builder.finish(), plan.optimizer, plan.schedule)?;
        follow(golden, plan, trainer, |step| stream.loss(step))
    };
    run().map_err(|error| golden.refused(error))
}

/// A word language model or an encoder: batch s is used in step s, and the norm of its gradient is a result.
fn text(golden: &Golden, plan: &TrajectoryConfig, device: &Device) -> Checked<Computed> {
    let builder = weights(golden, device)?;
    let ids = golden.tensor("ids")?;
    let masked = golden.tensors.contains_key("labels");
    let answers = golden.tensor(if masked { "labels" } else { "targets" })?;
    let batch = |step: usize| ids.get(step)?.to_dtype(DType::U32)?.to_device(device);
    let loss: Box<dyn Fn(usize) -> Result<Loss>> = if masked {
        let config = words::roberta_config(golden)?;
        let model = Roberta::new(&config, &builder).map_err(|error| golden.refused(error))?;
        Box::new(move |step| Ok(Loss::mean(words::roberta_loss(&model, &batch(step)?, &answers.get(step)?)?)))
    } else {
        let config = words::word_lm_config(golden)?;
        let model = WordLm::new(&config, &builder).map_err(|error| golden.refused(error))?;
        Box::new(move |step| {
            let targets = answers.get(step)?.to_dtype(DType::U32)?.to_device(device)?;
            Ok(Loss::mean(words::word_lm_loss(&model, &batch(step)?, &targets)?))
        })
    };
    follow_norms(golden, plan, &builder, &*loss)
}

/// A model of Llama's form: batch s is used in step s, and the norm of its gradient is a result.
fn llama(golden: &Golden, plan: &TrajectoryConfig, device: &Device) -> Checked<Computed> {
    let builder = weights(golden, device)?;
    let model =
        Llama::new(&super::llama::config(golden)?, &builder).map_err(|error| golden.refused(error))?;
    let [ids, labels] = [golden.tensor("ids")?, golden.tensor("labels")?];
    let loss = |step: usize| {
        let ids = ids.get(step)?.to_dtype(DType::U32)?.to_device(device)?;
        let nll = super::llama::nll(&model.forward(&ids, Dropout::NONE)?, &labels.get(step)?)?;
        Ok(Loss { sum: nll.values.sum_all()?, count: nll.count })
    };
    follow_norms(golden, plan, &builder, &loss)
}

/// Makes the file's steps; the norm of the gradient of every step is a result.
fn follow_norms(
    golden: &Golden,
    plan: &TrajectoryConfig,
    builder: &ParamBuilder,
    loss: &dyn Fn(usize) -> Result<Loss>,
) -> Checked<Computed> {
    let run = || {
        let params = builder.finish();
        let mut trainer = Trainer::new(params.clone(), plan.optimizer, plan.schedule)?;
        let mut norms = Vec::new();
        let mut computed = follow_with(golden, plan, &mut trainer, loss, |step| {
            let Loss { sum, count } = loss(step)?;
            let grads = (sum / count)?.backward()?;
            let squares = golden.leaves.iter().map(|leaf| {
                let square = params.grad(&grads, leaf)?.sqr()?.sum_all()?;
                Ok(f64::from(square.to_scalar::<f32>()?))
            });
            norms.push(squares.sum::<Result<f64>>()?.sqrt() as f32);
            Ok(())
        })?;
        computed.put("grad_norm", Tensor::new(norms.as_slice(), &Device::Cpu)?);
        Ok(computed)
    };
    run().map_err(|error: candle_core::Error| golden.refused(error))
}

/// Makes the file's steps on the losses that `loss` computes, with snapshots of all weights.
fn follow(
    golden: &Golden,
    plan: &TrajectoryConfig,
    mut trainer: Trainer,
    loss: impl FnMut(usize) -> Result<Loss>,
) -> Result<Computed> {
    follow_with(golden, plan, &mut trainer, loss, |_| Ok(()))
}

/// [`follow`], with something done before every step.
fn follow_with(
    golden: &Golden,
    plan: &TrajectoryConfig,
    trainer: &mut Trainer,
    mut loss: impl FnMut(usize) -> Result<Loss>,
    mut before: impl FnMut(usize) -> Result<()>,
) -> Result<Computed> {
    let mut computed = Computed::default();
    computed.count(trainer.params());
    let mut steps: Vec<Step> = Vec::new();
    for number in 0..plan.steps {
        before(number)?;
        steps.push(trainer.step(|| loss(number)).map_err(candle_core::Error::wrap)?);
        let done = number + 1;
        if plan.snapshots.contains(&done) {
            for leaf in &golden.leaves {
                computed.put(&format!("w{done}.{leaf}"), trainer.params().value(leaf)?);
            }
        }
    }
    let column = |pick: fn(&Step) -> f64| {
        let values: Vec<f32> = steps.iter().map(|step| pick(step) as f32).collect();
        Tensor::new(values.as_slice(), &Device::Cpu)
    };
    computed.put("loss", column(|step| step.loss)?);
    computed.put("lr", column(|step| step.rates.lr)?);
    computed.put("beta1", column(|step| step.rates.beta1)?);
    Ok(computed)
}
