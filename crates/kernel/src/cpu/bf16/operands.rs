//! The factors and the result of a product of packed pairs.
//!
//! A *pair* is two bf16 that follow each other in the summed dimension, the first in the low half.

/// Elements of a vector; rows of the right factor are padded to multiples of it.
pub const LANES: usize = 16;

/// The left factor: pair (i, k) is `data[i * row + k * step]`.
#[derive(Clone, Copy)]
pub struct Left<'a> {
    pub data: &'a [u32],
    pub row: usize,
    pub step: usize,
}

/// The right factor: pair (k, j) is `data[k * row + j]`.
#[derive(Clone, Copy)]
pub struct Right<'a> {
    pub data: &'a [u32],
    pub row: usize,
}

/// The result: element (i, j) is `data[i * row + j]`; it becomes alpha a b + beta c, or alpha a b without `beta`.
pub struct BlockOut<'a> {
    pub data: &'a mut [f32],
    pub row: usize,
    pub alpha: f32,
    pub beta: Option<f32>,
}
