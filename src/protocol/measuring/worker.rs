//! How the parent starts the worker of a cell and listens to it: every answer is a value, or how the cell ended instead.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::measuring::plan::StepRequest;
use crate::protocol::worker_context::{WorkerContext, WorkerRequest};
use crate::run::outcome::CellFailure;
use crate::run::session::Session;
use crate::run::worker::{Launcher, Received, Worker};
use crate::run::{CancelToken, RunError};

/// A value, or how the cell ended instead.
pub type Answer<T> = Result<Result<T, CellFailure>, RunError>;

/// How workers are started, and what they may use.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// How they are started.
    pub launcher: &'a Launcher,
    /// Live bytes that one may reach.
    pub memory_limit: u64,
    /// Resident bytes that it may reach.
    pub resident_limit: u64,
    /// What stops it.
    pub stop: &'a CancelToken,
}

impl<'a> Bounds<'a> {
    /// The whole machine.
    pub fn of(session: &'a Session) -> Self {
        let Session { launcher, memory_limit, resident_limit, stop, .. } = session;
        Self { launcher, memory_limit: *memory_limit, resident_limit: *resident_limit, stop }
    }

    /// Starts a worker of `protocol` for `request`.
    pub fn start<M: Serialize>(&self, protocol: &str, request: &StepRequest<M>) -> Result<Worker, RunError> {
        let launcher = self.launcher.of_kernel(&request.spec.kernel.to_string());
        let request = serde_json::to_value(request).map_err(|error| RunError::Internal(error.to_string()))?;
        let (protocol, memory_limit) = (protocol.to_owned(), self.memory_limit);
        let conditions = WorkerContext::default();
        Worker::start(&launcher, &WorkerRequest::Cell { protocol, memory_limit, request, conditions })
    }

    /// The next answer of `worker`.
    pub fn hear<T: DeserializeOwned>(&self, worker: &mut Worker, deadline: Option<Instant>) -> Answer<T> {
        Ok(match worker.receive(deadline, self.resident_limit, self.stop)? {
            Received::Message(answer) => answer,
            Received::Ended(failure) => Err(failure),
        })
    }
}

/// The time limit of `seconds`; none where there is no limit, or one that no clock reaches.
pub fn time_limit(seconds: Option<f64>) -> Option<Duration> {
    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}
