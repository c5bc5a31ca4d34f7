use super::*;

/// A second implementation: recursive over the text form, with its own arithmetic.
mod independent {
    /// Value of the expression that `words` starts with.
    pub fn value(words: &mut std::iter::Peekable<std::str::SplitAsciiWhitespace>) -> i64 {
        let word = words.next().expect("a word");
        if word != "(" {
            return word.parse().expect("a digit");
        }
        let mut open = 1;
        while words.peek() == Some(&"(") {
            words.next();
            open += 1;
        }
        let operator = words.next().expect("an operator");
        let mut list = Vec::new();
        loop {
            if words.peek() == Some(&"]") {
                words.next();
                assert_eq!(words.next(), Some(")"));
                break;
            }
            list.push(value(words));
            assert_eq!(words.next(), Some(")"));
        }
        assert_eq!(open, list.len() + 1);
        match operator {
            "[MIN" => *list.iter().min().expect("arguments"),
            "[MAX" => *list.iter().max().expect("arguments"),
            "[SM" => list.iter().sum::<i64>().rem_euclid(10),
            "[MED" => {
                let mut sorted = list.clone();
                sorted.sort();
                let n = sorted.len();
                let middle = (sorted[(n - 1) / 2] + sorted[n / 2]) as f64 / 2.0;
                middle.trunc() as i64
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn an_independent_evaluator_agrees_with_every_label() {
    let made = generate(7, 4000);
    for index in 0..made.len() {
        let text = to_text(made.tokens(index));
        let value = independent::value(&mut text.split_ascii_whitespace().peekable());
        assert_eq!(value, i64::from(made.label(index)), "{text}");
    }
}

#[test]
fn text_and_tokens_agree() {
    let made = generate(1, 200);
    for index in 0..made.len() {
        let text = to_text(made.tokens(index));
        assert_eq!(text.split(' ').count(), 3 * made.tokens(index).len() - 2);
        assert_eq!(parse(&text), Ok((made.tokens(index).to_vec(), made.label(index))));
    }
    assert_eq!(to_text(&[token::MIN, 3, 4, token::CLOSE]), "( ( ( [MIN 3 ) 4 ) ] )");
}

#[test]
fn published_statistics_are_met() {
    let made = generate(0, 20_000);
    let n = made.len() as f64;
    let lengths: Vec<f64> = (0..made.len()).map(|i| made.tokens(i).len() as f64).collect();
    let mean = lengths.iter().sum::<f64>() / n;
    let std = (lengths.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
    assert!((mean - 1033.0).abs() < 12.0, "mean length {mean}");
    assert!((std - 394.0).abs() < 8.0, "std of length {std}");
    let expected = [0.172, 0.092, 0.073, 0.082, 0.092, 0.087, 0.077, 0.074, 0.087, 0.164];
    for (label, share) in expected.into_iter().enumerate() {
        let count = (0..made.len()).filter(|&i| usize::from(made.label(i)) == label).count();
        assert!((count as f64 / n - share).abs() < 0.012, "share of {label}: {}", count as f64 / n);
    }
    let operators: usize = (0..made.len())
        .map(|i| made.tokens(i).iter().filter(|&&code| (10..14).contains(&code)).count())
        .sum();
    assert!((operators as f64 / n - 147.0).abs() < 2.5, "operators {}", operators as f64 / n);
}

#[test]
fn threads_change_nothing_and_all_are_distinct() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    let one = pool(1).install(|| generate(3, 500));
    assert_eq!(one, pool(2).install(|| generate(3, 500)));
    let distinct: HashSet<&[u8]> = (0..one.len()).map(|i| one.tokens(i)).collect();
    assert_eq!(distinct.len(), 500);
    assert_ne!(one, generate(4, 500));
}

#[test]
fn nonsense_is_refused() {
    assert_eq!(parse("[MIN 3 4"), Err(ExpressionError::Brackets));
    assert_eq!(parse("3 4"), Err(ExpressionError::Brackets));
    assert_eq!(parse("]"), Err(ExpressionError::Brackets));
    assert_eq!(parse("[MIN ]"), Err(ExpressionError::Brackets));
    assert_eq!(parse(""), Err(ExpressionError::Brackets));
    assert_eq!(parse("[AVG 3 ]"), Err(ExpressionError::Word("[AVG".into())));
    assert_eq!(parse("[MED 3 4 ]").map(|(_, label)| label), Ok(3));
}

#[test]
fn tokenizers_number_tokens_from_one() {
    let tokens = [token::SM, 0, 9, token::CLOSE];
    assert_eq!(Tokenizer::DropBrackets.ids(&tokens).collect::<Vec<_>>(), [14, 1, 10]);
    assert_eq!(Tokenizer::KeepClose.ids(&tokens).collect::<Vec<_>>(), [14, 1, 10, 15]);
}

#[test]
fn ids_are_told_as_tokens_of_the_text() {
    let codes: Vec<u8> = [3, token::MAX, 9, 0, token::SM, token::CLOSE].into();
    let told: Vec<String> = Tokenizer::KeepClose.ids(&codes).map(token_text).collect();
    assert_eq!(told, ["3", "[MAX", "9", "0", "[SM", "]"]);
    assert_eq!(token_text(0), "padding");
}
