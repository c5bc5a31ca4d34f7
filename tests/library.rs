//! The tests of the library, in one program: a program less to link is half a minute less to wait.
//!
//! `tests/bf16` (a number format of the whole process) and `tests/fuzz` (an allocator that counts) are programs of their own.

#[path = "audit/main.rs"]
mod audit;
#[path = "recipe/bag.rs"]
mod bag;
mod citations;
mod files;
mod gpu;
#[path = "layers/main.rs"]
mod layers;
#[path = "recipe/mean.rs"]
mod mean;
mod mixers;
#[path = "properties/main.rs"]
mod properties;
mod prose;
#[path = "published/main.rs"]
mod published;
#[path = "recipe/main.rs"]
mod recipe;
mod release;
#[path = "../examples/start.rs"]
mod start;
mod tables;
