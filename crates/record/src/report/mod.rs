//! Tables and charts from rows. Reads only the leaves, so that a report needs no device.

pub mod chart;
pub mod compare;
pub mod crossing;
pub mod document;
pub mod figures;
pub mod html;
pub mod labels;
pub mod markdown;
pub mod marked_numbers;
pub mod paper;
pub mod profile;
pub mod published;
pub mod ranking;
pub mod reference;
pub mod robustness;
pub mod table;
pub mod trained;
pub mod training_time;
pub mod wrap;

use std::io;

use crate::Row;
use chart::{Chart, Quantity, growth};
use reference::Reference;

/// The charts of one run of `speed` or `memory`: time and memory against length, where mechanisms become cheaper than
/// full attention, how many times as fast as `references` they are, and where the time of a step goes.
pub fn measured(rows: &[Row], references: &[Reference], prefix: &str) -> io::Result<Vec<Chart>> {
    let mut charts = Vec::new();
    for quantity in Quantity::CHARTS {
        charts.extend(growth(rows, quantity, prefix)?);
    }
    charts.extend(crossing::chart(rows, prefix)?);
    charts.extend(reference::chart(rows, references, prefix)?);
    charts.extend(profile::chart(rows, prefix)?);
    Ok(charts)
}

/// The first of `all` that is wanted; a new one at the end if there is none.
fn place<T>(all: &mut Vec<T>, wanted: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
    let index = all.iter().position(wanted).unwrap_or_else(|| {
        all.push(new());
        all.len() - 1
    });
    &mut all[index]
}
