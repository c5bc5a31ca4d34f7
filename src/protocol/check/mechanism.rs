//! Golden files of single mechanisms (`SPEC-ls.md`, `SPEC-cos.md`, `SPEC-modern.md`).

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Result, Tensor, Var};
use serde_json::Value;

use super::{CheckError, FileVerdict, Golden, IdleKnob};
use effattn_kernel::heads::{PackedLayout, Qkv, merge, split};
use effattn_model::attention::knobs::Knobs;
use effattn_model::attention::{
    self, AttentionInput, HeadShape, Mechanism, MechanismConfig, MechanismEntry, Projections, Shape,
};
use effattn_model::nn::params::{ParamBuilder, Params};

/// Keys of `config` that are shapes, not knobs.
const SHAPE_KEYS: &[&str] = &["B", "H", "N", "Nk", "D", "E", "mem", "min_hash_margin", "cls"];

/// Results by name: `out`, `out_cls`, `out_p`, and `grad_<leaf>` of every leaf.
pub(super) type NamedResults = BTreeMap<String, Tensor>;

/// Settings that files share with related mechanisms, and the value of each that says nothing: a mechanism need not have them.
fn says_nothing(key: &str, value: &Value) -> bool {
    match key {
        "groups" | "window" | "rotary_dim" => value.is_null(),
        "sinks" | "offset" => value.as_u64() == Some(0),
        "sink_logit" => value == &Value::Bool(false),
        "positions" => value == "absolute",
        "kind" => true, // s5 or lru, as the file's mechanism
        _ => false,
    }
}

fn entry(golden: &Golden) -> std::result::Result<&'static MechanismEntry, CheckError> {
    let name = golden.meta("mechanism");
    attention::find(name)
        .ok_or_else(|| CheckError::UnknownMechanism { file: golden.file.clone(), mechanism: name.to_owned() })
}

/// Rows of `out` that are compared: those whose number is not 0; none: all.
pub(super) fn kept_rows(
    golden: &Golden,
    device: &Device,
) -> std::result::Result<Option<Vec<f32>>, CheckError> {
    let case = Case::new(golden, entry(golden)?, device)?;
    case.kept_rows().map_err(|error| golden.refused(error))
}

/// Checks one file with separate tensors and, where the shapes allow it, with packed rows too.
pub(super) fn check(golden: &Golden, device: &Device) -> std::result::Result<FileVerdict, CheckError> {
    let case = Case::new(golden, entry(golden)?, device)?;
    let mut verdict = golden.verdict();
    verdict.idle = IdleKnob::of(golden, case.entry, &case.config.knobs, &case.shape);
    case.count(&mut verdict)?;
    case.run(&mut verdict, false)?;
    if case.packable() {
        case.run(&mut verdict, true)?;
    }
    Ok(verdict)
}

/// One file made ready to run.
pub(super) struct Case<'a> {
    golden: &'a Golden,
    entry: &'static MechanismEntry,
    pub(super) config: MechanismConfig,
    pub(super) shape: Shape,
    memory: usize,
    inputs: HashMap<String, Var>,
    mask: Option<Tensor>,
    device: Device,
    /// Number format that it is computed in.
    dtype: DType,
}

/// Refuses a shape that the file's tensors do not have: everything is computed by it.
fn fits(golden: &Golden, shape: &Shape, projections: &Projections) -> std::result::Result<(), CheckError> {
    let Shape { batch, heads, head_dim, width, queries, keys, .. } = *shape;
    let part = |part: Option<HeadShape>, len| {
        let (heads, dim) = part.unwrap_or_default().of(heads, head_dim);
        vec![batch, heads, len, dim]
    };
    let wanted = [
        ("q", part(projections.q, queries)),
        ("k", part(projections.k, keys)),
        ("v", part(projections.v, keys)),
        ("x", vec![batch, keys, width]),
        ("res", vec![batch, queries, width]),
    ];
    if wanted.iter().any(|(_, dims)| dims.contains(&0)) {
        return Err(golden.wrong("a size in its config is 0".into()));
    }
    let mut known = false;
    for (name, dims) in &wanted {
        let Some(tensor) = golden.tensors.get(*name) else { continue };
        known = true;
        if tensor.dims() != dims {
            let found = tensor.dims();
            return Err(golden.wrong(format!("{name} has shape {found:?}, its config says {dims:?}")));
        }
    }
    if known { Ok(()) } else { Err(golden.wrong("it has none of the tensors q, k, v and x".into())) }
}

pub(super) const INPUTS: &[&str] =
    &["q", "k", "v", "x", "p", "res", "q_cls", "k_cls", "v_cls", "q_global", "k_global", "v_global"];

impl<'a> Case<'a> {
    fn new(
        golden: &'a Golden,
        entry: &'static MechanismEntry,
        device: &Device,
    ) -> std::result::Result<Self, CheckError> {
        Self::in_format(golden, entry, device, DType::F32)
    }

    pub(super) fn in_format(
        golden: &'a Golden,
        entry: &'static MechanismEntry,
        device: &Device,
        dtype: DType,
    ) -> std::result::Result<Self, CheckError> {
        let is_knob = |key: &str| entry.knobs.iter().any(|knob| knob.name == key);
        let set = |(key, value): &(&String, &Value)| {
            let whole = key.as_str() == "chunk" && value.as_i64() == Some(-1); // Mega: one chunk, the default
            !whole && (is_knob(key) || !SHAPE_KEYS.contains(&key.as_str()) && !says_nothing(key, value))
        };
        let knobs = golden.config.iter().filter(set);
        let knobs = Knobs::from_json(entry.name, entry.knobs, knobs).map_err(|e| golden.refused(e))?;
        let dim =
            |key: &str| golden.int(key).ok_or_else(|| golden.refused(format!("its config has no {key}")));
        let (batch, queries) = (dim("B")?, dim("N")?);
        let projections = (entry.needs)(&knobs).projections;
        let (heads, head_dim) = match projections {
            Projections::NONE => (1, dim("E")?),
            _ => (dim("H")?, dim("D")?),
        };
        let memory = golden.int("mem").unwrap_or(0);
        let keys = golden.int("Nk").unwrap_or(queries + memory);
        let width = match golden.tensors.get("x").or_else(|| golden.tensors.get("p")) {
            Some(x) => x.dim(2).map_err(|error| golden.refused(error))?,
            None => heads * head_dim,
        };
        let causal = golden.meta("causal") == "true";
        let cls = golden.tensors.contains_key("q_cls");
        let shape = Shape { batch, heads, head_dim, width, queries, keys, causal, cls, grid: None };
        fits(golden, &shape, &projections)?;
        (entry.validate)(&knobs, &shape).map_err(|error| golden.refused(error))?;
        golden.affordable((entry.cost)(&knobs, &shape).core_macs)?;
        let config =
            MechanismConfig { knobs, heads, head_dim, width, max_len: queries.max(keys), causal, layer: 0 };
        let here = |tensor: &Tensor| in_format(tensor, device, dtype);
        let vars = INPUTS.iter().filter_map(|name| {
            golden
                .tensors
                .get(*name)
                .map(|tensor| Ok((String::from(*name), Var::from_tensor(&here(tensor)?)?)))
        });
        let inputs = vars.collect::<Result<_>>().map_err(|error| golden.refused(error))?;
        let mask = golden.tensors.get("mask").map(here).transpose();
        let mask = mask.map_err(|error| golden.refused(error))?;
        Ok(Self { golden, entry, config, shape, memory, inputs, mask, device: device.clone(), dtype })
    }

    /// Whether queries, keys and values can lie in the same rows.
    fn packable(&self) -> bool {
        let given = |name: &str| self.inputs.contains_key(name);
        let projections = (self.entry.needs)(&self.config.knobs).projections;
        self.shape.queries == self.shape.keys
            && projections.packable(self.shape.heads, self.shape.head_dim)
            && given("v")
            && (given("q") || !given("k"))
    }

    /// Compares the multiply-adds and, where the file says it, what a decoder keeps.
    fn count(&self, verdict: &mut FileVerdict) -> std::result::Result<(), CheckError> {
        let want: u64 = self.golden.meta("macs").parse().map_err(|_| CheckError::NotGolden {
            file: self.golden.file.clone(),
            reason: "its macs are not a whole number".into(),
        })?;
        let got = (self.entry.cost)(&self.config.knobs, &self.shape).core_macs;
        if got != want {
            verdict.complain(format!("core_macs is {got}, expected {want}"));
        }
        let floats: u64 = self.golden.meta("state_floats").parse().unwrap_or(0); // 0: of no constant size
        let got = (self.entry.cost)(&self.config.knobs, &self.shape).state_bytes;
        if floats > 0 && got != 4 * floats {
            verdict.complain(format!("state_bytes is {got}, expected {}", 4 * floats));
        }
        Ok(())
    }

    fn run(&self, verdict: &mut FileVerdict, packed: bool) -> std::result::Result<(), CheckError> {
        let golden = self.golden;
        let results = self.results(packed).map_err(|error| golden.refused(error))?;
        let keep = self.kept_rows().map_err(|error| golden.refused(error))?;
        if !results.contains_key("out_p") && golden.tensors.contains_key("out_p") {
            verdict.complain("out_p is expected, but there is no second output".into());
        }
        for (name, tensor) in &results {
            let keep = keep.as_deref().filter(|_| name == "out");
            if name != "out_p" || golden.tensors.contains_key(name) {
                golden.compare(verdict, name, tensor, keep)?;
            }
        }
        Ok(())
    }

    /// What it gives, as a golden file has it.
    pub(super) fn results(&self, packed: bool) -> Result<NamedResults> {
        let (results, params) = self.evaluate(packed)?;
        let mut named = NamedResults::from([("out".to_owned(), results.out)]);
        named.extend(results.cls.map(|cls| ("out_cls".to_owned(), cls)));
        named.extend(results.stream.map(|stream| ("out_p".to_owned(), stream)));
        for leaf in &self.golden.leaves {
            let grad = match results.input_grads.get(leaf) {
                Some(grad) => grad.clone(),
                None => params.grad(&results.grads, leaf)?,
            };
            named.insert(format!("grad_{leaf}"), grad);
        }
        Ok(named)
    }

    /// Rows of `out` that are compared: all but padded queries (the quirk files compare all rows).
    pub(super) fn kept_rows(&self) -> Result<Option<Vec<f32>>> {
        let Shape { heads, queries, keys, .. } = self.shape;
        let Some(mask) = &self.mask else { return Ok(None) };
        if self.golden.config.contains_key("layout") || keys != queries + self.memory {
            return Ok(None);
        }
        if self.mixes_rows() {
            return Ok(Some(numbers(mask)?)); // out is [b, n, e]
        }
        let mask = mask.narrow(1, self.memory, queries)?.unsqueeze(1)?;
        let rows = mask.broadcast_as((self.shape.batch, heads, queries))?;
        Ok(Some(numbers(&rows)?))
    }

    /// Whether the mechanism reads x alone and gives rows without heads.
    fn mixes_rows(&self) -> bool {
        (self.entry.needs)(&self.config.knobs).projections == Projections::NONE
    }

    fn evaluate(&self, packed: bool) -> Result<(Results, Params)> {
        let given = self.golden.tensors.iter();
        let given = given.filter(|(name, _)| !INPUTS.contains(&name.as_str()));
        let given = given.map(|(name, tensor)| Ok((name.clone(), self.here(tensor)?)));
        let builder = ParamBuilder::given(given.collect::<Result<_>>()?, &self.device, true);
        let mechanism: Box<dyn Mechanism> = (self.entry.build)(&self.config, &builder)?;
        let params = builder.finish();
        let rows = if packed { Some(self.pack()?) } else { None };
        let qkv = match &rows {
            Some((rows, parts)) => {
                Qkv::Packed { rows: rows.as_tensor().clone(), heads: self.shape.heads, parts: *parts }
            }
            None => Qkv::Separate { q: self.input("q"), k: self.input("k"), v: self.input("v") },
        };
        let triple = |suffix: &str| {
            let get = |part: &str| self.input(&format!("{part}_{suffix}"));
            get("q").is_some().then(|| Qkv::Separate { q: get("q"), k: get("k"), v: get("v") })
        };
        let (cls, global) = (triple("cls"), triple("global"));
        let [x, residual, stream] = ["x", "res", "p"].map(|name| self.input(name));
        let output = mechanism.forward(&AttentionInput {
            qkv: &qkv,
            x: x.as_ref(),
            mask: self.mask.as_ref(),
            cls: cls.as_ref(),
            global: global.as_ref(),
            residual: residual.as_ref(),
            stream: stream.as_ref(),
            memory: self.memory,
            dropout: None,
            first_row: false,
        })?;
        let out = if self.mixes_rows() { output.out.merged()? } else { output.out.split()? };
        let weigh = |out: &Tensor, name: &str| match self.golden.tensors.get(name) {
            Some(weight) => (out * self.here(weight)?)?.sum_all(),
            None => Tensor::zeros((), self.dtype, &self.device),
        };
        let mut loss = weigh(&out, "grad_out")?;
        let cls = output.cls.map(|cls| cls.split()).transpose()?;
        if let Some(cls) = &cls {
            loss = (loss + weigh(cls, "grad_out_cls")?)?;
        }
        if let Some(stream) = &output.stream {
            loss = (loss + weigh(stream, "grad_out_p")?)?;
        }
        let grads = loss.backward()?;
        let mut input_grads = HashMap::new();
        for (name, var) in &self.inputs {
            let zeros = || Tensor::zeros(var.shape(), self.dtype, &self.device);
            let grad = grads.get(var).cloned().map_or_else(zeros, Ok)?;
            input_grads.insert(name.clone(), grad);
        }
        if let Some((rows, parts)) = &rows {
            let zeros = || Tensor::zeros(rows.shape(), self.dtype, &self.device);
            let grad = grads.get(rows).cloned().map_or_else(zeros, Ok)?;
            for (name, part) in [("q", parts.q), ("k", parts.k), ("v", parts.v)] {
                let Some(part) = part else { continue };
                let width = self.shape.heads * self.shape.head_dim;
                let grad = grad.narrow(2, part * width, width)?.contiguous()?;
                input_grads.insert(name.into(), split(&grad, self.shape.heads)?.contiguous()?);
            }
        }
        Ok((Results { out, cls, stream: output.stream, input_grads, grads }, params))
    }

    fn here(&self, tensor: &Tensor) -> Result<Tensor> {
        in_format(tensor, &self.device, self.dtype)
    }

    fn input(&self, name: &str) -> Option<Tensor> {
        self.inputs.get(name).map(|var| var.as_tensor().clone())
    }

    /// The rows `[q | k | v]` of what the file has.
    fn pack(&self) -> Result<(Var, PackedLayout)> {
        let (mut pieces, mut index) = (Vec::new(), [None; 3]);
        for (slot, name) in ["q", "k", "v"].iter().enumerate() {
            if let Some(var) = self.inputs.get(*name) {
                index[slot] = Some(pieces.len());
                pieces.push(merge(&var.as_detached_tensor())?);
            }
        }
        let [q, k, v] = index;
        let parts = PackedLayout { q, k, v, count: pieces.len() };
        Ok((Var::from_tensor(&Tensor::cat(&pieces, 2)?)?, parts))
    }
}

/// `tensor` on `device`; floats as `dtype`, whole numbers as they are.
fn in_format(tensor: &Tensor, device: &Device, dtype: DType) -> Result<Tensor> {
    let here = tensor.to_device(device)?;
    if here.dtype().is_float() { here.to_dtype(dtype) } else { Ok(here) }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

struct Results {
    out: Tensor,
    cls: Option<Tensor>,
    stream: Option<Tensor>,
    input_grads: HashMap<String, Tensor>,
    grads: candle_core::backprop::GradStore,
}
