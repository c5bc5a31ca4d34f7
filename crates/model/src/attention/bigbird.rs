//! BigBird in its internal-transformer construction (SPEC-cos 3.3): window, global and random blocks.
//!
//! With nb = ceil(N / block), block row u sees block columns: all for the first and the last row, otherwise the
//! first, the last, u - 1, u, u + 1 and `rand_blocks[h, u - 1, :]`. Each key counts once.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::knobs::{Knob, Knobs};
use super::{
    AttentionInput, AttentionOutput, Cost, Growth, InModels, Mechanism, MechanismConfig, MechanismEntry,
    Needs, Paper, Shape, Support,
};
use crate::nn::params::ParamBuilder;
use effattn_kernel::attend::{Attend, attend};
use effattn_kernel::device::rng::RngStream;
use effattn_record::pattern::{KeySpan, Pattern, QueryGroup, Rule, Span};

const BLOCK: Knob<usize> =
    Knob::int("block", 64, 1..=1 << 24).doc("block length").source("BigBird and Long Range Arena");
const NUM_RAND: Knob<usize> = Knob::int("num_rand", 3, 0..=1 << 16)
    .doc("random blocks per block row; all of them if fewer blocks are left")
    .source("BigBird and Long Range Arena");

/// The table line.
pub static ENTRY: MechanismEntry = MechanismEntry {
    name: "bigbird",
    title: "BigBird",
    paper: Paper {
        authors: "Zaheer et al.",
        title: "Big Bird: Transformers for Longer Sequences",
        year: 2020,
        locator: "arXiv:2007.14062",
    },
    support: Support { bidirectional: true, ..Support::NONE },
    knobs: &[
        BLOCK.spec(),
        NUM_RAND.spec(),
    ],
    complexity: "O(n block (5 + num_rand) d)",
    time: Growth::Linear,
    memory: Growth::Linear,
    equations: "\
out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j over unpadded keys j of visible blocks. Block row u of nb sees
  all blocks                                                      if u = 0 or u = nb - 1,
  blocks {0, nb - 1, u - 1, u, u + 1} and rand_blocks[h, u - 1]   otherwise.",
    deviations: &[
        "Random blocks are drawn from all blocks outside of the window and the global ones; Long Range Arena draws only below position 1024.",
        "Long Range Arena appends block - n mod block zero tokens that count as valid keys; no block is appended here.",
        "The Hugging Face code sets all random indices to 0 in evaluation, which counts block 0 several times; here every key counts once.",
        "There is no causal form; Long Range Arena silently switches to full causal attention.",
    ],
    exceptions: &[],
    idle: &[],
    in_models: InModels::PLAIN,
    validate: |_, _| Ok(()),
    needs: |_| Needs::default(),
    cost,
    pattern: |knobs, shape| {
        let blocks = shape.queries.div_ceil(knobs.get(&BLOCK));
        let random = draw(&mut RngStream::new(0, "rand_blocks"), shape.heads, blocks, knobs.get(&NUM_RAND));
        Some(pattern(shape.queries, knobs.get(&BLOCK), &random))
    },
    build,
};

/// Multiply-adds 2 B H D block^2 (2 nb + 2 (4 + r) + (nb - 4) (5 + r)); all pairs of blocks below 5 blocks.
fn cost(knobs: &Knobs, shape: &Shape) -> Cost {
    let (block, random) = (knobs.get(&BLOCK), knobs.get(&NUM_RAND));
    let blocks = shape.queries.div_ceil(block);
    let pairs = match blocks {
        0..5 => blocks * blocks,
        _ => 2 * blocks + 2 * (4 + random) + (blocks - 4) * (5 + random),
    };
    let macs = 2 * shape.heads * shape.head_dim * block * block * pairs;
    Cost { core_macs: (shape.batch * macs) as u64, flops: macs as u64, state_bytes: 0 }
}

/// Random blocks per head and inner block row.
type Random = Vec<Vec<Vec<usize>>>;

/// For every head and inner block row up to `count` distinct blocks outside of the window and the global ones.
fn draw(stream: &mut RngStream, heads: usize, blocks: usize, count: usize) -> Random {
    let mut row = |u: usize| {
        let near = (u.max(2) - 1..=(u + 1).min(blocks - 2)).count();
        let legal = blocks - 2 - near;
        if legal < 4 * count {
            let legal: Vec<usize> = (1..blocks - 1).filter(|&w| w.abs_diff(u) > 1).collect();
            let order = stream.permutation(legal.len());
            return order.iter().take(count).map(|&at| legal[at]).collect();
        }
        // drawing again is rare here, and needs no list of all blocks
        let mut row = Vec::with_capacity(count);
        while row.len() < count {
            let w = 1 + stream.below(blocks - 2);
            if w.abs_diff(u) > 1 && !row.contains(&w) {
                row.push(w);
            }
        }
        row
    };
    (0..heads).map(|_| (1..blocks.max(1) - 1).map(&mut row).collect()).collect()
}

/// As the constant [H, nb - 2, count]; rows with fewer blocks repeat their own, which they see anyway.
fn constant(random: &Random, count: usize, device: &Device) -> Result<Tensor> {
    let inner = random.first().map_or(0, Vec::len);
    let entry = |row: &Vec<usize>, u: usize, at: usize| row.get(at).copied().unwrap_or(u + 1) as i64;
    let rows = random.iter().flat_map(|head| head.iter().enumerate());
    let flat: Vec<i64> = rows.flat_map(|(u, row)| (0..count).map(move |at| entry(row, u, at))).collect();
    Tensor::from_vec(flat, (random.len(), inner, count), device)
}

fn pattern(len: usize, block: usize, random: &Random) -> Pattern {
    let blocks = len.div_ceil(block);
    let range = |from: usize, to: usize| Span::range(from * block, (to * block).min(len));
    let group = |u: usize, random: Option<&Vec<usize>>| {
        let keys = match u == 0 || u + 1 == blocks {
            true => vec![range(0, blocks)],
            false => {
                let mut seen = vec![0, blocks - 1, u - 1, u, u + 1];
                seen.extend(random.into_iter().flatten().copied().filter(|&w| w < blocks));
                seen.sort_unstable();
                seen.dedup();
                seen.chunk_by(|a, b| a + 1 == *b).map(|run| range(run[0], run[run.len() - 1] + 1)).collect()
            }
        };
        let keys = keys.into_iter().map(|span| KeySpan { span, rule: Rule::All }).collect();
        QueryGroup { queries: range(u, u + 1), keys }
    };
    let head = |random: &Vec<Vec<usize>>| {
        (0..blocks).map(|u| group(u, u.checked_sub(1).and_then(|row| random.get(row)))).collect()
    };
    let heads = random.iter().map(head).collect();
    Pattern { queries: len, keys: len, slots: 0, offset: 0, plane: None, heads }
}

struct BigBird {
    block: usize,
    random: Random,
    head_dim: usize,
}

fn build(config: &MechanismConfig, builder: &ParamBuilder) -> Result<Box<dyn Mechanism>> {
    let (block, count) = (config.knobs.get(&BLOCK), config.knobs.get(&NUM_RAND));
    let blocks = config.max_len.div_ceil(block);
    let random = if blocks < 3 || count == 0 {
        vec![Vec::new(); config.heads]
    } else {
        let given = builder.constant("rand_blocks", |stream, device| {
            constant(&draw(stream, config.heads, blocks, count), count, device)
        })?;
        if given.dims() != [config.heads, blocks - 2, count] {
            let shape = given.shape();
            bail!("rand_blocks has shape {shape:?}, expected {:?}", [config.heads, blocks - 2, count]);
        }
        let rows = given.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec3::<i64>()?;
        let index = |w: i64| usize::try_from(w).ok().filter(|&w| w < blocks);
        let row = |row: Vec<i64>| row.into_iter().map(index).collect::<Option<Vec<_>>>();
        let rows = rows.into_iter().map(|head| head.into_iter().map(row).collect::<Option<Vec<_>>>());
        match rows.collect::<Option<Random>>() {
            Some(random) => random,
            None => bail!("rand_blocks holds a block outside of 0..{blocks}"),
        }
    };
    Ok(Box::new(BigBird { block, random, head_dim: config.head_dim }))
}

impl Mechanism for BigBird {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let pattern = pattern(input.lengths()?.0, self.block, &self.random);
        Ok(attend(input.qkv, &Attend::plain(&pattern, input.mask, self.head_dim))?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_follows_its_definition() {
        for (len, block, count) in
            [(1, 4, 2), (2, 1, 1), (7, 2, 3), (48, 4, 2), (50, 4, 3), (61, 5, 0), (65, 64, 3)]
        {
            let blocks = usize::div_ceil(len, block);
            let random = draw(&mut RngStream::new(3, "rand_blocks"), 2, blocks, count);
            let pattern = pattern(len, block, &random);
            for (head, random) in random.iter().enumerate() {
                for i in 0..len {
                    let u = i / block;
                    let sees = |w: usize| {
                        let edge = |b: usize| b == 0 || b + 1 == blocks;
                        edge(u) || edge(w) || w.abs_diff(u) <= 1 || random[u - 1].contains(&w)
                    };
                    let expected: Vec<usize> = (0..len).filter(|&j| sees(j / block)).collect();
                    assert_eq!(pattern.visible(head, i), expected, "{len} {block} {count} {head} {i}");
                }
            }
        }
    }

    #[test]
    fn random_blocks_are_distinct_and_legal() {
        for (blocks, count) in [(3, 3), (5, 3), (6, 3), (20, 3), (64, 5)] {
            for head in draw(&mut RngStream::new(1, "rand_blocks"), 4, blocks, count) {
                assert_eq!(head.len(), blocks - 2);
                for (row, mut chosen) in head.into_iter().enumerate() {
                    let u = row + 1;
                    let legal = (1..blocks - 1).filter(|w| w.abs_diff(u) > 1).count();
                    chosen.sort_unstable();
                    chosen.dedup();
                    assert_eq!(chosen.len(), count.min(legal));
                    assert!(chosen.iter().all(|&w| w > 0 && w < blocks - 1 && w.abs_diff(u) > 1));
                }
            }
        }
    }

    #[test]
    fn longer_constants_serve_shorter_sequences() {
        let random = draw(&mut RngStream::new(1, "rand_blocks"), 1, 12, 3);
        let pattern = pattern(20, 4, &random);
        assert!((0..20).all(|i| pattern.visible(0, i).iter().all(|&j| j < 20)));
        assert_eq!(pattern.visible(0, 19).len(), 20);
    }
}
