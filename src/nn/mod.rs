//! Named parameters, initialisation, positions and projections; knows no mechanism by name.

pub mod adaptive;
pub mod conv;
pub mod dropout;
pub mod embedding;
pub mod ffn;
pub mod head;
pub mod norm;
pub mod params;

/// The id of padding in fairseq's vocabularies: words of the word language model and of RoBERTa.
pub const PADDING: u32 = 1;
