//! What changed texts cost (Transformer-LS, Table 2): points of accuracy lost, beside the published loss.

use super::table::Table;
use crate::record::{Outcome, Published, Row};

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
        "points: accuracy on clean texts minus that on changed ones; ± over perturbation seeds.".to_owned(),
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
            row.fraction.map_or_else(String::new, |part| format!("{:.2} %", 100.0 * part)),
            text(row.value),
            with("insertion"),
            text(published("insertion")),
            with("deletion"),
            text(published("deletion")),
        ]);
        if let (Some(clean), Some(loss)) = (row.value, loss(CLAIM.0)) {
            let place = format!("{task} at length {len}{}", share(row));
            claims.push(Claim {
                place,
                model: row.model.clone(),
                clean,
                loss,
                published: published(CLAIM.0),
            });
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
        "share",
        "clean %",
        "insertion costs",
        "published",
        "deletion costs",
        "published",
    ];
    let columns = columns.map(str::to_owned).to_vec();
    let title = "What changed texts cost, in points of accuracy".to_owned();
    (!lines.is_empty()).then_some(Table {
        title,
        columns,
        numbers: 7,
        rows: lines,
        notes,
        ..Table::default()
    })
}

struct Claim {
    place: String,
    model: String,
    clean: f64,
    loss: f64,
    published: Option<f64>,
}

/// The paper's claim held against two measurements. A model at chance has nothing to lose.
fn said(dynamic: &Claim, fixed: &Claim) -> String {
    let verdict = if fixed.clean < CHANCE {
        "nothing follows: the fixed projection is at chance and has nothing to lose"
    } else if dynamic.loss < fixed.loss {
        "dynamic projection loses less"
    } else {
        "dynamic projection does not lose less"
    };
    let published = match (dynamic.published, fixed.published) {
        (Some(dynamic), Some(fixed)) => format!(" (published: {dynamic:.2} and {fixed:.2})"),
        _ => String::new(),
    };
    let ((change, a, b), place) = (CLAIM, &dynamic.place);
    format!(
        "{place}: {change} costs {a} {:.2} points and {b} {:.2}{published}: {verdict}.",
        dynamic.loss, fixed.loss
    )
}

/// Accuracy of two classes below which a model has learned next to nothing.
const CHANCE: f64 = 53.0;

fn number(published: Option<Published>) -> Option<f64> {
    published.and_then(Published::value)
}

fn share(row: &Row) -> String {
    row.fraction.map_or_else(String::new, |part| format!(" ({:.2} % of the protocol)", 100.0 * part))
}

fn alike(a: &Row, b: &Row) -> bool {
    let key = |row: &Row| {
        let what = (row.model.clone(), row.variant.clone(), row.preset.clone(), row.device.clone());
        (what, row.batch, row.len, row.seed, row.fraction.map(f64::to_bits))
    };
    key(a) == key(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, task: &str, value: f64) -> Row {
        let row = Row { task: Some(task.to_owned()), len: Some(1024), ..Row::new("robustness", model) };
        row.with("accuracy", "%", Some(value)).ended(Outcome::Ok, None)
    }

    fn note(dp: (f64, f64), linformer: (f64, f64)) -> String {
        let rows = [
            row("dp", "text", dp.0),
            row("dp", "text-insertion", dp.1),
            row("linformer", "text", linformer.0),
            row("linformer", "text-insertion", linformer.1),
        ];
        table(&rows).unwrap().notes.pop().unwrap()
    }

    #[test]
    fn the_claim_is_confirmed_denied_or_left_open() {
        assert!(
            note((61.0, 60.0), (58.0, 55.0))
                .ends_with("costs dp 1.00 points and linformer 3.00: dynamic projection loses less.")
        );
        assert!(note((61.0, 55.0), (58.0, 57.0)).contains("does not lose less"));
        assert!(note((61.0, 60.0), (51.0, 51.0)).contains("nothing follows"));
        assert!(table(&[row("dp", "text-insertion", 50.0)]).is_none());
    }
}
