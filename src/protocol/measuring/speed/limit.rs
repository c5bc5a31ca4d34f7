//! The limit of a step: the time that its matrix products alone would take.

use effattn_kernel::product_time::{measure_again, product_seconds};
use effattn_kernel::profile::Product;

/// Most measurements of the products of a step, where it took less time than they.
const TRIES: usize = 4;

/// Most shapes whose time is measured; those with the most work come first.
const SHAPES: usize = 48;

/// Seconds that the `products` of a step of `fastest` seconds take on all `threads` threads, each at the rate of its kernel and shape
/// on this machine; none without products. No step is faster than its products: where one is, something slowed their measurement
/// down, and they are measured again.
pub fn limit_seconds(products: &[(Product, u64)], threads: usize, fastest: f64) -> Option<f64> {
    let of = |time: fn(Product) -> f64| Some(seconds(products, time)? / threads as f64);
    possible(of(product_seconds)?, fastest, || of(measure_again))
}

/// `limit`, measured `again` while it is longer than the `fastest` step.
fn possible(mut limit: f64, fastest: f64, mut again: impl FnMut() -> Option<f64>) -> Option<f64> {
    for _ in 1..TRIES {
        if limit <= fastest {
            break;
        }
        limit = again()?;
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
        assert_eq!(limit_seconds(&[], 2, 1.0), None);
    }

    #[test]
    fn a_limit_above_the_fastest_step_is_measured_again_a_few_times() {
        let measured = |times: &[f64]| {
            let mut rest = times[1..].iter();
            let limit = possible(times[0], 1.0, || rest.next().copied()).unwrap();
            (limit, times.len() - rest.len())
        };
        assert_eq!(measured(&[0.9, 0.5]), (0.9, 1));
        assert_eq!(measured(&[3.0, 2.0, 0.8, 0.5]), (0.8, 3));
        assert_eq!(measured(&[3.0, 2.0, 1.7, 1.6, 0.5]), (1.6, TRIES));
    }
}
