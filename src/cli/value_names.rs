//! Names from a table as values of flags, so that shells complete them.

use std::convert::Infallible;
use std::error::Error;
use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};

use effattn_model::attention::entries;
use effattn_record::config::suite::BUILTIN_SUITES;

/// Names of mechanisms.
pub fn mechanisms() -> Vec<&'static str> {
    entries().iter().map(|entry| entry.name).collect()
}

/// Names of the built-in suites.
pub fn suites() -> Vec<&'static str> {
    BUILTIN_SUITES.iter().map(|(name, _)| *name).collect()
}

/// A value that is taken as it is.
pub fn text(text: &str) -> Result<String, Infallible> {
    Ok(text.to_owned())
}

/// Reads a value; shells offer the names. Accepts any text; names are checked later, because lists are values too.
#[derive(Clone)]
pub struct NamedValues<R> {
    names: fn() -> Vec<&'static str>,
    read: R,
}

impl<R> NamedValues<R> {
    /// Values among `names`, read by `read`.
    pub fn new(names: fn() -> Vec<&'static str>, read: R) -> Self {
        Self { names, read }
    }
}

impl<R, T, E> TypedValueParser for NamedValues<R>
where
    R: Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
    E: Into<Box<dyn Error + Send + Sync + 'static>>,
{
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        self.read.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.names)().into_iter().map(PossibleValue::new)))
    }
}
