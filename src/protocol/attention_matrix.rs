//! Attention matrices: what weight each query gives to each key (cosFormer Figure 3).
//!
//! A mechanism never stores such a matrix. As its result is linear in the values, one-hot values bring out
//! the columns: with v_j = e_c, channel c of out_i is the weight of key j for query i.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};

use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::Qkv;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::{AttentionInput, Mechanism, MechanismConfig, Needs, Shape};
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
}

impl Default for ProbeConfig {
    /// 64 positions, four heads of 64.
    fn default() -> Self {
        Self { len: 64, causal: false, heads: 4, head_dim: 64, head: 0, seed: 0, given: HashMap::new() }
    }
}

impl ProbeConfig {
    /// The shape of the call.
    pub fn shape(&self) -> Shape {
        Shape {
            batch: 1,
            heads: self.heads,
            head_dim: self.head_dim,
            width: self.heads * self.head_dim,
            queries: self.len,
            keys: self.len,
            causal: self.causal,
            cls: false,
            grid: Grid2d::square(self.len),
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
        let needs = (choice.entry.needs)(&choice.knobs);
        if needs.projections.v.is_none() || needs.beyond_plain(self.heads, self.head_dim).is_some() {
            bail!("{name} is not a weighted sum of values that every head has; leave {name} out");
        }
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
}

impl<'a> ProbedMechanism<'a> {
    fn new(choice: &MechanismChoice, probe: &'a ProbeConfig) -> Result<Self> {
        let shape = probe.shape();
        let needs = (choice.entry.needs)(&choice.knobs);
        let config = MechanismConfig {
            knobs: choice.knobs.clone(),
            heads: shape.heads,
            head_dim: shape.head_dim,
            width: shape.width,
            max_len: probe.len,
            causal: probe.causal,
            layer: 0,
        };
        let builder = if probe.given.is_empty() {
            ParamBuilder::seeded(probe.seed, &Device::Cpu, false)
        } else {
            ParamBuilder::given(probe.given.clone(), &Device::Cpu, false)
        };
        let mechanism = (choice.entry.build)(&config, &builder).with_context(|| choice.label())?;
        let per_head = [1, shape.heads, probe.len, shape.head_dim];
        let optional =
            |wanted: bool, name: &str, shape: &[usize]| wanted.then(|| probe.tensor(name, shape)).transpose();
        Ok(Self {
            probe,
            mechanism,
            needs,
            q: optional(needs.projections.q.is_some(), "q", &per_head)?,
            k: optional(needs.projections.k.is_some(), "k", &per_head)?,
            x: optional(needs.x, "x", &[1, probe.len, shape.width])?,
        })
    }

    /// The result for values `v` [1, h, n, d].
    fn out(&self, v: &Tensor) -> Result<Tensor> {
        let shape = [1, self.probe.heads, self.probe.len, self.probe.head_dim];
        let qkv = Qkv::Separate { q: self.q.clone(), k: self.k.clone(), v: Some(v.clone()) };
        let global = match self.needs.global {
            true => Some(Qkv::Separate {
                q: Some(self.probe.tensor("q_global", &shape)?),
                k: Some(self.probe.tensor("k_global", &shape)?),
                v: Some(v.clone()),
            }),
            false => None,
        };
        let input =
            AttentionInput { x: self.x.as_ref(), global: global.as_ref(), ..AttentionInput::new(&qkv) };
        Ok(self.mechanism.forward(&input)?.out.split()?.to_dtype(DType::F32)?)
    }

    /// Whether the result is additive in the values.
    fn is_linear(&self) -> Result<bool> {
        let shape = [1, self.probe.heads, self.probe.len, self.probe.head_dim];
        let draw = |name: &str| {
            RngStream::new(self.probe.seed, name).normal_tensor(&shape[..], 0.0, 1.0, &Device::Cpu)
        };
        let (a, b) = (draw("values a")?, draw("values b")?);
        let apart = (self.out(&a)? + self.out(&b)?)?;
        let together = self.out(&(a + b)?)?;
        let largest = |x: &Tensor| -> Result<f32> { Ok(x.abs()?.flatten_all()?.max(0)?.to_scalar()?) };
        let scale = largest(&apart)?.max(1e-3);
        Ok(largest(&(together - apart)?)? <= 1e-3 * scale)
    }
}

/// The matrix that `choice` implies in the situation of `probe`.
pub fn implied(choice: &MechanismChoice, probe: &ProbeConfig) -> Result<Matrix> {
    probe.check()?;
    probe.admits(choice)?;
    let asked = ProbedMechanism::new(choice, probe)?;
    let label = choice.label();
    if !asked.is_linear()? {
        let norm = choice.entry.in_models.dual_norm;
        let way = norm.map(|knob| format!("; set {}=false, which normalises no values", knob.name()));
        let way = way.unwrap_or_default();
        bail!("{label} has no attention matrix: values do not enter linearly{way}");
    }
    let (n, d) = (probe.len, probe.head_dim);
    let mut values = vec![0f32; n * n];
    for first in (0..n).step_by(d) {
        let mut one_hot = vec![0f32; n * d];
        (first..n.min(first + d)).for_each(|key| one_hot[key * d + key - first] = 1.0);
        let v = Tensor::from_vec(one_hot, (1, 1, n, d), &Device::Cpu)?;
        let v = v.broadcast_as((1, probe.heads, n, d))?.contiguous()?;
        let out = asked.out(&v)?.narrow(1, probe.head, 1)?.flatten_all()?.to_vec1::<f32>()?;
        for (query, channels) in out.chunks(d).enumerate() {
            let columns = n.min(first + d) - first;
            values[query * n + first..][..columns].copy_from_slice(&channels[..columns]);
        }
    }
    ensure!(values.iter().all(|value| value.is_finite()), "{label}: a weight is not finite");
    Ok(Matrix { label, note: String::new(), queries: n, keys: n, slots: 0, values })
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
    fn normalised_values_have_no_matrix() {
        let error = implied(&one("ls"), &probe(16, false)).unwrap_err().to_string();
        assert!(error.contains("set dual_ln=false"), "{error}");
        assert!(implied(&one("ls:dual_ln=false"), &probe(16, false)).is_ok());
    }

    #[test]
    fn algorithm_2_counts_up_to_the_entry_that_exceeds_the_threshold() {
        let matrix = Matrix {
            label: String::new(),
            note: String::new(),
            queries: 2,
            keys: 4,
            slots: 0,
            values: vec![0.1, 0.5, 0.3, 0.1, 0.25, 0.25, 0.25, 0.25],
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
}
