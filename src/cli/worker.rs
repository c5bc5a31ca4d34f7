//! The hidden command that computes: see [`crate::run::worker`].

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::device::threads;
use crate::protocol;
use crate::run::worker::Link;

#[derive(clap::Args)]
pub struct Args {
    /// The bytes that models read; the built-in documents without
    #[arg(long)]
    text: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<u8> {
    let link = Link::open(|| std::process::exit(0));
    let text = match &args.text {
        Some(path) => std::fs::read(path).with_context(|| path.display().to_string())?,
        None => protocol::text::embedded().bytes,
    };
    threads::inside(move || protocol::work(&link, &text))?;
    Ok(0)
}
