//! Trained weights on images that were never trained on (Transformer-LS Table 6; `SPEC-vision.md` section 11).

use candle_core::{Error, Result as Candle};

use super::loader::Loader;
use crate::data::Split;
use crate::data::content::Content;
use crate::data::images::challenge::{Challenge, Parts};
use crate::data::images::corrupt::{CORRUPTIONS, SEVERITIES};
use crate::model::family::Net;
use crate::model::family::vision::ImageNet;
use crate::protocol::training::Measure;

/// Error of AlexNet on clean images of ImageNet, as a share.
const ALEXNET_CLEAN: f64 = 0.4345;

/// How weights did on a challenge.
pub struct Outcome {
    /// Accuracies of its parts, as shares.
    accuracies: Vec<f64>,
    /// Images that were tested.
    tested: usize,
    /// Checksum of what was read.
    pub hash: String,
}

/// Tests `net` on the first `limit` images of every part of `challenge`, read by `loader` in batches of `batch`. `trained`
/// are the classes where they are known; `tell` hears what is done.
///
/// # Errors
/// Images that cannot be read, parts of which no image can.
pub fn tested(
    challenge: &Challenge,
    net: &mut ImageNet,
    loader: &Loader,
    (dir, trained): (&std::path::Path, Option<&[String]>),
    (limit, batch): (Option<u64>, usize),
    device: &candle_core::Device,
    mut tell: impl FnMut(&str) -> Candle<()>,
) -> Candle<Outcome> {
    let root = challenge.root(dir).map_err(Error::wrap)?;
    let answer = (challenge.answer)();
    let (mut content, mut accuracies, mut all) = (Content::default(), Vec::new(), 0);
    for part in challenge.parts() {
        tell(&format!("is tested on {} {part}", challenge.name))?;
        let set = challenge.open(&root, &part, trained).map_err(Error::wrap)?;
        content.field(set.hash().as_bytes());
        let count = set.len(Split::Test).min(limit.unwrap_or(u64::MAX) as usize);
        let mut loader = Loader { set, ..loader.clone() };
        loader.recipe.evaluated = challenge.evaluated;
        let (mut right, mut tested) = (0, 0);
        for made in loader.evaluation(Split::Test, count, batch) {
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
    Ok(Outcome { accuracies, tested: all, hash: content.finish() })
}

/// Errors over those of AlexNet: mCE, and relative mCE where the error `clean` on clean images is known; in percent.
/// `errors` are means over the severities of every corruption.
fn corruption_errors(errors: &[f64], clean: Option<f64>) -> (f64, Option<f64>) {
    let mean = |of: &dyn Fn(f64, f64) -> f64| {
        let all = errors.iter().zip(&CORRUPTIONS).map(|(error, corruption)| of(*error, corruption.alexnet));
        100.0 * all.sum::<f64>() / errors.len().max(1) as f64
    };
    let relative = clean.map(|clean| mean(&|error, alexnet| (error - clean) / (alexnet - ALEXNET_CLEAN)));
    (mean(&|error, alexnet| error / alexnet), relative)
}

impl Outcome {
    /// What `challenge` is reported by, its own accuracy first; `clean` is the accuracy on clean images in percent, where it
    /// was measured.
    pub fn measures(&self, challenge: &Challenge, clean: Option<f64>) -> Vec<Measure> {
        let name = challenge.name;
        let of = |task: String, metric: &str, unit: &str, value: f64| Measure {
            task: Some(task),
            ..Measure::new(metric, unit, value)
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
                let shares: Vec<f64> = self.accuracies.chunks(SEVERITIES).map(mean).collect();
                if alexnet {
                    let errors: Vec<f64> = shares.iter().map(|share| 1.0 - share).collect();
                    let clean = clean.map(|accuracy| 1.0 - accuracy / 100.0);
                    let (mce, relative) = corruption_errors(&errors, clean);
                    all.push(of(name.to_owned(), "mce", "%", mce));
                    all.extend(relative.map(|value| of(name.to_owned(), "relative_mce", "%", value)));
                }
                for (share, corruption) in shares.iter().zip(&CORRUPTIONS) {
                    all.push(of(format!("{name} {}", corruption.name), "accuracy", "%", 100.0 * share));
                }
            }
        }
        all.push(of(name.to_owned(), "tested", "1", self.tested as f64));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::images::challenge::challenge;

    fn value(measures: &[Measure], task: &str, metric: &str) -> f64 {
        let found = measures.iter().find(|one| one.metric == metric && one.task.as_deref() == Some(task));
        found.unwrap_or_else(|| panic!("{task} {metric}")).value
    }

    fn outcome(accuracies: Vec<f64>) -> Outcome {
        Outcome { accuracies, tested: 750, hash: String::new() }
    }

    #[test]
    fn alexnet_itself_has_an_error_of_100() {
        let own = CORRUPTIONS.iter().flat_map(|corruption| {
            // any spread over the severities
            [-0.1, -0.05, 0.0, 0.05, 0.1].map(|shift| 1.0 - corruption.alexnet + shift)
        });
        let own = outcome(own.collect()).measures(challenge("imagenet-c").unwrap(), Some(56.55));
        assert!((value(&own, "imagenet-c", "mce") - 100.0).abs() < 1e-9);
        assert!((value(&own, "imagenet-c", "relative_mce") - 100.0).abs() < 1e-9);
        assert!((value(&own, "imagenet-c snow", "accuracy") - 13.3184).abs() < 1e-9);
        assert_eq!(own.len(), 1 + 2 + 15 + 1);
        let alone = outcome(vec![0.5; 75]).measures(challenge("imagenet-c").unwrap(), None);
        assert!(alone.iter().all(|one| one.metric != "relative_mce"), "no clean images, no relative error");
    }

    #[test]
    fn errors_are_those_of_the_golden_formula() {
        let errors: Vec<f64> = (0..15).map(|at| 0.3 + 0.02 * f64::from(at)).collect();
        let tensor = |values: Vec<f64>, shape: (usize, usize)| {
            candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap()
        };
        let alexnet: Vec<f64> = CORRUPTIONS.iter().map(|corruption| corruption.alexnet).collect();
        let one = |value: f64| tensor(vec![value], (1, 1)).flatten_all().unwrap();
        let golden = crate::model::vision::similarity::corruption_error(
            &tensor(errors.clone(), (15, 1)),
            &tensor(alexnet, (15, 1)).flatten_all().unwrap(),
            &one(0.2),
            &one(ALEXNET_CLEAN),
        )
        .unwrap();
        let (mce, relative) = corruption_errors(&errors, Some(0.2));
        assert!((mce - golden.mean_ce.to_scalar::<f64>().unwrap()).abs() < 1e-9);
        let mean = golden.relative_ce.mean_all().unwrap().to_scalar::<f64>().unwrap();
        assert!((relative.unwrap() - 100.0 * mean).abs() < 1e-9);
    }

    #[test]
    fn backgrounds_have_a_gap_and_small_images_no_alexnet() {
        let nine = outcome(vec![0.9, 0.85]).measures(challenge("imagenet-9").unwrap(), None);
        assert!((value(&nine, "imagenet-9", "background_gap") - 5.0).abs() < 1e-9);
        assert!((value(&nine, "imagenet-9-mixed-rand", "accuracy") - 85.0).abs() < 1e-9);
        let small = outcome((0..75).map(|at| f64::from(at / 5) / 15.0).collect());
        let small = small.measures(challenge("cifar10-c").unwrap(), Some(80.0));
        assert!((value(&small, "cifar10-c", "accuracy") - 700.0 / 15.0).abs() < 1e-9);
        assert!((value(&small, "cifar10-c jpeg_compression", "accuracy") - 1400.0 / 15.0).abs() < 1e-9);
        assert!(small.iter().all(|one| !one.metric.ends_with("mce")));
    }
}
