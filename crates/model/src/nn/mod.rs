//! Named parameters, initialisation, positions and projections; knows no mechanism by name.

pub mod adaptive;
pub mod conv;
pub mod dropout;
pub mod embedding;
pub mod ffn;
pub mod head;
pub mod norm;
pub mod params;
pub mod position_reader;
pub mod short_conv;
