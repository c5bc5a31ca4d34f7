//! `cargo xtask new`: the file of a new entry, made from the recipe that the tests compile, and its line in the registry.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

/// What can be added.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Kind {
    /// A mechanism
    Mechanism,
    /// A data set
    Task,
    /// A family of models
    Family,
    /// A figure drawn from rows
    Chart,
    /// A command that measures or trains
    Protocol,
}

/// How an entry of one kind comes into being.
struct Recipe {
    /// The recipe that the tests compile.
    template: &'static str,
    /// Name of the recipe's entry, which becomes the new name.
    called: &'static str,
    /// Folder of the new file.
    folder: &'static str,
    /// File with the modules and the registry.
    registry: &'static str,
    /// Start of the registry.
    table: &'static str,
    /// Name of the entry's constant.
    constant: &'static str,
    /// Start of module declarations.
    module: &'static str,
    /// What stands in the recipe and what in the crate.
    paths: &'static [(&'static str, &'static str)],
    /// What to do next.
    next: &'static str,
}

impl Kind {
    fn recipe(self) -> Recipe {
        const MODEL: &[(&str, &str)] = &[
            ("effattn::attention", "crate::attention"),
            ("effattn::nn", "crate::nn"),
            ("effattn::model", "crate"),
            ("effattn::kernel", "effattn_kernel"),
            ("effattn::pattern", "effattn_record::pattern"),
        ];
        match self {
            Self::Mechanism => Recipe {
                template: "tests/recipe/mean.rs",
                called: "\"mean\"",
                folder: "crates/model/src/attention",
                registry: "crates/model/src/attention/mod.rs",
                table: "pub static TABLE: &[&MechanismEntry] = &[\n",
                constant: "ENTRY",
                module: "pub mod ",
                paths: MODEL,
                next: "golden files define a mechanism, and tests fail until it has one: cargo xtask golden FILE",
            },
            Self::Family => Recipe {
                template: "tests/recipe/bag.rs",
                called: "\"bag\"",
                folder: "crates/model/src/family",
                registry: "crates/model/src/family/mod.rs",
                table: "pub static TABLE: &[&Family] = &[\n",
                constant: "FAMILY",
                module: "pub mod ",
                paths: MODEL,
                next: "effattn speed --preset NAME measures it",
            },
            Self::Task => Recipe {
                template: "tests/recipe/parity.rs",
                called: "\"odd-ones\"",
                folder: "crates/data/src",
                registry: "crates/data/src/lib.rs",
                table: "pub static TABLE: &[&DataSetEntry] = &[\n",
                constant: "SET",
                module: "pub mod ",
                paths: &[("effattn::data", "crate")],
                next: "effattn lra --task NAME --floor shows what simple rules reach",
            },
            Self::Chart => Recipe {
                template: "tests/recipe/weights.rs",
                called: "\"weights\"",
                folder: "crates/record/src/report/figures",
                registry: "crates/record/src/report/figures/mod.rs",
                table: "pub static FIGURES: &[&PaperFigure] = &[\n",
                constant: "FIGURE",
                module: "mod ",
                paths: &[("effattn::record", "crate"), ("effattn::report", "crate::report")],
                next: "effattn plot figures draws it from rows",
            },
            Self::Protocol => Recipe {
                template: "tests/recipe/weigh.rs",
                called: "\"weigh\"",
                folder: "src/protocol",
                registry: "src/protocol/mod.rs",
                table: "pub static TABLE: &[&dyn Protocol] = &[\n",
                constant: "Weigh",
                module: "pub mod ",
                paths: &[("effattn::", "crate::")],
                next: "effattn NAME runs it",
            },
        }
    }
}

/// Writes the file of a new `kind` called `name` below `root` and its line in the registry.
pub fn add(root: &Path, kind: Kind, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    ensure!(
        name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain),
        "{name:?} is not a name: it starts with a letter and has only a-z, 0-9 and -, such as my-mixer"
    );
    let (recipe, module) = (kind.recipe(), name.replace('-', "_"));
    let file = root.join(recipe.folder).join(format!("{module}.rs"));
    ensure!(!file.exists(), "{} exists already; choose another name", file.display());
    let read = |path: &str| fs::read_to_string(root.join(path)).with_context(|| format!("reading {path}"));
    let mut code = read(recipe.template)?;
    for (from, to) in recipe.paths {
        code = code.replace(from, to);
    }
    ensure!(code.contains(recipe.called), "{} names no entry {}", recipe.template, recipe.called);
    code = code.replace(recipe.called, &format!("{name:?}"));
    let registry = with_entry(&read(recipe.registry)?, &recipe, &module)?;
    fs::write(&file, code).with_context(|| format!("writing {}", file.display()))?;
    fs::write(root.join(recipe.registry), registry)
        .with_context(|| format!("writing {}", recipe.registry))?;
    println!("{}/{module}.rs: a copy of {}, to be changed", recipe.folder, recipe.template);
    println!("{}: its module and its line", recipe.registry);
    println!("next: {}", recipe.next.replace("NAME", name));
    Ok(())
}

/// `text` of a registry with the module and the line of a new entry.
fn with_entry(text: &str, recipe: &Recipe, module: &str) -> Result<String> {
    let missing = || format!("{} has no line {:?}", recipe.registry, recipe.table.trim_end());
    let start = text.find(recipe.table).with_context(missing)?;
    let end = start + text[start..].find("\n];").with_context(missing)?;
    let mut text = format!("{}\n    &{module}::{},{}", &text[..end], recipe.constant, &text[end..]);
    let declared = |line: &str| line.starts_with(recipe.module) && line.ends_with(';');
    let modules: Vec<&str> = text.lines().filter(|line| declared(line)).collect();
    let own = format!("{}{module};", recipe.module);
    let next =
        modules.iter().find(|line| ***line > *own).or(modules.last()).context("no module is declared")?;
    let at = text.find(&format!("\n{next}")).context("no module is declared")? + 1;
    let at = if *next > own.as_str() { at } else { at + next.len() + 1 };
    text.insert_str(at, &format!("{own}\n"));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_file_and_one_line() {
        let root = tempfile::tempdir().unwrap();
        let workspace = crate::root();
        for kind in Kind::value_variants() {
            let recipe = kind.recipe();
            for path in [recipe.template, recipe.registry] {
                fs::create_dir_all(root.path().join(path).parent().unwrap()).unwrap();
                fs::copy(workspace.join(path), root.path().join(path)).unwrap();
            }
            add(root.path(), *kind, "my-thing").unwrap();
            let text = fs::read_to_string(root.path().join(recipe.registry)).unwrap();
            let line = format!("    &my_thing::{},\n];", recipe.constant);
            let own = format!("\n{}my_thing;\n", recipe.module);
            assert_eq!((text.matches(&line).count(), text.matches(&own).count()), (1, 1), "{text}");
            let code = fs::read_to_string(root.path().join(recipe.folder).join("my_thing.rs")).unwrap();
            assert!(code.contains("\"my-thing\"") && !code.contains("effattn::"), "{code}");
            assert!(add(root.path(), *kind, "my-thing").unwrap_err().to_string().contains("exists already"));
            assert!(add(root.path(), *kind, "My Thing").is_err());
        }
    }
}
