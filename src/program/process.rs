//! A program that runs: requests are sent and answers awaited, whatever the other side does.

use std::io::{BufReader, BufWriter};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::description::Description;
use super::wire::{CONTRACT, Message, Tensors};
use crate::run::outcome::{self, CellFailure};
use crate::run::worker::{StderrTail, TICK};
use crate::run::{CancelToken, RunError};
use effattn_kernel::device::machine::Resident;
use effattn_kernel::device::threads;
use effattn_record::Outcome;
use effattn_record::config::units::Bytes;

/// How long a program may take to end when it is asked to.
const GRACE: Duration = Duration::from_millis(500);
/// How often resident sizes are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Where a program's libraries read the number of threads.
const THREAD_VARIABLES: [&str; 2] = ["OMP_NUM_THREADS", "MKL_NUM_THREADS"];

/// What holds while an answer is awaited.
pub struct Conditions<'a> {
    /// Most time; none: that of the description.
    pub time: Option<Duration>,
    /// Most resident bytes.
    pub resident_limit: u64,
    /// Set by Ctrl-C.
    pub stop: &'a CancelToken,
}

/// What a program answered.
#[derive(Debug)]
pub struct Answer {
    /// The header.
    pub header: Value,
    /// The tensors.
    pub tensors: Tensors,
}

impl Answer {
    /// The header as a `T`.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, CellFailure> {
        T::deserialize(&self.header).map_err(|error| {
            CellFailure::new(Outcome::Failed, format!("its answer has not what was asked for ({error})"))
        })
    }
}

/// What the header of a refusal says.
#[derive(Deserialize)]
struct Refusal {
    error: String,
    outcome: Option<String>,
}

impl Refusal {
    /// Outcomes that a refusal may have.
    const OUTCOMES: [Outcome; 4] = [Outcome::Unsupported, Outcome::Oom, Outcome::Diverged, Outcome::Failed];

    fn failure(self) -> CellFailure {
        let Some(word) = self.outcome else { return CellFailure::new(Outcome::Failed, self.error) };
        if let Some(outcome) = Self::OUTCOMES.into_iter().find(|known| known.to_string() == word) {
            return CellFailure::new(outcome, self.error);
        }
        let known = Self::OUTCOMES.map(|outcome| outcome.to_string()).join(", ");
        let reason =
            format!("{} (its refusal has the outcome {word:?}, which is none of {known})", self.error);
        CellFailure::new(Outcome::Failed, reason)
    }
}

/// A running program. Dropping it kills it.
pub struct Program {
    child: Child,
    requests: Option<Sender<Message>>,
    answers: Receiver<Result<Message, String>>,
    tail: StderrTail,
    timeout: Duration,
    resident: Resident,
    over: bool,
    /// What it says to be.
    pub version: String,
}

impl Program {
    /// Starts what `description` says with `threads` CPU threads and asks for its version.
    pub fn start(
        description: &Description,
        threads: usize,
        conditions: &Conditions,
    ) -> Result<Result<Self, CellFailure>, RunError> {
        let mut program = match Self::spawn(description, threads) {
            Ok(program) => program,
            Err(failure) => return Ok(Err(failure)),
        };
        let request = Message::request("version").with("contract", CONTRACT);
        let answer = match program.ask(request, conditions)? {
            Ok(answer) => answer,
            Err(failure) => return Ok(Err(failure)),
        };
        match answer.header.get("version").and_then(Value::as_str).filter(|version| !version.is_empty()) {
            Some(version) => version.clone_into(&mut program.version),
            None => {
                let reason = "it does not say its version; nothing is measured without one";
                return Ok(Err(CellFailure::new(Outcome::Failed, reason)));
            }
        }
        Ok(Ok(program))
    }

    fn spawn(description: &Description, threads: usize) -> Result<Self, CellFailure> {
        let (program, arguments) = description.command();
        let mut command = Command::new(&program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.current_dir(&description.folder);
        for name in THREAD_VARIABLES.iter().chain(&threads::VARIABLES) {
            command.env(name, threads.to_string());
        }
        command.envs(&description.environment);
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0); // Ctrl-C goes to effattn only
        let mut child = command.spawn().map_err(|error| {
            CellFailure::new(Outcome::Failed, format!("{} cannot be started ({error})", program.display()))
        })?;
        let (requests, outgoing) = mpsc::channel::<Message>();
        if let Some(stdin) = child.stdin.take() {
            // a thread of its own: a program that does not read would block who writes
            std::thread::spawn(move || {
                let mut stdin = BufWriter::new(stdin);
                while let Ok(message) = outgoing.recv() {
                    if message.write(&mut stdin).is_err() {
                        break;
                    }
                }
            });
        }
        let (incoming, answers) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut stdout = BufReader::new(stdout);
                while let Some(message) = Message::read(&mut stdout).transpose() {
                    let broken = message.is_err();
                    if incoming.send(message).is_err() || broken {
                        break;
                    }
                }
            });
        }
        let tail = StderrTail::of(&mut child);
        Ok(Self {
            child,
            requests: Some(requests),
            answers,
            tail,
            timeout: description.timeout,
            resident: Resident::default(),
            over: false,
            version: String::new(),
        })
    }

    /// Whether it has ended, and has to be started again.
    pub const fn is_over(&self) -> bool {
        self.over
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its resident bytes now.
    pub fn resident(&mut self) -> u64 {
        self.resident.of(self.child.id()).unwrap_or(0)
    }

    /// Sends `request` and waits for its answer. A failure is a refusal in words, after which it goes on, or the end of the
    /// program ([`Self::is_over`]): it died, was silent for too long, grew too large, or answered what is no message.
    ///
    /// # Errors
    /// [`RunError::Stopped`] on Ctrl-C.
    pub fn ask(
        &mut self,
        request: Message,
        conditions: &Conditions,
    ) -> Result<Result<Answer, CellFailure>, RunError> {
        let name = request.header.get("request").and_then(Value::as_str).unwrap_or_default().to_owned();
        // what is there before the request is no answer to it
        if let Ok(unasked) = self.answers.try_recv() {
            let reason = unasked.err().unwrap_or_else(|| "it answered a request twice".to_owned());
            return Ok(Err(self.end(Outcome::Failed, &reason)));
        }
        if let Some(requests) = &self.requests {
            let _ = requests.send(request); // one that is gone is noticed below
        }
        let most = conditions.time.unwrap_or(self.timeout);
        let (start, mut looked) = (Instant::now(), Instant::now());
        loop {
            match self.answers.recv_timeout(TICK) {
                Ok(Ok(message)) => return Ok(self.understood(message)),
                Ok(Err(reason)) => return Ok(Err(self.end(Outcome::Failed, &reason))),
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(self.died()?)),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if conditions.stop.is_cancelled() {
                return Err(RunError::Stopped);
            }
            if start.elapsed() >= most {
                let reason = format!("no answer to {name:?} within {:.1} s", most.as_secs_f64());
                return Ok(Err(self.end(Outcome::Timeout, &reason)));
            }
            if looked.elapsed() < LOOK {
                continue;
            }
            looked = Instant::now();
            let (resident, limit) = (self.resident(), conditions.resident_limit);
            if resident > limit {
                let reason =
                    format!("resident size {} passed the limit of {}", Bytes(resident), Bytes(limit));
                return Ok(Err(self.end(Outcome::Oom, &reason)));
            }
        }
    }

    fn understood(&mut self, message: Message) -> Result<Answer, CellFailure> {
        if message.header.contains_key("error") {
            let refusal = serde_json::from_value::<Refusal>(message.header.into());
            return Err(match refusal {
                Ok(refusal) => refusal.failure(),
                Err(error) => self.end(Outcome::Failed, &format!("its refusal cannot be read ({error})")),
            });
        }
        match message.tensors() {
            Ok(tensors) => Ok(Answer { header: message.header.into(), tensors }),
            Err(reason) => Err(self.end(Outcome::Failed, &reason)),
        }
    }

    /// Asks it to end, and ends it by force if it does not.
    pub fn finish(mut self) {
        if let Some(requests) = self.requests.take() {
            let _ = requests.send(Message::request("end"));
        }
        let start = Instant::now();
        while start.elapsed() < GRACE && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills it for `reason`; what it said last on its standard error is told too.
    fn end(&mut self, outcome: Outcome, reason: &str) -> CellFailure {
        self.kill();
        match self.last_line() {
            Some(line) => CellFailure::new(outcome, format!("{reason}; last on its standard error: {line}")),
            None => CellFailure::new(outcome, reason),
        }
    }

    fn died(&mut self) -> Result<CellFailure, RunError> {
        self.over = true;
        let start = Instant::now();
        let status = loop {
            // it may have closed its output only
            match self.child.try_wait().map_err(RunError::Worker)? {
                Some(status) => break status,
                None if start.elapsed() > GRACE => {
                    return Ok(self.end(Outcome::Failed, "it closed its standard output without an answer"));
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let last: Vec<String> = self.last_line().into_iter().collect();
        Ok(outcome::of_exit("the program", status, &last))
    }

    /// The last line of its standard error that says something.
    fn last_line(&self) -> Option<String> {
        self.tail.last_words().into_iter().rev().find(|line| !line.trim().is_empty())
    }

    /// Kills it and what it started: a command may be a script around the program that computes.
    fn kill(&mut self) {
        self.over = true;
        #[cfg(unix)]
        {
            let group = format!("-{}", self.child.id()); // of its own, see `spawn`
            let mut kill = Command::new("kill");
            kill.args(["-s", "KILL", "--", &group]).stdin(Stdio::null());
            let _ = kill.stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
