//! What changed texts cost (Transformer-LS, Table 2): points of accuracy lost, beside the published loss.

use super::table::Table;
use crate::stats::{self, SampleStats};
use crate::{Outcome, Published, Row};

/// The change that the paper's argument is about, and its two models: dynamic against fixed projection.
const CLAIM: (&str, &str, &str) = ("insertion", "dp", "linformer");

/// A line per tested model; nothing without tests of changed texts.
pub fn table(rows: &[Row]) -> Option<Table> {
    let tested: Vec<&Row> = rows
        .iter()
        .filter(|row| row.protocol == "robustness" && row.metric == "accuracy" && row.outcome == Outcome::Ok)
        .collect();
    let clean = tested.iter().filter(|row| row.task.as_deref().is_some_and(|task| !task.contains('-')));
    let mut lines = Vec::new();
    let mut notes = vec![
        "points: accuracy on clean texts minus accuracy on changed texts; ± over perturbation seeds."
            .to_owned(),
    ];
    let mut claims: Vec<Claim> = Vec::new();
    for row in clean {
        let Some(task) = &row.task else { continue };
        let changed = |kind: &str| {
            let name = format!("{task}-{kind}");
            tested.iter().find(|other| other.task.as_deref() == Some(&name) && alike(row, other)).copied()
        };
        let loss = |kind: &str| Some(row.value? - changed(kind)?.value?);
        let published = |kind: &str| Some(number(row.published)? - number(changed(kind)?.published)?);
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let with = |kind: &str| match (loss(kind), changed(kind).and_then(|row| row.std)) {
            (Some(loss), Some(std)) => format!("{loss:.2} ±{std:.2}"),
            (loss, _) => text(loss),
        };
        let len = row.len.map_or_else(String::new, |len| len.to_string());
        lines.push(vec![
            task.clone(),
            row.label(),
            len.clone(),
            row.differs.clone().unwrap_or_default(),
            text(row.value),
            with("insertion"),
            text(published("insertion")),
            with("deletion"),
            text(published("deletion")),
        ]);
        if let (Some(clean), Some(loss)) = (row.value, loss(CLAIM.0)) {
            let place = row.differs.as_ref().map_or_else(String::new, |words| format!(" ({words})"));
            let place = format!("{task} at length {len}{place}");
            let published = published(CLAIM.0);
            match claims.iter_mut().find(|one| one.place == place && one.label == row.label()) {
                Some(one) => one.seeds.push((clean, loss)),
                None => claims.push(Claim {
                    place,
                    model: row.model.clone(),
                    label: row.label(),
                    seeds: vec![(clean, loss)],
                    published,
                }),
            }
        }
    }
    notes.extend(claims.iter().filter(|one| one.model == CLAIM.1).flat_map(|one| {
        claims
            .iter()
            .filter(|other| other.model == CLAIM.2 && other.place == one.place)
            .map(|other| said(one, other))
    }));
    let columns = [
        "task",
        "model",
        "length",
        "differs (there)",
        "clean %",
        "insertion costs",
        "published",
        "deletion costs",
        "published",
    ];
    let columns = columns.map(str::to_owned).to_vec();
    let title = "Accuracy lost on changed texts, in percentage points".to_owned();
    (!lines.is_empty()).then_some(Table {
        title,
        columns,
        numbers: 7,
        rows: lines,
        notes,
        ..Table::default()
    })
}

/// What a change cost one variant of a mechanism, by seed.
struct Claim {
    place: String,
    model: String,
    label: String,
    /// Clean accuracy and points lost.
    seeds: Vec<(f64, f64)>,
    published: Option<f64>,
}

impl Claim {
    fn losses(&self) -> Vec<f64> {
        self.seeds.iter().map(|(_, loss)| *loss).collect()
    }

    fn side(&self) -> Option<SampleStats> {
        let losses = self.losses();
        Some(SampleStats { mean: stats::mean(&losses)?, std: stats::std_dev(&losses)?, n: losses.len() })
    }
}

/// The paper's claim held against two measurements. A model at chance has nothing to lose, and one seed says nothing of
/// the spread.
fn said(dynamic: &Claim, fixed: &Claim) -> String {
    let chance = |claim: &Claim| claim.seeds.iter().any(|(clean, _)| *clean < CHANCE);
    let welch = dynamic.side().zip(fixed.side()).and_then(|(a, b)| stats::welch(b, a));
    let verdict = if chance(dynamic) || chance(fixed) {
        "no conclusion: a model at chance has nothing to lose"
    } else {
        match welch {
            None => "no conclusion from one seed each",
            Some(welch) if welch.interval.high < 0.0 => "dynamic projection loses less",
            Some(welch) if welch.interval.low > 0.0 => "dynamic projection loses more",
            Some(_) => "no difference beyond the spread of the seeds",
        }
    };
    let published = match (dynamic.published, fixed.published) {
        (Some(dynamic), Some(fixed)) => format!(" (published: {dynamic:.2} and {fixed:.2})"),
        _ => String::new(),
    };
    let (change, a, b, place) = (CLAIM.0, &dynamic.label, &fixed.label, &dynamic.place);
    let mean = |claim: &Claim| stats::mean(&claim.losses()).unwrap_or(f64::NAN);
    format!(
        "{place}: {change} costs {a} {:.2} points and {b} {:.2}{published}: {verdict}.",
        mean(dynamic),
        mean(fixed)
    )
}

/// Accuracy of two classes below which a model has learned next to nothing.
const CHANCE: f64 = 53.0;

fn number(published: Option<Published>) -> Option<f64> {
    published.and_then(Published::value)
}

fn alike(a: &Row, b: &Row) -> bool {
    let key = |row: &Row| {
        let what = (row.model.clone(), row.variant.clone(), row.preset.clone(), row.device.clone());
        (what, row.batch, row.len, row.seed, row.differs.clone())
    };
    key(a) == key(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, task: &str, value: f64) -> Row {
        let row = Row { task: Some(task.to_owned()), len: Some(1024), ..Row::new("robustness", model) };
        row.with("accuracy", "%", Some(value)).with_outcome(Outcome::Ok, None)
    }

    /// What is said of clean and changed accuracies, a pair per seed.
    fn note(dp: &[(f64, f64)], linformer: &[(f64, f64)]) -> String {
        let mut rows = Vec::new();
        for (model, seeds) in [("dp", dp), ("linformer", linformer)] {
            for (seed, (clean, changed)) in (0..).zip(seeds) {
                for (task, value) in [("text", clean), ("text-insertion", changed)] {
                    rows.push(Row { seed: Some(seed), ..row(model, task, *value) });
                }
            }
        }
        table(&rows).unwrap().notes.pop().unwrap()
    }

    #[test]
    fn the_claim_needs_seeds_that_learned() {
        let one = note(&[(61.0, 60.0)], &[(58.0, 55.0)]);
        assert!(
            one.ends_with("costs dp 1.00 points and linformer 3.00: no conclusion from one seed each."),
            "{one}"
        );
        let less = note(&[(61.0, 60.0), (61.0, 59.9)], &[(58.0, 55.0), (58.0, 54.9)]);
        assert!(less.ends_with("dynamic projection loses less."), "{less}");
        let more = note(&[(61.0, 50.0), (61.0, 49.9)], &[(58.0, 55.0), (58.0, 54.9)]);
        assert!(more.ends_with("dynamic projection loses more."), "{more}");
        let open = note(&[(61.0, 60.0), (61.0, 52.0)], &[(58.0, 55.0), (58.0, 54.0)]);
        assert!(open.contains("no difference beyond the spread"), "{open}");
        assert!(note(&[(61.0, 60.0)], &[(51.0, 51.0)]).contains("at chance"));
        assert!(table(&[row("dp", "text-insertion", 50.0)]).is_none());
        let of = |model: &str, variant: Option<&str>| {
            let row = |task, value| Row { variant: variant.map(str::to_owned), ..row(model, task, value) };
            [row("text", 60.0), row("text-insertion", 59.0)]
        };
        let all = [of("dp", None), of("dp", Some("r=4")), of("linformer", None)].concat();
        let notes = table(&all).unwrap().notes;
        assert_eq!(notes.len(), 3, "variants are not taken for seeds: {notes:?}");
        assert!(notes[2].contains("costs dp:r=4 1.00 points"), "{notes:?}");
    }
}
