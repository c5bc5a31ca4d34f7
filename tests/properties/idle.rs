//! No knob can be set without effect: every setting that differs from its default changes an output, a gradient or a
//! parameter, or it is refused.

use std::collections::HashMap;

use candle_core::Tensor;
use effattn::attention::MechanismEntry;
use effattn::attention::knobs::{Kind, KnobSpec, Value};
use effattn::kernel::KernelMode;

use super::run::{Findings, Inputs, Run};
use super::zoo::{Case, cases};

/// Lengths and ranks that have an effect at another length only, and numbers that make a difference below rounding.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("linformer", "n_max", "sizes the parameters for a longer sequence"),
    ("linformer-window", "n_max", "sizes the parameters for a longer sequence"),
    ("linformer", "per_layer", "matters from the second layer on"),
    ("linformer-window", "per_layer", "matters from the second layer on"),
    ("nystrom", "n_iter", "matters with fewer landmarks than positions"),
    ("nystrom", "init", "matters with fewer landmarks than positions"),
    ("performer", "detach", "the gradient that it stops cancels but for the guard"),
    ("deltanet", "conv", "belongs to the layer around it"),
    ("gated-deltanet", "conv", "belongs to the layer around it"),
    ("mamba2", "conv", "belongs to the layer around it"),
    ("luna", "dynamic_p", "matters where a sample has fewer tokens than there are packed rows"),
    ("s5", "clip_eigs", "matters once a real part has grown beyond -1e-4"),
    ("ls", "compat", "its word stands for mem_compress=hidden, which the same case names"),
    ("ls", "mem_compress", "compat=code stands for it"),
];

/// Guards of a division, which matter where a sum of weights is near 0.
const GUARDS: &[&str] = &["eps", "guard", "l2_eps", "norm_eps"];

/// Other values to try.
fn others(knob: &KnobSpec) -> Vec<Value> {
    match knob.kind {
        Kind::Bool { default } => vec![Value::Bool(!default)],
        Kind::Word { words, default } => {
            words.iter().filter(|word| *word != default).map(Value::Word).collect()
        }
        Kind::Int { min, max, .. } => {
            [2, 3, 6].into_iter().filter(|x| min <= *x && *x <= max).map(Value::Int).collect()
        }
        Kind::AutoInt { .. } => vec![Value::Int(40), Value::Int(3), Value::Int(1)],
        Kind::Float { .. } | Kind::AutoFloat { .. } => vec![Value::Float(0.3)],
        Kind::List { .. } => vec![Value::List(vec![1, 2])],
        Kind::AutoIntOrList => vec![Value::Int(4)],
        Kind::AutoFloats { .. } => vec![Value::Floats(vec![0.1, 0.3])],
    }
}

fn shapes(params: &HashMap<String, Tensor>) -> Vec<(String, Vec<usize>)> {
    let mut all: Vec<_> = params.iter().map(|(name, value)| (name.clone(), value.dims().to_vec())).collect();
    all.sort();
    all
}

/// Whether both compute the same, forward and backward, with the same parameters.
fn same(a: &Case, b: &Case) -> bool {
    let (first, second) = (a.params().expect("parameters"), b.params().expect("parameters"));
    if shapes(&first) != shapes(&second) {
        return false;
    }
    let (inputs, others) = (Inputs::random(a, 3), Inputs::random(b, 3));
    if inputs.0.len() != others.0.len() {
        return false;
    }
    let one = Run::new(a, &first, &inputs, KernelMode::Fused).results();
    let two = Run::new(b, &second, &others, KernelMode::Fused).results();
    one.out == two.out && one.cls == two.cls && one.grads == two.grads
}

#[test]
fn no_knob_is_without_effect() {
    let mut findings = Findings::default();
    let admitted = |case: &Case| case.entry.admits(&case.knobs, &case.shape()).is_ok();
    for case in cases(24).iter().filter(|case| admitted(case)) {
        let entry: &MechanismEntry = case.entry;
        for knob in entry.knobs {
            if GUARDS.contains(&knob.name) {
                continue;
            }
            if ELSEWHERE.iter().any(|(name, of, _)| (*name, *of) == (entry.name, knob.name)) {
                continue;
            }
            let value = |value: &Value| Case {
                knobs: case.knobs.clone().with(knob.name, value.clone()),
                ..case.clone()
            };
            let tried: Vec<Case> = others(knob).iter().map(value).filter(admitted).collect();
            let changed = |other: &Case| other.knobs != case.knobs;
            let tried: Vec<&Case> = tried.iter().filter(|other| changed(other)).collect();
            // some values happen to do the same here (a window beyond the sequence): one that does not is enough
            if !tried.is_empty() && tried.iter().all(|other| same(case, other)) {
                findings.add(format!("{case}: {} changes nothing", knob.name));
            }
        }
    }
    findings.finish();
}
