//! The class token of the last layer reads the other tokens' attention outputs (Transformer-LS, released code).

#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

use super::attend::{Attend, attend};
use super::fused_cpu;
use super::heads::{Heads, PackedLayout, Qkv};
use effattn_record::pattern::{Pattern, Rule};

/// softmax(scale [q . k_i ; q . out_j, j with `mask` 1]) applied to [v_i ; out_j], per head; q, k, v are the class token's
/// (`cls`, [b, h, 1, d]; more of them see each other), `out` [b, n, e] serves as keys and as values.
///
/// To [`attend`] the outputs are slots.
pub fn class_token(out: &Heads, cls: &Qkv, mask: Option<&Tensor>, scale: f64) -> Result<Heads> {
    let (_, heads, count, _) = cls.value_dims()?;
    let (Heads::Merged { rows, .. } | Heads::Split(rows)) = out;
    let slots = if fused_cpu(rows.device()) {
        // one operand, to which both gradients are added
        let parts = PackedLayout { q: None, k: Some(0), v: Some(0), count: 1 };
        Qkv::Packed { rows: out.merged()?, heads, parts }
    } else {
        let out = out.split()?;
        Qkv::keys_values(out.clone(), out)
    };
    let n = match out {
        Heads::Merged { rows, .. } => rows.dim(1)?,
        Heads::Split(rows) => rows.dim(2)?,
    };
    let pattern = Pattern::full(count, count, false).with_slots(n, Rule::All);
    let with_own = |mask: &Tensor| {
        let own = Tensor::ones((mask.dim(0)?, count), mask.dtype(), mask.device())?;
        Tensor::cat(&[&own, mask], 1)
    };
    let mask = mask.map(with_own).transpose()?;
    attend(cls, &Attend { slots: Some(&slots), ..Attend::scaled(&pattern, mask.as_ref(), scale) })
}
