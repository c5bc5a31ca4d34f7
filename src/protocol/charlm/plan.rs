//! From flags and suites to language models that are trained.

use std::path::Path;

use super::eval::Evaluation;
use super::recipe::{self, EVERY, LAST_LEN, Phase, phases};
use super::request::{CharLmRequest, load, model};
use super::stored_input::stored_input;
use super::worker::train;
use super::{CharLm, PHASES};
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{DataDirs, Prepared, ProtocolInfo};
use crate::protocol::grid::{GridDefaults, GridFlags, PlanError};
use crate::protocol::model_spec::{ModelSpec, resolve_or_unsupported};
use crate::protocol::stored_input::{InputRequest, StoredInput};
use crate::protocol::training::worker::Job;
use crate::protocol::training::{
    DataRead, PlannedRun, ProtocolDiff, RunPlace, TrainingProtocol, TrainingResult, flops, micro_batches,
    read_data,
};
use crate::run::outcome::CellFailure;
use crate::run::plan::Plan;
use effattn_data as data;
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::family::causal::block_within;
use effattn_model::family::character_lm;
use effattn_record::Pass;
use effattn_record::config::lists::{Batches, Layers, Lengths, Words};
use effattn_record::config::settings::Settings;

/// Mechanism and rate of `--quick`.
pub const QUICK: (&str, f64) = ("ls:w=64", 3e-3);

/// Most symbols of a block in which the test part is read behind a cache.
const STREAM_BLOCK: usize = 256;

/// Preset where nothing is said.
const PRESET: &str = "charlm-small";

impl TrainingProtocol for CharLm {
    type Request = CharLmRequest;

    const INFO: ProtocolInfo = super::INFO;
    const COMPARED: &'static [&'static str] = &["phases", "batch", "len", "sizes", "dtype", "limit", "every"];
    const CURVE: CurveSpec = CurveSpec {
        column: "validation_bpc",
        axis: "validation, bits per character",
        unit: "bit",
        value: |score| score.loss / std::f64::consts::LN_2,
        less: true,
        by_rate: false,
    };
    const PUBLISHED_BY: Option<&'static str> = Some(super::INFO.name);

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        let preset = Some(PRESET.to_owned());
        let task = |name: &str| Some(Words(vec![name.to_owned()]));
        let whole = Settings { preset: preset.clone(), task: task("enwik8"), ..Settings::NONE };
        let small = Settings {
            preset,
            task: task("sample"),
            layers: Some(Layers::Count(2)),
            width: Some(128),
            heads: Some(4),
            ffn: Some(512),
            len: Some(Lengths(vec![256])),
            batch: Some(Batches(vec![4])),
            steps: Some(200),
            dropout: Some(0.0),
            rate: Some(QUICK.1),
            ..Settings::NONE
        };
        let (settings, models) = if flags.quick { (small, QUICK.0) } else { (whole, "ls") };
        GridDefaults { settings, models }
    }

    fn check_task(&self, task: &str) -> Result<(), PlanError> {
        data::corpus(task).map(|_| ()).map_err(PlanError::new)
    }

    fn seed(&self, _: &RunPlace) -> Result<u64, PlanError> {
        Ok(recipe::SEED)
    }

    fn run(&self, place: &RunPlace, seed: u64) -> Result<PlannedRun<CharLmRequest>, PlanError> {
        let RunPlace { entry, task: corpus, .. } = *place;
        let (settings, (_, symbols)) = (&entry.settings, data::corpus(corpus).map_err(PlanError::new)?);
        let planned = planned(settings, corpus)?;
        let first = planned[0];
        let spec = ModelSpec::new(entry, first.len, first.batch, Pass::Train, seed)?;
        let of = |choice: &MechanismChoice| model(&spec, choice, symbols.vocabulary, &planned);
        let (model, unsupported) = resolve_or_unsupported(entry, of)?;
        let whole = phases(&spec.preset, corpus).to_vec();
        let test = |phases: &[Phase], windows: bool| {
            let len = phases.last().map_or(first.len, |phase| phase.len);
            let cached = model.as_ref().filter(|model| model.cached() > 0);
            let cached = cached.map(|model| model.resized(len as usize, len as usize));
            evaluation(len, windows, cached.map(|model| block_within(model.as_ref(), STREAM_BLOCK) as u64))
        };
        let evaluations = (test(&planned, settings.overlap.unwrap_or(false)), test(&whole, false));
        let model = model.map(|model| model as _).ok_or_else(|| unsupported.unwrap_or_default());
        for phase in &planned {
            micro_batches(settings, phase.batch, 1)?;
        }
        let request = |spec: ModelSpec, phases: Vec<Phase>, evaluation, settings: &Settings| CharLmRequest {
            corpus: corpus.to_owned(),
            spec,
            accumulate: settings.accumulate.unwrap_or(1),
            every: settings.every.unwrap_or_else(|| EVERY.min(phases[0].steps.div_ceil(10)).max(1)),
            limit: settings.limit,
            evaluation,
            allow_partial: settings.allow_partial.unwrap_or(false),
            phases,
        };
        let work = |phase: &Phase| 3.0 * flops(&model, phase.len) * (phase.batch * phase.steps) as f64;
        let work = planned.iter().map(work).sum();
        let usual = ModelSpec { len: whole[0].len, batch: whole[0].batch, ..spec.default_spec(&spec.preset) };
        let usual = request(usual, whole, evaluations.1, &Settings::NONE);
        let request = request(spec, planned, evaluations.0, settings);
        let (metric, unit) = (request.evaluation.metric(), "bit");
        let differs = differences(&request);
        Ok(PlannedRun { metric, unit, request, usual, model, differs, work })
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        read_data(plan, |request: &CharLmRequest| {
            let corpus = load(&request.corpus, &dirs.data, request.allow_partial)?;
            let remark = data::own::order(&request.corpus);
            Ok(DataRead { hash: corpus.hash, partial: corpus.partial, remark })
        })
    }

    /// `400 updates of 512 · batch 4`.
    fn amount(&self, requests: &[CharLmRequest], batch: &str, _: &str) -> String {
        let phase = |phase: &Phase| format!("{} updates of {}", phase.steps, phase.len);
        let phases = requests.first().map_or(&[][..], |request| &request.phases);
        format!("{} · batch {batch}", phases.iter().map(phase).collect::<Vec<_>>().join(", "))
    }

    fn stored_input(&self, cell: &Path, input: &InputRequest) -> anyhow::Result<StoredInput> {
        stored_input(cell, input)
    }

    fn train(&self, job: &Job<CharLmRequest>) -> Result<TrainingResult, CellFailure> {
        train(job)
    }
}

/// The phases with what was said in the place of the protocol's values. Where lengths or steps are given, only as many
/// phases run as there are lengths.
fn planned(settings: &Settings, corpus: &str) -> Result<Vec<Phase>, PlanError> {
    let preset = settings.preset.as_deref().unwrap_or(PRESET);
    let mut all = phases(preset, corpus).to_vec();
    let lens = settings.len.as_ref().map(|Lengths(list)| list.clone());
    let default = match &lens {
        Some(list) => list.len() as u64,
        None if settings.steps.is_some() => 1,
        None => 3,
    };
    let count = PHASES.of(settings).unwrap_or(default);
    if count == 0 || count > 3 || lens.as_ref().is_some_and(|list| list.len() as u64 != count) {
        return Err(PlanError(
            "a run has one to three phases, each with one length (--len 512,1024)".to_owned(),
        ));
    }
    all.truncate(count as usize);
    let batch = match settings.batch.as_ref().map(|Batches(list)| list.as_slice()) {
        None => None,
        Some([batch]) => Some(*batch),
        Some(_) => return Err(PlanError("charlm trains at one batch size; give one".to_owned())),
    };
    for (index, phase) in all.iter_mut().enumerate() {
        if let Some(lens) = &lens {
            phase.len = lens[index];
        }
        phase.batch = batch.unwrap_or(phase.batch);
        if let Some(rate) = settings.rate {
            phase.rate = rate / f64::from(1 << index);
        }
        if let Some(steps) = settings.steps {
            // the warm-up keeps its share, but needs some updates
            phase.warmup = (phase.warmup * steps / phase.steps).max(steps / 10).max(1);
            phase.steps = steps;
        }
    }
    Ok(all)
}

/// A stream in blocks of `block` behind a cache of four segments as published (32768 behind 8192), or windows of that length;
/// where there is no cache and no `block`, windows of the length that was trained.
fn evaluation(len: u64, windows: bool, block: Option<u64>) -> Evaluation {
    let step = (512 * len / LAST_LEN).max(64).min(len.div_ceil(2));
    match block {
        Some(_) if windows => Evaluation::Overlap { window: 4 * len, step },
        Some(block) => Evaluation::Stream { block, cache: 4 * len },
        None => Evaluation::Overlap { window: len, step: len.div_ceil(2) },
    }
}

/// What `request` does otherwise than the protocol: everything that the protocol fixes is looked at.
fn differences(request: &CharLmRequest) -> ProtocolDiff {
    let whole = phases(&request.spec.preset, &request.corpus);
    let steps = |phases: &[Phase]| phases.iter().map(|phase| phase.steps).sum::<u64>();
    let mut all = ProtocolDiff { settings: Vec::new(), steps: (steps(&request.phases), steps(&whole)) };
    if all.steps.0 == all.steps.1 {
        let by_phase = |phases: &[Phase]| {
            phases.iter().map(|phase| phase.steps.to_string()).collect::<Vec<_>>().join(", ")
        };
        all.note("steps by phase", by_phase(&request.phases), by_phase(&whole));
    }
    let list = |of: fn(&Phase) -> u64, phases: &[Phase]| {
        phases.iter().map(|phase| of(phase).to_string()).collect::<Vec<_>>().join(", ")
    };
    let first = &whole[..request.phases.len().min(whole.len())];
    for (name, of) in [("length", (|phase| phase.len) as fn(&Phase) -> u64), ("batch", |phase| phase.batch)] {
        all.note(name, list(of, &request.phases), list(of, first));
    }
    let rate = |phases: &[Phase]| phases.first().map_or(0.0, |phase| phase.rate);
    all.rate(rate(&request.phases), rate(&whole));
    all.model(&request.spec);
    let preset = request.spec.preset.as_str();
    if !character_lm::FAMILY.names().contains(&preset) {
        all.settings.push(format!("preset {preset}, trained as {PRESET} is"));
    }
    all.settings.extend(request.limit.map(|limit| format!("first {limit} symbols of validation and test")));
    if data::corpus(&request.corpus).is_ok_and(|(_, symbols)| symbols.complete.is_none()) {
        all.settings.push("a corpus that no source trains on".to_owned());
    }
    all.note(
        "updates between evaluations",
        request.every,
        EVERY.min(request.phases[0].steps.div_ceil(10)).max(1),
    );
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::definition::Protocol;
    use crate::run::plan::Cell;

    #[test]
    fn a_named_knob_holds_against_the_preset() {
        let flags =
            GridFlags { model: Some("ls,ls:w=8,ls:dual_ln=false".parse().unwrap()), ..GridFlags::default() };
        let cells = Protocol::cells(&CharLm, &crate::protocol::resolve(&flags, &CharLm).unwrap(), 1).unwrap();
        let window = |cell: &Cell| {
            let CharLmRequest { spec, .. } = serde_json::from_value(cell.request.clone()).unwrap();
            let choice = spec.choice().unwrap();
            let config = character_lm::config(&spec.model_request(&choice)).unwrap();
            config.knobs.get(&effattn_model::attention::ls::W)
        };
        let all: Vec<(String, usize)> = cells.iter().map(|cell| (cell.row.label(), window(cell))).collect();
        let expected = [("ls", 512), ("ls:w=8", 8), ("ls:dual_ln=false", 512)];
        assert_eq!(all, expected.map(|(label, window)| (label.to_owned(), window)));
    }

    fn cells(model: &str, lens: &[u64]) -> Vec<Cell> {
        let len = Some(Lengths(lens.to_vec()));
        let settings = Settings { task: Some(Words(vec!["sample".into()])), len, ..Settings::NONE };
        let flags = GridFlags { settings, model: Some(model.parse().unwrap()), ..GridFlags::default() };
        Protocol::cells(&CharLm, &crate::protocol::resolve(&flags, &CharLm).unwrap(), 1).unwrap()
    }

    fn requests(model: &str, lens: &[u64]) -> Vec<CharLmRequest> {
        let request = |cell: Cell| serde_json::from_value(cell.request).unwrap();
        cells(model, lens).into_iter().map(request).collect()
    }

    #[test]
    fn all_phases_have_the_parameters_of_the_longest() {
        for request in requests("aft-local,mega,cosformer", &[64, 128]) {
            let model = request.model(30).unwrap();
            let [short, long] = [64, 128].map(|len| model.resized(len, len).parameters().unwrap());
            assert_eq!(short, long, "{}", request.spec.model);
        }
    }

    #[test]
    fn lengths_that_a_mechanism_cannot_go_on_from_are_refused_before_training() {
        let reason = cells("ls", &[64, 100]).remove(0).row.error.unwrap();
        assert!(reason.contains("100 cached positions are not a multiple of l=16"), "{reason}");
        let request = requests("ls:w=16,l=48,r=1", &[288]).remove(0);
        assert_eq!(request.evaluation, Evaluation::Stream { block: 240, cache: 1152 });
        let request = requests("ls", &[512]).remove(0);
        assert_eq!(request.evaluation, Evaluation::Stream { block: 256, cache: 2048 });
    }
}
