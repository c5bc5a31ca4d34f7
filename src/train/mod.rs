//! Training: schedules, the optimizer, one step, data order, checkpoints.

pub mod checkpoint;
pub mod optim;
pub mod order;
pub mod schedule;
pub mod session;
pub mod step;
#[cfg(test)]
mod tests;
