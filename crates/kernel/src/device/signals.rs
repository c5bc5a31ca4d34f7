//! Signals whose default ends a process without a word.

/// Lets a write beyond the limit on the size of files (`ulimit -f`) fail with an error instead of ending the process: the error
/// names the file, and what was finished is kept. Worker processes inherit it.
pub fn ignore_file_size_limit() {
    #[cfg(unix)]
    {
        // SAFETY: ignoring a signal runs no code of ours in a handler, and no other thread exists yet.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}
