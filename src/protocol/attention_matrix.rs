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
    /// Number of heads.
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
mod tests {
    use super::*;
    use effattn_model::attention::choose::choose;
    use effattn_model::attention::observe::observed;
    use effattn_model::char_lm::{Cache, CharLm};
    use effattn_model::family::{ModelRequest, SizeOverrides, character_lm};
    use effattn_model::nn::params::Init;

    fn one(model: &str) -> MechanismChoice {
        choose(&model.parse().unwrap()).unwrap().remove(0)
    }

    fn probe(len: usize, causal: bool) -> ProbeConfig {
        ProbeConfig { len, causal, heads: 2, head_dim: 8, ..ProbeConfig::default() }
    }

    #[test]
    fn full_attention_is_the_softmax_of_the_scores() {
        for causal in [false, true] {
            let probe = probe(19, causal);
            let matrix = implied(&one("full"), &probe).unwrap();
            let q = probe.tensor("q", &[1, 2, 19, 8]).unwrap().get(0).unwrap().get(0).unwrap();
            let k = probe.tensor("k", &[1, 2, 19, 8]).unwrap().get(0).unwrap().get(0).unwrap();
            let scores = q.matmul(&k.t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
            for (query, scores) in scores.iter().enumerate() {
                let last = if causal { query } else { 18 };
                let weights: Vec<f32> = scores[..=last].iter().map(|s| (s / 8f32.sqrt()).exp()).collect();
                let sum: f32 = weights.iter().sum();
                for (key, weight) in matrix.row(query).iter().enumerate() {
                    let expected = weights.get(key).map_or(0.0, |weight| weight / sum);
                    assert!((weight - expected).abs() < 1e-5, "{query} {key}: {weight} {expected}");
                }
            }
        }
    }

    #[test]
    fn the_cos_distances_are_what_divides_cosformer_from_relu() {
        for causal in [false, true] {
            let probe = probe(13, causal);
            let [with, without] =
                ["cosformer", "relu-linear"].map(|name| implied(&one(name), &probe).unwrap());
            let cos = cos_distances(&probe);
            for query in 0..13 {
                let product: Vec<f32> =
                    without.row(query).iter().zip(cos.row(query)).map(|(weight, cos)| weight * cos).collect();
                let sum: f32 = product.iter().sum();
                for (key, (product, with)) in product.iter().zip(with.row(query)).enumerate() {
                    assert!((product / sum - with).abs() < 1e-5, "{causal} {query} {key}");
                }
            }
        }
    }

    #[test]
    fn rows_of_linear_attention_sum_to_one() {
        for model in ["linear", "cosformer", "relu-linear", "performer:m=16", "nystrom", "reformer"] {
            let matrix = implied(&one(model), &probe(17, false)).unwrap();
            for query in 0..17 {
                let sum: f32 = matrix.row(query).iter().sum();
                assert!((sum - 1.0).abs() < 1e-2, "{model}: row {query} sums to {sum}");
            }
        }
    }

    #[test]
    fn a_matrix_times_the_values_is_the_result() {
        for model in [
            "full",
            "gqa:groups=1",
            "linear",
            "cosformer",
            "based:Dk=4",
            "retention",
            "retention:score_norm=torchscale",
            "gla",
            "mamba2",
            "mamba2:Dk=4,out_norm=gated-rms",
            "deltanet",
            "deltanet:neg_eigval=true,gate=swish",
            "gated-deltanet",
        ] {
            for causal in [false, true] {
                let (probe, choice) = (ProbeConfig { head: 1, ..probe(21, causal) }, one(model));
                if probe.admits(&choice).is_err() {
                    continue;
                }
                let matrix = implied(&choice, &probe).unwrap();
                assert!(!matrix.note.contains("channel"), "{model}: {}", matrix.note);
                let knobs = linear_form(choice.entry, &choice.knobs).unwrap().0;
                let asked = ProbedMechanism::new(choice.entry, knobs, &probe).unwrap();
                let values = asked.drawn_values("others").unwrap();
                let out = asked.out(&values).unwrap().to_vec2::<f32>().unwrap();
                let values = values.to_vec2::<f32>().unwrap();
                for (query, out) in out.iter().enumerate() {
                    let row = matrix.row(query);
                    let future: f32 = row[query + 1..].iter().map(|weight| weight.abs()).sum();
                    assert!(!causal || future == 0.0, "{model}: {query} sees its future");
                    for (channel, out) in out.iter().enumerate() {
                        let sum: f32 = row.iter().zip(&values).map(|(weight, v)| weight * v[channel]).sum();
                        assert!((sum - out).abs() < 1e-4, "{model} {causal} {query} {channel}: {sum} {out}");
                    }
                }
            }
        }
    }

    #[test]
    fn retention_is_scores_that_decay_with_the_distance() {
        let probe = ProbeConfig { head: 1, ..probe(12, true) };
        let matrix = implied(&one("retention:rotary=none,gamma=0.9+0.5"), &probe).unwrap();
        assert_eq!(matrix.note, "with norm=none, gate=none");
        let of = |name: &str| {
            let rows = probe.tensor(name, &[1, 2, 12, 8]).unwrap().get(0).unwrap().get(1).unwrap();
            rows.to_vec2::<f32>().unwrap()
        };
        let (q, k) = (of("q"), of("k"));
        for query in 0..12 {
            for key in 0..=query {
                let score: f32 = q[query].iter().zip(&k[key]).map(|(q, k)| q * k).sum();
                let expected = score / 8f32.sqrt() * 0.5f32.powi((query - key) as i32);
                let weight = matrix.row(query)[key];
                assert!((weight - expected).abs() < 1e-5, "{query} {key}: {weight} {expected}");
            }
        }
    }

    #[test]
    fn channels_with_weights_of_their_own_are_drawn_one_by_one() {
        for model in ["aft-simple", "aft-local:window=3"] {
            let matrix = implied(&one(model), &probe(9, true)).unwrap();
            assert_eq!(matrix.note, "channel 0 of 8, each has a matrix of its own");
        }
        let probe = probe(9, false);
        let matrix = implied(&one("aft-simple"), &probe).unwrap();
        let first = |name: &str| -> Vec<f32> {
            let rows = probe.tensor(name, &[1, 2, 9, 8]).unwrap().get(0).unwrap().get(0).unwrap();
            rows.narrow(1, 0, 1).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let (q, k) = (first("q"), first("k"));
        let sum: f32 = k.iter().map(|k| k.exp()).sum();
        for (row, q) in q.iter().enumerate() {
            for (key, (found, k)) in matrix.row(row).iter().zip(&k).enumerate() {
                let expected = k.exp() / sum / (1.0 + (-q).exp());
                assert!((found - expected).abs() < 1e-5, "{row} {key}");
            }
        }
    }

    #[test]
    fn what_has_no_matrix_says_why() {
        for (model, reason) in [
            ("s5", "it mixes the layer input itself and has no values of heads; leave s5 out"),
            ("fnet", "it mixes the layer input itself"),
            ("mega", "it mixes the layer input itself"),
            (
                "luna",
                "its values are keys of a second attention, so that they enter the weights; leave luna out",
            ),
            ("luna:tie_kv=false", "its values are keys of a second attention"),
        ] {
            let error = implied(&one(model), &probe(16, false)).unwrap_err().to_string();
            assert!(error.contains("has no attention matrix: ") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn normalised_values_have_no_matrix() {
        let error = implied(&one("ls"), &probe(16, false)).unwrap_err().to_string();
        assert!(error.contains("set dual_ln=false"), "{error}");
        assert!(implied(&one("ls:dual_ln=false"), &probe(16, false)).is_ok());
    }

    #[test]
    fn algorithm_2_counts_up_to_the_entry_that_exceeds_the_threshold() {
        let matrix = Matrix {
            queries: 2,
            keys: 4,
            values: vec![0.1, 0.5, 0.3, 0.1, 0.25, 0.25, 0.25, 0.25],
            ..Matrix::default()
        };
        assert_eq!(counted(&matrix, 0.6).values, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
        assert_eq!(counted(&matrix, 0.0).values, [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(counted(&matrix, 1.0).values, [1.0; 8]);
    }

    #[test]
    fn given_tensors_take_the_place_of_drawn_ones() {
        let given =
            HashMap::from([("q".to_owned(), Tensor::zeros((1, 2, 5, 8), DType::F32, &Device::Cpu).unwrap())]);
        let matrix = implied(&one("full"), &ProbeConfig { given, ..probe(5, false) }).unwrap();
        assert!(matrix.values.iter().all(|weight| (weight - 0.2).abs() < 1e-6));
        let given =
            HashMap::from([("q".to_owned(), Tensor::zeros((1, 2, 4, 8), DType::F32, &Device::Cpu).unwrap())]);
        let error = implied(&one("full"), &ProbeConfig { given, ..probe(5, false) }).unwrap_err().to_string();
        assert!(error.contains("q has shape [1, 2, 4, 8], expected [1, 2, 5, 8]"), "{error}");
    }

    /// Queries and keys of head `head` in layer `layer` of `model` by their definition: the projections of LN(x).
    fn projected(
        net: (&CharLm, &HashMap<String, Tensor>),
        ids: &Tensor,
        (layer, head): (usize, usize),
    ) -> [Tensor; 2] {
        let (model, weights) = net;
        let of = |name: &str| &weights[&format!("layers.{layer}.{name}")];
        let x = &model.trace(ids, &Cache::default()).unwrap().2[layer];
        let mean = x.mean_keepdim(2).unwrap();
        let centred = x.broadcast_sub(&mean).unwrap();
        let deviation = (centred.sqr().unwrap().mean_keepdim(2).unwrap() + 1e-5).unwrap().sqrt().unwrap();
        let normal = centred.broadcast_div(&deviation).unwrap();
        let normal = normal.broadcast_mul(of("norm1.weight")).unwrap();
        let normal = normal.broadcast_add(of("norm1.bias")).unwrap().squeeze(0).unwrap();
        ["q", "k"].map(|part| {
            let rows = normal.matmul(&of(&format!("attn.{part}.weight")).t().unwrap()).unwrap();
            rows.narrow(1, head * 8, 8).unwrap().contiguous().unwrap()
        })
    }

    #[test]
    fn the_matrix_of_a_causal_model_is_the_masked_softmax_of_its_scores() {
        let choice = one("full");
        let sizes = SizeOverrides {
            layers: Some(2),
            width: Some(16),
            heads: Some(2),
            ffn: Some(24),
            ..SizeOverrides::default()
        };
        let asked = ModelRequest {
            len: Some(32),
            cached: Some(0),
            vocab: Some(13),
            ..ModelRequest::new("charlm-small", &choice, &sizes)
        };
        let config = character_lm::config(&asked).unwrap();
        let drawn = ParamBuilder::seeded(3, &Device::Cpu, false)
            .with_init(|spec| if spec.shape.len() == 2 { Init::Uniform { bound: 0.7 } } else { spec.init });
        let ids: Vec<u32> = (0..19u32).map(|at| at * at % 13).collect();
        let ids = Tensor::from_vec(ids, (1, 19), &Device::Cpu).unwrap();
        let run = || {
            let model = CharLm::new(&config, &drawn)?;
            model.forward(&ids, &Cache::default())?;
            Ok(model)
        };
        let (model, calls) = observed(run).unwrap();
        let params = drawn.finish();
        let weights = params.names().map(|name| (name.to_owned(), params.value(name).unwrap())).collect();
        assert_eq!(calls.len(), 2, "a call a layer");
        for (layer, call) in calls.iter().enumerate() {
            for head in 0..2 {
                let matrix = of_call(call, head).unwrap();
                let [q, k] = projected((&model, &weights), &ids, (layer, head));
                let scores = q.matmul(&k.t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
                assert_eq!(matrix.queries, 19);
                for (query, scores) in scores.iter().enumerate() {
                    let exps: Vec<f32> =
                        scores[..=query].iter().map(|score| (score / 8f32.sqrt()).exp()).collect();
                    let sum: f32 = exps.iter().sum();
                    assert!((matrix.row(query).iter().sum::<f32>() - 1.0).abs() < 1e-5);
                    for (key, weight) in matrix.row(query).iter().enumerate() {
                        let expected = exps.get(key).map_or(0.0, |exp| exp / sum);
                        let seen = (layer, head, query, key);
                        assert!(key <= query || *weight == 0.0, "{seen:?} sees its future");
                        assert!((weight - expected).abs() < 1e-4, "{seen:?}: {weight} {expected}");
                    }
                }
            }
        }
        assert!(observed(|| Ok(())).unwrap().1.is_empty());
    }
}
