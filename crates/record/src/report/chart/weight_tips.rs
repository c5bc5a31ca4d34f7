//! What a pointer over a drawn matrix is told: label, query, key and weight of the cell under it. The weights stand in one attribute, two
//! characters a cell, and a script reads them: a mark per cell would make a file of megabytes.

use super::canvas::escape;
use super::matrix_cells::CellGrid;
use crate::matrix::Matrix;

/// What tells it, in the chart itself: alone in a browser, or in a page.
pub(super) const SCRIPT: &str = include_str!("weight_tips.js");
/// Bytes of a cell.
pub(super) const BYTES: usize = 2;

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Codes from this below zero to this above it.
const CODES: f32 = 2047.0;

/// The attributes of the area of `grid`, whose cells are blocks of so many queries and columns of `kind` in `matrix`. `full` is the largest
/// weight; `None`: cells are visible or not.
pub(super) fn attributes(
    matrix: &Matrix,
    grid: &CellGrid,
    (kind, (high, wide)): (&str, (usize, usize)),
    full: Option<f32>,
) -> String {
    let count = if kind == "key" { matrix.keys } else { matrix.slots };
    let (rows, columns) = (grid.rows, grid.columns);
    let tokens = match matrix.tokens.as_slice() {
        [] => String::new(),
        tokens => format!(" data-tokens=\"{}\"", escape(&serde_json::json!(tokens).to_string())),
    };
    let full_text = full.map_or_else(String::new, |full| format!(" data-full=\"{full}\""));
    format!(
        "data-name=\"{}\" data-kind=\"{kind}\" data-grid=\"{rows} {columns} {high} {wide} {} {count}\"{full_text}{tokens} data-weights=\"{}\"",
        escape(&matrix.label),
        matrix.queries,
        grid.values.iter().flat_map(|value| code(*value, full.unwrap_or(1.0))).collect::<String>()
    )
}

/// Two digits of the root of `value` as a share of `full`: small weights keep two decimals, too.
fn code(value: f32, full: f32) -> [char; 2] {
    let share = (value / full).clamp(-1.0, 1.0);
    let code = (share.signum() * share.abs().sqrt() * CODES).round() as i32 + 2048;
    [code / 64, code % 64].map(|digit| char::from(DIGITS[digit as usize]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the script reads it.
    fn read(code: [char; 2], full: f32) -> f32 {
        let digit = |c: char| DIGITS.iter().position(|digit| char::from(*digit) == c).unwrap() as f32;
        let code = 64.0 * digit(code[0]) + digit(code[1]) - 2048.0;
        code.signum() * (code / CODES).powi(2) * full
    }

    #[test]
    fn weights_keep_two_digits() {
        for full in [1.0, 0.037] {
            for share in [1.0, 0.5, 0.31, 0.012, 0.001, -0.25, -1.0] {
                let value: f32 = share * full;
                let told = read(code(value, full), full);
                assert!((told - value).abs() <= 0.02 * value.abs(), "{value} is told as {told}");
            }
        }
        assert_eq!(read(code(0.0, 1.0), 1.0).abs(), 0.0);
        assert!((code(f32::MAX, 1.0), code(-f32::MAX, 1.0)) == (['/', '/'], ['A', 'B']), "within the digits");
    }

    #[test]
    fn names_and_tokens_end_no_attribute() {
        let matrix = Matrix {
            label: "a\"<b>".into(),
            tokens: vec!["\"".into(), "&".into()],
            queries: 2,
            keys: 2,
            values: vec![1.0, 0.0, 0.5, 0.5],
            ..Matrix::default()
        };
        let grid = CellGrid::new(&matrix, 0..2, (1, 1), super::super::Shade::Weight, 1.0);
        let text = attributes(&matrix, &grid, ("key", (1, 1)), Some(1.0));
        assert!(
            text.starts_with(
                "data-name=\"a&quot;&lt;b&gt;\" data-kind=\"key\" data-grid=\"2 2 1 1 2 2\" data-full=\"1\""
            ),
            "{text}"
        );
        assert!(text.contains(" data-tokens=\"[&quot;\\&quot;&quot;,&quot;&amp;&quot;]\""), "{text}");
        assert_eq!(text.split('"').count() % 2, 1, "{text}");
    }

    #[test]
    fn the_script_is_markup_of_no_kind() {
        assert!(!SCRIPT.contains('<') && !SCRIPT.contains('&'), "it stands in XML and in HTML as it is");
    }
}
