//! One token after another: a window of keys and values, the slots of finished segments, and the sums of the open one.

use candle_core::{D, Result, Tensor, bail};

use crate::attention::decode::{Carried, Held, KeyValueCache, bytes};
use effattn_kernel::attend::Relative;
use effattn_kernel::group::ParamGroup;
use effattn_kernel::heads::Heads;

/// What a token's softmax reads, and how far the open segment has come.
pub struct LongShortCache {
    window: Option<KeyValueCache>,
    slots: Option<SlotCache>,
    relative: Option<Relative>, // one for all sequences: not counted as held
}

/// The state of [`LongShortCache`].
pub type LongShortState = Carried<LongShortCache>;

/// Segments that become slots.
struct SlotCache {
    rank: usize,
    segment: usize,
    finished: KeyValueCache,
    open: Option<OpenSegment>,
}

/// Softmax sums of a segment's tokens so far, moved to the largest logit.
struct OpenSegment {
    largest: Tensor,        // [b, h, rank, 1]
    weight: Tensor,         // [b, h, rank, 1]
    key_value: [Tensor; 2], // [b, h, rank, d]
}

/// How keys and values of a layer become slots, one token at a time.
#[derive(Clone, Copy)]
pub struct OpenProjection<'a> {
    /// `[dp.weight, dp.bias]`.
    pub group: &'a ParamGroup,
    /// The layer input of this token [b, 1, width].
    pub x: &'a Tensor,
    /// Keys and values that are projected, [b, h, 1, d] each.
    pub key_value: &'a [Tensor; 2],
}

impl LongShortCache {
    /// Before the first of up to `room` tokens: a window of `window` positions (0: none), and slots of (rank, segment).
    pub fn new(
        room: usize,
        window: usize,
        slots: Option<(usize, usize)>,
        relative: Option<Relative>,
    ) -> Self {
        let slots = slots.map(|(rank, segment)| SlotCache {
            rank,
            segment,
            finished: KeyValueCache::new(room / segment * rank),
            open: None,
        });
        let window = (window > 0).then(|| KeyValueCache::new(window.min(room)));
        Self { window, slots, relative }
    }

    /// Adds the key and value [b, h, 1, d] of the token at `position`, and attends from its query: the positions of the window, then
    /// the slots of the segments before its own; logits are scaled by `scale`.
    pub fn attend(
        &mut self,
        q: &Tensor,
        key_value: &[Tensor; 2],
        position: usize,
        scale: f64,
    ) -> Result<Heads> {
        let (b, h, n, d) = q.dims4()?;
        if n != 1 {
            bail!("{n} queries at once; decoding takes one token after another");
        }
        let q = (q.contiguous()?.reshape((b * h, 1, d))? * scale)?;
        let (mut logits, mut values) = (Vec::new(), Vec::new());
        if let Some(window) = &mut self.window {
            window.set(&key_value[0], &key_value[1], position % window.rows())?;
            let [k, v] = window.read(0, (position + 1).min(window.rows()))?;
            logits.push(match &self.relative {
                Some(relative) => window_logits(&q, &k, relative, (b, h), (position, window.rows()), scale)?,
                None => q.matmul(&k.t()?)?,
            });
            values.push(v);
        }
        if let Some(slots) = &mut self.slots {
            let seen = position / slots.segment * slots.rank;
            if seen > 0 {
                slots.finished.memory(&key_value[0])?; // no segment was finished where a step is measured behind tokens never seen
                let [k, v] = slots.finished.read(0, seen)?;
                let own = q.matmul(&k.t()?)?;
                let table = self.relative.as_ref().and_then(|relative| relative.slots.as_ref());
                logits.push(match table {
                    Some(table) => (own + by_table(&q, &reversed(&table.table, seen)?, (b, h))?)?,
                    None => own,
                });
                values.push(v);
            }
        }
        if logits.is_empty() {
            return Ok(Heads::Split(q.zeros_like()?.reshape((b, h, 1, d))?)); // no window, and no segment is finished
        }
        let weights = candle_nn::ops::softmax_last_dim(&Tensor::cat(&logits, D::Minus1)?)?;
        let (mut first, mut out) = (0, q.zeros_like()?);
        for v in &values {
            let seen = v.dim(1)?;
            out = (out + weights.narrow(2, first, seen)?.matmul(v)?)?;
            first += seen;
        }
        Ok(Heads::Split(out.reshape((b, h, 1, d))?))
    }

    /// Adds the token at `position` to the open segment; a segment that ends with it becomes slots, through `norm`: rows
    /// [b, rank, 2 e] of keys and values.
    pub fn project(
        &mut self,
        input: &OpenProjection,
        position: usize,
        norm: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let Some(slots) = &mut self.slots else { return Ok(()) };
        if position.is_multiple_of(slots.segment) {
            slots.open = None;
        }
        let open = OpenSegment::with(slots.open.take(), input, slots.rank)?;
        if (position + 1).is_multiple_of(slots.segment) {
            let [k, v] = open.finish(norm)?;
            slots.finished.set(&k, &v, position / slots.segment * slots.rank)?;
        }
        slots.open = Some(open);
        Ok(())
    }
}

/// Logits [b h, 1, rows] of scaled queries [b h, 1, d] over the rows of a ring [b h, rows, d] of `ring` rows: the token at i lies in
/// row i mod `ring`.
fn window_logits(
    q: &Tensor,
    k: &Tensor,
    relative: &Relative,
    (b, h): (usize, usize),
    (position, ring): (usize, usize),
    scale: f64,
) -> Result<Tensor> {
    let Relative { table, content_bias, position_bias, .. } = relative;
    let (seen, d) = (k.dim(1)?, k.dim(2)?);
    let plus = |bias: &Tensor| {
        let q = q.reshape((b, h, d))?.broadcast_add(&(bias.reshape((1, h, d))? * scale)?)?;
        q.reshape((b * h, 1, d))
    };
    let distance = |row: usize| ((position + ring - row) % ring) as u32;
    let distances: Vec<u32> = (0..seen).map(distance).collect();
    let distances = Tensor::from_vec(distances, seen, q.device())?;
    let by_distance = by_table(&plus(position_bias)?, &table.narrow(1, 0, seen)?, (b, h))?;
    plus(content_bias)?.matmul(&k.t()?)? + by_distance.index_select(&distances, 2)?
}

/// Products [b h, 1, rows] of queries [b h, 1, d] with the rows of a table [h, rows, d], the same of all samples.
fn by_table(q: &Tensor, table: &Tensor, (b, h): (usize, usize)) -> Result<Tensor> {
    let (_, rows, d) = table.dims3()?;
    let q = q.reshape((b, h, d))?.transpose(0, 1)?.contiguous()?;
    q.matmul(&table.transpose(1, 2)?)?.transpose(0, 1)?.contiguous()?.reshape((b * h, 1, rows))
}

/// The first `count` rows of a table [h, rows, d], the last one first: [h, count, d].
fn reversed(table: &Tensor, count: usize) -> Result<Tensor> {
    let rows: Vec<u32> = (0..count as u32).rev().collect();
    table.index_select(&Tensor::from_vec(rows, count, table.device())?, 1)
}

impl OpenSegment {
    /// `before` and one token more.
    fn with(before: Option<Self>, input: &OpenProjection, rank: usize) -> Result<Self> {
        let OpenProjection { group, x, key_value: [k, v] } = *input;
        let (b, h, _, d) = k.dims4()?;
        let (weight, bias) = (group.part(0)?, group.part(1)?);
        let logits = x.reshape((b, ()))?.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        let logits = logits.reshape((b, h, rank, 1))?;
        let Some(Self { largest, weight, key_value: [keys, values] }) = before else {
            let each = |x: &Tensor| x.contiguous()?.broadcast_as((b, h, rank, d))?.contiguous();
            return Ok(Self {
                weight: logits.ones_like()?,
                largest: logits,
                key_value: [each(k)?, each(v)?],
            });
        };
        let new = largest.maximum(&logits)?;
        let (old_share, share) = ((largest - &new)?.exp()?, (logits - &new)?.exp()?);
        let add = |sum: Tensor, x: &Tensor| {
            sum.broadcast_mul(&old_share)? + share.broadcast_mul(&x.contiguous()?)?
        };
        let key_value = [add(keys, k)?, add(values, v)?];
        Ok(Self { weight: ((weight * &old_share)? + &share)?, largest: new, key_value })
    }

    /// The slots, [b, h, rank, d] for keys and for values.
    fn finish(&self, norm: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<[Tensor; 2]> {
        let (b, h, rank, d) = self.key_value[0].dims4()?;
        let merged = |x: &Tensor| {
            x.broadcast_div(&self.weight)?.transpose(1, 2)?.contiguous()?.reshape((b, rank, h * d))
        };
        let [k, v] = &self.key_value;
        let rows = norm(&Tensor::cat(&[merged(k)?, merged(v)?], 2)?)?;
        let split = |part: usize| {
            let rows = rows.narrow(2, part * h * d, h * d)?.contiguous()?;
            rows.reshape((b, rank, h, d))?.transpose(1, 2)?.contiguous()
        };
        Ok([split(0)?, split(1)?])
    }
}

impl Held for LongShortCache {
    fn bytes(&self) -> usize {
        let slots = self.slots.iter().map(|slots| {
            let open = slots.open.iter().map(|open| {
                let [k, v] = &open.key_value;
                [&open.largest, &open.weight, k, v].into_iter().map(bytes).sum::<usize>()
            });
            slots.finished.bytes() + open.sum::<usize>()
        });
        self.window.as_ref().map_or(0, Held::bytes) + slots.sum::<usize>()
    }
}
