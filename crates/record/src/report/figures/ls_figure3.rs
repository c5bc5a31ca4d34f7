//! Transformer-LS, Figure 3: time and memory of a training step against length; dashed is full attention, solid
//! Transformer-LS, a colour per batch size.

use std::io;

use super::conditions;
use crate::config::suite::Suite;
use crate::report::chart::{Chart, Figure, Measured, Missing, Panel, Series, SeriesStyle, Unit};
use crate::report::ratio::Ratio;
use crate::{Outcome, Row};

const SUITE: &str = "ls-figure3";

pub fn draw(all: &[&Row]) -> io::Result<Vec<Chart>> {
    let rows: Vec<&Row> = all
        .iter()
        .filter(|row| row.suite.as_deref() == Some(SUITE) && row.metric == "step_time" && row.len.is_some())
        .copied()
        .collect();
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let subtitle =
        format!("{}; dashed: full attention", conditions(&Row { batch: None, ..(*first).clone() }));
    let said = [reach(all), stored(&rows)].into_iter().flatten().map(|words| format!("; {words}"));
    let beside = subtitle.clone() + &said.collect::<String>();
    let chart = |name: &str, (title, subtitle): (&str, &str), unit: Unit, value: fn(&Row) -> Option<f64>| {
        let panels = ["composed", "fused"].into_iter().map(|kernel| panel(&rows, kernel, value));
        let panels = panels.filter(|panel| !panel.series.is_empty()).collect();
        Figure { title: title.to_owned(), subtitle: subtitle.to_owned(), unit, panels }.chart(name)
    };
    Ok(vec![
        chart("ls-figure3-time", ("Time of a training step", &subtitle), Unit::Seconds, |row| row.value)?,
        chart("ls-figure3-memory", ("Peak memory of a training step", &beside), Unit::Bytes, |row| {
            row.peak_bytes.map(|bytes| bytes as f64)
        })?,
    ])
}

/// How much longer a sequence fits the same memory here, and what the source says of it.
fn reach(rows: &[&Row]) -> Option<String> {
    let longest = |model: &str| {
        let fits =
            |row: &&&Row| row.metric == "longest_length" && row.model == model && row.kernel == "composed";
        let found = |row: &&&Row| row.outcome == Outcome::Ok && row.error.is_none();
        rows.iter().filter(fits).filter(found).find_map(|row| row.value)
    };
    let times = longest("ls")? / longest("transformer-xl").filter(|len| *len > 0.0)?;
    let suite = Suite::load(SUITE).ok()?;
    let published = suite.source.split_once("text: ").map_or("", |(_, text)| text);
    Some(format!("here {times:.2} times as long (composed kernels), published: {published}"))
}

/// What `ls` needs of the memory of full attention where that stores no scores, at the longest length of both.
fn stored(rows: &[&Row]) -> Option<String> {
    let fused = || rows.iter().filter(|row| row.kernel == "fused" && row.outcome == Outcome::Ok);
    let of = |model: &'static str| fused().filter(move |row| row.model == model);
    let pairs = of("ls").filter_map(|ls| {
        let full = of("transformer-xl").find(|full| (full.len, full.batch) == (ls.len, ls.batch))?;
        Some((ls.len?, Ratio::exact(ls.peak_bytes? as f64, full.peak_bytes? as f64)?))
    });
    let (len, ratio) = pairs.max_by_key(|(len, _)| *len)?;
    let text = ratio.text();
    Some(format!("fused kernels: full attention stores no scores, ls needs {text} times its memory at {len}"))
}

fn panel(rows: &[&Row], kernel: &str, value: fn(&Row) -> Option<f64>) -> Panel {
    let rows: Vec<&&Row> = rows.iter().filter(|row| row.kernel == kernel).collect();
    let mut batches: Vec<u64> = rows.iter().filter_map(|row| row.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let stores = if kernel == "fused" {
        "fused, no scores are stored"
    } else {
        "composed, full attention stores its scores"
    };
    let mut panel = Panel { title: format!("Kernels: {stores}"), series: Vec::new() };
    for (index, batch) in batches.iter().enumerate() {
        for model in ["ls", "transformer-xl"] {
            let look = SeriesStyle::of_batch(model, index);
            let mut series = Series { label: format!("{model}, batch {batch}"), look, ..Series::default() };
            for row in rows.iter().filter(|row| row.model == model && row.batch == Some(*batch)) {
                let x = row.len.unwrap_or_default() as f64;
                match value(row).filter(|y| *y > 0.0 && row.outcome == Outcome::Ok) {
                    Some(y) => series.points.push(Measured { x, y, interval: None }),
                    None => series.missing.push(Missing {
                        x,
                        outcome: row.outcome.word().to_owned(),
                        cross: matches!(row.outcome, Outcome::Oom | Outcome::Timeout),
                    }),
                }
            }
            series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
            if !series.points.is_empty() || !series.missing.is_empty() {
                panel.series.push(series);
            }
        }
    }
    panel
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panel_per_kernel_a_colour_per_batch() {
        let row = |model: &str, kernel: &str, batch: u64, len: u64| Row {
            suite: Some("ls-figure3".to_owned()),
            kernel: kernel.to_owned(),
            batch: Some(batch),
            len: Some(len),
            peak_bytes: Some(len * 1000),
            ..Row::new("speed", model)
                .with("step_time", "s", Some(len as f64))
                .with_outcome(Outcome::Ok, None)
        };
        let mut rows = Vec::new();
        for model in ["ls", "transformer-xl"] {
            for kernel in ["fused", "composed"] {
                rows.extend(
                    [(1, 1024), (1, 2048), (2, 1024)].map(|(batch, len)| row(model, kernel, batch, len)),
                );
            }
        }
        rows.push(row("ls", "fused", 2, 2048).with_outcome(Outcome::Oom, Some("limit".to_owned())));
        let rows: Vec<&Row> = rows.iter().collect();
        let looks: Vec<SeriesStyle> =
            panel(&rows, "fused", |row| row.value).series.iter().map(|x| x.look).collect();
        let of = |model, index| SeriesStyle::of_batch(model, index);
        assert_eq!(looks, [of("ls", 0), of("transformer-xl", 0), of("ls", 1), of("transformer-xl", 1)]);
        let charts = draw(&rows).unwrap();
        assert_eq!(charts.len(), 2);
        let crossed = "\"Kernels: fused, no scores are stored\",\"ls, batch 2\",2048,,s,,,oom,";
        assert!(charts[0].csv.contains(crossed), "{}", charts[0].csv);
        assert!(charts[1].svg.contains("ls needs 1.00 times its memory at 2048"), "{}", charts[1].svg);
        assert!(draw(&[]).unwrap().is_empty());
        let fit = |model: &str, len: f64| {
            let row = Row { kernel: "composed".to_owned(), ..Row::new("memory", model) };
            row.with("longest_length", "1", Some(len)).with_outcome(Outcome::Ok, None)
        };
        let (ls, full) = (fit("ls", 3600.0), fit("transformer-xl", 2000.0));
        let said = reach(&[&ls, &full]).unwrap();
        assert!(said.starts_with("here 1.80 times as long") && said.contains("about 3 times"), "{said}");
    }
}
