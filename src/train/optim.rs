//! Optimizers over the groups of a model, and which of its parameters decay.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var, bail};
use serde::{Deserialize, Serialize};

use super::schedule::StepRates;
use effattn_kernel::adamw::{self, Hyper, Moments};
use effattn_kernel::nan_trace::is_finite;
use effattn_model::nn::params::{Params, StoredGroup};

/// How parameters are updated: the closed set of optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub enum OptimizerConfig {
    /// AdamW as PyTorch has it.
    AdamW(AdamW),
    /// AdamW that decays what the update gave, as ViL-LS's released code does (SPEC-vision section 8).
    Late(AdamW),
    /// As fairseq has it: `eps` is added before the bias correction.
    Adam(AdamW),
    /// SGD with Nesterov's momentum, as fairseq has it.
    Nesterov(Nesterov),
}

/// Settings of Nesterov's SGD: u <- m u + g; p <- p (1 - lr wd) - lr (g + m u).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nesterov {
    /// m.
    pub momentum: f64,
    /// Decoupled weight decay, multiplied by the rate.
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; absent: no clipping.
    pub clip: Option<f64>,
}

impl From<AdamW> for OptimizerConfig {
    fn from(settings: AdamW) -> Self {
        Self::AdamW(settings)
    }
}

impl OptimizerConfig {
    const fn clip(&self) -> Option<f64> {
        match self {
            Self::AdamW(settings) | Self::Late(settings) | Self::Adam(settings) => settings.clip,
            Self::Nesterov(settings) => settings.clip,
        }
    }

    const fn weight_decay(&self) -> f64 {
        match self {
            Self::AdamW(settings) | Self::Late(settings) | Self::Adam(settings) => settings.weight_decay,
            Self::Nesterov(settings) => settings.weight_decay,
        }
    }

    /// Updates one variable with `scale` times `gradient` in update `step`, from 1. The first moment of
    /// [`Self::Nesterov`] is its velocity, the second stays 0.
    fn update(
        &self,
        (var, gradient): (&Var, &Tensor),
        moments: &mut Moments,
        StepRates { lr, beta1 }: StepRates,
        (scale, decays, step): (f64, bool, u64),
    ) -> Result<()> {
        let decay = |weight_decay: f64| if decays { weight_decay } else { 0.0 };
        match *self {
            Self::AdamW(AdamW { beta2, eps, weight_decay, .. })
            | Self::Late(AdamW { beta2, eps, weight_decay, .. }) => {
                let weight_decay = decay(weight_decay);
                adamw::update(
                    var,
                    gradient,
                    moments,
                    &Hyper { lr, beta1, beta2, eps, weight_decay, grad_scale: scale, step },
                )
            }
            Self::Adam(AdamW { beta2, eps, weight_decay, .. }) => {
                let eps = eps / (1.0 - beta2.powi(step as i32)).sqrt();
                let weight_decay = decay(weight_decay);
                adamw::update(
                    var,
                    gradient,
                    moments,
                    &Hyper { lr, beta1, beta2, eps, weight_decay, grad_scale: scale, step },
                )
            }
            Self::Nesterov(Nesterov { momentum, weight_decay, .. }) => {
                let (velocity, unused) = moments.tensors()?;
                let gradient = (gradient.flatten_all()? * scale)?;
                let velocity = ((velocity * momentum)? + &gradient)?;
                let ahead = (gradient + (&velocity * momentum)?)?.reshape(var.shape())?;
                var.set(&((var.as_detached_tensor() * (1.0 - lr * decay(weight_decay)))? - (ahead * lr)?)?)?;
                *moments = Moments::from_tensors(&velocity, &unused)?;
                Ok(())
            }
        }
    }
}

/// Settings of AdamW that stay the same over all steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the rate.
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; absent: no clipping.
    pub clip: Option<f64>,
}

/// The gradient of every group; absent where the loss does not depend on it.
#[derive(Default)]
pub struct Gradients(Vec<Option<Tensor>>);

impl Gradients {
    /// The gradients of `params` in `store`.
    pub fn take(params: &Params, store: &mut GradStore) -> Self {
        Self(params.groups().iter().map(|group| store.remove(&group.var)).collect())
    }

    /// Adds those of another micro-batch.
    pub fn add(&mut self, other: Self) -> Result<()> {
        if self.0.is_empty() {
            *self = other;
            return Ok(());
        }
        if self.0.len() != other.0.len() {
            bail!("gradients of {} and {} groups belong to different models", self.0.len(), other.0.len());
        }
        for (sum, other) in self.0.iter_mut().zip(other.0) {
            *sum = match (sum.take(), other) {
                (Some(sum), Some(other)) => Some((sum + other)?),
                (sum, other) => sum.or(other),
            };
        }
        Ok(())
    }

    /// The first parameters whose gradient is not finite. Gradients on an accelerator are not waited for: there the next
    /// loss tells.
    pub fn not_finite(&self, params: &Params) -> Result<Option<String>> {
        for (group, gradient) in params.groups().iter().zip(&self.0) {
            if let Some(gradient) = gradient
                && gradient.device().is_cpu()
                && !is_finite(gradient)?
            {
                let names: Vec<&str> = group.parts.iter().map(|part| part.name.as_str()).collect();
                return Ok(Some(names.join(", ")));
            }
        }
        Ok(None)
    }

    /// Euclidean norm over everything, group by group.
    fn norm(&self) -> Result<f64> {
        let squares = self.0.iter().flatten().map(|grad| {
            let square = grad.to_dtype(DType::F32)?.sqr()?.sum_all()?;
            Ok(f64::from(square.to_scalar::<f32>()?))
        });
        Ok(squares.sum::<Result<f64>>()?.sqrt())
    }
}

/// Which parts of a variable decay.
enum Decay {
    All,
    None,
    /// 1 where an element decays, else 0.
    Some(Tensor),
}

impl Decay {
    fn of(group: &StoredGroup, decays: &dyn Fn(&str) -> bool) -> Result<Self> {
        let parts = group.parts.iter().map(|part| decays(&part.name));
        let (yes, no) = (parts.clone().any(|decays| decays), parts.clone().any(|decays| !decays));
        if !(yes && no) {
            return Ok(if no { Self::None } else { Self::All });
        }
        let ones = group.parts.iter().zip(parts);
        let ones =
            ones.flat_map(|(part, decays)| std::iter::repeat_n(f32::from(u8::from(decays)), part.len()));
        let mask = Tensor::from_iter(ones, group.var.device())?;
        Ok(Self::Some(mask.reshape(group.var.shape())?))
    }
}

impl Decay {
    /// Takes the share `rate` from what decays of `var`.
    fn shrink(&self, var: &Var, rate: f64) -> Result<()> {
        let own = var.as_detached_tensor();
        match self {
            Self::None => Ok(()),
            Self::All => var.set(&(own * (1.0 - rate))?),
            Self::Some(mask) => var.set(&(own * ((mask * -rate)? + 1.0)?)?),
        }
    }
}

/// Settings, moments and number of updates.
pub struct Optimizer {
    method: OptimizerConfig,
    moments: Vec<Moments>,
    decays: Vec<Decay>,
    updates: u64,
}

impl Optimizer {
    /// Zero moments for every group.
    pub fn new(method: impl Into<OptimizerConfig>, params: &Params) -> Result<Self> {
        let moments =
            params.groups().iter().map(|group| Moments::zeros(&group.var)).collect::<Result<_>>()?;
        Self::restore(method, params, moments, 0)
    }

    /// Lets only the parameters decay that `decays` names; without this, all do.
    pub fn decay_only(&mut self, params: &Params, decays: &dyn Fn(&str) -> bool) -> Result<()> {
        self.decays = params.groups().iter().map(|group| Decay::of(group, decays)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Updates every parameter with `scale` times `gradients`.
    pub fn update(
        &mut self,
        params: &Params,
        gradients: &Gradients,
        rates: StepRates,
        scale: f64,
    ) -> Result<()> {
        let groups = params.groups();
        if gradients.0.len() != groups.len() || self.moments.len() != groups.len() {
            bail!("{} gradients do not fit a model of {} groups", gradients.0.len(), groups.len());
        }
        let scale = match self.method.clip() {
            Some(clip) => scale * (clip / (scale * gradients.norm()? + 1e-6)).min(1.0),
            None => scale,
        };
        self.updates += 1;
        let groups = groups.iter().zip(&gradients.0).zip(self.moments.iter_mut().zip(&self.decays));
        for ((group, gradient), (moments, decay)) in groups {
            let zeros = || group.var.zeros_like();
            let gradient = gradient.as_ref().map_or_else(zeros, |gradient| Ok(gradient.clone()))?;
            let late = matches!(self.method, OptimizerConfig::Late(_));
            let rate = rates.lr * self.method.weight_decay();
            if !late && matches!(decay, Decay::Some(_)) {
                decay.shrink(&group.var, rate)?;
            }
            let how = (scale, !late && matches!(decay, Decay::All), self.updates);
            self.method.update((&group.var, &gradient), moments, rates, how)?;
            if late {
                decay.shrink(&group.var, rate)?;
            }
        }
        Ok(())
    }

    /// Number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// First and second moment of every group.
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// The optimizer as it was after `updates` updates.
    pub fn restore(
        method: impl Into<OptimizerConfig>,
        params: &Params,
        moments: Vec<Moments>,
        updates: u64,
    ) -> Result<Self> {
        if moments.len() != params.groups().len() {
            bail!("{} moments do not fit a model of {} groups", moments.len(), params.groups().len());
        }
        let decays = params.groups().iter().map(|_| Decay::All).collect();
        Ok(Self { method: method.into(), moments, decays, updates })
    }
}
