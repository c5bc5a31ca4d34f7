//! Adaptive input and adaptive softmax (Baevski & Auli 2019; `SPEC-text.md` section 1).
//!
//! Words 0..V-1, the most frequent first, fall into bands. Band b has vectors of width d / factor^b, which a
//! projection brings to the model's width d. A word of the first band is predicted by the head; any other by the head's
//! entry for its band, then within the band. Only the head and the tails of the targets are computed: never a
//! distribution over all words for every position.

use std::ops::Range;

use candle_core::{D, Device, Result, Tensor, bail};

use super::dropout::Dropout;
use super::params::{Init, ParamBuilder};
use effattn_kernel::embedding::PADDING;
use effattn_kernel::embedding::embedding;
use effattn_kernel::linear::linear;
use effattn_kernel::linear_loss::linear_cross_entropy;

/// What input and output share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tie {
    /// Word vectors, and the projections of the tails (transposed).
    #[default]
    All,
    /// Word vectors.
    Weights,
    /// Nothing.
    None,
}

impl Tie {
    /// All of them.
    pub const ALL: &[Self] = &[Self::All, Self::Weights, Self::None];

    /// Its name in golden files and presets.
    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Weights => "weights",
            Self::None => "none",
        }
    }
}

/// Sizes of an adaptive input and softmax.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptiveConfig {
    /// Number of words.
    pub vocab: usize,
    /// First word of every band but the first.
    pub cutoffs: Vec<usize>,
    /// Width of the model.
    pub width: usize,
    /// What the width is divided by from band to band.
    pub factor: usize,
    /// What input and output share.
    pub tie: Tie,
}

impl AdaptiveConfig {
    /// # Errors
    /// Bands without words, or so many that the last ones have no width.
    pub fn validate(&self) -> std::result::Result<(), String> {
        let (mut edge, mut width) = (0, self.width);
        for &cutoff in &self.cutoffs {
            width /= self.factor.max(1);
            if cutoff <= edge || width == 0 {
                return Err(format!(
                    "cutoffs {:?} with factor {} do not fit a width of {}",
                    self.cutoffs, self.factor, self.width
                ));
            }
            edge = cutoff;
        }
        if self.vocab <= edge {
            return Err(format!("{} words do not reach behind the last cutoff, {edge}", self.vocab));
        }
        Ok(())
    }

    /// Words and width of every band.
    pub fn bands(&self) -> Vec<(Range<usize>, usize)> {
        let starts = std::iter::once(0).chain(self.cutoffs.iter().copied());
        let ends = self.cutoffs.iter().copied().chain([self.vocab]);
        let mut width = self.width;
        let band = |(start, end)| {
            let here = (start..end, width);
            width /= self.factor.max(1);
            here
        };
        starts.zip(ends).map(band).collect()
    }
}

/// One band of words.
struct Band {
    words: Range<usize>,
    /// Vectors [words, d_b].
    vectors: Tensor,
    /// Projection to the model's width [d, d_b].
    project: Tensor,
    /// Output vectors [words, d_b].
    output: Tensor,
    /// From the model's width to the band's.
    reduce: Reduce,
}

/// How a hidden row gets the width of a band.
enum Reduce {
    /// The first band is as wide as the model.
    No,
    /// By the input's projection, transposed.
    Tied,
    /// By a projection of its own [d_b, d].
    Own(Tensor),
}

/// An adaptive input with its adaptive softmax.
pub struct AdaptiveSoftmax {
    bands: Vec<Band>,
    /// A row per tail [tails, d].
    cluster: Tensor,
    width: usize,
    device: Device,
}

impl AdaptiveSoftmax {
    /// Parameters `embed.<b>.weight`, `embed.<b>.proj.weight`, `softmax.cluster.weight`, and what is not tied:
    /// `softmax.<b>.weight`, `softmax.<b>.proj.weight`.
    pub fn new(config: &AdaptiveConfig, builder: &ParamBuilder) -> Result<Self> {
        config.validate().map_err(candle_core::Error::msg)?;
        let d = config.width;
        let mut bands = Vec::new();
        for (index, (words, width)) in config.bands().into_iter().enumerate() {
            let vectors = Init::NormalZeroRow { std: (width as f64).powf(-0.5), row: PADDING as usize };
            let (input, softmax) =
                (builder.pp(format!("embed.{index}")), builder.pp(format!("softmax.{index}")));
            let table = input.param("weight", &[words.len(), width], vectors)?;
            let project = input.param("proj.weight", &[d, width], Init::xavier(width, d))?;
            let output = match config.tie {
                Tie::None => softmax.param("weight", &[words.len(), width], vectors)?,
                Tie::All | Tie::Weights => table.clone(),
            };
            let reduce = match (index, config.tie) {
                (0, _) => Reduce::No,
                (_, Tie::All) => Reduce::Tied,
                _ => Reduce::Own(softmax.param("proj.weight", &[width, d], Init::xavier(d, width))?),
            };
            bands.push(Band { words, vectors: table, project, output, reduce });
        }
        let tails = config.cutoffs.len();
        let cluster = builder.param("softmax.cluster.weight", &[tails, d], Init::xavier(d, tails))?;
        Ok(Self { bands, cluster, width: d, device: builder.device() })
    }

    /// Vectors of `ids` [b, n] (u32): [b, n, d].
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let mut dims = ids.dims().to_vec();
        dims.push(self.width);
        let ids = ids.flatten_all()?.to_vec1::<u32>()?;
        let (mut rows, mut place, mut count) = (Vec::new(), vec![0u32; ids.len()], 0);
        for band in &self.bands {
            let members = members(&ids, &band.words);
            if members.is_empty() {
                continue;
            }
            for &member in &members {
                place[member as usize] = count;
                count += 1;
            }
            let inside = members.iter().map(|&at| ids[at as usize] - band.words.start as u32).collect();
            let vectors = embedding(&self.index(inside)?, &band.vectors)?;
            rows.push(linear(&vectors, &band.project, None)?);
        }
        if count as usize != ids.len() {
            bail!(
                "an id is outside a vocabulary of {} words",
                self.bands.last().map_or(0, |band| band.words.end)
            );
        }
        embedding(&self.index(place)?, &Tensor::cat(&rows, 0)?)?.reshape(dims)
    }

    /// -log p of `targets` (one per row) given `hidden` [rows, d]: `[rows]`. Dropout applies to `hidden` and again to
    /// what the tails' projections give.
    pub fn nll(&self, hidden: &Tensor, targets: &[u32], dropout: Dropout) -> Result<Tensor> {
        let rows = hidden.dim(0)?;
        if rows != targets.len() {
            bail!("{} targets for {rows} rows", targets.len());
        }
        let hidden = dropout.apply(hidden, 0)?;
        let first = self.bands[0].words.end;
        let mut head_targets = targets.to_vec();
        let (mut tails, mut place, mut count) = (Vec::new(), vec![0u32; rows], 1);
        for (index, band) in self.bands.iter().enumerate().skip(1) {
            let members = members(targets, &band.words);
            if members.is_empty() {
                continue;
            }
            for &member in &members {
                head_targets[member as usize] = (first + index - 1) as u32;
                place[member as usize] = count;
                count += 1;
            }
            let inside = members.iter().map(|&at| targets[at as usize] - band.words.start as u32).collect();
            let reduced = self.reduced(band, &embedding(&self.index(members)?, &hidden)?)?;
            let reduced = dropout.apply(&reduced, index as u64)?;
            tails.push(linear_cross_entropy(&reduced, &band.output, None, &self.index(inside)?)?);
        }
        let head = linear_cross_entropy(&hidden, &self.head()?, None, &self.index(head_targets)?)?;
        if tails.is_empty() {
            return Ok(head);
        }
        // row 0 of the table is the nothing that words of the first band add
        tails.insert(0, Tensor::zeros(1, hidden.dtype(), &self.device)?);
        let tails = Tensor::cat(&tails, 0)?.unsqueeze(1)?;
        head + embedding(&self.index(place)?, &tails)?.squeeze(1)?
    }

    /// log p of every word given `hidden` [rows, d]: [rows, vocab]. Memory grows with the vocabulary.
    pub fn log_probabilities(&self, hidden: &Tensor) -> Result<Tensor> {
        let head = log_softmax(&linear(hidden, &self.head()?, None)?)?;
        let first = self.bands[0].words.end;
        let mut parts = vec![head.narrow(1, 0, first)?];
        for (index, band) in self.bands.iter().enumerate().skip(1) {
            let within = log_softmax(&linear(&self.reduced(band, hidden)?, &band.output, None)?)?;
            parts.push(within.broadcast_add(&head.narrow(1, first + index - 1, 1)?)?);
        }
        Tensor::cat(&parts, 1)
    }

    /// Vectors of the head's entries: the first band's words, then the tails [c_0 + tails, d].
    fn head(&self) -> Result<Tensor> {
        Tensor::cat(&[&self.bands[0].output, &self.cluster], 0)
    }

    /// `hidden` in the width of `band`.
    fn reduced(&self, band: &Band, hidden: &Tensor) -> Result<Tensor> {
        match &band.reduce {
            Reduce::No => Ok(hidden.clone()),
            // transposed here: a copy made beforehand would not follow the weights through training
            Reduce::Tied => linear(hidden, &band.project.t()?.contiguous()?, None),
            Reduce::Own(reduce) => linear(hidden, reduce, None),
        }
    }

    fn index(&self, at: Vec<u32>) -> Result<Tensor> {
        let count = at.len();
        Tensor::from_vec(at, count, &self.device)
    }
}

/// Where the words of `band` stand in `ids`.
fn members(ids: &[u32], band: &Range<usize>) -> Vec<u32> {
    let inside = ids.iter().enumerate().filter(|(_, id)| band.contains(&(**id as usize)));
    inside.map(|(at, _)| at as u32).collect()
}

fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    shifted.broadcast_sub(&shifted.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(tie: Tie) -> AdaptiveConfig {
        AdaptiveConfig { vocab: 30, cutoffs: vec![8, 18], width: 16, factor: 4, tie }
    }

    #[test]
    fn probabilities_sum_to_one_and_the_loss_is_theirs() {
        for tie in Tie::ALL {
            let builder = ParamBuilder::seeded(3, &Device::Cpu, false);
            let adaptive = AdaptiveSoftmax::new(&config(*tie), &builder).unwrap();
            let hidden = effattn_kernel::device::rng::RngStream::new(1, "hidden");
            let hidden = { hidden }.normal_tensor(&[7usize, 16][..], 0.0, 1.0, &Device::Cpu).unwrap();
            let log_p = adaptive.log_probabilities(&hidden).unwrap();
            for row in log_p.exp().unwrap().sum(1).unwrap().to_vec1::<f32>().unwrap() {
                assert!((row - 1.0).abs() < 1e-5, "{row}");
            }
            let targets = [0u32, 7, 8, 17, 18, 29, 3];
            let nll = adaptive.nll(&hidden, &targets, Dropout::NONE).unwrap().to_vec1::<f32>().unwrap();
            let log_p = log_p.to_vec2::<f32>().unwrap();
            for ((row, target), nll) in log_p.iter().zip(targets).zip(nll) {
                assert!((row[target as usize] + nll).abs() < 1e-5, "{tie:?} {target}");
            }
        }
    }

    #[test]
    fn the_published_sizes() {
        let config = AdaptiveConfig {
            vocab: 267_744,
            cutoffs: vec![20_000, 60_000],
            width: 1024,
            factor: 4,
            tie: Tie::All,
        };
        let counting = ParamBuilder::counting();
        AdaptiveSoftmax::new(&config, &counting).unwrap();
        assert_eq!(counting.finish().count(), 20_480_000 + 10_240_000 + 13_295_616 + 1_376_256 + 2048);
        assert_eq!(config.bands()[2], (60_000..267_744, 64));
    }

    #[test]
    fn words_and_bands_that_do_not_exist_are_errors() {
        let builder = ParamBuilder::seeded(3, &Device::Cpu, false);
        let adaptive = AdaptiveSoftmax::new(&config(Tie::All), &builder).unwrap();
        assert!(adaptive.embed(&Tensor::new(&[[0u32, 30]], &Device::Cpu).unwrap()).is_err());
        for (vocab, cutoffs) in
            [(18, vec![8, 18]), (30, vec![8, 8]), (30, vec![0]), (90, vec![8, 18, 40, 60])]
        {
            assert!(AdaptiveConfig { vocab, cutoffs, ..config(Tie::All) }.validate().is_err());
        }
    }
}
