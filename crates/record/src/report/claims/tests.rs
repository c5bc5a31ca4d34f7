use super::*;
use crate::Pass;

fn speed(model: &str, len: u64, rate: f64) -> Row {
    let row = Row {
        suite: Some("cos-table5".to_owned()),
        len: Some(len),
        pass: Some(Pass::Infer),
        batch: Some(32),
        ..Row::new("speed", model)
    };
    row.with("steps_per_second", "1/s", Some(rate)).with_outcome(Outcome::Ok, None)
}

fn finding(rows: &[Row], text: &str) -> Option<Finding> {
    judged(rows).into_iter().find(|judged| judged.claim.text.starts_with(text)).unwrap().finding
}

#[test]
fn without_rows_everything_is_open_and_has_a_command() {
    let table = table(&[]);
    assert_eq!(table.rows.len(), COSFORMER.len() + TRANSFORMER_LS.len());
    for row in &table.rows {
        assert_eq!(row[2], "not decided", "{row:?}");
        assert!(row[5].starts_with("to decide: effattn "), "{row:?}");
    }
}

#[test]
fn published_numbers_come_from_suites() {
    let of = |text: &str| {
        judged(&[]).into_iter().find(|judged| judged.claim.text.starts_with(text)).unwrap().published.unwrap()
    };
    assert_eq!(of("inference is faster"), "2.32 times at 1024, 4.27 times at 2048");
    assert_eq!(of("lower perplexity"), "23.1 against 26.2");
    assert!(of("highest mean accuracy").starts_with("55.23, the best other row "));
    assert!(judged(&[]).iter().filter(|judged| judged.published.is_some()).count() > 12);
}

#[test]
fn a_speed_claim_needs_every_length_and_growth() {
    let rows = |ratios: [f64; 2]| {
        let pair = |len: u64, times: f64| [speed("full", len, 1.0), speed("cosformer", len, times)];
        [pair(1024, ratios[0]), pair(2048, ratios[1])].concat()
    };
    let verdict = |ratios| finding(&rows(ratios), "inference is faster").unwrap().verdict;
    assert_eq!(verdict([1.5, 2.5]), ClaimVerdict::Reproduced);
    assert_eq!(verdict([1.01, 2.5]), ClaimVerdict::Undecided, "the same at 1024");
    assert_eq!(verdict([2.5, 1.5]), ClaimVerdict::Undecided, "less at the longer length");
    assert_eq!(verdict([0.5, 2.5]), ClaimVerdict::Contradicted);
    let longer = [speed("full", 4096, 1.0), speed("cosformer", 4096, 2.0)];
    let falls = [rows([1.5, 2.5]), longer.to_vec()].concat();
    let verdict = finding(&falls, "inference is faster").unwrap().verdict;
    assert_eq!(verdict, ClaimVerdict::Undecided, "less at the longest than in between");
    let said = finding(&rows([1.5, 2.5]), "inference is faster").unwrap().measured;
    assert_eq!(said, "1.50 times at 1024, 2.50 times at 2048");
}

#[test]
fn devices_are_not_compared_with_each_other() {
    let on = |device: &str, rates: [f64; 2]| {
        let rows = [("full", 1.0), ("cosformer", rates[0])].map(|(model, rate)| speed(model, 1024, rate));
        let longer = [("full", 1.0), ("cosformer", rates[1])].map(|(model, rate)| speed(model, 2048, rate));
        let rows = rows.into_iter().chain(longer);
        rows.map(|row| Row { device: device.to_owned(), ..row }).collect::<Vec<_>>()
    };
    let mut rows = on("cuda:0", [0.1, 0.2]);
    assert_eq!(finding(&rows, "inference is faster").unwrap().verdict, ClaimVerdict::Contradicted);
    rows.extend(on("cpu", [1.5, 2.5]));
    rows.push(speed("linear", 1024, 1.0));
    let found = finding(&rows, "inference is faster").unwrap();
    assert_eq!(found.measured, "1.50 times at 1024, 2.50 times at 2048");
}

#[test]
fn only_what_ran_out_of_memory_did_so() {
    let row = |outcome: Outcome| {
        let row = Row { len: Some(3072), pass: Some(Pass::Train), ..speed("full", 3072, 1.0) };
        row.with_outcome(outcome, None)
    };
    let text = "full attention, Synthesizer, Longformer";
    assert_eq!(finding(&[row(Outcome::Oom)], text).unwrap().verdict, ClaimVerdict::Reproduced);
    for outcome in [Outcome::Failed, Outcome::Interrupted] {
        assert_eq!(finding(&[row(outcome)], text), None, "{outcome}");
    }
}

#[test]
fn growth_is_linear_within_a_tenth() {
    let row = |model: &str, len: u64, seconds: f64| {
        let row = Row { len: Some(len), pass: Some(Pass::Infer), ..Row::new("speed", model) };
        row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None)
    };
    let rows = |power: i32| -> Vec<Row> {
        let lens = [1024u64, 2048, 4096];
        lens.iter()
            .flat_map(|len| {
                let times = *len as f64 / 1024.0;
                [row("full", *len, times.powi(2)), row("cosformer", *len, times.powi(power))]
            })
            .collect()
    };
    let found = finding(&rows(1), "time grows linearly").unwrap();
    assert_eq!(found.verdict, ClaimVerdict::Reproduced);
    assert_eq!(
        found.measured,
        "time grows as length^1.00 up to 4096 (infer), of full attention as length^2.00"
    );
    assert_eq!(finding(&rows(2), "time grows linearly").unwrap().verdict, ClaimVerdict::Contradicted);
    // a larger model at shorter lengths is another series
    let sized = |row: Row, layers: u64| Row {
        params: Some(layers * 1000),
        flops: Some(layers * 1_000_000 * row.len.unwrap()),
        ..row
    };
    let mut mixed: Vec<Row> = rows(1).into_iter().map(|row| sized(row, 1)).collect();
    mixed.extend(
        [512u64, 1024, 2048]
            .iter()
            .flat_map(|len| ["full", "cosformer"].map(|model| sized(row(model, *len, 40.0), 8))),
    );
    assert_eq!(finding(&mixed, "time grows linearly").unwrap().verdict, ClaimVerdict::Reproduced);
}

#[test]
fn other_settings_decide_nothing() {
    let row = |variant: &str, seed, bits: f64| {
        let row = Row { variant: Some(variant.to_owned()), seed: Some(seed), ..Row::new("charlm", "ls") };
        row.with("validation_bpc", "bit", Some(bits)).with_outcome(Outcome::Ok, None)
    };
    let rows = [
        row("w=128", 1, 2.8),
        row("w=128", 2, 2.9),
        row("w=128,dual_ln=false", 1, 2.9),
        row("w=128,dual_ln=false", 2, 2.95),
    ];
    let found = finding(&rows, "DualLN lowers").unwrap();
    assert_eq!(found.verdict, ClaimVerdict::Undecided);
    assert!(
        found.measured.contains("2.85 with DualLN, 2.92 with one LayerNorm (2 and 2 seeds, not told apart)"),
        "{found:?}"
    );
}

#[test]
fn a_ratio_that_is_wider_than_itself_decides_nothing() {
    let row = |model: &str, kernel: &str, (seconds, std): (f64, f64)| {
        let row = Row {
            suite: Some("ls-figure3".to_owned()),
            kernel: kernel.to_owned(),
            len: Some(2048),
            batch: Some(1),
            ..Row::new("speed", model)
        };
        let row = row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None);
        Row { std: Some(std), n: Some(5), ..row }
    };
    let pair =
        |kernel: &str, std: f64| [row("ls", kernel, (1.0, 0.01)), row("transformer-xl", kernel, (4.0, std))];
    let claim = "a training step takes less time";
    let (wide, narrow) = (pair("fused", 3.0), pair("composed", 0.1));
    let open = finding(&wide, claim).unwrap();
    assert_eq!(open.verdict, ClaimVerdict::Undecided);
    assert!(open.measured.starts_with("not resolved: from "), "{}", open.measured);
    let rows = [wide, narrow].concat();
    assert_eq!(finding(&rows, claim).unwrap().verdict, ClaimVerdict::Reproduced, "by the other kernels");
    let table = table(&rows);
    let line = table.rows.iter().find(|line| line[1].starts_with(claim)).unwrap();
    assert!(line[5].ends_with("; to resolve: effattn speed --suite ls-figure3"), "{line:?}");
}
