//! What a mechanism asks of the layer around it.

use crate::nn::short_conv::ConvForm;
use effattn_kernel::heads::PackedLayout;

/// Heads and head width of one projection; `None`: those of the layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of heads, a divisor of the layer's where heads share it.
    pub heads: Option<usize>,
    /// Width of a head.
    pub dim: Option<usize>,
}

impl HeadShape {
    /// The layer's own heads.
    pub const LAYER: Self = Self { heads: None, dim: None };

    /// Heads and head width in a layer of `heads` heads of width `head_dim`.
    pub fn of(self, heads: usize, head_dim: usize) -> (usize, usize) {
        (self.heads.unwrap_or(heads), self.dim.unwrap_or(head_dim))
    }
}

/// The projections of the layer input that a mechanism reads; absent ones are not computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projections {
    /// Queries.
    pub q: Option<HeadShape>,
    /// Keys.
    pub k: Option<HeadShape>,
    /// Values.
    pub v: Option<HeadShape>,
}

impl Default for Projections {
    fn default() -> Self {
        Self::QKV
    }
}

impl Projections {
    /// Queries, keys and values.
    pub const QKV: Self =
        Self { q: Some(HeadShape::LAYER), k: Some(HeadShape::LAYER), v: Some(HeadShape::LAYER) };
    /// One projection serves as queries and keys (Reformer).
    pub const SHARED_QK: Self = Self { k: None, ..Self::QKV };
    /// Keys serve as values (Luna, tied).
    pub const SHARED_KV: Self = Self { v: None, ..Self::QKV };
    /// Values only (Synthesizer without dot product).
    pub const V: Self = Self { q: None, ..Self::SHARED_QK };
    /// None: a mixer that reads the layer input x and gives rows of its width.
    pub const NONE: Self = Self { v: None, ..Self::V };

    /// Queries, keys and values where `groups` heads of keys and values are shared by the layer's query heads.
    pub const fn grouped(groups: Option<usize>) -> Self {
        let shared = Some(HeadShape { heads: groups, dim: None });
        Self { q: Some(HeadShape::LAYER), k: shared, v: shared }
    }

    /// The same with `heads` heads of keys and values, where all three are read and have the layer's heads.
    #[must_use]
    pub fn sharing(self, heads: usize) -> Self {
        if self == Self::QKV { Self::grouped(Some(heads)) } else { self }
    }

    /// Names and shapes of those that are read, in the order q, k, v.
    pub fn read(&self) -> impl Iterator<Item = (&'static str, HeadShape)> {
        [("q", self.q), ("k", self.k), ("v", self.v)]
            .into_iter()
            .filter_map(|(name, shape)| shape.map(|shape| (name, shape)))
    }

    /// Whether all have the heads of a layer of `heads` heads of width `head_dim`, so that they can lie in packed rows.
    pub fn packable(&self, heads: usize, head_dim: usize) -> bool {
        *self != Self::NONE && self.read().all(|(_, shape)| shape.of(heads, head_dim) == (heads, head_dim))
    }

    /// Which part of a packed row is which, of as many as are read.
    pub fn layout(&self) -> PackedLayout {
        let mut count = 0;
        let mut next = |shape: Option<HeadShape>| {
            shape.map(|_| {
                count += 1;
                count - 1
            })
        };
        let (q, k, v) = (next(self.q), next(self.k), next(self.v));
        PackedLayout { q, k, v, count }
    }

    /// Width of all heads of all of them in a layer of `heads` heads of width `head_dim`.
    pub fn width(&self, heads: usize, head_dim: usize) -> usize {
        let width = |shape: HeadShape| {
            let (heads, dim) = shape.of(heads, head_dim);
            heads * dim
        };
        self.read().map(|(_, shape)| width(shape)).sum()
    }
}

/// How the layer makes its output of a mechanism's result y and its residual r.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputForm {
    /// r + Linear_o(y).
    #[default]
    Linear,
    /// r + y (FNet).
    Plain,
    /// y: the mechanism has added the residual itself (Mega).
    Whole,
    /// r + g * sigmoid(Linear_o(g)) with g = GELU(y) (S5's half GLU).
    HalfGlu,
    /// r + Linear_o(g) * sigmoid(Linear_o_gate(g)) with g = GELU(y) (LRU).
    Glu,
}

/// What the layer around a mechanism has to provide for one variant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Projections.
    pub projections: Projections,
    /// The layer input x.
    pub x: bool,
    /// Separate projections for global positions (Longformer).
    pub global: bool,
    /// The layer's residual, for a mechanism that adds it itself.
    pub residual: bool,
    /// Rows of a second stream that goes from layer to layer (Luna); `None`: there is none.
    pub stream: Option<usize>,
    /// Convolution of the projections; `None`: there is none.
    pub conv: Option<ConvForm>,
    /// What is done with the result.
    pub output: OutputForm,
    /// Whether `decode_step` takes keys and values of fewer heads than the queries, where the layer shares them; if not, they are
    /// repeated.
    pub decodes_groups: bool,
}

impl Needs {
    /// Width of the mechanism's result in a layer of this width and these heads.
    pub fn result_width(&self, width: usize, heads: usize, head_dim: usize) -> usize {
        match self.projections {
            Projections::NONE => width,
            Projections { v, k, .. } => heads * v.or(k).unwrap_or_default().of(heads, head_dim).1,
        }
    }

    /// Multiply-adds per row and channel of a layer of this width and these heads: projections of its input and of the mechanism's
    /// result.
    pub fn linear_width(&self, width: usize, heads: usize, head_dim: usize) -> usize {
        let result = self.result_width(width, heads, head_dim);
        let outputs = match self.output {
            OutputForm::Linear | OutputForm::HalfGlu => result,
            OutputForm::Glu => 2 * result,
            OutputForm::Plain | OutputForm::Whole => 0,
        };
        let global = if self.global { 3 * heads * head_dim } else { 0 };
        self.projections.width(heads, head_dim) + global + outputs
    }

    /// The first need that a layer with plain projections q, k, v and an output projection does not meet.
    pub fn beyond_plain(&self, heads: usize, head_dim: usize) -> Option<&'static str> {
        match self {
            Self { projections, .. } if *projections == Projections::NONE => Some("form with projections"),
            Self { projections, .. } if !projections.packable(heads, head_dim) => {
                Some("form whose queries, keys and values all have the layer's heads")
            }
            Self { residual: true, .. } => Some("form that leaves the residual to the layer"),
            Self { stream: Some(_), .. } => Some("form without a second stream"),
            Self { conv: Some(_), .. } => Some("form without a convolution"),
            Self { output, .. } if *output != OutputForm::Linear => Some("form with an output projection"),
            _ => None,
        }
    }
}
