//! From which length on a mechanism needs less time or memory than full attention, by measurement.

use std::io;

use super::chart::{Chart, Crossing, DotPanel, Quantity, dots, grouped};
use super::place;
use super::ranking::USUAL;
use super::ratio::{Ratio, Standing};
use super::table::Table;
use crate::{Outcome, Row};

/// The crossing of the ratios to full attention, by growing length, below 1; `survived` is the first length that the mechanism ran and
/// full attention did not. It lies where the 95 % interval leaves 1, and the ratio by more than 2 %; between measured lengths
/// along a straight line on logarithmic axes. `None` without a ratio.
fn crossing(ratios: &[(f64, Ratio)], survived: Option<f64>) -> Option<Crossing> {
    let bounds: Vec<(f64, f64)> = ratios.iter().map(|(len, ratio)| (*len, ratio.upper().ln())).collect();
    let (first, last) = (bounds.first()?.0, bounds.last()?.0);
    let standing = |wanted: Standing| ratios.iter().filter(|(_, ratio)| ratio.standing() == wanted).count();
    Some(match bounds.iter().rposition(|(_, bound)| *bound >= 0.0) {
        None => Crossing::Always(first),
        Some(index) if index + 1 < bounds.len() => {
            let ((x0, b0), (x1, b1)) = (bounds[index], bounds[index + 1]);
            let part = b0 / (b0 - b1);
            Crossing::From((x0.ln() + part * (x1.ln() - x0.ln())).exp().clamp(x0, x1))
        }
        Some(_) => match survived {
            Some(len) => Crossing::From(len),
            None if standing(Standing::Same) == ratios.len() => Crossing::Same(last),
            None if standing(Standing::Less) > 0 => Crossing::Partly(last),
            None => Crossing::Never(last),
        },
    })
}

/// The crossings in each panel that has full attention and at least two lengths.
fn panels(rows: &[Row]) -> Vec<DotPanel> {
    let mut all: Vec<DotPanel> = Vec::new();
    for quantity in Quantity::CHARTS {
        let picked = quantity.rows(rows);
        let (common, groups) = grouped(&picked.iter().collect::<Vec<_>>());
        for (title, group) in groups {
            let title = if title.is_empty() { common.clone() } else { title };
            let new = || DotPanel { title: title.clone(), rows: Vec::new() };
            let found = crossings(&group, quantity);
            if !found.is_empty() {
                add(place(&mut all, |known| known.title == title, new), found, quantity);
            }
        }
    }
    all
}

/// The crossing of every mechanism of `group`, whose rows were measured alike.
fn crossings(group: &[&Row], quantity: Quantity) -> Vec<(String, Crossing)> {
    let is_full = |row: &&&Row| USUAL.contains(&row.label().as_str());
    let full: Vec<&Row> = group.iter().filter(is_full).copied().collect();
    let ok = |row: &Row| row.outcome == Outcome::Ok && quantity.value(row).is_some();
    if full.iter().filter(|row| ok(row)).count() < 2 {
        return Vec::new();
    }
    let mut labels: Vec<String> = Vec::new();
    for row in group.iter().filter(|row| !is_full(row)) {
        if !labels.contains(&row.label()) {
            labels.push(row.label());
        }
    }
    let found = labels.into_iter().filter_map(|label| {
        let own = || group.iter().filter(|row| row.label() == label && ok(row));
        let beside = |row: &Row| full.iter().find(|full| full.len == row.len).copied();
        let mut ratios: Vec<(f64, Ratio)> = own()
            .filter_map(|row| {
                let full = beside(row).filter(|full| ok(full))?;
                Some((row.len? as f64, quantity.ratio(row, full)?))
            })
            .collect();
        ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
        // where full attention ran out and the mechanism did not, the mechanism is below it
        let gone = |row: &&&Row| {
            let out =
                |full: &&Row| matches!(full.outcome, Outcome::Oom | Outcome::Timeout) && full.len <= row.len;
            full.iter().any(out)
        };
        let survived = own().filter(gone).filter_map(|row| row.len).min().map(|len| len as f64);
        Some((label, crossing(&ratios, survived)?))
    });
    found.collect()
}

fn add(dots: &mut DotPanel, found: Vec<(String, Crossing)>, quantity: Quantity) {
    for (label, crossing) in found {
        let row = place(&mut dots.rows, |row| row.0 == label, || (label.clone(), None, None));
        if quantity == Quantity::Memory { row.2 = Some(crossing) } else { row.1 = Some(crossing) }
    }
}

const TITLE: &str = "Crossover length against full attention";
/// What counts as one.
const RULE: &str =
    "where the 95 % interval of the ratio to full attention leaves 1, and the ratio by more than 2 %";

/// The chart `<prefix>-crossing` of the rows of one run; nothing without full attention at two lengths.
pub fn chart(rows: &[Row], prefix: &str) -> io::Result<Option<Chart>> {
    let panels = panels(rows);
    if panels.is_empty() {
        return Ok(None);
    }
    dots(&format!("{prefix}-crossing"), (TITLE, RULE), &panels).map(Some)
}

/// The crossings as a table; nothing without full attention at two lengths.
pub fn table(rows: &[Row]) -> Option<Table> {
    let panels = panels(rows);
    let text = |crossing: Option<Crossing>| crossing.map_or_else(String::new, Crossing::text);
    let lines = panels.iter().flat_map(|panel| {
        panel
            .rows
            .iter()
            .map(|(label, time, memory)| vec![label.clone(), panel.title.clone(), text(*time), text(*memory)])
    });
    let lines: Vec<Vec<String>> = lines.collect();
    (!lines.is_empty()).then(|| Table {
        title: TITLE.to_owned(),
        columns: ["model", "measured", "time", "memory"].map(str::to_owned).to_vec(),
        numbers: 2,
        rows: lines,
        notes: vec![format!("{RULE}; between measured lengths along straight lines on logarithmic axes. ≤: already at the shortest.")],
        ..Table::default()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Pass;
    use crate::stats::Interval;

    fn exact(values: &[(f64, f64)]) -> Vec<(f64, Ratio)> {
        values.iter().map(|&(len, value)| (len, Ratio { value, interval: None })).collect()
    }

    #[test]
    fn crossings_are_found_between_lengths() {
        let steady = exact(&[(512.0, 2.0), (1024.0, 0.5), (2048.0, 0.125)]);
        let Some(Crossing::From(len)) = crossing(&steady, None) else { panic!("no crossing") };
        assert!((513.0..1024.0).contains(&len), "{len}");
        assert_eq!(crossing(&exact(&[(512.0, 0.5), (1024.0, 0.1)]), None), Some(Crossing::Always(512.0)));
        let slow = exact(&[(512.0, 3.0), (1024.0, 2.0)]);
        assert_eq!(crossing(&slow, None), Some(Crossing::Never(1024.0)));
        assert_eq!(crossing(&slow, Some(2048.0)), Some(Crossing::From(2048.0)));
        assert_eq!(crossing(&[], None), None);
    }

    #[test]
    fn ties_and_noise_cross_nothing() {
        let tie = exact(&[(256.0, 1.0 - 544.0 / 18.8e6), (512.0, 1.001)]);
        assert_eq!(crossing(&tie, None), Some(Crossing::Same(512.0)));
        let noisy = [(256.0, 1.2, (1.1, 1.3)), (517.0, 0.9, (0.7, 1.3))];
        let noisy: Vec<(f64, Ratio)> = (noisy.iter())
            .map(|&(len, value, (low, high))| (len, Ratio { value, interval: Some(Interval { low, high }) }))
            .collect();
        assert_eq!(crossing(&noisy, None), Some(Crossing::Never(517.0)));
        assert_eq!(crossing(&exact(&[(1.0, 0.5), (2.0, 1.0)]), None), Some(Crossing::Partly(2.0)));
    }

    #[test]
    fn rows_of_full_attention_that_ran_out_count() {
        let row = |model: &str, len: u64, seconds: Option<f64>| {
            let row = Row { len: Some(len), pass: Some(Pass::Train), ..Row::new("speed", model) };
            let outcome = if seconds.is_some() { Outcome::Ok } else { Outcome::Oom };
            row.with("step_time", "s", seconds).with_outcome(outcome, None)
        };
        let mut rows = Vec::new();
        for (len, full, ls) in [(512, Some(1.0), 1.5), (1024, Some(4.0), 4.5), (2048, None, 9.0)] {
            rows.extend([row("full", len, full), row("ls", len, Some(ls))]);
        }
        let table = table(&rows).unwrap();
        assert_eq!(
            table.rows,
            [["ls", "training · cpu · f32 · fused", "2048", ""]].map(|row| row.map(str::to_owned))
        );
        rows.retain(|row| row.len == Some(512));
        assert!(super::table(&rows).is_none(), "one length");
    }

    proptest! {
        /// What is said holds at every measured length, and uncertainty never makes a crossing earlier.
        #[test]
        fn a_crossing_holds_from_there_on(
            values in prop::collection::vec((0.3f64..3.0, 0.0f64..0.4), 1..7),
            more in 0.0f64..0.5,
        ) {
            let at = |more: f64| -> Vec<(f64, Ratio)> {
                let ratio = |(value, half): (f64, f64)| Ratio {
                    value,
                    interval: Some(Interval { low: value / (1.0 + half + more), high: value * (1.0 + half + more) }),
                };
                values.iter().zip(8..).map(|(value, power)| (2f64.powi(power), ratio(*value))).collect()
            };
            let ratios = at(0.0);
            let less = |from: f64| {
                ratios.iter().filter(|(len, _)| *len >= from).all(|(_, ratio)| ratio.standing() == Standing::Less)
            };
            let (first, last) = (ratios[0].0, ratios[ratios.len() - 1].0);
            let found = crossing(&ratios, None).unwrap();
            match found {
                Crossing::Always(len) => prop_assert!(len == first && less(first)),
                Crossing::From(len) => {
                    prop_assert!((first..=last).contains(&len) && less(len * (1.0 + 1e-9)));
                    let before = ratios.iter().rfind(|(known, _)| *known <= len * (1.0 + 1e-9)).unwrap();
                    prop_assert!(before.0 >= len * (1.0 - 1e-9) || before.1.standing() != Standing::Less);
                }
                Crossing::Same(len) => {
                    prop_assert!(len == last && ratios.iter().all(|(_, ratio)| ratio.standing() == Standing::Same));
                }
                Crossing::Partly(len) | Crossing::Never(len) => prop_assert!(len == last && !less(last)),
            }
            let place = |found: Crossing| match found {
                Crossing::Always(len) | Crossing::From(len) => len,
                Crossing::Same(_) | Crossing::Partly(_) | Crossing::Never(_) => f64::INFINITY,
            };
            prop_assert!(place(crossing(&at(more), None).unwrap()) >= place(found) * (1.0 - 1e-9));
        }
    }
}
