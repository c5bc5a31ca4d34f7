//! Who sees whom, as pure data.
//!
//! Computation (`effattn_kernel::attend`) and pictures (`effattn plot pattern`) read the same value.

pub mod grid2d;

use std::ops::Range;

/// Rows and columns of positions that lie in a plane, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid2d {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Grid2d {
    /// Number of positions.
    pub const fn len(self) -> usize {
        self.rows * self.cols
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The square of `len` positions, where there is one.
    pub fn square(len: usize) -> Option<Self> {
        let side = len.isqrt();
        (side * side == len && len > 0).then_some(Self { rows: side, cols: side })
    }
}

/// `len` positions from `start` on, `step` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First position.
    pub start: usize,
    /// Number of positions.
    pub len: usize,
    /// Distance between two positions, at least 1.
    pub step: usize,
}

impl Span {
    /// The positions `start..end`.
    pub fn range(start: usize, end: usize) -> Self {
        Self { start, len: end.saturating_sub(start), step: 1 }
    }

    /// Position number `index` of this span.
    pub fn at(&self, index: usize) -> usize {
        self.start + index * self.step
    }

    /// All positions.
    pub fn iter(self) -> impl Iterator<Item = usize> + Clone {
        (0..self.len).map(move |index| self.at(index))
    }

    /// Whether `position` is one of this span's.
    pub fn contains(&self, position: usize) -> bool {
        position >= self.start
            && (position - self.start).is_multiple_of(self.step)
            && (position - self.start) / self.step < self.len
    }
}

/// Which keys of a span the query at absolute position `t` sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// All of them.
    All,
    /// Keys `j` with `t - left <= j <= t + right` (`None`: no bound on that side); with
    /// `skip = Some(s)` only those whose distance is not a multiple of `s`.
    Band {
        /// Furthest key to the left.
        left: Option<usize>,
        /// Furthest key to the right; `Some(0)` is causal.
        right: Option<usize>,
        /// Distances that are multiples of this are seen through another span.
        skip: Option<usize>,
    },
    /// Slots of the segments strictly before the query's own: slot index `e < floor(t / segment) * rank`
    /// (Transformer-LS eq. 5). The span must lie in the slots.
    EarlierSegments {
        /// Length of a segment.
        segment: usize,
        /// Slots per segment.
        rank: usize,
    },
}

impl Rule {
    /// Every key up to the query itself.
    pub const CAUSAL: Self = Self::Band { left: None, right: Some(0), skip: None };
}

/// Keys that a group of queries may see, and the rule that cuts them per query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpan {
    /// Candidate keys; positions from [`Pattern::keys`] on are slots.
    pub span: Span,
    /// Which of them a query sees.
    pub rule: Rule,
}

/// Queries that share their candidate keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryGroup {
    /// The queries.
    pub queries: Span,
    /// Their candidates. For one query no key may be visible through two spans.
    pub keys: Vec<KeySpan>,
}

/// The visible pairs of one attention call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Number of queries.
    pub queries: usize,
    /// Number of keys that stand at positions.
    pub keys: usize,
    /// Number of slots (projected keys): candidates `keys..keys + slots`.
    pub slots: usize,
    /// Absolute position of query 0 (cached keys come first): query `i` stands at `t = offset + i`.
    pub offset: usize,
    /// Where positions lie in a plane: its grid, and the positions of the queries in the order of the groups.
    pub plane: Option<(Grid2d, Vec<usize>)>,
    /// Groups of every head, or one list shared by all heads. Every query is in at most one group of
    /// a head; a query in none sees nothing.
    pub heads: Vec<Vec<QueryGroup>>,
}

impl Pattern {
    /// A pattern with the same groups in every head.
    pub fn shared(queries: usize, keys: usize, slots: usize, offset: usize, groups: Vec<QueryGroup>) -> Self {
        Self { queries, keys, slots, offset, plane: None, heads: vec![groups] }
    }

    /// Every query sees every key, or with `causal` every key up to its own position.
    pub fn full(queries: usize, keys: usize, causal: bool) -> Self {
        let offset = keys.saturating_sub(queries);
        let rule = if causal { Rule::CAUSAL } else { Rule::All };
        let group = QueryGroup {
            queries: Span::range(0, queries),
            keys: vec![KeySpan { span: Span::range(0, keys), rule }],
        };
        Self::shared(queries, keys, 0, if causal { offset } else { 0 }, vec![group])
    }

    /// The window of Transformer-LS (`w` at least 1). Bidirectional: segments of `w` queries see themselves
    /// and `max(w / 2, 1)` keys on either side. Causal: a query sees itself and the `w - 1` keys before it.
    pub fn window(queries: usize, keys: usize, w: usize, causal: bool) -> Self {
        // Causal queries share candidates in tiles; tiles under 16 queries would be mostly overhead.
        let (offset, tile) = if causal { (keys.saturating_sub(queries), w.max(16)) } else { (0, w) };
        let reach = (w / 2).max(1);
        let group = |start: usize| {
            let end = (start + tile).min(queries);
            let key = if causal {
                let span = Span::range((offset + start + 1).saturating_sub(w), (offset + end).min(keys));
                KeySpan { span, rule: Rule::Band { left: Some(w - 1), right: Some(0), skip: None } }
            } else {
                let span = Span::range(start.saturating_sub(reach), (start + w + reach).min(keys));
                KeySpan { span, rule: Rule::All }
            };
            QueryGroup { queries: Span::range(start, end), keys: vec![key] }
        };
        Self::shared(queries, keys, 0, offset, (0..queries).step_by(tile).map(group).collect())
    }

    /// No query sees a key: what [`Self::with_slots`] adds is all there is.
    pub fn blind(queries: usize, keys: usize, causal: bool) -> Self {
        let offset = if causal { keys.saturating_sub(queries) } else { 0 };
        let group = QueryGroup { queries: Span::range(0, queries), keys: Vec::new() };
        Self::shared(queries, keys, 0, offset, vec![group])
    }

    /// The same pattern with `slots` more candidates behind the keys, for every query (`rule`
    /// [`Rule::All`]) or cut by `rule`. A query in no group still sees nothing.
    #[must_use]
    pub fn with_slots(mut self, slots: usize, rule: Rule) -> Self {
        self.slots = slots;
        let (keys, offset) = (self.keys, self.offset);
        for group in self.heads.iter_mut().flatten() {
            let last = offset + group.queries.at(group.queries.len.saturating_sub(1));
            let seen = match rule {
                Rule::EarlierSegments { segment, rank } => (last / segment * rank).min(slots),
                Rule::All | Rule::Band { .. } => slots,
            };
            if seen > 0 {
                group.keys.insert(0, KeySpan { span: Span::range(keys, keys + seen), rule });
            }
        }
        self
    }

    /// The groups of head `head`.
    pub fn groups(&self, head: usize) -> &[QueryGroup] {
        &self.heads[if self.heads.len() == 1 { 0 } else { head }]
    }

    /// Whether the rule of `key` lets query `i` see candidate `j` (which must be in the span).
    pub fn allows(&self, rule: Rule, query: usize, key: usize) -> bool {
        let t = self.offset + query;
        match rule {
            Rule::All => true,
            Rule::Band { left, right, skip } => {
                left.is_none_or(|left| key.saturating_add(left) >= t)
                    && right.is_none_or(|right| key <= t.saturating_add(right))
                    && skip.is_none_or(|skip| !key.abs_diff(t).is_multiple_of(skip))
            }
            Rule::EarlierSegments { segment, rank } => key - self.keys < t / segment * rank,
        }
    }

    /// Number of visible pairs of one head.
    pub fn pairs(&self, head: usize) -> usize {
        let count = |key: &KeySpan, query: usize| {
            let bounds = bounds(self.keys, self.offset + query, key);
            match key.rule {
                Rule::Band { skip: Some(_), .. } => {
                    bounds.filter(|&at| self.allows(key.rule, query, key.span.at(at))).count()
                }
                _ => bounds.len(),
            }
        };
        let groups = self.groups(head).iter();
        groups
            .map(|group| {
                let queries = group.queries.iter();
                queries
                    .map(|query| group.keys.iter().map(|key| count(key, query)).sum::<usize>())
                    .sum::<usize>()
            })
            .sum()
    }

    /// Every key and slot that query `query` of head `head` sees, in span order.
    pub fn visible(&self, head: usize, query: usize) -> Vec<usize> {
        let group = self.groups(head).iter().find(|group| group.queries.contains(query));
        group.map_or_else(Vec::new, |group| {
            let spans = group.keys.iter();
            spans.flat_map(|key| key.span.iter().filter(|&j| self.allows(key.rule, query, j))).collect()
        })
    }
}

/// The part of a span that its rule leaves to the query at absolute position `t`, as indices into the span
/// (`keys` is [`Pattern::keys`]). Where the rule skips distances, some of these are still hidden.
pub fn bounds(keys: usize, t: usize, key: &KeySpan) -> Range<usize> {
    let Span { start, len, step } = key.span;
    // number of candidates at positions below `position`
    let below = |position: usize| position.saturating_sub(start).div_ceil(step).min(len);
    let (from, to) = match key.rule {
        Rule::All => (0, len),
        Rule::Band { left, right, .. } => (
            left.map_or(0, |left| below(t.saturating_sub(left))),
            right.map_or(len, |right| below(t.saturating_add(right).saturating_add(1))),
        ),
        Rule::EarlierSegments { segment, rank } => (0, below(keys + t / segment * rank)),
    };
    from.min(to)..to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_cut_spans_as_their_rule_says() {
        let rules = [
            Rule::All,
            Rule::CAUSAL,
            Rule::Band { left: Some(3), right: None, skip: None },
            Rule::Band { left: Some(0), right: Some(usize::MAX), skip: None },
            Rule::Band { left: Some(5), right: Some(2), skip: Some(3) },
            Rule::EarlierSegments { segment: 3, rank: 2 },
        ];
        for rule in rules {
            for (start, len, step) in [(0, 12, 1), (2, 4, 3), (12, 6, 1), (13, 2, 2), (5, 0, 1)] {
                if matches!(rule, Rule::EarlierSegments { .. }) && start < 12 {
                    continue;
                }
                let key = KeySpan { span: Span { start, len, step }, rule };
                let group = QueryGroup { queries: Span::range(0, 8), keys: vec![key] };
                let pattern = Pattern::shared(8, 12, 6, 4, vec![group]);
                let mut pairs = 0;
                for query in 0..8 {
                    let bounds = bounds(12, query + 4, &key);
                    let skipped = |at: &usize| {
                        let Rule::Band { skip: Some(skip), .. } = rule else { return false };
                        key.span.at(*at).abs_diff(query + 4).is_multiple_of(skip)
                    };
                    let within: Vec<usize> =
                        bounds.filter(|at| !skipped(at)).map(|at| key.span.at(at)).collect();
                    assert_eq!(pattern.visible(0, query), within, "{key:?} {query}");
                    pairs += within.len();
                }
                assert_eq!(pattern.pairs(0), pairs);
            }
        }
    }

    #[test]
    fn causal_full_with_memory_sees_the_past_and_itself() {
        let pattern = Pattern::full(2, 5, true);
        assert_eq!(pattern.visible(0, 0), [0, 1, 2, 3]);
        assert_eq!(pattern.visible(0, 1), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn windows_follow_their_index_conditions() {
        for (queries, memory, w) in [(1, 0, 1), (7, 0, 1), (7, 0, 3), (20, 0, 4), (33, 5, 2), (50, 20, 8)] {
            let keys = queries + memory;
            let (segments, causal) =
                (Pattern::window(queries, queries, w, false), Pattern::window(queries, keys, w, true));
            for i in 0..queries {
                let (start, reach) = (i / w * w, (w / 2).max(1));
                let expected: Vec<usize> =
                    (0..queries).filter(|&j| j + reach >= start && j < start + w + reach).collect();
                assert_eq!(segments.visible(0, i), expected, "{queries} {w} {i}");
                let t = memory + i;
                let expected: Vec<usize> = (0..keys).filter(|&j| j + w > t && j <= t).collect();
                assert_eq!(causal.visible(0, i), expected, "{queries} {memory} {w} {i}");
            }
        }
    }

    #[test]
    fn slots_of_a_query_are_those_of_earlier_segments() {
        let rule = Rule::EarlierSegments { segment: 2, rank: 1 };
        let pattern = Pattern::full(3, 5, true).with_slots(3, rule);
        assert_eq!(pattern.visible(0, 0), [5, 0, 1, 2]);
        assert_eq!(pattern.visible(0, 2), [5, 6, 0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_band_skips_multiples() {
        let keys = KeySpan {
            span: Span::range(0, 10),
            rule: Rule::Band { left: Some(3), right: Some(3), skip: Some(2) },
        };
        let group = QueryGroup { queries: Span::range(0, 10), keys: vec![keys] };
        let pattern = Pattern::shared(10, 10, 0, 0, vec![group]);
        assert_eq!(pattern.visible(0, 5), [2, 4, 6, 8]);
    }
}
