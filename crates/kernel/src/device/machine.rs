//! What this machine is and how busy it is.

use std::path::Path;

use serde::Serialize;
use sysinfo::{
    CpuRefreshKind, MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, RefreshKind, System,
};

/// What a manifest says about the machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// Processor.
    pub cpu: String,
    /// Processors this process may use.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// System and version.
    pub os: String,
    /// Architecture.
    pub arch: &'static str,
    /// Widest vector instructions used.
    pub simd: &'static str,
    /// Name in its network; in a Slurm job the node's.
    pub host: String,
    /// What the device calls itself, where it is not the processor.
    pub accelerator: Option<String>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let kinds = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(kinds);
        let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
        Self {
            cpu: brand.filter(|brand| !brand.is_empty()).unwrap_or_else(|| "unknown".to_owned()),
            cores: super::threads::available(),
            memory_bytes: system.total_memory(),
            os: System::long_os_version().unwrap_or_else(|| std::env::consts::OS.to_owned()),
            arch: std::env::consts::ARCH,
            simd: super::simd::level().name(),
            host: host(),
            accelerator: None,
        }
    }
}

/// The name of this machine: Slurm's for the node inside a job, else the system's.
pub fn host() -> String {
    let node = std::env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty());
    node.or_else(System::host_name).unwrap_or_else(|| "unknown".to_owned())
}

/// What of the machine and the allocator times and bytes depend on, in words.
pub fn identity() -> String {
    let Machine { cpu, cores, memory_bytes, os, arch, simd, .. } = Machine::this();
    let pages = if super::alloc::pages_kept() { "pages kept" } else { "pages returned" };
    format!("{cpu}, {cores} cores, {memory_bytes} bytes, {os}, {arch}, {simd}, {pages}")
}

/// Bytes that can still be allocated: what the system calls available, or less where a control group or the limit of
/// the address space (`ulimit -v`) says so.
pub fn free_memory() -> u64 {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = free_in_groups(&groups, Path::new("/sys/fs/cgroup"));
    let addresses = super::alloc::address_space().map(|limit| limit.saturating_sub(mapped()));
    let limits = [Some(system.available_memory()), group, addresses];
    limits.into_iter().flatten().min().unwrap_or(0)
}

/// Bytes of address space in use.
fn mapped() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().next().and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// What the control groups in `groups` (as in `/proc/self/cgroup`) and all those around them still allow; `root` is
/// where they are mounted. Both versions of control groups are known.
fn free_in_groups(groups: &str, root: &Path) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(kinds), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, files) = match kinds {
            "" => (root.to_owned(), ["memory.max", "memory.current", "inactive_file"]),
            kinds if kinds.split(',').any(|kind| kind == "memory") => (
                root.join("memory"),
                ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
            ),
            _ => continue,
        };
        let own = base.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&base)) {
            let number =
                |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
            let Some(limit) = number(files[0]) else { continue };
            let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let cache = stat.lines().find_map(|line| line.strip_prefix(files[2])?.trim().parse::<u64>().ok());
            let used = number(files[1]).unwrap_or(0).saturating_sub(cache.unwrap_or(0));
            let free = limit.saturating_sub(used);
            least = Some(least.map_or(free, |least: u64| least.min(free)));
        }
    }
    least
}

/// Processors of the machine that other programs keep busy just now, and how many it has: looked at for a fifth of a second,
/// in which this one waits. The load average would count a build that has just ended.
pub fn busy_cores() -> (f64, usize) {
    let kinds = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing().with_cpu_usage());
    let mut system = System::new_with_specifics(kinds);
    std::thread::sleep(sysinfo::MINIMUM_CPU_UPDATE_INTERVAL);
    system.refresh_cpu_usage();
    let shares = system.cpus().iter().map(|cpu| f64::from(cpu.cpu_usage()) / 100.0);
    (shares.sum(), system.cpus().len())
}

/// Load average of the last minute; none where the system has none.
pub fn load() -> Option<f64> {
    let load = System::load_average().one;
    (load.is_finite() && !cfg!(windows)).then_some(load)
}

/// Resident bytes of processes, read again and again.
#[derive(Debug, Default)]
pub struct Resident(System);

impl Resident {
    /// Resident bytes of process `id` now; none if it is gone.
    pub fn of(&mut self, id: u32) -> Option<u64> {
        let pid = Pid::from_u32(id);
        let kind = ProcessRefreshKind::nothing().with_memory();
        self.0.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, kind);
        self.0.process(pid).map(sysinfo::Process::memory)
    }

    /// Highest resident size of this process so far, where the system tells (Linux), else the size now.
    pub fn own_peak(&mut self) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kilobytes.map_or_else(|| self.own(), |kilobytes| kilobytes << 10)
    }

    /// Resident bytes of this process now.
    pub fn own(&mut self) -> u64 {
        self.of(std::process::id()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_of_nested_control_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        put("memory/job/memory.limit_in_bytes", "1000\n");
        put("memory/job/memory.usage_in_bytes", "300\n");
        put("memory/job/memory.stat", "cache 1\ntotal_inactive_file 100\n");
        put("memory/job/step/memory.limit_in_bytes", "5000\n");
        let free = |groups: &str| free_in_groups(groups, root.path());
        assert_eq!(free("7:cpu:/x\n4:memory:/job/step\n"), Some(800), "version 1");
        put("a/memory.max", "max\n");
        put("a/b/memory.max", "700\n");
        put("a/b/memory.current", "200\n");
        assert_eq!(free("0::/a/b/c\n"), Some(500), "version 2");
        assert_eq!(free(""), None);
    }

    #[test]
    fn resident_bytes_grow_with_touched_memory() {
        let mut resident = Resident::default();
        // other tests of this process take and give back memory meanwhile
        let grows = |_| {
            let before = resident.own();
            let touched = std::hint::black_box(vec![1u8; 64 << 20]);
            let after = resident.own();
            drop(touched);
            std::thread::sleep(std::time::Duration::from_millis(5));
            // the system counts pages of threads in batches
            after >= before + (60 << 20) && resident.own_peak() + (4 << 20) >= after
        };
        assert!((0..400).any(grows));
        assert!(free_memory() > 0 && Machine::this().memory_bytes >= free_memory());
    }
}
