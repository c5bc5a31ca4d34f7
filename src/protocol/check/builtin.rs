//! The golden files inside the binary: what `check` proves without `--golden`.
//!
//! A selection over every mechanism, variant, discrete knob value and level of the public golden set, under
//! 7 MB. `build.rs` finds the files of `tests/golden`; `cargo xtask golden` adds some.

/// A golden file: its path below `tests/golden` and its bytes.
pub type BuiltinFile = (&'static str, &'static [u8]);

/// Every file of the folder, in alphabetical order.
pub static BUILTIN_FILES: &[BuiltinFile] = include!(concat!(env!("OUT_DIR"), "/golden.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mechanism_has_a_file() {
        let read = |(name, bytes): &BuiltinFile| crate::protocol::check::Golden::read(name, bytes).unwrap();
        let proven: Vec<String> =
            BUILTIN_FILES.iter().map(|shipped| read(shipped).meta("mechanism").to_owned()).collect();
        for entry in effattn_model::attention::TABLE {
            assert!(proven.iter().any(|name| name == entry.name), "{} has no golden file", entry.name);
        }
    }

    #[test]
    fn the_files_stay_under_seven_megabytes() {
        let total: usize = BUILTIN_FILES.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(total < 7_000_000, "{total} bytes");
    }
}
