//! Launching the row-wise kernels of `rows.cu`. Matrices are contiguous, `[rows, width]`.

#[cfg(test)]
pub(crate) mod tests;

use candle_core::{Result, bail};

use super::{Arg, BufferView, KernelDevice, Launch, MatmulTarget, Module, THREADS};

/// The row-wise kernels.
pub const MODULE: Module = Module { name: "rows", source: include_str!("rows.cu"), defines: &[] };

/// Threads of a warp; WARP of the source.
const WARP: usize = 32;

/// Blocks of a kernel with a warp per row.
fn lines(rows: usize) -> [usize; 3] {
    [rows.div_ceil(THREADS / WARP), 1, 1]
}

/// Blocks of a kernel with a thread per element.
fn elements(count: usize) -> [usize; 3] {
    [count.div_ceil(THREADS), 1, 1]
}

fn launch<M: KernelDevice>(
    machine: &M,
    kernel: &str,
    grid: [usize; 3],
    arguments: Vec<Arg<M>>,
) -> Result<()> {
    machine.launch(&Launch { module: MODULE, kernel, grid, shared: 0 }, arguments)
}

/// LayerNorm of every row.
pub fn layer_norm<M: KernelDevice>(
    machine: &M,
    x: BufferView<M>,
    [weight, bias]: [BufferView<M>; 2],
    [rows, width]: [usize; 2],
    eps: f32,
) -> Result<M::Floats> {
    let mut y = machine.fresh(rows * width)?;
    let arguments = vec![
        Arg::In(x),
        Arg::In(weight),
        Arg::In(bias),
        Arg::Long(rows),
        Arg::Int(width),
        Arg::Float(eps),
        Arg::Out(&mut y),
    ];
    launch(machine, "layer_norm", lines(rows), arguments)?;
    Ok(y)
}

/// Gradients of x and of `[weight | bias]`.
pub fn layer_norm_backward<M: KernelDevice>(
    machine: &M,
    [x, weight, dy]: [BufferView<M>; 3],
    [rows, width]: [usize; 2],
    eps: f32,
) -> Result<[M::Floats; 2]> {
    let mut dx = machine.fresh(rows * width)?;
    let mut stats = machine.fresh(2 * rows)?;
    let arguments = vec![
        Arg::In(x),
        Arg::In(weight),
        Arg::In(dy),
        Arg::Long(rows),
        Arg::Int(width),
        Arg::Float(eps),
        Arg::Out(&mut dx),
        Arg::Out(&mut stats),
    ];
    launch(machine, "layer_norm_backward", lines(rows), arguments)?;
    let chunk = chunk(rows);
    let chunks = rows.div_ceil(chunk);
    let mut parts = machine.fresh(chunks * 2 * width)?;
    let arguments = vec![
        Arg::In(x),
        Arg::In(dy),
        Arg::In(BufferView::all(&stats)),
        Arg::Long(rows),
        Arg::Int(width),
        Arg::Int(chunk),
        Arg::Out(&mut parts),
    ];
    launch(machine, "layer_norm_parameters", [chunks, width.div_ceil(WARP), 1], arguments)?;
    let parameters = chunk_sums(machine, BufferView::all(&parts), [chunks, 2 * width], chunks)?;
    Ok([dx, parameters])
}

/// Rows that a block sums: at most 64 chunks, so that adding them takes few steps.
fn chunk(rows: usize) -> usize {
    rows.div_ceil(64).max(64)
}

fn chunk_sums<M: KernelDevice>(
    machine: &M,
    x: BufferView<M>,
    [rows, width]: [usize; 2],
    chunk: usize,
) -> Result<M::Floats> {
    let chunk = chunk.max(1);
    let chunks = rows.div_ceil(chunk);
    let mut parts = if rows == 0 { machine.zeros(width)? } else { machine.fresh(chunks * width)? };
    let arguments = vec![Arg::In(x), Arg::Long(rows), Arg::Int(width), Arg::Int(chunk), Arg::Out(&mut parts)];
    launch(machine, "column_sums", [chunks, width.div_ceil(WARP), 1], arguments)?;
    Ok(parts)
}

/// Sums of the columns.
pub fn column_sums<M: KernelDevice>(
    machine: &M,
    x: BufferView<M>,
    [rows, width]: [usize; 2],
) -> Result<M::Floats> {
    let parts = chunk_sums(machine, x, [rows, width], chunk(rows))?;
    let chunks = rows.div_ceil(chunk(rows));
    if chunks <= 1 {
        Ok(parts)
    } else {
        chunk_sums(machine, BufferView::all(&parts), [chunks, width], chunks)
    }
}

/// Exact GELU.
pub fn gelu<M: KernelDevice>(machine: &M, x: BufferView<M>, count: usize) -> Result<M::Floats> {
    let mut y = machine.fresh(count)?;
    launch(machine, "gelu", elements(count), vec![Arg::In(x), Arg::Long(count), Arg::Out(&mut y)])?;
    Ok(y)
}

/// Gradient of GELU's x.
pub fn gelu_backward<M: KernelDevice>(
    machine: &M,
    [x, dy]: [BufferView<M>; 2],
    count: usize,
) -> Result<M::Floats> {
    let mut dx = machine.fresh(count)?;
    let arguments = vec![Arg::In(x), Arg::In(dy), Arg::Long(count), Arg::Out(&mut dx)];
    launch(machine, "gelu_backward", elements(count), arguments)?;
    Ok(dx)
}

/// Which elements are dropped, and what the others are multiplied by.
#[derive(Clone, Copy)]
pub struct DropoutTerms {
    /// Draws below this drop.
    pub threshold: u32,
    /// What the others are multiplied by.
    pub scale: f32,
    /// What draws are made of, with the element's number.
    pub seed: u64,
}

/// Dropout: elements are numbered as they lie in `x`.
pub fn dropout<M: KernelDevice>(
    machine: &M,
    x: BufferView<M>,
    count: usize,
    terms: DropoutTerms,
) -> Result<M::Floats> {
    let mut y = machine.fresh(count)?;
    let arguments = vec![
        Arg::In(x),
        Arg::Long(count),
        Arg::Long(terms.seed as usize),
        Arg::Long(terms.threshold as usize),
        Arg::Float(terms.scale),
        Arg::Out(&mut y),
    ];
    launch(machine, "dropout", elements(count), arguments)?;
    Ok(y)
}

/// GELU of x + bias.
pub fn bias_gelu<M: KernelDevice>(
    machine: &M,
    [x, bias]: [BufferView<M>; 2],
    [rows, width]: [usize; 2],
) -> Result<M::Floats> {
    let count = rows * width;
    let mut y = machine.fresh(count)?;
    let arguments = vec![Arg::In(x), Arg::In(bias), Arg::Long(count), Arg::Int(width), Arg::Out(&mut y)];
    launch(machine, "bias_gelu", elements(count), arguments)?;
    Ok(y)
}

/// GELU of x + bias again, and the gradient of x.
pub fn bias_gelu_backward<M: KernelDevice>(
    machine: &M,
    [x, bias, dy]: [BufferView<M>; 3],
    [rows, width]: [usize; 2],
) -> Result<[M::Floats; 2]> {
    let count = rows * width;
    let (mut y, mut dx) = (machine.fresh(count)?, machine.fresh(count)?);
    let arguments = vec![
        Arg::In(x),
        Arg::In(bias),
        Arg::In(dy),
        Arg::Long(count),
        Arg::Int(width),
        Arg::Out(&mut y),
        Arg::Out(&mut dx),
    ];
    launch(machine, "bias_gelu_backward", elements(count), arguments)?;
    Ok([y, dx])
}

/// Adds a bias to `width` columns of `rows` rows of a matrix.
pub fn add_bias<M: KernelDevice>(
    machine: &M,
    bias: BufferView<M>,
    [rows, width]: [usize; 2],
    to: MatmulTarget<M>,
) -> Result<()> {
    let arguments = vec![
        Arg::In(bias),
        Arg::Long(rows),
        Arg::Int(width),
        Arg::Int(to.stride),
        Arg::Long(to.start),
        Arg::Out(to.floats),
    ];
    launch(machine, "add_bias", elements(rows * width), arguments)
}

/// y += x for `count` elements, in y from `start` on.
pub fn add<M: KernelDevice>(
    machine: &M,
    x: BufferView<M>,
    count: usize,
    y: &mut M::Floats,
    start: usize,
) -> Result<()> {
    let arguments = vec![Arg::In(x), Arg::Long(count), Arg::Long(start), Arg::Out(y)];
    launch(machine, "add", elements(count), arguments)
}

/// Indices of rows as the kernels take them.
fn signed(ids: impl IntoIterator<Item = usize>) -> Result<Vec<i32>> {
    let ids = ids.into_iter().map(|id| i32::try_from(id).map_err(candle_core::Error::wrap));
    ids.collect()
}

/// Cross entropy of every row with its label, which must be one of the classes.
pub fn cross_entropy<M: KernelDevice>(
    machine: &M,
    logits: BufferView<M>,
    labels: &[u32],
    classes: usize,
) -> Result<M::Floats> {
    let rows = labels.len();
    let labels = machine.ints(&signed(labels.iter().map(|&label| label as usize))?)?;
    let mut losses = machine.fresh(rows)?;
    let arguments =
        vec![Arg::In(logits), Arg::Ints(&labels), Arg::Long(rows), Arg::Int(classes), Arg::Out(&mut losses)];
    launch(machine, "cross_entropy", lines(rows), arguments)?;
    Ok(losses)
}

/// Gradient of the logits.
pub fn cross_entropy_backward<M: KernelDevice>(
    machine: &M,
    [logits, grad]: [BufferView<M>; 2],
    labels: &[u32],
    classes: usize,
) -> Result<M::Floats> {
    let rows = labels.len();
    let labels = machine.ints(&signed(labels.iter().map(|&label| label as usize))?)?;
    let mut dx = machine.fresh(rows * classes)?;
    let arguments = vec![
        Arg::In(logits),
        Arg::Ints(&labels),
        Arg::In(grad),
        Arg::Long(rows),
        Arg::Int(classes),
        Arg::Out(&mut dx),
    ];
    launch(machine, "cross_entropy_backward", lines(rows), arguments)?;
    Ok(dx)
}

/// Rows of a table by index; indices must be within it.
pub fn table_rows<M: KernelDevice>(
    machine: &M,
    table: BufferView<M>,
    ids: &[u32],
    width: usize,
) -> Result<M::Floats> {
    let rows = ids.len();
    let ids = machine.ints(&signed(ids.iter().map(|&id| id as usize))?)?;
    let mut y = machine.fresh(rows * width)?;
    let arguments = vec![Arg::In(table), Arg::Ints(&ids), Arg::Long(rows), Arg::Int(width), Arg::Out(&mut y)];
    launch(machine, "table_rows", lines(rows), arguments)?;
    Ok(y)
}

/// Rows that one block adds up.
const PIECE: usize = 128;

/// Gradient of a table of `count` rows: the sum of the rows of `dy` by index. Each index has its rows added in pieces of
/// [`PIECE`] in their order, then the pieces.
pub fn table_gradient<M: KernelDevice>(
    machine: &M,
    dy: BufferView<M>,
    ids: &[u32],
    [count, width]: [usize; 2],
) -> Result<M::Floats> {
    let (order, starts) = by_id(ids, count)?;
    let (mut pieces, mut owners) = (Vec::new(), Vec::new());
    for range in starts.windows(2) {
        let first = pieces.len() / 2;
        let piece = |from: usize| [from, (from + PIECE).min(range[1])];
        pieces.extend((range[0]..range[1]).step_by(PIECE).flat_map(piece));
        owners.extend([first, pieces.len() / 2]);
    }
    let parts = range_sums(machine, dy, order, pieces, width)?;
    let all = 0..parts.1;
    range_sums(machine, BufferView::all(&parts.0), all, owners, width).map(|(gradient, _)| gradient)
}

/// Positions sorted by what `ids` says of them, and where each of `count` ids starts among them, with the end.
fn by_id(ids: &[u32], count: usize) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut starts = vec![0; count + 1];
    for &id in ids {
        match starts.get_mut(id as usize + 1) {
            Some(start) => *start += 1,
            None => bail!("index {id} is outside a table of {count} rows"),
        }
    }
    for id in 0..count {
        starts[id + 1] += starts[id];
    }
    let (mut order, mut next) = (vec![0; ids.len()], starts.clone());
    for (at, &id) in ids.iter().enumerate() {
        order[next[id as usize]] = at;
        next[id as usize] += 1;
    }
    Ok((order, starts))
}

/// Sums of ranges of `order`ed rows, and the number of ranges.
fn range_sums<M: KernelDevice>(
    machine: &M,
    rows: BufferView<M>,
    order: impl IntoIterator<Item = usize>,
    ranges: Vec<usize>,
    width: usize,
) -> Result<(M::Floats, usize)> {
    let count = ranges.len() / 2;
    let (order, ranges) = (machine.ints(&signed(order)?)?, machine.ints(&signed(ranges)?)?);
    let mut sums = machine.fresh(count * width)?;
    let arguments =
        vec![Arg::In(rows), Arg::Ints(&order), Arg::Ints(&ranges), Arg::Int(width), Arg::Out(&mut sums)];
    launch(machine, "range_sums", [count, width.div_ceil(THREADS), 1], arguments)?;
    Ok((sums, count))
}

/// What AdamW reads: the gradient, and the factors in the order of the kernel's arguments.
pub struct Update<'a, M: KernelDevice> {
    /// The gradient.
    pub grad: BufferView<'a, M>,
    /// Number of elements.
    pub count: usize,
    /// The factors.
    pub factors: [f32; 9],
}

/// One AdamW update in place of `p` from element `start` on, with its moments.
pub fn adamw<M: KernelDevice>(
    machine: &M,
    update: Update<M>,
    p: &mut M::Floats,
    start: usize,
    [m, v]: [&mut M::Floats; 2],
) -> Result<()> {
    let Update { grad, count, factors } = update;
    let mut arguments = vec![Arg::In(grad), Arg::Long(start), Arg::Long(count)];
    arguments.extend(factors.map(Arg::Float));
    arguments.extend([Arg::Out(p), Arg::Out(m), Arg::Out(v)]);
    launch(machine, "adamw", elements(count), arguments)
}
