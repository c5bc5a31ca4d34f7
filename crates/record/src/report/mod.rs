//! Tables and charts from rows. Reads only the leaves, so that a report needs no device.

pub mod chart;
pub mod claims;
pub mod compare;
pub mod crossing;
pub mod document;
pub mod figures;
mod floor;
pub mod html;
pub mod labels;
pub mod markdown;
pub mod marked_numbers;
pub mod paper;
pub mod profile;
pub mod published;
pub mod ranking;
pub mod ratio;
pub mod reference;
pub mod relative;
pub mod resident;
pub mod robustness;
mod seeds;
pub mod spread;
pub mod table;
pub mod trained;
pub mod training_time;
pub mod wrap;

use std::io;

use crate::Row;
use chart::{Chart, Quantity, growth};
use reference::Reference;

/// The charts of one run of `speed` or `memory`: speed relative to full attention, time against length, memory relative to full
/// attention, where mechanisms become cheaper than it, how many times as fast as `references` they are, and where the time of a step goes.
pub fn measured(rows: &[Row], references: &[Reference], prefix: &str) -> io::Result<Vec<Chart>> {
    let mut charts = Vec::new();
    charts.extend(relative::speed(rows, prefix)?);
    charts.extend(growth(rows, Quantity::Time, prefix)?);
    charts.extend(relative::memory(rows, prefix)?);
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
