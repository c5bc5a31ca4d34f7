//! Products of bf16 operands through every mechanism: near f32, and the same bits on any number of threads.
//!
//! The number format belongs to the process, so these tests are a program of their own, with one test.

mod blocks;
mod waiting;

#[path = "../recipe/mean.rs"]
mod mean; // the toy mechanism of `zoo`
#[path = "../properties/run.rs"]
#[allow(dead_code)]
mod run;
#[path = "../properties/zoo.rs"]
#[allow(dead_code)]
mod zoo;

use std::collections::BTreeMap;

use effattn::kernel::KernelMode;
use effattn::kernel::cpu::matmul_format::{MatmulFormat, set_products};

use run::{Inputs, Results, Run};
use zoo::{Case, cases};

/// Distance from f32 in shares of the Euclidean norm: one rounding is up to 2^-9, and logits amplify it.
const NEAR: f64 = 0.02;

/// Mechanisms that divide by a sum of features of both signs, which may come near to zero, norm such a sum (retention), or sum
/// products of complex states that cancel (lru).
const CANCELS: &[&str] = &["identity-linear", "leakyrelu-linear", "rfa", "retention", "lru"];

/// Mechanisms without a fused kernel, or without matrix products: theirs stay in f32.
const COMPOSED: &[&str] = &["mean", "aft-simple", "aft-local", "fnet", "mega-ema"];

fn norm(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Largest distance of a result; a gradient that is nearly nothing is measured by the size of the largest.
fn distance(got: &Results, want: &Results) -> (f64, String) {
    let outs = [("out", &got.out, &want.out), ("out_cls", &got.cls, &want.cls)];
    let grads = want.grads.iter().map(|(name, want)| (name.as_str(), &got.grads[name], want));
    let mean_square = |x: &[f32]| norm(x.iter().copied()) / (x.len().max(1) as f64).sqrt();
    let floor = want.grads.values().map(|x| mean_square(x)).fold(0.0, f64::max);
    let of = |(name, got, want): (&str, &Vec<f32>, &Vec<f32>)| {
        let gap = norm(got.iter().zip(want).map(|(got, want)| got - want));
        let floor = if name.starts_with("out") { 0.0 } else { floor * (want.len() as f64).sqrt() };
        let size = norm(want.iter().copied()).max(floor);
        (if gap > 0.0 { gap / size } else { 0.0 }, name.to_owned())
    };
    let all = outs.into_iter().chain(grads).map(of);
    all.max_by(|a, b| a.0.total_cmp(&b.0)).expect("results")
}

fn in_format(products: MatmulFormat, case: &Case) -> Results {
    let params = case.params().expect("parameters");
    let inputs = Inputs::random(case, 5);
    set_products(products);
    let results = Run::new(case, &params, &inputs, KernelMode::Fused).results();
    set_products(MatmulFormat::F32);
    results
}

#[test]
fn every_mechanism_in_bf16_is_near_f32_and_does_not_depend_on_threads() {
    let pools = [1, 3].map(|count| rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap());
    let mut worst: BTreeMap<&str, (f64, String)> = BTreeMap::new();
    for case in [16, 33].into_iter().flat_map(cases) {
        let want = in_format(MatmulFormat::F32, &case);
        let [got, again] =
            [0, 1].map(|pool: usize| pools[pool].install(|| in_format(MatmulFormat::Bf16, &case)));
        assert!(got.out == again.out && got.grads == again.grads, "{case}: threads change the bits");
        let (distance, name) = distance(&got, &want);
        let entry = worst.entry(case.entry.name).or_default();
        if distance >= entry.0 {
            *entry = (distance, format!("{name} of {case}"));
        }
    }
    for (mechanism, (distance, name)) in &worst {
        println!("{mechanism:18} {distance:.5} {name}");
    }
    for (mechanism, (distance, name)) in &worst {
        assert!(
            *distance < NEAR || CANCELS.contains(mechanism),
            "{mechanism}: {name} is {distance} from f32"
        );
        let rounds = *distance > 1e-4;
        assert!(rounds != COMPOSED.contains(mechanism), "{mechanism}: products in bf16: {rounds}");
    }
    blocks::check(&pools);
    waiting::check();
}
