//! Evaluation protocols of a language model (`docs/spec/SPEC-models.md` section 6).
//!
//! Each returns, per symbol s_t of one sequence, -log p(s_t | what the protocol shows) in nats. Symbol 0 is
//! never predicted and has 0; every other symbol is predicted exactly once.

use candle_core::{Result, Tensor, bail};

use super::char_lm::{Cache, CharLm, next_symbol_loss};

/// Called with the number of symbols predicted so far.
pub type Progress<'a> = &'a mut dyn FnMut(usize);

/// Blocks of `block` inputs with the model's cache carried along; input t predicts symbol t + 1, the last one of
/// a block the first symbol of the next.
pub fn stream(model: &CharLm, ids: &[u32], block: usize, progress: Progress) -> Result<Vec<f32>> {
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
    model: &CharLm,
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
pub fn single(model: &CharLm, ids: &[u32]) -> Result<Vec<f32>> {
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
fn score(model: &CharLm, ids: &[u32], from: usize, to: usize, cache: &Cache) -> Result<(Vec<f32>, Cache)> {
    let row = |ids: &[u32]| Tensor::new(ids, model.device())?.unsqueeze(0);
    let (logits, next) = model.forward(&row(&ids[from..to])?, cache)?;
    let nll = next_symbol_loss(&logits.detach(), &row(&ids[from + 1..=to])?)?;
    Ok((nll.flatten_all()?.to_vec1()?, next))
}
