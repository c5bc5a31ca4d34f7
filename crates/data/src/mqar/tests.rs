use super::*;
use crate::Split;
use crate::position_labels::score;

/// Examples per setting: the standard error of a mean slot is that of the published statistics, about .05.
const COUNT: u64 = 4000;

fn task() -> &'static PositionTask {
    SET.positions().unwrap()
}

fn examples(text: &str, alphabet: Alphabet, count: u64) -> Vec<PositionExample> {
    let segment = text.parse().unwrap();
    (0..count).map(|index| task().example((&segment, alphabet), (0, Split::Test), index)).collect()
}

const PLAIN: Alphabet = Alphabet { vocabulary: 8192, noise: 0.0 };

/// Mean, and its standard error.
fn mean(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64;
    (mean, (variance / values.len() as f64).sqrt())
}

/// `value` is `expected`, which was measured with an error like ours: four standard errors of the difference, and rounding.
fn close(name: &str, values: &[f64], expected: f64, rounding: f64) {
    let (value, error) = mean(values);
    let allowed = 4.0 * error * 2f64.sqrt() + rounding;
    assert!((value - expected).abs() <= allowed, "{name}: {value} +- {error}, expected {expected}");
}

#[test]
fn the_law_is_that_of_the_original_generator() {
    // N,K; P(pair 0 at slot 0); mean slot; mean slot of pair 0 and of pair K-1; mean gap; share of query t that asks pair t
    let published = [
        ("64:4", 0.251, 7.08, [6.3, 8.0], 19.1, 0.288),
        ("64:8", 0.261, 7.46, [5.3, 9.5], 23.9, 0.161),
        ("64:16", 0.292, 7.5, [3.8, 11.7], 32.0, 0.108),
        ("256:16", 0.185, 28.3, [20.7, 34.9], 73.5, 0.079),
        ("256:64", 0.207, 31.5, [12.6, 51.6], 128.0, 0.030),
    ];
    for (text, first, slot, [slot_first, slot_last], gap, diagonal) in published {
        let segment: Segment = text.parse().unwrap();
        let pairs = segment.items.unwrap();
        let mut all: [Vec<f64>; 6] = Default::default();
        for PositionExample { tokens, labels } in examples(text, PLAIN, COUNT) {
            let pair = |position: usize| (0..pairs).find(|j| tokens[2 * j] == tokens[position]).unwrap();
            let slots: Vec<(usize, usize)> =
                labels.iter().map(|(position, _)| (pair(*position), (position - 2 * pairs) / 2)).collect();
            let of = |j: usize| slots.iter().find(|(pair, _)| *pair == j).unwrap().1 as f64;
            let average = |values: Vec<f64>| mean(&values).0;
            all[0].push(f64::from(u8::from(of(0) == 0.0)));
            all[1].push(average(slots.iter().map(|(_, slot)| *slot as f64).collect()));
            all[2].push(of(0));
            all[3].push(of(pairs - 1));
            let gaps = slots.iter().map(|(pair, slot)| (2 * pairs + 2 * slot - 2 * pair) as f64);
            all[4].push(average(gaps.collect()));
            let same = slots.iter().enumerate().map(|(t, (pair, _))| f64::from(u8::from(t == *pair)));
            all[5].push(average(same.collect()));
        }
        close(&format!("{text} first"), &all[0], first, 0.0005);
        close(&format!("{text} slot"), &all[1], slot, 0.05);
        close(&format!("{text} pair 0"), &all[2], slot_first, 0.05);
        close(&format!("{text} last pair"), &all[3], slot_last, 0.05);
        close(&format!("{text} gap"), &all[4], gap, 0.05);
        close(&format!("{text} diagonal"), &all[5], diagonal, 0.0005);
    }
}

/// The seven test segments of the Based protocol: what a window that has learned the task answers (published accuracies of
/// sliding windows agree with it).
#[test]
fn windows_see_the_published_share_of_the_values() {
    let segments = ["64:4", "64:8", "64:16", "128:32", "256:64", "512:128", "1024:256"];
    let alphabet = Alphabet { vocabulary: 8192, noise: 1.0 };
    let all: Vec<_> = segments.iter().map(|text| examples(text, alphabet, 400)).collect();
    let share = |answer: fn(&Question) -> Option<u32>| {
        let rule = PositionRule { name: "", about: "", solves: false, answer };
        all.iter().map(|examples| score(&rule, examples, alphabet)).sum::<f64>() / all.len() as f64
    };
    let rule = [
        (share(within::<8>), 0.059),
        (share(within::<16>), 0.145),
        (share(within::<32>), 0.312),
        (share(within::<64>), 0.514),
        (share(within::<128>), 0.655),
        (share(within::<256>), 0.797),
        (share(within::<512>), 0.936),
        (share(within::<1024>), 1.0),
    ];
    for (share, expected) in rule {
        assert!((share - expected).abs() < 0.008, "{share} instead of {expected}");
    }
    assert!((share(|question| question.tokens.get(1).copied()) - 0.071).abs() < 0.008, "1/K");
}

/// Transformer-LS sees the last 8 positions and the segments of 16 that have ended (defaults): what its committed rows reach at 64:4,
/// and everything elsewhere, since the pairs fill whole segments there.
#[test]
fn the_windows_and_segments_of_transformer_ls_hide_one_value_in_eight_of_the_shortest_task() {
    let seen = |question: &Question| {
        let at = question.position();
        place(question)
            .filter(|place| *place < at / 16 * 16 || at - place < 8)
            .map(|place| question.tokens[place])
    };
    let rule = PositionRule { name: "", about: "", solves: false, answer: seen };
    for (text, share) in [("64:4", 0.874), ("64:8", 1.0), ("64:16", 1.0), ("128:32", 1.0)] {
        let seen = score(&rule, &examples(text, PLAIN, 2000), PLAIN);
        assert!((seen - share).abs() < 0.01, "{text}: {seen}");
    }
}

#[test]
fn noise_fills_what_is_free_and_nothing_else() {
    let quiet = examples("64:4", PLAIN, 50);
    let loud = examples("64:4", Alphabet { noise: 1.0, ..PLAIN }, 50);
    for (quiet, loud) in quiet.iter().zip(&loud) {
        assert_eq!(quiet.labels, loud.labels);
        let filled = |example: &PositionExample| example.tokens.iter().filter(|token| **token > 0).count();
        assert_eq!(filled(quiet), 12);
        assert!(filled(loud) > 60, "one id in 8192 is 0");
    }
}

#[test]
fn what_has_no_examples_is_refused_with_words() {
    let refuse = |text: &str, vocabulary: usize| {
        let alphabet = Alphabet { vocabulary, noise: 1.0 };
        task().check(&[text.parse().unwrap()], alphabet).unwrap_err()
    };
    assert!(refuse("64:17", 256).contains("at most 16"));
    assert!(refuse("65:4", 256).contains("odd"));
    assert!(refuse("64", 256).contains("number of pairs"));
    assert!(refuse("64..128:4", 256).contains("one length"));
    assert!(refuse("64:16", 32).contains("--vocabulary 34"));
    assert!(refuse("64:4", 0).contains("0 keys"));
    assert_eq!(task().check(&["64:16".parse().unwrap()], Alphabet { vocabulary: 34, noise: 0.0 }), Ok(()));
}
