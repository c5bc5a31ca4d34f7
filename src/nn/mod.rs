//! Named parameters, initialisation, positions and projections; knows no mechanism by name.

pub mod dropout;
pub mod embedding;
pub mod ffn;
pub mod head;
pub mod params;
