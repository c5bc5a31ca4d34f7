//! Settings that protocols declare beside their code.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, DeserializeSeed, Error};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Setting, Settings};

/// Values of settings that protocols declare, by key and as JSON; each setting reads its own ([`OwnSetting::of`]).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnValues(pub(super) BTreeMap<&'static str, serde_json::Value>);

/// A setting that one protocol declares beside its code, made by [`own_setting!`](crate::own_setting).
pub struct OwnSetting<T: 'static> {
    /// Its key, help and flag.
    pub setting: Setting,
    /// Its value.
    pub value: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> OwnSetting<T> {
    /// What `settings` say; `None` where nothing was said.
    pub fn of(&self, settings: &Settings) -> Option<T> {
        settings.own.0.get(self.setting.key).and_then(|value| T::deserialize(value).ok())
    }

    /// Nothing but `value` for this setting.
    pub fn settings(&self, value: &T) -> Settings {
        Settings::of_own(self.setting.key, value)
    }
}

/// Declares an [`OwnSetting`]: its help as a comment, then `pub NAME: Type = key, "Heading", "VALUE", how a text is read`.
/// Without a heading it has no flag (`--set` and suites take it), without a value it is a switch.
#[macro_export]
macro_rules! own_setting {
    ($(#[doc = $doc:literal])+ $vis:vis $name:ident: $type:ty = $key:literal, $heading:literal, $value:literal, $read:expr;) => {
        $(#[doc = $doc])+
        $vis static $name: $crate::config::settings::OwnSetting<$type> = {
            const READ: fn(&str) -> Result<$type, $crate::config::ParseError> = $read;
            $crate::config::settings::OwnSetting {
                setting: $crate::config::settings::Setting {
                    key: $key,
                    help: concat!($($doc),+).trim_ascii_start(),
                    heading: $heading,
                    value: $value,
                    read: |text| READ(text).map(|value| $crate::config::settings::Settings::of_own($key, &value)),
                },
                value: ::std::marker::PhantomData,
            }
        };
    };
}

/// The key of a table of settings.
pub(super) struct Key(pub(super) &'static Setting);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let key = String::deserialize(deserializer)?;
        Setting::find(&key).map(Self).ok_or_else(|| {
            let expected: Vec<String> =
                Setting::all().iter().map(|known| format!("`{}`", known.key)).collect();
            D::Error::custom(format!("unknown field `{key}`, expected one of {}", expected.join(", ")))
        })
    }
}

/// The value of a setting that a protocol declares: text, a number, a truth value, or a list of them.
pub(super) struct OwnText(pub(super) &'static Setting);

impl<'de> DeserializeSeed<'de> for OwnText {
    type Value = Settings;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Settings, D::Error> {
        fn text(value: &toml::Value) -> Option<String> {
            match value {
                toml::Value::String(text) => Some(text.clone()),
                toml::Value::Array(values) => {
                    Some(values.iter().map(text).collect::<Option<Vec<_>>>()?.join(","))
                }
                toml::Value::Table(_) => None,
                other => Some(other.to_string()),
            }
        }
        let value = toml::Value::deserialize(deserializer)?;
        let text = text(&value).ok_or_else(|| D::Error::custom("expected a text, a number or a list"))?;
        (self.0.read)(&text).map_err(D::Error::custom)
    }
}

impl Settings {
    /// Nothing but `value` for the setting called `key` that a protocol declares.
    pub fn of_own(key: &'static str, value: &impl Serialize) -> Self {
        let value = serde_json::to_value(value).unwrap_or_default();
        Self { own: OwnValues(BTreeMap::from([(key, value)])), ..Self::NONE }
    }
}
