//! Amazon's reviews of electronics (Ni et al. 2019): how many stars a review gives, from the JSON lines of the 2018 edition.
//!
//! The paper's 3M / 168K / 168K fit half of the 5-core file, split 90 / 5 / 5: every review is drawn into one of the
//! three splits or left out by its place in the file, from one seed.

use std::path::Path;

use rand::Rng;
use serde::Deserialize;

use super::entry::{DataKind, DataSetEntry, Origin, TextTask};
use super::labelled::{LabelledTexts, Text};
use super::{DataError, LoadOptions, store};
use effattn_kernel::device::rng::RngStream;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "amazon",
    collection: "amazon",
    title: "Amazon electronics",
    about: "how many stars a review gives, from its words",
    records: "half of 6,739,590 reviews, 90 / 5 / 5",
    kind: DataKind::Texts(TextTask {
        classes: &["1", "2", "3", "4", "5"],
        train: WHOLE * 18 / 40,
        load: &load,
    }),
    origin: Origin::UserProvided(
        "place Electronics_5.json.gz of Amazon's reviews of 2018 (https://nijianmo.github.io/amazon) under that name",
    ),
    locate: |dir| Ok(store::find_file(dir, NAMES)),
};

const NAMES: &[&str] = &["Electronics_5.json.gz", "Electronics_5.json"];
/// Reviews in the file.
const WHOLE: usize = 6_739_590;
/// Longest line that is read.
const LONGEST: usize = 1 << 20;

/// What is read of a review.
#[derive(Deserialize)]
struct Review {
    overall: f64,
    #[serde(rename = "reviewText")]
    text: Option<String>,
}

fn load(dir: &Path, options: LoadOptions) -> Result<LabelledTexts, DataError> {
    let what = SET.title;
    let Some(file) = store::find_file(dir, NAMES) else {
        let next = "no data: place Electronics_5.json.gz of Amazon's reviews of 2018 there, or leave this task out with --task";
        return Err(DataError::Missing { what, dir: dir.to_owned(), next: next.to_owned() });
    };
    let mut draws = RngStream::new(0, "amazon");
    let (mut train, mut held_out, mut test) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut without, mut five) = (0, 0, 0);
    store::each_line(&file, LONGEST, |_, line| {
        rows += 1;
        let review: Review = serde_json::from_slice(line)
            .map_err(|error| format!("is not a review ({error}); expected overall and reviewText"))?;
        if !(1.0..=5.0).contains(&review.overall) || review.overall.fract() != 0.0 {
            return Err(format!("overall is {}, expected 1, 2, 3, 4 or 5", review.overall));
        }
        let side = match draws.rng().random_range(0..40) {
            0..18 => &mut train,
            18 => &mut held_out,
            19 => &mut test,
            _ => return Ok(()),
        };
        let Some(first) = review.text else {
            without += 1;
            return Ok(());
        };
        five += usize::from(review.overall == 5.0);
        side.push(Text { first, second: None, label: review.overall as u32 - 1 });
        Ok(())
    })?;
    let partial = (rows != WHOLE).then(|| format!("{rows} of {WHOLE} reviews"));
    if let (Some(missing), false) = (&partial, options.allow_partial) {
        return Err(DataError::Partial { what, dir: dir.to_owned(), missing: missing.clone() });
    }
    let kept = train.len() + held_out.len() + test.len();
    let share = 100.0 * five as f64 / kept.max(1) as f64;
    let mut remarks = vec![format!(
        "{what}: {} / {} / {} reviews drawn from {rows}, {share:.1} % of them with five stars",
        train.len(),
        held_out.len(),
        test.len()
    )];
    remarks.extend((without > 0).then(|| format!("{what}: {without} reviews without text are left out")));
    Ok(LabelledTexts::new(train, test).selected_on(held_out).said(partial, remarks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    #[test]
    fn reviews_are_drawn_and_their_stars_counted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("Electronics_5.json");
        let says = |reading| load(dir.path(), reading).err().unwrap().to_string();
        assert!(says(LoadOptions::default()).contains("no data: place Electronics_5.json.gz"));
        let line = |at: usize| format!("{{\"overall\": {}.0, \"reviewText\": \"good {at}\"}}\n", 1 + at % 5);
        std::fs::write(&file, (0..4000).map(line).collect::<String>()).unwrap();
        let partial = LoadOptions { allow_partial: true, ..LoadOptions::default() };
        assert!(says(LoadOptions::default()).contains("4000 of 6739590 reviews"));
        let set = load(dir.path(), partial).unwrap();
        let sizes = Split::ALL.map(|split| set.side(split).len());
        assert!(sizes[0].abs_diff(1800) < 150 && sizes[1].abs_diff(100) < 40 && sizes[2].abs_diff(100) < 40);
        assert!(set.remarks()[0].contains("% of them with five stars"), "{:?}", set.remarks());
        assert_eq!(load(dir.path(), partial).unwrap().hash(), set.hash());
        std::fs::write(&file, format!("{}{{\"overall\": 6.0}}\n", line(0))).unwrap();
        assert!(says(partial).contains(":2: overall is 6, expected"), "{}", says(partial));
        std::fs::write(&file, "{\"reviewText\": \"a\"}\n").unwrap();
        assert!(says(partial).contains(":1: is not a review"), "{}", says(partial));
    }
}
