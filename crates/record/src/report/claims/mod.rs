//! What the two papers claim, what rows say of it, and what has to be run to decide the rest: one line per claim in [`COSFORMER`] and
//! [`TRANSFORMER_LS`].

mod cosformer;
mod transformer_ls;

use super::ratio::{Ratio, Standing, UNRESOLVED};
use super::table::Table;
use crate::config::suite::Suite;
use crate::stats::{Interval, SampleStats, Summary, welch};
use crate::{Outcome, Published, Row};

pub use cosformer::CLAIMS as COSFORMER;
pub use transformer_ls::CLAIMS as TRANSFORMER_LS;

/// A claim of a paper.
pub struct Claim {
    /// Table or figure.
    pub place: &'static str,
    /// The claim, as a sentence.
    pub text: &'static str,
    /// The numbers behind it, where the source prints any.
    published: fn() -> Option<String>,
    /// The command that measures it as the source did.
    pub command: &'static str,
    /// What rows say of it; nothing where none is about it.
    judge: fn(&[Row]) -> Option<Finding>,
}

/// How a claim stands after measuring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimVerdict {
    /// What was measured agrees with it.
    Reproduced,
    /// What was measured disagrees with it.
    Contradicted,
    /// Nothing was measured, too few seeds, or at other settings than the source's.
    Undecided,
}

impl ClaimVerdict {
    /// The word in tables.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::Contradicted => "contradicted",
            Self::Undecided => "not decided",
        }
    }
}

/// What rows say of a claim.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// How the claim stands.
    pub verdict: ClaimVerdict,
    /// What was measured, and what it depends on.
    pub measured: String,
    /// Which rows: columns with their values.
    pub rows: String,
}

/// A claim with what rows say of it.
pub struct JudgedClaim {
    /// The paper.
    pub paper: &'static str,
    /// The claim.
    pub claim: &'static Claim,
    /// What the source prints.
    pub published: Option<String>,
    /// What rows say, where there are any.
    pub finding: Option<Finding>,
}

impl JudgedClaim {
    /// How it stands.
    pub fn verdict(&self) -> ClaimVerdict {
        self.finding.as_ref().map_or(ClaimVerdict::Undecided, |finding| finding.verdict)
    }

    /// One sentence: the claim, what was measured, and what is printed.
    pub fn sentence(&self) -> Option<String> {
        let Finding { verdict, measured, .. } = self.finding.as_ref()?;
        let published =
            self.published.as_ref().map_or_else(String::new, |text| format!(" (published: {text})"));
        Some(format!(
            "{}, {}: {}: {}. {measured}{published}.",
            self.paper,
            self.claim.place,
            verdict.word(),
            self.claim.text
        ))
    }
}

/// `rows` by the device that measured them, that with the most first; what was trained belongs to every device.
fn by_device(rows: &[Row]) -> Vec<Vec<Row>> {
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for row in rows.iter().filter(|row| row.is_measured()) {
        *counts.entry(&row.device).or_default() += 1;
    }
    let mut devices: Vec<(&str, usize)> = counts.into_iter().collect();
    devices.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let of = |device: &str| {
        let rows = rows.iter().filter(|row| row.device == device || !row.is_measured());
        rows.cloned().collect()
    };
    if devices.is_empty() {
        vec![rows.to_vec()]
    } else {
        devices.iter().map(|(device, _)| of(device)).collect()
    }
}

/// What the devices' rows say of `claim`: the first that decides it, or else the first that says anything.
fn finding(claim: &Claim, devices: &[Vec<Row>]) -> Option<Finding> {
    let said: Vec<Finding> = devices.iter().filter_map(|rows| (claim.judge)(rows)).collect();
    let decided = said.iter().position(|finding| finding.verdict != ClaimVerdict::Undecided);
    said.into_iter().nth(decided.unwrap_or(0))
}

/// Every claim of both papers against `rows`; what was measured, on one device.
pub fn judged(rows: &[Row]) -> Vec<JudgedClaim> {
    let devices = by_device(rows);
    let papers = [("cosFormer", COSFORMER), ("Transformer-LS", TRANSFORMER_LS)];
    let claims =
        papers.into_iter().flat_map(|(paper, claims)| claims.iter().map(move |claim| (paper, claim)));
    let judged = claims.map(|(paper, claim)| JudgedClaim {
        paper,
        claim,
        published: (claim.published)(),
        finding: finding(claim, &devices),
    });
    judged.collect()
}

/// The claims as a table, the decided ones of each paper first.
pub fn table(rows: &[Row]) -> Table {
    let mut claims = judged(rows);
    let order = |claim: &JudgedClaim| match (claim.verdict(), &claim.finding) {
        (ClaimVerdict::Undecided, None) => 2,
        (ClaimVerdict::Undecided, Some(_)) => 1,
        _ => 0,
    };
    claims.sort_by_key(|claim| (claim.paper == "Transformer-LS", order(claim)));
    let line = |judged: &JudgedClaim| {
        let text = |of: fn(&Finding) -> &String| {
            judged.finding.as_ref().map_or_else(String::new, |finding| of(finding).clone())
        };
        let rows = match &judged.finding {
            Some(finding) if finding.verdict != ClaimVerdict::Undecided => {
                let open = finding.measured.contains(UNRESOLVED);
                let to_resolve = open.then(|| format!("; to resolve: {}", judged.claim.command));
                finding.rows.clone() + &to_resolve.unwrap_or_default()
            }
            Some(finding) => format!("{}; to decide: {}", finding.rows, judged.claim.command),
            None => format!("to decide: {}", judged.claim.command),
        };
        vec![
            format!("{}, {}", judged.paper, judged.claim.place),
            judged.claim.text.to_owned(),
            judged.verdict().word().to_owned(),
            text(|finding| &finding.measured),
            judged.published.clone().unwrap_or_default(),
            rows,
        ]
    };
    Table {
        title: "Claims of both papers".to_owned(),
        columns: ["where", "claim", "verdict", "measured", "published", "rows"].map(str::to_owned).to_vec(),
        rows: claims.iter().map(line).collect(),
        notes: vec![
            "reproduced, contradicted: by rows of the source's protocol, of speed and memory by ratios on this machine. not decided: not \
             run, one seed, or other settings; what was measured then is an indication."
                .to_owned(),
        ],
        ..Table::default()
    }
}

/// What a shipped suite says was printed for the row called `label`.
fn printed(suite: &str, label: &str, metric: &str, key: &str, index: usize) -> Option<Published> {
    let suite = Suite::load(suite).ok()?;
    suite.rows.iter().filter(|row| row.label == label).find_map(|row| row.table(metric)?.at(key, index))
}

/// The same where it is a number.
fn printed_number(suite: &str, label: &str, metric: &str, key: &str, index: usize) -> Option<f64> {
    printed(suite, label, metric, key, index)?.value()
}

/// A ratio in digits with its half interval, or that it is not resolved, with the ends of the interval.
fn said(ratio: Ratio) -> String {
    match ratio.interval {
        Some(Interval { low, high }) if !ratio.is_resolved() => {
            format!("{UNRESOLVED}: from {low:.2} to {high:.2}")
        }
        _ => ratio.text(),
    }
}

/// How a ratio stands to 1 where it is resolved: one that is not decides nothing.
fn decided(ratio: Ratio) -> Standing {
    if ratio.is_resolved() { ratio.standing() } else { Standing::Same }
}

/// Finished rows of a metric in a suite.
fn of_suite<'a>(rows: &'a [Row], suite: &'a str, metric: &'a str) -> impl Iterator<Item = &'a Row> {
    rows.iter().filter(move |row| {
        row.suite.as_deref() == Some(suite)
            && row.metric == metric
            && row.outcome == Outcome::Ok
            && row.value.is_some()
    })
}

/// Two kinds of models that were trained at other settings than the source's: how both compare, which decides nothing.
fn indication<'a>(
    (own, own_name): (impl Iterator<Item = &'a Row>, &str),
    (other, other_name): (impl Iterator<Item = &'a Row>, &str),
    what: &str,
    (size, rows): (&str, &str),
) -> Option<Finding> {
    let values =
        |rows: &mut dyn Iterator<Item = &'a Row>| rows.filter_map(|row| row.value).collect::<Vec<f64>>();
    let (mut own, mut other) = (own, other);
    let (own, other) = (Summary::of(&values(&mut own))?, Summary::of(&values(&mut other))?);
    let side = |summary: Summary| Some(SampleStats { mean: summary.mean, std: summary.std?, n: summary.n });
    let apart = side(own).zip(side(other)).and_then(|(own, other)| welch(own, other));
    let seeds = if own.n == 1 && other.n == 1 {
        "one seed each".to_owned()
    } else {
        format!("{} and {} seeds", own.n, other.n)
    };
    let sure = match apart {
        None => String::new(),
        Some(test) if test.interval.contains(0.0) => ", not told apart".to_owned(),
        Some(test) => format!(", p = {:.2}", test.p),
    };
    Some(Finding {
        verdict: ClaimVerdict::Undecided,
        measured: format!(
            "{size}: {what} {:.2} with {own_name}, {:.2} with {other_name} ({seeds}{sure})",
            own.mean, other.mean
        ),
        rows: rows.to_owned(),
    })
}

#[cfg(test)]
mod tests;
