//! Trained weights on images that were never trained on (Transformer-LS Table 6; `SPEC-vision.md` section 11).

use candle_core::{Device, Error, Result as Candle, Tensor};

use super::loader::Loader;
use crate::protocol::training::MetricValue;
use effattn_data::Split;
use effattn_data::content_hash::ContentHash;
use effattn_data::images::corrupt::{CORRUPTIONS, SEVERITIES};
use effattn_data::images::test_only::{Parts, TestOnlySet};
use effattn_model::family::Model;
use effattn_model::family::vision::ImageModel;
use effattn_model::vision::similarity::corruption_error;

/// Error of AlexNet on clean images of ImageNet, as a share.
const ALEXNET_CLEAN: f64 = 0.4345;

/// How weights did on a challenge.
pub struct TestSetResult {
    /// Accuracies of its parts, as shares.
    accuracies: Vec<f64>,
    /// Images that were tested.
    tested: usize,
    /// Checksum of what was read.
    pub hash: String,
}

/// Tests `net` on `limit` images of every part of `challenge`, read by `loader` in batches of `batch`. `trained`
/// are the classes where they are known; `tell` hears what is done.
pub fn tested(
    challenge: &TestOnlySet,
    net: &mut ImageModel,
    loader: &Loader,
    (dir, trained): (&std::path::Path, Option<&[String]>),
    (limit, batch): (Option<u64>, usize),
    device: &Device,
    mut tell: impl FnMut(&str) -> Candle<()>,
) -> Candle<TestSetResult> {
    let root = challenge.root(dir).map_err(Error::wrap)?;
    let (mut content, mut accuracies, mut all) = (ContentHash::default(), Vec::new(), 0);
    for part in challenge.parts() {
        tell(&format!("is tested on {} {part}", challenge.name))?;
        let set = challenge.open(&root, &part, trained).map_err(Error::wrap)?;
        content.field(set.hash().as_bytes());
        let answer = set.answer().unwrap_or_else(|| (challenge.answer)());
        let loader = Loader { set, ..loader.clone() };
        let mut loader = limit.map_or_else(|| loader.clone(), |limit| loader.limited(limit));
        loader.recipe.evaluated = challenge.evaluated;
        let (mut right, mut tested) = (0, 0);
        for made in loader.evaluation(Split::Test, batch) {
            let made = made?;
            if made.is_empty() {
                continue; // all of them were left out
            }
            let batch = made.batch(device)?;
            let labels = batch.labels.to_vec1::<u32>()?;
            let rows = net.forward(&batch)?.detach().to_vec2::<f32>()?;
            right += rows.iter().zip(&labels).filter(|(row, label)| answer.right(row, **label)).count();
            tested += rows.len();
        }
        if tested == 0 {
            candle_core::bail!("{} {part}: no image could be tested", challenge.name);
        }
        accuracies.push(right as f64 / tested as f64);
        all += tested;
    }
    Ok(TestSetResult { accuracies, tested: all, hash: content.finish() })
}

/// Errors over those of AlexNet: mCE, and relative mCE where the error `clean` on clean images is known; in percent.
/// `errors` are those of every corruption at every severity.
fn corruption_errors(errors: Vec<f64>, clean: Option<f64>) -> Candle<(f64, Option<f64>)> {
    let tensor = |values: Vec<f64>| Tensor::new(values, &Device::Cpu);
    let errors = tensor(errors)?.reshape((CORRUPTIONS.len(), SEVERITIES))?;
    let alexnet = tensor(CORRUPTIONS.iter().map(|corruption| corruption.alexnet).collect())?;
    let (own, reference) = (tensor(vec![clean.unwrap_or(0.0)])?, tensor(vec![ALEXNET_CLEAN])?);
    let found = corruption_error(&errors, &alexnet, &own, &reference)?;
    let relative = 100.0 * found.relative_ce.mean_all()?.to_scalar::<f64>()?;
    Ok((found.mean_ce.to_scalar()?, clean.map(|_| relative)))
}

impl TestSetResult {
    /// What `challenge` is reported by, its own accuracy first; `clean` is the accuracy on clean images in percent, where it
    /// was measured.
    pub fn measures(&self, challenge: &TestOnlySet, clean: Option<f64>) -> Candle<Vec<MetricValue>> {
        let name = challenge.name;
        let of = |task: String, metric: &str, unit: &str, value: f64| MetricValue {
            task: Some(task),
            ..MetricValue::new(metric, unit, value)
        };
        let mean = |shares: &[f64]| shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        let mut all = vec![of(name.to_owned(), "accuracy", "%", 100.0 * mean(&self.accuracies))];
        match challenge.parts {
            Parts::One => (),
            Parts::Backgrounds => {
                for (part, share) in ["mixed-same", "mixed-rand"].iter().zip(&self.accuracies) {
                    all.push(of(format!("{name}-{part}"), "accuracy", "%", 100.0 * share));
                }
                if let [same, random] = self.accuracies[..] {
                    all.push(of(name.to_owned(), "background_gap", "%", 100.0 * (same - random)));
                }
            }
            Parts::Corruptions { alexnet } => {
                if alexnet {
                    let errors = self.accuracies.iter().map(|share| 1.0 - share).collect();
                    let clean = clean.map(|accuracy| 1.0 - accuracy / 100.0);
                    let (mce, relative) = corruption_errors(errors, clean)?;
                    all.push(of(name.to_owned(), "mce", "%", mce));
                    all.extend(relative.map(|value| of(name.to_owned(), "relative_mce", "%", value)));
                }
                for (severities, corruption) in self.accuracies.chunks(SEVERITIES).zip(&CORRUPTIONS) {
                    let task = format!("{name} {}", corruption.name);
                    all.push(of(task, "accuracy", "%", 100.0 * mean(severities)));
                }
            }
        }
        all.push(of(name.to_owned(), "tested", "1", self.tested as f64));
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_data::images::test_only::challenge;

    fn value(measures: &[MetricValue], task: &str, metric: &str) -> f64 {
        let found = measures.iter().find(|one| one.metric == metric && one.task.as_deref() == Some(task));
        found.unwrap_or_else(|| panic!("{task} {metric}")).value
    }

    fn outcome(accuracies: Vec<f64>) -> TestSetResult {
        TestSetResult { accuracies, tested: 750, hash: String::new() }
    }

    #[test]
    fn alexnet_itself_has_an_error_of_100() {
        let own = CORRUPTIONS.iter().flat_map(|corruption| {
            // any spread over the severities
            [-0.1, -0.05, 0.0, 0.05, 0.1].map(|shift| 1.0 - corruption.alexnet + shift)
        });
        let own = outcome(own.collect()).measures(challenge("imagenet-c").unwrap(), Some(56.55)).unwrap();
        assert!((value(&own, "imagenet-c", "mce") - 100.0).abs() < 1e-9);
        assert!((value(&own, "imagenet-c", "relative_mce") - 100.0).abs() < 1e-9);
        assert!((value(&own, "imagenet-c snow", "accuracy") - 13.3184).abs() < 1e-9);
        assert_eq!(own.len(), 1 + 2 + 15 + 1);
        let alone = outcome(vec![0.5; 75]).measures(challenge("imagenet-c").unwrap(), None).unwrap();
        assert!(alone.iter().all(|one| one.metric != "relative_mce"), "no clean images, no relative error");
    }

    #[test]
    fn backgrounds_have_a_gap_and_small_images_no_alexnet() {
        let nine = outcome(vec![0.9, 0.85]).measures(challenge("imagenet-9").unwrap(), None).unwrap();
        assert!((value(&nine, "imagenet-9", "background_gap") - 5.0).abs() < 1e-9);
        assert!((value(&nine, "imagenet-9-mixed-rand", "accuracy") - 85.0).abs() < 1e-9);
        let small = outcome((0..75).map(|at| f64::from(at / 5) / 15.0).collect());
        let small = small.measures(challenge("cifar10-c").unwrap(), Some(80.0)).unwrap();
        assert!((value(&small, "cifar10-c", "accuracy") - 700.0 / 15.0).abs() < 1e-9);
        assert!((value(&small, "cifar10-c jpeg_compression", "accuracy") - 1400.0 / 15.0).abs() < 1e-9);
        assert!(small.iter().all(|one| !one.metric.ends_with("mce")));
    }
}
