//! The limit of a step: the time that its matrix products alone would take.

use effattn_kernel::product_time::{measure_again, product_seconds};
use effattn_kernel::profile::Product;

/// Most measurements of the products of a step that took less time than they.
const TRIES: usize = 4;

/// Most shapes whose time is measured; those with the most work come first.
const SHAPES: usize = 48;

/// Seconds that the `products` of a step of `fastest` seconds take on all `threads` threads, each at the rate of its kernel and shape
/// on this machine; none without products. No step is faster than its products: where one is, something slowed their measurement
/// down, and they are measured again.
pub fn limit_seconds(products: &[(Product, u64)], threads: usize, fastest: f64) -> Option<f64> {
    let mut limit = seconds(products, product_seconds)? / threads as f64;
    for _ in 1..TRIES {
        if limit > fastest {
            limit = seconds(products, measure_again)? / threads as f64;
        }
    }
    Some(limit)
}

/// Seconds of `products` on one thread; shapes beyond the first [`SHAPES`] are taken to run at the rate of the others.
fn seconds(products: &[(Product, u64)], of: fn(Product) -> f64) -> Option<f64> {
    let macs = |products: &[(Product, u64)]| -> u64 {
        products.iter().map(|(product, calls)| product.macs() * calls).sum()
    };
    let measured = &products[..products.len().min(SHAPES)];
    let known = macs(measured);
    let seconds: f64 = measured.iter().map(|(product, calls)| of(*product) * *calls as f64).sum();
    (known > 0).then(|| seconds * (macs(products) as f64 / known as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_kernel::profile::ProductKernel;

    #[test]
    fn twice_the_products_take_twice_the_time() {
        let product = |m| Product { kernel: ProductKernel::Gemm, m, k: 32, n: 32 };
        let of = |calls, threads| limit_seconds(&[(product(64), calls)], threads, f64::INFINITY).unwrap();
        assert!((of(10, 1) / of(5, 1) - 2.0).abs() < 1e-9 && (of(10, 1) / of(10, 2) - 2.0).abs() < 1e-9);
        let many: Vec<(Product, u64)> = (0..2 * SHAPES).map(|_| (product(64), 1)).collect();
        assert!(
            (limit_seconds(&many, 1, f64::INFINITY).unwrap() / of(2 * SHAPES as u64, 1) - 1.0).abs() < 1e-9
        );
        let shape = Product { kernel: ProductKernel::Gemm, m: 48, k: 16, n: 16 };
        let first = limit_seconds(&[(shape, 1)], 1, f64::INFINITY).unwrap();
        assert!(limit_seconds(&[(shape, 1)], 1, 0.0).unwrap() <= first);
        assert_eq!(limit_seconds(&[], 2, 1.0), None);
    }
}
