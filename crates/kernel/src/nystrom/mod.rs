//! Nystrom attention: softmax attention through landmarks and an iterated pseudo-inverse (Nystromformer,
//! Xiong et al. 2021, eq. 13 and 14).
//!
//! With q' = q D^(-1/4), k' = k D^(-1/4) (0 at padded positions) and landmarks Ql, Kl, the means of equally
//! long segments: F = softmax(q' Kl^T), A = softmax(Ql Kl^T), B = softmax(Ql k'^T) over kept positions, and
//! out = F Z (B v) with Z the pseudo-inverse of A by iteration.
//!
//! The fused form takes the product from the right, F (Z (B v)), which spares n m^2: B v is [`attend`] with the
//! landmarks as queries, F (Z B v) is [`attend`] with the key landmarks as keys and Z B v as values. So neither of the
//! two [n, m] softmaxes is stored. D^(-1/4) on both sides is the scale D^(-1/2) of the logits.

mod composed;
mod inverse;
mod means;
mod middle;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use super::attend::{Attend, attend};
use super::heads::{Heads, PackedLayout, Qkv};
use super::norm_parts::hide;
pub use composed::composed;
use effattn_record::pattern::{Pattern, Rule};

/// What the start of the pseudo-inverse is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InverseInit {
    /// The largest column sum of each matrix.
    PerMatrix,
    /// The largest column sum of all matrices of the batch and heads, as the released code has it.
    Original,
}

/// Settings of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landmarks {
    /// Number of landmarks, below the sequence length.
    pub count: usize,
    /// Iterations of the pseudo-inverse.
    pub iterations: usize,
    /// Its start.
    pub start: InverseInit,
}

/// Attention through landmarks; `mask` [b, n]. Hidden queries give 0.
pub fn nystrom(qkv: &Qkv, mask: Option<&Tensor>, spec: Landmarks) -> Result<Heads> {
    let v = qkv.v()?;
    if v.dim(2)? > 0 && v.dtype() == DType::F32 && super::fused_cpu(v.device()) {
        return fused(qkv, mask, spec);
    }
    composed(qkv, mask, spec)
}

/// Two calls of [`attend`] on packed rows, and the small matrices between them. What a call sees lies in other rows than
/// its queries do, and so stands in the place of slots.
fn fused(qkv: &Qkv, mask: Option<&Tensor>, spec: Landmarks) -> Result<Heads> {
    let (rows, heads, parts) = qkv.packed()?;
    let (Some(q), Some(k)) = (parts.q, parts.k) else {
        bail!("Nystrom attention reads queries, keys and values")
    };
    let rows = hide(&rows, mask)?;
    let (b, _, row) = rows.dims3()?;
    let (e, m) = (row / parts.count, spec.count);
    let scale = ((e / heads) as f64).powf(-0.5);
    let landmarks = means::segment_means(&rows, m, [q * e, k * e], e)?; // [b, m, 2 e]: [Ql | Kl]
    let seen = mask.map(|mask| Tensor::cat(&[&Tensor::ones((b, m), mask.dtype(), mask.device())?, mask], 1));
    let seen = seen.transpose()?; // [b, m + n]
    let look =
        |main: &Tensor, queries: PackedLayout, at: &Tensor, keys: PackedLayout, mask: Option<&Tensor>| {
            let [main, slots] = [(main, queries), (at, keys)].map(|(rows, parts)| Qkv::Packed {
                rows: rows.clone(),
                heads,
                parts,
            });
            let (own, others) = (main.value_dims()?.2, slots.value_dims()?.2);
            let pattern = Pattern::blind(own, own, false).with_slots(others, Rule::All);
            let call = Attend { slots: Some(&slots), ..Attend::scaled(&pattern, mask, scale) };
            attend(&main, &call)?.merged()
        };
    let near =
        look(&landmarks, PackedLayout { q: Some(0), ..PackedLayout::KV }, &rows, parts, seen.as_ref())?; // B v, [b, m, e]
    let middle = middle::middle(&landmarks, &near, heads, spec)?; // [b, m, 2 e]: [Kl | Z B v]
    let out = look(&rows, parts, &middle, PackedLayout::KV, None)?; // [b, n, e]
    Ok(Heads::Merged { rows: hide(&out, mask)?, heads })
}
