//! Sizes of a dynamic projection and how its work is cut.

use std::ops::Range;

/// Positions of a tile.
pub const TILE: usize = 256;
/// Jobs to have at least, as far as there is work for them.
const JOBS: usize = 16;

/// Sizes of one projection.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Samples.
    pub batch: usize,
    /// Positions.
    pub len: usize,
    /// Width of a row.
    pub row: usize,
    /// Where the projected parts start within a row.
    pub parts: Vec<usize>,
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Slots per head and segment.
    pub rank: usize,
    /// Width of the layer input.
    pub width: usize,
    /// Length of a segment.
    pub segment: usize,
}

/// A run of positions of one sample: whole segments, or a piece of the only one.
pub struct Job {
    pub sample: usize,
    pub positions: Range<usize>,
    /// The segments they belong to.
    pub segments: Range<usize>,
}

impl Geometry {
    /// Slots of a segment, all heads.
    pub fn slots(&self) -> usize {
        self.heads * self.rank
    }

    /// Segments of a sample.
    pub fn segments(&self) -> usize {
        self.len.div_ceil(self.segment)
    }

    /// Width of one accumulated slot: its part of every projected part.
    pub fn slot_width(&self) -> usize {
        self.parts.len() * self.head_dim
    }

    /// Width of one row of the result.
    pub fn out_width(&self) -> usize {
        self.heads * self.slot_width()
    }

    /// Numbers that describe the slots of one segment: maxima, sums, weighted rows.
    pub fn state(&self) -> usize {
        self.slots() * (2 + self.slot_width())
    }

    /// Where a slot's share of a part starts in the result; `segment` counts over all samples.
    pub fn out_at(&self, segment: usize, slot: usize, part: usize) -> usize {
        let (head, index) = (slot / self.rank, slot % self.rank);
        (segment * self.rank + index) * self.out_width() + (part * self.heads + head) * self.head_dim
    }

    /// The segments that `positions` touch, each with its columns within the tile.
    pub fn pieces(&self, positions: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let (segment, Range { start, end }) = (self.segment, positions.clone());
        (start / segment..end.div_ceil(segment)).map(move |index| {
            let (from, to) = ((index * segment).max(start), ((index + 1) * segment).min(end));
            (index, from - start..to - start)
        })
    }

    /// The work, cut by shape alone.
    pub fn jobs(&self) -> Vec<Job> {
        let per_sample = JOBS.div_ceil(self.batch.max(1));
        let segments = self.segments();
        let mut jobs = Vec::new();
        for sample in 0..self.batch {
            if segments == 1 {
                let step = self.len.div_ceil(per_sample).next_multiple_of(TILE);
                jobs.extend((0..self.len).step_by(step).map(|start| Job {
                    sample,
                    positions: start..(start + step).min(self.len),
                    segments: 0..1,
                }));
            } else {
                let step = segments.div_ceil(per_sample);
                jobs.extend((0..segments).step_by(step).map(|start| {
                    let end = (start + step).min(segments);
                    let positions = start * self.segment..(end * self.segment).min(self.len);
                    Job { sample, positions, segments: start..end }
                }));
            }
        }
        jobs
    }
}

impl Job {
    /// Positions of a job tile by tile.
    pub fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Range { start, end } = self.positions;
        (start..end).step_by(TILE).map(move |at| at..(at + TILE).min(end))
    }
}
