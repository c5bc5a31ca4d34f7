//! Counted memory: live and peak bytes of this process, with a limit.
//!
//! candle's CPU storage is `Vec`, so a counting global allocator sees every tensor byte. The count
//! is exact and repeatable, which resident size is not once the allocator keeps freed pages.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Exit code of a process that asked for more than its memory limit.
pub const OOM_EXIT: i32 = 87;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static KEPT: AtomicBool = AtomicBool::new(false);

/// A global allocator that counts bytes over the system's allocator.
pub struct CountingAllocator;

/// Bytes now allocated.
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Highest value of [`live`] since the last [`reset_peak`].
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Forgets the peak so far.
pub fn reset_peak() {
    PEAK.store(live(), Relaxed);
}

/// Ends the process with [`OOM_EXIT`] when live bytes would exceed `bytes`.
pub fn set_limit(bytes: usize) {
    LIMIT.store(bytes, Relaxed);
}

/// Whether [`keep_pages`] is in force.
pub fn pages_kept() -> bool {
    KEPT.load(Relaxed)
}

fn grow(bytes: usize) {
    let now = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
    let limit = LIMIT.load(Relaxed);
    if now > limit {
        refuse(bytes, now, limit);
    }
}

/// Says what was asked for and ends the process. Runs inside the allocator, so it must not allocate.
#[cold]
fn refuse(bytes: usize, live: usize, limit: usize) -> ! {
    use std::io::Write;
    LIMIT.store(usize::MAX, Relaxed); // the message itself must not meet the limit again
    let _ = writeln!(std::io::stderr(), "effattn-oom asked={bytes} live={live} limit={limit}");
    // SAFETY: _exit is async-signal-safe and never returns; no destructors are needed.
    unsafe { libc::_exit(OOM_EXIT) }
}

/// `memory`, unless the system had none of `bytes`: then the process says so and ends, with [`OOM_EXIT`] where it has a limit.
/// std's handler would print a backtrace, which allocates under a lock that the handler takes again: a process that is out of
/// address space hangs there.
fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        fail(bytes);
    }
    memory
}

/// Runs inside the allocator and may hold any of std's locks, so it uses neither.
#[cold]
fn fail(bytes: usize) -> ! {
    let (mut digits, mut start, mut rest) = ([0; 20], 20, bytes);
    while start == 20 || rest > 0 {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let code = if LIMIT.load(Relaxed) == usize::MAX { 1 } else { OOM_EXIT };
    for part in [b"memory allocation of ", &digits[start..], b" bytes failed\n"] {
        // SAFETY: write reads as many bytes as the slice has; what it returns changes nothing here.
        let _ = unsafe { libc::write(2, part.as_ptr().cast(), part.len() as _) };
    }
    // SAFETY: as in `refuse`.
    unsafe { libc::_exit(code) }
}

// SAFETY: every call is forwarded unchanged to `System`; only counters are touched besides.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        grow(new_size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        given(unsafe { System.realloc(ptr, layout, new_size) }, new_size)
    }
}

/// Bytes that this process may map, where `ulimit -v` limits them.
pub fn address_space() -> Option<u64> {
    #[cfg(unix)]
    {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: getrlimit writes into the struct it is given and touches nothing else.
        let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
        (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }
    #[cfg(not(unix))]
    None
}

/// Gives freed pages of large tensors back at once (Linux, glibc), so that the resident size follows the live bytes. glibc
/// raises its threshold for such tensors as it goes, which leaves holes in the heap; here it stays where it starts.
pub fn return_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallopt only sets parameters of glibc's allocator.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
            libc::mallopt(libc::M_MMAP_MAX, 1 << 16);
            libc::mallopt(libc::M_TOP_PAD, 0);
        }
        KEPT.store(false, Relaxed);
    }
}

/// Keeps freed pages in one heap of all threads (Linux, glibc). By default every large tensor is mapped and unmapped, and half
/// of a training step is page faults; and a heap of a thread's own holds no tensor of 64 MiB. Call first in `main`.
///
/// `EFFATTN_KEEP_PAGES=0` leaves the allocator as it is (to compare with resident sizes).
pub fn keep_pages() -> bool {
    // Steps run on a thread of the pool. Its own heap would also reserve 64 MiB of addresses, which may be limited.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: as below.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
    let limited = address_space().is_some();
    // Where the address space is limited, a heap that grows in large pieces fails and every allocation tries again.
    if std::env::var_os("EFFATTN_KEEP_PAGES").is_some_and(|value| value == "0") || limited {
        return false;
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallopt only sets parameters of glibc's allocator.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
            libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        }
        KEPT.store(true, Relaxed);
        true
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    false
}
