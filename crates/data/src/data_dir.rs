//! Where data sets lie.

use std::path::PathBuf;

/// The user's cache folder for effattn.
pub fn default_dir() -> PathBuf {
    let home = || std::env::var_os("HOME").or_else(|| std::env::var_os("USERPROFILE")).map(PathBuf::from);
    let cache = if cfg!(windows) {
        std::env::var_os("LOCALAPPDATA").map(PathBuf::from)
    } else if cfg!(target_os = "macos") {
        home().map(|home| home.join("Library/Caches"))
    } else {
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        xdg.or_else(|| home().map(|home| home.join(".cache")))
    };
    cache.unwrap_or_else(|| PathBuf::from(".")).join("effattn")
}
