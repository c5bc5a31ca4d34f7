//! How queries, keys, values and results of an attention call lie in memory.

use candle_core::{D, Device, Result, Tensor, bail};

use super::tape;

/// Queries, keys and values, split into heads or as one packed projection.
///
/// A projection writes one row `[part 0 | part 1 | ...]` per position, each part `heads * d` wide. Fused
/// kernels read and write such rows in place: slicing them with candle would cost a full-size gradient
/// per slice.
#[derive(Clone, Debug)]
pub enum Qkv {
    /// `rows` [b, n, parts * heads * d], and which part holds what.
    Packed {
        /// The projection's output.
        rows: Tensor,
        /// Number of heads.
        heads: usize,
        /// Which part is which.
        parts: PackedLayout,
    },
    /// Tensors of their own, [b, h, n, d] (keys and values [b, h, t, d]).
    Separate {
        /// Queries.
        q: Option<Tensor>,
        /// Keys.
        k: Option<Tensor>,
        /// Values.
        v: Option<Tensor>,
    },
}

/// Which part of a packed row holds queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// Part of the queries.
    pub q: Option<usize>,
    /// Part of the keys.
    pub k: Option<usize>,
    /// Part of the values.
    pub v: Option<usize>,
    /// Number of parts in a row (there may be others that attention does not read).
    pub count: usize,
}

impl PackedLayout {
    /// Rows `[q | k | v]`.
    pub const QKV: Self = Self { q: Some(0), k: Some(1), v: Some(2), count: 3 };
    /// Rows `[k | v]`.
    pub const KV: Self = Self { q: None, k: Some(0), v: Some(1), count: 2 };
    /// Rows `[q | v]`: queries serve as keys.
    pub const QV: Self = Self { q: Some(0), k: None, v: Some(1), count: 2 };
    /// Rows `[v]`.
    pub const V: Self = Self { q: None, k: None, v: Some(0), count: 1 };
}

impl Qkv {
    /// Separate queries, keys and values.
    pub fn separate(q: Tensor, k: Tensor, v: Tensor) -> Self {
        Self::Separate { q: Some(q), k: Some(k), v: Some(v) }
    }

    /// Nothing, for a mixer that reads the layer input alone.
    pub const NONE: Self = Self::Separate { q: None, k: None, v: None };

    /// Keys and values without queries.
    pub fn keys_values(k: Tensor, v: Tensor) -> Self {
        Self::Separate { q: None, k: Some(k), v: Some(v) }
    }

    /// Queries [b, h, n, d], as a view where packed.
    pub fn q(&self) -> Result<Tensor> {
        self.part("queries", |parts| parts.q, |q, _, _| q)
    }

    /// Keys [b, h, t, d], as a view where packed.
    pub fn k(&self) -> Result<Tensor> {
        self.part("keys", |parts| parts.k, |_, k, _| k)
    }

    /// Values [b, h, t, d], as a view where packed.
    pub fn v(&self) -> Result<Tensor> {
        self.part("values", |parts| parts.v, |_, _, v| v)
    }

    /// Queries, keys and values as tensors of their own, views of packed rows whose gradients the tape adds to those of
    /// the rows in place; the others are absent.
    pub fn apart(&self) -> Result<Self> {
        let Self::Packed { rows, heads, parts } = self else { return Ok(self.clone()) };
        let part = |index: Option<usize>| {
            index.map(|index| tape::split_heads(rows, *heads, (index, parts.count))).transpose()
        };
        Ok(Self::Separate { q: part(parts.q)?, k: part(parts.k)?, v: part(parts.v)? })
    }

    fn part<'a>(
        &'a self,
        what: &str,
        index: impl Fn(&PackedLayout) -> Option<usize>,
        pick: impl Fn(&'a Option<Tensor>, &'a Option<Tensor>, &'a Option<Tensor>) -> &'a Option<Tensor>,
    ) -> Result<Tensor> {
        match self {
            Self::Separate { q, k, v } => match pick(q, k, v) {
                Some(tensor) => Ok(tensor.clone()),
                None => bail!("this mechanism was given no {what}"),
            },
            Self::Packed { rows, heads, parts } => {
                let Some(index) = index(parts) else { bail!("this mechanism was given no {what}") };
                let (b, n, width) = rows.dims3()?;
                let d = width / parts.count / heads;
                rows.reshape((b, n, parts.count, *heads, d))?.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2) // [b, h, n, d]
            }
        }
    }

    /// The device of the values.
    pub fn device(&self) -> Result<Device> {
        match self {
            Self::Packed { rows, .. } => Ok(rows.device().clone()),
            Self::Separate { v: Some(v), .. } => Ok(v.device().clone()),
            Self::Separate { v: None, .. } => bail!("this mechanism was given no values"),
        }
    }

    /// Contiguous packed rows [b, n, parts * heads * d], the number of heads, and which part is which; tensors
    /// of their own are copied side by side.
    pub fn packed(&self) -> Result<(Tensor, usize, PackedLayout)> {
        match self {
            Self::Packed { rows, heads, parts } => Ok((rows.contiguous()?, *heads, *parts)),
            Self::Separate { q, k, v } => {
                let (mut pieces, mut index) = (Vec::new(), [None; 3]);
                for (slot, tensor) in [q, k, v].into_iter().enumerate() {
                    let Some(tensor) = tensor else { continue };
                    index[slot] = Some(pieces.len());
                    pieces.push(merge(tensor)?);
                }
                let [q, k, v] = index;
                let (_, heads, _, _) = self.value_dims()?;
                let parts = PackedLayout { q, k, v, count: pieces.len() };
                Ok((Tensor::cat(&pieces, 2)?, heads, parts))
            }
        }
    }

    /// Batch, heads, head width of the values and number of value positions.
    pub fn value_dims(&self) -> Result<(usize, usize, usize, usize)> {
        match self {
            Self::Packed { rows, heads, parts } => {
                let (b, n, width) = rows.dims3()?;
                Ok((b, *heads, n, width / parts.count / heads))
            }
            Self::Separate { v: Some(v), .. } => v.dims4(),
            Self::Separate { v: None, .. } => bail!("this mechanism was given no values"),
        }
    }
}

/// The result of an attention call.
#[derive(Clone, Debug)]
pub enum Heads {
    /// [b, n, heads * d], contiguous.
    Merged {
        /// The rows.
        rows: Tensor,
        /// Number of heads.
        heads: usize,
    },
    /// [b, h, n, d].
    Split(Tensor),
}

impl Heads {
    /// Rows [b, n, e] that have no heads.
    pub const fn rows(rows: Tensor) -> Self {
        Self::Merged { rows, heads: 1 }
    }

    /// As rows [b, n, heads * d].
    pub fn merged(&self) -> Result<Tensor> {
        match self {
            Self::Merged { rows, .. } => Ok(rows.clone()),
            Self::Split(out) => merge(out),
        }
    }

    /// As [b, h, n, d].
    pub fn split(&self) -> Result<Tensor> {
        match self {
            Self::Merged { rows, heads } => split(rows, *heads),
            Self::Split(out) => Ok(out.clone()),
        }
    }
}

/// [b, g, n, d] -> [b, g * times, n, d]: every head `times` times, copies beside each other.
pub fn repeat(x: &Tensor, times: usize) -> Result<Tensor> {
    if times == 1 {
        return Ok(x.clone());
    }
    let heads: Vec<u32> = (0..x.dim(1)? * times).map(|head| (head / times) as u32).collect();
    // selected and not broadcast: what waits as bf16 is read row by row
    x.contiguous()?.index_select(&Tensor::new(heads.as_slice(), x.device())?, 1)
}

/// [b, h, n, d] -> [b, n, h * d].
pub fn merge(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()?.flatten_from(2)
}

/// [b, n, h * d] -> [b, h, n, d] (a view).
pub fn split(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, n, e) = (x.dim(0)?, x.dim(1)?, x.dim(D::Minus1)?);
    x.reshape((b, n, heads, e / heads))?.transpose(1, 2)
}
