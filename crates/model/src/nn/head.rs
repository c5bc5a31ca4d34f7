//! The classifier's head: fc2(relu(fc1(u))).

use candle_core::{Result, Tensor};

use super::params::{Init, ParamBuilder, ParamGroup, ParamSpec};
use effattn_kernel::activation::relu;
use effattn_kernel::linear::linear;

/// Two linear layers with a ReLU between them.
pub struct Head {
    group: ParamGroup,
}

impl Head {
    /// Parameters `fc1.*` [hidden, width] and `fc2.*` [classes, hidden] below `builder`.
    pub fn new(builder: &ParamBuilder, width: usize, hidden: usize, classes: usize) -> Result<Self> {
        let group = builder.group(&[
            ParamSpec::new("fc1.weight", &[hidden, width], Init::fan_in(width)),
            ParamSpec::new("fc1.bias", &[hidden], Init::fan_in(width)),
            ParamSpec::new("fc2.weight", &[classes, hidden], Init::fan_in(hidden)),
            ParamSpec::new("fc2.bias", &[classes], Init::fan_in(hidden)),
        ])?;
        Ok(Self { group })
    }

    /// `features` [b, width] to logits [b, classes].
    pub fn forward(&self, features: &Tensor) -> Result<Tensor> {
        let part = |index| self.group.part(index);
        let hidden = linear(features, &part(0)?, Some(&part(1)?))?;
        linear(&relu(&hidden)?, &part(2)?, Some(&part(3)?))
    }
}
