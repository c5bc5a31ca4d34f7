//! The number format of matrix products.

use std::sync::atomic::{AtomicU8, Ordering};

/// Number format of the operands of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulFormat {
    /// As they are stored.
    #[default]
    F32,
    /// Rounded to bf16 (to nearest, ties to even) and summed in f32, as mixed precision does. All that is not a product
    /// stays f32, and so do the products of iterations that amplify rounding (the pseudo-inverse of Nyström attention) or
    /// decide (the buckets of LSH attention). Activations may wait for the backward pass as bf16.
    Bf16,
}

/// One setting for the process: kernels read it on the threads of the pool.
static PRODUCTS: AtomicU8 = AtomicU8::new(0);

/// The format of this process.
pub fn matmul_format() -> MatmulFormat {
    if PRODUCTS.load(Ordering::Relaxed) == 0 { MatmulFormat::F32 } else { MatmulFormat::Bf16 }
}

/// Sets the format of this process; not while an operation runs, nor between a forward pass and its backward pass.
pub fn set_products(products: MatmulFormat) {
    PRODUCTS.store(products as u8, Ordering::Relaxed);
}
