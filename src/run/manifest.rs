//! Where rows come from: what was typed, on which machine, with which build.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::plan::Plan;
use super::turn::Steadiness;
use super::{BUILD, RunError, read_text};
use effattn_kernel::device::alloc;
use effattn_kernel::device::machine::{self, Machine};
use effattn_record::file;

/// Version of the files in a run folder. Raised when an older program could misread them.
pub const SCHEMA: u64 = 1;

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Cells are missing.
    Unfinished,
    /// Every cell has its rows.
    Done,
    /// Given up for a fresh run.
    Abandoned,
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this file's form.
    pub schema: u64,
    /// Name of the run folder.
    pub id: String,
    /// What makes two runs the same; see [`Plan::identity`].
    pub identity: String,
    /// The plan that it is of, on whatever machine; see [`Plan::digest`].
    #[serde(default)]
    pub plan: String,
    /// Which shard of the plan, such as `3/6`, where it is one.
    #[serde(default)]
    pub shard: Option<String>,
    /// The whole plan's identity on this machine, where it is a shard.
    #[serde(default)]
    pub whole: Option<String>,
    /// The runs that it was merged of.
    #[serde(default)]
    pub parts: Vec<MergedPart>,
    /// How far it is.
    pub state: State,
    /// Command.
    pub command: String,
    /// The words that were typed.
    pub argv: Vec<String>,
    /// Resolved settings.
    pub settings: Value,
    /// The suite's text.
    pub suite: Option<String>,
    /// Version of effattn.
    pub version: String,
    /// Commit it was built from.
    pub commit: Option<String>,
    /// The build; see [`BUILD`].
    #[serde(default)]
    pub build: String,
    /// Hash of the sources of the kernels; empty in runs of earlier versions.
    #[serde(default)]
    pub kernels: String,
    /// Cargo features.
    pub features: Vec<String>,
    /// Device of the rows.
    pub device: String,
    /// Processor, memory, system.
    pub machine: Value,
    /// CPU threads.
    pub threads: u64,
    /// How memory is allocated and counted.
    pub allocator: Value,
    /// Matrix products on the CPU.
    pub gemm: String,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// Hashes of data, by name.
    pub data: BTreeMap<String, String>,
    /// SHA-256 of `rows.csv`, where every cell has its rows; none before, and in runs of earlier versions.
    #[serde(default)]
    pub rows_sha256: Option<String>,
    /// Load average before the start.
    pub load_average: Option<f64>,
    /// How steady the machine was, by the calibrations between the turns of a measurement; none where there were none.
    #[serde(default)]
    pub steadiness: Option<Steadiness>,
    /// Its place among the runs of its folder: later runs have higher numbers, whatever the clock says.
    #[serde(default)]
    pub order: u64,
    /// When it started (UTC).
    pub start: String,
    /// When it was continued.
    #[serde(default)]
    pub continued: Vec<String>,
    /// When it ended.
    pub end: Option<String>,
}

/// A run that was merged into another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MergedPart {
    /// Its folder, from the folder of the merged run where it lies below.
    pub folder: String,
    /// Which shard.
    pub shard: Option<String>,
    /// Its machine.
    pub machine: Value,
    /// CPU threads.
    pub threads: u64,
    /// When it started.
    pub start: String,
    /// When it ended.
    pub end: Option<String>,
}

/// The words that were typed, without the program; what is not Unicode in them is replaced.
pub fn argv() -> Vec<String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect()
}

/// Now, as in manifests.
pub fn now() -> String {
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    now.format(&Rfc3339).unwrap_or_default()
}

impl Manifest {
    /// The manifest of a run of `plan` that starts now in the folder `id`.
    pub fn new(plan: &Plan, id: &str) -> Self {
        Self {
            schema: SCHEMA,
            id: id.to_owned(),
            identity: plan.identity(),
            plan: if plan.part.shard.is_some() { plan.part.digest.clone() } else { plan.digest() },
            shard: plan.part.shard.map(|shard| shard.to_string()),
            whole: plan.part.shard.map(|_| plan.part.identity.clone()),
            parts: Vec::new(),
            state: State::Unfinished,
            command: plan.command.clone(),
            argv: plan.argv.clone(),
            settings: plan.settings.clone(),
            suite: plan.suite.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: option_env!("EFFATTN_COMMIT").map(str::to_owned),
            build: BUILD.to_owned(),
            kernels: env!("EFFATTN_KERNELS").to_owned(),
            features: effattn_kernel::device::features().into_iter().map(str::to_owned).collect(),
            device: plan.device.clone(),
            machine: serde_json::to_value(Machine {
                accelerator: plan.accelerator.clone(),
                ..Machine::this()
            })
            .unwrap_or(Value::Null),
            threads: plan.threads as u64,
            allocator: json!({
                "counted": true,
                "keep_pages": alloc::pages_kept(),
            }),
            gemm: "gemm 0.19, AVX-512 where found".to_owned(),
            seeds: plan.seeds.clone(),
            data: plan.data.clone(),
            rows_sha256: None,
            load_average: machine::load(),
            steadiness: None,
            order: 0,
            start: now(),
            continued: Vec::new(),
            end: None,
        }
    }

    /// Whether its run computes as that of `now` does: the same build, machine, accelerator, device, threads, and the same
    /// data under every name of `reads` (empty: under every name that `now` has).
    pub fn computes_as(&self, now: &Self, reads: &[String]) -> bool {
        let same = |name: &String| now.data.contains_key(name) && self.data.get(name) == now.data.get(name);
        (&self.build, &self.features, &self.device, self.threads)
            == (&now.build, &now.features, &now.device, now.threads)
            && ["cpu", "simd", "accelerator"].iter().all(|key| self.machine[key] == now.machine[key])
            && if reads.is_empty() { now.data.keys().all(same) } else { reads.iter().all(same) }
    }

    /// Reads the manifest of `folder`; none if there is none.
    pub fn read(folder: &Path) -> Result<Option<Self>, RunError> {
        let path = folder.join("manifest.json");
        let Some(text) = read_text(&path)? else { return Ok(None) };
        let damaged =
            |error: serde_json::Error| RunError::Damaged { path: path.clone(), reason: error.to_string() };
        let value: Value = serde_json::from_str(&text).map_err(damaged)?;
        if let Some(found) = value["schema"].as_u64()
            && found > SCHEMA
        {
            return Err(RunError::Newer { path, found, known: SCHEMA });
        }
        serde_json::from_value(value).map(Some).map_err(damaged)
    }

    /// Writes it into `folder`.
    pub fn write(&self, folder: &Path) -> Result<(), RunError> {
        let path = folder.join("manifest.json");
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        file::write(&path, text.as_bytes()).map_err(RunError::file(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_build_machine_device_or_data_computes_otherwise() {
        let data = [("imdb".to_owned(), "1".to_owned()), ("enwik8".to_owned(), "2".to_owned())].into();
        let now = Manifest::new(&Plan { data, ..Plan::default() }, "id");
        let imdb = ["imdb".to_owned()];
        assert!(now.computes_as(&now, &imdb) && now.computes_as(&now, &[]));
        type Change = (&'static str, fn(&mut Manifest));
        let changes: [Change; 8] = [
            ("build", |other| other.build.push('x')),
            ("features", |other| other.features.push("cuda".into())),
            ("device", |other| other.device.push('x')),
            ("threads", |other| other.threads += 1),
            ("processor", |other| other.machine["cpu"] = "x".into()),
            ("vector instructions", |other| other.machine["simd"] = "x".into()),
            ("accelerator", |other| other.machine["accelerator"] = "x".into()),
            ("data", |other| drop(other.data.insert("imdb".into(), "3".into()))),
        ];
        for (what, change) in changes {
            let mut other = now.clone();
            change(&mut other);
            assert!(!other.computes_as(&now, &imdb), "{what}");
        }
        let mut other = now.clone();
        other.data.insert("enwik8".into(), "3".into());
        assert!(other.computes_as(&now, &imdb), "data of another task");
        let both = ["imdb", "enwik8"].map(str::to_owned);
        assert!(!other.computes_as(&now, &both), "one of two sets that are read");
        assert!(!other.computes_as(&now, &[]), "where nothing says what is read, all of it is");
        assert!(!now.computes_as(&now, &["text8".to_owned()]), "data that nothing is known of");
    }
}
