//! The fused CPU kernel: no score matrix, one custom operation with a hand-written backward pass.
//!
//! A pattern is cut into tiles of up to 64 queries ([`plan`]). Within a tile queries are vector lanes and keys are
//! rows ([`tile`]): logits are products of key elements (scalars) with lanes of queries ([`product`]), so keys are
//! read where they lie, maxima and sums run down the lanes, and narrow bands cost one vector per key instead of a
//! square tile. Saved for the backward pass are the output and two numbers per query.

mod arguments;
#[allow(unsafe_code)]
mod backward;
#[allow(unsafe_code)]
mod forward;
mod lanes;
mod op;
#[allow(unsafe_code)]
mod operands;
mod plan;
#[allow(unsafe_code)]
mod product;
mod relative;
mod tile;

pub use op::attend;
