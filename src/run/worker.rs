//! Worker processes: the same binary, spoken to in JSON lines over pipes.
//!
//! A worker reads its request from the first line of stdin and ends when stdin ends, so it dies with its
//! parent, however the parent dies. It blocks on its pipe while others have their turn.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::outcome::{self, CellFailure};
use super::{BUILD, CancelToken, RunError};
use effattn_kernel::device::machine::Resident;
use effattn_kernel::device::threads::{self, PlainOperations};
use effattn_record::Outcome;
use effattn_record::config::settings::KernelName;
use effattn_record::config::units::Bytes;

/// How often a waiting parent looks at Ctrl-C and deadlines.
pub(crate) const TICK: Duration = Duration::from_millis(25);
/// How often it looks at resident sizes, which takes longer.
const LOOK: Duration = Duration::from_millis(100);
/// Lines of a worker's stderr that are kept.
const TAIL: usize = 40;
/// How long its last words may take to arrive when it is gone. What it started may hold its stderr open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How workers are started.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// CPU threads.
    pub threads: usize,
    /// Where candle's own operations run.
    pub plain: PlainOperations,
}

impl Launcher {
    /// Workers that are this program. On Linux they are what runs here, even where its file was replaced since; elsewhere
    /// a worker of another build refuses.
    pub fn own(threads: usize) -> Result<Self, RunError> {
        let running = Path::new("/proc/self/exe"); // of the child, until it is another program
        let program = match cfg!(target_os = "linux") && running.exists() {
            true => running.to_owned(),
            false => std::env::current_exe().map_err(RunError::Worker)?,
        };
        let arguments = vec!["worker".into(), "--build".into(), BUILD.into()];
        Ok(Self { program, arguments, threads, plain: PlainOperations::OnCaller })
    }

    /// These workers for cells of `kernel`, as rows call it: the operations of composed mechanisms run as in candle's own programs.
    pub fn of_kernel(&self, kernel: &str) -> Self {
        let composed = kernel == KernelName::Composed.to_string();
        let plain = if composed { PlainOperations::InPool } else { PlainOperations::OnCaller };
        Self { plain, ..self.clone() }
    }
}

/// What a parent hears while it waits.
#[derive(Debug)]
pub enum Received<M> {
    /// A message.
    Message(M),
    /// The worker is gone.
    Ended(CellFailure),
}

/// A worker process. Dropping it kills it.
pub struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    tail: StderrTail,
    resident: Resident,
    looked: Instant,
    /// Highest resident size seen.
    pub resident_peak: u64,
    /// How long it may take to keep what it has on Ctrl-C; nothing: it is killed at once.
    pub grace: Duration,
}

impl Worker {
    /// Starts a worker and gives it `request`.
    pub fn start(launcher: &Launcher, request: &impl Serialize) -> Result<Self, RunError> {
        let mut command = Command::new(&launcher.program);
        command.args(&launcher.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.envs(threads::variables(launcher.threads, launcher.plain));
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            command.arg0("effattn");
            command.process_group(0); // Ctrl-C goes to the parent only
        }
        let mut child = command.spawn().map_err(RunError::Worker)?;
        let (sender, lines) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let tail = StderrTail::of(&mut child);
        let stdin = child.stdin.take();
        let mut worker = Self {
            child,
            stdin,
            lines,
            tail,
            resident: Resident::default(),
            looked: Instant::now(),
            resident_peak: 0,
            grace: Duration::ZERO,
        };
        worker.say(request).map_err(RunError::Worker)?;
        Ok(worker)
    }

    /// Sends a message. A worker that is gone is noticed by [`Self::receive`].
    pub fn send(&mut self, message: &impl Serialize) {
        let _ = self.say(message);
    }

    /// An error is a message that cannot be written down, such as a path that is not UTF-8.
    fn say(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_string(message).map_err(|error| {
            io::Error::other(format!("{error}; give --data-dir and --output-path names in UTF-8"))
        })?;
        line.push('\n');
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
        }
        Ok(())
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a message. The worker is killed when `deadline` passes (`timeout`), when its resident size
    /// passes `resident_limit` (`oom`), or on Ctrl-C.
    ///
    /// # Errors
    /// [`RunError::Stopped`] on Ctrl-C.
    pub fn receive<M: DeserializeOwned>(
        &mut self,
        deadline: Option<Instant>,
        resident_limit: u64,
        stop: &CancelToken,
    ) -> Result<Received<M>, RunError> {
        loop {
            if let Some(heard) = self.poll(TICK, deadline, resident_limit, stop)? {
                return Ok(heard);
            }
        }
    }

    /// As [`Self::receive`], for at most `wait`. `None`: nothing was said.
    ///
    /// # Errors
    /// [`RunError::Stopped`] on Ctrl-C.
    pub fn poll<M: DeserializeOwned>(
        &mut self,
        wait: Duration,
        deadline: Option<Instant>,
        resident_limit: u64,
        stop: &CancelToken,
    ) -> Result<Option<Received<M>>, RunError> {
        let ended = |outcome, reason: String| Some(Received::Ended(CellFailure::new(outcome, reason)));
        match self.lines.recv_timeout(wait) {
            Ok(line) => {
                return Ok(match serde_json::from_str(&line) {
                    Ok(message) => Some(Received::Message(message)),
                    Err(_) => {
                        self.kill();
                        ended(Outcome::Failed, format!("the worker said something unexpected: {line}"))
                    }
                });
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(Some(Received::Ended(self.ended()?))),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if stop.is_cancelled() {
            self.stop();
            return Err(RunError::Stopped);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.kill();
            return Ok(ended(Outcome::Timeout, "ran past its time limit (--timeout)".to_owned()));
        }
        if self.looked.elapsed() < LOOK {
            return Ok(None);
        }
        self.looked = Instant::now();
        let resident = self.resident.of(self.child.id()).unwrap_or(0);
        self.resident_peak = self.resident_peak.max(resident);
        if resident > resident_limit {
            self.kill();
            let sizes = [resident, resident_limit].map(Bytes);
            return Ok(ended(
                Outcome::Oom,
                format!("resident size {} passed the limit of {}", sizes[0], sizes[1]),
            ));
        }
        Ok(None)
    }

    /// What the worker said that was not heard yet; after [`RunError::Stopped`] its last words.
    pub fn drain_messages<M: DeserializeOwned>(&self) -> impl Iterator<Item = M> {
        self.lines.try_iter().filter_map(|line| serde_json::from_str(&line).ok())
    }

    /// Ends the worker by closing its pipe, and by force if it does not listen.
    pub fn finish(mut self) {
        self.stdin = None;
        self.wait(Duration::from_millis(500));
    }

    /// Asks the worker to keep what it has and to end; by force when its grace is over.
    fn stop(&mut self) {
        if !self.grace.is_zero() {
            self.send(&STOP);
            self.wait(self.grace);
        }
        self.kill();
    }

    fn wait(&mut self, most: Duration) {
        let start = Instant::now();
        while start.elapsed() < most && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn ended(&mut self) -> Result<CellFailure, RunError> {
        let status = self.child.wait().map_err(RunError::Worker)?;
        Ok(outcome::of_exit("the worker", status, &self.tail.last_words()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last lines that a process writes to its stderr, read by a thread of their own.
pub(crate) struct StderrTail {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected where the stream has ended.
    end: Receiver<()>,
}

impl StderrTail {
    /// Those of `child`, whose stderr is a pipe.
    pub(crate) fn of(child: &mut Child) -> Self {
        let (open, end) = mpsc::channel();
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(stderr) = child.stderr.take() {
            let lines = lines.clone();
            std::thread::spawn(move || {
                let _open = open;
                keep_tail(stderr, &lines);
            });
        }
        Self { lines, end }
    }

    /// The lines of a process that is gone: waits for what is still on its way.
    pub(crate) fn last_words(&self) -> Vec<String> {
        let _ = self.end.recv_timeout(LAST_WORDS);
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Keeps the last lines of `stream`; reads on so that the writer never blocks, and bounds every line.
fn keep_tail(stream: impl Read, tail: &Mutex<VecDeque<String>>) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(4096).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == TAIL {
            tail.pop_front();
        }
        tail.push_back(text);
    }
}

/// What a worker hears on Ctrl-C.
const STOP: &str = "stop";

/// The worker's side of the pipes.
pub struct ParentLink {
    lines: Receiver<Value>,
}

impl ParentLink {
    /// Listens to stdin. `gone` is called, on another thread, when stdin ends: the parent is gone or done.
    pub fn open(gone: impl FnOnce() + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in io::stdin().lock().lines().map_while(Result::ok) {
                let message = serde_json::from_str(&line).unwrap_or(Value::Null);
                if sender.send(message).is_err() {
                    break;
                }
            }
            gone();
        });
        Self { lines }
    }

    /// The next message; none when the parent is gone.
    pub fn next<M: DeserializeOwned>(&self) -> Result<Option<M>, serde_json::Error> {
        match self.lines.recv() {
            Ok(value) => serde_json::from_value(value).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Whether the parent has asked to end.
    pub fn is_stopped(&self) -> bool {
        self.lines.try_recv().is_ok_and(|message| message == STOP)
    }

    /// Sends a message to the parent.
    pub fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message).map_err(io::Error::other)?;
        line.push(b'\n');
        let mut out = io::stdout().lock();
        out.write_all(&line)?;
        out.flush()
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Worker {
        let arguments = vec!["-c".into(), script.into()];
        let launcher =
            Launcher { program: "/bin/sh".into(), arguments, threads: 1, plain: PlainOperations::OnCaller };
        Worker::start(&launcher, &"request").unwrap()
    }

    fn hear(worker: &mut Worker, deadline: Option<Instant>, limit: u64) -> Received<Value> {
        worker.receive(deadline, limit, &CancelToken::default()).unwrap()
    }

    #[test]
    fn messages_go_both_ways_and_an_end_is_told_with_its_reason() {
        let mut worker = shell("read line; echo \"$line\"; read line; echo oops >&2; exit 3");
        assert!(
            matches!(hear(&mut worker, None, u64::MAX), Received::Message(Value::String(s)) if s == "request")
        );
        worker.send(&1);
        let Received::Ended(ending) = hear(&mut worker, None, u64::MAX) else { panic!() };
        assert_eq!(
            (ending.outcome, ending.reason.as_str()),
            (Outcome::Failed, "the worker ended with code 3: oops")
        );
    }

    #[test]
    fn a_worker_that_hangs_is_a_timeout() {
        let mut worker = shell("sleep 60");
        let deadline = Instant::now() + Duration::from_millis(120);
        let Received::Ended(ending) = hear(&mut worker, Some(deadline), u64::MAX) else { panic!() };
        assert_eq!(ending.outcome, Outcome::Timeout);
    }

    #[test]
    fn a_worker_whose_resident_size_grows_too_far_is_oom() {
        let mut worker = shell("sleep 60");
        let Received::Ended(ending) = hear(&mut worker, None, 1) else { panic!() };
        assert_eq!(ending.outcome, Outcome::Oom);
    }

    #[test]
    fn ctrl_c_ends_the_wait() {
        let mut worker = shell("sleep 60");
        let stop = CancelToken::default();
        stop.cancel();
        assert!(matches!(worker.receive::<Value>(None, u64::MAX, &stop), Err(RunError::Stopped)));
    }

    #[test]
    fn an_endless_line_on_stderr_does_not_fill_memory() {
        let tail = Mutex::new(VecDeque::new());
        keep_tail(io::repeat(b'x').take(1 << 20), &tail);
        let tail = tail.into_inner().unwrap();
        assert!(tail.len() <= TAIL && tail.iter().all(|line| line.len() <= 4096));
    }
}
