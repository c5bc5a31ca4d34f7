//! Evaluation protocols of a language model (`docs/spec/SPEC-models.md` section 6).
//!
//! Each returns, per symbol s_t of one sequence, -log p(s_t | what the protocol shows) in nats. Symbol 0 is
//! never predicted and has 0; every other symbol is predicted exactly once.

use candle_core::{Result, Tensor, bail};

use super::char_lm::{Cache, next_symbol_loss};
use super::family::causal::CausalModel;

/// Called with the number of symbols predicted so far.
pub type Progress<'a> = &'a mut dyn FnMut(usize);

/// Blocks of `block` inputs with the model's cache carried along; input t predicts symbol t + 1, the last one of
/// a block the first symbol of the next.
pub fn stream(model: &dyn CausalModel, ids: &[u32], block: usize, progress: Progress) -> Result<Vec<f32>> {
    check(ids, block)?;
    let mut nll = vec![0.0; ids.len()];
    let mut cache = model.start(1)?;
    let mut at = 0;
    while at + 1 < ids.len() {
        let end = (at + block).min(ids.len() - 1);
        let (scores, next) = score(model, ids, at, end, &cache)?;
        nll[at + 1..=end].copy_from_slice(&scores);
        (cache, at) = (next, end);
        progress(at);
    }
    Ok(nll)
}

/// Windows of `window` inputs, each encoded alone without any cache, moved by `step`: scored are the `step`
/// targets at each window's end. What stands in the first full window sees everything before it.
pub fn overlap(
    model: &dyn CausalModel,
    ids: &[u32],
    window: usize,
    step: usize,
    progress: Progress,
) -> Result<Vec<f32>> {
    check(ids, step)?;
    if step > window {
        bail!("a step of {step} skips symbols with a window of {window}; choose a step up to the window");
    }
    let last = ids.len() - 1;
    let mut nll = vec![0.0; ids.len()];
    // the model is causal: all windows that start at symbol 0 are prefixes of the longest of them
    let mut done = (window / step * step).min(last);
    let (scores, _) = score(model, ids, 0, done, &Cache::default())?;
    nll[1..=done].copy_from_slice(&scores);
    progress(done);
    while done < last {
        let end = (done + step).min(last);
        let (scores, _) = score(model, ids, done + step - window, end, &Cache::default())?;
        let fresh = end - done;
        nll[done + 1..=end].copy_from_slice(&scores[scores.len() - fresh..]);
        done = end;
        progress(done);
    }
    Ok(nll)
}

/// One forward over all inputs without cache.
pub fn single(model: &dyn CausalModel, ids: &[u32]) -> Result<Vec<f32>> {
    overlap(model, ids, ids.len(), ids.len(), &mut |_| ())
}

/// Bits per symbol of what a protocol returned, over the symbols it predicted.
pub fn bits_per_symbol(nll: &[f32]) -> f64 {
    nats(nll) / nll.len().saturating_sub(1) as f64 / std::f64::consts::LN_2
}

/// Sum of nats, in f64.
pub fn nats(nll: &[f32]) -> f64 {
    nll.iter().map(|&x| f64::from(x)).sum()
}

fn check(ids: &[u32], stride: usize) -> Result<()> {
    if ids.len() < 2 {
        bail!("a sequence of {} symbols predicts nothing; at least 2 are needed", ids.len());
    }
    if stride == 0 {
        bail!("an evaluation in blocks of 0 symbols never ends; choose at least 1");
    }
    Ok(())
}

/// Losses of the inputs `from..to`, whose targets are one further, and the next cache.
fn score(
    model: &dyn CausalModel,
    ids: &[u32],
    from: usize,
    to: usize,
    cache: &Cache,
) -> Result<(Vec<f32>, Cache)> {
    let row = |ids: &[u32]| Tensor::new(ids, model.device())?.unsqueeze(0);
    let (logits, next) = model.segment(&row(&ids[from..to])?, cache, None)?;
    let nll = next_symbol_loss(&logits.detach(), &row(&ids[from + 1..=to])?)?;
    Ok((nll.flatten_all()?.to_vec1()?, next))
}

/// The word in front of a stream's first one: the end of the line before.
const END_OF_LINE: u32 = 2;

/// How a stream is cut for evaluation (`SPEC-text.md` section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalWindows {
    /// Words per window.
    pub window: usize,
    /// Words of each window that are only read.
    pub context: usize,
}

impl EvalWindows {
    /// First input and first scored word of every window, and the end of the scored ones, over a stream of `len` words.
    fn cut(self, len: usize) -> Vec<(usize, usize, usize)> {
        let step = (self.window - self.context.min(self.window - 1)).max(1);
        let starts = (0..len).step_by(step);
        starts.map(|at| (at - at.min(self.context), at, len.min(at + step))).collect()
    }
}

/// -log p of every word of `stream` in nats; windows of equal shape are computed `batch` at a time. `progress` hears how
/// many words are scored.
pub fn stream_nll(
    model: &dyn CausalModel,
    stream: &[u32],
    windows: EvalWindows,
    batch: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<f32>> {
    let cuts = windows.cut(stream.len());
    let mut nll = vec![0.0; stream.len()];
    let mut done = 0;
    let same = |a: &(usize, usize, usize), b: &(usize, usize, usize)| {
        (a.1 - a.0, a.2 - a.1) == (b.1 - b.0, b.2 - b.1)
    };
    for run in cuts.chunk_by(same) {
        for part in run.chunks(batch.max(1)) {
            let (first, _, end) = part[0];
            let n = end - first;
            let word = |at: usize| if at == 0 { END_OF_LINE } else { stream[at - 1] };
            let ids: Vec<u32> = part.iter().flat_map(|cut| (cut.0..cut.2).map(word)).collect();
            let targets: Vec<u32> =
                part.iter().flat_map(|cut| stream[cut.0..cut.2].iter().copied()).collect();
            let tensor = |data: Vec<u32>| Tensor::from_vec(data, (part.len(), n), model.device());
            let rows = model.nll(&tensor(ids)?, &tensor(targets)?, None)?.to_vec2::<f32>()?;
            for (&(first, scored, end), row) in part.iter().zip(rows) {
                nll[scored..end].copy_from_slice(&row[scored - first..]);
                done += end - scored;
            }
            progress(done);
        }
    }
    Ok(nll)
}

/// Perplexity: e to the mean of `nll`.
pub fn perplexity(nll: &[f32]) -> f64 {
    (nll.iter().map(|&x| f64::from(x)).sum::<f64>() / nll.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_scored_once() {
        for (window, context, len) in [(16, 0, 53), (16, 10, 53), (16, 12, 47), (512, 400, 1), (8, 0, 8)] {
            let cuts = EvalWindows { window, context }.cut(len);
            let scored: Vec<usize> = cuts.iter().flat_map(|cut| cut.1..cut.2).collect();
            assert_eq!(scored, (0..len).collect::<Vec<_>>());
            assert!(cuts.iter().all(|cut| cut.2 - cut.0 <= window && cut.1 - cut.0 <= context));
        }
        assert_eq!(EvalWindows { window: 512, context: 400 }.cut(300)[2], (0, 224, 300));
    }
}
