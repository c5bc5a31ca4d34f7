//! Matrices that `plot attention` and `plot pattern` left below a folder of results, as charts of a report.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::stored_runs::{DEEPEST, StoredRun, or_left_out};
use crate::run::manifest::{Manifest, State};
use effattn_record::matrix;
use effattn_record::report::chart::{self, Shade};
use effattn_record::report::document::{Section, Source};

/// A section for the newest drawing of everything that was drawn below `root`, the oldest first. One that is damaged is named
/// and left out.
pub fn sections(root: &Path) -> Vec<Section> {
    let mut newest: BTreeMap<String, (PathBuf, Manifest)> = BTreeMap::new();
    for (folder, manifest) in drawings(root, 0) {
        let what = format!("{:?} {}", folder.parent(), manifest.settings);
        let age = |manifest: &Manifest| (manifest.order, manifest.start.clone());
        if newest.get(&what).is_none_or(|(_, known)| age(known) < age(&manifest)) {
            newest.insert(what, (folder, manifest));
        }
    }
    let mut all: Vec<(PathBuf, Manifest)> = newest.into_values().collect();
    all.sort_by(|a, b| (&a.1.start, &a.0).cmp(&(&b.1.start, &b.0)));
    let section = |(folder, manifest)| or_left_out(section(folder, manifest, root).map(Some), "this drawing");
    all.into_iter().filter_map(section).collect()
}

/// Finished drawings in `folder` and below. One with a damaged manifest is passed over: who looks for runs names it.
fn drawings(folder: &Path, depth: usize) -> Vec<(PathBuf, Manifest)> {
    if folder.join(matrix::INDEX).is_file() {
        let read = Manifest::read(folder).ok().flatten().filter(|manifest| manifest.state == State::Done);
        return read.map(|manifest| (folder.to_owned(), manifest)).into_iter().collect();
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    // `latest` is a link and passed over
    let folders =
        entries.filter(|entry| depth < DEEPEST && entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.flat_map(|entry| drawings(&entry.path(), depth + 1)).collect()
}

fn section(folder: PathBuf, manifest: Manifest, root: &Path) -> Result<Section> {
    let matrices = matrix::read(&folder).with_context(|| folder.display().to_string())?;
    let name = manifest.command.trim_start_matches("plot ").to_owned();
    let text = |key: &str| manifest.settings[key].as_str().unwrap_or_default().to_owned();
    let (title, subtitle) = (text("title"), text("subtitle"));
    let title = if title.is_empty() { manifest.command.clone() } else { title };
    let shade = if name == "pattern" { Shade::Visible } else { Shade::Weight };
    let chart = chart::matrices(&name, (&title, &subtitle), &matrices, shade)
        .with_context(|| folder.display().to_string())?;
    let files = folder.strip_prefix(root).unwrap_or(&folder).join(matrix::INDEX);
    let run = StoredRun { folder, manifest, rows: Vec::new() };
    let source = Source { rows: files.display().to_string(), ..run.source(root) };
    Ok(Section { title, charts: vec![chart], sources: vec![source], ..Section::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::plan::Plan;
    use effattn_record::matrix::Matrix;
    use serde_json::json;

    #[test]
    fn the_newest_drawing_of_everything_is_in_the_report() {
        let root = tempfile::tempdir().unwrap();
        let put = |id: &str, order: u64, weights: &str, label: &str, state: State| {
            let settings = json!({ "weights": weights, "title": "A title", "subtitle": "rows: queries" });
            let plan = Plan { command: "plot attention".to_owned(), settings, ..Plan::default() };
            let folder = root.path().join("attention").join(id);
            std::fs::create_dir_all(&folder).unwrap();
            let matrix = Matrix {
                label: label.to_owned(),
                tokens: vec!["[MAX".to_owned()],
                queries: 1,
                keys: 1,
                values: vec![1.0],
                ..Matrix::default()
            };
            matrix::write(&folder, &[matrix]).unwrap();
            Manifest { state, order, ..Manifest::new(&plan, id) }.write(&folder).unwrap();
        };
        put("1", 1, "a", "older", State::Done);
        put("2", 2, "a", "newer", State::Done);
        put("3", 3, "b", "another", State::Done);
        put("4", 4, "b", "unfinished", State::Unfinished);
        put("5", 5, "c", "damaged", State::Done);
        std::fs::write(root.path().join("attention/5/01-damaged.csv"), "no numbers").unwrap();
        let all = sections(root.path());
        let svgs: Vec<&str> = all.iter().map(|section| section.charts[0].svg.as_str()).collect();
        assert_eq!(svgs.len(), 2);
        let named =
            |label: &str| svgs.iter().filter(|svg| svg.contains(&format!("data-name=\"{label}\""))).count();
        let labels = ["older", "newer", "another", "unfinished", "damaged"];
        assert_eq!(labels.map(named), [0, 1, 1, 0, 0]);
        assert!(all.iter().all(|section| section.title == "A title"));
        assert!(
            svgs[0].contains("[MAX") && all[0].sources[0].rows.ends_with("matrices.json"),
            "{:?}",
            all[0].sources
        );
    }
}
