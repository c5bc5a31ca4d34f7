//! Training: schedules, the optimizer, one step.

pub mod optim;
pub mod schedule;
pub mod step;
