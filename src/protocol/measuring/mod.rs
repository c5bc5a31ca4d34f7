//! What `speed` and `memory` measure: a step of a model of any family, computed in a worker or by another program. The model
//! and its step, requests and cells, and the start of a worker are the same for both; what differs stands in their folders.

pub mod first_step;
pub mod input_text;
mod memory;
mod plan;
mod program;
mod speed;
pub mod step;
mod worker;

pub(crate) use memory::Memory;
pub(crate) use program::{described, with_programs};
pub(crate) use speed::{Speed, measure_rate};
