//! A mechanism of one's own, in a program of one's own that has every command of `effattn`:
//!
//! ```sh
//! cargo run --release --example own_mechanism -- list mechanisms --model mean
//! cargo run --release --example own_mechanism -- speed --model mean,full --len 256,1024
//! ```
//!
//! In a crate of your own, `mean.rs` lies beside this file.

use std::process::ExitCode;

#[path = "../tests/recipe/mean.rs"]
mod mean;

// Peak memory is counted by the allocator.
#[global_allocator]
static ALLOCATOR: effattn::device::alloc::CountingAllocator = effattn::device::alloc::CountingAllocator;

fn main() -> ExitCode {
    effattn::attention::register(&mean::ENTRY);
    effattn::cli::main()
}
