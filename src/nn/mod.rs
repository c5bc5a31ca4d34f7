//! Named parameters, initialisation, positions and projections; knows no mechanism by name.

pub mod params;
