//! The first screen of a report: what was run, and on what.

use std::collections::{BTreeMap, BTreeSet};

use super::stored_runs::StoredRun;
use effattn_record::text::plural;

/// Words with what there is to say about `runs`: how many of which command, on which processors, with which builds, when.
pub fn overview(runs: &[&StoredRun]) -> Vec<(String, String)> {
    let mut commands: BTreeMap<&str, usize> = BTreeMap::new();
    runs.iter().for_each(|run| *commands.entry(&run.manifest.command).or_default() += 1);
    let rows = runs.iter().map(|run| run.rows.len() as u64).sum();
    let list: Vec<String> = commands.iter().map(|(command, count)| format!("{count} {command}")).collect();
    let distinct = |of: &dyn Fn(&StoredRun) -> String| {
        let all: BTreeSet<String> = runs.iter().copied().map(of).filter(|text| !text.is_empty()).collect();
        all.into_iter().collect::<Vec<_>>()
    };
    let processors = distinct(&|run| run.manifest.machine["cpu"].as_str().unwrap_or_default().to_owned());
    let devices = distinct(&|run| run.manifest.device.clone());
    let threads = distinct(&|run| plural(run.manifest.threads, "thread"));
    let commits = distinct(&|run| run.manifest.commit.clone().unwrap_or_default());
    let days = distinct(&|run| run.manifest.start.get(..10).unwrap_or_default().to_owned());
    let when = match &days[..] {
        [first, .., last] => format!(", {first} to {last}"),
        [day] => format!(", {day}"),
        [] => String::new(),
    };
    let builds = match commits.len() as u64 {
        0 => String::new(),
        1 => format!("; commit {}", commits[0]),
        count => format!("; builds of {}", plural(count, "commit")),
    };
    vec![
        (
            "what was run".to_owned(),
            format!(
                "{} ({}) with {}{when}",
                plural(runs.len() as u64, "run"),
                list.join(", "),
                plural(rows, "row")
            ),
        ),
        (
            "on what".to_owned(),
            format!("{}; {}; {}{builds}", processors.join(", "), devices.join(", "), threads.join(" or ")),
        ),
    ]
}
