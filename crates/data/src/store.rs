//! Finding and opening data files: plain, gzip, tar.gz or zip, as streams with limits.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;

use super::DataError;
use effattn_record::file;

/// Most bytes of wanted members that one archive or folder may hold together.
const HELD: u64 = 256 << 20;
/// Most bytes that an archive may unpack to, unwanted members included.
const UNPACKED: u64 = 4 << 30;
/// Most bytes of a member's name, and of the extension header it may stand in.
const NAME: u64 = 1 << 16;

/// The first of `names` that exists in `dir` or in one of its direct subfolders (in name order).
pub fn find(dir: &Path, names: &[&str]) -> Option<PathBuf> {
    find_if(dir, names, Path::exists)
}

/// As [`find`], files only: a folder may have the name of what is in it.
pub fn find_file(dir: &Path, names: &[&str]) -> Option<PathBuf> {
    find_if(dir, names, Path::is_file)
}

fn find_if(dir: &Path, names: &[&str], fits: fn(&Path) -> bool) -> Option<PathBuf> {
    let here = names.iter().map(|name| dir.join(name)).find(|path| fits(path));
    here.or_else(|| {
        let mut folders: Vec<PathBuf> = std::fs::read_dir(dir)
            .ok()?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.is_dir())
            .collect();
        folders.sort();
        folders.iter().find_map(|folder| names.iter().map(|name| folder.join(name)).find(|path| fits(path)))
    })
}

/// An error about a file.
pub fn bad_file(file: &Path, reason: impl Into<String>) -> DataError {
    DataError::File { file: file.to_owned(), reason: reason.into() }
}

/// Opens a file; a name that ends in `.gz` is unpacked on the way.
pub fn open(file: &Path) -> Result<Box<dyn Read>, DataError> {
    let raw = file::open(file).map_err(|error| bad_file(file, format!("cannot be opened ({error})")))?;
    let buffered = BufReader::with_capacity(1 << 20, raw);
    let gzip = file.extension().is_some_and(|extension| extension == "gz" || extension == "tgz");
    Ok(if gzip { Box::new(Members(Some(GzDecoder::new(buffered)))) } else { Box::new(buffered) })
}

/// The members of a gzip file one after another, as gzip(1) reads them: zeros behind the last one are padding.
struct Members<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            let count = member.read(out)?;
            if count > 0 || out.is_empty() {
                return Ok(count);
            }
            let Some(mut rest) = self.0.take().map(GzDecoder::into_inner) else { break };
            loop {
                let next = rest.fill_buf()?;
                let zeros = next.iter().take_while(|byte| **byte == 0).count();
                let (ended, padded) = (next.is_empty(), zeros == next.len());
                rest.consume(zeros);
                match (ended, padded) {
                    (true, _) => return Ok(0),
                    (_, true) => {}
                    _ => break,
                }
            }
            self.0 = Some(GzDecoder::new(rest));
        }
        Ok(0)
    }
}

/// Reads at most `limit` bytes and fails on more: a compressed file cannot fill the memory.
pub fn read_limited(reader: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("it is larger than {limit} bytes, the most that was expected")));
    }
    Ok(bytes)
}

/// Calls `visit` with the number (from 1) and the bytes of every line of `file`, its end included.
pub fn each_line(
    file: &Path,
    longest: usize,
    visit: impl FnMut(usize, &[u8]) -> Result<(), String>,
) -> Result<(), DataError> {
    lines(open(file)?, file, longest, visit)
}

/// [`each_line`] of what `from` reads; messages call it `file`.
pub fn lines(
    from: impl Read,
    file: &Path,
    longest: usize,
    mut visit: impl FnMut(usize, &[u8]) -> Result<(), String>,
) -> Result<(), DataError> {
    let mut reader = BufReader::with_capacity(1 << 20, from);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let wrong = |reason: String| DataError::Line { file: file.to_owned(), line: number, reason };
        let read = (&mut reader)
            .take(longest as u64 + 1)
            .read_until(b'\n', &mut line)
            .map_err(|error| wrong(format!("cannot be read ({error})")))?;
        match read {
            0 => break,
            read if read > longest => return Err(wrong(format!("is longer than {longest} bytes"))),
            _ => visit(number, &line).map_err(wrong)?,
        }
    }
    Ok(())
}

/// Calls `visit` with path and content of every regular file that `wanted` accepts, in a folder or a tar
/// archive (plain or gzip). Links and other special members are passed over.
pub fn each_file(
    source: &Path,
    limit: u64,
    wanted: impl Fn(&str) -> bool,
    mut visit: impl FnMut(&str, Vec<u8>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut held = 0;
    let mut visit = |path: &str, bytes: Vec<u8>| {
        held += bytes.len() as u64;
        if held > HELD {
            return Err(bad_file(
                source,
                format!("contains more than {HELD} bytes, the most that was expected"),
            ));
        }
        visit(path, bytes)
    };
    if source.is_dir() {
        return each_in_folder(source, source, limit, &wanted, &mut visit);
    }
    // Raw members: what a name in an extension header may hold is limited here.
    let mut archive = tar::Archive::new(open(source)?.take(UNPACKED));
    let broken = |error: io::Error| {
        bad_file(source, format!("cannot be read to its end ({error}); it may be cut off: fetch it again"))
    };
    let mut long = None;
    for entry in archive.entries().map_err(broken)?.raw(true) {
        let mut entry = entry.map_err(broken)?;
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            let name = read_limited(&mut entry, NAME).map_err(broken)?;
            long = Some(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned());
            continue;
        }
        if kind.is_pax_local_extensions() {
            let text = read_limited(&mut entry, NAME).map_err(broken)?;
            long = pax_path(&text).or(long);
            continue;
        }
        let long = long.take();
        if !kind.is_file() {
            continue;
        }
        let short = entry.path().map(|path| path.to_string_lossy().into_owned());
        let Some(path) = long.or(short.ok()) else { continue };
        if wanted(&path) {
            let bytes = read_limited(entry, limit).map_err(broken)?;
            visit(&path, bytes)?;
        }
    }
    Ok(())
}

/// The path in a pax header: lines of `LENGTH KEY=VALUE`.
fn pax_path(text: &[u8]) -> Option<String> {
    let fields = tar::PaxExtensions::new(text).flatten();
    let paths = fields.filter(|field| field.key_bytes() == b"path");
    paths.last().map(|field| String::from_utf8_lossy(field.value_bytes()).into_owned())
}

fn each_in_folder(
    root: &Path,
    folder: &Path,
    limit: u64,
    wanted: &impl Fn(&str) -> bool,
    visit: &mut impl FnMut(&str, Vec<u8>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let unreadable = |error: io::Error| bad_file(folder, format!("cannot be read ({error})"));
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(unreadable)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()
        .map_err(unreadable)?;
    paths.sort();
    for path in paths {
        let Ok(kind) = path.symlink_metadata().map(|meta| meta.file_type()) else { continue };
        let relative = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        if kind.is_dir() {
            each_in_folder(root, &path, limit, wanted, visit)?;
        } else if kind.is_file() && wanted(&relative) {
            let bytes = file::open(&path)
                .and_then(|file| read_limited(file, limit))
                .map_err(|error| bad_file(&path, format!("cannot be read ({error})")))?;
            visit(&relative, bytes)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn archive(members: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::Builder::new().suffix(".tar.gz").tempfile().expect("a file");
        let mut builder = tar::Builder::new(flate2::write::GzEncoder::new(
            file.reopen().expect("the file"),
            flate2::Compression::fast(),
        ));
        for (name, bytes) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_cksum();
            builder.append_data(&mut header, name, *bytes).expect("a member");
        }
        builder.into_inner().expect("the archive").finish().expect("the end");
        file
    }

    #[test]
    fn a_gzip_file_is_read_to_its_last_member() {
        let file = tempfile::Builder::new().suffix(".txt.gz").tempfile().expect("a file");
        for text in ["one\n", "two\n"] {
            let mut member = flate2::write::GzEncoder::new(file.as_file(), flate2::Compression::fast());
            member.write_all(text.as_bytes()).expect("a text");
            member.finish().expect("the end");
        }
        let read = || read_limited(open(file.path()).expect("the file"), 99);
        assert_eq!(read().expect("its texts"), b"one\ntwo\n");
        file.as_file().write_all(&[0; 5000]).expect("padding");
        assert_eq!(read().expect("its texts"), b"one\ntwo\n");
        file.as_file().write_all(b"no member").expect("more");
        assert!(read().is_err());
    }

    #[test]
    fn a_member_above_the_limit_is_refused() {
        let file = archive(&[("a.txt", &[7; 100])]);
        let read = |limit| each_file(file.path(), limit, |_| true, |_, _| Ok(()));
        assert!(read(100).is_ok());
        assert!(read(99).expect_err("too large").to_string().contains("larger than 99 bytes"));
    }

    #[test]
    fn an_archive_holds_no_more_than_is_expected() {
        let long = "x/".repeat(200) + "a.txt";
        let file = archive(&[(&long, b"1")]);
        let mut seen = Vec::new();
        let visit = |name: &str, _| {
            seen.push(name.to_owned());
            Ok(())
        };
        each_file(file.path(), 10, |name| name.ends_with("a.txt"), visit).expect("a long name");
        assert_eq!(seen, [long]);
        // a name that would fill the memory
        let bomb = archive(&[(&"y".repeat(1 << 20), b"1")]);
        let error = each_file(bomb.path(), 10, |_| true, |_, _| Ok(())).expect_err("a name of 1 MiB");
        assert!(error.to_string().contains("larger than 65536 bytes"), "{error}");
        let zeros = vec![0; 1 << 20];
        let members: Vec<(String, &[u8])> = (0..300).map(|index| (format!("{index}"), &zeros[..])).collect();
        let members: Vec<(&str, &[u8])> = members.iter().map(|(name, bytes)| (&name[..], *bytes)).collect();
        let many = archive(&members);
        let mut count = 0;
        let error = each_file(
            many.path(),
            1 << 20,
            |_| true,
            |_, _| {
                count += 1;
                Ok(())
            },
        );
        assert!(error.expect_err("300 MiB").to_string().contains("contains more than") && count == 256);
    }

    #[test]
    fn an_archive_that_is_cut_off_is_an_error() {
        let noise: Vec<u8> = (0..200_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let file = archive(&[("a.txt", &noise)]);
        let bytes = std::fs::read(file.path()).expect("bytes");
        let mut cut = tempfile::Builder::new().suffix(".tar.gz").tempfile().expect("a file");
        cut.write_all(&bytes[..bytes.len() / 2]).expect("half");
        let error = each_file(cut.path(), 1 << 20, |_| true, |_, _| Ok(())).expect_err("cut off");
        assert!(error.to_string().contains("fetch it again"), "{error}");
    }

    #[test]
    fn folders_and_archives_look_alike() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("x")).expect("x");
        std::fs::write(dir.path().join("x/a.txt"), b"1").expect("a");
        std::fs::write(dir.path().join("b.bin"), b"2").expect("b");
        let file = archive(&[("x/a.txt", b"1"), ("b.bin", b"2")]);
        for source in [dir.path(), file.path()] {
            let mut seen = Vec::new();
            let wanted = |name: &str| name.ends_with(".txt");
            let visit = |name: &str, bytes| {
                seen.push((name.to_owned(), bytes));
                Ok(())
            };
            each_file(source, 10, wanted, visit).expect("readable");
            assert_eq!(seen, [("x/a.txt".to_owned(), b"1".to_vec())]);
        }
    }
}
