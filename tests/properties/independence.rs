//! What must not influence a result: the future, padded positions, other samples, other heads.

use std::collections::BTreeMap;

use effattn::attention::{Projections, Property};

use super::run::{Findings, Inputs, MODES, Results, Run, differs, masks, row_counts};
use super::zoo::{Case, HEADS, cases};

const LENGTHS: [usize; 3] = [5, 12, 17];

/// Whether a gradient with respect to inputs has an entry that is not 0 where `expected_zero` says so.
fn leaks(
    case: &Case,
    inputs: &Inputs,
    results: &Results,
    expected_zero: impl Fn(&str, usize, usize) -> bool,
) -> Option<String> {
    for (&name, input) in &inputs.0 {
        let dims = input.dims();
        let (len, width) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        let rows_per_sample = input.elem_count() / dims[0] / width;
        let shift = if name.starts_with('q') { case.memory() } else { 0 };
        for (row, grad) in results.grads[name].chunks(width).enumerate() {
            let (sample, position) = (row / rows_per_sample, row % len + shift);
            if expected_zero(name, sample, position) && grad.iter().any(|&g| g != 0.0) {
                return Some(format!("gradient of {name} at sample {sample} position {position}"));
            }
        }
    }
    None
}

/// Runs `violation` for every case and mask; an exception of the entry must be violated somewhere.
fn prove(
    property: Property,
    lengths: &[usize],
    of_interest: impl Fn(&Case) -> bool,
    violation: impl Fn(&Case, Option<&[f32]>, effattn::kernel::KernelMode) -> Option<String>,
) {
    let mut findings = Findings::default();
    let mut excepted = BTreeMap::<String, (&str, bool)>::new();
    for &n in lengths {
        for case in cases(n).iter().filter(|case| of_interest(case)) {
            for mask in masks(case) {
                for mode in MODES {
                    let found = violation(case, mask.as_deref(), mode);
                    if let Some(reason) = case.exception(property) {
                        let variant = format!("{}:{}", case.entry.name, case.knobs.changes(case.entry.knobs));
                        excepted.entry(variant).or_insert((reason, false)).1 |= found.is_some();
                    } else if let Some(found) = found {
                        findings.add(format!("{case} {mode:?} mask={}: {found}", mask.is_some()));
                    }
                }
            }
        }
    }
    for (variant, (reason, violated)) in excepted {
        if !violated {
            findings.add(format!("{variant} does not break {property:?}, though its entry says: {reason}"));
        }
    }
    findings.finish();
}

#[test]
fn causal_outputs_ignore_the_future_exactly() {
    prove(
        Property::IgnoresFuture,
        &LENGTHS,
        |case| case.causal,
        |case, mask, mode| {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(case, 1);
            let before = Run { mask, ..Run::new(case, &params, &inputs, mode) }.results();
            for cut in [1, case.queries / 2, case.queries - 1] {
                let border = case.memory() + cut;
                let other =
                    inputs.map(case, |_, _, _, at, old| if at < border { old } else { 3.0 - 20.0 * old });
                let weigh = |_: usize, _: usize, query: usize| f32::from(u8::from(query < cut));
                let after = Run { mask, weigh: &weigh, ..Run::new(case, &params, &other, mode) }.results();
                if let Some(row) = differs(case, (&before.out, &after.out), 0.0, |_, _, query| query < cut) {
                    return Some(format!("output {row:?} sees positions from {border} on"));
                }
                if let Some(leak) = leaks(case, &other, &after, |_, _, at| at >= border) {
                    return Some(format!("{leak} is not 0 for a loss before {border}"));
                }
            }
            None
        },
    );
}

#[test]
fn padded_positions_are_inert() {
    prove(
        Property::PaddingInert,
        &LENGTHS,
        |_| true,
        |case, mask, mode| {
            let mask = mask?;
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(case, 2);
            // in cross attention the mask is about keys only
            let padded = |name: &str, sample: usize, at: usize| {
                (case.aligned() || !name.starts_with('q'))
                    && name != "stream" // whose rows are no positions
                    && !name.ends_with("_cls")
                    && mask[sample * case.keys + at] == 0.0
            };
            let garbage = inputs.map(
                case,
                |name, sample, _, at, old| {
                    if padded(name, sample, at) { 1e4 * old - 7.0 } else { old }
                },
            );
            let counts = |sample: usize, _: usize, query: usize| row_counts(case, Some(mask), sample, query);
            let weigh =
                |sample: usize, head: usize, query: usize| f32::from(u8::from(counts(sample, head, query)));
            let run =
                |inputs| Run { mask: Some(mask), weigh: &weigh, ..Run::new(case, &params, inputs, mode) };
            let (before, after) = (run(&inputs).results(), run(&garbage).results());
            if let Some(row) = differs(case, (&before.out, &after.out), 0.0, counts) {
                return Some(format!("output {row:?} depends on padding"));
            }
            if before.cls != after.cls {
                return Some("the class token's output depends on padding".into());
            }
            leaks(case, &garbage, &after, padded)
        },
    );
}

#[test]
fn samples_do_not_influence_each_other() {
    prove(
        Property::BatchIndependent,
        &LENGTHS,
        |_| true,
        |case, mask, mode| {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(case, 3);
            let other =
                inputs.map(case, |_, sample, _, _, old| if sample == 0 { old } else { 2.5 - 3.0 * old });
            let weigh = |sample: usize, _: usize, _: usize| f32::from(u8::from(sample == 0));
            let before = Run { mask, ..Run::new(case, &params, &inputs, mode) }.results();
            let after = Run { mask, weigh: &weigh, ..Run::new(case, &params, &other, mode) }.results();
            if let Some(row) = differs(case, (&before.out, &after.out), 0.0, |sample, _, _| sample == 0) {
                return Some(format!("output {row:?} depends on the other sample"));
            }
            leaks(case, &other, &after, |_, sample, _| sample == 1)
        },
    );
}

#[test]
fn heads_do_not_influence_each_other() {
    prove(
        Property::HeadsIndependent,
        &LENGTHS,
        |case| (case.entry.needs)(&case.knobs).projections != Projections::NONE, // a mixer has no heads
        |case, mask, mode| {
            let params = case.params().expect("parameters");
            let inputs = Inputs::random(case, 4);
            let before = Run { mask, ..Run::new(case, &params, &inputs, mode) }.results();

            let other = inputs.map(
                case,
                |name, _, head, _, old| {
                    if head == 0 || name == "x" { old } else { 2.5 - 3.0 * old }
                },
            );
            let after = Run { mask, ..Run::new(case, &params, &other, mode) }.results();
            let counts = |sample, query| row_counts(case, mask, sample, query);
            if let Some(row) = differs(case, (&before.out, &after.out), 1e-6, |sample, head, query| {
                head == 0 && counts(sample, query)
            }) {
                return Some(format!("output {row:?} depends on other heads"));
            }

            let turned = super::heads::turn(&inputs, &params).expect("permuted heads");
            let after = Run { mask, ..Run::new(case, &turned.1, &turned.0, mode) }.results();
            let expected = super::heads::turn_rows(&before.out, case.queries);
            let row = differs(case, (&expected, &after.out), 1e-5, |sample, _, query| counts(sample, query));
            row.map(|row| format!("output {row:?} is not permuted with the {HEADS} heads"))
        },
    );
}
