//! The time of a matrix product by its kernel and shape on this machine.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use crate::attend::tile_product;
use crate::cpu::gemm::{Mat, MatMut, Threads, gemm_exact};
use crate::cpu::panel::Panels;
use crate::cpu::rates::{timed, whole_numbers};
use crate::profile::{Product, ProductKernel};

/// The fastest that this process has seen of a product on a number of threads, in seconds.
static KNOWN: Mutex<BTreeMap<(Product, usize), f64>> = Mutex::new(BTreeMap::new());

/// Seconds of one call of `product` by its kernel while every thread makes such a product of its own, the fastest of three
/// rounds of a millisecond or one call; operands are where the last call left them. Measured once by a process.
pub fn product_seconds(product: Product) -> f64 {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let seconds = known.get(&(product, rayon::current_num_threads())).copied();
    drop(known);
    seconds.unwrap_or_else(|| measure_again(product))
}

/// Measures `product` as [`product_seconds`] does, whether it is known or not. Other programs can only slow a product down, so that the
/// fastest of all measurements is its time.
pub fn measure_again(product: Product) -> f64 {
    let seconds = measure(product);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let fastest = known.entry((product, rayon::current_num_threads())).or_insert(seconds);
    *fastest = fastest.min(seconds);
    *fastest
}

fn measure(product: Product) -> f64 {
    const ROUNDS: usize = 3;
    const ROUND: f64 = 1e-3;
    let Product { kernel, m, k, n } = product;
    if product.macs() == 0 {
        return 0.0;
    }
    let mut threads: Vec<Operands> =
        (0..rayon::current_num_threads()).map(|_| Operands::new(kernel, m, k, n)).collect();
    let mut calls = |count: usize| {
        timed(|| threads.par_iter_mut().for_each(|one| (0..count).for_each(|_| one.multiply(m, k, n))))
    };
    calls(1);
    let count = ((ROUND / calls(1).max(1e-9)).ceil() as usize).clamp(1, 100_000);
    let rounds = (0..ROUNDS).map(|_| calls(count) / count as f64);
    rounds.fold(f64::INFINITY, f64::min)
}

/// The operands of a product on one thread.
struct Operands {
    kernel: ProductKernel,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    pairs: [Vec<u32>; 2],
    panels: Option<Panels>,
}

impl Operands {
    fn new(kernel: ProductKernel, m: usize, k: usize, n: usize) -> Self {
        let (mut factors, mut pairs) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        match kernel {
            ProductKernel::Pairs => {
                let depth = k.div_ceil(2);
                let one = 0x3f80_3f80; // two times 1 as bf16
                pairs = [m * depth, depth * n.next_multiple_of(16)].map(|count| vec![one; count]);
            }
            ProductKernel::Gemm | ProductKernel::Panel | ProductKernel::Tile => {
                factors = [m * k, k * n].map(whole_numbers)
            }
        }
        let [a, b] = factors;
        let panels = (kernel == ProductKernel::Panel).then(|| Panels::new(Mat::new(&b, k, n), false));
        Self { kernel, a, b, c: vec![0.0; m * n], pairs, panels }
    }

    fn multiply(&mut self, m: usize, k: usize, n: usize) {
        let Self { kernel, a, b, c, pairs, panels } = self;
        match kernel {
            ProductKernel::Gemm => {
                gemm_exact(
                    MatMut::new(c, m, n),
                    Mat::new(a, m, k),
                    Mat::new(b, k, n),
                    1.0,
                    None,
                    Threads::One,
                );
            }
            ProductKernel::Panel => {
                let product = |panels: &Panels| panels.multiply(Mat::new(a, m, k), c, n, false);
                panels.iter().for_each(product);
            }
            ProductKernel::Tile => tile_product(c, a, b, m, k, n),
            #[cfg(target_arch = "x86_64")]
            ProductKernel::Pairs => {
                crate::cpu::bf16::pairs_product(c, &pairs[0], &pairs[1], [m, k.div_ceil(2), n])
            }
            #[cfg(not(target_arch = "x86_64"))]
            ProductKernel::Pairs => _ = pairs, // nothing counts it there
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_products_has_a_time_by_shape() {
        let mut kernels = vec![ProductKernel::Gemm, ProductKernel::Tile];
        kernels.extend(crate::cpu::panel::has_vectors().then_some(ProductKernel::Panel));
        kernels.extend(crate::cpu::bf16::is_native().then_some(ProductKernel::Pairs));
        for kernel in kernels {
            let seconds = |m| measure_again(Product { kernel, m, k: 64, n: 64 });
            // another program may take the processor from a whole measurement
            let times = || (seconds(16), seconds(1024));
            let (small, large) =
                (0..20).map(|_| times()).find(|(small, large)| small < large).unwrap_or_else(times);
            assert!(0.0 < small && small < large, "{kernel:?}: {small} {large}");
        }
        let product = Product { kernel: ProductKernel::Gemm, m: 128, k: 64, n: 64 };
        let first = product_seconds(product);
        assert!((0..3).all(|_| measure_again(product) <= first) && product_seconds(product) <= first);
        assert_eq!(product_seconds(Product { kernel: ProductKernel::Gemm, m: 0, k: 3, n: 3 }), 0.0);
    }
}
