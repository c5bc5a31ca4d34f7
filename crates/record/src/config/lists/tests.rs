use proptest::prelude::*;

use super::*;
use crate::config::settings::Settings;

fn lengths(text: &str) -> Result<Vec<u64>, String> {
    text.parse::<Lengths>().map(|list| list.0).map_err(|error| error.0)
}

#[test]
fn lengths_list_double_and_step() {
    assert_eq!(lengths("1024,2048"), Ok(vec![1024, 2048]));
    assert_eq!(lengths("1024..8192"), Ok(vec![1024, 2048, 4096, 8192]));
    assert_eq!(lengths("1024..4096+1024"), Ok(vec![1024, 2048, 3072, 4096]));
    assert_eq!(lengths("1k..3k"), Ok(vec![1024, 2048, 3072]));
    assert_eq!(lengths("7..7"), Ok(vec![7]));
    assert_eq!(lengths("5,5,1..4"), Ok(vec![5, 1, 2, 4]));
}

#[test]
fn wrong_lengths_say_what_is_allowed() {
    for (text, says) in [
        ("0", "length 0 is out of range; allowed: 1 to 4194304; write 1024,2048 or 1024..8192"),
        ("8192..1024", "8192..1024 ends before it starts"),
        ("1024..4096+0", "the step +0 must be a number of at least 1"),
        ("99999999999999999999999", "is out of range"),
        ("1..4194304+1", "more than 4096 values"),
        ("", "\"\" is not a length"),
        ("1024,", "\"\" is not a length"),
        ("-5", "\"-5\" is not a length"),
        ("1e3", "\"1e3\" is not a length"),
        ("20000000000000000k", "is out of range"),
    ] {
        assert!(lengths(text).unwrap_err().contains(says), "{text}: {:?}", lengths(text));
    }
}

#[test]
fn seeds_count_by_one() {
    assert_eq!("0..3".parse::<Seeds>().unwrap().0, [0, 1, 2, 3]);
    assert_eq!("3".parse::<Seeds>().unwrap().0, [3]);
    assert!("1k".parse::<Seeds>().is_err());
    assert!("0".parse::<Batches>().is_err());
}

#[test]
fn a_knob_continues_the_variant_before_it() {
    let list: Models = "ls:w=16,r=2,full,bigbird:global=0+1+30".parse().unwrap();
    assert_eq!(list.to_string(), "ls:w=16,r=2,full,bigbird:global=0+1+30");
    assert_eq!(list.0.iter().map(|v| v.knobs.len()).collect::<Vec<_>>(), [2, 0, 1]);
    for text in ["w=16", ":w=1", "ls:", "ls:w", "ls:=3", "ls:w=", "a,,b", "ls*:w=1", "all:w=1"] {
        assert!(text.parse::<Models>().is_err(), "{text}");
    }
    let twice = "full,ls:w=8,r=2,w=16".parse::<Models>().unwrap_err().to_string();
    assert_eq!(twice, "ls: knob w is given twice; leave one of them out");
    assert_eq!("ls:w=8,ls:w=16".parse::<Models>().unwrap().0.len(), 2);
}

#[test]
fn patterns_match_whole_names() {
    let matches = |pattern: &str, name| pattern.parse::<Models>().unwrap().0[0].matches(name);
    assert!(matches("ls*", "ls") && matches("*linear", "relu-linear") && matches("all", "dp"));
    assert!(!matches("ls*", "dp-ls") && !matches("?p", "ldp") && matches("?p", "dp"));
}

proptest! {
    #[test]
    fn no_text_panics(text in "[0-9k.,+:=a-z* -]{0,30}") {
        let _ = text.parse::<Lengths>();
        let _ = text.parse::<Seeds>();
        if let Ok(models) = text.parse::<Models>() {
            prop_assert_eq!(models.to_string().parse::<Models>().unwrap(), models);
        }
    }
}

#[test]
fn rates_are_lists_or_ranges_of_equal_ratio() {
    let rates = |text: &str| text.parse::<Rates>().map(|rates| rates.0).map_err(|error| error.0);
    assert_eq!(rates("1e-2,1e-3"), Ok(vec![1e-3, 1e-2]));
    let eight = rates("3e-4..3e-2").unwrap();
    assert_eq!((eight.len(), eight[0], eight[7]), (8, 3e-4, 3e-2));
    assert!(eight.windows(2).all(|pair| (pair[1] / pair[0] - 1.931).abs() < 0.01), "{eight:?}");
    assert_eq!(rates("1e-4..1e-2/3"), Ok(vec![1e-4, 1e-3, 1e-2]));
    for wrong in ["", "0", "-1", "11", "1e-3..", "1e-3..1e-2/1", "a"] {
        assert!(rates(wrong).unwrap_err().contains("3e-4..3e-2"), "{wrong}");
    }
    let settings: Settings =
        toml::from_str("rates = [1e-3, 1e-2]\nlayers = [\"shortconv\", \"mixer\"]").unwrap();
    assert_eq!(settings.rates.as_ref().map(ToString::to_string).as_deref(), Some("0.001,0.01"));
    assert_eq!(settings.layers.as_ref().map(Layers::count), Some(2));
}

#[test]
fn layers_are_a_number_or_a_list() {
    assert_eq!("2".parse(), Ok(Layers::Count(2)));
    assert_eq!("shortconv,ls".parse(), Ok(Layers::Each(vec!["shortconv".to_owned(), "ls".to_owned()])));
    for wrong in ["0", "-3", "4097", "", "shortconv,"] {
        assert!(wrong.parse::<Layers>().is_err(), "{wrong:?}");
    }
}
