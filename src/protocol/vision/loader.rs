//! Batches of images, decoded on threads of their own while a step is computed.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Error, Result as Candle, Tensor};
use rayon::prelude::*;

use super::recipe::Recipe;
use crate::train::order::BatchOrder;
use effattn_data::images::ImageSet;
use effattn_data::images::limited::LimitedImages;
use effattn_data::images::transform::{IMAGENET, evaluated, normalised};
use effattn_data::{DataError, Split};
use effattn_kernel::device::rng::RngStream;
use effattn_model::batch::{Batch, ModelInput};

/// Batches that are made ahead.
const AHEAD: usize = 2;

/// A batch that is not on the device yet.
pub struct Made {
    pixels: Vec<f32>,
    labels: Labels,
    size: usize,
}

enum Labels {
    Classes(Vec<u32>),
    /// Shares of classes, row by row.
    Shares(Vec<f32>, usize),
}

impl Made {
    /// Its images.
    pub fn len(&self) -> usize {
        self.pixels.len() / (3 * self.size * self.size)
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.pixels.is_empty()
    }

    /// On `device`.
    pub fn batch(self, device: &Device) -> Candle<Batch> {
        let count = self.len();
        let labels = match self.labels {
            Labels::Classes(classes) => Tensor::from_vec(classes, count, device)?,
            Labels::Shares(shares, classes) => Tensor::from_vec(shares, (count, classes), device)?,
        };
        let pixels = Tensor::from_vec(self.pixels, (count, 3, self.size, self.size), device)?;
        Ok(Batch { input: ModelInput::Pixels(pixels), labels })
    }
}

/// How images become batches.
#[derive(Clone)]
pub struct Loader {
    pub set: Arc<dyn ImageSet>,
    /// How they are cut and drawn.
    pub recipe: Recipe,
    /// Side of a model's images.
    pub size: usize,
    /// Seed of everything drawn.
    pub seed: u64,
    /// Whether broken images are left out; otherwise they end the run.
    pub leave_out: bool,
    /// Names of the images that were left out, each once.
    pub left_out: Arc<Mutex<std::collections::BTreeSet<String>>>,
    /// Where images are decoded.
    pub pool: Arc<rayon::ThreadPool>,
}

impl Loader {
    /// A loader with as many threads as there are for computing.
    pub fn new(
        set: Arc<dyn ImageSet>,
        recipe: Recipe,
        (size, seed): (usize, u64),
        leave_out: bool,
    ) -> Result<Self, rayon::ThreadPoolBuildError> {
        let threads = rayon::current_num_threads();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(Self { set, recipe, size, seed, leave_out, left_out: Arc::default(), pool: Arc::new(pool) })
    }

    /// The same with at most `limit` images of each split, drawn once.
    pub fn limited(&self, limit: u64) -> Self {
        Self { set: Arc::new(LimitedImages::new(self.set.clone(), limit as usize)), ..self.clone() }
    }

    /// Planes and classes of `indices`, made by `make`; broken images are left out where that is allowed.
    fn gather(
        &self,
        split: Split,
        indices: &[usize],
        make: impl Fn(usize, &image::RgbImage, &mut Vec<f32>) + Sync,
    ) -> Result<(Vec<f32>, Vec<u32>), DataError> {
        let one = |&index: &usize| {
            let mut planes = Vec::with_capacity(3 * self.size * self.size);
            self.set.image(split, index).map(|image| {
                make(index, &image, &mut planes);
                (planes, self.set.label(split, index))
            })
        };
        let all: Vec<_> = self.pool.install(|| indices.par_iter().map(one).collect());
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for made in all {
            match made {
                Ok((planes, label)) => {
                    pixels.extend(planes);
                    labels.push(label);
                }
                Err(error) if self.leave_out => self.leave(&error.to_string()),
                Err(error) => return Err(error),
            }
        }
        Ok((pixels, labels))
    }

    fn leave(&self, what: &str) {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).insert(what.to_owned());
    }

    /// Images that were left out so far, and why.
    pub fn left_out(&self) -> Vec<String> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The images `indices` as they are trained on in part `part` of step `step`.
    pub fn train(&self, (step, part): (u64, usize), indices: &[usize]) -> Result<Made, DataError> {
        let augment = &self.recipe.augment;
        let (mut pixels, labels) = self.gather(Split::Train, indices, |index, image, planes| {
            let stream = &mut RngStream::new(self.seed, &format!("augment/{step}/{index}"));
            augment.image(image, self.size as u32, &IMAGENET, stream, planes);
        })?;
        let stream = &mut RngStream::new(self.seed, &format!("mix/{step}/{part}"));
        let classes = self.set.classes().len();
        let shares = augment.batch(&mut pixels, &labels, (classes, self.size), stream);
        Ok(Made { pixels, labels: Labels::Shares(shares, classes), size: self.size })
    }

    /// The images `indices` of `split` as they are evaluated.
    pub fn evaluate(&self, split: Split, indices: &[usize]) -> Result<Made, DataError> {
        let (pixels, labels) = self.gather(split, indices, |_, image, planes| {
            normalised(&evaluated(image, self.size as u32, self.recipe.evaluated), &IMAGENET, planes);
        })?;
        Ok(Made { pixels, labels: Labels::Classes(labels), size: self.size })
    }

    /// All images of `split` in batches of `batch`, made ahead.
    pub fn evaluation(&self, split: Split, batch: usize) -> Ahead<(), Made> {
        let (loader, batch, count) = (self.clone(), batch.max(1), self.set.len(split));
        let chunks =
            (0..count).step_by(batch).map(move |from| (from..(from + batch).min(count)).collect::<Vec<_>>());
        Ahead::new(chunks.map(move |indices| ((), loader.evaluate(split, &indices))))
    }

    /// The parts of every step from `from` on, made ahead.
    pub fn training(&self, order: BatchOrder, from: u64, parts: usize) -> Ahead<(u64, usize), Made> {
        let (loader, mut memo) = (self.clone(), None);
        let places = (from..).flat_map(move |step| (0..parts).map(move |part| (step, part)));
        Ahead::new(places.map(move |place| (place, loader.part(order, place, parts, &mut memo))))
    }

    /// Part `part` of `parts` of step `step`.
    pub fn part(
        &self,
        order: BatchOrder,
        (step, part): (u64, usize),
        parts: usize,
        memo: &mut Option<(u64, Vec<usize>)>,
    ) -> Result<Made, DataError> {
        let indices = order.batch(step, memo);
        let size = indices.len().div_ceil(parts.max(1));
        self.train((step, part), indices.chunks(size).nth(part).unwrap_or(&[]))
    }
}

/// Things that a thread makes while the one before is used.
pub struct Ahead<K, T>(Receiver<(K, Result<T, DataError>)>);

impl<K: Send + PartialEq + 'static, T: Send + 'static> Ahead<K, T> {
    fn new(things: impl Iterator<Item = (K, Result<T, DataError>)> + Send + 'static) -> Self {
        let (send, receive) = sync_channel(AHEAD);
        // ends when nobody takes what it makes
        std::thread::spawn(move || {
            for thing in things {
                if send.send(thing).is_err() {
                    break;
                }
            }
        });
        Self(receive)
    }

    /// The one at `key`, if it is the next.
    pub fn at(&self, key: &K) -> Option<Candle<T>> {
        let (made, thing) = self.0.recv().ok()?;
        (made == *key).then(|| thing.map_err(Error::wrap))
    }
}

impl<T: Send + 'static> Iterator for Ahead<(), T> {
    type Item = Candle<T>;

    fn next(&mut self) -> Option<Candle<T>> {
        self.at(&())
    }
}

#[cfg(test)]
mod tests {
    use super::super::recipe;
    use super::*;
    use effattn_data::images::synthetic::SyntheticImages;

    fn loader(leave_out: bool, set: Arc<dyn ImageSet>) -> Loader {
        Loader::new(set, recipe::find("cvt-small").unwrap(), (32, 5), leave_out).unwrap()
    }

    fn pixels(made: Made) -> Vec<f32> {
        made.pixels
    }

    #[test]
    fn what_is_made_ahead_is_what_is_made_at_once() {
        let loader = loader(false, Arc::new(SyntheticImages::default()));
        let order = BatchOrder::new(1, 100, 8).unwrap();
        let ahead = loader.training(order, 3, 2);
        for place in [(3, 0), (3, 1), (4, 0)] {
            let here = pixels(loader.part(order, place, 2, &mut None).unwrap());
            assert_eq!(here.len(), 4 * 3 * 32 * 32);
            assert_eq!(pixels(ahead.at(&place).unwrap().unwrap()), here);
        }
        assert!(ahead.at(&(9, 9)).is_none(), "another place is made at once");
        let counts: Vec<usize> =
            loader.limited(10).evaluation(Split::Test, 4).map(|made| made.unwrap().len()).collect();
        assert_eq!(counts, [4, 4, 2]);
    }

    struct Broken(SyntheticImages);

    impl ImageSet for Broken {
        fn len(&self, split: Split) -> usize {
            self.0.len(split)
        }
        fn classes(&self) -> &[String] {
            self.0.classes()
        }
        fn label(&self, split: Split, index: usize) -> u32 {
            self.0.label(split, index)
        }
        fn image(&self, split: Split, index: usize) -> Result<image::RgbImage, DataError> {
            if index == 2 {
                let reason = "the image is cut off".to_owned();
                return Err(DataError::File { file: "two.jpg".into(), reason });
            }
            self.0.image(split, index)
        }
        fn hash(&self) -> &str {
            self.0.hash()
        }
    }

    #[test]
    fn broken_images_end_the_run_or_are_counted() {
        let set: Arc<dyn ImageSet> = Arc::new(Broken(SyntheticImages::default()));
        let error = loader(false, set.clone()).evaluate(Split::Test, &[1, 2, 3]).err().unwrap().to_string();
        assert!(error.contains("two.jpg: the image is cut off"), "{error}");
        let loader = loader(true, set);
        for _ in 0..2 {
            assert_eq!(loader.evaluate(Split::Test, &[1, 2, 3]).unwrap().len(), 2);
        }
        assert_eq!(loader.left_out().len(), 1);
    }
}
