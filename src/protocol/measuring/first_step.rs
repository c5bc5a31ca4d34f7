//! Our own first step of a model that a program gets, too: what it begins with, and what it gives. A worker makes it, under the limits
//! of the program's cell.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};

use super::worker::{Answer, Bounds};
use crate::program::wire::{Message, Tensors};
use crate::protocol::model_spec::{ModelSpec, compute_as};
use crate::protocol::worker_context::{FirstStepRequest, WorkerRequest};
use crate::run::RunError;
use crate::run::outcome::{self, CellFailure};
use crate::run::worker::{ParentLink, Worker};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::batch::{ModelInput, SyntheticInput};
use effattn_model::family::Architecture;
use effattn_model::nn::dropout::DropoutRng;
use effattn_model::nn::embedding::Positions;
use effattn_model::nn::ffn::FfnActivation;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::preset::ClassifierPreset;
use effattn_model::{ClassifierConfig, Pooling};
use effattn_record::config::settings::{DtypeName, KernelName};
use effattn_record::{Outcome, Pass, file};

/// What the step began with and gave.
pub struct FirstStep {
    /// Weights, constants and batches as safetensors.
    pub tensors: Vec<u8>,
    /// Names of the constants.
    pub constants: Vec<String>,
    /// Logits or loss of the first batch.
    pub result: Vec<f64>,
}

/// The model of `spec`, if the contract has words for it.
pub(super) fn model(spec: &ModelSpec, choice: &MechanismChoice) -> Result<ClassifierConfig, String> {
    let form =
        ClassifierPreset::find(&spec.preset).and_then(|preset| preset.form(None, choice.entry.name).ok());
    let form = form.filter(|form| form.towers == 1 && spec.pass != Pass::Decode);
    let Some(mut form) = form else {
        return Err(format!(
            "programs infer and train a classifier of documents, not {} {}; choose --preset lra-repo",
            spec.preset, spec.pass
        ));
    };
    spec.sizes.apply(&mut form.backbone);
    if let Some(name) = &spec.sizes.pooling {
        form.pooling = Pooling::find(name);
    }
    let config = form.model(choice.entry, choice.knobs.clone(), spec.len as usize);
    let backbone = &config.backbone;
    let plain = backbone.positions == Positions::Learned
        && backbone.activation == FfnActivation::Gelu
        && backbone.dropout == 0.0
        && backbone.attention_dropout == 0.0
        && matches!(config.pooling, Pooling::Mean | Pooling::First | Pooling::ClsFront);
    match plain && (choice.entry.needs)(&config.knobs).conv.is_none() {
        true => Ok(config),
        false => Err(
            "programs have learned positions, exact GELU, no dropout, no convolution, and pooling mean, first or \
             cls-front; choose --preset lra-repo, or --set pooling=mean"
                .to_owned(),
        ),
    }
}

/// Lets a worker make the first step of `spec`, within `most` and `bounds`. It comes through a file in `folder`, the run's: what a
/// kill leaves there, the next run removes.
pub fn make(spec: &ModelSpec, most: Duration, bounds: Bounds, folder: &Path) -> Answer<FirstStep> {
    let file = file::beside(&folder.join("step")).map_err(RunError::file(folder))?;
    let request = FirstStepRequest { spec: spec.clone(), file: file.path().to_owned() };
    let order = WorkerRequest::FirstStep { memory_limit: bounds.memory_limit, request };
    let launcher = bounds.launcher.of_kernel(&KernelName::Fused.to_string());
    let mut worker = Worker::start(&launcher, &order)?;
    let answer = bounds.hear(&mut worker, Instant::now().checked_add(most))?;
    let made = answer.and_then(|()| read(file.path()));
    worker.finish();
    Ok(made.map_err(|failure| CellFailure {
        reason: format!("effattn's own first step, which the program's is held against: {}", failure.reason),
        ..failure
    }))
}

/// The worker's side.
pub fn work(link: &ParentLink, request: &FirstStepRequest, text: &[u8]) -> io::Result<()> {
    let answer: Result<(), CellFailure> = write(request, text);
    link.send(&answer)
}

fn write(FirstStepRequest { spec, file }: &FirstStepRequest, text: &[u8]) -> Result<(), CellFailure> {
    compute_as(KernelName::Fused, DtypeName::F32);
    let failed = |reason: String| CellFailure::new(Outcome::Failed, reason);
    let choice = spec.choice().map_err(|error| failed(error.to_string()))?;
    let config = model(spec, &choice).map_err(failed)?;
    let message = step(spec, &config, text).map_err(|error| outcome::of_error(&error))?;
    Ok(message.write(&mut File::create(file)?)?)
}

fn read(path: &Path) -> Result<FirstStep, CellFailure> {
    let failed = |reason: String| CellFailure::new(Outcome::Failed, reason);
    let message = Message::read(&mut file::open(path)?).map_err(failed)?.unwrap_or_default();
    let entry = |key: &str| message.header.get(key).cloned().unwrap_or_default();
    let wrong = |error: serde_json::Error| failed(format!("it gave what is no number ({error})"));
    let constants = serde_json::from_value(entry("constants")).map_err(wrong)?;
    let result = serde_json::from_value(entry("result")).map_err(wrong)?;
    Ok(FirstStep { tensors: message.body, constants, result })
}

fn step(spec: &ModelSpec, config: &ClassifierConfig, text: &[u8]) -> candle_core::Result<Message> {
    let builder = ParamBuilder::seeded(spec.seed, &Device::Cpu, false);
    let batch = spec.batch as usize;
    let mut net = config.build_measured(&builder, batch)?;
    let params = builder.finish();
    let mut tensors = Tensors::new();
    for name in params.names() {
        tensors.insert(name.to_owned(), params.value(name)?);
    }
    let constants: Vec<String> = params.constants().keys().cloned().collect();
    tensors.extend(params.constants().iter().map(|(name, tensor)| (name.clone(), tensor.clone())));
    let wanted = SyntheticInput { text, batch, len: spec.len as usize, seed: spec.seed };
    let batches = config.synthetic_batches(&wanted, &Device::Cpu)?;
    let (mut ids, mut labels) = (Vec::new(), Vec::new());
    for batch in &batches {
        if let ModelInput::Tokens(tokens) = &batch.input {
            ids.push(tokens.ids.clone());
            labels.push(batch.labels.clone());
        }
    }
    tensors.insert("ids".to_owned(), Tensor::stack(&ids, 0)?);
    tensors.insert("labels".to_owned(), Tensor::stack(&labels, 0)?);
    let Some(first) = batches.first() else { candle_core::bail!("there is no batch") };
    let result = match spec.pass {
        Pass::Train => {
            let loss = net.loss(first, DropoutRng::new(spec.seed))?;
            vec![f64::from(loss.sum.to_scalar::<f32>()?) / loss.count]
        }
        Pass::Infer | Pass::Decode => {
            let logits = net.forward(first)?.flatten_all()?.to_vec1::<f32>()?;
            logits.into_iter().map(f64::from).collect()
        }
    };
    drop((net, batches)); // the bytes of the message are copies
    Message::default().with("constants", constants).with("result", result).with_tensors(&tensors)
}
