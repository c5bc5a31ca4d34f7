//! Keys and values as packed rows, however they were given.

use candle_core::{Result, Tensor, bail};

use effattn_kernel::group::ParamGroup;
use effattn_kernel::heads::{PackedLayout, Qkv, merge, split};
use effattn_kernel::norm_parts::{hide, norm_parts};

/// Packed rows [b, t, count * e] with keys and values, and the queries if they lie elsewhere.
pub struct Rows {
    /// The rows.
    pub rows: Tensor,
    /// Which part is which.
    pub parts: PackedLayout,
    q: Option<Tensor>, // [b, h, n, d]
}

impl Rows {
    /// Rows of an attention call.
    pub fn new(qkv: &Qkv) -> Result<Self> {
        match qkv {
            Qkv::Packed { rows, parts, .. } => {
                if parts.k.is_none() || parts.v.is_none() {
                    bail!("this mechanism needs keys and values of their own");
                }
                Ok(Self { rows: rows.clone(), parts: *parts, q: None })
            }
            Qkv::Separate { q, .. } => {
                let rows = Tensor::cat(&[merge(&qkv.k()?)?, merge(&qkv.v()?)?], 2)?;
                Ok(Self { rows, parts: PackedLayout::KV, q: q.clone() })
            }
        }
    }

    /// Slots [b, slots, 2 e] as an attention call takes them.
    pub fn slots(rows: Tensor, heads: usize) -> Qkv {
        Qkv::Packed { rows, heads, parts: PackedLayout::KV }
    }

    /// Number of queries.
    pub fn queries(&self) -> Result<usize> {
        match &self.q {
            Some(q) => q.dim(2),
            None => self.rows.dim(1),
        }
    }

    /// The parts that hold keys and values.
    pub fn keys_values(&self) -> Result<[usize; 2]> {
        match (self.parts.k, self.parts.v) {
            (Some(k), Some(v)) => Ok([k, v]),
            _ => bail!("this mechanism needs keys and values of their own"),
        }
    }

    /// Keys and values side by side, [b, t, 2 e].
    pub fn only_keys_values(&self) -> Result<Tensor> {
        let [k, v] = self.keys_values()?;
        if (k, v, self.parts.count) == (0, 1, 2) {
            return Ok(self.rows.clone());
        }
        let e = self.rows.dim(2)? / self.parts.count;
        Tensor::cat(&[self.rows.narrow(2, k * e, e)?, self.rows.narrow(2, v * e, e)?], 2)
    }

    /// Keys and values normalised by `group` if given; everything at hidden positions is zero.
    pub fn normed(&self, group: Option<&ParamGroup>, mask: Option<&Tensor>, memory: usize) -> Result<Self> {
        let rows = norm_parts(&self.rows, group, &self.keys_values()?, self.parts.count, mask)?;
        let q = match (&self.q, mask) {
            (Some(q), Some(mask)) => {
                let (heads, n) = (q.dim(1)?, q.dim(2)?);
                let mask = mask.narrow(1, memory, n)?;
                Some(split(&hide(&merge(q)?, Some(&mask))?, heads)?)
            }
            (q, _) => q.clone(),
        };
        Ok(Self { rows, parts: self.parts, q })
    }

    /// As an attention call takes them.
    pub fn qkv(self, heads: usize) -> Result<Qkv> {
        let packed = Qkv::Packed { rows: self.rows, heads, parts: self.parts };
        match self.q {
            None => Ok(packed),
            Some(q) => Ok(Qkv::separate(q, packed.k()?, packed.v()?)),
        }
    }
}
