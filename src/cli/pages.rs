//! Shell completions and the manual page, made from the command tree.

use anyhow::Result;
use clap_complete::Shell;

use super::visible;
use crate::term;

#[derive(clap::Args)]
pub struct Completions {
    /// Shell to print completions for
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(clap::Args)]
pub struct Man {
    /// Command to describe [default: all]
    command: Option<String>,
}

pub fn completions(args: &Completions) -> Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut visible(), "effattn", &mut text);
    term::data(&String::from_utf8_lossy(&text))?;
    Ok(0)
}

pub fn man(args: &Man) -> Result<u8> {
    let mut root = visible().disable_help_subcommand(true);
    root.build();
    let visible: Vec<&clap::Command> = root.get_subcommands().collect();
    let pages: Vec<clap::Command> = match &args.command {
        None => std::iter::once(&root).chain(visible).cloned().collect(),
        Some(name) => match visible.iter().find(|command| command.get_name() == name) {
            Some(command) => vec![(*command).clone()],
            None => {
                let names = visible.iter().map(|command| command.get_name());
                anyhow::bail!("{}", effattn_record::config::unknown("command", name, names));
            }
        },
    };
    let mut text = Vec::new();
    for page in pages {
        clap_mangen::Man::new(page).render(&mut text)?;
    }
    term::data(&String::from_utf8_lossy(&text))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_complete_the_values_of_flags() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut visible(), "effattn", &mut text);
            let text = String::from_utf8(text).unwrap();
            for name in
                ["transformer-xl", "listops", "charlm-small", "cos-table5", "composed", "decode", "bf16"]
            {
                assert!(text.contains(name), "{shell}: {name}");
            }
        }
    }

    #[test]
    fn examples_fit_eighty_columns() {
        for command in visible().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let name = command.get_name();
            for line in help.lines().filter(|line| line.starts_with("  ")) {
                assert!(line.chars().count() <= 80, "{name}: {line}");
            }
        }
    }
}
