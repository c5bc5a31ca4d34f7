//! How errors and dead workers become outcomes: the only place that decides.

use std::process::ExitStatus;

use serde::{Deserialize, Serialize};

use effattn_kernel::device::alloc::OOM_EXIT;
use effattn_model::message;
use effattn_record::Outcome;
use effattn_record::config::units::Bytes;

/// How something ended and why, in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellFailure {
    /// The outcome.
    pub outcome: Outcome,
    /// The reason.
    pub reason: String,
}

impl CellFailure {
    /// An ending.
    pub fn new(outcome: Outcome, reason: impl Into<String>) -> Self {
        Self { outcome, reason: one_line(&reason.into()) }
    }
}

/// Every error ends a cell: those of candle by [`of_error`], the others as `failed`.
impl<E: std::error::Error + 'static> From<E> for CellFailure {
    fn from(error: E) -> Self {
        let any: &(dyn std::error::Error + 'static) = &error;
        match any.downcast_ref() {
            Some(error) => of_error(error),
            None => Self::new(Outcome::Failed, error.to_string()),
        }
    }
}

fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(400) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// What a candle error means for the cell.
pub fn of_error(error: &candle_core::Error) -> CellFailure {
    let text = message(error);
    let lower = text.to_lowercase();
    let memory = ["out of memory", "out_of_memory", "memory allocation"].iter().any(|m| lower.contains(m));
    let outcome = if memory { Outcome::Oom } else { Outcome::Failed };
    CellFailure::new(outcome, text)
}

/// What the death of `process` (`the worker`) means for its cell. `stderr`: its last lines.
pub fn of_exit(process: &str, status: ExitStatus, stderr: &[String]) -> CellFailure {
    if let Some(line) = stderr.iter().rev().find(|line| line.starts_with("memory allocation of ")) {
        let what = line.trim_end_matches(" failed");
        return CellFailure::new(Outcome::Oom, format!("the system refused a {what}"));
    }
    if status.code() == Some(OOM_EXIT) {
        return CellFailure::new(Outcome::Oom, over_limit(stderr));
    }
    let panic = stderr.iter().position(|line| line.contains("panicked at"));
    let last = match panic {
        Some(at) => stderr[at..].iter().take(2).cloned().collect::<Vec<_>>().join(" "),
        None => stderr.last().cloned().unwrap_or_default(),
    };
    let how = describe(process, status);
    let reason = if last.is_empty() { how } else { format!("{how}: {last}") };
    CellFailure::new(Outcome::Failed, reason)
}

fn describe(process: &str, status: ExitStatus) -> String {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        match status.signal() {
            Some(9) => {
                return format!("{process} was killed (signal 9: by a user or the system, for memory)");
            }
            Some(signal) => return format!("{process} died of signal {signal}"),
            None => {}
        }
    }
    match status.code() {
        Some(code) => format!("{process} ended with code {code}"),
        None => format!("{process} ended without a code"),
    }
}

/// The counted allocator's last words, in prose.
fn over_limit(stderr: &[String]) -> String {
    let number = |line: &str, key: &str| {
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        value.and_then(|value| value.parse::<u64>().ok())
    };
    let said = stderr.iter().rev().find_map(|line| {
        let line = line.strip_prefix("effattn-oom ")?;
        Some((number(line, "asked")?, number(line, "live")?, number(line, "limit")?))
    });
    match said {
        Some((asked, live, limit)) => {
            format!("asked for {asked} bytes more, {} in all; the limit is {}", Bytes(live), Bytes(limit))
        }
        None => "asked for more than the memory limit".to_owned(),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_reserved_code_is_out_of_memory_with_the_bytes_asked() {
        let words = "effattn-oom asked=4096 live=3221225472 limit=2147483648".to_owned();
        let ending = of_exit("the worker", ExitStatus::from_raw(OOM_EXIT << 8), &[words]);
        assert_eq!(ending.outcome, Outcome::Oom);
        assert_eq!(ending.reason, "asked for 4096 bytes more, 3.00 GiB in all; the limit is 2.00 GiB");
    }

    #[test]
    fn panics_and_signals_are_failures_that_say_why() {
        let panic = ["thread 'main' panicked at src/x.rs:1:2:".to_owned(), "boom".to_owned()];
        let ending = of_exit("the worker", ExitStatus::from_raw(101 << 8), &panic);
        assert!(
            ending.outcome == Outcome::Failed && ending.reason.ends_with("panicked at src/x.rs:1:2: boom")
        );
        assert!(of_exit("the worker", ExitStatus::from_raw(9), &[]).reason.contains("signal 9"));
        let refused = ["memory allocation of 999 bytes failed".to_owned()];
        assert_eq!(of_exit("the worker", ExitStatus::from_raw(6), &refused).outcome, Outcome::Oom);
    }

    #[test]
    fn a_backtrace_is_not_part_of_the_message() {
        let error = candle_core::Error::Msg("no tensor head\n   0: candle_core::error\n   1: main".into());
        assert_eq!(message(&error), "no tensor head");
        assert_eq!(of_error(&error).reason, "no tensor head");
    }

    #[test]
    fn a_driver_that_is_out_of_memory_is_oom() {
        let error =
            candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into());
        assert_eq!(of_error(&error).outcome, Outcome::Oom);
        assert_eq!(of_error(&candle_core::Error::Msg("shape mismatch".into())).outcome, Outcome::Failed);
    }
}
