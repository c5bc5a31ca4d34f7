//! `speed`: inference and training steps per second against length (cosFormer Table 5's protocol).
//!
//! Every cell has a worker process of its own. Cells of one (length, batch, pass) take turns
//! ([`turns`]); the value of a row is the median over all steps of the cell.

mod conduct;
pub mod plan;
mod rows;
pub mod turns;
pub mod work;

pub use conduct::{conduct, probe};
