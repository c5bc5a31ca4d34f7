//! Libraries that a build with lazily loaded CUDA (`cargo xtask cuda`) looks for when it uses a device: what is missing is said
//! before anything is called.

use std::ffi::CString;

/// A library, and what brings it.
struct CudaLibrary {
    file: &'static str,
    remedy: &'static str,
}

const TOOLKIT: &str = "install CUDA 13, or: pip install 'cuda-toolkit[cublas,curand,nvrtc]==13.0.*', and name the folder of the \
                       libraries (nvidia/cu13/lib) in EFFATTN_CUDA_LIBS";

const LIBRARIES: &[CudaLibrary] = &[
    CudaLibrary { file: "libcuda.so.1", remedy: "install the driver" },
    CudaLibrary { file: "libcublas.so.13", remedy: TOOLKIT },
    CudaLibrary { file: "libcublasLt.so.13", remedy: TOOLKIT },
    CudaLibrary { file: "libcurand.so.10", remedy: TOOLKIT },
    CudaLibrary { file: "libnvrtc.so.13", remedy: TOOLKIT },
];

/// The folders that are searched before those of the loader, separated by colons.
const FOLDERS: &str = "EFFATTN_CUDA_LIBS";

/// Whether this build looks for its libraries late; otherwise they were there when it started.
const LAZY: bool = option_env!("EFFATTN_LAZY_CUDA").is_some();

/// What is missing and what brings it, in words; none: nothing, or this build was linked with all of them.
pub fn missing() -> Option<String> {
    if LAZY { told(LIBRARIES, &std::env::var(FOLDERS).unwrap_or_default()) } else { None }
}

/// The driver first: without it nothing else matters.
fn told(libraries: &[CudaLibrary], folders: &str) -> Option<String> {
    let missing: Vec<&CudaLibrary> = libraries.iter().filter(|one| !is_found(one.file, folders)).collect();
    let first = missing.first()?;
    let same: Vec<&str> =
        missing.iter().filter(|one| one.remedy == first.remedy).map(|one| one.file).collect();
    Some(format!("{} not found: {}", same.join(", "), first.remedy))
}

fn is_found(file: &str, folders: &str) -> bool {
    let places =
        folders.split(':').filter(|folder| !folder.is_empty()).map(|folder| format!("{folder}/{file}"));
    places.chain([file.to_owned()]).any(|path| opens(&path))
}

/// Whether the loader can open `path`; the library stays open for whoever calls it.
fn opens(path: &str) -> bool {
    let Ok(path) = CString::new(path) else { return false };
    // SAFETY: the path ends with a zero; the initialisers that run are those of the libraries that the program is to use.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    !handle.is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_with_what_brings_it() {
        let a = CudaLibrary { file: "libeffattn-a.so.1", remedy: "install the driver" };
        let (b, c) = (
            CudaLibrary { file: "libeffattn-b.so.13", remedy: TOOLKIT },
            CudaLibrary { file: "libeffattn-c.so.13", remedy: TOOLKIT },
        );
        assert_eq!(told(&[], ""), None);
        let driver = "libeffattn-a.so.1 not found: install the driver";
        assert_eq!(told(&[a], "/nowhere").as_deref(), Some(driver));
        let rest = told(&[b, c], "").unwrap();
        assert!(
            rest.starts_with("libeffattn-b.so.13, libeffattn-c.so.13 not found: install CUDA 13"),
            "{rest}"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_is_found_where_the_loader_looks_and_in_the_named_folders() {
        assert!(is_found("libc.so.6", ""));
        assert!(!is_found("libc.so.99", "/nowhere:"));
    }
}
