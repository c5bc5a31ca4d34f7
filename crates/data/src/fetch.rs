//! Bringing data sets into a folder: from their canonical address, or from a file that a person has. Nothing passes
//! as complete whose size and checksum are not the published ones.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use md5::Md5;
use sha2::{Digest, Sha256};

use effattn_record::file;

/// A published checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// MD5, where nothing better was published.
    Md5(&'static str),
    /// SHA-256.
    Sha256(&'static str),
}

/// A file at its canonical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadSource {
    /// Name on the command line.
    pub name: &'static str,
    /// Name of the file in the data folder.
    pub file: &'static str,
    /// Every name that loading looks for.
    pub names: &'static [&'static str],
    /// Address.
    pub url: &'static str,
    /// Size in bytes, where published.
    pub bytes: Option<u64>,
    /// Checksum of the file.
    pub sum: Sum,
}

/// Why a file was not brought.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The address cannot be reached.
    #[error("{url} cannot be reached ({reason}); if you already have the file: effattn fetch {name} --from FILE, or place {file} in {}", dir.display())]
    Unreachable {
        /// Data set.
        name: &'static str,
        /// File.
        file: &'static str,
        /// Address.
        url: String,
        /// Data folder.
        dir: PathBuf,
        /// What the network says.
        reason: String,
    },
    /// It is not the published file.
    #[error("{} is not the published {name}: {reason}", path.display())]
    Other {
        /// Data set.
        name: &'static str,
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// The folder cannot be written, or the file not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// It was there and is whole.
    AlreadyPresent(PathBuf),
    /// It was brought.
    Downloaded(PathBuf),
}

/// The least that a download must bring, or it is given up.
#[derive(Clone, Copy)]
struct Pace {
    stall: Duration,
    least: u64,
}

const PACE: Pace = Pace { stall: Duration::from_secs(60), least: 60 << 10 };

/// Hears bytes so far and in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, Option<u64>);

/// Brings `source` into `dir`, from the file `from` where one is given. A part of an earlier download is continued.
pub fn fetch(
    source: &DownloadSource,
    dir: &Path,
    from: Option<&Path>,
    progress: Progress,
) -> Result<Fetched, FetchError> {
    let target = dir.join(source.file);
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error| FetchError::Io { path, source: error }
    };
    file::ensure_writable(dir).map_err(io(dir))?;
    if target.exists() {
        source.check(&target)?;
        return Ok(Fetched::AlreadyPresent(target));
    }
    if let Some(from) = from {
        source.check(from).map_err(|error| source.part(error, from, dir))?;
        let copy = |out: &mut File| io::copy(&mut file::open(from)?, out).map(drop);
        file::write_with(&target, copy).map_err(io(&target))?;
        return Ok(Fetched::Downloaded(target));
    }
    let part = dir.join(format!("{}.part", source.file));
    source.download(source.url, (&part, dir), PACE, progress)?;
    if let Err(error) = source.check(&part) {
        let _ = std::fs::remove_file(&part); // what is wrong cannot be continued
        return Err(error);
    }
    std::fs::rename(&part, &target).map_err(io(&target))?;
    Ok(Fetched::Downloaded(target))
}

impl DownloadSource {
    /// `error` about the file `from`, with what to do if it is a part of the set.
    fn part(&self, error: FetchError, from: &Path, dir: &Path) -> FetchError {
        let FetchError::Other { name, path, reason } = error else { return error };
        let same = |file: &&&str| Path::new(file).extension() == from.extension();
        let file = self.names.iter().find(same).copied().unwrap_or(self.file);
        let dir = dir.display();
        let reason = format!(
            "{reason}; to use a part of the set, place it in {dir} as {file} and give --allow-partial"
        );
        FetchError::Other { name, path, reason }
    }

    /// Makes sure that the file at `path` is the published one.
    pub fn check(&self, path: &Path) -> Result<(), FetchError> {
        let io = |source| FetchError::Io { path: path.to_owned(), source };
        let other = |reason| FetchError::Other { name: self.name, path: path.to_owned(), reason };
        let mut file = file::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if let Some(bytes) = self.bytes.filter(|bytes| *bytes != size) {
            return Err(other(format!("it has {size} bytes, expected {bytes}")));
        }
        let (kind, wanted, found) = match self.sum {
            Sum::Md5(wanted) => ("MD5", wanted, digest::<Md5>(&mut file).map_err(io)?),
            Sum::Sha256(wanted) => ("SHA-256", wanted, digest::<Sha256>(&mut file).map_err(io)?),
        };
        if found == wanted {
            return Ok(());
        }
        Err(other(format!("its {kind} is {found}, expected {wanted}")))
    }

    /// Appends what is missing of `part`.
    fn download(
        &self,
        url: &str,
        (part, dir): (&Path, &Path),
        pace: Pace,
        progress: Progress,
    ) -> Result<(), FetchError> {
        let io = |source| FetchError::Io { path: part.to_owned(), source };
        let unreachable = |reason: String| FetchError::Unreachable {
            name: self.name,
            file: self.file,
            url: url.to_owned(),
            dir: dir.to_owned(),
            reason,
        };
        let mut have = part.metadata().map_or(0, |meta| meta.len());
        if self.bytes.is_some_and(|bytes| have >= bytes) {
            have = 0;
        }
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .build()
            .into();
        let mut request = agent.get(url);
        if have > 0 {
            request = request.header("Range", format!("bytes={have}-"));
        }
        let response = match request.call() {
            // nothing follows what was kept: it is whole, or another file, as its checksum will tell
            Err(ureq::Error::StatusCode(416)) if have > 0 => return Ok(()),
            response => response.map_err(|error| unreachable(error.to_string()))?,
        };
        if response.status().as_u16() != 206 {
            have = 0; // the server starts over
        }
        let rest = response.body().content_length();
        let total = self.bytes.or(rest.map(|rest| have + rest));
        let mut out = OpenOptions::new().create(true).write(true).truncate(false).open(part).map_err(io)?;
        out.set_len(have).map_err(io)?;
        io::Seek::seek(&mut out, io::SeekFrom::End(0)).map_err(io)?;
        let most = total.unwrap_or(1 << 34);
        let reader = response.into_body().into_reader().take(most.saturating_sub(have) + 1);
        let chunks = chunks(reader);
        let slow = |have: u64| {
            let seconds = pace.stall.as_secs_f64();
            unreachable(format!(
                "fewer than {} bytes came in {seconds} s; {have} are kept, and the same command continues",
                pace.least
            ))
        };
        let (mut since, mut mark) = (Instant::now(), have);
        loop {
            let bytes = match chunks.recv_timeout(pace.stall) {
                Ok(read) => read.map_err(|error| unreachable(error.to_string()))?,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => return Err(slow(have)),
            };
            out.write_all(&bytes).map_err(io)?;
            have += bytes.len() as u64;
            progress(have, total);
            if since.elapsed() >= pace.stall {
                if have - mark < pace.least {
                    return Err(slow(have));
                }
                (since, mark) = (Instant::now(), have);
            }
        }
        out.sync_data().map_err(io)?;
        if total.is_some_and(|total| have < total) {
            let reason = format!("it ended after {have} bytes; the same command continues");
            return Err(unreachable(reason));
        }
        Ok(())
    }
}

/// What `reader` gives, read on a thread of its own: a server that falls silent cannot be interrupted, only left.
fn chunks(mut reader: impl Read + Send + 'static) -> Receiver<io::Result<Vec<u8>>> {
    let (sender, chunks) = mpsc::sync_channel(4);
    std::thread::spawn(move || {
        loop {
            let mut buffer = vec![0; 1 << 16];
            let read = reader.read(&mut buffer).map(|count| {
                buffer.truncate(count);
                buffer
            });
            let (done, failed) = (matches!(&read, Ok(bytes) if bytes.is_empty()), read.is_err());
            if done || sender.send(read).is_err() || failed {
                return;
            }
        }
    });
    chunks
}

fn digest<D: Digest>(reader: &mut impl Read) -> io::Result<String> {
    let mut hash = D::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = reader.read(&mut buffer)?;
        if count == 0 {
            return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        hash.update(&buffer[..count]);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    use super::*;

    const SMALL: DownloadSource = DownloadSource {
        name: "enwik8",
        file: "small.zip",
        names: &["small", "small.zip", "small.gz"],
        url: "http://localhost:1/small.zip",
        bytes: Some(11),
        sum: Sum::Sha256("b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9"),
    };

    /// Answers one request with `answer` cut at what Range asks for; gives the address.
    fn serve(answer: &'static [u8], cut: usize) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut from = 0;
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let line = line.unwrap().to_lowercase();
                if let Some(range) = line.strip_prefix("range: bytes=") {
                    from = range.trim_end_matches('-').parse().unwrap();
                }
                if line.is_empty() {
                    break;
                }
            }
            let status = match from {
                0 => "200 OK",
                from if from < answer.len() => "206 Partial Content",
                _ => "416 Range Not Satisfiable",
            };
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                answer.len() - from
            );
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&answer[from..answer.len() - cut]).unwrap();
        });
        format!("http://{address}/small.zip")
    }

    #[test]
    fn a_download_that_broke_off_is_continued() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("small.zip.part");
        let get = |url: &str| SMALL.download(url, (&part, dir.path()), PACE, &mut |_, _| ());
        assert!(get(&serve(b"hello world", 6)).is_err());
        assert_eq!(std::fs::read(&part).unwrap(), b"hello");
        get(&serve(b"hello world", 0)).unwrap();
        SMALL.check(&part).unwrap();
        // killed behind the last byte, of a file whose size is not known
        let unknown = DownloadSource { bytes: None, ..SMALL };
        unknown.download(&serve(b"hello world", 0), (&part, dir.path()), PACE, &mut |_, _| ()).unwrap();
        SMALL.check(&part).unwrap();
    }

    /// Answers one request with a byte every `pause`, for ever.
    fn drip(pause: Duration) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.map_while(Result::ok).take_while(|line| !line.is_empty()).for_each(drop);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n");
            loop {
                std::thread::sleep(pause);
                if stream.write_all(b"h").and_then(|()| stream.flush()).is_err() {
                    return;
                }
            }
        });
        format!("http://{address}/small.zip")
    }

    #[test]
    fn a_silent_or_dripping_server_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("small.zip.part");
        let pace = Pace { stall: Duration::from_millis(300), least: 9 };
        for pause in [Duration::from_secs(60), Duration::from_millis(100)] {
            let got = SMALL.download(&drip(pause), (&part, dir.path()), pace, &mut |_, _| ());
            let said = got.unwrap_err().to_string();
            assert!(said.contains("fewer than 9 bytes came in 0.3 s"), "{said}");
        }
    }

    #[test]
    fn what_is_not_the_published_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("copy");
        let get = |text: &str| {
            std::fs::write(&copy, text).unwrap();
            fetch(&SMALL, dir.path(), Some(&copy), &mut |_, _| ())
        };
        let part = get("hello").unwrap_err().to_string();
        assert!(part.contains("it has 5 bytes, expected 11") && part.contains("--allow-partial"), "{part}");
        assert!(part.contains(" as small and"), "the name that a file without ending is read under: {part}");
        assert!(get("hello_world").unwrap_err().to_string().contains("its SHA-256 is"));
        assert!(!dir.path().join("small.zip").exists());
        let target = dir.path().join("small.zip");
        assert_eq!(get("hello world").unwrap(), Fetched::Downloaded(target.clone()));
        assert_eq!(get("x").unwrap(), Fetched::AlreadyPresent(target.clone()));
        std::fs::write(&target, "hello_world").unwrap();
        assert!(get("hello world").is_err(), "a wrong file under the name is not passed over");
    }

    #[test]
    fn without_network_it_says_which_file_to_place_where() {
        let dir = tempfile::tempdir().unwrap();
        let error = fetch(&SMALL, dir.path(), None, &mut |_, _| ()).unwrap_err().to_string();
        assert!(error.contains("place small.zip in") && error.contains("--from FILE"), "{error}");
    }
}
