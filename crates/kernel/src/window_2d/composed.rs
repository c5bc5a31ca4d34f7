//! The definition in plain candle operations.

use candle_core::{D, Result, Tensor};

use super::{HIDDEN, Keys, Squares, Window2d, bias_rows_of, everywhere, key_side, softmax};

/// [`super::window_2d`]: keys and logits of every square, by index.
pub fn window_2d(q: &Tensor, own: Keys, call: &Window2d) -> Result<Tensor> {
    let (b, h, n, d) = q.dims4()?;
    if call.w == 0 {
        let (k, v) = everywhere(&call.everywhere)?;
        return softmax(&q.contiguous()?.matmul(&k.t()?)?)?.matmul(&v);
    }
    let squares = Squares::new(call.grid, call.w);
    let (queries, keys) = (squares.queries.len() / squares.count, squares.keys.len() / squares.count);
    let pick = |x: &Tensor, places: &[u32], count: usize| {
        let padded = Tensor::cat(&[x, &Tensor::zeros((b, h, 1, d), x.dtype(), x.device())?], 2)?;
        let places = Tensor::new(places, x.device())?;
        padded.index_select(&places, 2)?.reshape((b * h * squares.count, count, d))
    };
    let squared = pick(q, &squares.queries, queries)?;
    let (near, near_v) = (pick(own.k, &squares.keys, keys)?, pick(own.v, &squares.keys, keys)?);
    let mut logits = squared.matmul(&near.t()?)?.reshape((b, h, squares.count, queries, keys))?;
    if let Some(bias) = call.bias {
        logits = logits.broadcast_add(&bias_of(bias, call.w)?)?;
    }
    let visible = |place: &u32| if (*place as usize) < n { 0.0 } else { HIDDEN };
    let hidden: Vec<f32> = squares.keys.iter().map(visible).collect();
    let hidden = Tensor::from_vec(hidden, (1, 1, squares.count, 1, keys), q.device())?.to_dtype(q.dtype())?;
    let rows = (b, h, squares.count * queries, keys);
    let mut logits = logits.broadcast_add(&hidden)?.reshape(rows)?;
    let all = squared.reshape((b, h, squares.count * queries, d))?;
    let far = match call.everywhere.is_empty() {
        true => None,
        false => Some(everywhere(&call.everywhere)?),
    };
    if let Some((k, _)) = &far {
        logits = Tensor::cat(&[logits, all.matmul(&k.t()?)?], D::Minus1)?;
    }
    let weights = softmax(&logits)?;
    let near = weights.narrow(3, 0, keys)?.reshape((b * h * squares.count, queries, keys))?;
    let mut out = near.contiguous()?.matmul(&near_v)?.reshape((b, h, squares.count * queries, d))?;
    if let Some((k, v)) = &far {
        out = (out + weights.narrow(3, keys, k.dim(2)?)?.contiguous()?.matmul(v)?)?;
    }
    out.index_select(&Tensor::new(squares.back.as_slice(), q.device())?, 2)
}

/// The bias of every query of a square for every key, [1, h, 1, queries, keys]; `table` [rows, h].
fn bias_of(table: &Tensor, w: usize) -> Result<Tensor> {
    let rows = bias_rows_of(w);
    let bias = table.index_select(&Tensor::new(rows.as_slice(), table.device())?, 0)?;
    bias.t()?.contiguous()?.reshape((1, bias.dim(1)?, 1, w * w, key_side(w).pow(2)))
}
