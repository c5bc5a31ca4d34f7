//! `charlm`: character language models by the protocol of Transformer-LS Table 4: phases of growing length, a cache
//! carried along contiguous streams, evaluation behind a long cache or in long overlapping windows.

pub mod eval;
pub mod plan;
pub mod recipe;
pub mod reference;
pub mod sample;
pub mod streams;
pub mod work;
