//! What a campaign consists of: TOML files, of which some ship with effattn.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::cli::command::CommandArgs;
use crate::protocol;
use crate::protocol::resolve;
use effattn_kernel::device::threads;
use effattn_record::config::settings::DeviceName;
use effattn_record::config::unknown;
use effattn_record::file;

/// The campaigns in the binary: name and text.
pub const BUILTIN_CAMPAIGNS: &[(&str, &str)] = &[
    ("cpu", include_str!("../../../campaigns/cpu.toml")),
    ("gpu", include_str!("../../../campaigns/gpu.toml")),
];

/// The command that is a part although it has no cells.
const CHECK: &str = "check";

/// Flags that the campaign gives to every part.
const OWN_FLAGS: &[&str] = &[
    "-o",
    "--output-path",
    "--plots-dir",
    "--no-plot",
    "--device",
    "--fresh",
    "--dry-run",
    "--shard",
    "--export-json",
    "--export-csv",
    "--export-markdown",
    "--help",
    "-h",
];

/// A campaign's file. Unknown keys are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    title: String,
    device: String,
    minutes: f64,
    #[serde(default)]
    quick_minutes: Option<f64>,
    #[serde(default)]
    part: Vec<Part>,
}

/// One command of a campaign.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Name: of its folder, and for `--only`.
    pub name: String,
    /// What it shows, in a line.
    pub about: String,
    /// Minutes that it may take, of those of the whole.
    pub minutes: f64,
    /// Words of the command.
    pub command: Vec<String>,
    /// The same with `--quick`; none: as without.
    #[serde(default)]
    quick: Option<Vec<String>>,
}

/// Commands that are run one after another, each with its share of the time.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// Name: the file's stem.
    pub name: String,
    /// Heading.
    pub title: String,
    /// The device that it is for.
    pub device: DeviceName,
    /// Minutes of all parts together.
    pub minutes: f64,
    /// The parts, the most valuable first.
    pub parts: Vec<Part>,
    /// The TOML text.
    pub text: String,
}

impl Campaign {
    /// The campaign called `word`: a built-in one, or a file ending in .toml.
    pub fn load(word: &str, quick: bool) -> Result<Self> {
        if let Some((name, text)) = BUILTIN_CAMPAIGNS.iter().find(|(name, _)| *name == word) {
            return Self::parse(name, &format!("{name}.toml"), text, quick);
        }
        let path = Path::new(word);
        if path.extension().is_none_or(|extension| extension != "toml") {
            let names = BUILTIN_CAMPAIGNS.iter().map(|(name, _)| *name);
            bail!("{}, or give a path ending in .toml", unknown("campaign", word, names));
        }
        let text = file::read_to_string(path).with_context(|| format!("campaign {word} cannot be read"))?;
        let name = path.file_stem().map_or_else(|| word.into(), |stem| stem.to_string_lossy());
        Self::parse(&file::plain_name(&name), word, &text, quick)
    }

    fn parse(name: &str, file: &str, text: &str, quick: bool) -> Result<Self> {
        let read: Text = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            anyhow::anyhow!("campaign {file}:{line}: {}", error.message().replace('\n', "; "))
        })?;
        let Text { title, device, minutes, quick_minutes, part: mut parts } = read;
        let device = device.parse().with_context(|| format!("campaign {file}: device"))?;
        ensure!(
            !parts.is_empty(),
            "campaign {file} has no [[part]]; give at least one, with name and command"
        );
        let minutes = if quick { quick_minutes.unwrap_or(minutes) } else { minutes };
        checked_time(minutes).with_context(|| format!("campaign {file}"))?;
        let mut names = BTreeSet::new();
        for part in &mut parts {
            if let Some(words) = part.quick.take().filter(|_| quick) {
                part.command = words;
            }
            part.checked().with_context(|| format!("campaign {file}, part {:?}", part.name))?;
            ensure!(names.insert(part.name.clone()), "campaign {file} has two parts called {:?}", part.name);
        }
        Ok(Self { name: name.to_owned(), title, device, minutes, parts, text: text.to_owned() })
    }

    /// Only the parts called `names`.
    pub fn keep_only(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            let known = self.parts.iter().map(|part| part.name.as_str());
            ensure!(
                self.parts.iter().any(|part| part.name == *name),
                "--only: {}",
                unknown("part", name, known)
            );
        }
        self.parts.retain(|part| names.is_empty() || names.contains(&part.name));
        Ok(())
    }
}

/// Most minutes that something may take.
const LONGEST: f64 = 1e6;

/// Why `minutes` is not a time that something may take.
pub fn wrong_time(minutes: f64) -> Option<String> {
    match minutes {
        minutes if minutes > LONGEST => Some(format!("more than {LONGEST}, the most minutes that are taken")),
        minutes if minutes > 0.0 => None,
        _ => Some("not a number above 0, such as 10".to_owned()),
    }
}

fn checked_time(minutes: f64) -> Result<()> {
    wrong_time(minutes).map_or(Ok(()), |why| bail!("minutes = {minutes} is {why}"))
}

impl Part {
    /// Whether it is `check`, which has golden files in the place of cells.
    pub fn checks(&self) -> bool {
        self.command.first().is_some_and(|word| word == CHECK)
    }

    /// Makes sure that the command is one, and leaves the rest to the campaign.
    fn checked(&self) -> Result<()> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
        ensure!(
            !self.name.is_empty() && self.name.chars().all(plain),
            "its name is that of a folder; use letters, digits, - and _"
        );
        checked_time(self.minutes)?;
        let own = |word: &&String| {
            word.starts_with("-o") || OWN_FLAGS.contains(&word.split('=').next().unwrap_or_default())
        };
        if let Some(word) = self.command.iter().find(own) {
            bail!("the campaign itself says {word} to its parts; leave it out of the command");
        }
        self.arguments().map(drop)
    }

    /// What the command line makes of the command: flags, values and suites that do not exist are found here. None: `check`.
    pub fn arguments(&self) -> Result<Option<CommandArgs>> {
        let name = self.command.first().map_or("", String::as_str);
        let found = protocol::find(name);
        if found.is_none() && !self.checks() {
            let names = protocol::protocols().into_iter().map(|protocol| protocol.name());
            let names: Vec<&str> = names.chain([CHECK]).collect();
            bail!("{}", unknown("command", name, names.iter().copied()));
        }
        let words = std::iter::once("effattn").chain(self.command.iter().map(String::as_str));
        let matches = crate::cli::tree().try_get_matches_from(words).map_err(|error| {
            let text = error.render().to_string();
            let said = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
            anyhow::anyhow!("{}", said.strip_prefix("error: ").unwrap_or(said))
        })?;
        match (found, matches.subcommand()) {
            (Some(protocol), Some((_, matches))) => {
                let args = CommandArgs::from_matches(protocol, matches)?;
                args.protocol.cells(&resolve(&args.flags, args.protocol)?, threads::available())?;
                Ok(Some(args))
            }
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared() {
        protocol::declare_settings();
    }

    #[test]
    fn built_in_campaigns_are_read_and_their_parts_fill_their_minutes() {
        declared();
        for (name, _) in BUILTIN_CAMPAIGNS {
            for quick in [false, true] {
                let campaign = Campaign::load(name, quick).unwrap();
                assert!(campaign.parts[0].checks(), "{name}: nothing is worth a number before the check");
                let sum: f64 = campaign.parts.iter().map(|part| part.minutes).sum();
                assert!(quick || (sum - campaign.minutes).abs() < 1e-9, "{name}: {sum} minutes");
            }
        }
    }

    fn refused(text: &str) -> String {
        declared();
        format!("{:#}", Campaign::parse("mine", "mine.toml", text, false).unwrap_err())
    }

    #[test]
    fn mistakes_name_the_place_and_what_is_allowed() {
        let head = "title = 'x'\ndevice = 'cpu'\nminutes = 1\n";
        let part = |command: &str| {
            format!("{head}[[part]]\nname = 'a'\nabout = ''\nminutes = 1\ncommand = {command}\n")
        };
        assert!(Campaign::parse("mine", "mine.toml", &part("['check']"), false).is_ok());
        for (text, says) in [
            (head.to_owned(), "has no [[part]]"),
            (format!("{head}speed = 3\n"), "mine.toml:4: unknown field `speed`"),
            (head.replace("cpu", "gpu"), "unknown device \"gpu\""),
            (
                part("['check']").replace("minutes = 1\n[[", "minutes = 0\n[["),
                "minutes = 0 is not a number above 0",
            ),
            (
                part("['check']").replace("minutes = 1\n[[", "minutes = 1e9\n[["),
                "is more than 1000000, the most minutes",
            ),
            (part("['check']").replace("'a'", "'../a'"), "that of a folder"),
            (part("['chek']"), "did you mean check?"),
            (part("[]"), "unknown command \"\""),
            (part("['speed', '--model', 'ful', '--suite', 'cos-table']"), "unknown suite \"cos-table\""),
            (part("['speed', '--len', '0']"), "length 0 is out of range"),
            (part("['speed', '--device=cuda']"), "the campaign itself says --device=cuda"),
            (format!("{}{}", part("['check']"), &part("['check']")[head.len()..]), "two parts called \"a\""),
        ] {
            let error = refused(&text);
            assert!(error.contains(says) && error.contains("mine.toml"), "{says}: {error}");
        }
        let mut campaign = Campaign::load("gpu", false).unwrap();
        let error = campaign.keep_only(&["memry".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("did you mean memory?"), "{error}");
    }
}
