//! Backends, counted memory and seeded random streams; the only home of `cfg(feature)`.

#[allow(unsafe_code)]
pub mod alloc;
pub mod rng;
