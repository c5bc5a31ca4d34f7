//! Attention matrices: what weight each query gives to each key (cosFormer Figure 3).
//!
//! A mechanism never stores such a matrix. Where its result is linear in the values, one-hot values bring out
//! the columns: with v_j = e_c, channel c of out_i is the weight of key j for query i. That holds for softmax as for a recurrence
//! (decay, delta rule), whose norm, gate and activation of values are left out ([`InModels::linear_form`]).
//!
//! [`InModels::linear_form`]: effattn_model::attention::InModels::linear_form

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};

use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::Qkv;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::knobs::Knobs;
use effattn_model::attention::observe::MechanismCall;
use effattn_model::attention::{
    AttentionInput, HeadShape, Mechanism, MechanismConfig, MechanismEntry, Needs, Projections, Shape,
};
use effattn_model::nn::params::ParamBuilder;
use effattn_record::matrix::Matrix;
use effattn_record::pattern::Grid2d;

/// The situation a mechanism is looked at in.
#[derive(Clone, Debug)]
pub struct ProbeConfig {
    /// Number of positions.
    pub len: usize,
    /// Whether the causal form runs.
    pub causal: bool,
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The head that is looked at.
    pub head: usize,
    /// Seed of weights and inputs.
    pub seed: u64,
    /// Queries, keys, layer input and parameters by name; drawn where absent.
    pub given: HashMap<String, Tensor>,
    /// What the mechanism of a model was built for; absent: `len` positions of layer 0.
    pub built_for: Option<MechanismConfig>,
}

impl Default for ProbeConfig {
    /// 64 positions, four heads of 64.
    fn default() -> Self {
        let given = HashMap::new();
        Self { len: 64, causal: false, heads: 4, head_dim: 64, head: 0, seed: 0, given, built_for: None }
    }
}

impl ProbeConfig {
    /// The shape of the call.
    pub fn shape(&self) -> Shape {
        let width = self.given.get("x").and_then(|x| x.dims().last().copied());
        Shape {
            batch: 1,
            heads: self.heads,
            head_dim: self.head_dim,
            width: width.unwrap_or(self.heads * self.head_dim),
            queries: self.len,
            keys: self.len,
            causal: self.causal,
            cls: false,
            grid: Grid2d::square(self.len),
        }
    }

    /// What a mechanism of these settings is built for.
    fn config(&self, knobs: Knobs) -> MechanismConfig {
        let Shape { heads, head_dim, width, causal, .. } = self.shape();
        match &self.built_for {
            Some(config) => MechanismConfig { knobs, ..config.clone() },
            None => MechanismConfig { knobs, heads, head_dim, width, max_len: self.len, causal, layer: 0 },
        }
    }

    /// Checks the probe itself.
    pub fn check(&self) -> Result<()> {
        ensure!(self.head < self.heads, "--head {} is not one of the {} heads", self.head, self.heads);
        Ok(())
    }

    /// Checks that `choice` can be asked.
    pub fn admits(&self, choice: &MechanismChoice) -> Result<()> {
        let (name, support) = (choice.entry.name, choice.entry.support);
        let (has, form, other) = match self.causal {
            true => (support.causal, "causal", "leave --causal out"),
            false => (support.bidirectional, "bidirectional", "add --causal"),
        };
        ensure!(has, "{name} has no {form} form; {other} or leave {name} out");
        if let Err(reason) = choice.entry.admits(&choice.knobs, &self.shape()) {
            bail!("{}: {reason}", choice.label());
        }
        Ok(())
    }

    /// A given tensor, or a standard normal one of `shape`.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        match self.given.get(name) {
            Some(tensor) if tensor.dims() == shape => Ok(tensor.clone()),
            Some(tensor) => bail!("{name} has shape {:?}, expected {shape:?}", tensor.dims()),
            None => Ok(RngStream::new(self.seed, name).normal_tensor(shape, 0.0, 1.0, &Device::Cpu)?),
        }
    }
}

/// A mechanism with its inputs, all but the values.
struct ProbedMechanism<'a> {
    probe: &'a ProbeConfig,
    mechanism: Box<dyn Mechanism>,
    needs: Needs,
    q: Option<Tensor>,
    k: Option<Tensor>,
    x: Option<Tensor>,
    /// Heads of the values, which the layer's heads share, and their width.
    values: (usize, usize),
}

/// Whether two results are equal but for rounding.
fn close(a: &Tensor, b: &Tensor) -> Result<bool> {
    let largest = |x: &Tensor| -> Result<f32> { Ok(x.abs()?.flatten_all()?.max(0)?.to_scalar()?) };
    Ok(largest(&(a - b)?)? <= 1e-3 * largest(a)?.max(1e-3))
}

impl<'a> ProbedMechanism<'a> {
    /// The mechanism of `entry` with `knobs`.
    fn new(entry: &'static MechanismEntry, knobs: Knobs, probe: &'a ProbeConfig) -> Result<Self> {
        let shape = probe.shape();
        let needs = (entry.needs)(&knobs);
        let config = probe.config(knobs);
        let builder = if probe.given.is_empty() {
            ParamBuilder::seeded(probe.seed, &Device::Cpu, false)
        } else {
            ParamBuilder::given(probe.given.clone(), &Device::Cpu, false)
        };
        let mechanism = (entry.build)(&config, &builder).with_context(|| entry.name)?;
        let projected = |name: &str, read: Option<HeadShape>| {
            let tensor = |read: HeadShape| {
                let (heads, dim) = read.of(shape.heads, shape.head_dim);
                probe.tensor(name, &[1, heads, probe.len, dim])
            };
            read.map(tensor).transpose()
        };
        let Projections { q, k, v } = needs.projections;
        Ok(Self {
            probe,
            mechanism,
            needs,
            q: projected("q", q)?,
            k: projected("k", k)?,
            x: needs.x.then(|| probe.tensor("x", &[1, probe.len, shape.width])).transpose()?,
            values: v.unwrap_or_default().of(shape.heads, shape.head_dim),
        })
    }

    /// The result [n, d] of the head that is looked at, where every head has the values `v` [n, d].
    fn out(&self, v: &Tensor) -> Result<Tensor> {
        let (heads, dim) = self.values;
        let v = v.broadcast_as((1, heads, self.probe.len, dim))?.contiguous()?;
        let shape = [1, self.probe.heads, self.probe.len, self.probe.head_dim];
        let global = match self.needs.global {
            true => Some(Qkv::Separate {
                q: Some(self.probe.tensor("q_global", &shape)?),
                k: Some(self.probe.tensor("k_global", &shape)?),
                v: Some(v.clone()),
            }),
            false => None,
        };
        let qkv = Qkv::Separate { q: self.q.clone(), k: self.k.clone(), v: Some(v) };
        let input =
            AttentionInput { x: self.x.as_ref(), global: global.as_ref(), ..AttentionInput::new(&qkv) };
        let out = self.mechanism.forward(&input)?.out.split()?;
        Ok(out.get(0)?.get(self.probe.head)?.to_dtype(DType::F32)?.contiguous()?)
    }

    /// Standard normal values [n, d].
    fn drawn_values(&self, name: &str) -> Result<Tensor> {
        let shape = [self.probe.len, self.values.1];
        Ok(RngStream::new(self.probe.seed, name).normal_tensor(&shape[..], 0.0, 1.0, &Device::Cpu)?)
    }

    /// Whether the result is additive in the values.
    fn is_linear(&self) -> Result<bool> {
        let (a, b) = (self.drawn_values("values a")?, self.drawn_values("values b")?);
        close(&(self.out(&a)? + self.out(&b)?)?, &self.out(&(a + b)?)?)
    }

    /// The weights [n, n] of a matrix that all channels share: as many columns per pass as there are channels.
    fn shared_weights(&self) -> Result<Tensor> {
        let (n, d) = (self.probe.len, self.values.1);
        let mut blocks = Vec::new();
        for first in (0..n).step_by(d) {
            let columns = d.min(n - first);
            let mut one_hot = vec![0f32; n * d];
            (0..columns).for_each(|channel| one_hot[(first + channel) * d + channel] = 1.0);
            let v = Tensor::from_vec(one_hot, (n, d), &Device::Cpu)?;
            blocks.push(self.out(&v)?.narrow(1, 0, columns)?);
        }
        Ok(Tensor::cat(&blocks, 1)?.contiguous()?)
    }

    /// The weights [n, n] of channel 0 where every channel has a matrix of its own, one column per pass, and the result [n, d] that
    /// the matrices of all channels give for `values`.
    fn channel_weights(&self, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let n = self.probe.len;
        let (mut columns, mut sum) = (Vec::with_capacity(n), values.zeros_like()?);
        for key in 0..n {
            let one_hot: Vec<f32> = (0..n).map(|place| f32::from(place == key)).collect();
            let v = Tensor::from_vec(one_hot, (n, 1), &Device::Cpu)?.broadcast_as(values.shape())?;
            let weights = self.out(&v)?;
            sum = (sum + weights.broadcast_mul(&values.narrow(0, key, 1)?)?)?;
            columns.push(weights.narrow(1, 0, 1)?);
        }
        Ok((Tensor::cat(&columns, 1)?.contiguous()?, sum))
    }
}

/// `own` knobs in the form that is linear in the values, and those settings that had to change for it, in words.
fn linear_form(entry: &'static MechanismEntry, own: &Knobs) -> Result<(Knobs, String)> {
    let form = entry.in_models.linear_form;
    let set = own.iter().filter(|(name, _)| own.differs(entry.knobs, name));
    let set: Vec<_> = set.map(|(name, value)| (name, value.to_string())).collect();
    let set = set.iter().map(|(name, value)| (*name, value.as_str()));
    let knobs = Knobs::parse(entry.name, entry.knobs, set.chain(form.iter().copied()))?;
    let before = |name: &str| own.iter().find(|(known, _)| *known == name).map(|(_, value)| value);
    let changed = form.iter().filter(|(name, text)| before(name).is_some_and(|now| now.to_string() != *text));
    let changed: Vec<String> = changed.map(|(name, text)| format!("{name}={text}")).collect();
    Ok((knobs, if changed.is_empty() { String::new() } else { format!("with {}", changed.join(", ")) }))
}

/// Why a mechanism with these needs has no matrix, where that needs no computation.
fn without_matrix(needs: &Needs) -> Option<&'static str> {
    match needs {
        Needs { projections, .. } if *projections == Projections::NONE => {
            Some("it mixes the layer input itself and has no values of heads")
        }
        Needs { projections: Projections { v: None, .. }, .. } | Needs { stream: Some(_), .. } => {
            Some("its values are keys of a second attention, so that they enter the weights")
        }
        _ => None,
    }
}

/// The matrix that `choice` implies in the situation of `probe`.
pub fn implied(choice: &MechanismChoice, probe: &ProbeConfig) -> Result<Matrix> {
    probe.check()?;
    probe.admits(choice)?;
    matrix_of((choice.entry, &choice.knobs), choice.label(), probe)
}

/// The matrix of head `head` that a call of a model's mechanism implies.
pub fn of_call(call: &MechanismCall, head: usize) -> Result<Matrix> {
    let MechanismCall { entry, config, tensors, positions, class, .. } = call;
    ensure!(
        !class,
        "every position of the last layer attends to a class token as well, which the matrix of {} has no place for; train it with --set pooling=mean",
        entry.name
    );
    let probe = ProbeConfig {
        len: *positions,
        causal: config.causal,
        heads: config.heads,
        head_dim: config.head_dim,
        head,
        seed: 0,
        given: tensors.clone(),
        built_for: Some(config.clone()),
    };
    matrix_of((entry, &config.knobs), entry.name.to_owned(), &probe)
}

fn matrix_of(
    (entry, knobs): (&'static MechanismEntry, &Knobs),
    label: String,
    probe: &ProbeConfig,
) -> Result<Matrix> {
    let name = entry.name;
    if let Some(reason) = without_matrix(&(entry.needs)(knobs)) {
        bail!("{name} has no attention matrix: {reason}; leave {name} out");
    }
    let (knobs, mut note) = linear_form(entry, knobs)?;
    let asked = ProbedMechanism::new(entry, knobs, probe)?;
    if !asked.is_linear()? {
        let norm = entry.in_models.dual_norm;
        let way = norm.map(|knob| format!("; set {}=false, which normalises no values", knob.name()));
        let way = way.unwrap_or_default();
        bail!("{label} has no attention matrix: values do not enter linearly{way}");
    }
    let values = asked.drawn_values("values")?;
    let out = asked.out(&values)?;
    let mut weights = asked.shared_weights()?;
    if !close(&out, &weights.matmul(&values)?)? {
        let (channel, product) = asked.channel_weights(&values)?;
        ensure!(close(&out, &product)?, "{label} has no attention matrix: values of different channels mix");
        let own = format!("channel 0 of {}, each has a matrix of its own", asked.values.1);
        note = if note.is_empty() { own } else { format!("{note}; {own}") };
        weights = channel;
    }
    let values = weights.flatten_all()?.to_vec1::<f32>()?;
    ensure!(values.iter().all(|value| value.is_finite()), "{label}: a weight is not finite");
    Ok(Matrix { label, note, queries: probe.len, keys: probe.len, values, ..Matrix::default() })
}

/// The re-weighting that cosFormer multiplies its scores by, alone: cos(pi/2 (i - j) / n) of query i and key j (its Figure 3, last
/// panel).
pub fn cos_distances(probe: &ProbeConfig) -> Matrix {
    let n = probe.len;
    let weight = |place: usize| {
        let (query, key) = (place / n, place % n);
        let angle = std::f64::consts::FRAC_PI_2 * query.abs_diff(key) as f64 / n as f64;
        if probe.causal && key > query { 0.0 } else { angle.cos() as f32 }
    };
    Matrix {
        label: "cos distance".to_owned(),
        note: "no inputs, no threshold".to_owned(),
        queries: n,
        keys: n,
        values: (0..n * n).map(weight).collect(),
        ..Matrix::default()
    }
}

/// cosFormer's Algorithm 2 on one matrix: in every row the largest entries are counted, in falling order, up
/// to and with the one that makes their sum exceed `threshold`. Counted entries become 1, others 0.
pub fn counted(matrix: &Matrix, threshold: f32) -> Matrix {
    let mut counted = Matrix { values: vec![0.0; matrix.values.len()], ..matrix.clone() };
    let columns = matrix.columns();
    for query in 0..matrix.queries {
        let row = matrix.row(query);
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        let mut sum = 0.0;
        for key in order {
            counted.values[query * columns + key] = 1.0;
            sum += row[key];
            if sum > threshold {
                break;
            }
        }
    }
    counted
}

/// The matrices of `choices`, each the mean over `samples` inputs, with `threshold` after Algorithm 2.
pub fn matrices(
    choices: &[MechanismChoice],
    probe: &ProbeConfig,
    samples: u64,
    threshold: Option<f32>,
) -> Result<Vec<Matrix>> {
    ensure!(samples >= 1, "at least one sample is needed");
    let mean = |choice: &MechanismChoice| -> Result<Matrix> {
        let mut total: Option<Matrix> = None;
        for sample in 0..samples {
            let mut matrix = implied(choice, &ProbeConfig { seed: probe.seed + sample, ..probe.clone() })?;
            if let Some(threshold) = threshold {
                matrix = counted(&matrix, threshold);
            }
            match &mut total {
                None => total = Some(matrix),
                Some(total) => {
                    total.values.iter_mut().zip(matrix.values).for_each(|(sum, value)| *sum += value)
                }
            }
        }
        let mut total = total.context("at least one sample is needed")?;
        total.values.iter_mut().for_each(|value| *value /= samples as f32);
        Ok(total)
    };
    choices.iter().map(mean).collect()
}

#[cfg(test)]
mod tests;
