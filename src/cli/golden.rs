//! `effattn golden`: a golden file of our own definition.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::protocol::check::own_case::{CaseSizes, OwnCase, OwnFile};
use crate::term::Term;
use effattn_model::attention::choose::choose;
use effattn_record::config::lists::Models;
use effattn_record::config::units::Bytes;
use effattn_record::file;

const EXAMPLES: &str = "\
Examples:
  # Inputs, weights, outputs and gradients of causal gated linear attention
  effattn golden --model gla --case causal -o case.safetensors
  # Another shape, with padding and knobs
  effattn golden --model ls:w=8,r=4 --case mask --len 99 -o cases/ls.safetensors
  # Every file of a folder put to another program
  effattn check --program ./mine.py --golden cases

docs/programs.md reads one in Python.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// One mechanism, with its knobs: gla, ls:w=16,r=4
    #[arg(long, value_name = "MODEL")]
    model: Models,
    /// causal: the causal form (also where there is no other); mask: with padding; none of them: bidirectional
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    case: Vec<CaseWord>,
    /// Positions
    #[arg(long, value_name = "N", default_value_t = 50)]
    len: usize,
    /// Samples
    #[arg(long, value_name = "N", default_value_t = 2)]
    batch: usize,
    /// Heads
    #[arg(long, value_name = "N", default_value_t = 2)]
    heads: usize,
    /// Width of a head
    #[arg(long, value_name = "N", default_value_t = 8)]
    dim: usize,
    /// Seed of inputs and weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CaseWord {
    /// No position sees its future
    Causal,
    /// With padding, and a hole in the mask
    Mask,
}

/// Writes the file that `args` ask for.
pub fn run(args: &Args, term: &Term) -> Result<u8> {
    let choices = choose(&args.model)?;
    let [choice] = choices.as_slice() else {
        bail!("--model names {} mechanisms; a golden file is about one", choices.len());
    };
    let sizes = [("--len", args.len), ("--batch", args.batch), ("--heads", args.heads), ("--dim", args.dim)];
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        bail!("{flag} 0 is not allowed; it is at least 1");
    }
    let (support, name) = (choice.entry.support, choice.entry.name);
    let causal = args.case.contains(&CaseWord::Causal) || !support.bidirectional;
    if causal && !support.causal {
        bail!("{name} has no causal form; leave out --case causal");
    }
    let case = OwnCase {
        choice,
        sizes: CaseSizes { batch: args.batch, heads: args.heads, head_dim: args.dim, len: args.len },
        causal,
        masked: args.case.contains(&CaseWord::Mask),
        seed: args.seed,
    };
    if args.output.as_os_str() == "-" {
        bail!(
            "-o - names no file, and a golden file is not for a terminal; name one, such as case.safetensors"
        );
    }
    let OwnFile { bytes, computed_in, tensors } = case.write(&args.output.to_string_lossy())?;
    let place = || args.output.display().to_string();
    if let Some(folder) = args.output.parent() {
        std::fs::create_dir_all(folder).with_context(place)?;
    }
    file::write_user_file(&args.output, &bytes).with_context(place)?;
    term.info(&format!(
        "{}: {tensors} tensors, {}, computed in {computed_in} by effattn's own definition: not independent of effattn",
        place(),
        Bytes(bytes.len() as u64)
    ));
    Ok(0)
}
