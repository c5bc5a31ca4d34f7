//! Training text as contiguous streams, so that what is cached is what stands before.

use candle_core::{Device, Result, Tensor};

/// Symbols cut into blocks, the blocks dealt to streams: update j takes block j of every stream. Blocks that do not
/// fill all streams are left out.
#[derive(Clone, Copy)]
pub struct Streams<'a> {
    symbols: &'a [u8],
    block: usize,
    streams: usize,
    blocks: usize, // per stream
}

impl<'a> Streams<'a> {
    /// `streams` streams of blocks of `block` symbols; none if there is not one block for each.
    pub fn new(symbols: &'a [u8], block: usize, streams: usize) -> Option<Self> {
        let blocks = symbols.len().checked_div(block)?.checked_div(streams)?;
        (blocks > 0).then_some(Self { symbols, block, streams, blocks })
    }

    /// Number of streams.
    pub fn count(&self) -> usize {
        self.streams
    }

    /// Symbols of one update, [part of the streams, block], as u32.
    pub fn at(&self, step: u64, part: std::ops::Range<usize>, device: &Device) -> Result<Tensor> {
        let number = (step % self.blocks as u64) as usize;
        let mut ids = Vec::with_capacity(part.len() * self.block);
        for stream in part.clone() {
            let start = (stream * self.blocks + number) * self.block;
            ids.extend(self.symbols[start..start + self.block].iter().map(|&symbol| u32::from(symbol)));
        }
        Tensor::from_vec(ids, (part.len(), self.block), device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_contiguous_and_start_over() {
        let symbols: Vec<u8> = (0..50).collect();
        let streams = Streams::new(&symbols, 4, 3).unwrap(); // 12 blocks, 4 for each
        let at = |step| streams.at(step, 0..3, &Device::Cpu).unwrap().to_vec2::<u32>().unwrap();
        assert_eq!(at(0), [[0, 1, 2, 3], [16, 17, 18, 19], [32, 33, 34, 35]]);
        assert_eq!(at(1)[1], [20, 21, 22, 23]);
        assert_eq!(at(4), at(0));
        let part = streams.at(1, 2..3, &Device::Cpu).unwrap().to_vec2::<u32>().unwrap();
        assert_eq!(part, [[36, 37, 38, 39]]);
        assert!(Streams::new(&symbols, 60, 1).is_none() && Streams::new(&symbols, 10, 6).is_none());
        assert!(Streams::new(&symbols, 0, 1).is_none() && Streams::new(&symbols, 1, 0).is_none());
    }
}
