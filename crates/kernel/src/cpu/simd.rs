//! Vector arithmetic by [`pulp`], chosen for the processor at run time (AVX-512, AVX2, NEON, or scalar).
//!
//! A kernel's inner function is written once with [`simd_fn!`](crate::simd_fn); the helpers of
//! [`super::math`] inline into it. Choosing costs a few nanoseconds: put a row or a tile behind one call,
//! not an element.

use std::sync::OnceLock;

pub use pulp::{Arch, Simd, WithSimd};

use crate::device::simd::{SimdLevel, level};

/// The vector instructions of this process ([`level`]).
#[inline]
pub fn arch() -> Arch {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    *ARCH.get_or_init(|| of(level()))
}

/// The instructions of `level`, which the processor has.
fn of(level: SimdLevel) -> Arch {
    match level {
        SimdLevel::None => Arch::Scalar,
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        _ => Arch::new(),
    }
}

/// Defines a function whose body is compiled once per instruction set and chosen at run time.
///
/// `S` names the type of the instruction set and `simd` its token; both go to the helpers of
/// [`math`](crate::cpu::math). References need the lifetime `'a`.
///
/// ```
/// use effattn_kernel::cpu::math;
/// effattn_kernel::simd_fn! {
///     /// y += a x
///     pub fn axpy<S>(simd, a: f32, x: &'a [f32], y: &'a mut [f32]) {
///         math::axpy::<S>(simd, a, x, y)
///     }
/// }
/// let mut y = [1.0, 2.0];
/// axpy(2.0, &[3.0, 4.0], &mut y);
/// assert_eq!(y, [7.0, 10.0]);
/// ```
#[macro_export]
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$S:ident>(
        $simd:ident $(, $arg:ident: $type:ty)* $(,)?
    ) $(-> $output:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<'a>($($arg: $type),*) $(-> $output)? {
            struct Op<'a> { $($arg: $type,)* lifetime: std::marker::PhantomData<&'a ()> }
            impl<'a> $crate::cpu::simd::WithSimd for Op<'a> {
                type Output = $crate::simd_fn!(@output $($output)?);
                #[inline(always)]
                fn with_simd<$S: $crate::cpu::simd::Simd>(self, $simd: $S) -> Self::Output {
                    let Self { $($arg,)* lifetime: _ } = self;
                    $body
                }
            }
            $crate::cpu::simd::arch().dispatch(Op { $($arg,)* lifetime: std::marker::PhantomData })
        }
    };
    (@output) => { () };
    (@output $output:ty) => { $output };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a vector.
    struct Width;

    impl WithSimd for Width {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            size_of::<S::f32s>()
        }
    }

    #[test]
    fn a_limit_narrows_the_vectors() {
        assert_eq!(of(SimdLevel::None).dispatch(Width), size_of::<f32>());
        #[cfg(target_arch = "x86_64")]
        if level() >= SimdLevel::Avx2 {
            assert_eq!(of(SimdLevel::Avx2).dispatch(Width), 32);
        }
    }
}
