//! Tables and charts from rows. Reads only the leaves, so that a report needs no device.

pub mod chart;
pub mod compare;
pub mod document;
pub mod markdown;
pub mod published;
pub mod reference;
pub mod table;
pub mod trained;
