//! The cells of a drawn matrix: blocks of positions and their levels of colour.

use crate::matrix::Matrix;

/// How values become colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shade {
    /// Visible or not; slots have a colour of their own. A matrix that has other values than 0 and 1 is drawn as [`Shade::Weight`].
    Visible,
    /// From white at 0 to dark at the panel's largest value; negative values in a second colour.
    Weight,
}

/// Steps between white and full colour.
pub(super) const LEVELS: i32 = 24;
/// The level of keys that every query sees, and of queries that see every key.
pub(super) const WHOLE: i32 = LEVELS + 1;

/// Drawn cells of one part of a matrix.
pub(super) struct CellGrid {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) levels: Vec<i32>,
    /// What a pointer is told: means, or 1 where something of a block is visible.
    pub(super) values: Vec<f32>,
}

impl CellGrid {
    /// `rows` x `columns` of `value`, in blocks of `height` x `width` whose mean (or largest value) becomes
    /// a level; `full` is the deepest.
    pub(super) fn new(
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
        let mut values = Vec::with_capacity(grid.0 * grid.1);
        for row in 0..grid.0 {
            let queries = row * high..((row + 1) * high).min(matrix.queries);
            for column in 0..grid.1 {
                let first = columns.start + column * wide;
                let last = (first + wide).min(columns.end);
                let block = queries.clone().flat_map(|query| &matrix.row(query)[first..last]);
                let visible = block.clone().any(|value| *value != 0.0);
                let mean = block.sum::<f32>() / (queries.len() * (last - first)) as f32;
                values.push(if shade == Shade::Visible { f32::from(visible) } else { mean });
                levels.push(match shade {
                    Shade::Visible if !visible => 0,
                    Shade::Visible if global.touches(queries.clone(), first..last) => WHOLE,
                    Shade::Visible => LEVELS,
                    Shade::Weight => {
                        (mean / full * LEVELS as f32).round().clamp(-(LEVELS as f32), LEVELS as f32) as i32
                    }
                });
            }
        }
        Self { rows: grid.0, columns: grid.1, levels, values }
    }

    /// Rectangles of equal level other than 0: (first row, end row, first column, end column, level).
    pub(super) fn rectangles(&self) -> Vec<(usize, usize, usize, usize, i32)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(values: &[f32], keys: usize) -> Matrix {
        let queries = values.len() / keys;
        Matrix { queries, keys, values: values.to_vec(), ..Matrix::default() }
    }

    #[test]
    fn rectangles_cover_equal_cells_once() {
        let m = matrix(&[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], 3);
        let grid = CellGrid::new(&m, 0..3, (1, 1), Shade::Visible, 1.0);
        let mut found = grid.rectangles();
        found.sort();
        assert_eq!(found, [(0, 2, 0, 2, LEVELS), (2, 3, 2, 3, LEVELS)]);
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
            |values: &[f32]| CellGrid::new(&matrix(values, n), 0..n, (1, 1), Shade::Visible, 1.0).levels;
        assert!(!levels(&values(false)).contains(&WHOLE), "a band has no global position");
        let of = levels(&values(true));
        assert_eq!((of[7], of[7 * n], of[3 * n + 3], of[n + 7]), (WHOLE, WHOLE, LEVELS, 0));
        assert!(!levels(&[1.0; 64]).contains(&WHOLE), "where everyone sees everything nobody is special");
    }
}
