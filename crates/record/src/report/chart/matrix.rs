//! Attention matrices side by side: who sees whom, or how much.

use std::collections::BTreeMap;
use std::io;

use plotters::style::RGBColor;

use super::Chart;
use super::canvas::{self, Align, Canvas, FONT, INK, Point, SOFT};
use super::matrix_cells::{CellGrid, LEVELS, Shade, WHOLE};
use super::weight_tips;
use crate::matrix::Matrix;

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 24.0;
const GAP: f64 = 36.0;
const LINE: f64 = FONT * 1.16;
/// Most and fewest cells along an edge; longer matrices are drawn in blocks.
const EDGE: (usize, usize) = (96, 16);
/// Most bytes that all cells of a chart and what is told of them may take.
const BYTES: usize = 400_000;
/// How much wider bold letters are.
const BOLD: f64 = 1.12;
/// Height of the letters where more than three panels stand side by side.
const SMALL: f64 = 25.0;
/// Width of the names of layers.
const LAYERS: f64 = 120.0;

const KEY: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const SLOT: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
/// Keys that every query sees, and queries that see every key.
const GLOBAL: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const DARK: RGBColor = RGBColor(0x08, 0x1d, 0x58);
/// Where no weight is: not the paper, which is dark on a dark page.
const ZERO: RGBColor = RGBColor(0xfe, 0xfe, 0xfe);

/// Where panels stand.
struct Layout {
    columns: usize,
    /// Pixels left of the first panel, and between panels.
    left: f64,
    gap: f64,
    /// Pixels of a panel.
    size: f64,
    font: f64,
    /// Whether rows are layers and columns are heads.
    heads: bool,
}

impl Layout {
    fn new(matrices: &[Matrix]) -> Self {
        let heads = matrices.iter().filter_map(|matrix| Some(matrix.head?.1)).max().unwrap_or(0);
        let place = |(index, matrix): (usize, &Matrix)| {
            matrix.head.is_some_and(|(_, head)| head == index % heads.max(1) + 1)
        };
        let heads = Some(heads).filter(|heads| *heads > 0 && matrices.iter().enumerate().all(place));
        // a page holds every mechanism: five columns of five
        let columns = heads.unwrap_or(match matrices.len() {
            few @ 0..=3 => few.max(1),
            4..=8 => 4,
            _ => 5,
        });
        let (left, gap) = if heads.is_some() { (MARGIN + LAYERS, 0.5 * GAP) } else { (MARGIN, GAP) };
        let most = if heads.is_some() { 440.0 } else { 640.0 };
        let size = ((WIDTH - MARGIN - left + gap) / columns as f64 - gap).min(most);
        let font = if columns > 3 { SMALL } else { FONT };
        Self { columns, left, gap, size, font, heads: heads.is_some() }
    }

    /// Left edge of panels in `column`.
    fn x(&self, column: usize) -> f64 {
        self.left + column as f64 * (self.size + self.gap)
    }

    /// The panels of `matrices`; where all of their cells are too many for one file, those that take most are drawn in larger blocks.
    fn panels<'a>(&self, matrices: &'a [Matrix], shade: Shade) -> Vec<Panel<'a>> {
        let panel = |matrix, edge| Panel::new(matrix, shade, (self, edge));
        let mut panels: Vec<Panel> = matrices.iter().map(|matrix| panel(matrix, EDGE.0)).collect();
        let mut sizes: Vec<(usize, usize)> = panels.iter().map(|panel| (panel.bytes(), EDGE.0)).collect();
        while sizes.iter().map(|(bytes, _)| bytes).sum::<usize>() > BYTES {
            let open = (0..sizes.len()).filter(|index| sizes[*index].1 > EDGE.1);
            let Some(index) = open.max_by_key(|index| sizes[*index].0) else { break };
            let edge = (sizes[index].1 * 3 / 4).max(EDGE.1);
            panels[index] = panel(&matrices[index], edge);
            sizes[index] = (panels[index].bytes(), edge);
        }
        panels
    }
}

/// Draws `matrices` as a chart called `name`: side by side, those of the heads of a model as a row per layer.
pub fn matrices(
    name: &str,
    (title, subtitle): (&str, &str),
    matrices: &[Matrix],
    shade: Shade,
) -> io::Result<Chart> {
    let layout = Layout::new(matrices);
    let panels = layout.panels(matrices, shade);
    let rows: Vec<&[Panel]> = panels.chunks(layout.columns).collect();
    let texts: Vec<f64> = rows.iter().map(|row| most(row.iter().map(Panel::text_height))).collect();
    let boxes = rows.iter().map(|row| most(row.iter().map(Panel::box_height)));
    let heights: Vec<f64> = boxes.zip(&texts).map(|(height, text)| height + text).collect();
    let subtitles = wrap(subtitle, WIDTH - 2.0 * MARGIN, FONT);
    let named = 76.0 + subtitles.len() as f64 * LINE;
    let header = named + if layout.heads { LINE } else { 0.0 };
    let height = header + heights.iter().map(|height| height + GAP).sum::<f64>();
    let svg = canvas::document((WIDTH as u32, height.ceil() as u32), |canvas| {
        canvas.bold(title, (MARGIN, 36.0), Align::Left, FONT * 1.1)?;
        for (index, line) in subtitles.iter().enumerate() {
            let y = 80.0 + index as f64 * LINE;
            canvas.colored(line, (MARGIN, y), Align::Left, (FONT, SOFT))?;
        }
        for column in (0..layout.columns).filter(|_| layout.heads) {
            let head = format!("head {}", column + 1);
            canvas.bold(&head, (layout.x(column), named + 0.5 * LINE), Align::Left, layout.font)?;
        }
        let mut top = header;
        for (index, ((row, text), height)) in rows.iter().zip(&texts).zip(&heights).enumerate() {
            if let Some((layer, _)) = matrices[index * layout.columns].head.filter(|_| layout.heads) {
                let y = top + 0.5 * (text + height);
                canvas.bold(&format!("layer {layer}"), (MARGIN, y), Align::Left, SMALL)?;
            }
            for (column, panel) in row.iter().enumerate() {
                panel.draw(canvas, (layout.x(column), top), *text)?;
            }
            top += height + GAP;
        }
        Ok(())
    })?;
    // without it renderers blend the edges of neighbouring cells with the white below
    let svg = svg.replacen("<svg ", "<svg shape-rendering=\"crispEdges\" ", 1);
    Ok(Chart { name: name.to_owned(), svg, csv: csv(matrices)? })
}

fn most(all: impl Iterator<Item = f64>) -> f64 {
    all.fold(0.0, f64::max)
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
struct Panel<'a> {
    matrix: &'a Matrix,
    label: Vec<String>,
    note: Vec<String>,
    /// The drawn cells: keys and slots.
    keys: CellGrid,
    slots: CellGrid,
    /// Positions per cell along an edge, and slots per column.
    block: usize,
    wide: usize,
    /// The value that is darkest.
    full: f32,
    /// Pixels per cell.
    cell: f64,
    shade: Shade,
    /// Height of letters.
    font: f64,
}

impl<'a> Panel<'a> {
    fn new(matrix: &'a Matrix, shade: Shade, (layout, edge): (&Layout, usize)) -> Self {
        let Layout { size, font, .. } = *layout;
        let binary = matrix.values.iter().all(|value| [0.0, 1.0].contains(value));
        let shade = if binary { shade } else { Shade::Weight };
        let block = matrix.queries.max(matrix.keys).div_ceil(edge).max(1);
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
        let label = if layout.heads { "" } else { &matrix.label };
        Self {
            matrix,
            label: wrap(label, size / BOLD, font),
            note: wrap(&notes.join("; "), size, font),
            keys,
            slots,
            block,
            wide,
            full,
            cell: size / cells as f64,
            shade,
            font,
        }
    }

    fn text_height(&self) -> f64 {
        (self.label.len() + self.note.len()) as f64 * 1.16 * self.font + 10.0
    }

    /// About the bytes that its cells take in the file.
    fn bytes(&self) -> usize {
        let of = |grid: &CellGrid| 16 * grid.rectangles().len() + weight_tips::BYTES * grid.values.len();
        of(&self.keys) + of(&self.slots)
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
        self.grid(canvas, &self.keys, (left, top), (key, "key", self.block))?;
        let beside = left + (self.keys.columns + 2) as f64 * self.cell;
        self.grid(canvas, &self.slots, (beside, top), (slot, "slot", self.wide))
    }

    /// Draws `grid`, whose columns are so many keys or slots each, and says what is told of them.
    fn grid(
        &self,
        canvas: &mut Canvas,
        grid: &CellGrid,
        (left, top): Point,
        (color, kind, wide): (RGBColor, &str, usize),
    ) -> io::Result<()> {
        if grid.columns == 0 || grid.rows == 0 {
            return Ok(());
        }
        let at = |column: usize, row: usize| (left + column as f64 * self.cell, top + row as f64 * self.cell);
        let corners = (at(0, 0), at(grid.columns, grid.rows));
        canvas.rects(&[corners], ZERO);
        let mut by_level: BTreeMap<i32, Vec<(Point, Point)>> = BTreeMap::new();
        for (row, end_row, column, end_column, level) in grid.rectangles() {
            by_level.entry(level).or_default().push((at(column, row), at(end_column, end_row)));
        }
        for (level, rects) in by_level {
            let color = match level {
                WHOLE => GLOBAL,
                1.. => color,
                _ => SLOT,
            };
            canvas.rects(&rects, tint(color, level.abs().min(LEVELS)));
        }
        let full = Some(self.full).filter(|_| self.shade == Shade::Weight);
        let tips = weight_tips::attributes(self.matrix, grid, (kind, (self.block, wide)), full);
        canvas.told_area(corners, (&tips, &self.matrix.label), weight_tips::SCRIPT);
        canvas.frame(corners.0, corners.1, INK)
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
        Matrix { label: "ls".into(), queries, keys, slots, values: values.to_vec(), ..Matrix::default() }
    }

    #[test]
    fn long_matrices_are_drawn_in_blocks() {
        let n = 2 * EDGE.0 + 1;
        let mut values = vec![0.0; n * n];
        (0..n).for_each(|i| values[i * n + i] = 1.0);
        let long = [matrix(&values, n, 0)];
        let layout = Layout::new(&long);
        let panel = &layout.panels(&long, Shade::Visible)[0];
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

    /// The matrix [n, n] of `head` whose values are all different.
    fn drawn(n: usize, head: (usize, usize)) -> Matrix {
        let values: Vec<f32> = (0..n * n).map(|at| (at * 7919 % 4093) as f32 / 4093.0).collect();
        Matrix {
            head: Some(head),
            label: format!("layer {}, head {}", head.0, head.1),
            ..matrix(&values, n, 0)
        }
    }

    #[test]
    fn layers_are_rows_and_heads_are_columns() {
        let all: Vec<Matrix> = [(1, 1), (1, 2), (3, 1), (3, 2)].map(|head| drawn(8, head)).into();
        let svg = matrices("attention", ("t", "s"), &all, Shade::Weight).unwrap().svg;
        for text in ["layer 1", "layer 3", "head 1", "head 2"] {
            assert_eq!(svg.matches(&format!(">\n{text}\n<")).count(), 1, "{text}: {svg}");
        }
        let at = |name: &str, edge: &str| -> i32 {
            let mark = svg.split("<rect ").find(|mark| mark.contains(name)).unwrap();
            mark.split(&format!("{edge}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        assert_eq!(at("layer 1, head 2", "y"), at("layer 1, head 1", "y"));
        assert_eq!(at("layer 3, head 1", "x"), at("layer 1, head 1", "x"));
        assert!(at("layer 3, head 1", "y") > at("layer 1, head 1", "y"));
    }

    #[test]
    fn a_chart_of_many_cells_is_a_small_file_of_few_elements() {
        for (n, layers, heads) in [(256, 1, 1), (64, 2, 2), (128, 6, 8)] {
            let heads = (0..layers * heads).map(|at| (at / heads + 1, at % heads + 1));
            let all: Vec<Matrix> = heads.map(|head| drawn(n, head)).collect();
            let svg = matrices("attention", ("t", "s"), &all, Shade::Weight).unwrap().svg;
            let elements = svg.matches("\n<").count();
            assert!(
                svg.len() < 500_000 && elements < 40 * all.len() + 20,
                "{n}: {} bytes, {elements}",
                svg.len()
            );
            assert_eq!(svg.matches("data-weights").count(), all.len() + 1, "areas, and the script");
        }
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
    fn text_breaks_at_words() {
        assert_eq!(wrap("one two three", 7.0 * FONT * 0.57, FONT), ["one two ", "three"]);
        assert_eq!(wrap("averylongword", 10.0, FONT), ["averylongword"]);
        assert!(wrap("", 10.0, FONT).is_empty());
    }
}
