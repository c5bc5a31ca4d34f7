//! Attention matrices side by side: who sees whom, or how much.

use std::io;

use plotters::style::RGBColor;

use super::Chart;
use super::canvas::{self, Align, Canvas, FONT, INK, Point, SOFT};
use crate::matrix::Matrix;

/// How values become colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shade {
    /// Visible or not; slots have a colour of their own. A matrix that has other values than 0 and 1 is drawn as [`Shade::Weight`].
    Visible,
    /// From white at 0 to dark at the panel's largest value; negative values in a second colour.
    Weight,
}

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 24.0;
const GAP: f64 = 36.0;
const LINE: f64 = FONT * 1.16;
/// Most cells along an edge; longer matrices are drawn in blocks.
const MOST: usize = 96;
/// How much wider bold letters are.
const BOLD: f64 = 1.12;
/// Steps between white and full colour.
const LEVELS: i32 = 24;
/// The level of cells that are [`GLOBAL`].
const WHOLE: i32 = LEVELS + 1;
/// Height of the letters where more than three panels stand side by side.
const SMALL: f64 = 25.0;

const KEY: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const SLOT: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
/// Keys that every query sees, and queries that see every key.
const GLOBAL: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const DARK: RGBColor = RGBColor(0x08, 0x1d, 0x58);

/// Draws `matrices` as a chart called `name`.
pub fn matrices(
    name: &str,
    (title, subtitle): (&str, &str),
    matrices: &[Matrix],
    shade: Shade,
) -> io::Result<Chart> {
    // a page holds every mechanism: five columns of five
    let columns = match matrices.len() {
        few @ 0..=3 => few.max(1),
        4..=8 => 4,
        _ => 5,
    };
    let size = ((WIDTH - 2.0 * MARGIN + GAP) / columns as f64 - GAP).min(640.0);
    let font = if columns > 3 { SMALL } else { FONT };
    let panels: Vec<Panel> = matrices.iter().map(|matrix| Panel::new(matrix, shade, (size, font))).collect();
    let rows: Vec<&[Panel]> = panels.chunks(columns).collect();
    let most = |row: &[Panel], of: fn(&Panel) -> f64| row.iter().map(of).fold(0.0, f64::max);
    let texts: Vec<f64> = rows.iter().map(|row| most(row, Panel::text_height)).collect();
    let heights: Vec<f64> =
        rows.iter().zip(&texts).map(|(row, text)| text + most(row, Panel::box_height)).collect();
    let subtitles = wrap(subtitle, WIDTH - 2.0 * MARGIN, FONT);
    let header = 76.0 + subtitles.len() as f64 * LINE;
    let height = header + heights.iter().map(|height| height + GAP).sum::<f64>();
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (MARGIN, 36.0), Align::Left, FONT * 1.1)?;
        for (index, line) in subtitles.iter().enumerate() {
            let y = 80.0 + index as f64 * LINE;
            canvas.colored(line, (MARGIN, y), Align::Left, (FONT, SOFT))?;
        }
        let mut top = header;
        for ((row, text), height) in rows.iter().zip(&texts).zip(&heights) {
            for (column, panel) in row.iter().enumerate() {
                panel.draw(canvas, (MARGIN + column as f64 * (size + GAP), top), *text)?;
            }
            top += height + GAP;
        }
        Ok(())
    })?;
    // without it renderers blend the edges of neighbouring cells with the white below
    let svg = svg.replacen("<svg ", "<svg shape-rendering=\"crispEdges\" ", 1);
    Ok(Chart { name: name.to_owned(), svg, csv: csv(matrices)? })
}

/// Every entry that is not zero.
fn csv(matrices: &[Matrix]) -> io::Result<String> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record(["model", "query", "kind", "index", "value"])?;
    for matrix in matrices {
        for query in 0..matrix.queries {
            for (column, value) in matrix.row(query).iter().enumerate().filter(|(_, value)| **value != 0.0) {
                let (kind, index) =
                    if column < matrix.keys { ("key", column) } else { ("slot", column - matrix.keys) };
                writer.serialize((&matrix.label, query, kind, index, value))?;
            }
        }
    }
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// One matrix, ready to draw.
struct Panel {
    label: Vec<String>,
    note: Vec<String>,
    /// Levels of the drawn cells, row-major; keys and slots.
    keys: CellGrid,
    slots: CellGrid,
    /// Pixels per cell.
    cell: f64,
    shade: Shade,
    /// Height of letters.
    font: f64,
}

/// Drawn cells of one part of a matrix.
struct CellGrid {
    rows: usize,
    columns: usize,
    levels: Vec<i32>,
}

impl CellGrid {
    /// `rows` x `columns` of `value`, in blocks of `height` x `width` whose mean (or largest value) becomes
    /// a level; `full` is the deepest.
    fn new(
        matrix: &Matrix,
        columns: std::ops::Range<usize>,
        block: (usize, usize),
        shade: Shade,
        full: f32,
    ) -> Self {
        let global = Global::of(matrix, if columns.start < matrix.keys { shade } else { Shade::Weight });
        let (high, wide) = block;
        let grid = (matrix.queries.div_ceil(high), columns.len().div_ceil(wide));
        let mut levels = Vec::with_capacity(grid.0 * grid.1);
        for row in 0..grid.0 {
            let queries = row * high..((row + 1) * high).min(matrix.queries);
            for column in 0..grid.1 {
                let first = columns.start + column * wide;
                let last = (first + wide).min(columns.end);
                let block = queries.clone().flat_map(|query| &matrix.row(query)[first..last]);
                levels.push(match shade {
                    Shade::Visible if !block.clone().any(|value| *value != 0.0) => 0,
                    Shade::Visible if global.touches(queries.clone(), first..last) => WHOLE,
                    Shade::Visible => LEVELS,
                    Shade::Weight => {
                        let mean = block.sum::<f32>() / (queries.len() * (last - first)) as f32;
                        (mean / full * LEVELS as f32).round().clamp(-(LEVELS as f32), LEVELS as f32) as i32
                    }
                });
            }
        }
        Self { rows: grid.0, columns: grid.1, levels }
    }

    /// Rectangles of equal level other than 0: (first row, end row, first column, end column, level).
    fn rectangles(&self) -> Vec<(usize, usize, usize, usize, i32)> {
        let mut done = Vec::new();
        let mut open: Vec<(usize, usize, usize, usize, i32)> = Vec::new();
        for row in 0..self.rows {
            let levels = &self.levels[row * self.columns..(row + 1) * self.columns];
            let mut still = Vec::new();
            let mut start = 0;
            for run in levels.chunk_by(|a, b| a == b) {
                let end = start + run.len();
                if run[0] != 0 {
                    let above = open.iter().position(|open| (open.2, open.3, open.4) == (start, end, run[0]));
                    let first = above.map_or(row, |index| open.swap_remove(index).0);
                    still.push((first, row + 1, start, end, run[0]));
                }
                start = end;
            }
            done.append(&mut open);
            open = still;
        }
        done.append(&mut open);
        done
    }
}

/// Which keys every query sees and which queries see every key, in a matrix where most do not.
struct Global {
    queries: Vec<bool>,
    keys: Vec<bool>,
}

impl Global {
    fn of(matrix: &Matrix, shade: Shade) -> Self {
        let (queries, keys) = (matrix.queries, matrix.keys);
        let sees = |query: usize, key: usize| matrix.row(query)[key] != 0.0;
        let causal = (0..queries).all(|query| (query + 1..keys).all(|key| !sees(query, key)));
        let whole = |(seen, of): (usize, usize)| seen == of && 4 * of >= queries.max(4);
        let of_key = |key: usize| {
            let may = (if causal { key } else { 0 })..queries;
            whole((may.clone().filter(|query| sees(*query, key)).count(), may.len()))
        };
        let of_query = |query: usize| !causal && (0..keys).all(|key| sees(query, key));
        let mut all =
            Self { queries: (0..queries).map(of_query).collect(), keys: (0..keys).map(of_key).collect() };
        let most = |flags: &[bool]| 2 * flags.iter().filter(|flag| **flag).count() > flags.len();
        if shade == Shade::Weight || most(&all.keys) || most(&all.queries) {
            all = Self { queries: vec![false; queries], keys: vec![false; keys] };
        }
        all
    }

    fn touches(&self, queries: std::ops::Range<usize>, keys: std::ops::Range<usize>) -> bool {
        let any = |flags: &[bool], range: std::ops::Range<usize>| {
            flags.get(range).is_some_and(|part| part.contains(&true))
        };
        any(&self.queries, queries) || any(&self.keys, keys)
    }
}

impl Panel {
    fn new(matrix: &Matrix, shade: Shade, (size, font): (f64, f64)) -> Self {
        let binary = matrix.values.iter().all(|value| [0.0, 1.0].contains(value));
        let shade = if binary { shade } else { Shade::Weight };
        let block = matrix.queries.max(matrix.keys).div_ceil(MOST).max(1);
        // Slots take at most half the room of the keys.
        let room = matrix.keys.div_ceil(block).max(2) / 2;
        let wide = matrix.slots.div_ceil(room).max(1);
        let largest = matrix.values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let full = if largest > 0.0 { largest } else { 1.0 };
        let keys = CellGrid::new(matrix, 0..matrix.keys, (block, block), shade, full);
        let slots = CellGrid::new(matrix, matrix.keys..matrix.columns(), (block, wide), shade, full);
        let gap = if matrix.slots > 0 { 2 } else { 0 };
        let cells = (keys.columns + gap + slots.columns).max(keys.rows).max(1);
        let mut notes = vec![matrix.note.clone()];
        if wide > 1 {
            notes.push(format!("{wide} slots per column"));
        }
        if block > 1 {
            notes.push(format!("{block} x {block} positions per cell"));
        }
        if shade == Shade::Weight {
            notes.push(format!("darkest: {largest:.2}"));
        }
        notes.retain(|note| !note.is_empty());
        Self {
            label: wrap(&matrix.label, size / BOLD, font),
            note: wrap(&notes.join("; "), size, font),
            keys,
            slots,
            cell: size / cells as f64,
            shade,
            font,
        }
    }

    fn text_height(&self) -> f64 {
        (self.label.len() + self.note.len()) as f64 * 1.16 * self.font + 10.0
    }

    fn box_height(&self) -> f64 {
        self.keys.rows as f64 * self.cell
    }

    /// Draws the panel with `text` pixels for its label and note.
    fn draw(&self, canvas: &mut Canvas, corner: Point, text: f64) -> io::Result<()> {
        let (left, top) = corner;
        let height = 1.16 * self.font;
        let mut y = top + 0.5 * height;
        for line in &self.label {
            canvas.bold(line, (left, y), Align::Left, self.font)?;
            y += height;
        }
        for line in &self.note {
            canvas.colored(line, (left, y), Align::Left, (self.font, SOFT))?;
            y += height;
        }
        let top = top + text;
        let (key, slot) = match self.shade {
            Shade::Visible => (KEY, SLOT),
            Shade::Weight => (DARK, DARK),
        };
        self.grid(canvas, &self.keys, (left, top), key)?;
        let beside = left + (self.keys.columns + 2) as f64 * self.cell;
        self.grid(canvas, &self.slots, (beside, top), slot)
    }

    fn grid(
        &self,
        canvas: &mut Canvas,
        grid: &CellGrid,
        (left, top): Point,
        color: RGBColor,
    ) -> io::Result<()> {
        if grid.columns == 0 || grid.rows == 0 {
            return Ok(());
        }
        let at = |column: usize, row: usize| (left + column as f64 * self.cell, top + row as f64 * self.cell);
        for (row, end_row, column, end_column, level) in grid.rectangles() {
            let color = match level {
                WHOLE => GLOBAL,
                1.. => color,
                _ => SLOT,
            };
            canvas.rect(at(column, row), at(end_column, end_row), tint(color, level.abs().min(LEVELS)))?;
        }
        canvas.frame(at(0, 0), at(grid.columns, grid.rows), INK)
    }
}

/// `color` on white, at `level` of [`LEVELS`].
fn tint(color: RGBColor, level: i32) -> RGBColor {
    let mix = |channel: u8| {
        let share = f64::from(level) / f64::from(LEVELS);
        (255.0 - share * (255.0 - f64::from(channel))).round() as u8
    };
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

/// Lines of `text` that fit `width` pixels, broken behind spaces, `:`, `,` and `-`.
fn wrap(text: &str, width: f64, font: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in text.split_inclusive([' ', ':', ',', '-']) {
        match lines.last_mut() {
            Some(line) if canvas::text_width(&format!("{line}{}", piece.trim_end()), font) <= width => {
                line.push_str(piece);
            }
            _ if piece.is_empty() => {}
            _ => lines.push(piece.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(values: &[f32], keys: usize, slots: usize) -> Matrix {
        let queries = values.len() / (keys + slots).max(1);
        Matrix { label: "ls".into(), note: String::new(), queries, keys, slots, values: values.to_vec() }
    }

    #[test]
    fn rectangles_cover_equal_cells_once() {
        let m = matrix(&[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], 3, 0);
        let grid = CellGrid::new(&m, 0..3, (1, 1), Shade::Visible, 1.0);
        let mut found = grid.rectangles();
        found.sort();
        assert_eq!(found, [(0, 2, 0, 2, LEVELS), (2, 3, 2, 3, LEVELS)]);
    }

    #[test]
    fn long_matrices_are_drawn_in_blocks() {
        let n = 2 * MOST + 1;
        let mut values = vec![0.0; n * n];
        (0..n).for_each(|i| values[i * n + i] = 1.0);
        let panel = Panel::new(&matrix(&values, n, 0), Shade::Visible, (300.0, FONT));
        assert_eq!((panel.keys.rows, panel.keys.columns), (65, 65));
        assert!(panel.note.join("").contains("3 x 3 positions per cell"));
        assert_eq!(panel.keys.rectangles().len(), 65);
    }

    #[test]
    fn negative_weights_have_their_own_colour() {
        let m = matrix(&[0.5, -1.0, 0.0, 1.0], 2, 0);
        let grid = CellGrid::new(&m, 0..2, (1, 1), Shade::Weight, 1.0);
        assert_eq!(grid.levels, [LEVELS / 2, -LEVELS, 0, LEVELS]);
        let chart = matrices("attention", ("t", "s"), &[m], Shade::Weight).unwrap();
        assert!(chart.svg.contains("#D55E00") && chart.csv.contains("ls,0,key,1,-1.0"), "{}", chart.csv);
    }

    #[test]
    fn empty_matrices_and_slots_can_be_drawn() {
        let many =
            vec![matrix(&[], 0, 0), matrix(&[1.0; 8], 2, 6), matrix(&[0.0; 4], 2, 0), matrix(&[1.0], 1, 0)];
        let chart = matrices("pattern", ("t", "s"), &many, Shade::Visible).unwrap();
        assert!(!chart.svg.contains("NaN") && chart.csv.contains("ls,0,slot,5,1.0"), "{}", chart.csv);
        assert!(matrices("pattern", ("t", "s"), &[], Shade::Visible).is_ok());
    }

    #[test]
    fn what_everyone_sees_has_a_colour_of_its_own() {
        let n = 8;
        let near = |i: usize, j: usize| i.abs_diff(j) < 2;
        let values = |global: bool| -> Vec<f32> {
            let seen = |i, j| near(i, j) || global && (i == 0 || j == 0);
            (0..n * n).map(|at| f32::from(seen(at / n, at % n))).collect()
        };
        let levels =
            |values: &[f32]| CellGrid::new(&matrix(values, n, 0), 0..n, (1, 1), Shade::Visible, 1.0).levels;
        assert!(!levels(&values(false)).contains(&WHOLE), "a band has no global position");
        let of = levels(&values(true));
        assert_eq!((of[7], of[7 * n], of[3 * n + 3], of[n + 7]), (WHOLE, WHOLE, LEVELS, 0));
        assert!(!levels(&[1.0; 64]).contains(&WHOLE), "where everyone sees everything nobody is special");
    }

    #[test]
    fn text_breaks_at_words() {
        assert_eq!(wrap("one two three", 7.0 * FONT * 0.57, FONT), ["one two ", "three"]);
        assert_eq!(wrap("averylongword", 10.0, FONT), ["averylongword"]);
        assert!(wrap("", 10.0, FONT).is_empty());
    }
}
