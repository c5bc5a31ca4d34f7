//! Longformer: a sliding window and global positions (SPEC-cos 3.2).
//!
//! A query i outside of the global set G sees keys i - left <= j <= i + right and those of G. A query in G sees
//! every key, through projections of its own if `separate_global`. Causal adds j <= i to both.

use candle_core::Result;

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, Idle, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::attend;
use effattn_kernel::heads::Heads;
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};

const LEFT: Knob<usize> = Knob::int("left", 255, 0..=1 << 24)
    .doc("keys seen to the left")
    .source("Long Range Arena, sliding_window_size 512");
const RIGHT: Knob<usize> = Knob::int("right", 256, 0..=1 << 24)
    .doc("keys seen to the right")
    .source("Long Range Arena, sliding_window_size 512");
const GLOBAL: Knob<Vec<usize>> = Knob::list("global", &[0])
    .doc("global positions; those beyond the end of a sequence are ignored")
    .source("Longformer sec. 3.1: the classification token");
const SEPARATE_GLOBAL: Knob<bool> = Knob::bool("separate_global", true)
    .doc("whether global queries use separate projections")
    .source("Longformer sec. 3.1");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "longformer",
    title: "Longformer",
    paper: Paper {
        authors: "Beltagy et al.",
        title: "Longformer: The Long-Document Transformer",
        year: 2020,
        locator: "arXiv:2004.05150",
    },
    support: Support { bidirectional: true, causal: true, dropout: true, ..Support::NONE },
    knobs: &[LEFT.spec(), RIGHT.spec(), GLOBAL.spec(), SEPARATE_GLOBAL.spec()],
    complexity: "O(n (left + right + |G|) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over unpadded keys j with
  i - left <= j <= i + right or j in G    if i is not in G,
  any j                                   if i is in G, with q_global, k_global, v_global if separate_global;
causal: and j <= i.",
    deviations: &[
        "In Long Range Arena no configuration sets a global position: its Longformer results use the window alone (global empty). The published mechanism and the Hugging Face code have the classification token global, which is the default here.",
        "Long Range Arena's sliding_window_size W means floor(W / 2) to the right and W - floor(W / 2) - 1 to the left; its docstring claims the opposite.",
        "A causal global first token is degenerate: it sees only itself.",
    ],
    exceptions: &[],
    idle: &[
        Idle {
            knob: SEPARATE_GLOBAL.name(),
            when: |knobs, _| knobs.get(&GLOBAL).is_empty(),
            why: "without global positions",
        },
        Idle { knob: RIGHT.name(), when: |_, shape| shape.causal, why: "in the causal form" },
    ],
    in_models: InModels { fits_full_weights: true, ..InModels::PLAIN },
    validate: |_, _| Ok(()),
    needs: |knobs| Needs { global: separate(knobs), ..Needs::default() },
    cost,
    pattern: |knobs, shape| {
        let globals = globals(knobs, shape.queries);
        let mut pattern = local(shape.queries, Band::new(knobs, shape.causal), &globals);
        pattern.heads[0].extend(global_groups(shape.queries, &globals, shape.causal));
        Some(pattern)
    },
    build,
};

/// Whether there are global queries with projections of their own.
fn separate(knobs: &Knobs) -> bool {
    knobs.get(&SEPARATE_GLOBAL) && !knobs.get(&GLOBAL).is_empty()
}

/// Multiply-adds 2 B H D N (left + right + 1 + 2 |G|).
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let global = knobs.get(&GLOBAL).len();
    let (left, right) = (knobs.get(&LEFT), knobs.get(&RIGHT));
    let seen = left + right + 1 + 2 * global;
    let macs = 2 * shape.heads * shape.head_dim * shape.queries * seen;
    let kept = if shape.causal { shape.keys.min(left + 1 + global) } else { 0 };
    Cost {
        core_macs: (shape.batch * macs) as u64,
        flops: macs as u64,
        state_bytes: (4 * 2 * shape.heads * shape.head_dim * kept) as u64,
    }
}

/// The sliding window of one variant.
#[derive(Clone, Copy)]
struct Band {
    left: usize,
    right: usize,
    causal: bool,
}

impl Band {
    fn new(knobs: &Knobs, causal: bool) -> Self {
        let right = if causal { 0 } else { knobs.get(&RIGHT) };
        Self { left: knobs.get(&LEFT), right, causal }
    }
}

/// Global positions below `len`, sorted, each once.
fn globals(knobs: &Knobs, len: usize) -> Vec<usize> {
    let mut global = knobs.get(&GLOBAL);
    global.retain(|&position| position < len);
    global.sort_unstable();
    global.dedup();
    global
}

/// `start..end` without the positions of `holes` (sorted), as ranges.
fn without(start: usize, end: usize, holes: &[usize]) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut from = start;
    for &hole in holes.iter().filter(|&&hole| hole >= start && hole < end) {
        spans.push(Span::range(from, hole));
        from = hole + 1;
    }
    spans.push(Span::range(from, end));
    spans.retain(|span| span.len > 0);
    spans
}

/// Queries outside of the global set.
fn local(len: usize, band: Band, globals: &[usize]) -> Pattern {
    let Band { left, right, causal } = band;
    let rule = Rule::Band { left: Some(left), right: Some(right), skip: None };
    let everywhere = if causal { Rule::CAUSAL } else { Rule::All };
    // Tiles about as long as the window waste at most half of their candidates.
    let tile = (left + right + 1).clamp(16, 512);
    let group = |queries: Span| {
        let end = queries.start + queries.len;
        let seen = without(queries.start.saturating_sub(left), (end + right).min(len), globals);
        let global = globals.iter().filter(|&&position| !causal || position < end);
        let global = global.map(|&j| KeySpan { span: Span::range(j, j + 1), rule: everywhere });
        QueryGroup {
            queries,
            keys: global.chain(seen.into_iter().map(|span| KeySpan { span, rule })).collect(),
        }
    };
    let tiles = (0..len).step_by(tile).flat_map(|start| without(start, (start + tile).min(len), globals));
    Pattern::shared(len, len, 0, 0, tiles.map(group).collect())
}

/// Global queries, which see everything.
fn global_groups(len: usize, globals: &[usize], causal: bool) -> Vec<QueryGroup> {
    let rule = if causal { Rule::CAUSAL } else { Rule::All };
    let all = KeySpan { span: Span::range(0, len), rule };
    globals.iter().map(|&i| QueryGroup { queries: Span::range(i, i + 1), keys: vec![all] }).collect()
}

struct Longformer {
    knobs: Knobs,
    band: Band,
    separate: bool,
    head_dim: usize,
}

fn build(config: &MechanismConfig, _: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    Ok(Box::new(Longformer {
        knobs: config.knobs.clone(),
        band: Band::new(&config.knobs, config.causal),
        separate: separate(&config.knobs),
        head_dim: config.head_dim,
    }))
}

impl Mechanism for Longformer {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let (len, _) = input.lengths()?;
        let globals = globals(&self.knobs, len);
        let mut pattern = local(len, self.band, &globals);
        let global_groups = global_groups(len, &globals, self.band.causal);
        if !self.separate {
            pattern.heads[0].extend(global_groups);
            return Ok(attend(input.qkv, &input.over(&pattern, self.head_dim))?.into());
        }
        let local = attend(input.qkv, &input.over(&pattern, self.head_dim))?;
        let Some(projections) = input.global else {
            candle_core::bail!(
                "longformer with separate_global was given no projections for global positions"
            );
        };
        // Rows of queries in no group are 0, so the two results complement each other.
        let pattern = Pattern::shared(len, len, 0, 0, global_groups);
        let global = attend(projections, &input.over(&pattern, self.head_dim))?;
        Ok(match (&local, &global) {
            (Heads::Merged { rows: local, heads }, Heads::Merged { rows: global, .. }) => {
                Heads::Merged { rows: (local + global)?, heads: *heads }
            }
            _ => Heads::Split((local.split()? + global.split()?)?),
        }
        .into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_follows_its_definition() {
        let cases: [(usize, usize, usize, &[usize]); 6] = [
            (1, 0, 0, &[0]),
            (2, 1, 3, &[]),
            (50, 5, 5, &[30, 0, 1, 0, 99]),
            (67, 0, 0, &[66]),
            (41, 100, 2, &[7]),
            (300, 16, 3, &[0, 150]),
        ];
        for (len, left, right, global) in cases {
            for causal in [false, true] {
                let mut globals: Vec<usize> = global.iter().copied().filter(|&g| g < len).collect();
                globals.sort_unstable();
                globals.dedup();
                let band = Band { left, right: if causal { 0 } else { right }, causal };
                let mut pattern = local(len, band, &globals);
                pattern.heads[0].extend(global_groups(len, &globals, causal));
                for i in 0..len {
                    let sees = |j: usize| {
                        let near = j + left >= i && j <= i + right;
                        (near || globals.contains(&i) || globals.contains(&j)) && (!causal || j <= i)
                    };
                    let expected: Vec<usize> = (0..len).filter(|&j| sees(j)).collect();
                    let mut visible = pattern.visible(0, i);
                    visible.sort_unstable();
                    assert_eq!(visible, expected, "{len} {left} {right} {global:?} {causal} {i}");
                }
            }
        }
    }
}
