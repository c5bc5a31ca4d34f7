//! The limit of a step: the time that its matrix products alone would take.

use effattn_kernel::product_time::product_seconds;
use effattn_kernel::profile::Product;

/// Most shapes whose time is measured; those with the most work come first.
const SHAPES: usize = 48;

/// Seconds that the `products` of a step take on all `threads` threads, each at the rate of its kernel and shape on this machine;
/// none without products. Shapes beyond the first [`SHAPES`] are taken to run at the rate of the others.
pub fn limit_seconds(products: &[(Product, u64)], threads: usize) -> Option<f64> {
    let macs = |products: &[(Product, u64)]| -> u64 {
        products.iter().map(|(product, calls)| product.macs() * calls).sum()
    };
    let measured = &products[..products.len().min(SHAPES)];
    let known = macs(measured);
    let seconds: f64 =
        measured.iter().map(|(product, calls)| product_seconds(*product) * *calls as f64).sum();
    (known > 0).then(|| seconds / threads as f64 * (macs(products) as f64 / known as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_kernel::profile::ProductKernel;

    #[test]
    fn twice_the_products_take_twice_the_time() {
        let product = |m| Product { kernel: ProductKernel::Gemm, m, k: 32, n: 32 };
        let of = |calls, threads| limit_seconds(&[(product(64), calls)], threads).unwrap();
        assert!((of(10, 1) / of(5, 1) - 2.0).abs() < 1e-9 && (of(10, 1) / of(10, 2) - 2.0).abs() < 1e-9);
        let many: Vec<(Product, u64)> = (0..2 * SHAPES).map(|_| (product(64), 1)).collect();
        assert!((limit_seconds(&many, 1).unwrap() / of(2 * SHAPES as u64, 1) - 1.0).abs() < 1e-9);
        assert_eq!(limit_seconds(&[], 2), None);
    }
}
