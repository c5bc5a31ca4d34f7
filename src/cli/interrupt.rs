//! Ctrl-C, SIGTERM and SIGHUP: the first requests a clean stop, the second exits at once.

use std::io::Write;

use crate::run::CancelToken;

/// A stop that Ctrl-C sets. Call after the number of threads was set: this starts a thread.
pub fn stop_on_ctrl_c() -> CancelToken {
    let stop = CancelToken::default();
    let flag = stop.clone();
    // Without a handler Ctrl-C just ends the process; the journal keeps what is finished.
    let _ = ctrlc::set_handler(move || {
        if flag.is_cancelled() {
            let said =
                "stopped at once; finished cells and checkpoints are kept, and the same command resumes";
            let _ = writeln!(std::io::stderr(), "{said}");
            std::process::exit(i32::from(crate::term::STOPPED));
        }
        flag.cancel();
    });
    stop
}
