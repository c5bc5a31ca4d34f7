//! From samples to rows.

use super::interleave::CellSamples;
use crate::run::journal::Samples;
use crate::run::outcome::CellFailure;
use crate::run::turn::{Judge, Turn, TurnRecord};
use effattn_kernel::cpu::rates::Rates;
use effattn_kernel::profile::Spent;
use effattn_model::batch::InputKind;
use effattn_model::family;
use effattn_record::stats::Summary;
use effattn_record::{Outcome, Pass, Row, rounded};

/// The rows of a cell: step time, steps and tokens (or images) per second, peak memory. `samples` are seconds per step;
/// `peak` the highest live bytes.
pub fn rows(row: &Row, samples: &[f64], peak: Option<u64>, ending: Option<&CellFailure>) -> Vec<Row> {
    let row = Row { peak_bytes: peak, ..row.clone() };
    let row = match ending {
        None => row.with_outcome(Outcome::Ok, None),
        Some(ending) => row.with_outcome(ending.outcome, Some(ending.reason.clone())),
    };
    let summary = Summary::of(samples).filter(|summary| summary.median > 0.0 && row.outcome == Outcome::Ok);
    // papers print steps per second, or the time of one
    let latency = row.metric == "step_time";
    let published = row.published;
    let row = Row { published: None, ..row };
    let batch = row.batch.unwrap_or(1) as f64;
    let (counted, each) = match image(&row) {
        true => ("images_per_second", batch),
        false if row.pass == Some(Pass::Decode) => ("tokens_per_second", batch),
        false => ("tokens_per_second", batch * row.len.unwrap_or(1) as f64),
    };
    let time = timed(&row, "step_time", "s", summary.as_ref(), |s| s);
    let time = Row { published: published.filter(|_| latency), ..time };
    let steps = timed(&row, "steps_per_second", "1/s", summary.as_ref(), |s| 1.0 / s);
    let rate = timed(&row, counted, "1/s", summary.as_ref(), |s| each / s);
    let memory = row.with("peak_memory", "B", peak.filter(|_| summary.is_some()).map(|bytes| bytes as f64));
    vec![time, Row { published: published.filter(|_| !latency), ..steps }, rate, memory]
}

/// [`rows`] of a program: `peak` is by its own account, mostly growth of its resident size, and no peak of live bytes.
pub fn program_rows(row: &Row, samples: &[f64], peak: Option<u64>, ending: Option<&CellFailure>) -> Vec<Row> {
    let mut all = rows(row, samples, None, ending);
    for row in all.iter_mut().filter(|row| row.metric == "peak_memory") {
        let measured = peak.filter(|_| row.outcome == Outcome::Ok).map(|bytes| bytes as f64);
        *row = row.with("resident_growth", "B", measured);
    }
    all
}

/// The rows about the operations of a step: seconds, floating point operations of products and bytes per second, and what
/// the machine reaches at most. `spent` is the sum over `steps`.
pub fn operations(row: &Row, steps: u64, spent: &[Spent], rates: Rates) -> Vec<Row> {
    let row = Row { published: None, n: Some(steps), ..row.with_outcome(Outcome::Ok, None) };
    let each = steps.max(1) as f64;
    let of = |spent: &Spent| {
        let row =
            Row { operation: Some(format!("{} {}", spent.operation, spent.part.word())), ..row.clone() };
        let rate = |amount: u64| (amount > 0 && spent.seconds > 0.0).then(|| amount as f64 / spent.seconds);
        [
            row.with("operation_time", "s", Some(spent.seconds / each)),
            row.with("operation_products", "1/s", rate(2 * spent.macs)),
            row.with("operation_traffic", "B/s", rate(spent.bytes)),
        ]
    };
    let reached = [
        row.with("product_rate", "1/s", Some(rates.products)),
        row.with("copy_rate", "B/s", Some(rates.copies)),
    ];
    spent.iter().flat_map(of).chain(reached).collect()
}

/// Whether the model of `row` reads images: its length is their side, not a number of tokens.
fn image(row: &Row) -> bool {
    let serving = row.preset.as_deref().map(|preset| family::serving(&family::families(), preset, None));
    serving.and_then(Result::ok).is_some_and(|family| family.input == InputKind::Pixels)
}

/// A row of `of(seconds)`: the median transformed, its interval's ends in order, the deviation to first order.
fn timed(row: &Row, metric: &str, unit: &str, summary: Option<&Summary>, of: impl Fn(f64) -> f64) -> Row {
    let Some(summary) = summary else { return row.with(metric, unit, None) };
    let value = of(summary.median);
    let ends = summary.median_interval.map(|interval| {
        let (a, b) = (of(interval.low.max(f64::MIN_POSITIVE)), of(interval.high));
        (a.min(b), a.max(b))
    });
    Row {
        std: summary.std.and_then(|std| rounded(std / summary.median * value)),
        n: Some(summary.n as u64),
        ci_low: ends.and_then(|(low, _)| rounded(low)),
        ci_high: ends.and_then(|(_, high)| rounded(high)),
        ..row.with(metric, unit, Some(value))
    }
}

/// The share of the limit: `limit` seconds, which the products of a step alone would take, over the time of a step.
pub fn share_of_limit(row: &Row, samples: &[f64], limit: f64) -> Row {
    let row = Row { published: None, ..row.with_outcome(Outcome::Ok, None) };
    let summary = Summary::of(samples).filter(|summary| summary.median > 0.0);
    timed(&row, "share_of_limit", "share", summary.as_ref(), |seconds| limit / seconds)
}

/// The raw samples of a cell, with its turns where they were calibrated.
pub fn samples(samples: &CellSamples, judge: Option<Judge>) -> Vec<Samples> {
    if samples.turns.is_empty() {
        return Vec::new();
    }
    let record = |(turn, kept): (&Turn, &bool)| {
        Some(TurnRecord {
            steps: turn.seconds.len(),
            bracket: turn.bracket?,
            disturbed: judge.and_then(|judge| judge.reason(turn)),
            put_back: if *kept { Vec::new() } else { turn.seconds.clone() },
        })
    };
    let turns = samples.turns.iter().zip(&samples.kept).filter_map(record).collect();
    vec![Samples { turns, ..Samples::new("step_time", "s", samples.values()) }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::turn::Bracket;
    use effattn_record::Published;

    #[test]
    fn rates_are_the_inverse_of_the_median_and_only_their_row_has_the_published_number() {
        let row = Row {
            batch: Some(2),
            len: Some(10),
            published: Some(Published::Value(3.0)),
            ..Row::new("speed", "ls")
        };
        let rows = rows(&row, &[0.5, 0.25, 1.0], Some(99), None);
        let find = |metric: &str| rows.iter().find(|row| row.metric == metric).unwrap();
        let (time, steps) = (find("step_time"), find("steps_per_second"));
        assert_eq!(
            (time.value, steps.value, find("tokens_per_second").value),
            (Some(0.5), Some(2.0), Some(40.0))
        );
        assert_eq!(find("peak_memory").value, Some(99.0));
        assert_eq!((time.published, steps.published), (None, Some(Published::Value(3.0))));
        let printed = Row { metric: "step_time".to_owned(), ..row.clone() };
        let printed = super::rows(&printed, &[0.5], None, None);
        assert_eq!((printed[0].published, printed[1].published), (Some(Published::Value(3.0)), None));
        let (low, high) = (steps.ci_low.unwrap(), steps.ci_high.unwrap());
        assert!(low < 2.0 && 2.0 < high, "{low} {high}");
        assert_eq!(time.n, Some(3));
    }

    #[test]
    fn the_share_of_the_limit_is_that_of_the_median_step() {
        let share = share_of_limit(&Row::new("speed", "ls"), &[0.5, 0.25, 1.0], 0.2);
        assert_eq!((share.value, share.unit.as_str(), share.outcome), (Some(0.4), "share", Outcome::Ok));
    }

    #[test]
    fn turns_that_were_put_back_are_kept_beside_the_samples() {
        let turn = |seconds: f64, taken: f64| {
            let bracket = Bracket { before: 1.0, after: 1.0, by_thread: true, interference: None, taken };
            Turn { seconds: vec![seconds; 2], bracket: Some(bracket) }
        };
        let cell = CellSamples { turns: vec![turn(0.5, 0.0), turn(0.9, 0.7)], kept: vec![true, false] };
        let all = samples(&cell, Some(Judge { fast: 1.0, usual: 1.0, threads: 1 }));
        assert_eq!((&all[0].values[..], &all[0].turns[1].put_back[..]), (&[0.5; 2][..], &[0.9; 2][..]));
        let told: Vec<_> = all[0].turns.iter().map(|turn| (turn.steps, turn.disturbed.as_deref())).collect();
        assert_eq!(told, [(2, None), (2, Some("other programs took 0.70 processors"))]);
        assert!(samples(&CellSamples::default(), None).is_empty());
    }

    #[test]
    fn images_are_counted_whole() {
        let preset = Some("cvt-13".to_owned());
        let row = Row { batch: Some(4), len: Some(224), preset, ..Row::new("speed", "full") };
        let rows = rows(&row, &[0.5, 0.5], None, None);
        let rate = rows.iter().find(|row| row.metric == "images_per_second").unwrap();
        assert_eq!(rate.value, Some(8.0));
    }

    #[test]
    fn a_step_of_decoding_is_one_token_per_sequence() {
        let pass = Some(Pass::Decode);
        let row = Row { batch: Some(4), len: Some(1024), pass, ..Row::new("speed", "full") };
        let rows = rows(&row, &[0.5, 0.5], None, None);
        let rate = rows.iter().find(|row| row.metric == "tokens_per_second").unwrap();
        assert_eq!(rate.value, Some(8.0));
    }

    #[test]
    fn operations_are_per_step_and_their_rates_per_second() {
        use effattn_kernel::profile::StepPart;
        let ffn = |part, macs| Spent { operation: "ffn".into(), part, seconds: 0.5, macs, bytes: 80 };
        let rates = Rates { products: 9e9, copies: 7e9 };
        let spent = [ffn(StepPart::Forward, 100), ffn(StepPart::Backward, 0)];
        let rows = operations(&Row::new("speed", "full"), 4, &spent, rates);
        let said: Vec<_> = rows
            .iter()
            .map(|row| (row.operation.as_deref().unwrap_or(""), row.metric.as_str(), row.value, row.n))
            .collect();
        assert_eq!(
            said,
            [
                ("ffn forward", "operation_time", Some(0.125), Some(4)),
                ("ffn forward", "operation_products", Some(400.0), Some(4)),
                ("ffn forward", "operation_traffic", Some(160.0), Some(4)),
                ("ffn backward", "operation_time", Some(0.125), Some(4)),
                ("ffn backward", "operation_products", None, Some(4)),
                ("ffn backward", "operation_traffic", Some(160.0), Some(4)),
                ("", "product_rate", Some(9e9), Some(4)),
                ("", "copy_rate", Some(7e9), Some(4)),
            ]
        );
    }

    #[test]
    fn an_ending_has_rows_without_values() {
        let ending = CellFailure::new(Outcome::Oom, "asked for 5 bytes more");
        let rows = rows(&Row::new("speed", "full"), &[1.0], None, Some(&ending));
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.value.is_none() && row.outcome == Outcome::Oom && row.n.is_none()));
    }
}
