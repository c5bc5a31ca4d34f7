//! Counted memory: live and peak bytes of this process, with a limit; what is large begins with a line of the cache.
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

/// A global allocator that counts bytes over the system's allocator and aligns large memory to 64 bytes.
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

/// Bytes of a line of the cache, and of the widest vectors.
const LINE: usize = 64;

/// Least size of memory that begins with a line.
const LINED: usize = 4096;

/// Alignment of what the system gives, with room for a pointer.
const GIVEN: usize = 16;

/// What is asked of the system for large memory, so that it can begin with a line, behind a pointer to what was given. malloc aligns
/// to 16 bytes: then every vector of 64 bytes is loaded from two lines, and a tile of AMX in three times the time. Asking malloc for the
/// alignment takes longer, and memory full of zeros would be written.
fn lined(layout: Layout) -> Option<Layout> {
    if layout.size() < LINED || layout.align() > GIVEN {
        return None;
    }
    Layout::from_size_align(layout.size().saturating_add(LINE), GIVEN).ok()
}

/// The first line in `given` that leaves room for the pointer before it.
///
/// # Safety
///
/// It was given for what [`lined`] asks.
unsafe fn line(given: *mut u8) -> *mut u8 {
    // SAFETY: of the LINE bytes that are too many, at least GIVEN lie before the line.
    unsafe {
        let line = given.add(LINE - given.addr() % LINE);
        line.cast::<*mut u8>().sub(1).write(given);
        line
    }
}

// SAFETY: every call is forwarded to `System`; large memory begins at a line of what it gave, which follows from the layout alone, so that it
// is given back as it was taken. Besides, only counters are touched.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        match lined(layout) {
            Some(asked) => unsafe { line(given(System.alloc(asked), layout.size())) },
            None => given(unsafe { System.alloc(layout) }, layout.size()),
        }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        match lined(layout) {
            Some(asked) => unsafe { System.dealloc(ptr.cast::<*mut u8>().sub(1).read(), asked) },
            None => unsafe { System.dealloc(ptr, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        match lined(layout) {
            Some(asked) => unsafe { line(given(System.alloc_zeroed(asked), layout.size())) },
            None => given(unsafe { System.alloc_zeroed(layout) }, layout.size()),
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller holds that `new_size` can be aligned so.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        if lined(layout).is_none() && lined(new).is_none() {
            grow(new_size);
            LIVE.fetch_sub(layout.size(), Relaxed);
            return given(unsafe { System.realloc(ptr, layout, new_size) }, new_size);
        }
        // SAFETY: both are as large as what is copied.
        unsafe {
            let to = self.alloc(new);
            ptr.copy_to_nonoverlapping(to, layout.size().min(new_size));
            self.dealloc(ptr, layout);
            to
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_begins_with_a_line_and_keeps_what_it_holds() {
        let sizes = [1, LINED - 1, LINED, LINED + 1, 1 << 20, 3, 5 * LINED, LINED - 1];
        let layout = |size| Layout::from_size_align(size, 4).unwrap();
        // SAFETY: memory is given back with the layout that it was last taken for, and is as large as what is written and read.
        unsafe {
            for zeroed in [false, true] {
                let take = if zeroed { CountingAllocator::alloc_zeroed } else { CountingAllocator::alloc };
                let mut memory = take(&CountingAllocator, layout(sizes[0]));
                assert!(!zeroed || memory.read() == 0);
                for sizes in sizes.windows(2) {
                    let [before, now] = [sizes[0], sizes[1]];
                    memory.add(before - 1).write(9);
                    memory.write(7);
                    memory = CountingAllocator.realloc(memory, layout(before), now);
                    assert!(now < LINED || memory.addr().is_multiple_of(LINE), "{sizes:?}");
                    assert!(memory.read() == 7, "{sizes:?}");
                    assert!(before == 1 || now < before || memory.add(before - 1).read() == 9, "{sizes:?}");
                }
                CountingAllocator.dealloc(memory, layout(LINED - 1));
                for align in [1, 64, 4096] {
                    let layout = Layout::from_size_align(1 << 16, align).unwrap();
                    let memory = take(&CountingAllocator, layout);
                    assert!(memory.addr().is_multiple_of(align.max(LINE)), "{align}");
                    assert!(!zeroed || (0..1 << 16).all(|at| memory.add(at).read() == 0));
                    CountingAllocator.dealloc(memory, layout);
                }
            }
        }
    }
}
