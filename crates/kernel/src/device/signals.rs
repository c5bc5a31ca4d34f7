//! Signals: those whose default ends a process without a word, and those that ask another process to end.

use std::process::Command;

/// Lets a write beyond the limit on the size of files (`ulimit -f`) fail with an error instead of ending the process: the error
/// names the file, and what was finished is kept. Worker processes inherit it.
pub fn ignore_file_size_limit() {
    #[cfg(unix)]
    {
        // SAFETY: ignoring a signal runs no code of ours in a handler, and no other thread exists yet.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
}

/// Asks the process `id`, a child that was not waited for, to keep what it has and to end (SIGTERM). False where the system has
/// no such signal.
pub fn ask_to_end(id: u32) -> bool {
    #[cfg(unix)]
    {
        // SAFETY: a signal to another process touches no memory of ours; the number of a child that was not waited for is its own.
        i32::try_from(id).is_ok_and(|id| id > 0 && unsafe { libc::kill(id, libc::SIGTERM) } == 0)
    }
    #[cfg(not(unix))]
    {
        let _ = id;
        false
    }
}

/// Starts `command` in a process group of its own, so that Ctrl-C goes to this process only; on Linux it is asked to end when the
/// thread that starts it ends, however that happens.
pub fn in_own_group(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::process::CommandExt;
        let parent = std::process::id();
        let tie = move || {
            // SAFETY: both are system calls without pointers, which may be made between fork and exec.
            let (tied, now) = unsafe {
                (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM as libc::c_ulong), libc::getppid())
            };
            match tied == 0 && u32::try_from(now) == Ok(parent) {
                true => Ok(()),
                false => Err(std::io::Error::from_raw_os_error(libc::ESRCH)), // who starts it is gone
            }
        };
        // SAFETY: the closure allocates nothing and takes no lock that another thread may hold.
        unsafe { command.pre_exec(tie) };
    }
    #[cfg(not(unix))]
    let _ = command;
}
