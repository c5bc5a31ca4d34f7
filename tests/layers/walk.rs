//! The walk of one command in `docs/architecture.md`: every file of it is entered from one above it and imports none above it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::circles::{below, handed_on, paths};
use super::reader::{Token, crates, sources, tokens, without_tests};

/// The files of each list of the walk-through, in its order.
fn walks() -> Vec<Vec<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let (_, below) = text.split_once("## Walk-through: `effattn speed").expect("the walk of speed");
    let (_, below) = below.split_once('\n').expect("its lists");
    let section = below.split("\n## ").next().unwrap_or_default();
    let lists = section.split("\n\n").filter(|part| part.trim_start().starts_with("1. "));
    let files = |list: &str| {
        let paths = list.split('`').skip(1).step_by(2).filter(|path| path.ends_with(".rs"));
        paths.map(str::to_owned).collect()
    };
    lists.map(files).collect()
}

/// For every source file, the source files that it imports from, also by a name that a folder hands on.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut read = BTreeMap::new();
    for source in sources() {
        let module: Vec<String> = std::iter::once(source.krate).chain(source.module).collect();
        let file = source.path.strip_prefix(root).unwrap().display().to_string();
        let found = without_tests(&tokens(&fs::read_to_string(&source.path).unwrap()));
        read.insert(module, (file, found));
    }
    for (krate, src) in crates() {
        let (file, text) = (src.join("lib.rs"), fs::read_to_string(src.join("lib.rs")).unwrap());
        read.insert(vec![krate], (file.strip_prefix(root).unwrap().display().to_string(), tokens(&text)));
    }
    let modules: BTreeSet<&[String]> = read.keys().map(Vec::as_slice).collect();
    let handed: BTreeMap<&[String], BTreeMap<String, String>> = read
        .iter()
        .map(|(module, (_, found))| (module.as_slice(), handed_on(found, module, &modules)))
        .collect();
    let file_of = |target: &[String]| {
        let (krate, names) = target.split_first()?;
        let mut place = vec![krate.clone()];
        for name in names {
            let below = |name: &String| place.iter().chain([name]).cloned().collect::<Vec<_>>();
            let child = handed.get(place.as_slice()).and_then(|names| names.get(name)).unwrap_or(name);
            let next = below(child);
            if !modules.contains(next.as_slice()) && !modules.iter().any(|known| known.starts_with(&next)) {
                break;
            }
            place = next;
        }
        read.get(&place).map(|(file, _)| file.clone())
    };
    let needs = |module: &[String], found: &[Token]| {
        let own = below(found, module, &modules);
        paths(found, module).iter().chain(&own).filter_map(|path| file_of(path)).collect()
    };
    read.iter().map(|(module, (file, found))| (file.clone(), needs(module, found))).collect()
}

#[test]
fn the_walk_of_a_command_only_goes_down() {
    let (walks, imports) = (walks(), imports());
    assert_eq!(walks.len(), 2, "the parent's and the worker's: {walks:?}");
    let mut wrong = Vec::new();
    for walk in &walks {
        for (at, file) in walk.iter().enumerate() {
            let Some(needs) = imports.get(file) else {
                wrong.push(format!("{file} is no source file"));
                continue;
            };
            let above = &walk[..at];
            let climbs = above.iter().filter(|above| needs.contains(*above));
            wrong.extend(climbs.map(|above| format!("{file} imports {above}, which stands above it")));
            if at > 0
                && !above.iter().any(|above| imports.get(above).is_some_and(|needs| needs.contains(file)))
            {
                wrong.push(format!("nothing above {file} imports it"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
