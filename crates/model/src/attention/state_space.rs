//! State spaces with a complex diagonal state on the layer input, the form that S5 and LRU have in common:
//!
//! ```text
//! h_t = a h_{t-1} + b u_t,   y_t = s Re(C h_t) + D u_t,   bidirectional: + s Re(C_bwd h'_t) with h'_t = a h'_{t+1} + b u_t
//! ```
//!
//! u is x with hidden positions set to 0: time goes on there. S5 and LRU differ in how a and b follow from their parameters.

use candle_core::{Device, Result, Tensor};

use super::decode::{Carried, DecodeState};
use super::knobs::Knob;
use super::{AttentionInput, AttentionOutput, Cost, Mechanism, Shape, mixer};
use effattn_kernel::diagonal_scan::{Direction, diagonal_scan, step};
use effattn_kernel::gating::skip;
use effattn_kernel::linear::linear;

/// Number of complex states.
pub(super) const P: Knob<usize> = Knob::int("P", 128, 1..=1 << 14);

/// Complex numbers.
#[derive(Clone)]
pub(super) struct Complex {
    pub re: Tensor,
    pub im: Tensor,
}

impl Complex {
    /// The numbers of a parameter whose last dimension holds real and imaginary parts.
    pub fn of_pairs(x: &Tensor) -> Result<Self> {
        let last = x.rank() - 1;
        Ok(Self { re: x.narrow(last, 0, 1)?.squeeze(last)?, im: x.narrow(last, 1, 1)?.squeeze(last)? })
    }

    /// self * other, element by element; sizes of 1 are broadcast.
    pub fn times(&self, other: &Self) -> Result<Self> {
        let re = (self.re.broadcast_mul(&other.re)? - self.im.broadcast_mul(&other.im)?)?;
        let im = (self.re.broadcast_mul(&other.im)? + self.im.broadcast_mul(&other.re)?)?;
        Ok(Self { re, im })
    }

    /// 1 / self.
    pub fn inverse(&self) -> Result<Self> {
        let square = (self.re.sqr()? + self.im.sqr()?)?;
        Ok(Self { re: (&self.re / &square)?, im: (self.im.neg()? / &square)? })
    }

    /// factor * self with a real factor that is broadcast.
    pub fn scaled(&self, factor: &Tensor) -> Result<Self> {
        Ok(Self { re: self.re.broadcast_mul(factor)?, im: self.im.broadcast_mul(factor)? })
    }

    /// scale * self + shift with real numbers.
    pub fn affine(&self, scale: f64, shift: f64) -> Result<Self> {
        Ok(Self { re: self.re.affine(scale, shift)?, im: self.im.affine(scale, 0.0)? })
    }
}

/// a `[p]` and b [p, e] of one call.
pub(super) struct Discrete {
    pub a: Complex,
    pub b: Complex,
}

/// A state space layer; `discretize` makes a and b of its parameters.
pub(super) struct StateSpace<F> {
    pub discretize: F,
    /// C [e, p], then that of the other direction.
    pub outputs: Vec<Complex>,
    /// s.
    pub scale: f64,
    /// D `[e]`.
    pub skip: Tensor,
}

/// Multiply-adds, and 2 p numbers of state.
pub(super) fn cost(p: usize, shape: &Shape) -> Cost {
    let Shape { batch, width, queries, causal, .. } = *shape;
    let directions = if causal { 1 } else { 2 };
    let macs = queries * (2 * p * width + directions * (4 * p + 2 * p * width) + width);
    Cost {
        core_macs: (batch * macs) as u64,
        flops: macs as u64,
        state_bytes: if causal { (4 * 2 * p) as u64 } else { 0 },
    }
}

type State = Carried<Option<Tensor>>;

impl<F: Fn() -> Result<Discrete> + Send + Sync> Mechanism for StateSpace<F> {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let direction = if self.outputs.len() == 1 { Direction::Forward } else { Direction::Both };
        self.run(input, |u, a| diagonal_scan(u, a, direction))
    }

    fn init_decode(&self, batch: usize, _: usize, _: &Device) -> Result<Option<Box<dyn DecodeState>>> {
        Ok((self.outputs.len() == 1).then(|| State::start(batch)))
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        let state = state.downcast::<State>()?;
        state.advance(|held, _| self.run(input, |u, a| step(u, a, held)))
    }
}

impl<F: Fn() -> Result<Discrete>> StateSpace<F> {
    /// `scan` makes the states [b, n, 2 p per direction] of their inputs [b, n, 2 p] and a [2, p].
    fn run(
        &self,
        input: &AttentionInput,
        scan: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<AttentionOutput> {
        let u = mixer::visible(input)?;
        let Discrete { a, b } = (self.discretize)()?;
        let states = linear(&u, &Tensor::cat(&[b.re, b.im], 0)?, None)?;
        let states = scan(&states, &Tensor::stack(&[a.re, a.im], 0)?)?;
        let mut columns = Vec::new();
        for c in &self.outputs {
            columns.extend([c.re.affine(self.scale, 0.0)?, c.im.affine(-self.scale, 0.0)?]);
        }
        let y = linear(&states, &Tensor::cat(&columns, 1)?, None)?;
        Ok(AttentionOutput::rows(skip(&y, &u, &self.skip, false)?))
    }
}
