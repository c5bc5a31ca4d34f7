//! The `effattn` binary: hands the command line to the library and exits with its code.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: effattn::device::alloc::CountingAllocator = effattn::device::alloc::CountingAllocator;

fn main() -> ExitCode {
    effattn::cli::main()
}
