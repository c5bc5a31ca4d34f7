//! SHA-256 of many files. A tree of images is read once: what was hashed is remembered in the user's cache folder, by name, size,
//! times and inode of the file.

use std::collections::HashMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::content_hash::{file_digest, hex};
use crate::{DataError, data_dir, store};
use effattn_record::file;

/// Bytes of a file's state and of its content's digest: one record of the file in the cache folder.
const STATE: usize = 16;
const RECORD: usize = STATE + 32;
/// Most bytes that are read of what was remembered: 20 million files.
const LARGEST: u64 = 20_000_000 * RECORD as u64;
/// A file that was written less long ago is not remembered: it could change once more without its times telling.
const SETTLED: Duration = Duration::from_secs(2);

type State = [u8; STATE];
type Content = [u8; 32];

/// The digests of `files`, which lie below `folder`, in their order.
pub fn digests(folder: &Path, files: &[PathBuf]) -> Result<Vec<Content>, DataError> {
    let place = place(folder);
    let known = read(&place);
    let one = |path: &PathBuf| {
        let refuse = |error: std::io::Error| store::bad_file(path, error.to_string());
        let before = state(folder, path).map_err(refuse)?;
        if let Some(digest) = before.as_ref().and_then(|state| known.get(state)) {
            return Ok((before, *digest));
        }
        let digest = file_digest(path).map_err(refuse)?;
        let after = state(folder, path).map_err(refuse)?;
        Ok((after.filter(|state| before == Some(*state)), digest))
    };
    let found: Vec<(Option<State>, Content)> = files.par_iter().map(one).collect::<Result<_, DataError>>()?;
    let settled = found.iter().filter_map(|(state, digest)| Some((state.as_ref()?, digest)));
    if settled.clone().any(|(state, _)| !known.contains_key(state)) {
        let records: Vec<u8> =
            settled.flat_map(|(state, digest)| state.iter().chain(digest)).copied().collect();
        let written = place.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(error) = written.and_then(|()| file::write(&place, &records)) {
            log::info!("{}: {error}; the images will be read again at the next start", place.display());
        }
    }
    Ok(found.into_iter().map(|(_, digest)| digest).collect())
}

/// Where digests of the files below `folder` are remembered.
fn place(folder: &Path) -> PathBuf {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = Sha256::digest(whole.as_os_str().as_encoded_bytes());
    data_dir::default_dir().join("hashes").join(hex(&name[..STATE]))
}

/// What is remembered in `place`; nothing where it cannot be read. A record that is cut off is none.
fn read(place: &Path) -> HashMap<State, Content> {
    let bytes = file::open(place).and_then(|file| store::read_limited(file, LARGEST)).unwrap_or_default();
    let records = bytes.chunks_exact(RECORD).filter_map(|record| {
        let (state, digest) = record.split_at(STATE);
        Some((state.try_into().ok()?, digest.try_into().ok()?))
    });
    records.collect()
}

/// What changes whenever `path` is written: its name below `folder`, size, times and inode. None while it may still change
/// within the resolution of its times.
fn state(folder: &Path, path: &Path) -> std::io::Result<Option<State>> {
    let metadata = path.metadata()?;
    let name = path.strip_prefix(folder).unwrap_or(path).as_os_str().as_encoded_bytes();
    let (newest, numbers) = times(&metadata);
    let settled = SystemTime::now().duration_since(newest).is_ok_and(|age| age > SETTLED);
    let mut hash = Sha256::new();
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    hash.update(metadata.len().to_le_bytes());
    numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
    let mut state = [0; STATE];
    state.copy_from_slice(&hash.finalize()[..STATE]);
    Ok(settled.then_some(state))
}

/// The last time that content or attributes were written, and the numbers that change with it. A time that was set back (`touch`)
/// changes the second one.
#[cfg(unix)]
fn times(metadata: &Metadata) -> (SystemTime, Vec<i64>) {
    use std::os::unix::fs::MetadataExt;
    let at = |seconds: i64, nanoseconds: i64| {
        let since = Duration::new(seconds.max(0) as u64, nanoseconds.clamp(0, 999_999_999) as u32);
        SystemTime::UNIX_EPOCH + since
    };
    let (modified, changed) =
        ((metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec()));
    let newest = at(modified.0, modified.1).max(at(changed.0, changed.1));
    let inode = [metadata.dev() as i64, metadata.ino() as i64];
    (newest, [modified.0, modified.1, changed.0, changed.1].into_iter().chain(inode).collect())
}

/// The last time that content was written, and its numbers.
#[cfg(not(unix))]
fn times(metadata: &Metadata) -> (SystemTime, Vec<i64>) {
    let modified = metadata.modified().unwrap_or_else(|_| SystemTime::now());
    let since = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (modified, vec![since.as_secs() as i64, i64::from(since.subsec_nanos())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_holds_until_the_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.png");
        std::fs::write(&file, "one").unwrap();
        assert_eq!(state(folder.path(), &file).unwrap(), None, "just written");
        let (_, first) = times(&file.metadata().unwrap());
        // the same size and time of modification: the time of change tells
        let modified = file.metadata().unwrap().modified().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&file, "two").unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_modified(modified).unwrap();
        if cfg!(unix) {
            assert_ne!(times(&file.metadata().unwrap()).1, first);
        }
        let place = folder.path().join("remembered");
        std::fs::write(&place, [1; RECORD + 7]).unwrap();
        assert_eq!(read(&place), HashMap::from([([1; STATE], [1; 32])]), "a record that is cut off is none");
        assert!(read(&folder.path().join("none")).is_empty());
    }

    #[test]
    fn digests_are_those_of_the_contents() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| folder.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "x").unwrap());
        let first = digests(folder.path(), &files).unwrap();
        assert_eq!(first[0], first[1]);
        std::fs::write(&files[1], "y").unwrap();
        let second = digests(folder.path(), &files).unwrap();
        assert!(second[0] == first[0] && second[1] != first[1]);
        let error = digests(folder.path(), &[folder.path().join("c")]).unwrap_err().to_string();
        assert!(error.contains("c: "), "{error}");
    }
}
