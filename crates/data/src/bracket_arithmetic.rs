//! Arithmetic modulo 5 with brackets, signs and + - between them (Grazzi et al. 2024; Deletang et al. 2022): one label, at `=`. The
//! original generator can draw * too, and does not.

use crate::position_labels::{
    Alphabet, Draw, PositionExample, PositionRule, PositionTask, Reading, Segment, draw_len,
};
use crate::{DataSetEntry, position_files};
use effattn_kernel::device::rng::RngStream;

/// Nested sums and differences.
pub static SET: DataSetEntry = position_files::set(
    "bracket-arithmetic",
    "Modular arithmetic with brackets",
    "the value, modulo 5, of nested brackets with + and - between digits",
    PositionTask {
        reading: Reading::There,
        alphabet: Alphabet { vocabulary: 12, noise: 0.0 },
        train: &["3..40"],
        test: &["3..40", "64", "128", "256"],
        check,
        draw,
        rules: &[
            PositionRule::definition("calculate", "the value of the expression", |question| {
                value(&question.tokens[..question.position()])
            }),
            PositionRule::floor("last-digit", "the last digit, with the sign in front of it", |question| {
                last_digit(&question.tokens[..question.position()])
            }),
        ],
    },
);

/// Token ids: the digits 0 to 4, then 5 +, 6 -, 7 * (never drawn), 8 (, 9 ), 10 =; 11 pads in the original.
const MODULUS: u32 = 5;
const PLUS: u32 = 5;
const MINUS: u32 = 6;
const OPEN: u32 = 8;
const CLOSE: u32 = 9;
const EQUALS: u32 = 10;

fn check(segment: &Segment, alphabet: Alphabet) -> Result<(), String> {
    segment.without_items()?;
    alphabet.fixed(12)?;
    match segment.longest >= 5 {
        true => Ok(()),
        false => Err(format!(
            "segment {segment}: an expression of two tokens, =, the answer and one more are a length of 5; write {}..5",
            segment.shortest.max(3)
        )),
    }
}

/// Appends an expression of `len` tokens and gives its value.
fn expression(len: usize, tokens: &mut Vec<u32>, rng: &mut RngStream) -> u32 {
    if len <= 4 {
        let digit = rng.below(MODULUS as usize) as u32;
        let (bracket, minus) = (len >= 3, len.is_multiple_of(2));
        tokens.extend(bracket.then_some(OPEN).into_iter().chain(minus.then_some(MINUS)).chain([digit]));
        tokens.extend(bracket.then_some(CLOSE));
        return if minus { negative(digit) } else { digit };
    }
    tokens.push(OPEN);
    let left_len = 1 + rng.below(len - 4);
    let left = expression(left_len, tokens, rng);
    let operator = [PLUS, MINUS][rng.below(2)];
    tokens.push(operator);
    let right = expression(len - 3 - left_len, tokens, rng);
    tokens.push(CLOSE);
    (left + if operator == PLUS { right } else { negative(right) }) % MODULUS
}

fn negative(value: u32) -> u32 {
    (MODULUS - value) % MODULUS
}

/// The value of an expression of any depth, with one number on a stack per open bracket; `None`: it is none.
fn value(tokens: &[u32]) -> Option<u32> {
    // of every open bracket: the sum so far, and whether the next term is subtracted
    let mut open = vec![(0, false)];
    for &token in tokens {
        let term = match token {
            digit if digit < MODULUS => digit,
            PLUS => continue,
            MINUS => {
                let last = open.last_mut()?;
                last.1 = !last.1;
                continue;
            }
            OPEN => {
                open.push((0, false));
                continue;
            }
            CLOSE => open.pop()?.0,
            _ => return None,
        };
        let (sum, minus) = open.last_mut()?;
        (*sum, *minus) = ((*sum + if *minus { negative(term) } else { term }) % MODULUS, false);
    }
    (open.len() == 1).then(|| open[0].0)
}

fn last_digit(tokens: &[u32]) -> Option<u32> {
    let place = tokens.iter().rposition(|token| *token < MODULUS)?;
    let minus = place > 0 && tokens[place - 1] == MINUS;
    Some(if minus { negative(tokens[place]) } else { tokens[place] })
}

/// The length counts `=`, the answer and one more token behind it; the answer is the label at `=`.
fn draw(Draw { segment, rng, .. }: Draw) -> PositionExample {
    let len = draw_len(segment, rng).max(5) - 3;
    let mut tokens = Vec::with_capacity(len + 1);
    let answer = expression(len, &mut tokens, rng);
    tokens.push(EQUALS);
    PositionExample { tokens, labels: vec![(len, answer)] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;
    use crate::position_labels::score;

    #[test]
    fn answers_are_those_of_the_original_generator() {
        let originals: [(&[u32], u32); 3] = [
            (&[8, 8, 8, 8, 0, 6, 4, 9, 5, 1, 9, 6, 6, 0, 9, 6, 8, 4, 9, 9], 3),
            (&[8, 8, 4, 6, 8, 4, 6, 0, 9, 9, 5, 8, 1, 9, 9], 1),
            (&[8, 8, 3, 5, 8, 8, 1, 9, 6, 8, 4, 9, 9, 9, 6, 6, 4, 9], 4),
        ];
        for (tokens, expected) in originals {
            assert_eq!(value(tokens), Some(expected), "{tokens:?}");
        }
        assert_eq!((value(&[8, 1]), value(&[9]), value(&[2, 10])), (None, None, None));
    }

    #[test]
    fn lengths_forms_and_the_floor_have_the_law_of_the_definition() {
        let task = SET.positions().unwrap();
        let draw = |text: &str, count: u64| -> Vec<PositionExample> {
            let segment: Segment = text.parse().unwrap();
            (0..count).map(|index| task.example((&segment, task.alphabet), (0, Split::Test), index)).collect()
        };
        let count = 8000;
        let examples = draw("3..40", count);
        let share = |what: &dyn Fn(&PositionExample) -> bool| {
            examples.iter().filter(|example| what(example)).count() as f64 / count as f64
        };
        // lengths 3, 4 and 5 of 38 have an expression of two tokens; a deviation of .003
        assert!((share(&|example| example.tokens.len() == 3) - 3.0 / 38.0).abs() < 0.012);
        assert!((share(&|example| example.tokens.len() == 38) - 1.0 / 38.0).abs() < 0.008);
        assert!(examples.iter().all(|example| !example.tokens.contains(&7)), "no products");
        // five values, nearly as often: a deviation of .0045
        assert!((0..5).all(|answer| (share(&|example| example.labels[0].1 == answer) - 0.2).abs() < 0.02));
        // of a sum of l tokens the left part has 1 to l - 4, uniform: with l = 5 both parts are digits
        let short = draw("8", count);
        assert!(short.iter().all(|example| matches!(&example.tokens[..], [8, a, op, b, 9, 10] if *a < 5 && *b < 5 && [5, 6].contains(op))));
        let minus = short.iter().filter(|example| example.tokens[2] == MINUS).count() as f64 / count as f64;
        assert!((minus - 0.5).abs() < 0.025, "{minus}");
        let nested = draw("12", count);
        let left_digit = nested.iter().filter(|example| example.tokens[1] < 5).count() as f64 / count as f64;
        assert!((left_digit - 0.2).abs() < 0.02, "one of five lengths: {left_digit}");
        let last = task.rules.iter().find(|rule| !rule.solves).unwrap();
        let floor = score(last, &draw("256", 4000), task.alphabet);
        assert!((floor - 0.2).abs() < 0.026, "{floor}");
        assert!(task.check(&["3..4".parse().unwrap()], task.alphabet).unwrap_err().contains("3..5"));
    }
}
