//! The shipped golden files are the ones they were, the real binary reproduces every one of them in every way it can
//! compute, and the comparison notices what it should.

use std::collections::HashMap;
use std::process::Command;

use candle_core::Device;
use effattn::protocol::check::{FileVerdict, builtin::BUILTIN_FILES, check_bytes};
use effattn::record::{Outcome, json};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// SHA-256 over the names and the hashes of all shipped files, tolerances included. It changes only with the definition.
const SET: &str = "eb7c369998c0d08168918d92209c71d7a656906badfc980ed9c48d23428a098a";

/// How far results are moved, in tolerances.
const MOVED: f64 = 3.0;

#[test]
fn the_shipped_set_is_the_definition() {
    let mut files: Vec<_> = BUILTIN_FILES.to_vec();
    files.sort_unstable();
    let mut set = Sha256::new();
    for (name, bytes) in files {
        set.update(name);
        set.update([0]);
        set.update(Sha256::digest(bytes));
    }
    let set: String = set.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(set, SET, "golden files were added, removed or changed");
}

#[test]
fn every_file_is_green_fused_and_composed_on_one_and_two_threads() {
    let empty = tempfile::tempdir().unwrap();
    for kernel in ["fused", "composed"] {
        for threads in ["1", "2"] {
            let output = Command::new(env!("CARGO_BIN_EXE_effattn"))
                .args(["check", "--quiet", "--kernel", kernel, "--threads", threads, "--export-json", "-"])
                .current_dir(empty.path())
                .output()
                .unwrap();
            let rows = json::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap().rows;
            let red: Vec<_> = rows.iter().filter(|row| row.outcome != Outcome::Ok).collect();
            assert!(red.is_empty() && output.status.success(), "{kernel}, {threads} threads: {red:?}");
            assert_eq!(rows.len(), BUILTIN_FILES.len(), "{kernel}, {threads} threads");
            assert!(
                rows.iter().all(|row| row.kernel == kernel && row.value.is_some_and(|ratio| ratio <= 1.0))
            );
        }
    }
}

/// Logits of checkpoints in the files of Hugging Face: tied and in one file, with a head of its own in bf16 and two files.
#[test]
fn checkpoints_beside_golden_files_are_read() {
    for kernel in ["fused", "composed"] {
        let output = Command::new(env!("CARGO_BIN_EXE_effattn"))
            .args(["check", "--quiet", "--kernel", kernel, "--export-json", "-", "--golden"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/checkpoints"))
            .output()
            .unwrap();
        let rows = json::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap().rows;
        assert_eq!(rows.len(), 2, "{kernel}");
        assert!(rows.iter().all(|row| row.outcome == Outcome::Ok) && output.status.success(), "{rows:?}");
    }
}

fn verdict(name: &str, bytes: &[u8]) -> FileVerdict {
    check_bytes(name, bytes, &Device::Cpu).unwrap()
}

fn shipped(name: &str) -> &'static [u8] {
    BUILTIN_FILES
        .iter()
        .find(|(known, _)| *known == name)
        .unwrap_or_else(|| panic!("{name} is not shipped"))
        .1
}

/// `bytes` with every number of the tensors that `which` picks moved by `MOVED` tolerances, and with metadata changed.
fn changed(bytes: &[u8], which: impl Fn(&str) -> bool, metadata: &[(&str, &str)]) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let mut texts: HashMap<String, String> = header.metadata().clone().unwrap();
    let tolerances: HashMap<String, f64> = serde_json::from_str(&texts["atol"]).unwrap();
    let rtol: f64 = texts["rtol"].parse().unwrap();
    texts.extend(metadata.iter().map(|(key, text)| (String::from(*key), String::from(*text))));
    let content = SafeTensors::deserialize(bytes).unwrap();
    let tensors: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = content
        .iter()
        .map(|(name, view)| {
            let mut data = view.data().to_vec();
            if let Some(tolerance) = tolerances.get(name).filter(|_| which(name)) {
                let width = view.shape().last().copied().unwrap_or(1).max(1);
                for row in data.chunks_mut(4 * width) {
                    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
                    let largest =
                        row.chunks_exact(4).map(|bytes| f64::from(number(bytes).abs())).fold(0.0, f64::max);
                    let step = MOVED * (tolerance + rtol * largest);
                    for bytes in row.chunks_exact_mut(4) {
                        bytes.copy_from_slice(&(number(bytes) + step as f32).to_le_bytes());
                    }
                }
            }
            (name.to_owned(), view.dtype(), view.shape().to_vec(), data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize(views, Some(texts)).unwrap()
}

/// The relative tolerance of a file.
fn rtol(bytes: &[u8]) -> f64 {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    header.metadata().as_ref().unwrap()["rtol"].parse().unwrap()
}

#[test]
fn results_outside_their_tolerance_are_red_in_every_file() {
    for (name, bytes) in BUILTIN_FILES {
        let base = verdict(name, bytes);
        let moved = verdict(name, &changed(bytes, |_| true, &[]));
        assert!(base.passed() && !moved.passed(), "{name}: {moved:?}");
        if rtol(bytes) > 0.0 {
            continue; // there a row's tolerance grows with its largest number
        }
        // the tolerance is the file's: no factor anywhere on the way
        let ratio = moved.error_over_tolerance;
        assert!(
            (ratio - MOVED).abs() <= base.error_over_tolerance + 0.1,
            "{name}: {ratio} instead of {MOVED}"
        );
    }
}

#[test]
fn every_result_of_a_file_is_compared() {
    for name in [
        "ls-ln-05",
        "models/lra-pair-00",
        "models/charlm-ls-00",
        "models/train-onecycle-00",
        "models/eval-ls-00",
    ] {
        let name = format!("{name}.safetensors");
        let bytes = shipped(&name);
        let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
        let tolerances: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["atol"]).unwrap();
        for tensor in tolerances.as_object().unwrap().keys() {
            let moved = verdict(&name, &changed(bytes, |other| other == tensor, &[]));
            assert_eq!((moved.passed(), &moved.worst), (false, tensor), "{name}");
        }
    }
}

#[test]
fn wrong_counts_are_red_and_the_limit_is_one_tolerance() {
    let counted = |name, key| verdict(name, &changed(shipped(name), |_| false, &[(key, "1")])).problem;
    assert!(counted("full-02.safetensors", "macs").unwrap().contains("expected 1"));
    assert!(counted("models/lra-ls-00.safetensors", "parameters").unwrap().contains("expected 1"));
    let at = |error_over_tolerance: f64| {
        let base = verdict("full-02.safetensors", shipped("full-02.safetensors"));
        FileVerdict { error_over_tolerance, ..base }.passed()
    };
    assert!(at(1.0) && !at(1.0 + f64::EPSILON) && !at(f64::NAN));
}

/// The file `name` whose config has other entries.
fn configured(name: &str, entries: &[(&str, Value)], which: impl Fn(&str) -> bool) -> Vec<u8> {
    let bytes = shipped(name);
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let mut config: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap();
    entries.iter().for_each(|(key, value)| config[key] = value.clone());
    changed(bytes, which, &[("config", &config.to_string())])
}

#[test]
fn a_knob_without_effect_is_named_and_neither_passes_nor_fails_in_silence() {
    let folder = tempfile::tempdir().unwrap();
    let quirk = "sinkhorn-lraquirk-01.safetensors";
    let other = [("sort_activation", Value::from("sinkhorn"))];
    let layer = "models/lra-ls-00.safetensors";
    for (name, bytes) in [
        ("effectless", configured(quirk, &other, |_| false)),
        // as from a reference in which the knob did have an effect
        ("expected", configured(quirk, &other, |name| name == "out")),
        ("model", configured(layer, &[("l", Value::from(8))], |_| false)),
        ("plain", shipped("full-02.safetensors").to_vec()),
    ] {
        std::fs::write(folder.path().join(format!("{name}.safetensors")), bytes).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_effattn"))
        .args(["check", "-v", "--golden", ".", "--export-json", "out.json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("knobs that files set without effect: sinkhorn (iters"), "{told}");
    assert!(told.contains("sort_activation=sinkhorn has no effect with compat=lra"), "{told}");
    let json: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("out.json")).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap().iter();
    let found: Vec<_> = rows.map(|row| (row["variant"].as_str().unwrap(), &row["outcome"])).collect();
    let [ok, failed] = [Value::from("ok"), Value::from("failed")];
    assert_eq!(found, [("effectless", &ok), ("expected", &failed), ("model", &failed), ("plain", &ok)]);
    let error = |at: usize| json["rows"][at]["error"].as_str().unwrap();
    assert!(error(1).contains("sort_activation=sinkhorn has no effect"), "{}", error(1));
    assert!(
        error(2).ends_with("ls: l=8 has no effect outside the causal form; leave it out"),
        "{}",
        error(2)
    );
    let remarks = json["manifest"]["knobs_without_effect"].as_array().unwrap();
    let files: Vec<_> = remarks.iter().map(|remark| &remark["file"]).collect();
    assert_eq!(files, ["effectless", "expected"]);
    let knobs = remarks[0]["knobs"].as_array().unwrap();
    let knob = knobs.iter().find(|idle| idle["knob"] == "sort_activation").unwrap();
    assert_eq!(knob["value"], "sinkhorn");
}
