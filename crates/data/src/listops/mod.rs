//! ListOps: the value of a nested expression over MIN, MAX, MED (truncated median) and SM (sum modulo 10).
//!
//! The generator follows the Long Range Arena's (`data/listops.py`): below depth 10 a node is an operator with
//! probability 1/4, with 2 to 10 arguments; else a digit. Expressions of 500 to 2000 tokens (both out) are kept,
//! distinct ones only. It is seeded and exact: draw number i has a stream of its own, and accepted draws keep
//! their order, so any number of threads makes the same set.

use std::collections::HashSet;

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

mod dataset;

pub use dataset::{ListOps, SET};

/// Depth at which a node is always a digit (the root has depth 1).
const MAX_DEPTH: usize = 10;
/// Most arguments of an operator.
const MAX_ARGS: usize = 10;
/// An expression has more than `MIN_LENGTH` and fewer than `MAX_LENGTH` tokens.
const MIN_LENGTH: usize = 500;
/// See [`MIN_LENGTH`].
const MAX_LENGTH: usize = 2000;
/// Draws per parallel batch; part of nothing that is visible.
const BATCH: u64 = 1 << 16;

/// Token codes: digits are 0..=9, then the operators, then the closing bracket.
pub mod token {
    /// Minimum of the arguments.
    pub const MIN: u8 = 10;
    /// Maximum of the arguments.
    pub const MAX: u8 = 11;
    /// Median, truncated to a whole number.
    pub const MED: u8 = 12;
    /// Sum modulo 10.
    pub const SM: u8 = 13;
    /// End of an operator's arguments.
    pub const CLOSE: u8 = 14;
}

/// How expressions become token ids. The order of the vocabulary is constant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tokenizer {
    /// Digits and operators only: the closing bracket is lost, as behind Transformer-LS Table 1.
    #[default]
    DropBrackets,
    /// Closing brackets are a token of their own, as in today's Long Range Arena.
    KeepClose,
}

impl Tokenizer {
    /// Ids of an expression's tokens: code + 1; 0 is padding.
    pub fn ids(self, tokens: &[u8]) -> impl Iterator<Item = u32> {
        let kept = tokens.iter().filter(move |&&code| self == Self::KeepClose || code != token::CLOSE);
        kept.map(|&code| u32::from(code) + 1)
    }

    /// Number of ids in use, padding included.
    pub fn vocabulary(self) -> usize {
        match self {
            Self::DropBrackets => 15,
            Self::KeepClose => 16,
        }
    }
}

/// Expressions in prefix form, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expressions {
    tokens: Vec<u8>,
    ends: Vec<usize>,
    labels: Vec<u8>,
}

impl Expressions {
    /// Number of expressions.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Tokens of expression `index`.
    pub fn tokens(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.tokens[start..self.ends[index]]
    }

    /// Value of expression `index`.
    pub fn label(&self, index: usize) -> u8 {
        self.labels[index]
    }

    /// Appends one expression.
    pub fn push(&mut self, tokens: &[u8], label: u8) {
        self.tokens.extend_from_slice(tokens);
        self.ends.push(self.tokens.len());
        self.labels.push(label);
    }
}

/// `count` distinct expressions drawn under `seed`.
pub fn generate(seed: u64, count: usize) -> Expressions {
    let mut made = Expressions::default();
    let mut seen = HashSet::with_capacity(count);
    let mut next = 0;
    while made.len() < count {
        let batch: Vec<Expression> =
            (next..next + BATCH).into_par_iter().filter_map(|index| draw(seed, index)).collect();
        next += BATCH;
        for Expression { tokens, label, hash } in batch {
            if made.len() < count && seen.insert(hash) {
                made.push(&tokens, label);
            }
        }
    }
    made
}

struct Expression {
    tokens: Vec<u8>,
    label: u8,
    hash: [u8; 16],
}

/// Draw number `index`; nothing if its length is out of range.
fn draw(seed: u64, index: u64) -> Option<Expression> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    if let Node::Digit(_) = node(&mut rng, 1) {
        return None; // a lone digit is too short
    }
    let mut tokens = Vec::with_capacity(MAX_LENGTH);
    let label = operator(&mut rng, 1, &mut tokens)?;
    if tokens.len() <= MIN_LENGTH {
        return None;
    }
    let mut hash = [0; 16];
    hash.copy_from_slice(&Sha256::digest(&tokens)[..16]);
    Some(Expression { tokens, label, hash })
}

/// What stands at a place of the tree.
enum Node {
    Digit(u8),
    Operator,
}

/// One word of randomness decides a node: two bits whether it is an operator, the rest which digit it is.
fn node(rng: &mut impl RngCore, depth: usize) -> Node {
    let word = rng.next_u32();
    if depth < MAX_DEPTH && word >> 30 == 0 {
        return Node::Operator;
    }
    Node::Digit(((u64::from(word & (u32::MAX >> 2)) * 10) >> 30) as u8)
}

/// Writes one operator node and returns its value; nothing once the expression is too long.
fn operator(rng: &mut impl RngCore, depth: usize, tokens: &mut Vec<u8>) -> Option<u8> {
    let word = u64::from(rng.next_u32());
    let count = 2 + ((word * (MAX_ARGS as u64 - 1)) >> 32) as usize;
    let operator = token::MIN + (word & 3) as u8;
    let mut values = [0; MAX_ARGS];
    tokens.push(operator);
    for value in &mut values[..count] {
        *value = match node(rng, depth + 1) {
            Node::Operator => self::operator(rng, depth + 1, tokens)?,
            Node::Digit(digit) => {
                tokens.push(digit);
                digit
            }
        };
        if tokens.len() + 1 >= MAX_LENGTH {
            return None;
        }
    }
    tokens.push(token::CLOSE);
    Some(apply(operator, &mut values[..count]))
}

/// Value of an operator over its arguments (at least one).
fn apply(operator: u8, values: &mut [u8]) -> u8 {
    values.sort_unstable();
    let half = values.len() / 2;
    match operator {
        token::MIN => values[0],
        token::MAX => values[values.len() - 1],
        token::MED if values.len() % 2 == 1 => values[half],
        token::MED => (values[half - 1] + values[half]) / 2,
        _ => (values.iter().map(|&value| u32::from(value)).sum::<u32>() % 10) as u8,
    }
}

/// What is wrong with an expression read from a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// A word that is no token.
    #[error("{0:?} is not a ListOps token; expected (, ), ], a digit, [MIN, [MAX, [MED or [SM")]
    Word(String),
    /// Brackets that do not match, an operator without arguments, or something behind the end.
    #[error("the expression's brackets do not match")]
    Brackets,
}

/// Reads the text form; round brackets, which only make the tree binary, are skipped. An operator may also
/// stand alone with its bracket before it (`[MIN`), `X` may stand for `]`.
pub fn parse(text: &str) -> Result<(Vec<u8>, u8), ExpressionError> {
    let mut tokens = Vec::new();
    for word in text.split_ascii_whitespace() {
        let code = match word {
            "(" | ")" => continue,
            "[MIN" => token::MIN,
            "[MAX" => token::MAX,
            "[MED" => token::MED,
            "[SM" => token::SM,
            "]" | "X" => token::CLOSE,
            digit if digit.len() == 1 && digit.as_bytes()[0].is_ascii_digit() => digit.as_bytes()[0] - b'0',
            word => return Err(ExpressionError::Word(word.chars().take(20).collect())),
        };
        tokens.push(code);
    }
    let label = evaluate(&tokens).ok_or(ExpressionError::Brackets)?;
    Ok((tokens, label))
}

/// Value of an expression in prefix form, if it is one. Iterative: nesting is limited by memory only.
fn evaluate(tokens: &[u8]) -> Option<u8> {
    let mut open: Vec<(u8, Vec<u8>)> = Vec::new();
    let mut result = None;
    for &code in tokens {
        if result.is_some() {
            return None;
        }
        let value = match code {
            0..=9 => code,
            token::CLOSE => {
                let (operator, mut values) = open.pop()?;
                if values.is_empty() {
                    return None;
                }
                apply(operator, &mut values)
            }
            operator => {
                open.push((operator, Vec::new()));
                continue;
            }
        };
        match open.last_mut() {
            Some((_, values)) => values.push(value),
            None => result = Some(value),
        }
    }
    result
}

/// The text form: fully parenthesised binary nesting, `( ( ( [MIN 3 ) 4 ) ] )`.
pub fn to_text(tokens: &[u8]) -> String {
    // every operator opens one "( " per argument and one for its end; count arguments first
    let mut arguments = vec![0usize; tokens.len()];
    let mut open: Vec<usize> = Vec::new();
    for (at, &code) in tokens.iter().enumerate() {
        if code == token::CLOSE {
            open.pop();
            continue;
        }
        if let Some(&parent) = open.last() {
            arguments[parent] += 1;
        }
        if code > 9 {
            open.push(at);
        }
    }
    let mut text = String::with_capacity(tokens.len() * 6);
    let mut depth = 0usize;
    for (at, &code) in tokens.iter().enumerate() {
        if at > 0 {
            text.push(' ');
        }
        match code {
            0..=9 => {
                text.push(char::from(b'0' + code));
            }
            token::CLOSE => {
                text.push_str("] )");
                depth -= 1;
            }
            operator => {
                for _ in 0..=arguments[at] {
                    text.push_str("( ");
                }
                text.push_str(name(operator));
                depth += 1;
                continue;
            }
        }
        if depth > 0 {
            text.push_str(" )"); // an argument ends its pair
        }
    }
    text
}

/// The token of `id`, as in the text form.
pub fn token_text(id: u32) -> String {
    match u8::try_from(id).unwrap_or_default() {
        0 => "padding".to_owned(),
        digit @ 1..=10 => (digit - 1).to_string(),
        close if close == token::CLOSE + 1 => "]".to_owned(),
        operator => name(operator - 1).to_owned(),
    }
}

fn name(operator: u8) -> &'static str {
    match operator {
        token::MIN => "[MIN",
        token::MAX => "[MAX",
        token::MED => "[MED",
        _ => "[SM",
    }
}

#[cfg(test)]
mod tests;
