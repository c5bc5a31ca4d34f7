//! Reformer: attention within chunks of positions sorted by a locality-sensitive hash.
//!
//! Kitaev et al. 2020, as the Hugging Face implementation has it: see [`effattn_kernel::lsh`].

use candle_core::{Result, Tensor, bail};

use super::knobs::{Knob, KnobSpec, Knobs, Value};
use super::{
    AttentionInput, AttentionOutput, Cost, Exception, Growth, InModels, Mechanism, MechanismConfig,
    MechanismEntry, Needs, Paper, Projections, Property, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::lsh::{Lsh, lsh};

const N_HASHES: Knob<usize> =
    Knob::int("n_hashes", 2, 1..=1 << 10).doc("rounds of hashing").source("Transformer-LS Table 1");
const CHUNK: Knob<usize> = Knob::int("chunk", 64, 1..=1 << 30)
    .doc("length of a chunk C")
    .source("Hugging Face Reformer (lsh_attn_chunk_length)");
const NUM_BUCKETS: Knob<Option<Vec<usize>>> = Knob::auto_list("num_buckets")
    .doc(
        "buckets of a round: an even number, several even factors joined with +, or auto: about 2 n / C, \
              in two factors where that is large",
    )
    .source("Hugging Face Reformer (_set_num_buckets)");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "reformer",
    title: "Reformer",
    paper: Paper {
        authors: "Kitaev et al.",
        title: "Reformer: The Efficient Transformer",
        year: 2020,
        locator: "arXiv:2001.04451",
    },
    support: Support { bidirectional: true, causal: true, ..Support::NONE },
    knobs: KNOBS,
    complexity: "O(n log n d): n d r C for r rounds and chunks of C, hashing n d r b/2 for b buckets, sorting",
    time: Growth::Linearithmic,
    memory: Growth::Linear,
    equations: "One projection q serves as queries and keys; kn_j = q_j / (sqrt(mean(q_j^2) + 1e-6) sqrt(D)).\n\
        Per round: b = argmax [q R, -q R]; sort by (b, position); cut into chunks of C; a chunk sees itself\n\
        and the chunk before it (the first one the last). logit_ij = q_i . kn_j; -1e5 for i = j.\n\
        out_i = sum over rounds of softmax_rounds(logsumexp) times softmax(logits) v. n <= C: one chunk.",
    deviations: &[
        "The paper restricts attention to equal buckets and corrects for pairs that several rounds share; the \
         Hugging Face code does neither and is followed.",
        "That code needs rounds times length to be a multiple of the chunk, so that a chunk may straddle two \
         rounds; here the length itself is padded.",
        "Automatic buckets follow the longest length the model is built for, so that one set of rotations \
         serves every length; weights that a longer model starts from keep theirs.",
    ],
    exceptions: &[Exception {
        property: Property::IgnoresFuture,
        applies: |_, causal| causal,
        reason: "SPEC-ls 10.3: positions are sorted by bucket over the whole sequence and cut into chunks, so \
                 later positions move the borders of the chunks that earlier ones are in.",
    }],
    idle: &[],
    in_models: InModels {
        // one chunk is not hashed
        kept_by_weights: Some(|knobs, len| {
            (len > knobs.get(&CHUNK)).then(|| (NUM_BUCKETS.name(), Value::List(factors(knobs, len))))
        }),
        ..InModels::PLAIN
    },
    validate,
    needs: |_| Needs { projections: Projections::SHARED_QK, ..Needs::default() },
    cost,
    pattern: |_, _| None,
    build,
};

const KNOBS: &[KnobSpec] = &[N_HASHES.spec(), CHUNK.spec(), NUM_BUCKETS.spec()];

/// The factors of the number of buckets for sequences up to `max_len`.
fn factors(knobs: &Knobs, max_len: usize) -> Vec<usize> {
    if let Some(list) = knobs.get(&NUM_BUCKETS) {
        return list;
    }
    let chunk = knobs.get(&CHUNK);
    let power = (2 * (max_len / chunk)).max(2).ilog2();
    let limit = 2 * (max_len / chunk).isqrt().max(chunk);
    if 1 << power > limit { vec![1 << (power / 2), 1 << (power - power / 2)] } else { vec![1 << power] }
}

fn validate(knobs: &Knobs, _: &Shape) -> std::result::Result<(), String> {
    let Some(list) = knobs.get(&NUM_BUCKETS) else { return Ok(()) };
    let product = list.iter().try_fold(1usize, |product, &factor| product.checked_mul(factor));
    let fits = product.is_some_and(|product| product < 1 << 24);
    if list.is_empty() || list.iter().any(|&factor| factor == 0 || factor % 2 == 1) || !fits {
        let text: Vec<String> = list.iter().map(usize::to_string).collect();
        return Err(format!(
            "reformer: num_buckets={} must be an even number, or even factors joined with + (such as 16+32), \
             with a product below 2^24",
            text.join("+")
        ));
    }
    Ok(())
}

fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (n, d, chunk, rounds) = (shape.queries, shape.head_dim, knobs.get(&CHUNK), knobs.get(&N_HASHES));
    let padded = n.next_multiple_of(chunk);
    let halves: usize = factors(knobs, n).iter().map(|factor| factor / 2).sum();
    let core = if n <= chunk {
        2 * n * n * d
    } else {
        padded * d * rounds * halves + 4 * rounds * padded * chunk * d
    };
    Cost {
        core_macs: (shape.batch * shape.heads * core) as u64,
        flops: (shape.heads * core) as u64,
        state_bytes: (4 * 2 * shape.heads * d * shape.keys) as u64,
    }
}

struct Reformer {
    chunk: usize,
    factors: Vec<usize>,
    rotations: Option<Tensor>,
    max_len: usize,
    causal: bool,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let knobs = &config.knobs;
    let (chunk, factors) = (knobs.get(&CHUNK), factors(knobs, config.max_len));
    let halves = factors.iter().map(|factor| factor / 2).sum();
    let shape = (config.heads, config.head_dim, knobs.get(&N_HASHES), halves);
    let rotations = if config.max_len > chunk {
        let rotations =
            builder.constant("rotations", |stream, device| stream.normal_tensor(shape, 0.0, 1.0, device))?;
        if rotations.dims4()? != shape {
            bail!("rotations have shape {:?}, expected {shape:?}", rotations.dims());
        }
        Some(rotations)
    } else {
        None
    };
    Ok(Box::new(Reformer { chunk, factors, rotations, max_len: config.max_len, causal: config.causal }))
}

impl Mechanism for Reformer {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let n = input.qkv.value_dims()?.2;
        if n > self.chunk && n > self.max_len && self.rotations.is_none() {
            bail!("this reformer was built for at most {} positions, not {n}", self.max_len);
        }
        let call = Lsh {
            chunk: self.chunk,
            factors: &self.factors,
            rotations: self.rotations.as_ref(),
            causal: self.causal,
        };
        Ok(lsh(input.qkv, input.mask, &call)?.into())
    }
}
