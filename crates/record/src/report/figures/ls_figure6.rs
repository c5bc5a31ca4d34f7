//! Transformer-LS, Figure 6: how alike the patches of an image are behind every block.

use std::io;

use super::{conditions, in_order};
use crate::report::chart::{Blocks, Chart, blocks};
use crate::{Outcome, Row};

/// Panels: metric and title.
const PANELS: [(&str, &str); 2] =
    [("patch_cosine", "mean |cosine| of patches"), ("patch_cosine_signed", "mean cosine of patches")];

pub fn draw(rows: &[&Row]) -> io::Result<Vec<Chart>> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|row| row.metric.starts_with("patch_cosine") && row.outcome == Outcome::Ok)
        .copied()
        .collect();
    let tasks: Vec<&str> = rows.iter().filter_map(|row| place(row)).map(|(task, _)| task).collect();
    let mut charts = Vec::new();
    for task in in_order(tasks.into_iter()) {
        let here: Vec<&Row> =
            rows.iter().filter(|row| place(row).is_some_and(|(own, _)| own == task)).copied().collect();
        let Some(first) = here.first() else { continue };
        let panels = PANELS.map(|(metric, title)| (title, lines(&here, metric)));
        let subtitle = format!("{task}, {}", conditions(first));
        let title = "How alike image patches are (Transformer-LS, Figure 6)";
        charts.push(blocks(&format!("ls-figure6-{task}"), (title, &subtitle), &panels)?);
    }
    Ok(charts)
}

/// Images and block of a row.
fn place(row: &Row) -> Option<(&str, usize)> {
    let (task, block) = row.task.as_deref()?.split_once(" block ")?;
    Some((task, block.parse().ok()?))
}

fn label(row: &Row) -> String {
    format!("{} ({})", row.label(), row.preset.as_deref().unwrap_or_default())
}

/// The last value of every block, a line per model.
fn lines(rows: &[&Row], metric: &str) -> Vec<Blocks> {
    let rows: Vec<&&Row> = rows.iter().filter(|row| row.metric == metric).collect();
    let labels: Vec<String> = rows.iter().map(|row| label(row)).collect();
    let line = |name: String| {
        let mut values = Vec::new();
        for row in rows.iter().filter(|row| label(row) == name) {
            let (Some((_, block)), Some(value)) = (place(row), row.value) else { continue };
            if block == 0 || block > 1000 {
                continue;
            }
            if values.len() < block {
                values.resize(block, f64::NAN);
            }
            values[block - 1] = value;
        }
        Blocks { label: name, values }
    };
    in_order(labels.iter().map(String::as_str)).into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_per_model_over_its_blocks() {
        let row = |model: &str, block: usize, metric: &str, value: f64| Row {
            task: Some(format!("cifar10 block {block:02}")),
            preset: Some("cvt-small".to_owned()),
            ..Row::new("vision", model).with(metric, "1", Some(value)).with_outcome(Outcome::Ok, None)
        };
        let mut rows = Vec::new();
        for (model, shift) in [("full", 0.5), ("ls2d", 0.2)] {
            for block in 1..=3 {
                for (metric, _) in PANELS {
                    rows.push(row(model, block, metric, shift + 0.1 * block as f64));
                }
            }
        }
        let rows: Vec<&Row> = rows.iter().collect();
        let charts = draw(&rows).unwrap();
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].name, "ls-figure6-cifar10");
        assert!(
            charts[0].csv.contains("mean |cosine| of patches,ls2d (cvt-small),3,0.5"),
            "{}",
            charts[0].csv
        );
        assert!(draw(&[]).unwrap().is_empty());
    }
}
