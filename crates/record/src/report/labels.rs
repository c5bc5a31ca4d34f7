//! Labels that differ wherever what they name differs, and are no longer than that takes.

/// A label per list of traits (each with the same places): the first trait, and of the others the fewest, from the
/// front, that tell those with the same label apart.
pub fn distinct(traits: &[Vec<String>]) -> Vec<String> {
    let places = traits.iter().map(Vec::len).max().unwrap_or(0);
    let mut chosen: Vec<usize> = vec![0];
    let label = |one: &[String], chosen: &[usize]| {
        let parts = chosen.iter().filter_map(|place| one.get(*place)).filter(|part| !part.is_empty());
        parts.map(String::as_str).collect::<Vec<_>>().join(", ")
    };
    let count = |chosen: &[usize]| {
        traits.iter().map(|one| label(one, chosen)).collect::<std::collections::BTreeSet<_>>().len()
    };
    for place in 1..places {
        let with: Vec<usize> = chosen.iter().copied().chain([place]).collect();
        if count(&with) > count(&chosen) {
            chosen = with;
        }
    }
    traits.iter().map(|one| label(one, &chosen)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_said() {
        let of = |all: &[[&str; 4]]| {
            let all: Vec<Vec<String>> = all.iter().map(|one| one.map(str::to_owned).to_vec()).collect();
            distinct(&all)
        };
        assert_eq!(of(&[["ls", "n 64", "seed 1", "a"], ["full", "n 64", "seed 1", "b"]]), ["ls", "full"]);
        assert_eq!(
            of(&[
                ["ls", "n 64", "seed 1", "a"],
                ["ls", "n 64", "seed 2", "b"],
                ["dp", "n 64", "seed 1", "c"]
            ]),
            ["ls, seed 1", "ls, seed 2", "dp, seed 1"]
        );
        assert_eq!(of(&[["ls", "", "", "a"], ["ls", "", "", "b"]]), ["ls, a", "ls, b"]);
        assert!(distinct(&[]).is_empty());
    }
}
