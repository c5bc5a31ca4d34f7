//! The hidden command that computes: see [`crate::run::worker`].

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::protocol;
use crate::run::BUILD;
use crate::run::worker::ParentLink;
use effattn_kernel::device::threads;
use effattn_record::file;

#[derive(clap::Args)]
pub struct Args {
    /// The bytes that models read; the built-in documents without
    #[arg(long)]
    text: Option<PathBuf>,
    /// The build of the parent; any other refuses to work for it
    #[arg(long)]
    build: String,
}

pub fn run(args: &Args) -> Result<u8> {
    ensure!(args.build == BUILD, "this worker is build {BUILD}, its run was started by build {}", args.build);
    let link = ParentLink::open(|| std::process::exit(0));
    let text = match &args.text {
        Some(path) => file::read(path).with_context(|| path.display().to_string())?,
        None => protocol::measuring::input_text::embedded().bytes,
    };
    threads::inside(move || protocol::work(&link, &text))?;
    Ok(0)
}
