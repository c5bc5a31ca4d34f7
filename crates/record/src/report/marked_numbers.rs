//! Fills marked numbers in Markdown from rows.
//!
//! `<!-- row accuracy task=listops model=ls len=2048 .2 -->35.99<!-- /row -->`: the metric, columns with their values, digits
//! behind the point. Columns that are not named may have any value, but exactly one value must be left. `A / B` is the
//! ratio of two such values.

use crate::Row;

const BEGIN: &str = "<!-- row ";
const MIDDLE: &str = "-->";
const END: &str = "<!-- /row -->";
/// The most digits behind the point that can be asked for: beyond, they say nothing of a number.
const MOST_DIGITS: usize = 17;

/// `text` with every marked number renewed from `rows`.
pub fn fill(text: &str, rows: &[Row]) -> Result<String, String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(BEGIN) {
        let (before, marked) = rest.split_at(at);
        let parts = marked[BEGIN.len()..].split_once(MIDDLE);
        let parts = parts.and_then(|(question, tail)| Some((question, tail.split_once(END)?.1)));
        let Some((question, tail)) = parts else {
            return Err(format!("a marker {BEGIN:?} is not closed by {END:?}"));
        };
        out.push_str(before);
        out.push_str(&format!("{BEGIN}{question}{MIDDLE}{}{END}", answer(question.trim(), rows)?));
        rest = tail;
    }
    out.push_str(rest);
    Ok(out)
}

/// `text` without its marked numbers.
pub fn without(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, marked)) = rest.split_once(BEGIN) {
        out.push_str(before);
        rest = marked.split_once(END).map_or("", |(_, tail)| tail);
    }
    out.push_str(rest);
    out
}

fn answer(mark: &str, rows: &[Row]) -> Result<String, String> {
    let (question, digits) = match mark.rsplit_once(" .") {
        Some((question, digits)) => {
            let known = digits.parse::<usize>().ok().filter(|digits| *digits <= MOST_DIGITS);
            let wrong = || format!("{digits:?} digits in {mark:?}; allowed: .0 to .{MOST_DIGITS}");
            (question, known.ok_or_else(wrong)?)
        }
        None => (mark, 0),
    };
    let value = match question.split_once(" / ") {
        Some((a, b)) => value(a, rows)? / value(b, rows)?,
        None => value(question, rows)?,
    };
    if !value.is_finite() {
        return Err(format!("{mark:?} is {value}; name rows whose value, or ratio, is a number"));
    }
    Ok(format!("{value:.digits$}"))
}

/// The one value that the rows have for `question`.
fn value(question: &str, rows: &[Row]) -> Result<f64, String> {
    let mut words = question.split_whitespace();
    let metric = words.next().unwrap_or_default();
    let conditions: Vec<(&str, &str)> = words
        .map(|word| {
            word.split_once('=').ok_or_else(|| format!("{word:?} in {question:?} is not column=value"))
        })
        .collect::<Result<_, _>>()?;
    let fits = |row: &&Row| {
        let json = serde_json::to_value(row).unwrap_or_default();
        row.metric == metric
            && conditions.iter().all(|(column, wanted)| match &json[*column] {
                serde_json::Value::String(text) => text == wanted,
                serde_json::Value::Null => wanted.is_empty(),
                other => wanted == &other.to_string().as_str(),
            })
    };
    let mut values: Vec<f64> = rows.iter().filter(fits).filter_map(|row| row.value).collect();
    values.dedup();
    match values[..] {
        [value] => Ok(value),
        _ => Err(format!("{} values for {question:?}; name columns until one is left", values.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        [("ls", 1024, 0.5), ("ls", 2048, 1.0), ("full", 2048, 3.0)]
            .map(|(model, len, value)| {
                Row { len: Some(len), ..Row::new("speed", model) }.with("step_time", "s", Some(value))
            })
            .to_vec()
    }

    #[test]
    fn numbers_are_renewed_in_place_and_twice_the_same() {
        let text = "takes <!-- row step_time model=ls len=1024 .2 -->9<!-- /row --> s, full \
                    <!-- row step_time model=full / step_time model=ls len=2048 .1 --><!-- /row --> times.";
        let filled = fill(text, &rows()).unwrap();
        assert!(
            filled.contains("-->0.50<!-- /row --> s") && filled.contains("-->3.0<!-- /row --> times"),
            "{filled}"
        );
        assert_eq!(fill(&filled, &rows()).unwrap(), filled);
        assert_eq!(without(&filled), "takes  s, full  times.");
    }

    #[test]
    fn a_question_has_one_answer() {
        let ask = |text: &str| fill(text, &rows()).unwrap_err();
        assert!(ask("<!-- row step_time model=ls --><!-- /row -->").starts_with("2 values"));
        assert!(ask("<!-- row accuracy --><!-- /row -->").starts_with("0 values"));
        assert!(ask("<!-- row accuracy -->").contains("not closed"));
        assert!(ask("<!-- row step_time ls --><!-- /row -->").contains("column=value"));
    }

    #[test]
    fn digits_have_a_limit_and_a_ratio_is_a_number() {
        let one = "step_time model=ls len=1024";
        let zero = Row::new("speed", "none").with("step_time", "s", Some(0.0));
        let rows: Vec<Row> = rows().into_iter().chain([zero]).collect();
        let ask = |mark: &str| fill(&format!("<!-- row {mark} --><!-- /row -->"), &rows);
        assert!(ask(&format!("{one} .17")).unwrap().contains("0.50000000000000000"));
        for digits in ["18", "70000", "x"] {
            let mark = format!("{one} .{digits}");
            let error = ask(&mark).unwrap_err();
            assert!(error.contains(&mark) && error.contains(".0 to .17"), "{error}");
        }
        for over in [one, "step_time model=none"] {
            let mark = format!("{over} / step_time model=none .2");
            assert!(ask(&mark).unwrap_err().contains(&mark), "{mark}");
        }
    }
}
