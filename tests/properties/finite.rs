//! Any length, and inputs at the edge of what floats hold.

use effattn::attention::{self, Property};

use super::run::{Findings, Inputs, MODES, Results, Run, masks, row_counts};
use super::zoo::cases;

/// What is not finite.
fn bad(results: &Results) -> Option<String> {
    let all = results.grads.iter().map(|(name, grad)| (format!("gradient of {name}"), grad));
    let outs = [("out".to_owned(), &results.out), ("out_cls".to_owned(), &results.cls)];
    let mut wrong = outs.into_iter().chain(all).filter(|(_, x)| x.iter().any(|x| !x.is_finite()));
    wrong.next().map(|(name, _)| format!("{name} is not finite"))
}

#[test]
fn every_length_works() {
    let mut findings = Findings::default();
    for n in [1, 2, 3, 4, 7, 8, 11, 16, 23, 33] {
        for case in cases(n) {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(&case, 5);
            for mask in masks(&case) {
                let mask = mask.as_deref();
                for mode in MODES {
                    let results = Run { mask, ..Run::new(&case, &params, &inputs, mode) }.results();
                    if let Some(what) = bad(&results) {
                        findings.add(format!("{case} {mode:?}: {what}"));
                    }
                }
            }
        }
    }
    findings.finish();
}

#[test]
fn lengths_that_an_entry_refuses_are_named_as_exceptions() {
    for entry in attention::entries() {
        for exception in entry.exceptions.iter().filter(|e| e.property == Property::AnyLength) {
            let refused = (1..=16).any(|n| {
                !cases(n).iter().any(|case| {
                    case.entry.name == entry.name && (exception.applies)(&case.knobs, case.causal)
                })
            });
            assert!(
                refused,
                "{} takes every length, though its entry says: {}",
                entry.name, exception.reason
            );
        }
    }
}

#[test]
fn extreme_inputs_give_finite_outputs_and_gradients() {
    type Change = fn(f32) -> f32;
    let extremes: [(&str, Change); 6] = [
        ("all zero", |_| 0.0),
        ("1e4", |x| 1e4 * x),
        ("-1e4", |_| -1e4),
        ("all negative", |x| -0.1 - x.abs()),
        ("all equal", |_| 0.7),
        ("tiny", |x| 1e-20 * x),
    ];
    let mut findings = Findings::default();
    for n in [6, 13] {
        for case in cases(n) {
            let params = case.params().expect("parameters");
            for (name, change) in extremes {
                let inputs = Inputs::random(&case, 6).map(&case, |_, _, _, _, x| change(x));
                for mask in masks(&case) {
                    let mask = mask.as_deref();
                    for mode in MODES {
                        let results = Run { mask, ..Run::new(&case, &params, &inputs, mode) }.results();
                        if let Some(what) = bad(&results)
                            && case.exception(Property::Finite).is_none()
                        {
                            findings.add(format!("{case} {mode:?} {name} mask={}: {what}", mask.is_some()));
                        }
                    }
                }
            }
        }
    }
    findings.finish();
}

#[test]
fn a_query_that_sees_no_key_gives_zero() {
    let mut findings = Findings::default();
    for case in cases(9).iter().filter(|case| case.aligned() || !case.causal) {
        let params = case.params().expect("parameters");
        let inputs = Inputs::random(case, 7);
        let mask = vec![0.0; super::zoo::BATCH * case.keys];
        for mode in MODES {
            let run = Run { mask: Some(&mask), ..Run::new(case, &params, &inputs, mode) };
            let results = run.results();
            if let Some(what) = bad(&results) {
                findings.add(format!("{case} {mode:?}: {what}"));
            }
            let counted = row_counts(case, Some(&mask), 0, 0);
            if counted && !case.cls && results.out.iter().any(|&x| x != 0.0) {
                findings.add(format!("{case} {mode:?}: a query without keys gives something"));
            }
        }
    }
    findings.finish();
}
