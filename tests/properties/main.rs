//! General properties of every mechanism in the table, in both kernel modes.
//!
//! Variants are made from the entries themselves (`zoo.rs`): every knob value that an entry names is tried.
//! Where a definition breaks a property, the entry says so as data, and the tests check that it really does.

mod dropout;
mod equal;
mod finite;
mod heads;
mod idle;
mod independence;
mod run;
mod zoo;
