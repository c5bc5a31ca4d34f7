//! Nothing but dependencies: every feature that some crate of the workspace, a test included, switches on in a shared
//! dependency. `effattn-record`, which all crates import, depends on this one, so that `cargo test -p` of any crate compiles and
//! reuses the same dependencies as `cargo build` and `cargo test` of the whole.
