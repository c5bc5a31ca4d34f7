use super::super::chart::{Measured, Missing};
use super::*;
use crate::Outcome;

fn figure() -> Figure {
    let point = |x, y| Measured { x, y, interval: Some((y * 0.98, y * 1.01)) };
    let series = vec![
        Series {
            label: "full".into(),
            points: vec![point(1024.0, 0.02)],
            missing: vec![Missing { x: 2048.0, outcome: "oom".into(), cross: true }],
            ..Series::default()
        },
        Series {
            label: "ls:w=16".into(),
            points: vec![point(1024.0, 0.011), point(2048.0, 0.022)],
            ..Series::default()
        },
    ];
    Figure {
        title: "Time per step".into(),
        subtitle: "cpu".into(),
        unit: Unit::Seconds,
        panels: vec![Panel { title: "Training".into(), series }],
    }
}

#[test]
fn decoding_has_a_table_of_tokens_per_second() {
    use crate::Pass;
    use crate::report::chart::{Quantity, figure};
    let row = |pass, len: u64| Row { pass: Some(pass), len: Some(len), ..Row::new("speed", "ls") };
    let rate = |pass, len| {
        row(pass, len).with("tokens_per_second", "1/s", Some(1250.0)).with_outcome(Outcome::Ok, None)
    };
    let decoded = figure(&[rate(Pass::Decode, 1024), rate(Pass::Decode, 2048)], Quantity::Tokens).unwrap();
    let text = format!("1250{TIED}/s");
    assert_eq!(
        growth(&decoded)[0].rows[0],
        ["ls", &text, &text],
        "without a slope: that is of what a step takes"
    );
    assert!(
        figure(&[rate(Pass::Train, 1024)], Quantity::Tokens).is_none(),
        "elsewhere it is the time's inverse"
    );
}

#[test]
fn a_growth_table_has_a_column_per_length() {
    let tables = growth(&figure());
    insta::assert_snapshot!(tables[0].terminal(80), @r"
        Time per step · Training · cpu
         model           1024         2048   slope
        ───────────────────────────────────────────
         full      20 ms ±2 %          oom
         ls:w=16   11 ms ±2 %   22 ms ±2 %    1.00
        slope: exponent of the growth; twice the length takes 2^slope times as much.
        ");
}

fn wide() -> Table {
    let texts = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    Table {
        title: "A title of many words".into(),
        columns: texts(&["model", "preset", "what is said of it", "steps"]),
        numbers: 1,
        rows: vec![texts(&["ls", "lra", "not comparable", "10"]), texts(&["full", "lra", "one seed", "9"])],
        spare: vec![3],
        ..Table::default()
    }
}

#[test]
fn a_table_gives_way_step_by_step_and_never_breaks_a_word() {
    insta::assert_snapshot!(wide().terminal(34), @r"
        A title of many words
         model  what is said of it  steps
        ──────────────────────────────────
         ls     not comparable         10
         full   one seed                9
        In every row: preset lra.
        ");
    insta::assert_snapshot!(wide().terminal(20), @r"
        A title of many
        words
         model  what is
                said of it
        ────────────────────
         ls     not
                comparable
         full   one seed
        In every row: preset
        lra.
        Left out in a
        terminal of 20
        columns: steps.
        ");
    insta::assert_snapshot!(wide().terminal(12), @r"
        A title of
        many words
        - ls:
          preset lra,
          what is
          said of it
          not
          comparable,
          steps 10
        - full:
          preset lra,
          what is
          said of it
          one seed,
          steps 9
        ");
}

#[test]
fn a_single_row_that_is_too_wide_becomes_a_list() {
    let mut table = wide();
    table.rows =
        vec![["ls:w=8", "ls-lra", "incomparable, as settings-differ", "5000"].map(String::from).to_vec()];
    table.columns[0] = "mechanism".into();
    table.spare.clear();
    insta::assert_snapshot!(table.terminal(36), @r"
        A title of many words
         mechanism           ls:w=8
         preset              ls-lra
         what is said of it  incomparable,
                             as
                             settings-differ
         steps               5000
        ");
}

proptest::proptest! {
    #[test]
    fn no_line_is_wider_than_the_terminal(width in 24usize..120) {
        for table in growth(&figure()).into_iter().chain([wide()]) {
            let text = table.terminal(width);
            proptest::prop_assert!(text.lines().all(|line| columns(line) <= width), "{width}:\n{text}");
        }
    }
}

#[test]
fn costs_are_listed_once_at_the_longest_length() {
    let mut row = Row::new("speed", "ls").with("step_time", "s", None);
    (row.len, row.flops, row.params) = (Some(2048), Some(198_789_696), Some(203_850));
    let mut short = row.clone();
    (short.len, short.flops) = (Some(1024), Some(1));
    let table = costs(&[short, row.clone(), row]).unwrap();
    assert_eq!(table.rows, [["ls", "203850", "0.1988", "-"]]);
    assert_eq!(costs(&[Row::new("speed", "ls")]), None);
}

#[test]
fn sentences_of_a_wide_table_stand_below_it() {
    let why = "steps 800 (20000); length 1024 (4096); rate 1e-3 (1e-4)";
    let row = |model: &str, why: &str| [model, "text", why, "1024", "1", "62.33"].map(str::to_owned).to_vec();
    let table = Table {
        title: "accuracy".into(),
        columns: ["model", "task", "differs", "length", "seeds", "%"].map(str::to_owned).to_vec(),
        numbers: 3,
        rows: vec![row("ls", why), row("dp", why), row("full", "")],
        ..Table::default()
    };
    let text = table.terminal(60);
    assert_eq!(text.matches("(a)").count(), 3, "{text}");
    assert!(text.contains("differs: (a) steps 800 (20000); length 1024 (4096);"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
    assert!(table.terminal(200).contains(why), "where there is room it stands in its column");
}
