//! The gate before a measurement: no speed is printed for a mechanism whose golden files are red.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::check::{CheckError, Golden, check_bytes, shipped};
use crate::config::settings::{DeviceName, KernelName};
use crate::device::Backend;
use crate::kernel::{Mode, with_mode};
use crate::protocol::Task;
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

/// Mechanisms that are red, with the reason.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    red: HashMap<String, String>,
}

/// Checks `request` in a worker of its own: mechanisms that are red, with the reason.
///
/// # Errors
/// Ctrl-C; a worker that cannot be started.
pub fn conduct(request: Request, session: &Session) -> Result<HashMap<String, String>, RunError> {
    let models = request.models.clone();
    let mut worker = Worker::start(&session.launcher, &Task::Gate { request })?;
    match worker.hear::<Answer>(None, session.resident_limit, &session.stop)? {
        Heard::Message(answer) => {
            worker.finish();
            Ok(answer.red)
        }
        Heard::Ended(ending) => Ok(models.into_iter().map(|model| (model, ending.reason.clone())).collect()),
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
    let red = match Backend::open(request.device) {
        Ok(backend) => with_mode(mode, || check(&request.models, backend.device())),
        Err(error) => request.models.iter().map(|model| (model.clone(), error.to_string())).collect(),
    };
    Ok(link.send(&Answer { red })?)
}

/// Mechanisms of `models` whose shipped files are not all green. A mechanism without a file is not red.
fn check(models: &[String], device: &candle_core::Device) -> HashMap<String, String> {
    let mut red = HashMap::new();
    for (file, bytes) in shipped::SHIPPED {
        if file.starts_with("models/") {
            continue;
        }
        let name = match Golden::read(file, bytes) {
            Ok(golden) => golden.meta("mechanism").to_owned(),
            Err(_) => continue,
        };
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
    red
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_attention_is_green_and_nothing_else_is_looked_at() {
        let red = check(&["full".to_owned()], &candle_core::Device::Cpu);
        assert!(red.is_empty(), "{red:?}");
    }
}
