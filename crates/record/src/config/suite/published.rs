//! Published numbers of a suite: how they stand in its text, and their checks.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::{Column, PublishedTable};
use crate::config::unknown;
use crate::text::plural;
use crate::{Outcome, Pass, Published};

/// Protocols whose published numbers are by pass and length.
const BY_PASS: [&str; 2] = ["speed", "memory"];

/// One table, or a list of them.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a table such as { metric = \"accuracy\", text = 65.4 }, or a list of such tables"
)]
pub(super) enum WireTables {
    One(WirePublished),
    Many(Vec<WirePublished>),
}

#[derive(Deserialize)]
pub(super) struct WirePublished {
    metric: String,
    source: Option<String>,
    #[serde(flatten)]
    values: BTreeMap<String, WireValues>,
}

/// A number, a mark such as "oom", or a list of them.
pub(super) struct WireValues(Vec<(Published, Option<usize>)>);

impl<'de> Deserialize<'de> for WireValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;
        impl<'de> Visitor<'de> for Values {
            type Value = Vec<(Published, Option<usize>)>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number, \"oom\", or a list of them")
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Self::Value, E> {
                let digits = value.to_string().split_once('.').map_or(1, |(_, digits)| digits.len());
                Ok(vec![(Published::Value(value), Some(digits))])
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Self::Value, E> {
                Ok(vec![(Published::Value(value as f64), Some(0))])
            }
            fn visit_str<E: de::Error>(self, word: &str) -> Result<Self::Value, E> {
                let allowed = [Outcome::Oom, Outcome::Diverged, Outcome::Timeout, Outcome::Failed];
                let outcome = allowed.into_iter().find(|outcome| outcome.word() == word);
                let wrong = || E::invalid_value(de::Unexpected::Str(word), &self);
                outcome.map(|outcome| vec![(Published::Outcome(outcome), None)]).ok_or_else(wrong)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(WireValues(part)) = seq.next_element()? {
                    values.extend(part);
                }
                Ok(values)
            }
        }
        deserializer.deserialize_any(Values).map(Self)
    }
}

/// What the published numbers of a suite are of.
pub(super) struct PublishedPlaces<'a> {
    /// The suite's text.
    pub text: &'a str,
    /// Its protocol.
    pub protocol: &'a str,
    /// Columns of the source's table.
    pub columns: &'a [Column],
    /// Whether that table has a line for every length.
    pub by_len: bool,
    /// The base's lengths.
    pub lens: &'a [u64],
}

impl PublishedPlaces<'_> {
    /// The tables of `wire`, of the line `label` with the lengths `own`; or where and what is wrong with them.
    pub fn tables(
        &self,
        wire: Spanned<WireTables>,
        label: &str,
        own: Option<&[u64]>,
    ) -> Result<Vec<PublishedTable>, (usize, String)> {
        let span = wire.span();
        let tables = match wire.into_inner() {
            WireTables::One(table) => vec![table],
            WireTables::Many(tables) => tables,
        };
        // flattened keys have no place of their own
        let within = self.text.get(span.clone()).unwrap_or_default();
        let read = |WirePublished { metric, source, values: wire }: WirePublished| {
            let (mut digits, mut values) = (BTreeMap::new(), BTreeMap::new());
            for (key, WireValues(numbers)) in wire {
                let (numbers, places): (Vec<Published>, Vec<Option<usize>>) = numbers.into_iter().unzip();
                if let Some(problem) = self.problem(&key, &numbers, own) {
                    let place = span.start + within.find(&key).unwrap_or(0);
                    return Err((place, format!("{label}: {problem}")));
                }
                digits.insert(key.clone(), places);
                values.insert(key, numbers);
            }
            Ok(PublishedTable { metric, source, values, digits })
        };
        tables.into_iter().map(read).collect()
    }

    /// What is wrong with the numbers under `key`.
    fn problem(&self, key: &str, numbers: &[Published], own: Option<&[u64]>) -> Option<String> {
        if let Some(number) = numbers.iter().filter_map(|one| one.value()).find(|number| !number.is_finite())
        {
            return Some(format!("{key} has the published value {number}, which is no finite number"));
        }
        let by_pass = BY_PASS.contains(&self.protocol);
        let keys = self.keys();
        if by_pass && !keys.iter().any(|known| known == key) {
            return Some(unknown("key of published numbers", key, keys.iter().map(String::as_str)));
        }
        let (count, lens) = (numbers.len(), self.lens.len());
        // columns say which length a number is of; so does a row that has the first lengths only
        let of_row = own.is_some_and(|own| own.len() == count && self.lens.starts_with(own));
        let too_few = by_pass && self.columns.is_empty() && !of_row && count < lens;
        (too_few || count > lens.max(1)).then(|| {
            let (values, lengths) = (plural(count as u64, "published value"), plural(lens as u64, "length"));
            format!("{key} has {values} for {lengths}; give one for each length of [base], in a list")
        })
    }

    /// What a number may be of, where it is of a pass.
    fn keys(&self) -> Vec<String> {
        let passes = [Pass::Infer, Pass::Train, Pass::Decode].map(Pass::word);
        let others =
            self.columns.iter().map(|column| column.key.as_str()).filter(|key| !passes.contains(key));
        let mut keys: Vec<String> = passes.into_iter().chain(others).map(str::to_owned).collect();
        if self.by_len {
            let with_len =
                |key: &String| self.lens.iter().map(|len| format!("{key}-{len}")).collect::<Vec<_>>();
            keys.extend(keys.iter().flat_map(with_len).collect::<Vec<_>>());
        }
        keys
    }
}
