//! What the CUDA kernels read besides tensors: a plan and the places of operands as flat words.

use candle_core::Result;

use super::Kernels;
use crate::attend::dims::{Dims, RowLayout};
use crate::attend::tile::TileView;
use crate::attend::tile_plan::{TILE, TilePlan};
use crate::dropout::AttentionDropout;

/// Keys at a time for heads of this width; of tensor cores keys, and queries in the pass for keys.
pub fn block(width: usize, kernels: Kernels) -> usize {
    match kernels {
        Kernels::TensorCores(_) => 32,
        Kernels::Plain | Kernels::Relative if width <= 64 => 32,
        Kernels::Plain | Kernels::Relative => 16,
    }
}

/// Keys whose gradients a block computes.
pub fn key_block(width: usize, kernels: Kernels) -> usize {
    match kernels {
        Kernels::TensorCores(_) => TILE,
        Kernels::Plain | Kernels::Relative => block(width, kernels),
    }
}

/// Bytes of a tile of heads of this width in the working memory of tensor cores.
pub fn tile_bytes(width: usize) -> usize {
    4 * TILE * (width.next_multiple_of(32) + 4)
}

/// Bytes of a block's working memory: `Memory` of the source.
pub fn memory_bytes(width: usize, kernels: Kernels) -> usize {
    let (row, keys) = (width + 1, block(width, kernels));
    if let Kernels::TensorCores(_) = kernels {
        return (2 * TILE + 4 * keys) / TILE * tile_bytes(width) + 4 * (TILE + 14 * keys);
    }
    let tiles = 2 * TILE * row + 2 * keys * row + 2 * TILE * (keys + 1);
    let band = if kernels == Kernels::Relative { (TILE + keys + 1) * (row + 1) + keys + TILE } else { 0 };
    4 * (tiles + 4 * TILE + 2 * keys + band)
}

/// Tables of distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distances {
    /// Rows of the table of keys.
    pub keys: usize,
    /// Rows of the table of slots; 0 if slots have none.
    pub slots: usize,
    /// Length of a segment.
    pub segment: usize,
    /// Slots per segment.
    pub rank: usize,
}

/// Where the eleven operands of a call lie; those that do not exist are never read.
#[derive(Clone, Copy, Default)]
pub struct Places {
    pub q: Option<RowLayout>,
    pub k: Option<RowLayout>,
    pub v: Option<RowLayout>,
    pub slot_k: Option<RowLayout>,
    pub slot_v: Option<RowLayout>,
    pub out: Option<RowLayout>,
    pub d_q: Option<RowLayout>,
    pub d_k: Option<RowLayout>,
    pub d_v: Option<RowLayout>,
    pub d_slot_k: Option<RowLayout>,
    pub d_slot_v: Option<RowLayout>,
    /// Start of `[table | u | v | slot table]`.
    pub slab: usize,
    /// Start of its gradient.
    pub d_slab: usize,
}

/// `Header` of the source.
pub fn header(
    dims: &Dims,
    offset: usize,
    hidden: bool,
    distances: Option<Distances>,
    dropout: Option<AttentionDropout>,
    places: &Places,
) -> Vec<i64> {
    let sizes = [dims.keys, dims.slots, dims.queries, dims.heads, offset, usize::from(hidden)];
    let Places { q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v, slab, d_slab } = *places;
    let places = [q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v];
    let words = places.into_iter().flat_map(|place| {
        place.map_or([0; 4], |RowLayout { start, batch, head, row }| [start, batch, head, row])
    });
    let Distances { keys, slots, segment, rank } =
        distances.unwrap_or(Distances { keys: 0, slots: 0, segment: 1, rank: 0 });
    let behind = [keys, slots, segment, rank, slab, d_slab];
    let words = sizes.into_iter().chain(words).chain(behind).map(|word| word as i64);
    words.chain(dropout.map_or([0; 3], AttentionDropout::words)).collect()
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
    /// Blocks of keys, then of slots.
    pub keys: Visits,
    /// Blocks of distances of keys, then of slots.
    pub distances: Visits,
    /// Whether all heads share their visits.
    pub shared: bool,
}

/// Which tiles have to do with blocks of keys or distances.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Visits {
    /// Range of entries of every block, per head or once for all.
    pub blocks: Vec<i32>,
    /// Tile and stream of every visit.
    pub entries: Vec<i32>,
    /// Blocks of a head.
    pub count: usize,
}

impl Visits {
    fn push(&mut self, blocks: Vec<Vec<[i32; 2]>>) {
        for entries in blocks {
            let start = self.entries.len() / 2;
            self.entries.extend(entries.into_iter().flatten());
            self.blocks.extend([start as i32, (self.entries.len() / 2) as i32]);
        }
    }
}

/// The visits of one head.
struct Head<'a> {
    plan: &'a TilePlan,
    dims: &'a Dims,
    relative: Option<Distances>,
    /// Keys, or distances, of a block.
    size: usize,
    keys: Vec<Vec<[i32; 2]>>,
    distances: Vec<Vec<[i32; 2]>>,
}

impl Head<'_> {
    /// Stream `number` of all streams, of tile `tile`, which is number `here` of `view`.
    fn visit(&mut self, view: &TileView, here: usize, [tile, number]: [i32; 2]) {
        let (stream, seen, size) = (&view.streams[here], view.seen(here), self.size);
        let Some(last) = seen.end.checked_sub(1).filter(|&last| last >= seen.start) else { return };
        let [low, high] = [seen.start, last].map(|number| stream.start + number * stream.step);
        let base = if stream.slots { self.dims.keys.div_ceil(size) } else { 0 };
        for visits in &mut self.keys[base + low / size..=base + high / size] {
            visits.push([tile, number]);
        }
        let Some(Distances { keys, slots, segment, rank }) = self.relative else { return };
        let (base, rows) = if stream.slots { (keys.div_ceil(size), slots) } else { (0, keys) };
        let newest = |query: &usize| {
            let t = self.plan.offset + query;
            if stream.slots { (t / segment * rank) as i64 - 1 } else { t as i64 }
        };
        let bases = || view.queries.iter().map(newest);
        let (Some(least), Some(most)) = (bases().min(), bases().max()) else { return };
        let (near, far) = ((least - high as i64).max(0), (most - low as i64).min(rows as i64 - 1));
        if near <= far {
            for visits in &mut self.distances[base + near as usize / size..=base + far as usize / size] {
                visits.push([tile, number]);
            }
        }
    }
}

impl Tables {
    /// The words of `plan`, for blocks of `size` keys.
    pub fn new(plan: &TilePlan, dims: &Dims, relative: Option<Distances>, size: usize) -> Result<Self> {
        let all = [dims.keys, dims.slots, dims.queries, plan.offset];
        // half of what 32 bits hold: sums of two positions fit as well
        if all.iter().any(|&count| count >= 1 << 30) {
            candle_core::bail!("{all:?} keys, slots, queries and older keys do not fit the CUDA kernel");
        }
        let blocks = |keys: usize, slots: usize| keys.div_ceil(size) + slots.div_ceil(size);
        let mut tables = Self { shared: plan.is_shared(), ..Self::default() };
        tables.keys.count = blocks(dims.keys, dims.slots);
        tables.distances.count = relative.map_or(0, |relative| blocks(relative.keys, relative.slots));
        let mut view = TileView::default();
        for head in 0..dims.heads {
            if tables.shared && head > 0 {
                tables.head_tiles.extend_from_within(..2);
                continue;
            }
            let first = tables.tiles.len() / 3;
            let keys = vec![Vec::new(); tables.keys.count];
            let distances = vec![Vec::new(); tables.distances.count];
            let mut visits = Head { plan, dims, relative, size, keys, distances };
            for tile in &plan.head(head).tiles {
                view.read(plan, head, tile);
                tables.push(&view, &mut visits);
            }
            let count = tables.tiles.len() / 3 - first;
            tables.most_tiles = tables.most_tiles.max(count);
            tables.head_tiles.extend([first as i32, count as i32]);
            tables.keys.push(visits.keys);
            tables.distances.push(visits.distances);
        }
        Ok(tables)
    }

    /// Adds a tile and its visits.
    fn push(&mut self, view: &TileView, visits: &mut Head) {
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
            visits.visit(view, number, [tile as i32, (first + number) as i32]);
        }
    }
}
