//! What the layers of a model hand to their mechanisms in a forward pass, so that others can look at it.
//!
//! Layers build their mechanisms with `build`. Inside [`observed`] it wraps them, so that every call of one notes what it was given;
//! outside nothing is noted and nothing costs time.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{Device, Result, Tensor, bail};

use super::decode::DecodeState;
use super::knobs::Knobs;
use super::{AttentionInput, AttentionOutput, Mechanism, MechanismConfig, MechanismEntry, full};
use crate::nn::params::ParamBuilder;
use effattn_kernel::heads::Qkv;

thread_local! {
    /// The calls so far; `None`: nobody looks.
    static CALLS: RefCell<Option<Vec<MechanismCall>>> = const { RefCell::new(None) };
}

/// A call of a mechanism in a forward pass.
pub struct MechanismCall {
    /// The mechanism.
    pub entry: &'static MechanismEntry,
    /// What it was built for.
    pub config: MechanismConfig,
    /// What it reads: queries `q` and keys `k` [b, h, n, d], layer input `x` [b, n, e], `q_global` and `k_global`; and its parameters and
    /// constants by name.
    pub tensors: HashMap<String, Tensor>,
    /// Number of positions.
    pub positions: usize,
    /// Whether a class token is attended to beside the positions.
    pub class: bool,
    /// What [`Mechanism::softmax_inputs`] gives.
    pub softmax_inputs: Option<(Tensor, Tensor)>,
}

/// Runs `run`, which builds a model and gives it an input, and gives the calls of its mechanisms in order.
pub fn observed<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, Vec<MechanismCall>)> {
    /// Puts back what was there before, also when `run` panics.
    struct Restore(Option<Vec<MechanismCall>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CALLS.set(self.0.take());
        }
    }
    let _restore = Restore(CALLS.replace(Some(Vec::new())));
    let result = run()?;
    Ok((result, CALLS.take().unwrap_or_default()))
}

fn note(call: impl FnOnce(usize) -> Result<MechanismCall>) -> Result<()> {
    let Some(number) = CALLS.with_borrow(|calls| calls.as_ref().map(Vec::len)) else { return Ok(()) };
    let call = call(number)?;
    CALLS.with_borrow_mut(|calls| calls.get_or_insert_default().push(call));
    Ok(())
}

/// The mechanism of `entry` for a layer.
pub(crate) fn build(
    entry: &'static MechanismEntry,
    config: &MechanismConfig,
    builder: &ParamBuilder,
) -> Result<Box<dyn Mechanism>> {
    let inner = (entry.build)(config, builder)?;
    if CALLS.with_borrow(Option::is_none) {
        return Ok(inner);
    }
    Ok(Box::new(Observed { inner, entry, config: config.clone(), parameters: builder.tensors()? }))
}

/// Notes softmax attention of every position over all by `qkv`, which a layer of `heads` heads of width `head_dim` computes itself.
pub(crate) fn note_full(qkv: &Qkv, (heads, head_dim): (usize, usize)) -> Result<()> {
    note(|number| {
        let (q, k) = (qkv.q()?, qkv.k()?);
        let positions = q.dim(2)?;
        let config = MechanismConfig {
            knobs: Knobs::defaults(full::ENTRY.knobs),
            heads,
            head_dim,
            width: heads * head_dim,
            max_len: positions,
            causal: false,
            layer: number,
        };
        let tensors = HashMap::from([("q".to_owned(), q), ("k".to_owned(), k)]);
        Ok(MechanismCall {
            entry: &full::ENTRY,
            config,
            tensors,
            positions,
            class: false,
            softmax_inputs: None,
        })
    })
}

/// A mechanism that notes its calls.
struct Observed {
    inner: Box<dyn Mechanism>,
    entry: &'static MechanismEntry,
    config: MechanismConfig,
    parameters: HashMap<String, Tensor>,
}

impl Observed {
    fn call(&self, input: &AttentionInput) -> Result<MechanismCall> {
        if input.memory > 0 {
            bail!("{} reads a cache; it is looked at without one", self.entry.name);
        }
        let needs = (self.entry.needs)(&self.config.knobs);
        let mut tensors = self.parameters.clone();
        let mut positions = input.x.map_or(Ok(0), |x| x.dim(1))?;
        for (part, _) in needs.projections.read() {
            let rows = match part {
                "q" => input.qkv.q()?,
                "k" => input.qkv.k()?,
                _ => input.qkv.v()?,
            };
            positions = rows.dim(2)?;
            if part != "v" {
                tensors.insert(part.to_owned(), rows.contiguous()?);
            }
        }
        if let Some(global) = input.global {
            tensors.insert("q_global".to_owned(), global.q()?.contiguous()?);
            tensors.insert("k_global".to_owned(), global.k()?.contiguous()?);
        }
        tensors.extend(input.x.map(|x| ("x".to_owned(), x.clone())));
        let softmax_inputs = self.inner.softmax_inputs(input)?;
        Ok(MechanismCall {
            entry: self.entry,
            config: self.config.clone(),
            tensors,
            positions,
            class: input.cls.is_some(),
            softmax_inputs,
        })
    }
}

impl Mechanism for Observed {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        note(|_| self.call(input))?;
        self.inner.forward(input)
    }

    fn softmax_inputs(&self, input: &AttentionInput) -> Result<Option<(Tensor, Tensor)>> {
        self.inner.softmax_inputs(input)
    }

    fn init_decode(
        &self,
        batch: usize,
        room: usize,
        device: &Device,
    ) -> Result<Option<Box<dyn DecodeState>>> {
        self.inner.init_decode(batch, room, device)
    }

    fn decode_step(&self, input: &AttentionInput, state: &mut dyn DecodeState) -> Result<AttentionOutput> {
        self.inner.decode_step(input, state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_looks_after_a_panic() {
        let panics = std::panic::catch_unwind(|| observed(|| -> Result<()> { panic!("meant") }));
        assert!(panics.is_err() && CALLS.with_borrow(Option::is_none));
    }
}
