//! Named parameters in groups, each group one flat variable.
//!
//! A fused operation may take only three tensors, so what it needs together lies in one *group*: a flat
//! variable whose parts have names and shapes. The optimizer walks groups; checkpoints and golden files
//! speak of parts by name.

mod builder;

use std::collections::{BTreeMap, HashMap};

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var, bail};

pub use builder::{InitRule, ParamBuilder};

pub use effattn_kernel::group::{ParamGroup, ParamPart};

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All entries equal.
    Const(f64),
    /// Normal with mean and standard deviation.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// Normal around zero, except one row of zeros.
    NormalZeroRow {
        /// Standard deviation.
        std: f64,
        /// The row that is zero, such as that of padding.
        row: usize,
    },
    /// Uniform in `[-bound, bound)`.
    Uniform {
        /// Bound.
        bound: f64,
    },
}

impl Init {
    /// All zeros.
    pub const ZERO: Self = Self::Const(0.0);
    /// All ones.
    pub const ONE: Self = Self::Const(1.0);

    /// Normal around zero.
    pub const fn normal(std: f64) -> Self {
        Self::Normal { mean: 0.0, std }
    }

    /// PyTorch's default of a linear layer: uniform within 1 / sqrt(fan_in), for weight and bias.
    pub fn fan_in(fan_in: usize) -> Self {
        Self::Uniform { bound: 1.0 / (fan_in as f64).sqrt() }
    }

    /// Xavier's uniform initialisation.
    pub fn xavier(fan_in: usize, fan_out: usize) -> Self {
        Self::Uniform { bound: (6.0 / (fan_in + fan_out) as f64).sqrt() }
    }
}

/// Name, shape and start of one parameter of a group.
#[derive(Clone, Debug)]
pub struct ParamSpec {
    /// Name below the builder's prefix, such as `fc1.weight`.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Start.
    pub init: Init,
}

impl ParamSpec {
    /// A specification.
    pub fn new(name: &str, shape: &[usize], init: Init) -> Self {
        Self { name: name.to_owned(), shape: shape.to_vec(), init }
    }
}

/// A stored group.
#[derive(Clone)]
pub struct StoredGroup {
    /// The variable the optimizer updates.
    pub var: Var,
    /// Its parts.
    pub parts: Vec<ParamPart>,
}

/// All parameters and constants of a model. A clone has the same variables, not copies.
#[derive(Clone, Default)]
pub struct Params {
    groups: Vec<StoredGroup>,
    constants: BTreeMap<String, Tensor>,
    index: HashMap<String, (usize, usize)>,
    /// Trained numbers that were counted and not stored.
    counted: usize,
}

impl Params {
    /// The groups in the order they were built.
    pub fn groups(&self) -> &[StoredGroup] {
        &self.groups
    }

    /// Constants (random features, hash rotations, random blocks) by name.
    pub fn constants(&self) -> &BTreeMap<String, Tensor> {
        &self.constants
    }

    /// Names of all parameters, in the order they were built.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| group.parts.iter().map(|part| part.name.as_str()))
    }

    /// Number of trained numbers.
    pub fn count(&self) -> usize {
        self.counted + self.groups.iter().map(|group| group.var.elem_count()).sum::<usize>()
    }

    fn find(&self, name: &str) -> Result<(&StoredGroup, &ParamPart)> {
        match self.index.get(name) {
            Some(&(group, part)) => Ok((&self.groups[group], &self.groups[group].parts[part])),
            None => bail!("no parameter is called {name:?}"),
        }
    }

    /// Current value of a parameter, detached, in its own shape.
    pub fn value(&self, name: &str) -> Result<Tensor> {
        let (group, part) = self.find(name)?;
        slice(&group.var.as_detached_tensor(), part)
    }

    /// Gradient of a parameter; zeros if the loss does not depend on it.
    pub fn grad(&self, grads: &GradStore, name: &str) -> Result<Tensor> {
        let (group, part) = self.find(name)?;
        match grads.get(&group.var) {
            Some(grad) => slice(grad, part),
            None => Tensor::zeros(part.shape.as_slice(), DType::F32, group.var.device()),
        }
    }
}

fn slice(flat: &Tensor, part: &ParamPart) -> Result<Tensor> {
    flat.flatten_all()?.narrow(0, part.offset, part.len())?.reshape(part.shape.as_slice())?.copy()
}
