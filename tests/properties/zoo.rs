//! Small variants of every mechanism.

use std::collections::HashMap;
use std::fmt;

use candle_core::{Device, Result, Tensor};
use effattn::attention::knobs::{Kind, Knobs, Value};
use effattn::attention::{self, MechanismConfig, MechanismEntry, Property, Shape};
use effattn::device::rng::RngStream;
use effattn::nn::params::ParamBuilder;

pub const BATCH: usize = 2;
/// Parameters that belong to heads have a leading dimension that is a multiple of this; all others must not.
pub const HEADS: usize = 3;
pub const HEAD_DIM: usize = 4;
pub const WIDTH: usize = HEADS * HEAD_DIM;

/// What whole numbers above it become in the small variants; no multiple of [`HEADS`].
const SMALL: usize = 4;

/// Settings that the general rule does not find: for every variant of a mechanism, or as one more variant.
const EXTRA: &[(&str, &str)] = &[
    ("aft-local", "window=1,factor=2"),
    ("aft-local", "window=3,factor=auto"),
    ("aft-local", "window=100,per_head=true,factor=2"),
    ("dp", "dual_ln=true,r=2"),
    ("mamba2", "groups=auto,Dk=5"),
    ("streaming", "window=2,sinks=1,sink_logit=true"),
    ("ls", "w=3,r=2,l=2"),
    ("ls", "w=1,r=1,l=1"),
    ("linformer-window", "w=1,k=2"),
    ("local", "block=5"),
    ("mega", "chunk=5,attn=laplace"),
    ("mega", "chunk=4,rel_pos=rotary,residual=x"),
    ("mega", "chunk=3,attn=relu2,truncation=2"),
    ("mega-ema", "truncation=3,ndim=2"),
    ("longformer", "left=2,right=1,global=0+2"),
    ("longformer", "left=1,right=1,global="),
    ("nystrom", "conv_kernel=3"),
    ("nystrom", "conv_kernel=5,landmarks=40"),
    ("nystrom", "init=original,landmarks=5,n_iter=6"),
    ("reformer", "chunk=2,n_hashes=1,num_buckets=2+4"),
    ("reformer", "chunk=3,n_hashes=4,num_buckets=2"),
    ("sinkhorn", "block=3,combine=concat,iters=2"),
    ("sinkhorn", "block=5,sort_net=mlp2,hidden=2,combine=concat,sort_activation=softmax"),
    ("sparse", "block=5,c=2"),
    ("sparse", "pattern=strided,local=2,stride=3"),
    ("synthesizer", "mode=dense+factorized_random,k=1,dot_product=false"),
];

/// Knob values that the small variants start from, where the general rule gives something invalid.
const BASE: &[(&str, &str)] = &[("gqa", "groups=1"), ("sparse", "block=5,c=2,stride=3")];

/// One variant of a mechanism in one form.
#[derive(Clone)]
pub struct Case {
    pub entry: &'static MechanismEntry,
    pub knobs: Knobs,
    pub causal: bool,
    pub queries: usize,
    pub keys: usize,
    pub cls: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { entry, knobs, causal, queries, keys, cls } = self;
        let changes = knobs.changes(entry.knobs);
        write!(f, "{}:{changes} causal={causal} n={queries} keys={keys} cls={cls}", entry.name)
    }
}

/// The knob settings of all small variants of `entry`.
fn variants(entry: &'static MechanismEntry) -> Vec<Knobs> {
    let small = entry.knobs.iter().fold(Knobs::defaults(entry.knobs), |knobs, knob| match knob.default() {
        Value::Int(value) if value > SMALL => knobs.with(knob.name, Value::Int(SMALL)),
        _ => knobs,
    });
    let with = |start: &Knobs, text: &str| {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        let given = Knobs::parse(entry.name, entry.knobs, pairs.clone()).expect("a known setting");
        let named: Vec<&str> = pairs.map(|(name, _)| name).collect();
        let fresh = given.iter().filter(|(name, _)| named.contains(name));
        fresh.fold(start.clone(), |knobs, (name, value)| knobs.with(name, value.clone()))
    };
    let of =
        |list: &'static [(&str, &str)]| list.iter().filter(|line| line.0 == entry.name).map(|line| line.1);
    let base = of(BASE).fold(small, |knobs, text| with(&knobs, text));
    let mut all = vec![base.clone()];
    for knob in entry.knobs {
        match knob.kind {
            Kind::Bool { default } => all.push(base.clone().with(knob.name, Value::Bool(!default))),
            Kind::Word { words, default } => {
                // of words that are sums of words, one order is enough
                let sorted = |word: &&str| word.split('+').is_sorted();
                let others = words.iter().filter(|word| *word != default).filter(sorted);
                all.extend(others.map(|word| base.clone().with(knob.name, Value::Word(word))));
            }
            _ => {}
        }
    }
    all.extend(of(EXTRA).map(|text| with(&base, text)));
    all
}

/// Every variant of every mechanism with `n` queries, in every form it has; the toy mechanism of the recipe is one.
pub fn cases(n: usize) -> Vec<Case> {
    attention::register(&crate::mean::ENTRY);
    let mut cases = Vec::new();
    for entry in attention::entries() {
        let support = entry.support;
        let before = cases.len();
        for knobs in variants(entry) {
            let plain = Case { entry, knobs, causal: false, queries: n, keys: n, cls: false };
            let mut forms = Vec::new();
            if support.bidirectional {
                forms.push(plain.clone());
                if support.cls {
                    forms.push(Case { cls: true, ..plain.clone() });
                }
                if support.cross {
                    forms.extend([n + 3, n.div_ceil(2)].map(|keys| Case { keys, ..plain.clone() }));
                }
            }
            if support.causal {
                forms.push(Case { causal: true, ..plain.clone() });
                if support.memory {
                    forms.push(Case { causal: true, keys: n + 8, ..plain.clone() });
                }
            }
            cases.extend(
                forms.into_iter().filter(|case| (entry.validate)(&case.knobs, &case.shape()).is_ok()),
            );
        }
        let released = entry.exceptions.iter().any(|e| e.property == Property::AnyLength);
        assert!(
            cases.len() > before || released,
            "no small variant of {} is valid at length {n}",
            entry.name
        );
    }
    cases
}

impl Case {
    pub fn shape(&self) -> Shape {
        Shape {
            batch: BATCH,
            heads: HEADS,
            head_dim: HEAD_DIM,
            width: WIDTH,
            queries: self.queries,
            keys: self.keys,
            causal: self.causal,
            cls: self.cls,
            grid: None,
        }
    }

    /// The entry's reason for breaking `property`, if it does.
    pub fn exception(&self, property: Property) -> Option<&'static str> {
        let mut all = self.entry.exceptions.iter();
        all.find(|e| e.property == property && (e.applies)(&self.knobs, self.causal)).map(|e| e.reason)
    }

    pub fn memory(&self) -> usize {
        if self.causal { self.keys - self.queries } else { 0 }
    }

    /// Whether keys stand at the queries' positions (behind cached ones).
    pub fn aligned(&self) -> bool {
        self.causal || self.keys == self.queries
    }

    pub fn config(&self) -> MechanismConfig {
        // position-indexed parameters must not look as if they belonged to heads
        let longest = self.queries.max(self.keys);
        MechanismConfig {
            knobs: self.knobs.clone(),
            heads: HEADS,
            head_dim: HEAD_DIM,
            width: WIDTH,
            max_len: longest + usize::from(longest.is_multiple_of(HEADS)),
            causal: self.causal,
            layer: 0,
        }
    }

    /// Random parameters and constants.
    pub fn params(&self) -> Result<HashMap<String, Tensor>> {
        let builder = ParamBuilder::seeded(7, &Device::Cpu, false);
        (self.entry.build)(&self.config(), &builder)?;
        let params = builder.finish();
        let mut all = HashMap::new();
        for name in params.names() {
            // biases and gains start at constants: noise makes every one of them matter
            let value = params.value(name)?;
            let noise = RngStream::new(8, name).normal_tensor(value.shape(), 0.0, 0.3, &Device::Cpu)?;
            all.insert(name.to_owned(), (value + noise)?);
        }
        all.extend(params.constants().iter().map(|(name, value)| (name.clone(), value.clone())));
        Ok(all)
    }
}
