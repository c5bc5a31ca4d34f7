//! Small variants of every mechanism, inputs for them, and their results.

use std::collections::HashMap;
use std::fmt;

use candle_core::{Device, Result, Tensor, Var};
use effattn::attention::knobs::{Kind, Knobs, Value};
use effattn::attention::{self, Config, Entry, Input, Projections, Property, Shape};
use effattn::device::rng::Stream;
use effattn::kernel::heads::{Parts, Qkv, merge, split};
use effattn::kernel::{Mode, with_mode};
use effattn::nn::params::Builder;

pub const BATCH: usize = 2;
/// Parameters that belong to heads have a leading dimension that is a multiple of this; all others must not.
pub const HEADS: usize = 3;
pub const HEAD_DIM: usize = 4;
pub const WIDTH: usize = HEADS * HEAD_DIM;
pub const MODES: [Mode; 2] = [Mode::Fused, Mode::Composed];

/// What whole numbers above it become in the small variants; no multiple of [`HEADS`].
const SMALL: usize = 4;

/// Settings that the general rule does not find: for every variant of a mechanism, or as one more variant.
const EXTRA: &[(&str, &str)] = &[
    ("dp", "dual_ln=true,r=2"),
    ("ls", "w=3,r=2,l=2"),
    ("ls", "w=1,r=1,l=1"),
    ("linformer-window", "w=1,k=2"),
    ("local", "block=5"),
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
const BASE: &[(&str, &str)] = &[("sparse", "block=5,c=2,stride=3")];

/// One variant of a mechanism in one form.
#[derive(Clone)]
pub struct Case {
    pub entry: &'static Entry,
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
fn variants(entry: &'static Entry) -> Vec<Knobs> {
    let small = entry.knobs.iter().fold(Knobs::defaults(entry.knobs), |knobs, knob| match knob.default {
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
            Kind::Bool => {
                let other = Value::Bool(knob.default != Value::Bool(true));
                all.push(base.clone().with(knob.name, other));
            }
            Kind::Word(words) => {
                // of words that are sums of words, one order is enough
                let sorted = |word: &&&str| word.split('+').is_sorted();
                let others = words.iter().filter(|word| knob.default != Value::Word(word)).filter(sorted);
                all.extend(others.map(|word| base.clone().with(knob.name, Value::Word(word))));
            }
            _ => {}
        }
    }
    all.extend(of(EXTRA).map(|text| with(&base, text)));
    all
}

/// Every variant of every mechanism with `n` queries, in every form it has.
pub fn cases(n: usize) -> Vec<Case> {
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

    fn config(&self) -> Config {
        // position-indexed parameters must not look as if they belonged to heads
        let longest = self.queries.max(self.keys);
        Config {
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
        let builder = Builder::seeded(7, &Device::Cpu, false);
        (self.entry.build)(&self.config(), &builder)?;
        let params = builder.finish();
        let mut all = HashMap::new();
        for name in params.names() {
            // biases and gains start at constants: noise makes every one of them matter
            let value = params.value(name)?;
            let noise = Stream::new(8, name).normal_tensor(value.shape(), 0.0, 0.3, &Device::Cpu)?;
            all.insert(name.to_owned(), (value + noise)?);
        }
        all.extend(params.constants().iter().map(|(name, value)| (name.clone(), value.clone())));
        Ok(all)
    }
}

/// Inputs of one call, [b, h, n, d] and [b, n, e].
#[derive(Clone)]
pub struct Inputs(pub HashMap<&'static str, Tensor>);

impl Inputs {
    /// Standard normal inputs for `case`, as many as it reads.
    pub fn random(case: &Case, seed: u64) -> Self {
        let needs = (case.entry.needs)(&case.knobs);
        let (n, t) = (case.queries, case.keys);
        let mut wanted = vec![("v", t)];
        if needs.projections != Projections::V {
            wanted.push(("q", n));
        }
        if needs.projections == Projections::Qkv {
            wanted.push(("k", t));
        }
        if needs.global {
            wanted.extend([("q_global", n), ("k_global", t), ("v_global", t)]);
        }
        if case.cls {
            wanted.extend([("q_cls", 1), ("k_cls", 1), ("v_cls", 1)]);
        }
        let draw = |name: &str, shape: &[usize]| {
            Stream::new(seed, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu).expect("inputs")
        };
        let mut all: HashMap<_, _> =
            wanted.iter().map(|&(name, len)| (name, draw(name, &[BATCH, HEADS, len, HEAD_DIM]))).collect();
        if needs.x {
            all.insert("x", draw("x", &[BATCH, t, WIDTH]));
        }
        Self(all)
    }

    /// The same inputs, every element moved by a millionth of itself (some ten roundings) up or down.
    pub fn rounded(&self) -> Self {
        let round = |x: &Tensor| -> Result<Tensor> {
            let old = x.flatten_all()?.to_vec1::<f32>()?;
            let new = old
                .iter()
                .enumerate()
                .map(|(i, x)| x * if (i * 7 + i / 5) % 3 == 0 { 1.0 + 1e-6 } else { 1.0 - 1e-6 });
            Tensor::from_vec(new.collect::<Vec<_>>(), x.shape(), x.device())
        };
        Self(self.0.iter().map(|(name, x)| (*name, round(x).expect("inputs"))).collect())
    }

    /// The same inputs with `f(name, sample, head, position, old)` at every element; x has no head (0), and
    /// positions of queries are counted like those of the keys, cached ones first.
    pub fn map(&self, case: &Case, f: impl Fn(&str, usize, usize, usize, f32) -> f32) -> Self {
        let change = |name: &'static str, x: &Tensor| {
            let dims = x.dims().to_vec();
            let (heads, len, width) = match dims[..] {
                [_, len, width] => (1, len, width),
                _ => (dims[1], dims[2], dims[3]),
            };
            let shift = if name.starts_with('q') { case.memory() } else { 0 };
            let mut data = x.flatten_all()?.to_vec1::<f32>()?;
            for (row, values) in data.chunks_mut(width).enumerate() {
                let (sample, head) = (row / len / heads, row / len % heads);
                for value in values {
                    *value = f(name, sample, head, row % len + shift, *value);
                }
            }
            Tensor::from_vec(data, dims, &Device::Cpu)
        };
        Self(self.0.iter().map(|(&name, x)| (name, change(name, x).expect("inputs"))).collect())
    }
}

/// Results: `out` [b, h, n, d], then `out_cls`, and the gradients of everything.
pub struct Results {
    pub out: Vec<f32>,
    pub cls: Vec<f32>,
    pub grads: HashMap<String, Vec<f32>>,
}

/// One call to make.
pub struct Run<'a> {
    pub case: &'a Case,
    pub params: &'a HashMap<String, Tensor>,
    pub inputs: &'a Inputs,
    /// [b, keys].
    pub mask: Option<&'a [f32]>,
    pub mode: Mode,
    /// Packed rows instead of separate tensors.
    pub packed: bool,
    /// Weight of output row (sample, head, query) in the loss.
    pub weigh: &'a dyn Fn(usize, usize, usize) -> f32,
}

impl<'a> Run<'a> {
    pub fn new(case: &'a Case, params: &'a HashMap<String, Tensor>, inputs: &'a Inputs, mode: Mode) -> Self {
        Self { case, params, inputs, mask: None, mode, packed: false, weigh: &|_, _, _| 1.0 }
    }

    /// Outputs and gradients; a failure names the case.
    pub fn results(&self) -> Results {
        with_mode(self.mode, || self.evaluate())
            .unwrap_or_else(|error| panic!("{} {:?}: {error}", self.case, self.mode))
    }

    fn mask(&self) -> Result<Option<Tensor>> {
        self.mask.map(|mask| Tensor::new(mask, &Device::Cpu)?.reshape((BATCH, self.case.keys))).transpose()
    }

    fn evaluate(&self) -> Result<Results> {
        let case = self.case;
        let builder = Builder::given(self.params.clone(), &Device::Cpu, true);
        let mechanism = (case.entry.build)(&case.config(), &builder)?;
        let params = builder.finish();
        let vars = self.inputs.0.iter().map(|(&name, x)| Ok((name, Var::from_tensor(x)?)));
        let vars: HashMap<&str, Var> = vars.collect::<Result<_>>()?;
        let get = |name: &str| vars.get(name).map(|var| var.as_tensor().clone());
        let triple = |suffix: &str| {
            let part = |part: &str| get(&format!("{part}{suffix}"));
            Qkv::Separate { q: part("q"), k: part("k"), v: part("v") }
        };
        let rows = if self.packed { Some(self.pack()?) } else { None };
        let qkv = match &rows {
            Some((rows, parts)) => {
                Qkv::Packed { rows: rows.as_tensor().clone(), heads: HEADS, parts: *parts }
            }
            None => triple(""),
        };
        let (mask, x) = (self.mask()?, get("x"));
        let (cls, global) = (triple("_cls"), triple("_global"));
        let output = mechanism.forward(&Input {
            qkv: &qkv,
            x: x.as_ref(),
            mask: mask.as_ref(),
            cls: cls.has_q().then_some(&cls),
            global: global.has_q().then_some(&global),
            memory: case.memory(),
        })?;
        let out = output.out.split()?;
        let mut loss = (&out * self.weights(case.queries)?)?.sum_all()?;
        let mut cls_out = Vec::new();
        if let Some(cls) = output.cls {
            let cls = cls.split()?;
            loss = (loss + (&cls * self.weights(1)?)?.sum_all()?)?;
            cls_out = cls.flatten_all()?.to_vec1()?;
        }
        let grads = loss.backward()?;
        let mut all = HashMap::new();
        for (name, var) in &vars {
            let grad = grads.get(var).map(|grad| grad.flatten_all()?.to_vec1());
            all.insert((*name).to_owned(), grad.unwrap_or_else(|| Ok(vec![0.0; var.elem_count()]))?);
        }
        if let Some((rows, parts)) = &rows {
            let grad = match grads.get(rows) {
                Some(grad) => grad.clone(),
                None => rows.zeros_like()?,
            };
            for (name, part) in [("q", parts.q), ("k", parts.k), ("v", parts.v)] {
                let Some(part) = part else { continue };
                let grad = split(&grad.narrow(2, part * WIDTH, WIDTH)?.contiguous()?, HEADS)?;
                all.insert(name.to_owned(), grad.contiguous()?.flatten_all()?.to_vec1()?);
            }
        }
        for name in params.names() {
            let grad = params.grad(&grads, name)?.flatten_all()?.to_vec1()?;
            all.insert(name.to_owned(), grad);
        }
        Ok(Results { out: out.flatten_all()?.to_vec1()?, cls: cls_out, grads: all })
    }

    /// A cotangent that differs in every element.
    fn weights(&self, n: usize) -> Result<Tensor> {
        let rows = (0..BATCH * HEADS * n).flat_map(|row| {
            let weight = (self.weigh)(row / n / HEADS, row / n % HEADS, row % n);
            (0..HEAD_DIM).map(move |c| weight * (1.0 + 0.37 * ((row * 5 + c * 3) % 7) as f32))
        });
        Tensor::from_vec(rows.collect(), (BATCH, HEADS, n, HEAD_DIM), &Device::Cpu)
    }

    fn pack(&self) -> Result<(Var, Parts)> {
        let (mut pieces, mut index) = (Vec::new(), [None; 3]);
        for (slot, name) in ["q", "k", "v"].iter().enumerate() {
            if let Some(x) = self.inputs.0.get(name) {
                index[slot] = Some(pieces.len());
                pieces.push(merge(x)?);
            }
        }
        let [q, k, v] = index;
        let parts = Parts { q, k, v, count: pieces.len() };
        Ok((Var::from_tensor(&Tensor::cat(&pieces, 2)?)?, parts))
    }
}

/// Masks [b, keys] to try: none, a prefix, holes, and one sample without any key.
pub fn masks(case: &Case) -> Vec<Option<Vec<f32>>> {
    let t = case.keys;
    let mask = |keep: &dyn Fn(usize, usize) -> bool| {
        Some((0..BATCH * t).map(|i| f32::from(u8::from(keep(i / t, i % t)))).collect())
    };
    vec![
        None,
        mask(&|sample, j| j < t - (sample + 1) * t / 4),
        mask(&|sample, j| (j * 5 + sample * 3) % 7 < 4),
        mask(&|sample, j| sample == 0 && j % 6 != 5),
    ]
}

/// Whether output row (sample, query) counts under `mask`.
pub fn row_counts(case: &Case, mask: Option<&[f32]>, sample: usize, query: usize) -> bool {
    match mask {
        Some(mask) if case.aligned() => mask[sample * case.keys + case.memory() + query] != 0.0,
        _ => true,
    }
}

/// The first row (sample, head, query) that counts and where two outputs differ by more than
/// `tolerance` times the largest entry.
pub fn differs(
    case: &Case,
    (a, b): (&[f32], &[f32]),
    tolerance: f32,
    counts: impl Fn(usize, usize, usize) -> bool,
) -> Option<(usize, usize, usize)> {
    assert_eq!(a.len(), b.len(), "{case}");
    let n = a.len() / (BATCH * HEADS * HEAD_DIM);
    let largest = a.iter().fold(0f32, |m, x| m.max(x.abs()));
    (0..BATCH * HEADS * n).map(|row| (row, (row / n / HEADS, row / n % HEADS, row % n))).find_map(
        |(row, (sample, head, query))| {
            let range = row * HEAD_DIM..(row + 1) * HEAD_DIM;
            let close = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= tolerance * largest;
            let same = a[range.clone()].iter().zip(&b[range]).all(close);
            (counts(sample, head, query) && !same).then_some((sample, head, query))
        },
    )
}

/// Collects what fails, so that one run shows everything.
#[derive(Default)]
pub struct Findings(Vec<String>);

impl Findings {
    pub fn add(&mut self, finding: String) {
        self.0.push(finding);
    }

    pub fn finish(self) {
        let (count, shown) = (self.0.len(), self.0.iter().take(40).cloned().collect::<Vec<_>>());
        assert!(count == 0, "{count} findings:\n{}", shown.join("\n"));
    }
}
