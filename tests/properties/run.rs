//! Inputs of the variants, one call, and comparing what comes out.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor, Var};
use effattn::attention::AttentionInput;
use effattn::device::rng::RngStream;
use effattn::kernel::dropout::AttentionDropout;
use effattn::kernel::heads::{PackedLayout, Qkv, merge, split};
use effattn::kernel::{KernelMode, with_mode};
use effattn::nn::params::ParamBuilder;

use super::zoo::{BATCH, Case, HEAD_DIM, HEADS, WIDTH};

pub const MODES: [KernelMode; 2] = [KernelMode::Fused, KernelMode::Composed];

/// Inputs of one call, [b, h, n, d] and [b, n, e].
#[derive(Clone)]
pub struct Inputs(pub HashMap<&'static str, Tensor>);

impl Inputs {
    /// Standard normal inputs for `case`, as many as it reads.
    pub fn random(case: &Case, seed: u64) -> Self {
        let needs = (case.entry.needs)(&case.knobs);
        let (n, t) = (case.queries, case.keys);
        let read = needs.projections.read();
        let read = read.map(|(name, shape)| (name, if name == "q" { n } else { t }, shape));
        let mut wanted = Vec::new();
        if needs.global {
            wanted.extend([("q_global", n), ("k_global", t), ("v_global", t)]);
        }
        if case.cls {
            wanted.extend([("q_cls", 1), ("k_cls", 1), ("v_cls", 1)]);
        }
        let draw = |name: &str, shape: &[usize]| {
            RngStream::new(seed, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu).expect("inputs")
        };
        let mut all: HashMap<_, _> =
            wanted.iter().map(|&(name, len)| (name, draw(name, &[BATCH, HEADS, len, HEAD_DIM]))).collect();
        all.extend(read.map(|(name, len, shape)| {
            let (heads, dim) = shape.of(HEADS, HEAD_DIM);
            (name, draw(name, &[BATCH, heads, len, dim]))
        }));
        if needs.x {
            all.insert("x", draw("x", &[BATCH, t, WIDTH]));
        }
        if needs.residual {
            all.insert("residual", draw("residual", &[BATCH, n, WIDTH]));
        }
        if let Some(rows) = needs.stream {
            all.insert("stream", draw("stream", &[BATCH, rows, WIDTH]));
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
    pub mode: KernelMode,
    /// Packed rows instead of separate tensors.
    pub packed: bool,
    /// Dropout of the attention weights.
    pub dropout: Option<AttentionDropout>,
    /// Weight of output row (sample, head, query) in the loss.
    pub weigh: &'a dyn Fn(usize, usize, usize) -> f32,
}

impl<'a> Run<'a> {
    pub fn new(
        case: &'a Case,
        params: &'a HashMap<String, Tensor>,
        inputs: &'a Inputs,
        mode: KernelMode,
    ) -> Self {
        Self { case, params, inputs, mask: None, mode, packed: false, dropout: None, weigh: &|_, _, _| 1.0 }
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
        let builder = ParamBuilder::given(self.params.clone(), &Device::Cpu, true);
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
        let mask = self.mask()?;
        let [x, residual, stream] = ["x", "residual", "stream"].map(&get);
        let (cls, global) = (triple("_cls"), triple("_global"));
        let output = mechanism.forward(&AttentionInput {
            qkv: &qkv,
            x: x.as_ref(),
            mask: mask.as_ref(),
            cls: cls.q().is_ok().then_some(&cls),
            global: global.q().is_ok().then_some(&global),
            residual: residual.as_ref(),
            stream: stream.as_ref(),
            memory: case.memory(),
            dropout: self.dropout,
            first_row: false,
        })?;
        let out = split(&output.out.merged()?, HEADS)?; // of a mixer too, which has no heads
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

    fn pack(&self) -> Result<(Var, PackedLayout)> {
        let (mut pieces, mut index) = (Vec::new(), [None; 3]);
        for (slot, name) in ["q", "k", "v"].iter().enumerate() {
            if let Some(x) = self.inputs.0.get(name) {
                index[slot] = Some(pieces.len());
                pieces.push(merge(x)?);
            }
        }
        let [q, k, v] = index;
        let parts = PackedLayout { q, k, v, count: pieces.len() };
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
