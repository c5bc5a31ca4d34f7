//! The data of a task, and batches of it as tensors.

use std::path::Path;

use candle_core::{Device, Result, Tensor};
use effattn_data as data;
use effattn_data::{DataError, Dataset, Split};
use rayon::prelude::*;

use effattn_model::batch::{Batch, ModelInput, Tokens};

pub use effattn_data::LoadOptions;

/// The data of `task` in `dir`, or generated where they are made by this program and lie nowhere.
pub fn load(
    task: &str,
    dir: &Path,
    options: LoadOptions,
) -> std::result::Result<Box<dyn Dataset>, DataError> {
    let (_, examples) = data::task(task)?;
    (examples.load)(dir, options)
}

/// Names of the tasks.
pub fn names() -> Vec<&'static str> {
    data::tasks().iter().map(|(set, _)| set.name).collect()
}

/// What `--limit` does, in words.
pub fn limited(limit: u64) -> String {
    format!("{limit} examples of each split")
}

/// Where `there` training examples are not all of the published split: their share, and that in words.
pub fn missing(task: &str, there: usize) -> Option<(f64, String)> {
    let published = data::task(task).ok()?.1.train;
    let share = there as f64 / published as f64;
    (share < 1.0).then(|| (share, format!("{there} training examples ({published})")))
}

/// Examples `indices` of `split`, cut to `keep` tokens and padded with zeros to `len`.
pub fn batch(
    data: &dyn Dataset,
    (split, indices): (Split, &[usize]),
    (keep, len): (usize, usize),
    device: &Device,
) -> Result<Batch> {
    let examples: Vec<_> =
        indices.par_iter().map(|&index| data.example(split, index, keep.min(len))).collect();
    let pack = |documents: Vec<&[u32]>| -> Result<Tokens> {
        let (mut ids, mut mask) =
            (Vec::with_capacity(documents.len() * len), Vec::with_capacity(documents.len() * len));
        for document in &documents {
            let padded = document.iter().copied().chain(std::iter::repeat(0)).take(len);
            ids.extend(padded);
            // as the sources do: whatever has id 0 is padding
            mask.extend(ids[ids.len() - len..].iter().map(|&id| if id == 0 { 0f32 } else { 1.0 }));
        }
        let shape = (documents.len(), len);
        let mask = Some(Tensor::from_vec(mask, shape, device)?);
        Ok(Tokens { ids: Tensor::from_vec(ids, shape, device)?, mask })
    };
    let first = pack(examples.iter().map(|example| example.tokens.as_slice()).collect())?;
    let seconds: Option<Vec<&[u32]>> = examples.iter().map(|example| example.second.as_deref()).collect();
    let input = match seconds {
        Some(seconds) => ModelInput::Pairs(first, pack(seconds)?),
        None => ModelInput::Tokens(first),
    };
    let labels: Vec<u32> = examples.iter().map(|example| example.label).collect();
    let labels = Tensor::new(labels, device)?;
    Ok(Batch { input, labels })
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_data::Example;

    struct Toy;

    impl Dataset for Toy {
        fn len(&self, _: Split) -> usize {
            3
        }
        fn example(&self, _: Split, index: usize, max_len: usize) -> Example {
            let tokens = [5, 6, 7, 8][..max_len.min(index + 2)].to_vec();
            Example { tokens, second: None, label: index as u32 }
        }
        fn hash(&self) -> &'static str {
            ""
        }
        fn partial(&self) -> Option<&str> {
            None
        }
    }

    #[test]
    fn documents_are_cut_and_padded() {
        let batch = batch(&Toy, (Split::Train, &[0, 2]), (3, 5), &Device::Cpu).unwrap();
        let Tokens { ids, mask } = batch.tokens().unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[5, 6, 0, 0, 0], [5, 6, 7, 0, 0]]);
        let kept = [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]];
        assert_eq!(mask.as_ref().unwrap().to_vec2::<f32>().unwrap(), kept);
        assert_eq!(batch.labels.to_vec1::<u32>().unwrap(), [0, 2]);
    }

    #[test]
    fn generated_expressions_have_the_published_splits() {
        let folder = tempfile::tempdir().unwrap();
        let data = load("listops", folder.path(), LoadOptions::default()).unwrap();
        assert_eq!(Split::ALL.map(|split| data.len(split)), [96_000, 2000, 2000]);
        let example = data.example(Split::Test, 1999, 2000);
        assert!(example.label < 10 && example.tokens.len() > 200);
        assert!(example.tokens.iter().all(|&id| (1..15).contains(&id)));
    }
}
