//! Names from a table as values of flags, so that shells complete them.

use std::ffi::OsStr;
use std::marker::PhantomData;
use std::str::FromStr;

use clap::builder::{PossibleValue, TypedValueParser};

/// Reads a `T`; shells offer the names. What is no name is said by whoever looks it up: lists are values too.
#[derive(Clone)]
pub struct Known<T> {
    names: fn() -> Vec<&'static str>,
    value: PhantomData<T>,
}

impl<T> Known<T> {
    /// Values among `names`.
    pub fn new(names: fn() -> Vec<&'static str>) -> Self {
        Self { names, value: PhantomData }
    }
}

impl<T> TypedValueParser for Known<T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
{
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        let read: fn(&str) -> Result<T, T::Err> = T::from_str;
        read.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.names)().into_iter().map(PossibleValue::new)))
    }
}
