//! The class token of the last layer reads the other tokens' attention outputs (Transformer-LS, released code).
//!
//! The twin is one call of [`super::attend`]; a training step of `ls` on ListOps (2048, batch 8, two layers) takes 15 % longer
//! with it, because the outputs, being keys and values at once, get two gradients.

mod cpu;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use super::attend::{Attend, attend};
use super::heads::{Heads, PackedLayout, Qkv, merge};
use super::norm_parts::flags;
use super::{fused_cpu, tape};
use effattn_record::pattern::{Pattern, Rule};

/// softmax(scale [q . k ; q . out_j, j with `mask` 1]) applied to [v ; out_j], per head; q, k, v are the class
/// token's (`cls`, one position), `out` [b, n, e] serves as keys and as values.
pub fn class_token(out: &Heads, cls: &Qkv, mask: Option<&Tensor>, scale: f64) -> Result<Heads> {
    let (b, heads, one, d) = cls.value_dims()?;
    let rows = match out {
        Heads::Merged { rows, .. } => rows,
        Heads::Split(out) => out,
    };
    if one != 1 {
        bail!("one class token is expected, not {one}");
    }
    if !fused_cpu(rows.device()) || rows.dtype() != DType::F32 {
        return composed(out, cls, mask, scale);
    }
    let rows = out.merged()?;
    let (cls, parts) = packed(cls)?;
    let PackedLayout { q: Some(q), k: Some(k), v: Some(v), count } = parts else {
        bail!("the class token needs a query, a key and a value");
    };
    if rows.dims()[0] != b || rows.dim(2)? != heads * d {
        bail!("outputs {:?} do not fit a class token {:?} of {heads} heads", rows.dims(), cls.dims());
    }
    let mask = mask.map(|mask| flags(mask, &rows)).transpose()?;
    let op = cpu::ClassToken::new(heads, d, [q, k, v], count, scale as f32, mask);
    let rows = tape::apply(&[&rows.contiguous()?, &cls.contiguous()?], op)?;
    Ok(Heads::Merged { rows, heads })
}

/// The class token's projections as one row [b, 1, count * e].
fn packed(cls: &Qkv) -> Result<(Tensor, PackedLayout)> {
    match cls {
        Qkv::Packed { rows, parts, .. } => Ok((rows.clone(), *parts)),
        _ => Ok((
            Tensor::cat(&[merge(&cls.q()?)?, merge(&cls.k()?)?, merge(&cls.v()?)?], 2)?,
            PackedLayout::QKV,
        )),
    }
}

/// [`class_token`] as a pattern softmax: the class token is a slot, the outputs are keys and values.
pub fn composed(out: &Heads, cls: &Qkv, mask: Option<&Tensor>, scale: f64) -> Result<Heads> {
    let out = out.split()?;
    let n = out.dim(2)?;
    let pattern = Pattern::full(1, n, false).with_slots(1, Rule::All);
    let mask = match mask {
        Some(mask) => Some(Tensor::cat(&[mask, &mask.ones_like()?.narrow(1, 0, 1)?], 1)?),
        None => None,
    };
    let slots = Qkv::keys_values(cls.k()?, cls.v()?);
    let call = Attend { slots: Some(&slots), ..Attend::scaled(&pattern, mask.as_ref(), scale) };
    attend(&Qkv::separate(cls.q()?, out.clone(), out), &call)
}
