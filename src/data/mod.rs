//! Tasks and corpora: one file each.

pub mod listops;
