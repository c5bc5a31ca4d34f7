//! How programs are started: TOML files, of which some ship with effattn.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use effattn_record::config::suite::toml_problem;
use effattn_record::config::units::Seconds;
use effattn_record::config::unknown;
use effattn_record::file;

/// A description that ships with effattn: name and text.
pub type Shipped = (&'static str, &'static str);

/// The programs that ship with effattn.
pub const SHIPPED: &[Shipped] = &[
    ("torch", include_str!("../../programs/torch.toml")),
    ("torch-compile", include_str!("../../programs/torch-compile.toml")),
    ("torch-autocast", include_str!("../../programs/torch-autocast.toml")),
    ("jax", include_str!("../../programs/jax.toml")),
    ("candle-flash", include_str!("../../programs/candle-flash.toml")),
    ("onnxruntime", include_str!("../../programs/onnxruntime.toml")),
];

/// What a Python program is written with; `effattn programs python` prints it.
pub const PYTHON_HELPER: &str = include_str!("../../programs/effattn_program.py");

/// Files of the shipped programs.
const FILES: &[(&str, &str)] = &[
    ("effattn_program.py", PYTHON_HELPER),
    ("torch_program.py", include_str!("../../programs/torch_program.py")),
    ("torch_mixers.py", include_str!("../../programs/torch_mixers.py")),
    ("jax_program.py", include_str!("../../programs/jax_program.py")),
    ("onnx_program.py", include_str!("../../programs/onnx_program.py")),
];

/// What is filled in where a command has it.
const PLACEHOLDERS: [&str; 3] = ["{python}", "{effattn}", "{folder}"];

/// Time that a request may take where a description does not say it.
const TIMEOUT: f64 = 120.0;

/// A program's file. Unknown keys are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    about: String,
    command: Vec<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    install: Option<String>,
    #[serde(default)]
    timeout: Option<String>,
    #[serde(default)]
    mechanisms: BTreeMap<String, String>,
}

/// How a program is started.
#[derive(Clone, Debug)]
pub struct Description {
    /// Name in rows and tables.
    pub name: String,
    /// What it is, in a line.
    pub about: String,
    command: Vec<String>,
    /// Where it runs: the folder of its file.
    pub folder: PathBuf,
    /// Variables beside those of effattn.
    pub environment: BTreeMap<String, String>,
    /// The command that installs what it needs.
    pub install: Option<String>,
    /// Most time that a request may take.
    pub timeout: Duration,
    /// Its names of mechanisms, by ours, where they differ.
    mechanisms: BTreeMap<String, String>,
    /// The text of the person's file; none of a shipped program.
    text: Option<String>,
}

impl Description {
    /// The program called `word`: a shipped one, a TOML file, or a Python file (which needs no TOML).
    pub fn find(word: &str) -> Result<Self> {
        if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == word) {
            return Self::parse(name, name, text, shipped_folder()?);
        }
        let path = Path::new(word);
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !matches!(extension, Some("toml" | "py")) {
            let names = SHIPPED.iter().map(|(name, _)| *name);
            bail!("{}; or give a file, such as ./mine.toml or ./mine.py", unknown("program", word, names));
        }
        let place = || format!("--program {word}");
        let whole = std::path::absolute(path).with_context(place)?;
        let name = path.file_stem().map_or_else(|| word.into(), |stem| stem.to_string_lossy());
        let folder = whole.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf);
        let text = file::read_to_string(path).with_context(place)?;
        if extension == Some("py") {
            let command = vec!["{python}".to_owned(), whole.to_string_lossy().into_owned()];
            let described = Self::of(&name, Text { command, ..Text::python(word) }, folder)?;
            return Ok(Self { text: Some(text), ..described });
        }
        Ok(Self { text: Some(text.clone()), ..Self::parse(&name, word, &text, folder)? })
    }

    /// Every shipped program.
    pub fn shipped() -> Result<Vec<Self>> {
        SHIPPED.iter().map(|(name, _)| Self::find(name)).collect()
    }

    /// Reads the text of `file`, as it is called on the command line.
    fn parse(name: &str, file: &str, text: &str, folder: PathBuf) -> Result<Self> {
        let read: Text = toml::from_str(text).map_err(|error| {
            let (line, problem) = toml_problem(text, &error);
            anyhow!("--program {file}:{line}: {problem}")
        })?;
        if let Some(holder) = read.command.iter().find_map(|word| unknown_placeholder(word)) {
            let problem = unknown("placeholder", holder, PLACEHOLDERS);
            let line = line_with(text, holder);
            bail!(
                "--program {file}:{line}: command: {problem}; braces with a blank inside them are passed on"
            );
        }
        Self::of(name, read, folder).with_context(|| format!("--program {file}"))
    }

    fn of(name: &str, text: Text, folder: PathBuf) -> Result<Self> {
        let Text { about, command, environment, install, timeout, mechanisms } = text;
        if command.is_empty() {
            bail!("its command is empty; give the program and its arguments: command = [\"./mine\"]");
        }
        let timeout = timeout.map_or(Ok(Seconds(TIMEOUT)), |timeout| timeout.parse())?;
        let timeout = Duration::from_secs_f64(timeout.0);
        let mut environment = environment;
        // effattn_program.py is found without a copy; a copy beside the program comes first
        let helper = shipped_folder()?.to_string_lossy().into_owned();
        let paths = std::env::var("PYTHONPATH").map_or(helper.clone(), |paths| format!("{paths}:{helper}"));
        environment.entry("PYTHONPATH".to_owned()).or_insert(paths);
        environment.entry("PYTHONDONTWRITEBYTECODE".to_owned()).or_insert("1".to_owned());
        let name = name.to_owned();
        Ok(Self { name, about, command, folder, environment, install, timeout, mechanisms, text: None })
    }

    /// The name under which a plan knows its contents.
    pub fn data_name(&self) -> String {
        format!("program {}", self.name)
    }

    /// SHA-256 of its own file and of the files that its command names; none of a shipped program, which the build holds. What
    /// those files load is not known here.
    pub fn hash(&self) -> Result<Option<String>> {
        let Some(text) = &self.text else { return Ok(None) };
        let mut hash = Sha256::new_with_prefix(Sha256::digest(text));
        let named =
            self.command.iter().filter(|word| !word.contains("{python}") && !word.contains("{effattn}"));
        for path in named.map(|word| self.folder.join(self.fill(word))).filter(|path| path.is_file()) {
            let bytes = file::read(&path).with_context(|| {
                format!("program {}: a run knows {} by its contents", self.name, path.display())
            })?;
            hash.update(Sha256::digest(bytes));
        }
        Ok(Some(format!("{:x}", hash.finalize())))
    }

    /// The executable and its arguments: `{python}` is `EFFATTN_PYTHON` or `python3`, `{effattn}` this program, `{folder}` where
    /// its file lies. A path with a slash is taken from there.
    pub fn command(&self) -> (PathBuf, Vec<String>) {
        let program = PathBuf::from(self.fill(&self.command[0]));
        let program = if program.components().count() > 1 { self.folder.join(program) } else { program };
        (program, self.command[1..].iter().map(|word| self.fill(word)).collect())
    }

    fn fill(&self, word: &str) -> String {
        let python = std::env::var("EFFATTN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let own = std::env::current_exe().unwrap_or_else(|_| "effattn".into());
        word.replace("{python}", &python)
            .replace("{effattn}", &own.to_string_lossy())
            .replace("{folder}", &self.folder.to_string_lossy())
    }

    /// What to say and to do where it cannot run for `reason`.
    pub fn cannot_run(&self, reason: &str) -> String {
        let install = self.install.as_ref().map_or_else(String::new, |line| format!("; {line}"));
        format!("program {} cannot run: {reason}{install}", self.name)
    }

    /// The line of a mechanism that is none of `known`, and what is wrong with it.
    pub fn unknown_mechanism(&self, known: &[&str]) -> Option<(usize, String)> {
        let other = self.mechanisms.keys().find(|name| !known.contains(&name.as_str()))?;
        let problem = unknown("mechanism", other, known.iter().copied());
        let line = line_with(self.text.as_deref().unwrap_or_default(), other);
        Some((line, format!("[mechanisms] has our name = its name; {problem}")))
    }

    /// What it calls our `mechanism`.
    pub fn theirs<'a>(&'a self, mechanism: &'a str) -> &'a str {
        self.mechanisms.get(mechanism).map_or(mechanism, String::as_str)
    }

    /// What we call its `mechanism`.
    pub fn ours<'a>(&'a self, mechanism: &'a str) -> &'a str {
        let renamed = self.mechanisms.iter().find(|(_, theirs)| *theirs == mechanism);
        renamed.map_or(mechanism, |(ours, _)| ours)
    }
}

/// The first line of `text` with `word`; TOML does not say where a value in a list stands.
fn line_with(text: &str, word: &str) -> usize {
    1 + text.lines().position(|line| line.contains(word)).unwrap_or(0)
}

/// What in `word` looks like a placeholder and is none: `{name}`. `${name}` is a shell's.
fn unknown_placeholder(word: &str) -> Option<&str> {
    let plain =
        |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    word.match_indices('{').filter(|(at, _)| !word[..*at].ends_with(['$', '{'])).find_map(|(at, _)| {
        let end = at + word[at..].find('}')?;
        let holder = &word[at..=end];
        (plain(&word[at + 1..end]) && !PLACEHOLDERS.contains(&holder)).then_some(holder)
    })
}

impl Text {
    fn python(word: &str) -> Self {
        Self {
            about: word.to_owned(),
            command: Vec::new(),
            environment: BTreeMap::new(),
            install: None,
            timeout: None,
            mechanisms: BTreeMap::new(),
        }
    }
}

/// The folder that the files of the shipped programs were written to; removed by [`remove_files`].
fn shipped_folder() -> Result<PathBuf> {
    if let Some(folder) = FOLDER.get() {
        return Ok(folder.path().to_path_buf());
    }
    let write = || {
        let folder = tempfile::Builder::new().prefix("effattn-programs-").tempdir()?;
        for (name, text) in FILES {
            file::write(&folder.path().join(name), text.as_bytes())?;
        }
        Ok::<TempDir, std::io::Error>(folder)
    };
    let folder = write().context("the folder for temporary files cannot be written")?;
    Ok(FOLDER.get_or_init(|| folder).path().to_path_buf())
}

static FOLDER: OnceLock<TempDir> = OnceLock::new();

/// Removes the files of the shipped programs; statics are not dropped at the end of a process.
pub fn remove_files() {
    if let Some(folder) = FOLDER.get() {
        let _ = std::fs::remove_dir_all(folder.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_descriptions_are_read_and_say_how_to_install() {
        let all = Description::shipped().unwrap();
        assert_eq!(all.len(), SHIPPED.len());
        for one in all {
            assert!(one.install.is_some() && !one.about.is_empty(), "{}", one.name);
            let (program, arguments) = one.command();
            let file = if one.name == "candle-flash" { program.as_path() } else { Path::new(&arguments[0]) };
            assert!(file.is_file(), "{}: {arguments:?}", one.name);
        }
    }

    #[test]
    fn a_file_says_command_folder_and_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        let text = "about = 'x'\ncommand = ['./run', '{folder}/a']\ntimeout = '2s'\n[mechanisms]\nls = 'long-short'\n";
        std::fs::write(&path, text).unwrap();
        let one = Description::find(path.to_str().unwrap()).unwrap();
        assert_eq!((one.name.as_str(), one.timeout), ("mine", Duration::from_secs(2)));
        let (program, arguments) = one.command();
        assert_eq!(program, folder.path().join("./run"));
        assert_eq!(arguments, [folder.path().join("a").to_string_lossy()]);
        assert_eq!(
            (one.theirs("ls"), one.ours("long-short"), one.theirs("full")),
            ("long-short", "ls", "full")
        );
    }

    #[test]
    fn a_file_is_known_by_its_text_and_by_the_files_that_its_command_names() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let hash = |name: &str| {
            let path = folder.path().join(name);
            Description::find(path.to_str().unwrap()).unwrap().hash().unwrap().unwrap()
        };
        write("mine.toml", "about = 'x'\ncommand = ['./run', '--config', '{folder}/a', 'none']\n");
        write("run", "1");
        write("a", "1");
        write("mine.py", "1");
        let names = ["mine.toml", "mine.py"];
        let before = names.map(hash);
        assert_eq!(before, names.map(hash));
        write("b", "1");
        assert_eq!(before, names.map(hash), "a file that nothing names");
        write("run", "2");
        let program = hash("mine.toml");
        write("a", "2");
        let argument = hash("mine.toml");
        write("mine.toml", "about = 'y'\ncommand = ['./run', '--config', '{folder}/a', 'none']\n");
        let text = hash("mine.toml");
        let all = std::collections::BTreeSet::from([&before[0], &program, &argument, &text]);
        assert_eq!(all.len(), 4, "{all:?}");
        write("mine.py", "2");
        assert_ne!(before[1], hash("mine.py"));
        assert_eq!(Description::find("torch").unwrap().hash().unwrap(), None);
    }

    #[test]
    fn mistakes_say_what_is_allowed() {
        let error = |word: &str| format!("{:#}", Description::find(word).unwrap_err());
        assert!(error("torhc").contains("did you mean torch?"), "{}", error("torhc"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("odd.toml");
        std::fs::write(&path, "about = ''\ncommand = []\n").unwrap();
        assert!(error(path.to_str().unwrap()).contains("its command is empty"));
        std::fs::write(&path, "about = ''\ncommand = ['x']\nspeed = 3\n").unwrap();
        let file = path.to_str().unwrap();
        let unknown = format!("--program {file}:3: unknown key \"speed\"; allowed: about");
        assert!(error(file).starts_with(&unknown), "{}", error(file));
        for (text, says) in [
            ("command = ['x']\n", ":1: the key `about` is missing"),
            ("about = ''\ncommand = 'x'\n", ":2: invalid type: string \"x\", expected a list"),
            (
                "about = ''\ncommand = [\n'x',\n'{foldr}/a']\n",
                ":4: command: unknown placeholder \"{foldr}\" (did you mean {folder}?); known: {python}",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let told = error(file);
            assert!(told.starts_with(&format!("--program {file}{says}")) && !told.contains('\n'), "{told}");
        }
    }

    #[test]
    fn a_mechanism_that_is_renamed_is_one_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        std::fs::write(&path, "about = ''\ncommand = ['x']\n[mechanisms]\nlinaer = 'l'\n").unwrap();
        let one = Description::find(path.to_str().unwrap()).unwrap();
        let (line, problem) = one.unknown_mechanism(&["full", "linear"]).unwrap();
        let says =
            "[mechanisms] has our name = its name; unknown mechanism \"linaer\" (did you mean linear?)";
        assert!(line == 4 && problem.starts_with(says), "{line}: {problem}");
        assert_eq!(one.unknown_mechanism(&["linaer"]), None);
    }

    #[test]
    fn braces_of_others_are_passed_on() {
        for word in ["{python}", "a{folder}/b", "${HOME}", "{ print }", "{\"a\": 1}", "{}", "{{x}}", "{", "}"]
        {
            assert_eq!(unknown_placeholder(word), None, "{word}");
        }
        assert_eq!(unknown_placeholder("{folder}/{foo}"), Some("{foo}"));
    }
}
