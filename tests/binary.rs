//! The tests that run the real program.

mod campaign;
mod cli;
mod conformance;
#[path = "faults/main.rs"]
mod faults;
#[path = "identity/main.rs"]
mod identity;
mod images;
mod own_data;
mod programs;
mod run;
mod shards;
mod training;
