//! `lra`: the tasks of the Long Range Arena, trained and evaluated by the protocols of Transformer-LS Table 1 and
//! of the arena's own code (cosFormer Table 4).
//!
//! One worker trains one cell (mechanism, task, seed). It writes its own checkpoints into the folder of the cell; rows
//! and curves are written by the parent.

pub mod floor;
pub mod plan;
pub mod recipe;
pub mod tasks;
pub mod work;
