//! A tile in detail: its queries as vector lanes, and the keys they see as streams of chunks.

use super::tile_plan::{TILE, Tile, TilePlan, skip};
use effattn_record::pattern::{KeySpan, Span, bounds};

/// Widths of right factors and results are multiples of this many elements, on every processor.
pub const WIDTH: usize = 16;

/// Distance of two rows of lanes: a vector that starts at the last lane still ends inside.
pub const ROW: usize = TILE + WIDTH;

/// Most keys of a chunk.
pub const CHUNK: usize = 64;

/// Candidate keys of a tile, with the part of them that every lane sees.
pub struct KeyStream {
    /// Keys (or slots, counted from 0): key number `i` of the stream stands at `start + i * step`.
    pub start: usize,
    /// Distance of two keys.
    pub step: usize,
    /// Whether these are slots.
    pub slots: bool,
    /// Distances whose multiples are hidden.
    pub skip: Option<usize>,
    /// First key number that a lane sees, exact in f32; lanes without a query see none.
    pub low: [f32; ROW],
    /// First key number behind those that a lane sees.
    pub high: [f32; ROW],
}

/// Keys of a stream together with the lanes that see any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Stream.
    pub stream: usize,
    /// First key number.
    pub first: usize,
    /// Number of keys, at most [`CHUNK`].
    pub keys: usize,
    /// First lane.
    pub lane: usize,
    /// Number of lanes.
    pub lanes: usize,
    /// Whether some of the lanes (or of those behind them that fill the last vector) see only some of the keys.
    pub partial: bool,
}

impl Chunk {
    /// Lanes rounded up to whole vectors.
    pub fn width(&self) -> usize {
        self.lanes.next_multiple_of(WIDTH)
    }
}

/// The lanes and streams of a tile; kept between tiles for its memory.
#[derive(Default)]
pub struct TileView {
    /// Queries by lane.
    pub queries: Vec<usize>,
    /// Streams.
    pub streams: Vec<KeyStream>,
    /// All chunks.
    pub chunks: Vec<Chunk>,
    /// First key that any lane sees, and the end of those keys, by stream.
    unions: Vec<(usize, usize)>,
}

impl TileView {
    /// The key numbers of stream `stream` that any lane sees.
    #[cfg(any(feature = "cuda", test))]
    pub fn seen(&self, stream: usize) -> std::ops::Range<usize> {
        let (start, end) = self.unions[stream];
        if start < end { start..end } else { 0..0 }
    }

    /// Reads `tile` of head `head`.
    pub fn read(&mut self, plan: &TilePlan, head: usize, tile: &Tile) {
        let groups = plan.head(head);
        self.queries.clear();
        self.streams.clear();
        self.chunks.clear();
        self.unions.clear();
        let range = tile.group..tile.group + tile.groups;
        for key in groups.spans(tile.group) {
            let Span { start, step, .. } = key.span;
            let slots = start >= plan.keys;
            let (low, high) = ([0.0; ROW], [0.0; ROW]);
            self.streams.push(KeyStream { start, step, slots, skip: skip(key.rule), low, high });
            self.unions.push((usize::MAX, 0));
        }
        for group in range.clone() {
            for (stream, key) in self.streams.iter_mut().zip(groups.spans(group)) {
                stream.start = stream.start.min(key.span.start);
            }
        }
        for group in range {
            let queries = groups.queries(group);
            let taken = (queries.len - tile.first).min(tile.queries - self.queries.len());
            for query in tile.first..tile.first + taken {
                self.lane(plan, queries.at(query), groups.spans(group));
            }
        }
        self.cut();
        for stream in &mut self.streams {
            if stream.slots {
                stream.start -= plan.keys;
            }
        }
    }

    /// Adds a query as the next lane.
    fn lane(&mut self, plan: &TilePlan, query: usize, spans: &[KeySpan]) {
        let lane = self.queries.len();
        self.queries.push(query);
        for ((stream, union), key) in self.streams.iter_mut().zip(&mut self.unions).zip(spans) {
            let seen = bounds(plan.keys, plan.offset + query, key);
            let shift = (key.span.start - stream.start) / stream.step;
            let (low, high) = (seen.start + shift, seen.end + shift);
            stream.low[lane] = low as f32;
            stream.high[lane] = high as f32;
            if low < high {
                *union = (union.0.min(low), union.1.max(high));
            }
        }
    }

    /// Cuts the streams into chunks.
    fn cut(&mut self) {
        let lanes = self.queries.len();
        for (number, (stream, &(start, end))) in self.streams.iter().zip(&self.unions).enumerate() {
            let size = chunk_size(stream, lanes);
            for first in (start..end).step_by(size) {
                let keys = size.min(end - first);
                let (from, to) = (first as f32, (first + keys) as f32);
                let sees = |&lane: &usize| stream.low[lane] < to && stream.high[lane] > from;
                let (Some(lane), Some(last)) = ((0..lanes).find(sees), (0..lanes).rev().find(sees)) else {
                    continue;
                };
                let mut chunk =
                    Chunk { stream: number, first, keys, lane, lanes: last + 1 - lane, partial: false };
                let span = lane..lane + chunk.width();
                let (low, high) = (&stream.low[span.clone()], &stream.high[span]);
                chunk.partial = !low.iter().zip(high).all(|(&low, &high)| low <= from && high >= to);
                self.chunks.push(chunk);
            }
        }
    }
}

/// Keys per chunk: fewer where lanes see short and different parts of a stream.
fn chunk_size(stream: &KeyStream, lanes: usize) -> usize {
    let (low, high) = (&stream.low[..lanes], &stream.high[..lanes]);
    if low.iter().all(|x| *x == low[0]) && high.iter().all(|x| *x == high[0]) {
        return CHUNK;
    }
    let seen = low.iter().zip(high).map(|(low, high)| high - low);
    let least = seen.filter(|&seen| seen > 0.0).fold(f32::INFINITY, f32::min);
    ((least.min(2.0 * CHUNK as f32) as usize / 2).next_multiple_of(8)).clamp(8, CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_record::pattern::{Pattern, Rule};

    fn views(pattern: &Pattern) -> Vec<TileView> {
        let plan = TilePlan::new(pattern, pattern.heads.len()).unwrap();
        let tiles = plan.head(0).tiles.iter();
        let view = |tile: &Tile| {
            let mut view = TileView::default();
            view.read(&plan, 0, tile);
            view
        };
        tiles.map(view).collect()
    }

    /// The pairs that the chunks of all tiles let through.
    fn visible(pattern: &Pattern) -> Vec<Vec<usize>> {
        let mut seen = vec![Vec::new(); pattern.queries];
        for view in views(pattern) {
            for chunk in &view.chunks {
                let stream = &view.streams[chunk.stream];
                for lane in chunk.lane..chunk.lane + chunk.lanes {
                    for number in chunk.first..chunk.first + chunk.keys {
                        let position = stream.start + number * stream.step;
                        let key = if stream.slots { pattern.keys + position } else { position };
                        let query = view.queries[lane];
                        let distance = key.abs_diff(pattern.offset + query);
                        let within = (stream.low[lane]..stream.high[lane]).contains(&(number as f32));
                        assert!(within || chunk.partial);
                        if within && stream.skip.is_none_or(|skip| !distance.is_multiple_of(skip)) {
                            seen[query].push(key);
                        }
                    }
                }
            }
        }
        seen
    }

    #[test]
    fn chunks_show_what_the_pattern_shows() {
        for case in super::super::tests::cases() {
            let mut seen = visible(&case.pattern);
            for (query, seen) in seen.iter_mut().enumerate() {
                let mut want = case.pattern.visible(0, query);
                want.sort_unstable();
                seen.sort_unstable();
                assert_eq!(*seen, want, "{query} {:?}", case.pattern);
            }
        }
    }

    #[test]
    fn segments_of_a_window_fill_their_vectors() {
        let views = views(&Pattern::window(128, 128, 8, false).with_slots(32, Rule::All));
        let chunks = &views[1].chunks;
        assert_eq!((chunks[0].keys, chunks[0].lanes, chunks[0].partial), (32, 64, false));
        // 4 keys in front of the tile, then 8 keys around every border of two segments
        assert_eq!(chunks[2].lanes, 16);
        assert!(chunks[2..8].iter().all(|chunk| chunk.keys == 8 && chunk.lanes == 16 && !chunk.partial));
    }
}
