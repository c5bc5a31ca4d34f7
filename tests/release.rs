//! `cargo binstall` finds what the release workflow attaches, as soon as `Cargo.toml` names the repository.

use std::fs;
use std::path::Path;

/// The archives of the workflow: target and ending.
fn archives(workflow: &str) -> Vec<(String, String)> {
    let value = |line: &str, key: &str| -> Option<String> {
        Some(line.split(&format!("{key}: ")).nth(1)?.split([',', ' ']).next()?.to_owned())
    };
    let lines = workflow.lines().filter(|line| line.trim_start().starts_with("- { os: "));
    lines.filter_map(|line| Some((value(line, "target")?, value(line, "archive")?))).collect()
}

#[test]
fn an_archive_of_every_target_is_where_binstall_looks_for_it() {
    let read = |name: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let package = manifest["package"].as_table().unwrap();
    let version = manifest["workspace"]["package"]["version"].as_str().unwrap();
    let binstall = package["metadata"]["binstall"].as_table().unwrap();
    let workflow = read(".github/workflows/release.yml");
    let found = archives(&workflow);
    assert_eq!(found.len(), workflow.matches("- { os: ").count());
    // one with CUDA is no target of rustc, and is unpacked by hand
    for (target, ending) in found.iter().filter(|(target, _)| !target.ends_with("-cuda")) {
        let own = binstall["overrides"].get(target).and_then(|own| own.as_table());
        let text = |key: &str| own.and_then(|own| own.get(key)).unwrap_or(&binstall[key]).as_str().unwrap();
        let format = if ending == "zip" { "zip" } else { "tgz" };
        assert_eq!(text("pkg-fmt"), format, "{target}");
        let url = text("pkg-url").replace("{ version }", version).replace("{ target }", target);
        assert_eq!(url, format!("{{ repo }}/releases/download/v{version}/effattn-{target}.{ending}"));
    }
    // the program lies beside the licences, in no folder
    assert!(workflow.contains("cd dist\n") && binstall["bin-dir"].as_str() == Some("{ bin }{ binary-ext }"));
    if let Some(repository) = package.get("repository") {
        let address = repository.as_str().unwrap_or_default();
        assert!(address.starts_with("https://") && !address.ends_with('/'), "{address}");
    }
}
