//! `effattn fetch`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use super::data_dir;
use crate::config::unknown;
use crate::data::fetch::{ARENA, Fetched, SOURCES, fetch};
use crate::data::listops;
use crate::record::file;
use crate::term::{Talk, Term};

const EXAMPLES: &str = "\
Examples:
  effattn fetch imdb                                   84 MB, checked
  effattn fetch enwik8 --from ~/Downloads/enwik8.zip   what was brought by other means, checked
  effattn fetch listops --format tsv --data-dir data   LRA's own files, 0.6 GB, generated
  effattn list tasks                                   what is there";

/// Names besides those that are downloaded.
const OTHERS: &[&str] = &["listops", "pathfinder", "aan"];

/// How ListOps is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One file of token codes
    Compact,
    /// LRA's own basic_train.tsv, basic_val.tsv, basic_test.tsv
    Tsv,
}

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// imdb, cifar10, enwik8, text8 (downloaded); listops (generated); aan, pathfinder (says how)
    name: String,
    /// Take this file instead of downloading; its checksum must be the published one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// ListOps: how it is written
    #[arg(long, value_enum, default_value = "compact")]
    format: Format,
    /// Folder of data sets; the user's cache folder without
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let source = SOURCES.iter().find(|source| source.name == args.name);
    let Some(source) = source else {
        return other(args, &dir, term);
    };
    if args.format == Format::Tsv {
        bail!("--format tsv is for listops; {} comes as {}", source.name, source.file);
    }
    let bar = ProgressBar::new(source.bytes.unwrap_or(0));
    if term.talk() == Talk::Quiet {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = "{msg} {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_message(source.file);
    let fetched = fetch(source, &dir, args.from.as_deref(), &mut |done, total| {
        bar.set_length(total.unwrap_or(done));
        bar.set_position(done);
    });
    bar.finish_and_clear();
    match fetched? {
        Fetched::There(path) => term.say(&format!("{} is there and whole", path.display())),
        Fetched::Brought(path) => term.say(&format!("{}: whole, checksum as published", path.display())),
    }
    Ok(0)
}

fn other(args: &Args, dir: &std::path::Path, term: &Term) -> Result<u8> {
    match args.name.as_str() {
        "listops" => {
            if args.from.is_some() {
                bail!(
                    "listops is generated; leave --from out, or place LRA's basic_*.tsv in {}",
                    dir.display()
                );
            }
            let place = || format!("--data-dir {} cannot be written", dir.display());
            file::ensure_writable(dir).with_context(place)?;
            let files = match args.format {
                Format::Compact => vec![listops::write_cache(dir).with_context(place)?],
                Format::Tsv => listops::write_splits(dir).with_context(place)?,
            };
            files.iter().for_each(|path| term.say(&format!("{}: generated", path.display())));
            Ok(0)
        }
        "pathfinder" => {
            term.say("Pathfinder is generated image by image when it is trained on: nothing to fetch");
            let folder = "pathfinder32/curv_contour_length_14";
            term.say(&format!("LRA's own images are read where {folder} is in {}", dir.display()));
            Ok(0)
        }
        "aan" => bail!(
            "LRA's pairs are inside {ARENA} (7.7 GB, no published checksum): unpack it and place \
             new_aan_pairs.train.tsv, .eval.tsv and .test.tsv in {}",
            dir.display()
        ),
        name => {
            let known = SOURCES.iter().map(|source| source.name).chain(OTHERS.iter().copied());
            bail!("{}", unknown("data set", name, known))
        }
    }
}
