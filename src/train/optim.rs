//! AdamW over the groups of a model.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::schedule::Rates;
use crate::kernel::adamw::{self, Hyper, Moments};
use crate::kernel::nan_trace::is_finite;
use crate::nn::params::Params;

/// Settings that stay the same over all steps. Decay applies to all parameters.
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
    ///
    /// # Errors
    /// Gradients of another model.
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
    ///
    /// # Errors
    /// Failures of the device.
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

/// Settings, moments and number of updates.
pub struct Optimizer {
    config: AdamW,
    moments: Vec<Moments>,
    updates: u64,
}

impl Optimizer {
    /// Zero moments for every group.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn new(config: AdamW, params: &Params) -> Result<Self> {
        let moments =
            params.groups().iter().map(|group| Moments::zeros(&group.var)).collect::<Result<_>>()?;
        Ok(Self { config, moments, updates: 0 })
    }

    /// Updates every parameter with `scale` times `gradients`.
    ///
    /// # Errors
    /// Gradients of another model.
    pub fn update(&mut self, params: &Params, gradients: &Gradients, rates: Rates, scale: f64) -> Result<()> {
        let groups = params.groups();
        if gradients.0.len() != groups.len() || self.moments.len() != groups.len() {
            bail!("{} gradients do not fit a model of {} groups", gradients.0.len(), groups.len());
        }
        let scale = match self.config.clip {
            Some(clip) => scale * (clip / (scale * gradients.norm()? + 1e-6)).min(1.0),
            None => scale,
        };
        self.updates += 1;
        let AdamW { beta2, eps, weight_decay, .. } = self.config;
        let Rates { lr, beta1 } = rates;
        let hyper = Hyper { lr, beta1, beta2, eps, weight_decay, grad_scale: scale, step: self.updates };
        for ((group, gradient), moments) in groups.iter().zip(&gradients.0).zip(&mut self.moments) {
            match gradient {
                Some(gradient) => adamw::update(&group.var, gradient, moments, &hyper)?,
                None => adamw::update(&group.var, &group.var.zeros_like()?, moments, &hyper)?,
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
    ///
    /// # Errors
    /// Moments that do not belong to `params`.
    pub fn restore(config: AdamW, params: &Params, moments: Vec<Moments>, updates: u64) -> Result<Self> {
        if moments.len() != params.groups().len() {
            bail!("{} moments do not fit a model of {} groups", moments.len(), params.groups().len());
        }
        Ok(Self { config, moments, updates })
    }
}
