//! Local attention: every block of `block` positions attends to itself (SPEC-cos 3.1).
//!
//! j visible to i iff floor(i / block) = floor(j / block), and j <= i when causal. The last block may be short.

use candle_core::{D, Result, Tensor};

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::attend;
use effattn_kernel::dropout::AttentionDropout;
use effattn_kernel::heads::Heads;
use effattn_kernel::softmax::softmax;
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};

const BLOCK: Knob<usize> = Knob::int("block", 512, 1..=1 << 24)
    .doc("block length")
    .source("our choice; Long Range Arena uses 50 (text, ListOps, matching) and 64 (images)");
const RELEASED: Knob<bool> = Knob::words("layout", &[("blocks", false), ("released-lra", true)])
    .doc("released-lra (compat=lra): what the released Long Range Arena code computes, strided groups with padding counted as valid")
    .source("the published mechanism");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "local",
    title: "Local attention",
    paper: Paper {
        authors: "Tay et al.",
        title: "Long Range Arena: A Benchmark for Efficient Transformers",
        year: 2020,
        locator: "arXiv:2011.04006",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: &[BLOCK.spec(), RELEASED.spec()],
    complexity: "O(n block d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over unpadded keys j with floor(j / block) = floor(i / block)
and, when causal, j <= i.",
    deviations: &[
        "The released code reshapes to strided groups (positions s nb + u for slots s) instead of neighbours, appends block - n mod block zero tokens (a whole block when block divides n) that count as valid, and applies contiguous pieces of the padding mask to the strided groups; compat=lra reproduces that.",
        "The released causal mode does not run; compat=lra is bidirectional only.",
    ],
    exceptions: &[Exception {
        property: Property::PaddingInert,
        applies: |knobs, _| knobs.get(&RELEASED),
        reason: "SPEC-cos 3.1: the released code cuts the mask into contiguous blocks and applies it to strided groups (token mismatch).",
    }],
    idle: &[],
    in_models: InModels::PLAIN,
    validate,
    needs: |_| Needs::default(),
    cost,
    pattern: |knobs, shape| {
        Some(if knobs.get(&RELEASED) {
            strided(shape.queries, knobs.get(&BLOCK))
        } else {
            pattern(shape.queries, knobs.get(&BLOCK), shape.causal)
        })
    },
    build,
};

fn validate(knobs: &Knobs, shape: &Shape) -> std::result::Result<(), String> {
    if knobs.get(&RELEASED) && shape.causal {
        return Err(
            "local:compat=lra has no causal form (the released one does not run); use local:layout=blocks"
                .into(),
        );
    }
    Ok(())
}

/// Multiply-adds 2 B H up(N, block) block D.
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let block = knobs.get(&BLOCK);
    let macs = 2 * shape.heads * shape.queries.next_multiple_of(block) * block * shape.head_dim;
    let kept = if shape.causal { shape.keys.min(block) } else { 0 };
    Cost {
        core_macs: (shape.batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * 2 * shape.heads * shape.head_dim * kept) as u64,
    }
}

fn pattern(len: usize, block: usize, causal: bool) -> Pattern {
    let rule = if causal { Rule::CAUSAL } else { Rule::All };
    let group = |start: usize| {
        let span = Span::range(start, (start + block).min(len));
        QueryGroup { queries: span, keys: vec![KeySpan { span, rule }] }
    };
    Pattern::shared(len, len, 0, 0, (0..len).step_by(block).map(group).collect())
}

/// Number of groups of the released code, which always appends at least one token.
fn groups(len: usize, block: usize) -> usize {
    len / block + 1
}

/// The groups of the released code, without its appended tokens.
fn strided(len: usize, block: usize) -> Pattern {
    let step = groups(len, block);
    let group = |start: usize| {
        let span = Span { start, len: (len - start).div_ceil(step), step };
        QueryGroup { queries: span, keys: vec![KeySpan { span, rule: Rule::All }] }
    };
    Pattern::shared(len, len, 0, 0, (0..step.min(len)).map(group).collect())
}

struct Local {
    block: usize,
    released: bool,
    causal: bool,
    head_dim: usize,
}

fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, causal, head_dim, .. } = config;
    Ok(Box::new(Local {
        block: knobs.get(&BLOCK),
        released: knobs.get(&RELEASED),
        causal: *causal,
        head_dim: *head_dim,
    }))
}

impl Mechanism for Local {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        if self.released {
            return Ok(Heads::Split(self.released_code(input)?).into());
        }
        let pattern = pattern(input.lengths()?.0, self.block, self.causal);
        Ok(attend(input.qkv, &input.over(&pattern, self.head_dim))?.into())
    }
}

impl Local {
    /// Token s nb + u is slot s of group u; slot s of group u carries mask entry u block + s.
    fn released_code(&self, input: &AttentionInput) -> Result<Tensor> {
        let (b, h, n, d) = input.qkv.q()?.dims4()?;
        let (groups, block) = (groups(n, self.block), self.block);
        let added = groups * block - n;
        let group = |x: Tensor| {
            let x = x.pad_with_zeros(2, 0, added)?.reshape((b, h, block, groups, d))?;
            x.transpose(2, 3)?.contiguous()?.reshape((b * h * groups, block, d))
        };
        let (q, k, v) = (group(input.qkv.q()?)?, group(input.qkv.k()?)?, group(input.qkv.v()?)?);
        let logits = (q.matmul(&k.transpose(1, 2)?)? * (1.0 / (d as f64).sqrt()))?;
        let logits = match input.mask {
            Some(mask) => {
                let ones = Tensor::ones((b, added), mask.dtype(), mask.device())?;
                let slots = Tensor::cat(&[mask, &ones], 1)?.reshape((b, 1, groups, block))?;
                let slots = slots.broadcast_as((b, h, groups, block))?.reshape((b * h * groups, block))?;
                released_mask(&logits, &slots)?
            }
            None => logits,
        };
        let weights = AttentionDropout::composed(input.dropout, softmax(&logits)?)?;
        let out = weights.matmul(&v)?.reshape((b, h, groups, block, d))?;
        out.transpose(2, 3)?.contiguous()?.reshape((b, h, groups * block, d))?.narrow(2, 0, n)
    }
}

/// Hides pairs of which either side is masked. In a row that sees nothing the released code's -1e10 swallows
/// the logits in f32, so it is uniform, while gradients still reach the logits.
fn released_mask(logits: &Tensor, slots: &Tensor) -> Result<Tensor> {
    let shape = logits.shape();
    let hidden = Tensor::new(-1e30f32, logits.device())?.to_dtype(logits.dtype())?.broadcast_as(shape)?;
    let keys = slots.unsqueeze(1)?.broadcast_as(shape)?.ne(0f64)?;
    let queries = slots.unsqueeze(D::Minus1)?.broadcast_as(shape)?.ne(0f64)?;
    let swallowed = (logits - logits.detach())?;
    queries.where_cond(&keys.where_cond(logits, &hidden)?, &swallowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_see_themselves() {
        for (len, block) in [(1, 4), (2, 1), (7, 3), (64, 16), (50, 64)] {
            for causal in [false, true] {
                let pattern = pattern(len, block, causal);
                for i in 0..len {
                    let expected: Vec<usize> =
                        (0..len).filter(|&j| i / block == j / block && (!causal || j <= i)).collect();
                    assert_eq!(pattern.visible(0, i), expected);
                }
            }
        }
    }

    #[test]
    fn released_groups_are_strided() {
        let pattern = strided(10, 4); // 12 tokens in 3 groups of 4
        assert_eq!(pattern.visible(0, 1), [1, 4, 7]);
        assert_eq!(pattern.visible(0, 9), [0, 3, 6, 9]);
    }
}
