//! Shards and runs of several machines, joined to one run that is continued, shown and compared as any other.

mod choose;
mod error;
mod source;
mod write;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::CancelToken;
use super::manifest::State;
use super::reuse::differences;
use super::shard::{parent, shards};
use choose::Chosen;
use effattn_record::file;
pub use error::MergeError;
pub use source::{MergeInput, ShardedRun, owners, warn_of_rows_without_manifest};
pub use write::Merged;
use write::write;

/// Joins the runs in `folders`. The shards of one run are joined in their own folder, others in a folder below `output`.
/// `keeps` says whether a command trains, so that the same cell twice is one result.
pub fn merge(
    folders: &[PathBuf],
    output: Option<&Path>,
    keeps: fn(&str) -> bool,
    stop: &CancelToken,
) -> Result<Merged, MergeError> {
    let mut wholes = Vec::new();
    for folder in folders {
        let found = ShardedRun::below(folder)?;
        if found.is_empty() {
            return Err(MergeError::Nothing(folder.clone()));
        }
        wholes.extend(found);
    }
    let first = wholes[0].sources.first().ok_or_else(|| MergeError::Nothing(wholes[0].folder.clone()))?;
    for source in wholes.iter().flat_map(|whole| &whole.sources) {
        same_plan(first, source)?;
    }
    if let Some(source) = wholes.iter().flat_map(|whole| &whole.sources).find(|source| source.lost) {
        return Err(MergeError::NoJournal(source.folder.clone()));
    }
    let target = target(&wholes, output);
    let planned = wholes.iter().find_map(|whole| whole.planned.clone());
    let mut order: Vec<String> = Vec::new();
    let mut known = BTreeSet::new();
    for cell in wholes.iter().flat_map(ShardedRun::cells) {
        if known.insert(cell) {
            order.push(cell.to_owned());
        }
    }
    drop(known);
    if order.is_empty() && planned.is_none() {
        return Err(MergeError::NoCells(wholes[0].folder.clone()));
    }
    let sources: Vec<MergeInput> = wholes.into_iter().flat_map(|whole| whole.sources).collect();
    let chosen = Chosen::of(&order, &sources, keeps(&sources[0].manifest.command))?;
    let mut merged = write(&target, &order, planned.as_ref(), &sources, chosen, stop)?;
    merged.remarks.extend(sources.iter().filter_map(MergeInput::damage));
    let open = |run: &MergeInput| run.shard().is_some() || run.manifest.state != State::Done;
    if planned.is_none() && sources.iter().any(open) {
        merged.remarks.push(
            "there is no plan.json beside these runs, so cells without rows are not known and not counted as missing; \
             the same command without --shard runs them"
                .to_owned(),
        );
    }
    Ok(merged)
}

/// The folder of the merged run: that of the shards, where they lie in one.
fn target(wholes: &[ShardedRun], output: Option<&Path>) -> PathBuf {
    match (wholes, output) {
        ([one], None) if !shards(&one.folder).is_empty() => one.folder.clone(),
        _ => {
            let one = &wholes[0];
            let manifest = one.sources.first().map(|run| &run.manifest);
            // where its command looks for it
            let name = wholes.iter().find_map(|whole| Some(whole.planned.as_ref()?.name.clone()));
            let suite = || wholes.iter().flat_map(|whole| &whole.sources).find_map(MergeInput::suite);
            let name = name.or_else(suite).or_else(|| Some(manifest?.command.clone()));
            let name = file::plain_name(&name.unwrap_or_default());
            let plan = manifest.map(|manifest| match manifest.plan.as_str() {
                "" => file::plain_name(&manifest.identity),
                plan => file::plain_name(plan),
            });
            parent(&output.unwrap_or(Path::new("results")).join(name), &plan.unwrap_or_default())
        }
    }
}

/// Makes sure that two runs are of one plan: the same cells, made by the same build from the same data.
fn same_plan(first: &MergeInput, second: &MergeInput) -> Result<(), MergeError> {
    let (a, b) = (&first.manifest, &second.manifest);
    let mut differ = differences(a, b, false);
    if differ.is_empty() && !a.plan.is_empty() && !b.plan.is_empty() && a.plan != b.plan {
        differ.push("other cells".to_owned());
    }
    if differ.is_empty() {
        return Ok(());
    }
    let (first, second) = (first.folder.clone(), second.folder.clone());
    Err(MergeError::Different { first, second, differ: differ.join(", ") })
}

#[cfg(test)]
mod tests;
