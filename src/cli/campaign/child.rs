//! One part of a campaign: this program as a child, with a time limit.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::run::worker::{Launcher, TICK};
use crate::run::{CancelToken, RunError};
use effattn_kernel::device::signals;

/// How long a part that is asked to end may take to write what it has.
const GRACE: Duration = Duration::from_secs(20);
/// Bytes of its log that are kept.
const LOG: usize = 64 << 10;
/// Bytes of a line that are kept.
const LINE: u64 = 1000;

/// What a part prints, in its folder.
pub const OUTPUT: &str = "output.txt";
/// What it says beside, in its folder.
pub const LOG_FILE: &str = "log.txt";

/// How a part ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with this code.
    Exited(i32),
    /// By itself, without one: killed by somebody else, or by the system.
    Died(String),
    /// Its time was over.
    Timeout,
    /// Ctrl-C.
    Stopped,
}

/// How a part ended, and the last line that it said.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub ending: Ending,
    /// The last line of its log.
    pub last: Option<String>,
}

/// Runs `words` with its output in `folder` for at most `limit`; `heard` is told every line of its log.
pub fn run(
    words: &[String],
    folder: &Path,
    limit: Duration,
    stop: &CancelToken,
    heard: &mut dyn FnMut(&str),
) -> Result<Ended, RunError> {
    let in_folder = |name: &str| {
        let path = folder.join(name);
        File::create(&path).map_err(RunError::file(path))
    };
    let (output, mut log) = (in_folder(OUTPUT)?, in_folder(LOG_FILE)?);
    let mut child = start(words, output)?;
    let lines = lines(child.stderr.take());
    let start = Instant::now();
    let (mut asked, mut kept, mut last): (Option<(Ending, Instant)>, usize, Option<String>) = (None, 0, None);
    let mut hear = |line: String| {
        if kept < LOG {
            kept += line.len() + 1;
            let _ = writeln!(log, "{line}"); // a full disk is noticed by the part itself
        }
        heard(&line);
        if !line.trim().is_empty() {
            last = Some(line);
        }
    };
    let status = loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => hear(line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        if let Some(status) = child.try_wait().map_err(RunError::Worker)? {
            break status;
        }
        match &asked {
            None => {
                let over = start.elapsed() >= limit;
                if stop.is_cancelled() || over {
                    let why = if stop.is_cancelled() { Ending::Stopped } else { Ending::Timeout };
                    asked = Some((why, Instant::now()));
                    if !signals::ask_to_end(child.id()) {
                        let _ = child.kill();
                    }
                }
            }
            Some((_, since)) if since.elapsed() >= GRACE => drop(child.kill()),
            Some(_) => {}
        }
    };
    // its workers may hold its standard error for a moment longer
    while let Ok(line) = lines.recv_timeout(TICK) {
        hear(line);
    }
    let ending = match (asked, status.code()) {
        // it was done at the same moment
        (_, Some(code @ 0..=1)) => Ending::Exited(code),
        (Some((why, _)), _) => why,
        (None, Some(code)) => Ending::Exited(code),
        (None, None) => Ending::Died(told(status)),
    };
    Ok(Ended { ending, last })
}

fn start(words: &[String], output: File) -> Result<Child, RunError> {
    let mut command = own(words)?;
    command.stdin(Stdio::null()).stdout(output).stderr(Stdio::piped());
    signals::in_own_group(&mut command);
    command.spawn().map_err(RunError::Worker)
}

/// This program with `words`.
fn own(words: &[String]) -> Result<Command, RunError> {
    let mut command = Command::new(Launcher::own(1)?.program);
    command.args(words);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::arg0(&mut command, "effattn");
    Ok(command)
}

/// What this program prints for `words`, where it ends well within `limit`.
pub fn printed(words: &[String], limit: Duration, stop: &CancelToken) -> Result<Option<String>, RunError> {
    let folder = tempfile::tempdir().map_err(RunError::Worker)?;
    let ended = run(words, folder.path(), limit, stop, &mut |_| {})?;
    if ended.ending == Ending::Stopped {
        return Err(RunError::Stopped);
    }
    let text = effattn_record::file::read_to_string(&folder.path().join(OUTPUT)).ok();
    Ok(text.filter(|_| ended.ending == Ending::Exited(0)))
}

/// The lines of `stream`, bounded, as they come.
fn lines(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    if let Some(stream) = stream {
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            loop {
                line.clear();
                let read: io::Result<usize> = (&mut reader).take(LINE).read_until(b'\n', &mut line);
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if !matches!(read, Ok(1..)) || sender.send(text).is_err() {
                    return;
                }
            }
        });
    }
    lines
}

fn told(status: ExitStatus) -> String {
    format!("it ended with {status}")
}
