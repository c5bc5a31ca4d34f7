//! The gate before a measurement: no speed is printed for a mechanism whose golden files are red.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::check::{CheckError, Golden, check_bytes, shipped};
use crate::config::SayError;
use crate::config::settings::{DeviceName, KernelName};
use crate::device::Backend;
use crate::kernel::{Mode, with_mode};
use crate::protocol::Order;
use crate::record::Row;
use crate::run::RunError;
use crate::run::session::Session;
use crate::run::worker::{Heard, Link, Worker};

/// What to check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Mechanisms.
    pub models: Vec<String>,
    /// Fused kernels or plain operations.
    pub kernel: KernelName,
    /// Where.
    pub device: DeviceName,
}

/// What the check found out.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    /// Mechanisms that are red, with the reason.
    pub red: HashMap<String, String>,
    /// Mechanisms that no shipped file is about: nothing is known about them.
    pub unproven: Vec<String>,
}

impl Answer {
    /// What to tell a person who asked for `count` mechanisms.
    pub fn summary(&self, count: usize) -> String {
        let (proven, red) = (count - self.unproven.len(), self.red.len());
        let mut text = format!("check: {} of {proven} mechanisms reproduce their golden files", proven - red);
        if !self.unproven.is_empty() {
            text += &format!("; no golden file covers {}", self.unproven.join(", "));
        }
        text
    }

    /// All of `models` red for the same `reason`.
    fn all_red(models: &[String], reason: &str) -> Self {
        let red = models.iter().map(|model| (model.clone(), reason.to_owned())).collect();
        Self { red, unproven: Vec::new() }
    }
}

/// Where a mechanism is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Computed {
    model: String,
    kernel: String,
    device: String,
}

impl Computed {
    /// Where the mechanism of `row` is computed.
    pub fn of(row: &Row) -> Self {
        Self { model: row.model.clone(), kernel: row.kernel.clone(), device: row.device.clone() }
    }
}

/// Checks every mechanism where it is computed, in workers of their own: those that are red, with the reason.
///
/// # Errors
/// Ctrl-C; a worker that cannot be started.
pub fn check(places: &[Computed], session: &Session) -> Result<HashMap<Computed, String>, RunError> {
    let mut groups: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for Computed { model, kernel, device } in places {
        match groups.iter_mut().find(|(known, on, _)| known == kernel && on == device) {
            Some((_, _, models)) if models.contains(model) => {}
            Some((_, _, models)) => models.push(model.clone()),
            None => groups.push((kernel, device, vec![model.clone()])),
        }
    }
    let (mut red, mut all) = (HashMap::new(), Answer::default());
    for (kernel, device, models) in &groups {
        let wrong = |error: SayError| RunError::Internal(error.to_string());
        let request = Request {
            models: models.clone(),
            kernel: kernel.parse().map_err(wrong)?,
            device: device.parse().map_err(wrong)?,
        };
        let answer = ask(request, session)?;
        all.unproven.extend(answer.unproven);
        for (model, reason) in answer.red {
            all.red.insert(model.clone(), reason.clone());
            red.insert(
                Computed { model, kernel: (*kernel).to_owned(), device: (*device).to_owned() },
                reason,
            );
        }
    }
    let count: usize = groups.iter().map(|(_, _, models)| models.len()).sum();
    if count > 0 {
        session.term.say(&all.summary(count));
    }
    Ok(red)
}

fn ask(request: Request, session: &Session) -> Result<Answer, RunError> {
    let models = request.models.clone();
    let mut worker = Worker::start(&session.launcher, &Order::Gate { request })?;
    match worker.hear::<Answer>(None, session.resident_limit, &session.stop)? {
        Heard::Message(answer) => {
            worker.finish();
            Ok(answer)
        }
        Heard::Ended(ending) => Ok(Answer::all_red(&models, &ending.reason)),
    }
}

/// The worker's side.
///
/// # Errors
/// The parent is gone.
pub fn work(link: &Link, request: &Request) -> anyhow::Result<()> {
    let mode = match request.kernel {
        KernelName::Fused => Mode::Fused,
        KernelName::Composed => Mode::Composed,
    };
    let answer = match Backend::open(request.device) {
        Ok(backend) => with_mode(mode, || verdicts(&request.models, backend.device())),
        Err(error) => Answer::all_red(&request.models, &error.to_string()),
    };
    Ok(link.send(&answer)?)
}

/// Checks the shipped files of `models`, whole models left out.
fn verdicts(models: &[String], device: &candle_core::Device) -> Answer {
    let mut red = HashMap::new();
    let mut unproven = models.to_vec();
    for (file, bytes) in shipped::SHIPPED {
        if file.starts_with("models/") {
            continue;
        }
        let name = match Golden::read(file, bytes) {
            Ok(golden) => golden.meta("mechanism").to_owned(),
            Err(_) => continue,
        };
        unproven.retain(|model| *model != name);
        if !models.contains(&name) || red.contains_key(&name) {
            continue;
        }
        let reason = match check_bytes(file, bytes, device) {
            Ok(verdict) if verdict.green() => continue,
            Ok(verdict) => {
                let ratio = verdict.error_over_tolerance;
                verdict.problem.unwrap_or_else(|| {
                    format!("{file}: {} is off by {ratio:.3} times its tolerance", verdict.worst)
                })
            }
            Err(error @ (CheckError::NotGolden { .. } | CheckError::UnknownMechanism { .. })) => {
                log::debug!("{error}");
                continue;
            }
            Err(error) => error.to_string(),
        };
        red.insert(name, reason);
    }
    Answer { red, unproven }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_attention_is_green_and_nothing_else_is_looked_at() {
        let answer = verdicts(&["full".to_owned()], &candle_core::Device::Cpu);
        assert!(answer.red.is_empty() && answer.unproven.is_empty(), "{answer:?}");
        assert_eq!(answer.summary(1), "check: 1 of 1 mechanisms reproduce their golden files");
    }

    #[test]
    fn a_mechanism_without_golden_files_is_not_called_green() {
        let answer = verdicts(&["full".to_owned(), "mine".to_owned()], &candle_core::Device::Cpu);
        assert!(answer.red.is_empty());
        assert_eq!(
            answer.summary(2),
            "check: 1 of 1 mechanisms reproduce their golden files; no golden file covers mine"
        );
    }
}
