//! The golden files inside the binary: what `check` proves without `--golden`.
//!
//! A selection over every mechanism, variant, discrete knob value and level of the public golden set, under
//! 6 MB; it lies in `tests/golden`. A file is added by copying it there and naming it here.

/// A golden file: its path below `tests/golden` and its bytes.
pub type BuiltinFile = (&'static str, &'static [u8]);

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        &[$((
            concat!($name, ".safetensors"),
            include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/", $name, ".safetensors")),
        )),*]
    };
}

/// Every shipped file, in alphabetical order.
pub static BUILTIN_FILES: &[BuiltinFile] = shipped![
    "bigbird-bidir-05",
    "cosformer-bidir-02",
    "cosformer-bidir-06",
    "cosformer-causal-02",
    "cosformer-cross-01",
    "dp-00",
    "dp-causal-03",
    "dp-causal-ln-00",
    "dp-ln-01",
    "full-02",
    "full-causal-01",
    "identity-linear-bidir-02",
    "identity-linear-causal-01",
    "leakyrelu-linear-bidir-02",
    "leakyrelu-linear-causal-01",
    "linear-bidir-02",
    "linear-causal-02",
    "linear-cross-01",
    "linformer-04",
    "linformer-ef-01",
    "linformer-window-01",
    "linformer-window-ln-00",
    "local-bidir-05",
    "local-causal-02",
    "local-lraquirk-01",
    "longformer-bidir-05",
    "longformer-bidir-07",
    "longformer-causal-01",
    "ls-02",
    "ls-causal-02",
    "ls-causal-ln-03",
    "ls-causal-xl-01",
    "ls-causal-xl-code-00",
    "ls-cls-01",
    "ls-ln-05",
    "ls2d-06",
    "models/charlm-ls-00",
    "models/charlm-ls-code-00",
    "models/charlm-xl-00",
    "models/charlm-xl-code-00",
    "models/eval-ls-00",
    "models/eval-ls-code-00",
    "models/eval-xl-00",
    "models/lra-dp-00",
    "models/lra-full-01",
    "models/lra-ls-00",
    "models/lra-pair-00",
    "models/lra-pair-01",
    "models/train-charlm-00",
    "models/train-charlm-01",
    "models/train-onecycle-00",
    "models/train-rsqrt-00",
    "nystrom-05",
    "nystrom-conv-01",
    "nystrom-original-00",
    "performer-00",
    "performer-causal-01",
    "performer-causal-eps-00",
    "performer-lra-01",
    "performer-through-00",
    "reformer-05",
    "reformer-06",
    "reformer-causal-00",
    "relu-linear-bidir-02",
    "relu-linear-causal-01",
    "relu-linear-cross-01",
    "rfa-arccos-bidir-01",
    "rfa-arccos-causal-01",
    "rfa-gate-arccos-02",
    "rfa-gate-gaussian-02",
    "rfa-gaussian-bidir-04",
    "rfa-gaussian-causal-03",
    "sinkhorn-concat-02",
    "sinkhorn-lraquirk-01",
    "sinkhorn-sum-06",
    "sparse-fixed-bidir-01",
    "sparse-fixed-causal-04",
    "sparse-strided-bidir-01",
    "sparse-strided-causal-02",
    "synthesizer-dense-03",
    "synthesizer-dense-04",
    "synthesizer-dense-lraquirk-01",
    "synthesizer-factorized-01",
    "synthesizer-factorized-03",
    "synthesizer-random-03",
    "synthesizer-random-04",
    "transformer-xl-01",
    "transformer-xl-05",
    "window-02",
    "window-causal-01",
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn stored(folder: &Path, prefix: &str, found: &mut Vec<(String, u64)>) {
        for item in fs::read_dir(folder).unwrap() {
            let item = item.unwrap();
            let name = format!("{prefix}{}", item.file_name().to_string_lossy());
            if item.path().is_dir() {
                stored(&item.path(), &format!("{name}/"), found);
            } else {
                found.push((name, item.metadata().unwrap().len()));
            }
        }
    }

    #[test]
    fn the_list_names_every_file_of_the_folder() {
        let mut found = Vec::new();
        stored(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), "", &mut found);
        found.sort();
        let listed: Vec<(String, u64)> =
            BUILTIN_FILES.iter().map(|(name, bytes)| (String::from(*name), bytes.len() as u64)).collect();
        assert_eq!(listed, found);
    }

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
    fn the_files_stay_under_six_megabytes() {
        let total: usize = BUILTIN_FILES.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(total < 6_000_000, "{total} bytes");
    }
}
