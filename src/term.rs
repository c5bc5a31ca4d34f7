//! What is said on stderr: header, bars, lines, warnings; and data on stdout.
//!
//! With a terminal there is one bar with the time left; without one, a line per finished cell.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use effattn_record::text::{plural, visible};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Exit code: a cell failed, a check is red, a regression.
pub const FAILED: u8 = 1;
/// Exit code: usage, configuration or data.
pub const USAGE: u8 = 2;
/// Exit code: stopped by Ctrl-C.
pub const STOPPED: u8 = 130;

/// How much is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors and warnings only.
    Quiet,
    /// Header, progress, summary.
    #[default]
    Normal,
    /// Also what each worker does.
    Verbose,
}

/// Whether colours are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Color {
    /// Where the stream is a terminal and `NO_COLOR` is unset.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Color {
    /// Whether to colour a stream.
    pub fn on(self, terminal: bool) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }
}

/// Something a reader of the numbers should know: what, why it matters, what to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Warning {
    /// Other programs were running.
    Busy {
        /// Processors that they kept busy.
        load: f64,
        /// Processors.
        cores: usize,
    },
    /// The processor has no products of bf16.
    EmulatedBf16,
    /// Some samples lie far outside.
    Outliers {
        /// The cell.
        cell: String,
        /// How many.
        count: usize,
        /// Of how many.
        n: usize,
    },
    /// The interval of a median is wide.
    Wide {
        /// The cell.
        cell: String,
        /// Its larger side over the median.
        relative: f64,
        /// Number of samples.
        n: usize,
    },
    /// `latest` could not be renewed.
    Latest {
        /// Why.
        reason: String,
    },
    /// Anything else, in one sentence.
    Other(String),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::EmulatedBf16 => write!(
                f,
                "this processor has no bf16 dot product (AVX512-BF16): operands are rounded and multiplied in f32, which takes \
                 longer than --dtype f32"
            ),
            Self::Busy { load, cores } => write!(
                f,
                "other programs keep {load:.1} of {} busy; measured times may be too long: close them and run again",
                plural(*cores as u64, "core")
            ),
            Self::Outliers { cell, count, n } => {
                write!(
                    f,
                    "{cell}: {count} of {n} samples are outliers, which affect the mean more than the median"
                )
            }
            Self::Wide { cell, relative, n } => write!(
                f,
                "{cell}: the interval of the median is ±{:.0} % over {n} samples; measure longer with \
                 --max-time",
                relative * 100.0
            ),
            Self::Latest { reason } => {
                write!(f, "results are saved, but `latest` could not be updated: {reason}")
            }
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// Progress and messages on stderr.
pub struct Term {
    verbosity: Verbosity,
    color: bool,
    bar: Option<ProgressBar>,
    work: Work,
}

/// Predicted and finished work, in predicted seconds.
#[derive(Clone, Copy, Debug)]
struct Work {
    total: f64,
    done: f64,
    started: Instant,
}

impl Work {
    /// Predicted seconds left, corrected by how wrong the prediction was so far.
    fn left(&self) -> f64 {
        let elapsed = self.started.elapsed().as_secs_f64();
        let left = (self.total - self.done).max(0.0);
        if self.done > 0.0 { left * elapsed / self.done } else { left }
    }
}

/// Seconds of work from which a line of a log says how far it is.
const LONG: f64 = 10.0;

impl Work {
    /// How long it has taken and what is left, behind a line of a log; nothing of short work.
    fn note(&self) -> String {
        let elapsed = self.started.elapsed().as_secs_f64();
        match elapsed + self.left() >= LONG {
            true => format!(" ({} so far, about {} left)", clock(elapsed), clock(self.left())),
            false => String::new(),
        }
    }
}

/// `12 s`, `1:05 min`, `2.5 h`, `3.1 days`, `11.8 years`.
pub fn clock(seconds: f64) -> String {
    const HOUR: u64 = 3600;
    const DAY: u64 = 24 * HOUR;
    const YEAR: u64 = 365 * DAY;
    let whole = seconds.max(0.0).round() as u64;
    let of = |unit: u64, name: &str| format!("{:.1} {name}", seconds / unit as f64);
    match whole {
        0..60 => format!("{whole} s"),
        60..HOUR => format!("{}:{:02} min", whole / 60, whole % 60),
        HOUR.. if whole < 2 * DAY => of(HOUR, "h"),
        HOUR.. if whole < YEAR => of(DAY, "days"),
        _ => of(YEAR, "years"),
    }
}

impl Term {
    /// Talks on stderr.
    pub fn new(verbosity: Verbosity, color: Color) -> Self {
        let color = color.on(io::stderr().is_terminal());
        Self { verbosity, color, bar: None, work: Work { total: 0.0, done: 0.0, started: Instant::now() } }
    }

    /// Exit code: a cell failed, a check is red, a regression.
    pub const FAILED: u8 = 1;
    /// Exit code: usage, configuration or data.
    pub const USAGE: u8 = 2;
    /// Exit code: stopped by Ctrl-C.
    pub const STOPPED: u8 = 130;

    /// How much is said.
    pub fn verbosity(&self) -> Verbosity {
        self.verbosity
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A line, unless quiet.
    pub fn info(&self, text: &str) {
        if self.verbosity >= Verbosity::Normal {
            self.print(&visible(text));
        }
    }

    /// A line that only `-v` shows.
    pub fn detail(&self, text: &str) {
        if self.verbosity == Verbosity::Verbose {
            self.print(&visible(text));
        }
    }

    /// A warning, also when quiet.
    pub fn warn(&self, warning: &Warning) {
        self.print(&format!("{} {}", self.paint("33", "warning:"), visible(&warning.to_string())));
    }

    /// An error, also when quiet.
    pub fn error(&self, text: &str) {
        self.print(&format!("{} {}", self.paint("31", "error:"), visible(text)));
    }

    fn print(&self, text: &str) {
        // A stderr that is gone must not end a measurement.
        let write = || drop(writeln!(io::stderr(), "{text}"));
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Starts a bar over work that is predicted to take `seconds`.
    pub fn start_progress(&mut self, seconds: f64) {
        self.work = Work { total: seconds, done: 0.0, started: Instant::now() };
        if self.verbosity == Verbosity::Quiet || !io::stderr().is_terminal() {
            return;
        }
        let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
        let template = if self.color { "{bar:30.cyan/dim} {msg}" } else { "{bar:30} {msg}" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("#>-"));
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        self.bar = Some(bar);
    }

    /// Whether progress is shown as a bar.
    pub fn has_bar(&self) -> bool {
        self.bar.is_some()
    }

    /// Says what is done, beside the bar.
    pub fn doing(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(visible(what));
        }
        self.detail(what);
    }

    /// Names what is being worked on, beside the bar.
    pub fn at(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{} left · {}", clock(self.work.left()), visible(what)));
        }
        self.detail(what);
    }

    /// A piece of work predicted to take `seconds` is done; `line` tells how it ended (shown without a bar,
    /// or with `-v`).
    pub fn advance(&mut self, seconds: f64, line: &str) {
        self.work.done += seconds;
        match &self.bar {
            Some(bar) => {
                let share = self.work.done / self.work.total.max(f64::MIN_POSITIVE);
                bar.set_position((1000.0 * share.clamp(0.0, 1.0)) as u64);
                if !line.is_empty() {
                    self.detail(line);
                }
            }
            None if line.is_empty() => {}
            None => self.info(&format!("{line}{}", self.work.note())),
        }
    }

    /// Ends the bar.
    pub fn finish_progress(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Columns of text where nothing says how wide the terminal is.
const WIDTH: usize = 140;

/// Columns of the terminal that reads standard output, also of one that does not say how many rows it has.
pub fn width() -> usize {
    #[cfg(unix)]
    let columns = rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| size.ws_col);
    #[cfg(not(unix))]
    let columns = console::Term::stdout().size_checked().map(|(_, columns)| columns);
    columns.filter(|columns| *columns > 0).map_or(WIDTH, usize::from)
}

/// Writes data to stdout, complete and flushed.
pub fn data(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Whether `error` only says that nobody reads stdout any more.
pub fn is_closed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_corrects_the_prediction() {
        let started = Instant::now() - Duration::from_secs(20);
        let work = Work { total: 40.0, done: 10.0, started };
        assert!((work.left() - 60.0).abs() < 1.0, "{}", work.left());
    }

    #[test]
    fn lines_of_long_work_say_what_is_left() {
        let started = Instant::now().checked_sub(Duration::from_secs(30)).unwrap();
        assert_eq!(Work { total: 60.0, done: 20.0, started }.note(), " (30 s so far, about 1:00 min left)");
        assert_eq!(Work { total: 3.0, done: 1.0, started: Instant::now() }.note(), "");
    }

    #[test]
    fn clocks_read_well() {
        assert_eq!((clock(5.4).as_str(), clock(65.0).as_str()), ("5 s", "1:05 min"));
        assert_eq!(clock(9000.0), "2.5 h");
        assert_eq!([clock(172_700.0), clock(172_800.0)], ["48.0 h", "2.0 days"]);
        assert_eq!(clock(103_342.3 * 3600.0), "11.8 years");
    }

    #[test]
    fn warnings_say_what_and_what_to_do() {
        let text = Warning::Busy { load: 3.25, cores: 2 }.to_string();
        assert!(text.contains("3.2 of 2 cores") && text.contains("run again"), "{text}");
    }
}
