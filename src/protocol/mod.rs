//! The paper protocols and the conformance check.

pub mod check;
