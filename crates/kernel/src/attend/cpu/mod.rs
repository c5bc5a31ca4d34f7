//! The fused CPU kernel: no score matrix, one custom operation with a hand-written backward pass.
//!
//! A pattern is cut into tiles of up to 64 queries ([`super::tile_plan`]). Within a tile queries are vector lanes and keys are
//! rows ([`super::tile`]): logits are products of key elements (scalars) with lanes of queries ([`product`]), so keys are
//! read where they lie, maxima and sums run down the lanes, and narrow bands cost one vector per key instead of a
//! square tile. Saved for the backward pass are the output and two numbers per query.

pub(super) mod arguments;
#[allow(unsafe_code)]
pub(super) mod backward;
#[allow(unsafe_code)]
pub(super) mod bias;
#[allow(unsafe_code)]
pub(super) mod forward;
mod lanes;
#[allow(unsafe_code)]
pub(super) mod operands;
mod packed;
pub(super) mod problem;
#[allow(unsafe_code)]
pub(super) mod product;
pub(super) mod relative;
