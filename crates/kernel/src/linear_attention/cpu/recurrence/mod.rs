//! Sums that decay, without features or a normaliser: out_i = sum_j w_ij (q_i . k_j) v_j, or with a decay per channel
//! sum_j sum_c w_ijc q_ic k_jc v_j. Keys may be shared among heads, and be of another width than values.
//!
//! Sequences are cut into chunks. What each chunk adds to the state, a scan over chunks, and what queries read within
//! their chunk and from the state before it are three loops that run in parallel over samples, heads and chunks. Keys after
//! the query have a state of their own, side by side with the first: one product reads both. Backward computes the states
//! again, and with them those of the gradient, which run the other way; nothing but the operands is kept in between.
//! The states of all chunks take d / [`CHUNK`] times the memory of the values.
//!
//! Products of decays are taken within chunks, where no exponent is above 0; gradients of decays are sums within chunks as
//! well, to which the product of the states on both sides adds what pairs across the chunk give.

mod backward;
mod channel;
mod factors;
mod forward;
mod log_terms;
mod op;
mod states;

use std::ops::Range;

use super::map::Mask;
use super::rows::{Columns, Operand, Rows};
use crate::cpu::par::Chunks;
use factors::{Direction, Factors};

pub(super) use op::fused;

/// Rows per chunk.
const CHUNK: usize = 64;

/// Where decays come from.
enum Logs {
    /// Powers 0..=[`CHUNK`] of the decay of each head.
    Constant(Vec<Vec<f32>>),
    /// An operand with a number per position.
    PerToken,
    /// An operand with a number per position and channel.
    PerChannel,
}

/// One call, without its operands.
struct Plan {
    logs: Logs,
    causal: bool,
    /// Backward sums decay by an operand of their own.
    separate: bool,
    mask: Mask,
    samples: usize,
    heads: usize,
    /// Groups of heads that share queries and keys.
    groups: usize,
    len: usize,
    key_width: usize,
    value_width: usize,
}

impl Plan {
    fn chunks(&self) -> Chunks {
        Chunks::of(self.len, CHUNK)
    }

    fn directions(&self) -> &'static [Direction] {
        if self.causal { &[Direction::Forward] } else { &[Direction::Forward, Direction::Backward] }
    }

    /// Rows of a state: the key channels, of every direction.
    fn state_rows(&self) -> usize {
        self.directions().len() * self.key_width
    }

    fn state_len(&self) -> usize {
        self.state_rows() * self.value_width
    }

    /// Numbers per position in a decay.
    fn log_width(&self) -> usize {
        if matches!(self.logs, Logs::PerChannel) { self.key_width } else { 1 }
    }

    /// Decays that get a gradient.
    fn learned(&self) -> bool {
        !matches!(self.logs, Logs::Constant(_))
    }

    /// The powers of the decay of `head`, where it is constant.
    fn powers(&self, head: usize) -> Option<&[f32]> {
        match &self.logs {
            Logs::Constant(powers) => Some(&powers[head]),
            Logs::PerToken | Logs::PerChannel => None,
        }
    }
}

/// A head of a sample.
#[derive(Clone, Copy)]
struct Place {
    sample: usize,
    head: usize,
}

/// A call with its operands.
struct Inputs<'a> {
    plan: &'a Plan,
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    /// Logarithms of the decays forward and backward, where they are operands.
    logs: [Operand<'a>; 2],
}

impl<'a> Inputs<'a> {
    /// Queries and keys of a chunk.
    fn queries_keys(&self, place: Place, rows: &Range<usize>) -> (Rows<'a>, Rows<'a>) {
        let group = place.head * self.plan.groups / self.plan.heads;
        let of = |x: &Operand<'a>| x.rows(place.sample, group, rows.clone(), &mut []);
        (of(&self.q), of(&self.k))
    }

    fn values(&self, place: Place, rows: &Range<usize>) -> Rows<'a> {
        self.v.rows(place.sample, place.head, rows.clone(), &mut [])
    }
}

/// Where gradients of queries, keys and values go: number of the buffer and columns in it.
#[derive(Clone, Copy, Debug)]
struct Targets {
    q: (usize, Columns),
    k: (usize, Columns),
    v: (usize, Columns),
    /// Columns of the rows of each buffer, 0 where there is none.
    widths: [usize; 3],
}

/// The decays of a chunk in all directions, with what hidden keys write cleared.
struct ChunkFactors {
    both: [Factors; 2],
    /// What keys write is worth, per direction: 0 where hidden.
    keys: [Vec<f32>; 2],
}

impl ChunkFactors {
    fn new(plan: &Plan) -> Self {
        let width = plan.log_width();
        let room = || vec![0.0; CHUNK * width];
        Self { both: [Factors::new(width), Factors::new(width)], keys: [room(), room()] }
    }

    fn load(&mut self, inputs: &Inputs, place: Place, rows: &Range<usize>) {
        for (index, &direction) in inputs.plan.directions().iter().enumerate() {
            let (first, others) = self.both.split_at_mut(index);
            let (factors, keys) = (&mut others[0], &mut self.keys[index]);
            match first {
                [forward] if !inputs.plan.separate => {
                    factors.load_later(inputs, forward, place, rows.clone())
                }
                _ => factors.load(inputs, direction, place, rows.clone()),
            }
            let used = factors.count * factors.width;
            let write = match direction {
                Direction::Forward => &factors.down,
                Direction::Backward => &factors.up,
            };
            keys[..used].copy_from_slice(&write[..used]);
            for (row, key) in keys[..used].chunks_exact_mut(factors.width).enumerate() {
                if inputs.plan.mask.hides(place.sample, rows.start + row) {
                    key.fill(0.0);
                }
            }
        }
    }

    /// What the states are worth at queries, per direction.
    fn queries(&self, index: usize) -> &[f32] {
        let factors = &self.both[index];
        let read = if index == 0 { &factors.up } else { &factors.down };
        &read[..factors.count * factors.width]
    }

    /// What keys add is worth in the states, per direction.
    fn keys(&self, index: usize) -> &[f32] {
        let factors = &self.both[index];
        &self.keys[index][..factors.count * factors.width]
    }
}
