//! Every variant of every mechanism reads only knobs that its entry lists: a read of another one panics.

use candle_core::Device;

use super::knobs::{Kind, KnobSpec, Knobs, Value};
use super::{MechanismConfig, Shape, TABLE};
use crate::nn::params::ParamBuilder;
use effattn_record::pattern::Grid2d;

/// The default, every word, and the bounds as far as a small model can have them.
fn values(knob: &KnobSpec) -> Vec<Value> {
    let ints =
        |min: usize, max: usize| [min, (min + 1).min(max), max.min(17)].map(|x| Value::Int(x.max(min)));
    let mut values = vec![knob.default()];
    match knob.kind {
        Kind::Bool { .. } => values.extend([Value::Bool(true), Value::Bool(false)]),
        Kind::Word { words, .. } => values.extend(words.iter().map(Value::Word)),
        Kind::Int { min, max, .. } | Kind::AutoInt { min, max, .. } => values.extend(ints(min, max)),
        Kind::Float { min, max, .. } | Kind::AutoFloat { min, max } => {
            values.extend([Value::Float(min), Value::Float(max)]);
        }
        Kind::List { .. } => values.extend([Value::List(Vec::new()), Value::List(vec![2, 4])]),
        Kind::AutoIntOrList => values.extend([Value::Int(2), Value::List(vec![2, 4])]),
        Kind::AutoFloats { min, max } => values.push(Value::Floats(vec![min, max])),
    }
    values
}

/// The defaults, and two knobs at a time at other values.
fn variants(specs: &'static [KnobSpec]) -> Vec<Knobs> {
    let base = Knobs::defaults(specs);
    let settings: Vec<_> =
        specs.iter().flat_map(|spec| values(spec).into_iter().map(|value| (spec.name, value))).collect();
    let mut all = vec![base.clone()];
    for (at, (name, value)) in settings.iter().enumerate() {
        let one = base.clone().with(name, value.clone());
        let others = settings[at + 1..].iter().filter(|(other, _)| other != name);
        all.extend(others.map(|(name, value)| one.clone().with(name, value.clone())));
        all.push(one);
    }
    all
}

#[test]
fn no_mechanism_reads_a_knob_that_it_does_not_list() {
    const LEN: usize = 16;
    let mut built = 0;
    for entry in TABLE {
        let before = built;
        for knobs in variants(entry.knobs) {
            for causal in [false, true] {
                let (heads, head_dim, layer) = (2, 4, 1);
                let width = heads * head_dim;
                let grid = Grid2d::square(LEN);
                let (batch, queries, keys, cls) = (1, LEN, LEN, false);
                let shape = Shape { batch, heads, head_dim, width, queries, keys, causal, cls, grid };
                entry.exceptions.iter().for_each(|exception| _ = (exception.applies)(&knobs, causal));
                entry.idle.iter().for_each(|idle| _ = (idle.when)(&knobs, &shape));
                _ = (entry.needs)(&knobs);
                let supported = if causal { entry.support.causal } else { entry.support.bidirectional };
                if (entry.validate)(&knobs, &shape).is_err() || !supported {
                    continue;
                }
                _ = (entry.cost)(&knobs, &shape);
                _ = (entry.pattern)(&knobs, &shape);
                let variant = knobs.changes(entry.knobs);
                let config = MechanismConfig {
                    knobs: knobs.clone(),
                    heads,
                    head_dim,
                    width,
                    max_len: LEN,
                    causal,
                    layer,
                };
                let builder = ParamBuilder::seeded(1, &Device::Cpu, false);
                (entry.build)(&config, &builder)
                    .unwrap_or_else(|error| panic!("{}:{variant}: {error}", entry.name));
                built += 1;
            }
        }
        assert!(built > before, "no variant of {} was built", entry.name);
    }
}

#[test]
fn what_names_a_knob_names_one_of_the_entry() {
    for entry in TABLE {
        let names: Vec<&str> = entry.knobs.iter().map(|knob| knob.name).collect();
        let facts = entry.in_models;
        let named = entry.idle.iter().map(|idle| idle.knob);
        let named = named.chain(facts.language.iter().chain(facts.linear_form).map(|(name, _)| *name));
        let named = named.chain(
            facts
                .kept_by_weights
                .and_then(|kept| kept(&Knobs::defaults(entry.knobs), 256))
                .map(|(name, _)| name),
        );
        let named = named
            .chain([facts.released_block, facts.dual_norm].into_iter().flatten().map(|knob| knob.name()));
        for name in named.chain(facts.follows_length.map(|knob| knob.name())) {
            assert!(names.contains(&name), "{} has no knob {name}", entry.name);
        }
        for settings in [facts.language, facts.linear_form] {
            let parsed = Knobs::parse(entry.name, entry.knobs, settings.iter().copied());
            assert!(parsed.is_ok(), "{}: {settings:?}", entry.name);
        }
    }
}

#[test]
fn parameters_without_decay_are_parameters() {
    let (heads, head_dim, width) = (2, 4, 8);
    for entry in TABLE.iter().filter(|entry| !entry.in_models.without_decay.is_empty()) {
        let knobs = Knobs::defaults(entry.knobs);
        let config = MechanismConfig { knobs, heads, head_dim, width, max_len: 16, causal: true, layer: 0 };
        let builder = ParamBuilder::seeded(1, &Device::Cpu, false);
        (entry.build)(&config, &builder.pp("layers.0.attn")).unwrap();
        let params = builder.finish();
        let kept: Vec<&str> = params.names().filter(|name| !super::decays(name)).collect();
        let found = |name: &&str| kept.contains(&&*format!("layers.0.attn.{name}"));
        let named = entry.in_models.without_decay;
        assert!(named.iter().all(found), "{}: {named:?}, {kept:?}", entry.name);
        assert!(kept.len() < params.names().count(), "{}: some parameters decay", entry.name);
    }
}
