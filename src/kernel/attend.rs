//! Pattern softmax attention: `out_i = sum_j softmax_j(logit_ij) v_j` over the pairs of a [`Pattern`].
//!
//! No score matrix is stored by the fused kernel; the twin gathers the candidate keys of equally sized
//! groups and masks them.

use candle_core::{D, Result, Tensor, bail};

use super::heads::{Heads, Qkv};
use crate::pattern::{Group, Pattern};

/// What one call needs besides queries, keys and values.
pub struct Attend<'a> {
    /// Who sees whom.
    pub pattern: &'a Pattern,
    /// [b, keys + slots], 1 keep, 0 hidden; absent keeps all.
    pub mask: Option<&'a Tensor>,
    /// Factor on every logit.
    pub scale: f64,
    /// Keys and values of the slots, [b, h, slots, d] or packed rows `[k | v]`.
    pub slots: Option<&'a Qkv>,
    /// Position-dependent logits.
    pub relative: Option<&'a Relative>,
}

/// Relative position terms (Transformer-XL sec. 3.3; Transformer-LS autoregressive code).
///
/// key logit = scale ((q + u) . k_j + (q + v) . table[t - j]);
/// slot logit = scale (q . (k_e + slot_table[floor(t / segment) rank - 1 - e])).
pub struct Relative {
    /// [h, distances, d]: one row per distance t - j >= 0.
    pub table: Tensor,
    /// u, [h, d].
    pub content_bias: Tensor,
    /// v, [h, d].
    pub position_bias: Tensor,
    /// One row per slot distance, [h, distances, d].
    pub slots: Option<SlotTable>,
}

/// Relative positions of slots.
pub struct SlotTable {
    /// [h, distances, d].
    pub table: Tensor,
    /// Length of a segment.
    pub segment: usize,
    /// Slots per segment.
    pub rank: usize,
}

/// Softmax attention over the visible pairs. A query that sees no key gives 0 and passes no gradient.
///
/// # Errors
/// Shapes that do not fit the pattern.
pub fn attend(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    composed(qkv, call)
}

/// The definition in plain candle operations: groups of similar size are gathered and masked together.
///
/// # Errors
/// Shapes that do not fit the pattern.
pub fn composed(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let operands = Operands::new(qkv, call)?;
    let heads = call.pattern.heads.len();
    if heads == 1 {
        return Ok(Heads::Split(attend_groups(&operands, call, call.pattern.groups(0))?));
    }
    let per_head = (0..heads)
        .map(|head| attend_groups(&operands.head(head)?, call, call.pattern.groups(head)))
        .collect::<Result<Vec<_>>>()?;
    Ok(Heads::Split(Tensor::cat(&per_head, 1)?))
}

/// Queries, keys (slots behind them) and values, contiguous, and logits that only need gathering.
struct Operands {
    q: Tensor,                     // [b, h, n, d]
    k: Tensor,                     // [b, h, t + s, d]
    v: Tensor,                     // [b, h, t + s, d]
    content: Option<Tensor>,       // [b, h, t + s]: u . k, 0 for slots
    distance: Option<Tensor>,      // [b, h, n, distances]: (q + v) . table
    slot_distance: Option<Tensor>, // [b, h, n, distances]: q . slot_table
}

impl Operands {
    fn new(qkv: &Qkv, call: &Attend) -> Result<Self> {
        let (q, mut k, mut v) = (qkv.q()?.contiguous()?, qkv.k()?.contiguous()?, qkv.v()?.contiguous()?);
        let (b, h, n, d) = q.dims4()?;
        let pattern = call.pattern;
        let slots = if let Some(slots) = call.slots { slots.k()?.dim(2)? } else { 0 };
        if (n, k.dim(2)?, slots) != (pattern.queries, pattern.keys, pattern.slots) {
            bail!("pattern of {pattern:?} does not fit {n} queries, {} keys, {slots} slots", k.dim(2)?);
        }
        let mut content = None;
        let (mut distance, mut slot_distance) = (None, None);
        if let Some(relative) = call.relative {
            let bias = |bias: &Tensor| bias.reshape((1, h, 1, d));
            let rows = |q: &Tensor, table: &Tensor| {
                let table = table.transpose(1, 2)?.unsqueeze(0)?; // [1, h, d, distances]
                q.matmul(&table.broadcast_left(b)?.squeeze(1)?.contiguous()?)
            };
            let keys = k.broadcast_mul(&bias(&relative.content_bias)?)?.sum(3)?; // [b, h, t]
            content = Some(keys.pad_with_zeros(2, 0, slots)?);
            distance = Some(rows(&q.broadcast_add(&bias(&relative.position_bias)?)?, &relative.table)?);
            if let Some(slots) = &relative.slots {
                slot_distance = Some(rows(&q, &slots.table)?);
            }
        }
        if let Some(slots) = call.slots {
            k = Tensor::cat(&[k, slots.k()?.contiguous()?], 2)?;
            v = Tensor::cat(&[v, slots.v()?.contiguous()?], 2)?;
        }
        Ok(Self { q, k, v, content, distance, slot_distance })
    }

    fn head(&self, head: usize) -> Result<Self> {
        let one = |x: &Tensor| x.narrow(1, head, 1)?.contiguous();
        let maybe = |x: &Option<Tensor>| x.as_ref().map(one).transpose();
        Ok(Self {
            q: one(&self.q)?,
            k: one(&self.k)?,
            v: one(&self.v)?,
            content: maybe(&self.content)?,
            distance: maybe(&self.distance)?,
            slot_distance: maybe(&self.slot_distance)?,
        })
    }
}

/// Groups whose candidate lists have a similar length, padded to rectangles.
struct Bucket<'a> {
    groups: Vec<&'a Group>,
    queries: usize,
    keys: usize,
}

fn buckets(groups: &[Group]) -> Vec<Bucket<'_>> {
    let mut map = std::collections::BTreeMap::<(usize, usize), Bucket>::new();
    for group in groups {
        let keys: usize = group.keys.iter().map(|key| key.span.len).sum();
        if keys == 0 || group.queries.len == 0 {
            continue;
        }
        let size = (group.queries.len.next_power_of_two(), keys.next_power_of_two());
        let bucket = map.entry(size).or_insert(Bucket { groups: Vec::new(), queries: 0, keys: 0 });
        bucket.groups.push(group);
        bucket.queries = bucket.queries.max(group.queries.len);
        bucket.keys = bucket.keys.max(keys);
    }
    map.into_values().collect()
}

fn attend_groups(x: &Operands, call: &Attend, groups: &[Group]) -> Result<Tensor> {
    let (b, h, n, d) = x.q.dims4()?;
    let mut rows = Vec::new();
    let mut place = vec![u32::MAX; n];
    let mut next = 0u32;
    for bucket in buckets(groups) {
        for (g, group) in bucket.groups.iter().enumerate() {
            for (row, query) in group.queries.iter().enumerate() {
                place[query] = next + (g * bucket.queries + row) as u32;
            }
        }
        next += (bucket.groups.len() * bucket.queries) as u32;
        let out = attend_bucket(x, call, &bucket)?; // [b, h, G * Q, d]
        if out.dim(2)? == n && place.iter().enumerate().all(|(i, &row)| row == i as u32) {
            return Ok(out);
        }
        rows.push(out);
    }
    rows.push(Tensor::zeros((b, h, 1, d), x.q.dtype(), x.q.device())?);
    for row in &mut place {
        *row = (*row).min(next); // queries that see nothing take the row of zeros
    }
    let place = Tensor::from_vec(place, n, x.q.device())?;
    Tensor::cat(&rows, 2)?.index_select(&place, 2)
}

fn attend_bucket(x: &Operands, call: &Attend, bucket: &Bucket) -> Result<Tensor> {
    let (b, h, _, d) = x.q.dims4()?;
    let device = x.q.device();
    let index = BucketIndex::new(call, bucket);
    let (g, q, s) = (bucket.groups.len(), bucket.queries, bucket.keys);
    let tensor = |data: Vec<u32>| {
        let len = data.len();
        Tensor::from_vec(data, len, device)
    };
    let (queries, keys) = (tensor(index.queries)?, tensor(index.keys)?);
    let gather = |x: &Tensor, at: &Tensor, rows: usize, width: usize| {
        x.index_select(at, 2)?.reshape((b * h * g, rows, width))
    };
    let (qg, kg, vg) =
        (gather(&x.q, &queries, q, d)?, gather(&x.k, &keys, s, d)?, gather(&x.v, &keys, s, d)?);
    let mut logits = qg.matmul(&kg.transpose(1, 2)?)?.reshape((b, h, g, q, s))?;
    if let Some(content) = &x.content {
        logits = logits.broadcast_add(&content.index_select(&keys, 2)?.reshape((b, h, g, 1, s))?)?;
    }
    for (table, at) in [(&x.distance, index.distance), (&x.slot_distance, index.slot_distance)] {
        let Some(table) = table else { continue };
        // index `distances` is a column of zeros: pairs the term does not apply to
        let width = table.dim(3)?;
        let at = at.into_iter().map(|at| at.min(width as u32)).collect::<Vec<_>>();
        let at = Tensor::from_vec(at, (1, 1, g * q, s), device)?;
        let table = table.index_select(&queries, 2)?.pad_with_zeros(3, 0, 1)?.contiguous()?;
        let term = table.gather(&at.broadcast_as((b, h, g * q, s))?.contiguous()?, 3)?;
        logits = (logits + term.reshape((b, h, g, q, s))?)?;
    }
    let mut visible = Tensor::from_vec(index.visible, (1, 1, g, q, s), device)?;
    if let Some(mask) = call.mask {
        let total = call.pattern.keys + call.pattern.slots;
        let ones = Tensor::ones((b, total - mask.dim(1)?), mask.dtype(), device)?;
        let mask = Tensor::cat(&[mask, &ones], 1)?.index_select(&keys, 1)?;
        visible = visible.broadcast_mul(&mask.reshape((b, 1, g, 1, s))?)?;
    }
    let weights = masked_softmax(&(logits * call.scale)?, &visible)?;
    weights.reshape((b * h * g, q, s))?.matmul(&vg)?.reshape((b, h, g * q, d))
}

/// Softmax over the last dimension of the entries whose `visible` is 1; rows without any are zero.
fn masked_softmax(logits: &Tensor, visible: &Tensor) -> Result<Tensor> {
    let visible = visible.broadcast_as(logits.shape())?;
    let hidden = Tensor::full(-1e30f32, logits.shape(), logits.device())?;
    let logits = visible.ne(0f32)?.where_cond(logits, &hidden)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let weights = (logits.broadcast_sub(&max)?.exp()? * &visible)?;
    let sum = weights.sum_keepdim(D::Minus1)?;
    let empty = sum.eq(0f32)?.to_dtype(sum.dtype())?;
    weights.broadcast_div(&(sum + empty)?)
}

/// The index tables of one bucket.
struct BucketIndex {
    queries: Vec<u32>,       // [G, Q]
    keys: Vec<u32>,          // [G, S]
    visible: Vec<f32>,       // [G, Q, S]
    distance: Vec<u32>,      // [G, Q, S]; u32::MAX where it does not apply
    slot_distance: Vec<u32>, // [G, Q, S]
}

impl BucketIndex {
    fn new(call: &Attend, bucket: &Bucket) -> Self {
        let (g, q, s) = (bucket.groups.len(), bucket.queries, bucket.keys);
        let relative = call.relative.is_some();
        let slots = call.relative.and_then(|relative| relative.slots.as_ref());
        let mut index = Self {
            queries: vec![0; g * q],
            keys: vec![0; g * s],
            visible: vec![0.0; g * q * s],
            distance: if relative { vec![u32::MAX; g * q * s] } else { Vec::new() },
            slot_distance: if slots.is_some() { vec![u32::MAX; g * q * s] } else { Vec::new() },
        };
        let pattern = call.pattern;
        for (number, group) in bucket.groups.iter().enumerate() {
            for (row, query) in group.queries.iter().enumerate() {
                index.queries[number * q + row] = query as u32;
            }
            let candidates = group.keys.iter().flat_map(|key| key.span.iter().map(|j| (j, key.rule)));
            for (column, (key, rule)) in candidates.enumerate() {
                index.keys[number * s + column] = key as u32;
                for (row, query) in group.queries.iter().enumerate() {
                    let at = (number * q + row) * s + column;
                    let t = pattern.offset + query;
                    if !pattern.allows(rule, query, key) {
                        continue;
                    }
                    index.visible[at] = 1.0;
                    if relative && key < pattern.keys && key <= t {
                        index.distance[at] = (t - key) as u32;
                    }
                    if let Some(slots) = slots
                        && key >= pattern.keys
                    {
                        let last = t / slots.segment * slots.rank;
                        index.slot_distance[at] = (last - 1 - (key - pattern.keys)) as u32;
                    }
                }
            }
        }
        index
    }
}
