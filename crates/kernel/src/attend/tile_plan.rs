//! A pattern made ready to run: flat, checked, and cut into tiles of queries.

use candle_core::{Result, bail};

use effattn_record::pattern::{KeySpan, Pattern, Rule, Span};

/// Most queries of a tile.
pub const TILE: usize = 64;

/// Queries that are computed together: part of one group, or several whole small groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// First group.
    pub group: usize,
    /// Number of groups.
    pub groups: usize,
    /// First query within the first group.
    pub first: usize,
    /// Number of queries.
    pub queries: usize,
}

/// The groups of one head.
#[derive(Debug, Default)]
pub struct HeadPlan {
    /// Queries of every group, and where its spans start in `spans`.
    groups: Vec<(Span, usize)>,
    /// The spans of all groups, each on one side of the border between keys and slots.
    spans: Vec<KeySpan>,
    /// All queries that see something, cut into tiles.
    pub tiles: Vec<Tile>,
}

/// A pattern made ready to run.
#[derive(Debug)]
pub struct TilePlan {
    /// Number of keys at positions.
    pub keys: usize,
    /// Absolute position of query 0.
    pub offset: usize,
    heads: Vec<HeadPlan>,
}

impl TilePlan {
    /// Checks `pattern` and cuts it into tiles.
    pub fn new(pattern: &Pattern, heads: usize) -> Result<Self> {
        if pattern.heads.len() != 1 && pattern.heads.len() != heads {
            bail!("a pattern of {} heads does not fit {heads} heads", pattern.heads.len());
        }
        if pattern.keys + pattern.slots > 1 << f32::MANTISSA_DIGITS {
            bail!("{} keys and slots; more than 2^24 are not supported", pattern.keys + pattern.slots);
        }
        let heads =
            (0..pattern.heads.len()).map(|head| HeadPlan::new(pattern, head)).collect::<Result<_>>()?;
        Ok(Self { keys: pattern.keys, offset: pattern.offset, heads })
    }

    /// Whether all heads have the same groups.
    #[cfg(any(feature = "cuda", test))]
    pub fn is_shared(&self) -> bool {
        self.heads.len() == 1
    }

    /// The groups of head `head`.
    pub fn head(&self, head: usize) -> &HeadPlan {
        &self.heads[if self.heads.len() == 1 { 0 } else { head }]
    }
}

impl HeadPlan {
    fn new(pattern: &Pattern, head: usize) -> Result<Self> {
        let mut plan = Self::default();
        let mut taken = vec![false; pattern.queries];
        for group in pattern.groups(head) {
            check(&group.queries, pattern.queries, "queries")?;
            for query in group.queries.iter() {
                if std::mem::replace(&mut taken[query], true) {
                    bail!("query {query} is in two groups of head {head}");
                }
            }
            let start = plan.spans.len();
            for key in &group.keys {
                check(&key.span, pattern.keys + pattern.slots, "keys")?;
                plan.push_span(key, pattern.keys)?;
            }
            if group.queries.len > 0 && plan.spans.len() > start {
                plan.groups.push((group.queries, start));
            } else {
                plan.spans.truncate(start);
            }
        }
        plan.cut(pattern.keys);
        Ok(plan)
    }

    /// Adds a span, in two parts where it crosses from keys to slots.
    fn push_span(&mut self, key: &KeySpan, keys: usize) -> Result<()> {
        let Span { start, len, step } = key.span;
        let below = keys.saturating_sub(start).div_ceil(step).min(len);
        if below > 0 {
            if matches!(key.rule, Rule::EarlierSegments { .. }) {
                bail!("a span of keys from {start} on cannot be cut by the segments of slots");
            }
            self.spans.push(KeySpan { span: Span { start, len: below, step }, rule: key.rule });
        }
        if len > below {
            let span = Span { start: start + below * step, len: len - below, step };
            self.spans.push(KeySpan { span, rule: key.rule });
        }
        Ok(())
    }

    fn cut(&mut self, keys: usize) {
        let mut group = 0;
        while group < self.groups.len() {
            let len = self.groups[group].0.len;
            if len >= TILE {
                for first in (0..len).step_by(TILE) {
                    self.tiles.push(Tile { group, groups: 1, first, queries: TILE.min(len - first) });
                }
                group += 1;
                continue;
            }
            let mut tile = Tile { group, groups: 1, first: 0, queries: len };
            let mut unions: Vec<Union> = self.spans(group).iter().map(|key| Union::new(key, keys)).collect();
            while let Some(next) = self.groups.get(group + tile.groups) {
                if tile.queries + next.0.len > TILE
                    || !join(&mut unions, self.spans(group + tile.groups), keys)
                {
                    break;
                }
                tile.groups += 1;
                tile.queries += next.0.len;
            }
            group += tile.groups;
            self.tiles.push(tile);
        }
    }

    /// Queries of group `group`.
    pub fn queries(&self, group: usize) -> Span {
        self.groups[group].0
    }

    /// Candidates of group `group`.
    pub fn spans(&self, group: usize) -> &[KeySpan] {
        let end = self.groups.get(group + 1).map_or(self.spans.len(), |next| next.1);
        &self.spans[self.groups[group].1..end]
    }
}

fn check(span: &Span, len: usize, what: &str) -> Result<()> {
    let last =
        span.step.checked_mul(span.len.saturating_sub(1)).and_then(|last| last.checked_add(span.start));
    if span.step == 0 || (span.len > 0 && last.is_none_or(|last| last >= len)) {
        bail!("{span:?} does not fit {len} {what}");
    }
    Ok(())
}

/// The span that covers the spans of several groups.
struct Union {
    start: usize,
    end: usize,
    step: usize,
    slots: bool,
    skip: Option<usize>,
    /// Number of candidates of all groups.
    members: usize,
}

impl Union {
    fn new(key: &KeySpan, keys: usize) -> Self {
        let Span { start, len, step } = key.span;
        let skip = skip(key.rule);
        Self { start, end: start + len * step, step, slots: start >= keys, skip, members: len }
    }
}

/// Distances whose multiples the rule hides.
pub fn skip(rule: Rule) -> Option<usize> {
    match rule {
        Rule::Band { skip, .. } => skip,
        Rule::All | Rule::EarlierSegments { .. } => None,
    }
}

/// Widens the unions by another group's spans, if those lie so close that the unions hold few other keys.
fn join(unions: &mut [Union], spans: &[KeySpan], keys: usize) -> bool {
    let joined = |a: &Union, key: &KeySpan| {
        let b = Union::new(key, keys);
        let (start, end, members) = (a.start.min(b.start), a.end.max(b.end), a.members + b.members);
        let same = (a.step, a.slots, a.skip) == (b.step, b.slots, b.skip);
        let near = (end - start) / a.step <= 2 * members;
        (same && near && a.start.abs_diff(b.start).is_multiple_of(a.step)).then_some(Union {
            start,
            end,
            members,
            ..b
        })
    };
    if unions.len() != spans.len() {
        return false;
    }
    let Some(wider) = unions.iter().zip(spans).map(|(a, key)| joined(a, key)).collect::<Option<Vec<_>>>()
    else {
        return false;
    };
    for (union, wider) in unions.iter_mut().zip(wider) {
        *union = wider;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_record::pattern::QueryGroup;

    fn tiles(pattern: &Pattern) -> Vec<Tile> {
        TilePlan::new(pattern, 1).unwrap().head(0).tiles.clone()
    }

    #[test]
    fn small_groups_share_a_tile_and_large_ones_are_cut() {
        let tile = |group, groups, first, queries| Tile { group, groups, first, queries };
        assert_eq!(tiles(&Pattern::window(100, 100, 8, false)), [tile(0, 8, 0, 64), tile(8, 5, 0, 36)]);
        assert_eq!(
            tiles(&Pattern::full(130, 130, false)),
            [tile(0, 1, 0, 64), tile(0, 1, 64, 64), tile(0, 1, 128, 2)]
        );
        assert_eq!(tiles(&Pattern::blind(5, 5, false)), []);
    }

    #[test]
    fn far_groups_do_not_share_a_tile() {
        let group = |at: usize, key: usize| QueryGroup {
            queries: Span::range(at, at + 1),
            keys: vec![KeySpan { span: Span::range(key, key + 2), rule: Rule::All }],
        };
        let pattern = Pattern::shared(3, 99, 0, 0, vec![group(0, 0), group(1, 2), group(2, 90)]);
        assert_eq!(tiles(&pattern).iter().map(|tile| tile.groups).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn patterns_that_contradict_themselves_are_refused() {
        let group =
            |queries: Span, span: Span, rule| QueryGroup { queries, keys: vec![KeySpan { span, rule }] };
        let (two, all) = (Span::range(0, 2), Rule::All);
        let segments = Rule::EarlierSegments { segment: 1, rank: 1 };
        for (groups, heads) in [
            (vec![group(two, Span::range(0, 8), all)], 1),
            (vec![group(Span::range(1, 4), two, all)], 1),
            (vec![group(two, two, all), group(Span::range(1, 2), two, all)], 1),
            (vec![group(two, Span { start: 0, len: 2, step: 0 }, all)], 1),
            (vec![group(two, Span { start: 0, len: 2, step: usize::MAX }, all)], 1),
            (vec![group(two, Span::range(3, 6), segments)], 1),
        ] {
            let pattern = Pattern::shared(3, 5, 2, 0, groups);
            assert!(TilePlan::new(&pattern, heads).is_err(), "{pattern:?}");
        }
        let mut pattern = Pattern::full(3, 3, false);
        pattern.heads.push(Vec::new());
        assert!(TilePlan::new(&pattern, 3).is_err());
        assert!(TilePlan::new(&pattern, 2).is_ok());
    }
}
