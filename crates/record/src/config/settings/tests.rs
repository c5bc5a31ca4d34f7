use super::*;
use crate::own_setting;

#[test]
fn set_takes_toml_or_text() {
    assert_eq!(Settings::set("batch=8").unwrap().batch, Some(Batches(vec![8])));
    assert_eq!(Settings::set("len=1k..2k").unwrap().len, Some(Lengths(vec![1024, 2048])));
    assert_eq!(Settings::set("max_time=2s").unwrap().max_time, Some(Seconds(2.0)));
    assert_eq!(Settings::set("len=[3, 5]").unwrap().len, Some(Lengths(vec![3, 5])));
    assert!(Settings::set("lenn=3").unwrap_err().0.contains("did you mean len?"));
    assert!(Settings::set("len=0").unwrap_err().0.contains("length 0 is out of range"));
    for text in
        ["layers=10000000", "ffn=18446744073709551615", "width=0", "threads=0", "warmup=18446744073709551615"]
    {
        let error = Settings::set(text).unwrap_err().0;
        assert!(error.starts_with("--set "), "{text}: {error}");
    }
    assert!(Settings::set("len").is_err());
    assert!(Settings::set("threads=2\nlen=0").is_err());
}

#[test]
fn what_is_said_above_wins() {
    let flag = Settings { runs: Some(5), ..Settings::default() };
    let suite = Settings { runs: Some(50), warmup: Some(10), ..Settings::default() };
    let both = flag.over(suite);
    assert_eq!((both.runs, both.warmup), (Some(5), Some(10)));
}

#[test]
fn of_two_bounds_that_exclude_each_other_the_lower_one_gives_way() {
    let bounds = |runs, min_runs| Settings { runs, min_runs, ..Settings::NONE };
    for (upper, lower, wanted) in [
        ((Some(2), None), (Some(1000), Some(3)), (2, 2)),
        ((None, Some(2000)), (Some(1000), Some(3)), (2000, 2000)),
        ((None, Some(3)), (Some(2), Some(1)), (3, 3)),
        ((Some(9), None), (Some(200), Some(5)), (9, 5)),
        ((None, None), (Some(200), Some(5)), (200, 5)),
    ] {
        let all = bounds(upper.0, upper.1).overriding(bounds(lower.0, lower.1));
        assert_eq!((all.runs, all.min_runs), (Some(wanted.0), Some(wanted.1)), "{upper:?} over {lower:?}");
    }
    let told = bounds(Some(2), Some(5)).check().unwrap_err().0;
    assert_eq!(told, "runs 2 is fewer than min_runs 5; give one of them");
}

#[test]
fn settings_survive_json() {
    let text =
        "len = [1024]\nmax_time = \"2s\"\nmemory_limit = \"1GiB\"\ndevice = \"cuda:1\"\nmode = \"train\"";
    let settings: Settings = toml::from_str(text).unwrap();
    let json = serde_json::to_string(&settings).unwrap();
    assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
}

own_setting! {
    /// Numbers to try
    TRIES: Seeds = "tries", "Grid", "LIST", str::parse;
}

#[test]
fn a_protocol_declares_a_setting_of_its_own() {
    let before = toml::from_str::<Settings>("len = 8\ntries = 3").unwrap_err();
    assert!(before.message().starts_with("unknown field `tries`, expected one of `task`"), "{before}");
    assert_eq!(before.span(), Some(8..13), "where it stands");
    TRIES.setting.declare();
    let said = Settings::set("tries=1,2").unwrap();
    assert_eq!(TRIES.of(&said), Some(Seeds(vec![1, 2])));
    assert_eq!((said.set_keys(), TRIES.of(&Settings::NONE)), (vec!["tries"], None));
    let suite: Settings = toml::from_str("len = 8\ntries = [4, 5]").unwrap();
    assert_eq!((TRIES.of(&suite), suite.set_keys()), (Some(Seeds(vec![4, 5])), vec!["len", "tries"]));
    assert_eq!(
        TRIES.of(&said.clone().over(suite.clone())),
        Some(Seeds(vec![1, 2])),
        "what is said above wins"
    );
    assert_eq!(TRIES.of(&Settings::NONE.over(suite.clone())), Some(Seeds(vec![4, 5])));
    let json = serde_json::to_string(&suite).unwrap();
    assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), suite);
    assert!(toml::from_str::<Settings>("tries = ['a']").unwrap_err().message().contains("\"a\""));
    assert!(Settings::set("tries=x").unwrap_err().0.starts_with("--set tries: "));
}
