use super::*;

fn tables(rows: &[Row], metrics: &[Metric]) -> Vec<Table> {
    super::tables(rows, metrics, |_, _| true)
}

const METRICS: &[Metric] = &[
    Metric { name: "accuracy", title: "Accuracy", unit: "accuracy %", lower_is_better: false },
    Metric { name: "bpc_stream", title: "Bits", unit: "bpc", lower_is_better: true },
];

fn row(seed: u64, value: f64, fraction: f64) -> Row {
    Row {
        task: Some("listops".to_owned()),
        preset: Some("ls-lra".to_owned()),
        seed: Some(seed),
        fraction: Some(fraction),
        published: Some(Published::Value(37.5)),
        ..Row::new("lra", "ls").with("accuracy", "%", Some(value)).with_outcome(Outcome::Ok, None)
    }
}

/// Verdict, seeds, value.
fn said(rows: &[Row]) -> [String; 3] {
    let tables = tables(rows, METRICS);
    assert_eq!((tables.len(), tables[0].rows.len()), (1, 1));
    [3, 7, 9].map(|index| tables[0].rows[0][index].clone())
}

#[test]
fn verdicts_in_words() {
    let all = |fraction| [row(0, 37.0, fraction), row(1, 38.2, fraction)];
    assert_eq!(said(&all(1.0)), ["within spread", "2", "37.60 ±0.85 [29.98, 45.22]"]);
    assert_eq!(said(&all(0.1))[0], "not comparable: part of the protocol");
    let other = Row { fraction: None, differs: Some("rate 2e-3 (1e-4)".to_owned()), ..row(0, 37.0, 1.0) };
    assert_eq!(said(std::slice::from_ref(&other))[0], "not comparable: other settings");
    assert_eq!(tables(&[other], METRICS)[0].rows[0][4], "rate 2e-3 (1e-4)");
    assert_eq!(said(&[row(0, 20.0, 1.0), row(1, 20.1, 1.0)])[0], "worse by 17.45");
    assert_eq!(said(&[row(0, 20.0, 1.0), row(0, 20.0, 1.0)])[2], "20.00", "a seed counts once");
    let settings = Some("device=cuda:0".to_owned());
    let on_cuda = |seed, value| Row {
        device: "cuda:0".to_owned(),
        settings: settings.clone(),
        ..row(seed, value, 1.0)
    };
    assert_eq!(said(&[row(0, 37.0, 1.0), on_cuda(1, 38.2)]), said(&all(1.0)), "a seed of any device counts");
    assert_eq!(said(&[row(0, 37.0, 1.0), on_cuda(0, 38.2)])[1], "1", "and counts once");
    assert_eq!(said(&[row(0, 36.5, 1.0)])[0], "not comparable: one seed (gap -1.00)");
    let half = Row { dtype: "bf16".to_owned(), ..row(0, 36.0, 1.0) };
    let table = &tables(&[row(0, 37.0, 1.0), half], METRICS)[0];
    assert_eq!((table.rows[0][3].as_str(), table.rows[1][3].as_str()), ("fused", "fused, bf16"));
    assert!(tables(&[], METRICS).is_empty());
    let bits = |seed, value| Row {
        published: Some(Published::Value(0.99)),
        ..row(seed, value, 1.0).with("bpc_stream", "bit", Some(value))
    };
    assert_eq!(said(&[bits(0, 1.5), bits(1, 1.51)])[0], "worse by 0.51");
}

#[test]
fn a_failed_seed_is_counted_apart_and_widens_nothing() {
    let broken = row(0, 1.0, 1.0).with_outcome(Outcome::Diverged, Some("step 3".to_owned()));
    let broken = Row { value: None, ..broken };
    let stopped = [row(0, 37.0, 1.0).with_outcome(Outcome::Interrupted, None).with("accuracy", "%", None)];
    assert_eq!(super::tables(&stopped, METRICS, |_, _| true)[0].rows[0][7], "0 (1 not finished)");
    assert!(super::tables(&stopped, METRICS, |_, _| false).is_empty(), "rows of another command");
    assert_eq!(said(std::slice::from_ref(&broken)), ["not comparable: diverged", "0 (1 failed)", "diverged"]);
    let seeds = [row(1, 37.0, 1.0), row(2, 37.2, 1.0), broken];
    let verdict = "worse by 0.40, 1 of 3 seeds failed";
    let worse = said(&seeds);
    assert_eq!(
        (worse[0].as_str(), worse[1].as_str()),
        ("within spread, 1 of 3 seeds failed", "2 (1 failed)")
    );
    // at the largest class nothing was learned: 17.2 and 36 are no two seeds around 37.5
    let chance = row(0, 17.2, 1.0);
    let about = |row: &Row, metric, value| row.with(metric, "%", Some(value));
    let rows = [about(&chance, LARGEST, 17.0), about(&chance, "tested", 1984.0), row(1, 36.0, 1.0), chance];
    assert_eq!(
        said(&rows)[0],
        "not comparable: one seed (gap -1.50), 1 of 2 seeds at the largest class",
        "not {verdict}"
    );
}

#[test]
fn what_is_not_better_than_a_simple_rule_says_so() {
    let rule = Row { variant: Some("root-operator".to_owned()), published: None, ..row(0, 37.55, 1.0) };
    let rule = Row { model: FLOOR.to_owned(), seed: None, fraction: None, ..rule };
    let table = &tables(&[row(0, 36.5, 1.0), rule.clone()], METRICS)[0];
    assert!(
        table.rows[0][3].ends_with("; measured and published are worse than the floor"),
        "{:?}",
        table.rows
    );
    let tested = row(0, 36.5, 1.0).with("tested", "1", Some(1984.0));
    let within = &tables(&[row(0, 36.5, 1.0), tested, rule.clone()], METRICS)[0];
    let same = "; measured and published are the same as the floor within its error";
    assert!(within.rows[0][3].ends_with(same), "{:?}", within.rows);
    assert_eq!(table.rows[0].last().map(String::as_str), Some("37.55 (root-operator)"));
    assert_eq!(table.rows[1][3], "a simple rule");
    let part = Row { differs: Some("40 examples of each split".to_owned()), ..rule };
    let table = &tables(&[row(0, 36.5, 1.0), part], METRICS)[0];
    assert_eq!(table.rows[0].last().map(String::as_str), Some(""), "another split");
}

#[test]
fn a_published_number_is_not_lost_with_the_row_that_repeats_a_seed() {
    let bare = Row { published: None, ..row(0, 37.0, 1.0) };
    let table = &tables(&[bare, row(0, 37.0, 1.0)], METRICS)[0];
    assert_eq!(table.rows[0][11], "37.50");
}

#[test]
fn other_sizes_are_not_called_by_the_presets_name() {
    let other =
        Row { fraction: None, differs: Some("steps 9 (5000); layers 1".to_owned()), ..row(0, 37.0, 1.0) };
    let table = &tables(&[row(0, 37.0, 1.0), other], METRICS)[0];
    assert_eq!((table.rows[0][2].as_str(), table.rows[1][2].as_str()), ("ls-lra", "ls-lra, other sizes"));
}

#[test]
fn the_last_update_stands_beside_the_selected_one() {
    let one = row(0, 36.19, 1.0);
    let table = &tables(&[one.with("accuracy_last", "%", Some(35.99)), one], METRICS)[0];
    assert_eq!(table.rows[0][10], "35.99");
}
