//! IMDb's reviews (Maas et al. 2011) as words: whether a film review is positive. The same files as [`super::lra_text`].

use std::path::Path;

use super::entry::{DataKind, DataSetEntry, Origin, TextTask};
use super::labelled::{LabelledTexts, Text};
use super::lra_text::{NAMES, PER_CLASS, Reviews, SOURCE};
use super::{DataError, LoadOptions, store};

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "imdb",
    collection: "imdb",
    title: "IMDb",
    about: "whether a film review is positive, from its words",
    records: "25,000 / 25,000 reviews",
    kind: DataKind::Texts(TextTask { classes: &["negative", "positive"], train: 2 * PER_CLASS, load: &load }),
    origin: Origin::Download(SOURCE),
    locate: |dir| Ok(store::find(dir, NAMES)),
};

/// Markup stays. With `strict` the last tenth of each class of the training split is held out for selection: the files are
/// ordered by film, so that no film is on both sides of more than one cut.
fn load(dir: &Path, options: LoadOptions) -> Result<LabelledTexts, DataError> {
    let Reviews { train, test, partial, .. } = Reviews::read(dir, options.allow_partial)?;
    let texts = |split: &str, reviews: Vec<(Vec<u8>, u32)>| {
        let text = |(at, (bytes, label)): (usize, (Vec<u8>, u32))| {
            let first = String::from_utf8(bytes);
            let reason = format!("review {at} of the {split} split is not UTF-8");
            let first = first.map_err(|_| store::bad_file(dir, reason))?;
            Ok(Text { first, second: None, label })
        };
        reviews.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()
    };
    let (mut train, test) = (texts("training", train)?, texts("test", test)?);
    let mut held_out = Vec::new();
    if options.strict {
        let mut seen = [0, 0];
        let count = |class: u32| train.iter().filter(|text| text.label == class).count();
        let counts = [count(0), count(1)];
        let mut last = |text: &Text| {
            let class = text.label as usize;
            seen[class] += 1;
            10 * seen[class] > 9 * counts[class]
        };
        (held_out, train) = train.into_iter().partition(|text| last(text));
    }
    let set = LabelledTexts::new(train, test);
    let set = if held_out.is_empty() { set } else { set.selected_on(held_out) };
    Ok(set.said(partial, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    #[test]
    fn the_last_tenth_of_each_class_can_be_held_out() {
        let dir = tempfile::tempdir().unwrap();
        for split in ["train", "test"] {
            for class in ["neg", "pos"] {
                let folder = dir.path().join("aclImdb").join(split).join(class);
                std::fs::create_dir_all(&folder).unwrap();
                for id in 0..20 {
                    let text = format!("{split} {class} {id}<br />");
                    std::fs::write(folder.join(format!("{id}_3.txt")), text).unwrap();
                }
            }
        }
        let load = |strict| {
            load(dir.path(), LoadOptions { strict, allow_partial: true, ..LoadOptions::default() }).unwrap()
        };
        let (all, strict) = (load(false), load(true));
        assert_eq!(Split::ALL.map(|split| all.side(split).len()), [40, 40, 40]);
        assert_eq!(Split::ALL.map(|split| strict.side(split).len()), [36, 4, 40]);
        let held: Vec<&str> = strict.side(Split::Validation).iter().map(|text| text.first.as_str()).collect();
        let expected =
            ["train neg 18<br />", "train neg 19<br />", "train pos 18<br />", "train pos 19<br />"];
        assert_eq!(held, expected);
        assert_ne!(all.hash(), strict.hash());
    }
}
