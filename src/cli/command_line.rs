//! A command as it is typed.

/// The command that continues a run: what was typed, without `--fresh`, quoted for a shell.
pub fn command_line(args: impl Iterator<Item = String>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    let words = args.filter(|word| word != "--fresh").map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            word
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    std::iter::once("effattn".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_to_continue_with_can_be_pasted() {
        let words = ["speed", "--model", "ls*,full", "--fresh", "-o", "it's", ""].map(str::to_owned);
        assert_eq!(command_line(words.into_iter()), "effattn speed --model 'ls*,full' -o 'it'\\''s' ''");
    }
}
