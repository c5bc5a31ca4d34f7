//! The gate before a measurement: mechanisms that fail their golden files are not measured.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::check::program::{self, ProgramCheck, ProgramSettings};
use super::check::{CheckError, Golden, builtin, check_bytes};
use crate::program::description::Description;
use crate::protocol::worker_context::{GateRequest, WorkerRequest};
use crate::run::RunError;
use crate::run::outcome::CellFailure;
use crate::run::session::Session;
use crate::run::worker::{ParentLink, Received, Worker};
use effattn_kernel::device::Backend;
use effattn_kernel::{KernelMode, with_mode};
use effattn_record::config::ParseError;
use effattn_record::config::settings::KernelName;
use effattn_record::{Outcome, Row};

/// What the check found out.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct GateResult {
    /// Mechanisms that are red, with the reason.
    pub failed: HashMap<String, String>,
    /// Mechanisms that no shipped file is about: nothing is known about them.
    pub uncovered: Vec<String>,
}

impl GateResult {
    /// What to tell a person who asked for `count` mechanisms.
    pub fn summary(&self, count: usize) -> String {
        let (proven, red) = (count - self.uncovered.len(), self.failed.len());
        let mut text = format!("check: {} of {proven} mechanisms reproduce their golden files", proven - red);
        if !self.uncovered.is_empty() {
            text += &format!("; unverified, because no golden file covers it: {}", self.uncovered.join(", "));
        }
        text
    }

    /// All of `models` red for the same `reason`.
    fn all_red(models: &[String], reason: &str) -> Self {
        let failed = models.iter().map(|model| (model.clone(), reason.to_owned())).collect();
        Self { failed, uncovered: Vec::new() }
    }
}

/// Where a mechanism is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GateKey {
    model: String,
    kernel: String,
    device: String,
    /// Program and its number format, where it is not effattn.
    program: Option<(String, String)>,
}

impl GateKey {
    /// Where the mechanism of `row` is computed.
    pub fn of(row: &Row) -> Self {
        let program = row.other_program().map(|program| (program.to_owned(), row.dtype.clone()));
        Self { model: row.model.clone(), kernel: row.kernel.clone(), device: row.device.clone(), program }
    }
}

/// A mechanism whose check is red.
fn red_check(reason: &str) -> CellFailure {
    CellFailure::new(Outcome::Failed, format!("its check is red: {reason}"))
}

/// Mechanisms that are red, with the reason.
pub type RedChecks = HashMap<GateKey, CellFailure>;

/// Checks every mechanism where it is computed, in workers of their own: those that are red, with the reason, and those that no
/// golden file covers.
pub fn check(places: &[GateKey], session: &Session) -> Result<(RedChecks, Vec<String>), RunError> {
    let mut groups: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for GateKey { model, kernel, device, .. } in places {
        match groups.iter_mut().find(|(known, on, _)| known == kernel && on == device) {
            Some((_, _, models)) if models.contains(model) => {}
            Some((_, _, models)) => models.push(model.clone()),
            None => groups.push((kernel, device, vec![model.clone()])),
        }
    }
    let (mut red, mut all) = (HashMap::new(), GateResult::default());
    for (kernel, device, models) in &groups {
        let wrong = |error: ParseError| RunError::Internal(error.to_string());
        let request = GateRequest {
            models: models.clone(),
            kernel: kernel.parse().map_err(wrong)?,
            device: device.parse().map_err(wrong)?,
        };
        let answer = ask(request, session)?;
        all.uncovered.extend(answer.uncovered);
        for (model, reason) in answer.failed {
            all.failed.insert(model.clone(), reason.clone());
            let (kernel, device) = ((*kernel).to_owned(), (*device).to_owned());
            red.insert(GateKey { model, kernel, device, program: None }, red_check(&reason));
        }
    }
    let count: usize = groups.iter().map(|(_, _, models)| models.len()).sum();
    if count > 0 {
        session.term.info(&all.summary(count));
    }
    Ok((red, all.uncovered))
}

/// Puts the shipped files to programs, given as on the command line: the mechanisms that may not be measured, with the reason.
pub fn check_programs(
    places: &[(GateKey, &str)],
    session: &Session,
) -> Result<HashMap<GateKey, CellFailure>, RunError> {
    let mut refused = HashMap::new();
    let mut programs: Vec<(&str, &str, &str)> = Vec::new();
    for (key, word) in places {
        let program = (*word, key.device.as_str(), key.program.as_ref().map_or("f32", |(_, dtype)| dtype));
        if !programs.contains(&program) {
            programs.push(program);
        }
    }
    for (word, device, dtype) in programs {
        let wrong = |error: ParseError| RunError::Internal(error.to_string());
        let description =
            Description::find(word).map_err(|error| RunError::Internal(format!("{error:#}")))?;
        let settings = ProgramSettings {
            threads: session.launcher.threads,
            dtype: dtype.parse().map_err(wrong)?,
            device: device.parse().map_err(wrong)?,
            resident_limit: session.resident_limit,
            stop: session.stop.clone(),
        };
        let here = |key: &GateKey| {
            let format = key.program.as_ref().map_or("f32", |(_, dtype)| dtype.as_str());
            (key.device.as_str(), format) == (device, dtype)
        };
        let mut keys: Vec<&GateKey> =
            places.iter().filter(|(key, of)| *of == word && here(key)).map(|(key, _)| key).collect();
        keys.sort_by(|a, b| a.model.cmp(&b.model));
        keys.dedup();
        let mut check = match ProgramCheck::start(&description, &settings)? {
            Ok(check) => check,
            Err(failure) => {
                let failure = CellFailure::new(failure.outcome, description.cannot_run(&failure.reason));
                refused.extend(keys.into_iter().map(|key| (key.clone(), failure.clone())));
                continue;
            }
        };
        check.prefer_f32();
        let mut green = 0;
        for key in &keys {
            match answers(&mut check, &key.model)? {
                Ok(()) => green += 1,
                Err(failure) => drop(refused.insert((*key).clone(), failure)),
            }
        }
        let (name, version, all) = (&description.name, &check.version, keys.len());
        session.term.info(&format!(
            "check: {name} ({version}) reproduces the golden files of {green} of {all} mechanisms"
        ));
        check.finish();
    }
    Ok(refused)
}

/// Puts the shipped files of `model` to a program. At least one has to be answered.
fn answers(check: &mut ProgramCheck, model: &str) -> Result<Result<(), CellFailure>, RunError> {
    let mut silent = CellFailure::new(Outcome::Unsupported, format!("no golden file covers {model}"));
    let mut proven = false;
    for (file, bytes) in builtin::BUILTIN_FILES {
        let Ok(golden) = Golden::read(file, bytes) else { continue };
        if golden.meta("mechanism") != model || !program::is_asked(&golden) {
            continue;
        }
        match check.check(&golden)? {
            Ok(verdict) if verdict.passed() => proven = true,
            Ok(verdict) => return Ok(Err(red_check(&format!("{file}: {}", verdict.fault())))),
            Err(CheckError::NotAnswered { reason, .. }) => {
                silent = CellFailure::new(Outcome::Unsupported, reason);
            }
            Err(error) => return Ok(Err(red_check(&error.to_string()))),
        }
    }
    Ok(if proven { Ok(()) } else { Err(silent) })
}

fn ask(request: GateRequest, session: &Session) -> Result<GateResult, RunError> {
    let models = request.models.clone();
    let mut worker = Worker::start(&session.launcher, &WorkerRequest::Gate { request })?;
    match worker.receive::<GateResult>(None, session.resident_limit, &session.stop)? {
        Received::Message(answer) => {
            worker.finish();
            Ok(answer)
        }
        Received::Ended(ending) => Ok(GateResult::all_red(&models, &ending.reason)),
    }
}

/// The worker's side.
pub fn work(link: &ParentLink, request: &GateRequest) -> anyhow::Result<()> {
    let mode = match request.kernel {
        KernelName::Fused => KernelMode::Fused,
        KernelName::Composed => KernelMode::Composed,
    };
    let answer = match Backend::open(request.device) {
        Ok(backend) => with_mode(mode, || verdicts(&request.models, backend.device())),
        Err(error) => GateResult::all_red(&request.models, &error.to_string()),
    };
    Ok(link.send(&answer)?)
}

/// Checks the shipped files of `models`, whole models left out.
fn verdicts(models: &[String], device: &candle_core::Device) -> GateResult {
    let mut failed = HashMap::new();
    let mut uncovered = models.to_vec();
    for (file, bytes) in builtin::BUILTIN_FILES {
        if file.starts_with("models/") {
            continue;
        }
        let name = match Golden::read(file, bytes) {
            Ok(golden) => golden.meta("mechanism").to_owned(),
            Err(_) => continue,
        };
        uncovered.retain(|model| *model != name);
        if !models.contains(&name) || failed.contains_key(&name) {
            continue;
        }
        let reason = match check_bytes(file, bytes, device) {
            Ok(verdict) if verdict.passed() => continue,
            Ok(verdict) => format!("{file}: {}", verdict.fault()),
            Err(error @ (CheckError::NotGolden { .. } | CheckError::UnknownMechanism { .. })) => {
                log::debug!("{error}");
                continue;
            }
            Err(error) => error.to_string(),
        };
        failed.insert(name, reason);
    }
    GateResult { failed, uncovered }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_attention_is_green_and_nothing_else_is_looked_at() {
        let answer = verdicts(&["full".to_owned()], &candle_core::Device::Cpu);
        assert!(answer.failed.is_empty() && answer.uncovered.is_empty(), "{answer:?}");
        assert_eq!(answer.summary(1), "check: 1 of 1 mechanisms reproduce their golden files");
    }

    #[test]
    fn a_mechanism_without_golden_files_is_not_called_green() {
        let answer = verdicts(&["full".to_owned(), "mine".to_owned()], &candle_core::Device::Cpu);
        assert!(answer.failed.is_empty());
        assert_eq!(
            answer.summary(2),
            "check: 1 of 1 mechanisms reproduce their golden files; unverified, because no golden file covers it: mine"
        );
    }
}
