//! Sparse Transformer (SPEC-cos 3.4): the union of a local and a long-range pattern in every head.
//!
//! fixed: floor(i / block) = floor(j / block), or j mod block = 0, or j mod block >= block - c.
//! strided: |i - j| < local, or (i - j) mod stride = 0. Causal adds j <= i. With `cls` position 0 sees and is
//! seen by all, and the pattern acts on i - 1, j - 1.

use candle_core::Result;

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Property, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::attend;
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};

const STRIDED: Knob<bool> = Knob::words("pattern", &[("fixed", false), ("strided", true)])
    .doc("which of the paper's two patterns")
    .source("Long Range Arena, train_utils.py");
const BLOCK: Knob<usize> = Knob::int("block", 50, 1..=1 << 24)
    .doc("fixed: block length l")
    .source("Long Range Arena, train_utils.py");
const C: Knob<usize> = Knob::int("c", 10, 0..=1 << 24)
    .doc("fixed: summary columns at the end of every block")
    .source("Long Range Arena, train_utils.py");
const LOCAL: Knob<usize> = Knob::int("local", 50, 1..=1 << 24)
    .doc("strided: distances below this are visible")
    .source("Sparse Transformer sec. 4.2: as long as the stride");
const STRIDE: Knob<usize> = Knob::int("stride", 50, 1..=1 << 24)
    .doc("strided: distances that are multiples of this are visible")
    .source("as long as the fixed pattern's blocks");
const CLS: Knob<bool> = Knob::bool("cls", false)
    .doc("whether position 0 is a class token that sees and is seen by all")
    .source("Long Range Arena: set when the pooling is CLS");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "sparse",
    title: "Sparse Transformer",
    paper: Paper {
        authors: "Child et al.",
        title: "Generating Long Sequences with Sparse Transformers",
        year: 2019,
        locator: "arXiv:1904.10509",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: &[STRIDED.spec(), BLOCK.spec(), C.spec(), LOCAL.spec(), STRIDE.spec(), CLS.spec()],
    complexity: "O(n^2 d / block) at a fixed block; O(n sqrt(n) d) at block ~ sqrt(n)",
    time: Growth::Quadratic,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over visible, unpadded keys j:
  fixed:    floor(i / block) = floor(j / block), or j mod block = 0, or j mod block >= block - c;
  strided:  |i - j| < local, or (i - j) mod stride = 0;
causal: and j <= i. With cls, position 0 sees and is seen by all and the pattern acts on i - 1, j - 1.",
    deviations: &[
        "The paper's fixed summary columns are j mod l >= l - c only; Long Range Arena adds j mod l = 0, which is followed.",
        "Long Range Arena is always causal; the bidirectional form is an extension: the same set without j <= i.",
    ],
    exceptions: &[Exception {
        property: Property::IgnoresFuture,
        applies: |knobs, _| knobs.get(&CLS),
        reason: "SPEC-cos 3.4: with cls, position 0 sees all, even when causal",
    }],
    idle: &[
        Idle { knob: BLOCK.name(), when: |knobs, _| knobs.get(&STRIDED), why: "with pattern=strided" },
        Idle { knob: C.name(), when: |knobs, _| knobs.get(&STRIDED), why: "with pattern=strided" },
        Idle { knob: LOCAL.name(), when: |knobs, _| !knobs.get(&STRIDED), why: "with pattern=fixed" },
        Idle { knob: STRIDE.name(), when: |knobs, _| !knobs.get(&STRIDED), why: "with pattern=fixed" },
    ],
    in_models: InModels::PLAIN,
    validate: |knobs, _| match (knobs.get(&C), knobs.get(&BLOCK)) {
        (c, block) if c > block => {
            Err(format!("sparse: c={c} summary columns do not fit a block of {block}; c is at most block"))
        }
        _ => Ok(()),
    },
    needs: |_| Needs::default(),
    cost,
    pattern: |knobs, shape| Some(pattern(Kinds::new(knobs), knobs.get(&CLS), shape.queries, shape.causal)),
    build,
};

/// Multiply-adds 2 B H D times the number of visible pairs.
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let pairs = pairs(Kinds::new(knobs), knobs.get(&CLS), shape.queries, shape.causal);
    let macs = 2 * shape.heads * shape.head_dim * pairs;
    let kept = if shape.causal { shape.keys } else { 0 };
    Cost {
        core_macs: (shape.batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * 2 * shape.heads * shape.head_dim * kept) as u64,
    }
}

/// Which keys the queries behind the class token see.
#[derive(Clone, Copy)]
enum Kinds {
    Fixed { block: usize, c: usize },
    Strided { local: usize, stride: usize },
}

/// Queries of one residue class that share their candidates; more of them widen the range that covers all
/// their neighbourhoods.
const CLASS_TILE: usize = 16;

impl Kinds {
    fn new(knobs: &Knobs) -> Self {
        if knobs.get(&STRIDED) {
            Self::Strided { local: knobs.get(&LOCAL), stride: knobs.get(&STRIDE) }
        } else {
            Self::Fixed { block: knobs.get(&BLOCK), c: knobs.get(&C) }
        }
    }

    /// The groups of positions `first..len`, the pattern starting at `first`.
    fn groups(self, first: usize, len: usize, causal: bool) -> Vec<QueryGroup> {
        match self {
            Self::Fixed { block, c } => {
                (first..len).step_by(block).map(|start| fixed(first, start, len, block, c, causal)).collect()
            }
            Self::Strided { local, stride } => {
                let classes = (first..len.min(first + stride)).flat_map(|start| {
                    let class = Span { start, len: (len - start).div_ceil(stride), step: stride };
                    (0..class.len).step_by(CLASS_TILE).map(move |at| (class, at))
                });
                classes.map(|(class, at)| strided(first, class, at, len, local, causal)).collect()
            }
        }
    }
}

/// One block of the fixed pattern: itself and the summary columns of the other blocks.
fn fixed(first: usize, start: usize, len: usize, block: usize, c: usize, causal: bool) -> QueryGroup {
    let queries = Span::range(start, (start + block).min(len));
    let own = KeySpan { span: queries, rule: if causal { Rule::CAUSAL } else { Rule::All } };
    let next = start + block;
    let columns = (0..block).filter(|&column| column == 0 || column + c >= block);
    let others = columns.flat_map(|column| {
        let before = Span { start: first + column, len: (start - first) / block, step: block };
        let rest = if causal { 0 } else { len.saturating_sub(next + column).div_ceil(block) };
        [before, Span { start: next + column, len: rest, step: block }]
    });
    let others = others.filter(|span| span.len > 0).map(|span| KeySpan { span, rule: Rule::All });
    QueryGroup { queries, keys: std::iter::once(own).chain(others).collect() }
}

/// Queries `at..` of a residue class: their class, and their neighbourhoods without it.
fn strided(first: usize, class: Span, at: usize, len: usize, local: usize, causal: bool) -> QueryGroup {
    let queries = Span { start: class.at(at), len: (class.len - at).min(CLASS_TILE), step: class.step };
    let last = queries.at(queries.len - 1);
    let reach = local - 1;
    let right = if causal { 0 } else { reach };
    let near = Span::range(queries.start.saturating_sub(reach).max(first), (last + right + 1).min(len));
    let band = Rule::Band { left: Some(reach), right: Some(right), skip: Some(class.step) };
    let rule = if causal { Rule::CAUSAL } else { Rule::All };
    QueryGroup { queries, keys: vec![KeySpan { span: class, rule }, KeySpan { span: near, rule: band }] }
}

fn pattern(kinds: Kinds, cls: bool, len: usize, causal: bool) -> Pattern {
    let first = usize::from(cls && len > 0);
    let mut groups = kinds.groups(first, len, causal);
    if first == 1 {
        let token = KeySpan { span: Span::range(0, 1), rule: Rule::All };
        for group in &mut groups {
            group.keys.push(token);
        }
        let all = KeySpan { span: Span::range(0, len), rule: Rule::All };
        groups.push(QueryGroup { queries: Span::range(0, 1), keys: vec![all] });
    }
    Pattern::shared(len, len, 0, 0, groups)
}

/// Visible pairs of [`pattern`], counted without making it: works for lengths whose pattern would not fit in memory.
fn pairs(kinds: Kinds, cls: bool, len: usize, causal: bool) -> usize {
    let first = usize::from(cls && len > 0);
    let n = len - first;
    let token = if first == 1 { n + len } else { 0 };
    let seen = match kinds {
        Kinds::Fixed { block, c } => {
            let block = block.min(n).max(1);
            let (blocks, rest) = (n / block, n % block);
            // summary columns of a whole block, and of the one that is cut off
            let columns = if c >= block { block } else { c + 1 };
            let cut = if rest == 0 { 0 } else { 1 + rest.saturating_sub(block.saturating_sub(c).max(1)) };
            if causal {
                let own = blocks * (block * (block + 1) / 2) + rest * (rest + 1) / 2;
                let before = blocks * blocks.saturating_sub(1) / 2 * columns;
                own + block * before + rest * blocks * columns
            } else {
                let all = blocks * columns + cut;
                let others = blocks * block * all.saturating_sub(columns) + rest * (all - cut);
                blocks * block * block + rest * rest + others
            }
        }
        Kinds::Strided { local, stride } => {
            // n - d pairs are d apart: all below `local`, behind them the multiples of the stride
            let near = local.min(n);
            let (from, to) = (near.div_ceil(stride), n.div_ceil(stride));
            let sum = |from: usize, to: usize| (from + to).saturating_sub(1) * (to - from) / 2;
            let below = near * n - sum(0, near) + (to - from) * n - stride * sum(from, to);
            if causal { below } else { (2 * below).saturating_sub(n) }
        }
    };
    seen + token
}

struct Sparse {
    kinds: Kinds,
    cls: bool,
    causal: bool,
    head_dim: usize,
}

fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let MechanismConfig { knobs, causal, head_dim, .. } = config;
    let (causal, head_dim) = (*causal, *head_dim);
    Ok(Box::new(Sparse { kinds: Kinds::new(knobs), cls: knobs.get(&CLS), causal, head_dim }))
}

impl Mechanism for Sparse {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let pattern = pattern(self.kinds, self.cls, input.lengths()?.0, self.causal);
        Ok(attend(input.qkv, &input.over(&pattern, self.head_dim))?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(kinds: Kinds, cls: bool, causal: bool, i: usize, j: usize) -> bool {
        if cls && (i == 0 || j == 0) {
            return true;
        }
        let (i, j) = if cls { (i - 1, j - 1) } else { (i, j) };
        let base = match kinds {
            Kinds::Fixed { block, c } => i / block == j / block || j % block == 0 || j % block + c >= block,
            Kinds::Strided { local, stride } => i.abs_diff(j) < local || i.abs_diff(j).is_multiple_of(stride),
        };
        base && (!causal || j <= i)
    }

    #[test]
    fn pairs_of_lengths_that_nobody_lists_are_counted() {
        let n = 1 << 22;
        let most = usize::MAX;
        for kinds in [Kinds::Fixed { block: most, c: most }, Kinds::Strided { local: most, stride: most }] {
            assert_eq!(pairs(kinds, false, n, false), n * n);
            assert_eq!(pairs(kinds, false, n, true), n * (n + 1) / 2);
            assert_eq!(pairs(kinds, true, 0, false), 0);
        }
        assert_eq!(pairs(Kinds::Strided { local: 1, stride: 2 }, false, n, false), n * n / 2);
    }

    #[test]
    fn the_pattern_follows_its_definition() {
        let fixed = [(1, 0), (1, 1), (3, 1), (10, 2), (50, 10), (4, 4)];
        let strided = [(1, 1), (6, 9), (8, 8), (5, 2), (1, 7)];
        let fixed = fixed.map(|(block, c)| Kinds::Fixed { block, c });
        let strided = strided.map(|(local, stride)| Kinds::Strided { local, stride });
        for kinds in fixed.into_iter().chain(strided) {
            for (len, cls, causal) in [1, 2, 23, 51, 160]
                .into_iter()
                .flat_map(|n| [(n, false, false), (n, true, false), (n, false, true), (n, true, true)])
            {
                let pattern = pattern(kinds, cls, len, causal);
                let mut pairs = 0;
                for i in 0..len {
                    let expected: Vec<usize> = (0..len).filter(|&j| sees(kinds, cls, causal, i, j)).collect();
                    let mut visible = pattern.visible(0, i);
                    visible.sort_unstable();
                    assert_eq!(visible, expected, "{len} {cls} {causal} {i}");
                    pairs += expected.len();
                }
                assert_eq!((pattern.pairs(0), super::pairs(kinds, cls, len, causal)), (pairs, pairs));
            }
        }
    }
}
