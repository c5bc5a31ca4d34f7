//! Images that trained models are tested on and never trained on: corrupted, adversarial, rendered, on other backgrounds
//! (Transformer-LS Table 6; `SPEC-vision.md` section 11).
//!
//! To add one: its line in [`TEST_ONLY_SETS`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::answer::{Answer, IMAGENET, NINE};
use super::corrupt::{CORRUPTIONS, SEVERITIES};
use super::folder::Tree;
use super::relabelled::{self, Relabelled};
use super::transform::Interpolation;
use super::{ImageSet, npy};
use crate::content_hash::ContentHash;
use crate::{DataError, Split, store};
use effattn_record::config::registry::Registry;

/// A set of images to be tested on.
pub struct TestOnlySet {
    /// Its name as a task.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// The task that its models are trained on.
    pub of: &'static str,
    /// Folders that it is looked for under, its published name among them.
    pub folders: &'static [&'static str],
    /// What its parts are.
    pub parts: Parts,
    /// Share of the shorter side that is evaluated, and how it is resized.
    pub evaluated: (f64, Interpolation),
    /// What is a right answer.
    pub answer: fn() -> Answer,
    /// Where it comes from.
    pub origin: TestSetOrigin,
    /// What its files are, and which classes they have.
    pub form: Form,
}

/// What a challenge is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Fifteen corruptions at five severities.
    Corruptions {
        /// Whether errors are set beside those of AlexNet.
        alexnet: bool,
    },
    /// The images themselves.
    One,
    /// The same objects on backgrounds of their own class, and of random ones.
    Backgrounds,
}

/// Where a challenge comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestSetOrigin {
    /// `fetch` makes it of the evaluated images in this folder of the data folder.
    Folder(&'static str),
    /// `fetch` makes it of CIFAR-10's test images.
    Cifar,
    /// A person places it: what, and where it is published.
    Placed(&'static str),
}

/// What its files are, and which classes they have.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// Folders of so many of ImageNet's classes.
    ImageNet(usize),
    /// Folders of all of ImageNet's classes, by name or by number (0 to 999, in the order of the names).
    ImageNetOrNumbers,
    /// A file with labels for ImageNet's validation images, which lie in `imagenet` beside it.
    Relabelled,
    /// Folders of the nine groups of ImageNet-9.
    Nine,
    /// Folders of the classes that the model was trained on.
    Trained,
    /// Arrays with CIFAR-10's classes.
    Arrays,
}

/// Every challenge of the crate.
pub static TEST_ONLY_SETS: &[&TestOnlySet] = &[
    &TestOnlySet {
        name: "imagenet-c",
        about: "15 corruptions at 5 severities: mCE and relative mCE",
        of: "imagenet",
        folders: &["imagenet-c", "ImageNet-C"],
        parts: Parts::Corruptions { alexnet: true },
        evaluated: (1.0, Interpolation::Bilinear),
        answer: || Answer::All,
        origin: TestSetOrigin::Folder("imagenet"),
        form: Form::ImageNet(IMAGENET),
    },
    &TestOnlySet {
        name: "imagenet-a",
        about: "7,500 natural images that classifiers fail on, 200 classes",
        of: "imagenet",
        folders: &["imagenet-a"],
        parts: Parts::One,
        evaluated: (0.875, Interpolation::Bilinear),
        answer: Answer::imagenet_a,
        origin: TestSetOrigin::Placed(
            "unpack imagenet-a.tar (github.com/hendrycks/natural-adv-examples) as imagenet-a/<class>/<image>",
        ),
        form: Form::ImageNet(200),
    },
    &TestOnlySet {
        name: "imagenet-r",
        about: "30,000 drawings, paintings and other renditions, 200 classes",
        of: "imagenet",
        folders: &["imagenet-r"],
        parts: Parts::One,
        evaluated: (0.875, Interpolation::Bilinear),
        answer: Answer::imagenet_r,
        origin: TestSetOrigin::Placed(
            "unpack imagenet-r.tar (github.com/hendrycks/imagenet-r) as imagenet-r/<class>/<image>",
        ),
        form: Form::ImageNet(200),
    },
    &TestOnlySet {
        name: "imagenet-9",
        about: "objects on backgrounds of their own and of random classes, nine groups: both accuracies and their gap",
        of: "imagenet",
        folders: &["imagenet-9", "bg_challenge"],
        parts: Parts::Backgrounds,
        evaluated: (1.0, Interpolation::Bilinear),
        answer: Answer::imagenet_9,
        origin: TestSetOrigin::Placed(
            "unpack mixed_same and mixed_rand (github.com/MadryLab/backgrounds_challenge) as imagenet-9/<variant>/val/<group>/<image>",
        ),
        form: Form::Nine,
    },
    &TestOnlySet {
        name: "imagenet-real",
        about: "ImageNet's validation images with labels assessed anew, several or none per image",
        of: "imagenet",
        folders: &["imagenet-real"],
        parts: Parts::One,
        evaluated: (0.875, Interpolation::Bicubic),
        answer: || Answer::All,
        origin: TestSetOrigin::Placed(
            "place real.json (github.com/google-research/reassessed-imagenet) as imagenet-real/real.json, beside imagenet/val/<class>/<image>,",
        ),
        form: Form::Relabelled,
    },
    &TestOnlySet {
        name: "imagenet-v2",
        about: "10,000 new images of ImageNet's classes, of matched frequency",
        of: "imagenet",
        folders: &["imagenet-v2", "imagenetv2-matched-frequency-format-val"],
        parts: Parts::One,
        evaluated: (0.875, Interpolation::Bicubic),
        answer: || Answer::All,
        origin: TestSetOrigin::Placed(
            "unpack imagenetv2-matched-frequency.tar.gz (github.com/modestyachts/ImageNetV2) as imagenet-v2/<class>/<image>",
        ),
        form: Form::ImageNetOrNumbers,
    },
    &TestOnlySet {
        name: "cifar10-c",
        about: "15 corruptions of CIFAR-10's test images at 5 severities",
        of: "cifar10",
        folders: &["cifar10-c", "CIFAR-10-C"],
        parts: Parts::Corruptions { alexnet: false },
        evaluated: (1.0, Interpolation::Bicubic),
        answer: || Answer::All,
        origin: TestSetOrigin::Cifar,
        form: Form::Arrays,
    },
    &TestOnlySet {
        name: "folder-c",
        about: "15 corruptions of the images in val/ at 5 severities",
        of: "folder",
        folders: &["folder-c"],
        parts: Parts::Corruptions { alexnet: false },
        evaluated: (1.0, Interpolation::Bicubic),
        answer: || Answer::All,
        origin: TestSetOrigin::Folder(""),
        form: Form::Trained,
    },
];

static ALL: Registry<TestOnlySet> = Registry::new(TEST_ONLY_SETS);

/// Adds a challenge at run time (a library user's own, or a test's).
pub fn register(challenge: &'static TestOnlySet) {
    ALL.add(challenge);
}

/// Every challenge: those of the crate, then the registered ones.
pub fn challenges() -> Vec<&'static TestOnlySet> {
    ALL.all()
}

/// The challenge called `name`.
pub fn challenge(name: &str) -> Option<&'static TestOnlySet> {
    challenges().into_iter().find(|challenge| challenge.name == name)
}

/// What was found of a challenge.
pub struct Found {
    /// Checksum over all parts.
    pub hash: String,
    /// Where parts differ in their number of images: in words.
    pub partial: Option<String>,
    /// Classes of its own.
    pub classes: usize,
}

impl TestOnlySet {
    /// Names of its parts: folders below its own.
    pub fn parts(&self) -> Vec<String> {
        match self.parts {
            Parts::One => vec![String::new()],
            Parts::Backgrounds => vec!["mixed_same/val".to_owned(), "mixed_rand/val".to_owned()],
            Parts::Corruptions { .. } => {
                let of = |name| (1..=SEVERITIES).map(move |severity| format!("{name}/{severity}"));
                CORRUPTIONS.iter().flat_map(|corruption| of(corruption.name)).collect()
            }
        }
    }

    /// Where it lies in the data folder `dir`.
    pub fn root(&self, dir: &Path) -> Result<PathBuf, DataError> {
        let found = self.folders.iter().map(|name| dir.join(name)).find(|folder| folder.is_dir());
        found.ok_or_else(|| DataError::Missing {
            what: self.name,
            dir: dir.to_owned(),
            next: match self.origin {
                TestSetOrigin::Placed(how) => format!("{how} there, or name another folder with --data-dir"),
                TestSetOrigin::Cifar | TestSetOrigin::Folder(_) => {
                    format!(
                        "place the published files as {} there, or make them: {}",
                        self.layout(),
                        self.fetch()
                    )
                }
            },
        })
    }

    /// What a person does who has it not.
    fn placed(&self) -> &'static str {
        match self.origin {
            TestSetOrigin::Placed(how) => how,
            TestSetOrigin::Cifar | TestSetOrigin::Folder(_) => "",
        }
    }

    fn fetch(&self) -> String {
        format!("effattn fetch {}", self.name)
    }

    fn layout(&self) -> String {
        let below = match (self.parts, self.form) {
            (_, Form::Arrays) => "<corruption>.npy and labels.npy",
            (_, Form::Relabelled) => relabelled::LABELS,
            (Parts::Corruptions { .. }, _) => "<corruption>/<severity>/<class>/<image>",
            (Parts::Backgrounds, _) => "<variant>/val/<group>/<image>",
            (Parts::One, _) => "<class>/<image>",
        };
        format!("{}/{below}", self.name)
    }

    /// The part `name` below `root`; `trained` are the classes of the model where they are known.
    pub fn open(
        &self,
        root: &Path,
        name: &str,
        trained: Option<&[String]>,
    ) -> Result<Arc<dyn ImageSet>, DataError> {
        if let Form::Arrays = self.form {
            let (corruption, severity) = name.split_once('/').unwrap_or((name, "1"));
            let severity = severity.parse().unwrap_or(1);
            return Ok(Arc::new(npy::Records::open(root, corruption, severity)?));
        }
        if let Form::Relabelled = self.form {
            let file = root.join(relabelled::LABELS);
            if !file.is_file() {
                return Err(store::bad_file(&file, format!("no such file; {} there", self.placed())));
            }
            let imagenet = root.parent().unwrap_or(root).join(self.of);
            return Ok(Arc::new(Relabelled::open(&file, &imagenet)?));
        }
        let folder = root.join(name);
        if !folder.is_dir() {
            let next = match self.origin {
                TestSetOrigin::Placed(how) => how.to_owned(),
                TestSetOrigin::Cifar | TestSetOrigin::Folder(_) => {
                    format!("{} makes what is missing", self.fetch())
                }
            };
            return Err(store::bad_file(
                &folder,
                format!("no such folder; expected {}: {next}", self.layout()),
            ));
        }
        let mut tree = Tree::open(&folder)?;
        let refuse = |reason: String| store::bad_file(&folder, reason);
        let numbers = tree.classes().iter().all(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        match (self.form, numbers) {
            (Form::ImageNetOrNumbers, true) => tree = tree.by_number(IMAGENET).map_err(refuse)?,
            _ => self.classes(tree.classes(), trained).map_err(refuse)?,
        }
        Ok(Arc::new(tree))
    }

    /// Makes sure that the folders `found` are those that are expected.
    fn classes(&self, found: &[String], trained: Option<&[String]>) -> Result<(), String> {
        let as_trained = |trained: &[String]| {
            let other = found.iter().zip(trained).find(|(here, there)| here != there);
            match other {
                Some((here, there)) => {
                    Err(format!("the class folder {here} where the training images have {there}"))
                }
                None if found.len() != trained.len() => Err(format!(
                    "{} class folders, but the model was trained on {} classes",
                    found.len(),
                    trained.len()
                )),
                None => Ok(()),
            }
        };
        match (self.form, trained) {
            (Form::ImageNet(IMAGENET) | Form::ImageNetOrNumbers | Form::Trained, Some(trained)) => {
                as_trained(trained)
            }
            (Form::ImageNet(_) | Form::ImageNetOrNumbers, _) => {
                let count = if let Form::ImageNet(count) = self.form { count } else { IMAGENET };
                let wordnet = |name: &str| {
                    let number = name.strip_prefix('n').unwrap_or_default();
                    number.len() == 8 && number.bytes().all(|digit| digit.is_ascii_digit())
                };
                if let Some(other) = found.iter().find(|name| !wordnet(name)) {
                    return Err(format!(
                        "the class folder {other}; expected WordNet names such as n01440764"
                    ));
                }
                let right = found.len() == count;
                right.then_some(()).ok_or_else(|| format!("{} class folders, expected {count}", found.len()))
            }
            (Form::Nine, _) => {
                let expected = || NINE.iter().enumerate().map(|(at, (word, _))| format!("0{at}_{word}"));
                let fits = |(found, (at, (word, _))): (&String, (usize, &(&str, &str)))| {
                    found.starts_with(&format!("0{at}")) && found.contains(word)
                };
                let right = found.len() == NINE.len() && found.iter().zip(NINE.iter().enumerate()).all(fits);
                let expected = || expected().collect::<Vec<_>>().join(", ");
                right.then_some(()).ok_or_else(|| {
                    format!("the folders {}; expected the nine groups {}", found.join(", "), expected())
                })
            }
            (Form::Trained | Form::Arrays | Form::Relabelled, _) => Ok(()),
        }
    }

    /// Looks through all of it.
    pub fn scan(
        &self,
        dir: &Path,
        trained: Option<&[String]>,
        allow_partial: bool,
    ) -> Result<Found, DataError> {
        let root = self.root(dir)?;
        if let (Form::ImageNet(200) | Form::Nine | Form::ImageNetOrNumbers | Form::Relabelled, Some(trained)) =
            (self.form, trained)
            && trained.len() != IMAGENET
        {
            let reason =
                format!("for models of ImageNet's {IMAGENET} classes; {} has {}", self.of, trained.len());
            return Err(store::bad_file(&root, reason));
        }
        let (mut content, mut first, mut partial, mut classes) = (ContentHash::default(), None, None, 0);
        for name in self.parts() {
            let part = self.open(&root, &name, trained)?;
            content.field(part.hash().as_bytes());
            classes = part.classes().len();
            let count = part.len(Split::Test);
            let (whole, expected) = first.get_or_insert((name.clone(), count));
            let same = !matches!(self.parts, Parts::Corruptions { .. }) || count == *expected;
            let uneven = (!same).then(|| format!("{name} has {count} images, {whole} has {expected}"));
            let missing = part.partial().map(str::to_owned).or(uneven);
            if let (Some(missing), None) = (missing, &partial) {
                if !allow_partial {
                    return Err(DataError::Partial { what: self.name, dir: root, missing });
                }
                partial = Some(missing);
            }
        }
        Ok(Found { hash: content.finish(), partial, classes })
    }
}

#[cfg(test)]
mod tests;
