//! Arithmetic modulo 5 with + - * and the usual precedence, without brackets (Grazzi et al. 2024): one label, at `=`.

use crate::position_labels::{Alphabet, Draw, PositionExample, PositionRule, PositionTask, Reading, Segment};
use crate::{DataSetEntry, position_files};

/// The table line.
pub static SET: DataSetEntry = position_files::set(
    "modular-arithmetic",
    "Modular arithmetic",
    "the value, modulo 5, of a row of digits with + - * between them",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 10, noise: 0.0 },
        train: &["3..39"],
        test: &["3..39", "65", "129", "255"],
        check,
        draw,
        rules: &[
            PositionRule::definition("calculate", "the value of the expression", |question| {
                Some(DIGIT + value(&question.tokens[..question.position()]))
            }),
            PositionRule::floor(
                "last-term",
                "the value of the last term of the sum, with its sign",
                |question| Some(DIGIT + last_term(&question.tokens[..question.position()])),
            ),
        ],
    },
);

/// Token ids: 1 +, 2 -, 3 *, 4 =, then the digits 0 to 4.
const PLUS: u32 = 1;
const MINUS: u32 = 2;
const TIMES: u32 = 3;
const EQUALS: u32 = 4;
const DIGIT: u32 = 5;
const MODULUS: u32 = 5;

fn check(segment: &Segment, alphabet: Alphabet) -> Result<(), String> {
    segment.without_items()?;
    alphabet.fixed(10)?;
    let Segment { shortest, longest, .. } = *segment;
    let odd = !shortest.is_multiple_of(2) && !longest.is_multiple_of(2);
    match odd && shortest >= 3 {
        true => Ok(()),
        false => Err(format!(
            "segment {segment}: a row of digits, = and the answer have an odd number of tokens, 3 or more; write {}..{}",
            shortest.max(3) | 1,
            longest.max(3) | 1
        )),
    }
}

/// Terms of the sum, each with its sign.
fn terms(tokens: &[u32]) -> impl Iterator<Item = u32> {
    let product = |term: &[u32]| term.iter().step_by(2).fold(1, |all, digit| all * (digit - DIGIT) % MODULUS);
    let negative = |first: usize| first > 0 && tokens[first - 1] == MINUS;
    let mut first = 0;
    let ends = (0..=tokens.len()).filter(|&at| at == tokens.len() || [PLUS, MINUS].contains(&tokens[at]));
    ends.map(move |end| {
        let value = product(&tokens[first..end]);
        let signed = if negative(first) { (MODULUS - value) % MODULUS } else { value };
        first = end + 1;
        signed
    })
}

fn value(tokens: &[u32]) -> u32 {
    terms(tokens).fold(0, |sum, term| (sum + term) % MODULUS)
}

fn last_term(tokens: &[u32]) -> u32 {
    terms(tokens).last().unwrap_or(0)
}

/// The length counts `=` and the answer, whose label stands at `=`.
fn draw(Draw { segment, rng, .. }: Draw) -> PositionExample {
    let digits = segment.shortest / 2 + rng.below((segment.longest - segment.shortest) / 2 + 1);
    let mut tokens = Vec::with_capacity(2 * digits);
    for number in 0..digits {
        if number > 0 {
            tokens.push([PLUS, MINUS, TIMES][rng.below(3)]);
        }
        tokens.push(DIGIT + rng.below(MODULUS as usize) as u32);
    }
    let label = DIGIT + value(&tokens);
    tokens.push(EQUALS);
    let labels = vec![(tokens.len() - 1, label)];
    PositionExample { tokens, labels }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::score;

    #[test]
    fn answers_are_those_of_the_original_generator() {
        let originals: [(&[u32], u32); 3] =
            [(&[8, 3, 9, 3, 5, 3, 5, 2, 7, 3, 7, 2, 9], 7), (&[8, 3, 8], 9), (&[5, 1, 6], 6)];
        for (tokens, expected) in originals {
            assert_eq!(DIGIT + value(tokens), expected, "{tokens:?}");
        }
    }

    #[test]
    fn lengths_and_floors_are_the_published_ones() {
        let task = SET.positions().unwrap();
        let draw = |text: &str, count: u64| -> Vec<PositionExample> {
            let segment: Segment = text.parse().unwrap();
            (0..count).map(|index| task.example((&segment, task.alphabet), (0, Split::Test), index)).collect()
        };
        let long = draw("39..255", 4000);
        let mean =
            long.iter().map(|example| example.tokens.len() + 1).sum::<usize>() as f64 / long.len() as f64;
        assert!((mean - 147.0).abs() < 4.0 * 63.0 / 4000f64.sqrt(), "{mean}");
        let rule = task.rules.iter().find(|rule| rule.name == "last-term").unwrap();
        let [short, long] = [draw("3..39", 8000), long].map(|examples| score(rule, &examples, task.alphabet));
        assert!((short - 0.27).abs() < 0.02 && (long - 0.21).abs() < 0.03, "{short} {long}");
    }

    #[test]
    fn even_lengths_are_refused() {
        let task = SET.positions().unwrap();
        let error = task.check(&["4..40".parse().unwrap()], task.alphabet).unwrap_err();
        assert!(error.contains("5..41"), "{error}");
    }
}
