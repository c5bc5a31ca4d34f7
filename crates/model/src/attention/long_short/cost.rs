//! Cost of the family: SPEC-ls sections 3 to 7 (multiply-adds); FLOPs as Transformer-LS Table 1 counts them.

use crate::attention::{Cost, Shape};

/// How slots come about, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotProjection {
    /// Dynamic, the whole sequence at once.
    Whole {
        /// Slots.
        rank: usize,
    },
    /// Dynamic, every segment for itself.
    Segments {
        /// Slots per segment.
        rank: usize,
        /// Length of a segment.
        segment: usize,
    },
    /// A matrix of parameters.
    Learned {
        /// Slots.
        k: usize,
    },
}

impl SlotProjection {
    /// Number of slots for `keys` positions.
    pub fn slots(&self, keys: usize) -> usize {
        match self {
            Self::Whole { rank } => *rank,
            Self::Segments { rank, segment } => keys.div_ceil(*segment) * rank,
            Self::Learned { k } => *k,
        }
    }

    /// Number of segments, their length, slots per segment; for the causal form.
    pub fn segments(&self, keys: usize) -> Option<(usize, usize, usize)> {
        match self {
            Self::Segments { rank, segment } => Some((keys.div_ceil(*segment), *segment, *rank)),
            Self::Whole { .. } | Self::Learned { .. } => None,
        }
    }
}

/// What a variant computes besides the projection of its slots.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// Window, 0: none.
    pub window: usize,
    /// DualLN.
    pub dual_ln: bool,
    /// Whether keys and values go through LN_local at all.
    pub local_norm: bool,
    /// Relative positions.
    pub rel_pos: bool,
}

/// Multiply-adds and FLOPs (LayerNorm 5 per element) of one call; no decoder state.
pub fn cost(projection: SlotProjection, extras: Extras, shape: &Shape) -> Cost {
    let Shape { batch, heads: h, head_dim: d, width, queries: n, keys: t, causal, cls, .. } = *shape;
    let (e, slots, w) = (h * d, projection.slots(t), extras.window);
    let project = match projection {
        SlotProjection::Whole { rank } => t * width * h * rank + 2 * h * rank * t * d,
        SlotProjection::Segments { rank, segment } => {
            let padded = t.next_multiple_of(segment);
            padded * width * h * rank + 2 * h * rank * padded * d
        }
        SlotProjection::Learned { k } => 2 * h * k * t * d,
    };
    let span = if causal { 2 * w } else { w + 2 * (w / 2).max(1) };
    let window = if w == 0 { 0 } else { 2 * h * n.next_multiple_of(w) * span * d };
    let class = if cls { 2 * h * n * d + 2 * h * (n + 1) * d } else { 0 };
    let per_sample = project + 2 * h * n * slots * d + window + class;
    let per_sample = per_sample + if extras.rel_pos { h * n * (w + slots) * d } else { 0 };
    let tables = if extras.rel_pos { (w + slots) * e * e } else { 0 };
    let local = if extras.dual_ln && extras.local_norm { 2 * 5 * t * e } else { 0 };
    let global = if extras.dual_ln { 2 * 5 * (slots + usize::from(cls)) * e } else { 0 };
    // The published count leaves out the class token's product with its own value (an elementwise scaling).
    let unscaled = if cls { e } else { 0 };
    Cost {
        core_macs: (batch * per_sample + tables) as u64,
        flops: (per_sample + tables + local + global - unscaled) as u64,
        state_bytes: 0,
    }
}

/// Bytes of a causal decoder with window `w` and `rank` slots per segment (f32): keys and values of the window
/// and of the finished slots, and the open segment's running sums (keys, values, weight, maximum).
pub fn decoder_state(w: usize, rank: usize, segment: usize, shape: &Shape) -> u64 {
    let e = shape.heads * shape.head_dim;
    let slots = shape.keys / segment.max(1) * rank;
    (4 * (2 * e * (w.min(shape.keys) + slots) + rank * (2 * e + 2 * shape.heads))) as u64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::attention::knobs::Knobs;
    use crate::attention::{MechanismEntry, Shape, dp, ls};

    const D: u64 = 64;
    const F: u64 = 128;

    /// A whole `ls-lra` model (2 layers, width 64, 2 heads, class token in the last layer), as the paper counts.
    fn model(entry: &MechanismEntry, knobs: serde_json::Value, n: u64, classes: u64, towers: u64) -> u64 {
        let serde_json::Value::Object(knobs) = knobs else { panic!("knobs are an object") };
        let knobs = Knobs::from_json(entry.name, entry.knobs, &knobs).unwrap();
        let core = |cls| {
            let n = n as usize;
            let shape = Shape {
                batch: 1,
                heads: 2,
                head_dim: 32,
                width: 64,
                queries: n,
                keys: n,
                causal: false,
                cls,
                grid: None,
            };
            (entry.cost)(&knobs, &shape).flops
        };
        let layer =
            |norm1: u64, rest: u64| 5 * norm1 * D + 5 * rest * D + 4 * rest * D * D + 2 * rest * D * F;
        let tower = layer(n, n) + core(false) + layer(n, n + 1) + core(true) + 5 * D;
        let head = if towers == 2 { 4 * D * F + F * classes } else { D * F + F * classes };
        towers * tower + head
    }

    #[test]
    fn flops_of_table_1_come_out_exactly() {
        let ls = |w: u64, r: u64, n, classes, towers| {
            model(&ls::ENTRY, json!({"w": w, "r": r}), n, classes, towers)
        };
        assert_eq!(ls(8, 32, 2048, 10, 1), 198_789_696);
        assert_eq!(ls(8, 32, 4096, 2, 1), 397_493_824);
        assert_eq!(ls(8, 32, 4096, 2, 2), 795_003_776);
        assert_eq!(ls(16, 2, 2048, 10, 1), 159_953_984);
        assert_eq!(ls(1, 1, 4096, 2, 1), 286_305_088);
        assert_eq!(ls(1, 254, 4096, 2, 2), 2_165_012_352);
        let dp = |r: u64, n, classes, towers| {
            model(&dp::ENTRY, json!({"r": r, "dual_ln": true}), n, classes, towers)
        };
        assert_eq!(dp(4, 2048, 10, 1), 146_325_056);
        assert_eq!(dp(128, 4096, 2, 1), 682_829_376);
        assert_eq!(dp(256, 4096, 2, 2), 2_171_308_928);
    }
}
