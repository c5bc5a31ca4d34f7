//! Modules of a folder do not import each other in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::reader::{Token, is_path, preceded_by_path, sources, tokens, without_tests};

/// Paths that `tokens` of `module` name, by `crate::`, `super::` or a crate of the workspace; all begin with the crate.
pub(super) fn paths(tokens: &[Token], module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Word(word) = token else { continue };
        if !is_path(&tokens[at + 1..]) || preceded_by_path(tokens, at) {
            continue;
        }
        match word.as_str() {
            "crate" => branches(&tokens[at + 1..], module[..1].to_vec(), &mut found),
            "super" if !module.is_empty() => {
                branches(&tokens[at + 1..], module[..module.len() - 1].to_vec(), &mut found);
            }
            name => {
                if let Some(krate) = name.strip_prefix("effattn_").or((name == "effattn").then_some(name)) {
                    branches(&tokens[at + 1..], vec![krate.to_owned()], &mut found);
                }
            }
        }
    }
    found
}

/// Every path that goes on from `prefix` with `tokens`, which start with `::`.
fn branches(tokens: &[Token], prefix: Vec<String>, found: &mut Vec<Vec<String>>) {
    match tokens.get(2) {
        Some(Token::Word(word)) => {
            let mut path = prefix;
            if word == "super" {
                path.pop();
            } else {
                path.push(word.clone());
            }
            if is_path(&tokens[3..]) { branches(&tokens[3..], path, found) } else { found.push(path) }
        }
        Some(Token::Sign('{')) => {
            let (mut depth, mut first) = (1, true);
            for (at, token) in tokens.iter().enumerate().skip(3) {
                match token {
                    Token::Sign('{') => depth += 1,
                    Token::Sign('}') => depth -= 1,
                    Token::Sign(',') if depth == 1 => first = true,
                    Token::Word(_) if first => {
                        // as if the word stood behind `::`
                        branches(&tokens[at - 2..], prefix.clone(), found);
                        first = false;
                    }
                    _ => {}
                }
                if depth == 0 {
                    break;
                }
            }
        }
        _ => found.push(prefix),
    }
}

/// Paths that `tokens` of `module` name by a child of it.
pub(super) fn below(tokens: &[Token], module: &[String], modules: &BTreeSet<&[String]>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Word(child) = token else { continue };
        let path: Vec<String> = module.iter().chain([child]).cloned().collect();
        if modules.contains(path.as_slice()) && is_path(&tokens[at + 1..]) && !preceded_by_path(tokens, at) {
            branches(&tokens[at + 1..], path, &mut found);
        }
    }
    found
}

/// What a module hands on from those below it: the child that each name comes from.
pub(super) fn handed_on(
    tokens: &[Token],
    module: &[String],
    modules: &BTreeSet<&[String]>,
) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (at, token) in tokens.iter().enumerate() {
        let (Token::Word(word), Some(Token::Word(child))) = (token, tokens.get(at + 1)) else { continue };
        let below: Vec<String> = module.iter().chain([child]).cloned().collect();
        if word == "use" && modules.contains(below.as_slice()) {
            let mut paths = Vec::new();
            branches(&tokens[at + 2..], below.clone(), &mut paths);
            let names =
                paths.into_iter().filter(|path| path.len() > below.len()).filter_map(|mut path| path.pop());
            found.extend(names.map(|name| (name, child.clone())));
        }
    }
    found
}

/// For every folder, which of its modules imports from which other, also by a name that the folder hands on.
fn siblings() -> BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> {
    let files: Vec<_> = sources()
        .into_iter()
        .map(|source| {
            let module: Vec<String> = std::iter::once(source.krate).chain(source.module).collect();
            (source.path, module)
        })
        .collect();
    let modules: BTreeSet<&[String]> =
        files.iter().flat_map(|(_, module)| (1..=module.len()).map(|len| &module[..len])).collect();
    let read: Vec<(Vec<Token>, &Vec<String>)> = files
        .iter()
        .filter(|(_, module)| !module.contains(&"tests".to_owned()))
        .map(|(path, module)| (without_tests(&tokens(&fs::read_to_string(path).unwrap())), module))
        .collect();
    let handed: BTreeMap<&[String], BTreeMap<String, String>> = read
        .iter()
        .map(|(source, module)| (module.as_slice(), handed_on(source, module, &modules)))
        .collect();
    let mut edges: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (source, module) in &read {
        for target in paths(source, module) {
            let shared = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if shared == module.len() || shared == target.len() {
                continue;
            }
            let (folder, name) = (&module[..shared], &target[shared]);
            let need = if modules.contains(&target[..=shared]) {
                Some(name)
            } else {
                handed.get(folder).and_then(|names| names.get(name))
            };
            if let Some(need) = need.filter(|need| **need != module[shared]) {
                let from = edges.entry(folder.to_vec()).or_default();
                from.entry(module[shared].clone()).or_default().insert(need.clone());
            }
        }
    }
    edges
}

/// What is left of `imports` without the modules that import nothing of it and those that nothing of it imports:
/// nothing, or a circle.
fn circle(mut imports: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let before = imports.clone();
        let needed: BTreeSet<&String> = before.values().flatten().collect();
        imports.retain(|module, needs| {
            needs.retain(|need| before.contains_key(need));
            !needs.is_empty() && needed.contains(module)
        });
        if imports == before {
            return imports;
        }
    }
}

#[test]
fn modules_of_a_folder_do_not_import_each_other_in_a_circle() {
    let mut wrong = Vec::new();
    for (folder, imports) in siblings() {
        for (module, needs) in circle(imports) {
            wrong.push(format!("{}::{module} imports {needs:?}", folder.join("::")));
        }
    }
    assert!(wrong.is_empty(), "circles among:\n{}", wrong.join("\n"));
}

#[test]
fn the_reader_sees_circles() {
    let module: Vec<String> = ["kernel", "attend", "cpu"].map(String::from).into();
    let found = |source: &str| -> Vec<String> {
        paths(&without_tests(&tokens(source)), &module).iter().map(|path| path.join("::")).collect()
    };
    assert_eq!(
        found("use super::super::lsh::{self, a::b, c};").join(" "),
        "kernel::lsh::self kernel::lsh::a::b kernel::lsh::c"
    );
    assert_eq!(
        found("fn f() { super::op::go(crate::norm::x) } mod tests { use super::y; } use super::z;").join(" "),
        "kernel::attend::op::go kernel::norm::x kernel::attend::z"
    );
    let imports = |pairs: &[(&str, &str)]| {
        let mut map: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in pairs {
            map.entry((*from).into()).or_default().insert((*to).into());
        }
        map
    };
    assert!(circle(imports(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    assert_eq!(circle(imports(&[("a", "b"), ("b", "c"), ("c", "b")])).len(), 2);
}
