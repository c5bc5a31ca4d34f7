//! Generated sentences with an opinion, so that fine-tuning can be tried without any data: one adjective decides, and a
//! negation in front of it turns it round.

use std::path::Path;

use rand::Rng;

use super::entry::{DataKind, DataSetEntry, Origin, TextTask};
use super::labelled::{LabelledTexts, Text};
use super::{DataError, LoadOptions, Split};
use effattn_kernel::device::rng::RngStream;

/// The table line.
pub static SET: DataSetEntry = DataSetEntry {
    name: "sentences",
    collection: "sentences",
    title: "Generated sentences",
    about: "whether a generated sentence praises",
    records: "4,000 / 500 sentences",
    kind: DataKind::Texts(TextTask { classes: &["negative", "positive"], train: SIZES[0], load: &load }),
    origin: Origin::BuiltIn,
    locate: |_| Ok(None),
};

const SIZES: [usize; 2] = [4000, 500];
const THINGS: &[&str] =
    &["film", "plot", "camera", "hotel", "meal", "book", "song", "engine", "actor", "garden"];
const OPENINGS: &[&str] = &["the", "to me the", "in the end the", "we all said the", "after an hour the"];
const GOOD: &[&str] = &["good", "lovely", "clever", "warm", "bright", "fine", "funny", "rich"];
const BAD: &[&str] = &["bad", "dull", "awful", "cold", "clumsy", "poor", "boring", "cheap"];
const ENDINGS: &[&str] = &["", " and long", " for the price", " from start to end", " , as my sister says"];

fn load(_: &Path, _: LoadOptions) -> Result<LabelledTexts, DataError> {
    let [train, test] = [(Split::Train, SIZES[0]), (Split::Test, SIZES[1])].map(|(split, count)| {
        let mut stream = RngStream::new(0, &format!("sentences/{}", split.name()));
        (0..count).map(|_| sentence(&mut stream)).collect()
    });
    Ok(LabelledTexts::new(train, test))
}

fn sentence(stream: &mut RngStream) -> Text {
    let rng = stream.rng();
    let mut one = |words: &[&'static str]| words[rng.random_range(0..words.len())];
    let (opening, thing, ending) = (one(OPENINGS), one(THINGS), one(ENDINGS));
    let [praises, negated] = [rng.random(), rng.random_range(0..4) == 0];
    let words = if praises { GOOD } else { BAD };
    let adjective = words[rng.random_range(0..words.len())];
    let not = if negated { "not " } else { "" };
    let first = format!("{opening} {thing} was {not}{adjective}{ending} .");
    Text { first, second: None, label: u32::from(praises != negated) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_the_same_every_time_and_about_balanced() {
        let load = || load(Path::new(""), LoadOptions::default()).unwrap();
        let set = load();
        assert_eq!(set.hash(), load().hash());
        assert_eq!(Split::ALL.map(|split| set.side(split).len()), [4000, 500, 500]);
        let good = set.side(Split::Test).iter().filter(|text| text.label == 1).count();
        assert!((200..300).contains(&good), "{good}");
    }
}
