//! The widest vector instructions that our kernels use. With AVX2 all of their products in f32 are ours; those of the `gemm` crate,
//! at other levels, and candle's own operations choose for themselves.

use std::sync::OnceLock;

/// Sets of vector instructions; on x86-64 each has those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Those that every processor of the architecture has.
    None,
    /// AVX2 with fused multiply-adds.
    Avx2,
    /// AVX-512.
    Avx512,
    /// AVX-512 with dot products of bf16.
    Avx512Bf16,
    /// AVX-512 with dot products of bf16, and AMX, whose tiles of bf16 the process may use.
    Amx,
    /// NEON.
    Neon,
}

impl SimdLevel {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None if cfg!(target_arch = "x86_64") => "sse2",
            Self::None => "none",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512 with bf16",
            Self::Amx => "avx512 with amx",
            Self::Neon => "neon",
        }
    }
}

/// The variable that limits the level: to compare, and to test what other processors run.
pub const VARIABLE: &str = "EFFATTN_SIMD";

/// The limit that `value` of [`VARIABLE`] sets.
pub fn limit(value: Option<&str>) -> Result<Option<SimdLevel>, String> {
    match value {
        None | Some("") => Ok(None),
        Some("none") => Ok(Some(SimdLevel::None)),
        // what another architecture has limits nothing here
        Some("avx2" | "avx512" | "avx512-bf16") if !cfg!(target_arch = "x86_64") => Ok(None),
        Some("avx2") => Ok(Some(SimdLevel::Avx2)),
        Some("avx512") => Ok(Some(SimdLevel::Avx512)),
        Some("avx512-bf16") => Ok(Some(SimdLevel::Avx512Bf16)),
        Some(other) => Err(format!(
            "{VARIABLE} is {other:?}; expected none, avx2, avx512 or avx512-bf16 (without it, the widest that this processor has)"
        )),
    }
}

/// The value of [`VARIABLE`].
pub fn asked() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

/// The level of this process, which is what the processor has or the limit, if that is less.
#[inline]
pub fn level() -> SimdLevel {
    static LEVEL: OnceLock<SimdLevel> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let limit = limit(asked().as_deref()).ok().flatten();
        limit.map_or(found(), |limit| limit.min(found()))
    })
}

fn found() -> SimdLevel {
    #[cfg(target_arch = "x86_64")]
    {
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        if wide && is_x86_feature_detected!("avx512bf16") {
            if may_use_tiles() { SimdLevel::Amx } else { SimdLevel::Avx512Bf16 }
        } else if wide {
            SimdLevel::Avx512
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            SimdLevel::Avx2
        } else {
            SimdLevel::None
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    if cfg!(target_arch = "aarch64") { SimdLevel::Neon } else { SimdLevel::None }
}

/// Whether the processor has tiles of bf16, and the system lets this process use them when it asks.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
fn may_use_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22; // bits of leaf 7 in EDX
    const AMX_TILE: u32 = 1 << 24;
    if std::arch::x86_64::__cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) != AMX_BF16 | AMX_TILE {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const TILE_DATA: libc::c_ulong = 18; // the component of the processor's state
        // SAFETY: the call only asks for a permission.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_one_of_the_words() {
        assert_eq!(limit(None), Ok(None));
        assert_eq!(limit(Some("none")), Ok(Some(SimdLevel::None)));
        #[cfg(target_arch = "x86_64")]
        assert_eq!(limit(Some("avx2")), Ok(Some(SimdLevel::Avx2)));
        assert!(limit(Some("AVX9")).unwrap_err().contains("expected none, avx2, avx512 or avx512-bf16"));
        assert!(
            SimdLevel::None < SimdLevel::Avx2
                && SimdLevel::Avx2 < SimdLevel::Avx512
                && SimdLevel::Avx512 < SimdLevel::Avx512Bf16
                && SimdLevel::Avx512Bf16 < SimdLevel::Amx
        );
        assert!(level() <= found());
    }
}
