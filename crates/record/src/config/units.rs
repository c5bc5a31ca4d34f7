//! Sizes and times with their units: `2GiB`, `1.5s`.

use std::fmt;
use std::str::FromStr;

use super::ParseError;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

impl FromStr for Bytes {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || {
            ParseError::new(format!(
                "{text:?} is not a size; give a number above 0 and a unit, such as 2GiB, 512MiB or 800MB"
            ))
        };
        let unit = BYTE_UNITS.iter().find(|(unit, _)| {
            text.len() > unit.len()
                && text.is_char_boundary(text.len() - unit.len())
                && text[text.len() - unit.len()..].eq_ignore_ascii_case(unit)
        });
        let (unit, factor) = unit.ok_or_else(wrong)?;
        let number: f64 = text[..text.len() - unit.len()].trim().parse().map_err(|_| wrong())?;
        let bytes = number * *factor as f64;
        if !(1.0..=1e18).contains(&bytes) {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let binary = BYTE_UNITS[..4].iter().find(|(_, factor)| self.0 >= *factor);
        match binary {
            None => write!(f, "{} B", self.0),
            Some((unit, factor)) => {
                let value = self.0 as f64 / *factor as f64;
                let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                write!(f, "{value:.digits$} {unit}")
            }
        }
    }
}

/// A time.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

const TIME_UNITS: [(&str, f64); 4] = [("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)];

impl FromStr for Seconds {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || {
            ParseError::new(format!(
                "{text:?} is not a time; give a number above 0 and a unit, such as 2s, 500ms, 10min or 1h"
            ))
        };
        let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).ok_or_else(wrong)?;
        let (number, unit) = (&text[..digits], text[digits..].trim());
        let unit = if unit == "m" { "min" } else { unit };
        let (_, factor) = TIME_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let seconds = number.parse::<f64>().map_err(|_| wrong())? * factor;
        if !(1e-4..=1e8).contains(&seconds) {
            return Err(wrong());
        }
        Ok(Self(seconds))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            s if s < 1e-3 => write!(f, "{:.0} us", s * 1e6),
            s if s < 0.01 => write!(f, "{:.2} ms", s * 1e3),
            s if s < 0.1 => write!(f, "{:.1} ms", s * 1e3),
            s if s < 1.0 => write!(f, "{:.0} ms", s * 1e3),
            s if s < 10.0 => write!(f, "{s:.2} s"),
            s if s < 120.0 => write!(f, "{s:.0} s"),
            s if s < 7200.0 => write!(f, "{:.0} min", s / 60.0),
            s => write!(f, "{:.1} h", s / 3600.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit() {
        assert_eq!("2GiB".parse(), Ok(Bytes(2 << 30)));
        assert_eq!("1.5 gib".parse(), Ok(Bytes(3 << 29)));
        assert_eq!("800MB".parse(), Ok(Bytes(800_000_000)));
        for text in ["", "2", "GiB", "0GiB", "-1MiB", "2Gi", "NaNB", "1e30TiB", "\u{e9}B"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
        assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!("2s".parse(), Ok(Seconds(2.0)));
        assert_eq!("500ms".parse(), Ok(Seconds(0.5)));
        assert_eq!("1.5m".parse(), Ok(Seconds(90.0)));
        for text in ["", "2", "s", "0s", "-1s", "2 days", "infs", "1e3s"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }
}
