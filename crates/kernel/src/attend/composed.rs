//! The definition in plain candle operations.

use candle_core::{Result, Tensor, bail};

use super::Attend;
use crate::dropout::AttentionDropout;
use crate::heads::{Heads, Qkv};
use crate::softmax::{masked_softmax, softmax};
use effattn_record::pattern::{QueryGroup, Rule};

/// The definition in plain candle operations: groups of similar size are gathered and masked together.
pub fn composed(qkv: &Qkv, call: &Attend) -> Result<Heads> {
    let operands = Operands::new(qkv, call)?;
    let heads = call.pattern.heads.len();
    if heads == 1 {
        return Ok(Heads::Split(attend_groups(&operands, call, call.pattern.groups(0))?));
    }
    let per_head = (0..heads)
        .map(|head| attend_groups(&operands.of_head(head)?, call, call.pattern.groups(head)))
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
    bias: Option<Tensor>,          // [h, n, t + s]: 0 for slots
    head: usize,                   // number of the first head
    heads: usize,                  // of the whole call
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
        let bias = call.bias.map(|bias| bias.contiguous()?.pad_with_zeros(2, 0, slots)).transpose()?;
        Ok(Self { q, k, v, content, distance, slot_distance, bias, head: 0, heads: h })
    }

    fn of_head(&self, head: usize) -> Result<Self> {
        let one = |x: &Tensor| x.narrow(1, head, 1)?.contiguous();
        let maybe = |x: &Option<Tensor>| x.as_ref().map(one).transpose();
        Ok(Self {
            q: one(&self.q)?,
            k: one(&self.k)?,
            v: one(&self.v)?,
            content: maybe(&self.content)?,
            distance: maybe(&self.distance)?,
            slot_distance: maybe(&self.slot_distance)?,
            bias: self.bias.as_ref().map(|bias| bias.narrow(0, head, 1)).transpose()?,
            head: self.head + head,
            heads: self.heads,
        })
    }
}

/// Groups whose candidate lists have a similar length, padded to rectangles.
struct Bucket<'a> {
    groups: Vec<&'a QueryGroup>,
    queries: usize,
    keys: usize,
}

impl Bucket<'_> {
    /// Whether nothing was padded and no rule cuts anything.
    fn is_dense(&self) -> bool {
        self.groups.iter().all(|group| {
            group.queries.len == self.queries
                && group.keys.iter().map(|key| key.span.len).sum::<usize>() == self.keys
                && group.keys.iter().all(|key| key.rule == Rule::All)
        })
    }
}

fn buckets(groups: &[QueryGroup]) -> Vec<Bucket<'_>> {
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

fn attend_groups(x: &Operands, call: &Attend, groups: &[QueryGroup]) -> Result<Tensor> {
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
    let factors = call.dropout.map(|dropout| index.factors(x, bucket, dropout)).transpose()?;
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
    let mut logits = (logits * call.scale)?;
    if let Some(bias) = &x.bias {
        let rows = bias.index_select(&queries, 1)?; // [h, G Q, t + s]
        let per_group = (0..g).map(|group| {
            rows.narrow(1, group * q, q)?.contiguous()?.index_select(&keys.narrow(0, group * s, s)?, 2)
        });
        let bias = Tensor::stack(&per_group.collect::<Result<Vec<_>>>()?, 1)?; // [h, G, Q, S]
        logits = logits.broadcast_add(&bias)?;
    }
    let mut visible = match index.visible {
        Some(visible) => Some(Tensor::from_vec(visible, (1, 1, g, q, s), device)?.to_dtype(x.q.dtype())?),
        None => None,
    };
    if let Some(mask) = call.mask {
        let total = call.pattern.keys + call.pattern.slots;
        let mask = match total - mask.dim(1)? {
            0 => mask.clone(), // a device has no tensors without elements
            slots => Tensor::cat(&[mask, &Tensor::ones((b, slots), mask.dtype(), device)?], 1)?,
        };
        let mask = mask.index_select(&keys, 1)?;
        let mask = mask.reshape((b, 1, g, 1, s))?.to_dtype(x.q.dtype())?;
        visible = Some(match visible {
            Some(visible) => visible.broadcast_mul(&mask)?,
            None => mask,
        });
    }
    let mut weights = match visible {
        Some(visible) => masked_softmax(&logits, &visible)?,
        None => softmax(&logits)?,
    };
    if let (Some(dropout), Some(factors)) = (call.dropout, factors) {
        weights = dropout.scaled(&weights, factors)?;
    }
    weights.reshape((b * h * g, q, s))?.matmul(&vg)?.reshape((b, h, g * q, d))
}

/// The index tables of one bucket.
struct BucketIndex {
    queries: Vec<u32>,         // [G, Q]
    keys: Vec<u32>,            // [G, S]
    visible: Option<Vec<f32>>, // [G, Q, S]; absent where all pairs are visible
    distance: Vec<u32>,        // [G, Q, S]; u32::MAX where it does not apply
    slot_distance: Vec<u32>,   // [G, Q, S]
}

impl BucketIndex {
    fn new(call: &Attend, bucket: &Bucket) -> Self {
        let (g, q, s) = (bucket.groups.len(), bucket.queries, bucket.keys);
        let relative = call.relative.is_some();
        let slots = call.relative.and_then(|relative| relative.slots.as_ref());
        let mut visible = vec![0.0; if bucket.is_dense() { 0 } else { g * q * s }];
        let mut index = Self {
            queries: vec![0; g * q],
            keys: vec![0; g * s],
            visible: None,
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
                    if let Some(visible) = visible.get_mut(at) {
                        *visible = 1.0;
                    }
                    if relative && key < pattern.keys && key <= t {
                        index.distance[at] = (t - key) as u32;
                    }
                    if let Some(slots) = slots
                        && key >= pattern.keys
                    {
                        let newest = t / slots.segment * slots.rank;
                        let distance = newest.checked_sub(1 + key - pattern.keys);
                        index.slot_distance[at] = distance.map_or(u32::MAX, |distance| distance as u32);
                    }
                }
            }
        }
        if !visible.is_empty() {
            index.visible = Some(visible);
        }
        index
    }

    /// What dropout multiplies the weights [b, h, G, Q, S] by.
    fn factors(&self, x: &Operands, bucket: &Bucket, dropout: AttentionDropout) -> Result<Vec<f32>> {
        let (b, h, n, _) = x.q.dims4()?;
        let mut factors = Vec::new();
        for at in 0..b * h {
            let first = (at / h * x.heads + x.head + at % h) * n;
            for (queries, keys) in self.queries.chunks(bucket.queries).zip(self.keys.chunks(bucket.keys)) {
                for &query in queries {
                    let keys = keys.iter().map(|&key| key as usize);
                    factors.extend(dropout.factors(first + query as usize, keys));
                }
            }
        }
        Ok(factors)
    }
}
