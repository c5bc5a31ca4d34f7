//! Files that are there completely or not at all, and files that somebody else named.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

const PREFIX: &str = ".effattn-";
const SUFFIX: &str = ".part";
/// How the name of a file begins that tries whether a folder takes files. Nothing is ever written to one.
const PROBE: &str = ".effattn-probe-";
/// A temporary file that nobody has touched for so long belongs to a process that was killed.
const STALE: Duration = Duration::from_secs(3600);
/// How long a FIFO may have no reader, or one that takes nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// Replaces `path` by `bytes`: written beside it, synced, renamed.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with(path, |file| file.write_all(bytes))
}

/// Replaces `path` by what `fill` writes.
pub fn write_with(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = beside(path)?;
    fill(file.as_file_mut())?;
    file.as_file().sync_data()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// A temporary file that can be renamed to `path`. [`sweep`] knows its name, should this process be killed.
pub fn beside(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    part(PREFIX).tempfile_in(folder_of(path))
}

/// Replaces `path` by the file that `fill` makes under the name that it is given, whatever mode and names of its own it uses
/// meanwhile: [`sweep`] knows the folder that it works in. Synced, renamed.
pub fn write_by<E: From<io::Error>>(path: &Path, fill: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
    let usual = beside(path)?.as_file().metadata()?.permissions();
    let mut builder = tempfile::Builder::new();
    let folder = builder.prefix(PREFIX).suffix(SUFFIX).tempdir_in(folder_of(path))?;
    let written = folder.path().join("written");
    fill(&written)?;
    std::fs::set_permissions(&written, usual)?;
    OpenOptions::new().write(true).open(&written)?.sync_all()?;
    Ok(std::fs::rename(&written, path)?)
}

fn part(prefix: &str) -> tempfile::Builder<'_, '_> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix).suffix(SUFFIX);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666)); // less the umask, as for any file
    }
    builder
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes `bytes` to a file that a person named and that may be there already. A link is followed; mode, owner and
/// hard links of what is there stay, and what is no regular file (a device, a FIFO) is written through.
pub fn write_user_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Ok(there) = std::fs::metadata(path) else {
        let path = target(path); // nothing there, or a link to nothing
        let folder = folder_of(&path);
        if matches!(folder.try_exists(), Ok(false)) {
            let reason = format!("{} does not exist; make it first", folder.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, reason));
        }
        return write(&path, bytes);
    };
    if !there.is_file() {
        return write_through(path, bytes);
    }
    if there.permissions().readonly() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is read-only"));
    }
    let path = path.canonicalize()?;
    if !is_plain(&there, &path) {
        // another name or another owner is only kept by writing into the file itself
        let mut file = OpenOptions::new().write(true).truncate(true).open(&path)?;
        file.write_all(bytes)?;
        return file.sync_data();
    }
    write_with(&path, |file| {
        file.set_permissions(there.permissions())?;
        file.write_all(bytes)
    })
}

/// Where a link to a file that is not there yet leads.
fn target(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..40 {
        let Ok(next) = std::fs::read_link(&path) else { break };
        path = folder_of(&path).join(next);
    }
    path
}

/// Whether a file has one name and belongs to whom a new file would.
#[cfg(unix)]
fn is_plain(there: &std::fs::Metadata, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let own = beside(path).and_then(|file| file.as_file().metadata());
    there.nlink() == 1 && own.is_ok_and(|own| (own.uid(), own.gid()) == (there.uid(), there.gid()))
}

#[cfg(not(unix))]
fn is_plain(_: &std::fs::Metadata, _: &Path) -> bool {
    true
}

/// Writes into a device or a FIFO without waiting for ever: for a reader, or for one that takes nothing.
fn write_through(path: &Path, mut bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let mut file = patiently(|| options.open(path))?;
    while !bytes.is_empty() {
        match patiently(|| file.write(bytes))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => bytes = &bytes[count..],
        }
    }
    Ok(())
}

/// Tries again while there is no reader, or one that takes nothing.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_unread(&error) && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) if is_unread(&error) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "nobody reads it"));
            }
            result => return result,
        }
    }
}

/// Whether a FIFO has no reader, or a full one.
fn is_unread(error: &io::Error) -> bool {
    #[cfg(unix)]
    let alone = error.raw_os_error() == Some(libc::ENXIO);
    #[cfg(not(unix))]
    let alone = false;
    alone || error.kind() == io::ErrorKind::WouldBlock
}

/// Opens a regular file; a FIFO or a device, which might never end, is refused.
pub fn open(path: &Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)
}

/// The bytes of a regular file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a regular file.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    if text.starts_with('\u{feff}') {
        let reason = "it begins with a byte order mark (BOM); save it as UTF-8 without one";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(text)
}

/// `name` as the name of one file: letters, digits, `-`, `.`, `=` and `_`, never a path and never hidden.
pub fn plain_name(name: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "-.=_".contains(letter);
    let name: String =
        name.chars().map(|letter| if plain(letter) { letter } else { '_' }).take(100).collect();
    match name.trim_start_matches('.') {
        "" => "_".to_owned(),
        name => name.to_owned(),
    }
}

/// [`sweep`] of `folder` alone, not of what is below.
pub fn sweep_here(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if file && is_part(&entry.file_name().to_string_lossy()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Removes temporary files that killed processes left anywhere below `folder`, which only the caller may be using.
pub fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        let is_part = is_part(&entry.file_name().to_string_lossy());
        if kind.is_dir() && !is_part {
            sweep(&entry.path());
        } else if kind.is_dir() {
            let _ = std::fs::remove_dir_all(entry.path());
        } else if kind.is_file() && is_part {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_part(name: &str) -> bool {
    // the other forms are those of earlier versions
    let is_of_library = name.len() == ".tmp".len() + 6 && name.starts_with(".tmp");
    name.starts_with(PREFIX) && name.ends_with(SUFFIX) || name.starts_with(".checkpoint-") || is_of_library
}

/// Whether files can be made in `folder` (which is created if missing): tries it. What killed processes left there is
/// removed: such a trial at once, which costs another process nothing, temporary files an hour later.
pub fn ensure_writable(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_part(&name) && (name.starts_with(PROBE) || is_stale(&entry)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    part(PROBE).tempfile_in(folder).map(drop)
}

fn is_stale(entry: &std::fs::DirEntry) -> bool {
    let changed = entry.metadata().ok().filter(std::fs::Metadata::is_file);
    let age = changed.and_then(|file| SystemTime::now().duration_since(file.modified().ok()?).ok());
    age.is_some_and(|age| age > STALE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.toml");
        write(&path, "\u{feff}title = 1".as_bytes()).unwrap();
        assert!(read_to_string(&path).unwrap_err().to_string().contains("byte order mark"));
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.csv");
        write(&path, b"old").unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert!(write(&folder.path().join("missing/rows.csv"), b"x").is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no part file stays");
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = write_user_file(&missing.join("x.html"), b"x").unwrap_err().to_string();
        assert_eq!(error, format!("{} does not exist; make it first", missing.display()));
    }

    #[test]
    fn what_killed_processes_left_is_swept_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cell = folder.path().join("cells/a");
        std::fs::create_dir_all(&cell).unwrap();
        for name in [".effattn-x.part", ".checkpoint-y", ".tmpAb3dEf", "last.safetensors", ".effattn-notes"] {
            std::fs::write(cell.join(name), b"x").unwrap();
        }
        std::fs::create_dir(cell.join(".effattn-w.part")).unwrap();
        std::fs::write(cell.join(".effattn-w.part/.tmpGh1jKl"), b"x").unwrap();
        ensure_writable(&cell).unwrap();
        assert!(cell.join(".effattn-x.part").exists(), "another process may be writing it");
        let (_, probe) = part(PROBE).tempfile_in(&cell).unwrap().keep().unwrap();
        ensure_writable(&cell).unwrap();
        assert!(!probe.exists(), "nobody writes to a trial");
        sweep(folder.path());
        let mut left: Vec<_> =
            std::fs::read_dir(&cell).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".effattn-notes", "last.safetensors"]);
        let old = File::create(cell.join(".effattn-z.part")).unwrap();
        old.set_modified(SystemTime::now() - 2 * STALE).unwrap();
        ensure_writable(&cell).unwrap();
        assert!(!cell.join(".effattn-z.part").exists());
    }

    #[test]
    fn names_from_files_are_never_paths() {
        assert_eq!(plain_name("../../x"), "_.._x");
        assert_eq!(plain_name("/etc/passwd"), "_etc_passwd");
        assert_eq!(plain_name(".."), "_");
        assert_eq!(plain_name("a\0b\\c:d"), "a_b_c_d");
        assert_eq!(plain_name("cos-table5"), "cos-table5");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_a_library_makes_has_the_mode_of_any_other() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        std::fs::write(at("any"), b"1").unwrap();
        let private = |path: &Path| {
            std::fs::write(path, b"2")?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        };
        write_by(&at("made"), private).unwrap();
        assert_eq!((mode("made"), std::fs::read(at("made")).unwrap()), (mode("any"), b"2".to_vec()));
        write_by(&at("made"), |_| Err(io::Error::other("full"))).unwrap_err();
        assert_eq!(std::fs::read(at("made")).unwrap(), b"2");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing stays beside it");
    }

    #[cfg(unix)]
    #[test]
    fn a_named_file_keeps_mode_and_links() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        let chmod = |name: &str, mode| {
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        };
        write_user_file(&at("a"), b"1").unwrap();
        chmod("a", 0o600);
        write_user_file(&at("a"), b"2").unwrap();
        assert_eq!((mode("a"), std::fs::read(at("a")).unwrap()), (0o600, b"2".to_vec()));
        symlink("a", at("link")).unwrap();
        write_user_file(&at("link"), b"3").unwrap();
        assert!(at("link").symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read(at("a")).unwrap(), b"3");
        std::fs::hard_link(at("a"), at("b")).unwrap();
        write_user_file(&at("b"), b"4").unwrap();
        assert_eq!(
            (std::fs::read(at("a")).unwrap(), std::fs::metadata(at("a")).unwrap().nlink()),
            (b"4".to_vec(), 2)
        );
        symlink("not-yet", at("dangling")).unwrap();
        write_user_file(&at("dangling"), b"5").unwrap();
        assert_eq!(std::fs::read(at("not-yet")).unwrap(), b"5");
        chmod("a", 0o444);
        assert!(write_user_file(&at("a"), b"6").unwrap_err().to_string().contains("read-only"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_and_fifos_are_written_through_and_never_waited_for() {
        use std::os::unix::fs::FileTypeExt;
        write_user_file(Path::new("/dev/null"), b"x").unwrap();
        assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        assert!(write_user_file(&fifo, b"x").unwrap_err().to_string().contains("nobody reads it"));
        assert!(open(&fifo).unwrap_err().to_string().contains("not a regular file"));
        let reader = {
            let fifo = fifo.clone();
            std::thread::spawn(move || std::fs::read(fifo).unwrap())
        };
        let long = vec![7; 1 << 20];
        write_user_file(&fifo, &long).unwrap();
        assert!(reader.join().unwrap() == long);
        assert!(std::fs::metadata(&fifo).unwrap().file_type().is_fifo());
    }
}
