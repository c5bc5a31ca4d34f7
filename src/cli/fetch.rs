//! `effattn fetch`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::data_dir;
use super::known::Known;
use crate::config::unknown;
use crate::data::fetch::{Fetched, Source, fetch};
use crate::data::{DataSet, Format, Origin, data_sets};
use crate::record::file;
use crate::term::{Talk, Term};

const EXAMPLES: &str = "\
Examples:
  # 84 MB, with checksum
  effattn fetch imdb
  # A file that you already have, with checksum
  effattn fetch enwik8 --from ~/Downloads/enwik8.zip
  # LRA's own files, 0.6 GB, generated
  effattn fetch listops --format tsv --data-dir data
  # What is there
  effattn list tasks";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[arg(help = help(), value_parser = Known::new(names, str::parse::<String>), hide_possible_values = true)]
    name: String,
    /// Take this file instead of downloading; its checksum must be the published one
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    #[arg(long, value_name = "FORMAT", help = format_help())]
    format: Option<String>,
    /// Folder of data sets; the user's cache folder without
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// What can be asked for.
fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = data_sets().iter().map(|set| set.collection).collect();
    names.dedup();
    names
}

/// `imdb, cifar10 (downloaded); listops (generated); aan (says how)`.
fn help() -> String {
    let of = |fits: fn(&Origin) -> bool, how: &str| {
        let mut names: Vec<&str> =
            data_sets().iter().filter(|set| fits(&set.origin)).map(|set| set.collection).collect();
        names.dedup();
        (!names.is_empty()).then(|| format!("{} ({how})", names.join(", ")))
    };
    let parts = [
        of(|origin| matches!(origin, Origin::Download(_)), "downloaded"),
        of(|origin| matches!(origin, Origin::Generated { .. }), "generated"),
        of(|origin| matches!(origin, Origin::Placed(_)), "says how"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// `How a generated set is written: listops: compact (one file), tsv (LRA's own)`.
fn format_help() -> String {
    let formats = |set: &&DataSet| match set.origin {
        Origin::Generated { formats: formats @ [_, ..], .. } => {
            let formats: Vec<String> =
                formats.iter().map(|format| format!("{} ({})", format.name, format.about)).collect();
            Some(format!("{}: {}", set.collection, formats.join(", ")))
        }
        _ => None,
    };
    let all: Vec<String> = data_sets().iter().filter_map(formats).collect();
    format!("How a generated set is written; the first without. {}", all.join("; "))
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    let sets = data_sets();
    let set = sets.iter().find(|set| [set.collection, set.name].contains(&args.name.as_str()));
    let Some(set) = set else { bail!("{}", unknown("data set", &args.name, names())) };
    if let (Some(format), false) = (&args.format, matches!(set.origin, Origin::Generated { .. })) {
        bail!("--format {format} is for sets that are generated; {} is not", set.collection);
    }
    match &set.origin {
        Origin::Download(source) => download(source, &dir, args, term)?,
        Origin::Generated { formats, instead } => {
            if args.from.is_some() {
                let (name, dir) = (set.collection, dir.display());
                bail!("{name} is generated; leave --from out, or place {instead} in {dir}");
            }
            generate(set, (formats, instead), &dir, args, term)?;
        }
        Origin::Placed(how) => bail!("{how} in {}", dir.display()),
        Origin::Embedded => term.say(&format!("{} is part of the program: nothing to fetch", set.title)),
    }
    Ok(0)
}

fn download(source: &Source, dir: &Path, args: &Args, term: &Term) -> Result<()> {
    let bar = ProgressBar::new(source.bytes.unwrap_or(0));
    if term.talk() == Talk::Quiet {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let style = "{msg} {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_message(source.file);
    let fetched = fetch(source, dir, args.from.as_deref(), &mut |done, total| {
        bar.set_length(total.unwrap_or(done));
        bar.set_position(done);
    });
    bar.finish_and_clear();
    match fetched? {
        Fetched::There(path) => term.say(&format!("{} is there and whole", path.display())),
        Fetched::Brought(path) => term.say(&format!("{}: whole, checksum as published", path.display())),
    }
    Ok(())
}

fn generate(
    set: &DataSet,
    (formats, instead): (&[Format], &str),
    dir: &Path,
    args: &Args,
    term: &Term,
) -> Result<()> {
    let format = match &args.format {
        Some(name) => match formats.iter().find(|format| format.name == name) {
            Some(format) => Some(format),
            None => bail!("{}", unknown("format", name, formats.iter().map(|format| format.name))),
        },
        None => formats.first(),
    };
    let Some(format) = format else {
        term.say(&format!("{} is generated when it is trained on: nothing to fetch", set.title));
        term.say(&format!("{instead} is read where it is in {}", dir.display()));
        return Ok(());
    };
    let place = || format!("--data-dir {} cannot be written", dir.display());
    file::ensure_writable(dir).with_context(place)?;
    for path in (format.write)(dir).with_context(place)? {
        term.say(&format!("{}: generated", path.display()));
    }
    Ok(())
}
