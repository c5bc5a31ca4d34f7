//! What holds exactly: determinism, the arrow of time, inert padding; and finiteness at extremes.

use super::*;

/// The exact numbers (both zeros the same).
fn bits(x: &Tensor) -> Vec<u32> {
    x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().map(|x| (x + 0.0).to_bits()).collect()
}

fn all_bits(outcome: &Outcome) -> Vec<Vec<u32>> {
    std::iter::once(&outcome.out).chain(&outcome.grads).map(bits).collect()
}

fn cases(n: usize) -> impl Iterator<Item = Case> {
    let both = MAPS.iter().flat_map(|map| [(*map, false), (*map, true)]);
    both.filter(|(map, causal)| !causal || *map != "performer-zero").map(move |(map, causal)| {
        let case = Case::new(&format!("{map} {causal}"), [2, 2, n, n, 8, 8], map, causal);
        let gated = causal && matches!(map, "gaussian" | "arccos");
        if gated { case.gate(1.0) } else { case }
    })
}

#[test]
fn the_number_of_threads_does_not_change_the_bits() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let (one, three) = (pool(1), pool(3));
    for case in cases(600) {
        let run = |packed| all_bits(&case.run(DType::F32, packed).unwrap());
        for packed in [false, true] {
            let first = one.install(|| run(packed));
            assert!(first == three.install(|| run(packed)), "{}", case.name);
            assert!(first == one.install(|| run(packed)), "{}", case.name);
        }
    }
}

#[test]
fn causal_results_ignore_the_future_exactly() {
    for mode in [KernelMode::Fused, KernelMode::Composed] {
        for case in cases(300).filter(|case| case.causal) {
            for from in [1, 40, 64, 299] {
                let mut other = case.clone();
                for x in &mut other.inputs {
                    if x.rank() < 3 || x.dim(2).unwrap() != 300 {
                        continue; // W
                    }
                    let (head, tail) =
                        (x.narrow(2, 0, from).unwrap(), x.narrow(2, from, 300 - from).unwrap());
                    *x = Tensor::cat(&[head, (tail * 30.0).unwrap()], 2).unwrap();
                }
                let run = |case: &Case| with_mode(mode, || case.run(DType::F32, true)).unwrap().out;
                let before = |out: Tensor| bits(&out.narrow(2, 0, from).unwrap());
                assert!(before(run(&case)) == before(run(&other)), "{} from {from}", case.name);
            }
        }
    }
}

#[test]
fn padding_is_inert() {
    for case in cases(150) {
        let case = case.hide(|b, j| j % 9 == 4 || j > 120 + b);
        let mut other = case.clone();
        let mask = case.mask.as_ref().unwrap().reshape((2, 1, 150, 1)).unwrap();
        let garbage = (1.0 - &mask).unwrap().affine(1e4, 0.0).unwrap();
        for x in &mut other.inputs[..3] {
            *x = x.broadcast_mul(&mask).unwrap().broadcast_add(&garbage).unwrap();
        }
        let (a, b) = (case.run(DType::F32, true).unwrap(), other.run(DType::F32, true).unwrap());
        assert!(bits(&case.visible(&a.out)) == bits(&case.visible(&b.out)), "{}", case.name);
        for (index, (a, b)) in a.grads.iter().zip(&b.grads).enumerate() {
            assert_eq!(bits(a), bits(b), "{}: gradient {index}", case.name);
        }
        for grad in &b.grads[..3] {
            let hidden = grad.broadcast_mul(&(1.0 - &mask).unwrap()).unwrap().abs().unwrap();
            assert_eq!(hidden.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0, "{}", case.name);
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zero() {
    for case in cases(70) {
        if matches!(&case.phi, Phi::Favor(_, favor) if favor.masked_as_zero) {
            continue; // zero vectors are seen
        }
        let case = case.hide(|_, _| true);
        for mode in [KernelMode::Fused, KernelMode::Composed] {
            let outcome = with_mode(mode, || case.run(DType::F32, false)).unwrap();
            let zero = |x: &Tensor| bits(&x.abs().unwrap()).iter().all(|bits| *bits == 0);
            assert!(zero(&outcome.out) && outcome.grads.iter().all(zero), "{} {mode:?}", case.name);
        }
    }
}

#[test]
fn extreme_inputs_stay_finite() {
    for mode in [KernelMode::Fused, KernelMode::Composed] {
        for case in cases(130) {
            type Change = fn(&Tensor) -> Result<Tensor>;
            let changes: [Change; 4] = [
                |x| x.affine(0.0, 0.0),
                |x| x.affine(1e4, 0.0),
                |x| x.abs()?.affine(-1e4, 0.0),
                |x| x.affine(1e-20, 0.0),
            ];
            for (index, change) in changes.iter().enumerate() {
                let mut case = case.clone();
                for x in &mut case.inputs[..3] {
                    *x = change(x).unwrap();
                }
                let outcome = with_mode(mode, || case.run(DType::F32, true)).unwrap();
                for (at, x) in std::iter::once(&outcome.out).chain(&outcome.grads).enumerate() {
                    let x = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert!(
                        x.iter().all(|x| x.is_finite()),
                        "{} {mode:?}: change {index}, tensor {at}",
                        case.name
                    );
                }
            }
        }
    }
}
