//! The causal sums of the twin: a chunked scan.
//!
//! Within a chunk the pairs are formed and masked; across chunks a scan carries the states, group by group, so
//! that no matrix grows with the square of the length. Decays enter as sums of logarithms over the steps
//! between two positions, which are never differences of long sums: they neither over- nor underflow early.

use candle_core::{D, DType, Device, Result, Tensor};

/// Positions per chunk.
const CHUNK: usize = 64;
/// Chunks per group of the scan over chunks.
const GROUP: usize = 32;

/// Whether position t itself counts at t.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    Counts,
    Skipped,
}

impl Own {
    fn sees(self, t: usize, s: usize) -> bool {
        s < t || s == t && self == Self::Counts
    }
}

/// sum_{s <= t} exp(sum_{s < r <= t} log_decay_r) (q_t . k_s) v_s: [b, n, e] from q, k [b, n, f] and v [b, n, e].
pub(super) fn scan(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    log_decay: Option<&Tensor>,
    own: Own,
) -> Result<Tensor> {
    let (b, n, e) = v.dims3()?;
    let size = CHUNK.min(n);
    let count = n.div_ceil(size);
    let chunks = |x: &Tensor| {
        let x = x.pad_with_zeros(1, 0, count * size - n)?;
        x.reshape((b * count, size, x.elem_count() / (b * count * size)))
    };
    let (q, k, v) = (chunks(q)?, chunks(k)?, chunks(v)?);
    let pairs = q.matmul(&k.transpose(1, 2)?)?; // [b * count, size, size]
    let (device, dtype) = (v.device(), v.dtype());
    let lower = triangle(size, size, |t, s| own.sees(t, s), dtype, device)?;
    let out;
    let (keys, queries, steps) = if let Some(decay) = log_decay {
        let decay = chunks(&decay.unsqueeze(2)?)?.squeeze(2)?;
        let between = intervals(&decay, size, size, |t, s, r| s < r && r <= t)?.exp()?;
        out = (pairs * between.broadcast_mul(&lower)?)?.matmul(&v)?;
        // what is left of a key at the end of its chunk, and of the state before the chunk at a query
        let rest = intervals(&decay, 1, size, |_, s, r| s < r)?.exp()?.transpose(1, 2)?;
        let since = intervals(&decay, size, 1, |t, _, r| r <= t)?.exp()?;
        let steps = decay.sum(1)?.reshape((b, count))?;
        (k.broadcast_mul(&rest)?, q.broadcast_mul(&since)?, Some(steps))
    } else {
        out = pairs.broadcast_mul(&lower)?.matmul(&v)?;
        (k, q, None)
    };
    let width = keys.dim(2)? * e;
    let states = keys.transpose(1, 2)?.matmul(&v)?.reshape((b, count, width))?;
    let before = states_before(&states, steps.as_ref())?.reshape((b * count, (), e))?;
    let out = (out + queries.matmul(&before)?)?;
    out.reshape((b, count * size, e))?.narrow(1, 0, n)?.contiguous()
}

/// Positions per chunk where every channel decays on its own: exponents of all pairs of a chunk are formed.
const CHANNEL_CHUNK: usize = 16;

/// [`scan`] with a decay per channel: sum_{s <= t} sum_f exp(sum_{s < r <= t} log_decay_rf) q_tf k_sf v_s, `log_decay`
/// [b, n, f].
pub(super) fn scan_channels(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    log_decay: &Tensor,
    own: Own,
) -> Result<Tensor> {
    let (b, n, e) = v.dims3()?;
    let (size, count) = (CHANNEL_CHUNK, n.div_ceil(CHANNEL_CHUNK));
    let chunks = |x: &Tensor| {
        let x = x.pad_with_zeros(1, 0, count * size - n)?;
        x.reshape((b * count, size, x.dim(D::Minus1)?))
    };
    let (q, k, v, log) = (chunks(q)?, chunks(k)?, chunks(v)?, chunks(log_decay)?);
    let f = q.dim(2)?;
    let turned = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let channels = turned(&log)?.reshape((b * count * f, size))?;
    let sums = |rows, columns, within: &dyn Fn(usize, usize, usize) -> bool| {
        intervals(&channels, rows, columns, within)?.exp()?.reshape((b * count, f, rows, columns))
    };
    let lower = triangle(size, size, |t, s| own.sees(t, s), v.dtype(), v.device())?;
    let pairs = sums(size, size, &|t, s, r| s < r && r <= t)?
        .broadcast_mul(&turned(&q)?.unsqueeze(3)?)?
        .broadcast_mul(&turned(&k)?.unsqueeze(2)?)?
        .sum(1)?
        .broadcast_mul(&lower)?;
    let rest = turned(&sums(1, size, &|_, s, r| s < r)?.squeeze(2)?)?;
    let since = turned(&sums(size, 1, &|t, _, r| r <= t)?.squeeze(3)?)?;
    let own = turned(&(k * rest)?)?.matmul(&v)?.reshape((b, count, f, e))?;
    let total = log.sum(1)?.exp()?.reshape((b, count, f, 1))?;
    let mut state = Tensor::zeros((b, f, e), v.dtype(), v.device())?;
    let mut before = Vec::with_capacity(count);
    for chunk in 0..count {
        before.push(state.clone());
        let at = |x: &Tensor| x.narrow(1, chunk, 1)?.squeeze(1);
        state = (state.broadcast_mul(&at(&total)?)? + at(&own)?)?;
    }
    let before = Tensor::stack(&before, 1)?.reshape((b * count, f, e))?;
    let out = (pairs.matmul(&v)? + (q * since)?.matmul(&before)?)?;
    out.reshape((b, count * size, e))?.narrow(1, 0, n)?.contiguous()
}

/// For chunk c the decayed sum of the states of chunks before c; `x` [b, count, w], `steps` [b, count].
fn states_before(x: &Tensor, steps: Option<&Tensor>) -> Result<Tensor> {
    let (b, count, w) = x.dims3()?;
    let size = GROUP.min(count);
    let groups = count.div_ceil(size);
    let padding = groups * size - count;
    let x = x.pad_with_zeros(1, 0, padding)?.reshape((b * groups, size, w))?;
    let steps = match steps {
        Some(steps) => Some(steps.pad_with_zeros(1, 0, padding)?.reshape((b * groups, size))?),
        None => None,
    };
    // row c: the states before chunk c of the group; row `size`: the state at its end
    let lower = triangle(size + 1, size, |c, d| d < c, x.dtype(), x.device())?;
    let weights = match &steps {
        Some(steps) => {
            intervals(steps, size + 1, size, |c, d, r| d < r && r < c)?.exp()?.broadcast_mul(&lower)?
        }
        None => lower.broadcast_as((b * groups, size + 1, size))?.contiguous()?,
    };
    let sums = weights.matmul(&x)?; // [b * groups, size + 1, w]
    let inner = sums.narrow(1, 0, size)?;
    if groups == 1 {
        return inner.narrow(1, 0, count)?.contiguous();
    }
    let totals = sums.narrow(1, size, 1)?.reshape((b, groups, w))?;
    let group_steps = steps.as_ref().map(|steps| steps.sum(1)?.reshape((b, groups))).transpose()?;
    let carried = states_before(&totals, group_steps.as_ref())?.reshape((b * groups, 1, w))?;
    let carried = match &steps {
        Some(steps) => {
            let since = intervals(steps, size, 1, |c, _, r| r < c)?.exp()?;
            since.broadcast_mul(&carried)?
        }
        None => carried,
    };
    let all = inner.broadcast_add(&carried)?.reshape((b, groups * size, w))?;
    all.narrow(1, 0, count)?.contiguous()
}

/// [b, rows, columns]: the sum of the `x` [b, n] at every r that `within(row, column, r)` names.
fn intervals(
    x: &Tensor,
    rows: usize,
    columns: usize,
    within: impl Fn(usize, usize, usize) -> bool,
) -> Result<Tensor> {
    let (b, n) = x.dims2()?;
    let cells = rows * columns;
    let table =
        triangle(n, cells, |r, cell| within(cell / columns, cell % columns, r), x.dtype(), x.device())?;
    x.matmul(&table)?.reshape((b, rows, columns))
}

/// A matrix of ones where `holds(row, column)`, zeros elsewhere.
fn triangle(
    rows: usize,
    columns: usize,
    holds: impl Fn(usize, usize) -> bool,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let cells = (0..rows * columns).map(|cell| f32::from(holds(cell / columns, cell % columns)));
    Tensor::from_vec(cells.collect(), (rows, columns), device)?.to_dtype(dtype)
}
