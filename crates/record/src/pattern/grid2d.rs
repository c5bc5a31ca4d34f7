//! Windows in two dimensions.

use super::{Grid2d, KeySpan, Pattern, QueryGroup, Rule, Span};

impl Grid2d {
    /// Row and column of `position`.
    pub const fn place(self, position: usize) -> (usize, usize) {
        (position / self.cols, position % self.cols)
    }

    /// Upper left corners of the windows of side `w`, row by row; those at the edges may be smaller.
    fn windows(self, w: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..self.rows).step_by(w).flat_map(move |y| (0..self.cols).step_by(w).map(move |x| (y, x)))
    }

    /// All positions, window by window of side `w`: the order of queries in [`Pattern::window_2d`].
    pub fn window_order(self, w: usize) -> Vec<usize> {
        let grid = self;
        let window = move |(y, x): (usize, usize)| {
            let rows = y..(y + w).min(grid.rows);
            rows.flat_map(move |row| (x..(x + w).min(grid.cols)).map(move |col| row * grid.cols + col))
        };
        self.windows(w).flat_map(window).collect()
    }
}

impl Pattern {
    /// Windows of side `w` (at least 1) on a grid: all queries of a window see it and `max(w / 2, 1)` positions around it
    /// (Transformer-LS on images). Queries stand in [`Grid2d::window_order`], so that those of a window are contiguous; keys
    /// stand row by row, so that every row of a neighbourhood is one contiguous span.
    pub fn window_2d(grid: Grid2d, w: usize) -> Self {
        let reach = (w / 2).max(1);
        let mut first = 0;
        let group = |(y, x): (usize, usize)| {
            let queries = (w.min(grid.rows - y)) * (w.min(grid.cols - x));
            let (left, right) = (x.saturating_sub(reach), (x + w + reach).min(grid.cols));
            let rows = y.saturating_sub(reach)..(y + w + reach).min(grid.rows);
            let row = |row: usize| KeySpan {
                span: Span::range(row * grid.cols + left, row * grid.cols + right),
                rule: Rule::All,
            };
            first += queries;
            QueryGroup { queries: Span::range(first - queries, first), keys: rows.map(row).collect() }
        };
        let groups = grid.windows(w).map(group).collect();
        let plane = Some((grid, grid.window_order(w)));
        Self { plane, ..Self::shared(grid.len(), grid.len(), 0, 0, groups) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_see_what_the_conditions_on_rows_and_columns_say() {
        for (rows, cols, w) in [(4, 4, 2), (5, 7, 2), (9, 4, 3), (6, 5, 1), (3, 3, 7), (8, 16, 4)] {
            let grid = Grid2d { rows, cols };
            let (pattern, order) = (Pattern::window_2d(grid, w), grid.window_order(w));
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..grid.len()), "{grid:?} {w}");
            let s = (w / 2).max(1) as isize;
            for (query, &position) in order.iter().enumerate() {
                let (y, x) = grid.place(position);
                let near = |at: usize, key: usize| {
                    let start = (at / w * w) as isize;
                    (start - s..start + w as isize + s).contains(&(key as isize))
                };
                let keys = (0..grid.len()).filter(|&key| {
                    let (row, col) = grid.place(key);
                    near(y, row) && near(x, col)
                });
                assert_eq!(pattern.visible(0, query), keys.collect::<Vec<_>>(), "{grid:?} {w} {position}");
            }
        }
    }
}
