//! Flags that choose what is measured and where; shared by the protocols.

use std::path::PathBuf;

use crate::config::grid::{Batches, Lengths, Models, Modes, Seeds};
use crate::config::settings::{DeviceName, DtypeName, KernelName, Settings};
use crate::config::suite::Suite;
use crate::config::units::{Bytes, Seconds};
use crate::protocol::grid::Flags;

/// What is measured.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Grid {
    /// Mechanisms and their knobs: full,ls:w=16,r=2 or all or 'ls*'
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    model: Option<Models>,
    /// Mechanisms to leave out
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    exclude: Option<Models>,
    /// Lengths: 1024,2048 or 1024..8192 (doubling) or 1024..4096+1024 (steps)
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    len: Option<Lengths>,
    /// Samples per step: 1,4 or 1..32 (doubling)
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    batch: Option<Batches>,
    /// Seeds: 3 or 0..3
    #[arg(long, visible_alias = "seed", value_name = "LIST", help_heading = "Grid")]
    seeds: Option<Seeds>,
    /// Passes: infer, train or infer,train
    #[arg(long, value_name = "LIST", help_heading = "Grid")]
    mode: Option<Modes>,
    /// Backbone: lra-repo, lra-paper or ls-lra (effattn list presets)
    #[arg(long, value_name = "NAME", help_heading = "Grid")]
    preset: Option<String>,
    /// A paper's table: a name (effattn list suites) or a TOML file; flags choose among its values
    #[arg(long, value_name = "NAME|FILE", help_heading = "Grid")]
    suite: Option<String>,
    /// Override a setting, also a suite's: heads=8, len=512 (repeatable)
    #[arg(long, value_name = "KEY=VALUE", value_parser = Settings::set, help_heading = "Grid")]
    set: Vec<Settings>,
}

/// Where it is computed and kept.
#[derive(clap::Args, Clone, Debug)]
pub struct Place {
    /// cpu, cuda, cuda:1 or metal
    #[arg(long, value_name = "DEVICE", help_heading = "Machine")]
    device: Option<DeviceName>,
    /// f32; bf16: matrix products of bf16 operands summed in f32, all else in f32; tf32 on CUDA devices
    #[arg(long, value_name = "FORMAT", help_heading = "Machine")]
    dtype: Option<DtypeName>,
    /// CPU threads; all processors without
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024), help_heading = "Machine")]
    threads: Option<u64>,
    /// fused: our kernels; composed: plain operations, as in the papers' codes
    #[arg(long, value_name = "KIND", help_heading = "Machine")]
    kernel: Option<KernelName>,
    /// Live bytes that all workers together may reach, such as 8GiB; 90 % of the free memory without
    #[arg(long, value_name = "SIZE", help_heading = "Machine")]
    memory_limit: Option<Bytes>,
    /// A cell that computes longer ends as `timeout`
    #[arg(long, value_name = "TIME", help_heading = "Budget")]
    timeout: Option<Seconds>,
    /// Only say what would run, with FLOPs, bytes and time
    #[arg(long, help_heading = "Budget")]
    pub dry_run: bool,
    /// Start over even if the same run is unfinished
    #[arg(long, help_heading = "Output")]
    pub fresh: bool,
    /// Folder with data sets (IMDb reviews are read from it); the user's cache folder without
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub data_dir: Option<PathBuf>,
    /// Folder for rows, samples and manifests
    #[arg(short, long, value_name = "DIR", default_value = "results", help_heading = "Output")]
    pub output_path: PathBuf,
    /// Folder for charts
    #[arg(long, value_name = "DIR", default_value = "plots", help_heading = "Output")]
    pub plots_dir: PathBuf,
    /// Draw no charts
    #[arg(long, help_heading = "Output")]
    pub no_plot: bool,
}

impl Grid {
    /// The first seed that was said, else 0.
    pub fn seed(&self) -> u64 {
        self.seeds.as_ref().and_then(|seeds| seeds.0.first().copied()).unwrap_or(0)
    }

    /// Whether a suite is named that `protocol` runs.
    pub fn is_for(&self, protocol: &str) -> bool {
        let suite = self.suite.as_deref().and_then(|name| Suite::load(name).ok());
        suite.is_some_and(|suite| suite.protocol == protocol)
    }

    /// With `place` and `budget`, what the user said.
    pub fn flags(&self, place: &Place, budget: Settings) -> Flags {
        let settings = Settings {
            len: self.len.clone(),
            batch: self.batch.clone(),
            seeds: self.seeds.clone(),
            mode: self.mode.clone(),
            preset: self.preset.clone(),
            device: place.device,
            dtype: place.dtype,
            kernel: place.kernel,
            threads: place.threads,
            memory_limit: place.memory_limit,
            timeout: place.timeout,
            ..budget
        };
        let set = self.set.iter().cloned().fold(Settings::NONE, |all, one| one.over(all));
        Flags {
            settings,
            set,
            model: self.model.clone(),
            exclude: self.exclude.clone(),
            suite: self.suite.clone(),
        }
    }
}
