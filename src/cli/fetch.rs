//! `effattn fetch`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::value_names::NamedValues;
use crate::term::{Term, Verbosity};
use effattn_data::data_dir;
use effattn_data::fetch::{DownloadSource, Fetched, fetch};
use effattn_data::images::test_only::{TestOnlySet, TestSetOrigin as Tested, challenge, challenges};
use effattn_data::images::{folder, write_corrupted};
use effattn_data::{DataSetEntry, Origin, WriteFormat, data_sets};
use effattn_record::config::unknown;
use effattn_record::file;

const EXAMPLES: &str = "\
Examples:
  # 84 MB, with checksum
  effattn fetch imdb
  # A file that you already have, with checksum
  effattn fetch enwik8 --from ~/Downloads/enwik8.zip
  # LRA's own files, 0.6 GB, generated
  effattn fetch listops --format tsv --data-dir data
  # ImageNet-C's 15 corruptions, 5 severities, of any folder <class>/<image>
  effattn fetch imagenet-c --from ~/data/imagenet/val --data-dir ~/data
  # What is already present
  effattn list tasks";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[arg(help = help(), value_parser = NamedValues::new(names, str::parse::<String>), hide_possible_values = true)]
    name: String,
    /// Use this file instead of downloading (its checksum must match the published one), or corrupt the images in
    /// this folder
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
    #[arg(long, value_name = "FORMAT", help = format_help())]
    format: Option<String>,
    /// Folder for data sets [default: effattn's folder in the user's cache]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// What can be asked for.
fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = data_sets().iter().map(|set| set.collection).collect();
    names.dedup();
    names.extend(challenges().iter().map(|challenge| challenge.name));
    names
}

/// `imdb, cifar10 (downloaded); listops (generated); aan (prints instructions)`.
fn help() -> String {
    let of = |fits: fn(&Origin) -> bool, how: &str| {
        let mut names: Vec<&str> =
            data_sets().iter().filter(|set| fits(&set.origin)).map(|set| set.collection).collect();
        names.dedup();
        (!names.is_empty()).then(|| format!("{} ({how})", names.join(", ")))
    };
    let tested = |placed: bool, how: &str| {
        let fits = |challenge: &&'static TestOnlySet| matches!(challenge.origin, Tested::Placed(_)) == placed;
        let names: Vec<&str> =
            challenges().into_iter().filter(fits).map(|challenge| challenge.name).collect();
        Some(format!("{} ({how})", names.join(", ")))
    };
    let parts = [
        of(|origin| matches!(origin, Origin::Download(_)), "downloaded"),
        of(|origin| matches!(origin, Origin::Generated { .. }), "generated"),
        of(|origin| matches!(origin, Origin::UserProvided(_)), "prints instructions"),
        tested(false, "made by corrupting images that you have"),
        tested(true, "prints instructions"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// `How a generated set is written: listops: compact (one file), tsv (LRA's own)`.
fn format_help() -> String {
    let formats = |set: &&DataSetEntry| match set.origin {
        Origin::Generated { formats: formats @ [_, ..], .. } => {
            let formats: Vec<String> =
                formats.iter().map(|format| format!("{} ({})", format.name, format.about)).collect();
            Some(format!("{}: {}", set.collection, formats.join(", ")))
        }
        _ => None,
    };
    let all: Vec<String> = data_sets().iter().filter_map(formats).collect();
    format!("Format of a generated set [default: the first]. {}", all.join("; "))
}

pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let dir = args.data_dir.clone().unwrap_or_else(data_dir::default_dir);
    if let Some(challenge) = challenge(&args.name) {
        if let Some(format) = &args.format {
            bail!("--format {format} is for sets that are generated; {} has one form", args.name);
        }
        return corrupt(challenge, &dir, args, term).map(|()| 0);
    }
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
                let instead =
                    instead.map(|instead| format!(", or place {instead} in {dir}")).unwrap_or_default();
                bail!("{name} is generated; leave --from out{instead}");
            }
            generate(set, (formats, *instead), &dir, args, term)?;
        }
        Origin::UserProvided(how) => bail!("{how} in {}", dir.display()),
        Origin::BuiltIn => term.info(&format!("{} is built in: nothing to fetch", set.title)),
    }
    Ok(0)
}

fn download(source: &DownloadSource, dir: &Path, args: &Args, term: &Term) -> Result<()> {
    let bar = ProgressBar::new(source.bytes.unwrap_or(0));
    if term.verbosity() == Verbosity::Quiet {
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
        Fetched::AlreadyPresent(path) => {
            term.info(&format!("{} is already present and complete", path.display()))
        }
        Fetched::Downloaded(path) => {
            term.info(&format!("{}: complete, and its checksum is the published one", path.display()))
        }
    }
    Ok(())
}

/// Makes a corrupted set of images that are there.
fn corrupt(challenge: &TestOnlySet, dir: &Path, args: &Args, term: &Term) -> Result<()> {
    let to = dir.join(challenge.name);
    let name = challenge.name;
    let from = match challenge.origin {
        Tested::Placed(how) => bail!("{how} in {}", dir.display()),
        Tested::Cifar if args.from.is_some() => {
            bail!("{name} is made of CIFAR-10's test images in --data-dir; leave --from out")
        }
        Tested::Cifar => dir.to_owned(),
        Tested::Folder(below) => match (&args.from, folder::evaluated(&dir.join(below))) {
            (Some(from), _) => from.clone(),
            (None, Some(from)) => from,
            (None, None) => {
                let dir = dir.join(below);
                bail!(
                    "there is no folder val with images in {}; run effattn fetch {name} --from FOLDER, with one folder of images per class",
                    dir.display()
                );
            }
        },
    };
    let bar = ProgressBar::new(0);
    if term.verbosity() == Verbosity::Quiet {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    bar.set_style(ProgressStyle::with_template("{msg} {bar:30} {pos} of {len}, {eta} left")?);
    bar.set_message(name);
    let heard = |done: u64, all: u64| {
        bar.set_length(all);
        bar.inc(done.saturating_sub(bar.position()));
    };
    let made = match challenge.origin {
        Tested::Cifar => write_corrupted::cifar(&from, &to, &heard),
        Tested::Folder(_) | Tested::Placed(_) => {
            write_corrupted::tree(&from, &to, &heard).map(|made| (made, None))
        }
    };
    bar.finish_and_clear();
    let (made, partial) = made?;
    let partial = partial.map_or_else(String::new, |partial| format!("; of {partial}"));
    term.info(&format!("{}: {made} files made, the others already existed{partial}", to.display()));
    term.info("frost is drawn synthetically; the published sets blend in photographs. docs/images.md lists the other differences");
    Ok(())
}

fn generate(
    set: &DataSetEntry,
    (formats, instead): (&[WriteFormat], Option<&str>),
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
        term.info(&format!("{} is generated during training: nothing to fetch", set.title));
        if let Some(instead) = instead {
            term.info(&format!("if {instead} is in {}, it is read instead", dir.display()));
        }
        return Ok(());
    };
    let place = || format!("--data-dir {} cannot be written", dir.display());
    file::ensure_writable(dir).with_context(place)?;
    for path in (format.write)(set, dir).with_context(place)? {
        term.info(&format!("{}: generated", path.display()));
    }
    Ok(())
}
