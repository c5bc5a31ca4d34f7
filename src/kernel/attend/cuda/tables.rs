//! What the CUDA kernels read besides tensors: a plan and the places of operands as flat words.

use candle_core::Result;

use crate::kernel::attend::cpu::operands::{Dims, Place};
use crate::kernel::attend::cpu::plan::{Plan, TILE};
use crate::kernel::attend::cpu::tile::View;

/// Widest head that the kernels take: more does not fit the shared memory of a block.
pub const WIDEST: usize = 128;

/// Keys at a time for heads of this width.
pub fn block(width: usize) -> usize {
    if width <= 64 { 32 } else { 16 }
}

/// Bytes of a block's working memory: `Memory` of the source.
pub fn memory_bytes(width: usize) -> usize {
    let (row, keys) = (width + 1, block(width));
    4 * (2 * TILE * row + 2 * keys * row + 2 * TILE * (keys + 1) + 3 * TILE + TILE + 2 * keys)
}

/// Where the eleven operands of a call lie; those that do not exist are never read.
#[derive(Clone, Copy, Default)]
pub struct Places {
    pub q: Option<Place>,
    pub k: Option<Place>,
    pub v: Option<Place>,
    pub slot_k: Option<Place>,
    pub slot_v: Option<Place>,
    pub out: Option<Place>,
    pub d_q: Option<Place>,
    pub d_k: Option<Place>,
    pub d_v: Option<Place>,
    pub d_slot_k: Option<Place>,
    pub d_slot_v: Option<Place>,
}

/// `Header` of the source.
pub fn header(dims: &Dims, offset: usize, hidden: bool, places: &Places) -> Vec<i64> {
    let sizes = [dims.keys, dims.slots, dims.queries, dims.heads, offset, usize::from(hidden)];
    let Places { q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v } = *places;
    let places = [q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v];
    let words = places.into_iter().flat_map(|place| {
        place.map_or([0; 4], |Place { start, batch, head, row }| [start, batch, head, row])
    });
    sizes.into_iter().chain(words).map(|word| word as i64).collect()
}

/// A plan as words.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// First stream, number of streams, number of queries of every tile.
    pub tiles: Vec<i32>,
    /// First tile and number of tiles of every head.
    pub head_tiles: Vec<i32>,
    /// Most tiles of a head.
    pub most_tiles: usize,
    /// Start, step, whether slots, skipped distances (0: none), first and last key number of every stream.
    pub streams: Vec<i32>,
    /// First key number that a lane sees and the first behind, per stream [2, TILE].
    pub bounds: Vec<i32>,
    /// Queries of every tile, [TILE].
    pub queries: Vec<i32>,
    /// Range of visits of every block of keys (then slots), per head or once for all.
    pub blocks: Vec<i32>,
    /// Tile and stream of every visit.
    pub visits: Vec<i32>,
    /// Blocks of keys and slots of a head.
    pub key_blocks: usize,
    /// Whether all heads share `blocks`.
    pub shared: bool,
}

impl Tables {
    /// The words of `plan`.
    ///
    /// # Errors
    /// Positions that do not fit 32 bits.
    pub fn new(plan: &Plan, dims: &Dims) -> Result<Self> {
        let all = [dims.keys, dims.slots, dims.queries];
        if all.iter().any(|&count| i32::try_from(count).is_err()) {
            candle_core::bail!("{all:?} keys, slots and queries do not fit the CUDA kernel");
        }
        let size = block(dims.width);
        let key_blocks = dims.keys.div_ceil(size) + dims.slots.div_ceil(size);
        let mut tables = Self { key_blocks, shared: plan.is_shared(), ..Self::default() };
        let mut view = View::default();
        for head in 0..dims.heads {
            if tables.shared && head > 0 {
                tables.head_tiles.extend_from_within(..2);
                continue;
            }
            let first = tables.tiles.len() / 3;
            let mut visits = vec![Vec::new(); key_blocks];
            for tile in &plan.head(head).tiles {
                view.read(plan, head, tile);
                tables.push(&view, size, dims.keys.div_ceil(size), &mut visits);
            }
            let count = tables.tiles.len() / 3 - first;
            tables.most_tiles = tables.most_tiles.max(count);
            tables.head_tiles.extend([first as i32, count as i32]);
            for visits in visits {
                let start = tables.visits.len() / 2;
                tables.visits.extend(visits.into_iter().flatten());
                tables.blocks.extend([start as i32, (tables.visits.len() / 2) as i32]);
            }
        }
        Ok(tables)
    }

    /// Adds a tile, and its visits to blocks of `size` keys; slots start at block `slots`.
    fn push(&mut self, view: &View, size: usize, slots: usize, visits: &mut [Vec<[i32; 2]>]) {
        let (tile, first) = (self.tiles.len() / 3, self.streams.len() / 6);
        self.tiles.extend([first, view.streams.len(), view.queries.len()].map(|word| word as i32));
        self.queries.extend(view.queries.iter().map(|&query| query as i32));
        self.queries.resize((tile + 1) * TILE, -1);
        for (number, stream) in view.streams.iter().enumerate() {
            let seen = view.seen(number);
            let words = [
                stream.start,
                stream.step,
                stream.slots.into(),
                stream.skip.unwrap_or(0),
                seen.start,
                seen.end,
            ];
            self.streams.extend(words.map(|word| word as i32));
            for bound in [&stream.low, &stream.high] {
                self.bounds.extend(bound[..TILE].iter().map(|&bound| bound as i32));
            }
            let (Some(last), base) = (seen.end.checked_sub(1), if stream.slots { slots } else { 0 }) else {
                continue;
            };
            let block = |number: usize| base + (stream.start + number * stream.step) / size;
            for visits in &mut visits[block(seen.start)..=block(last)] {
                visits.push([tile as i32, (first + number) as i32]);
            }
        }
    }
}
