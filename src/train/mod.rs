//! Training: schedules, the optimizer, one step, data order, checkpoints, starts from stored weights.

pub mod checkpoint;
pub mod optim;
pub mod order;
pub mod pretrained;
pub mod schedule;
pub mod step;
#[cfg(test)]
mod tests;
pub mod training_loop;
pub mod warm_start;
