//! The little text that ships with the program, so that a language model can be tried without any data.

use super::corpus::Corpus;
use super::set::{DataSet, Kind, Origin, Symbols};
use super::story;

/// The table line.
pub static SET: DataSet = DataSet {
    name: "sample",
    collection: "sample",
    title: "the sample",
    about: "the next byte of the little text that ships with the program",
    commands: "charlm",
    records: "65,536 bytes",
    kind: Kind::Symbols(Symbols {
        vocabulary: 256,
        complete: None,
        load: |_, _| {
            let partial = Some("the little text that ships with the program".to_owned());
            Ok(Corpus { partial, ..Corpus::new(story::text(), 0) })
        },
    }),
    origin: Origin::Embedded,
    locate: |_| Ok(None),
};
