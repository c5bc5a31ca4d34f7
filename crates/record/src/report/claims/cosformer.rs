//! cosFormer (Qin et al., ICLR 2022).

use super::{Claim, ClaimVerdict, Finding, decided, of_suite, printed, printed_number, said};
use crate::config::suite::Suite;
use crate::config::units::Bytes;
use crate::report::chart::alike;
use crate::report::ratio::{Ratio, Standing};
use crate::stats::power_law;
use crate::{Outcome, Pass, Published, Row};

/// The suite of Table 5.
const SPEED: &str = "cos-table5";
/// Exponents of length from which growth is called linear.
const LINEAR: std::ops::Range<f64> = 0.9..1.1;

/// Its claims.
pub const CLAIMS: &[Claim] = &[
    Claim {
        place: "Table 5",
        text: "inference is faster than that of full attention, the more so the longer the text",
        published: || speedups("infer"),
        command: "effattn speed --suite cos-table5 --model full,cosformer",
        judge: |rows| faster(rows, Pass::Infer),
    },
    Claim {
        place: "Table 5",
        text: "training is faster than that of full attention, the more so the longer the text",
        published: || speedups("train"),
        command: "effattn speed --suite cos-table5 --model full,cosformer",
        judge: |rows| faster(rows, Pass::Train),
    },
    Claim {
        place: "Table 5",
        text: "full attention, Synthesizer, Longformer and Sparse Transformer run out of memory at 3K",
        published: || Some("out of 48 GB".to_owned()),
        command: "effattn speed --suite cos-table5 --mode train --len 3072",
        judge: out_of_memory,
    },
    Claim {
        place: "section 3",
        text: "time grows linearly with the length",
        published: || None,
        command: "effattn speed --model full,cosformer --len 2048..32768 --mode infer --set layers=1",
        judge: linear_time,
    },
    Claim {
        place: "Table 4",
        text: "highest mean accuracy on the Long Range Arena",
        published: || average("cos-table4", "average"),
        command: "effattn lra --suite cos-table4",
        judge: |_| None,
    },
    Claim {
        place: "Table 6",
        text: "the cos re-weighting raises the mean accuracy on the Long Range Arena",
        published: || {
            let of = |label| printed_number("cos-table6", label, "accuracy", "average", 0);
            Some(format!(
                "{:.2} with, {:.2} without",
                of("cosFormer")?,
                of("phi_ReLU, without re-weighting")?
            ))
        },
        command: "effattn lra --suite cos-table6",
        judge: |_| None,
    },
    Claim {
        place: "Table 2",
        text: "lower perplexity than full attention on WikiText-103",
        published: || {
            let of = |label| printed_number("cos-table2", label, "ppl_context", "wikitext103", 0);
            Some(format!("{:.1} against {:.1}", of("cosFormer")?, of("Vanilla Transformer")?))
        },
        command: "effattn wordlm --suite cos-table2",
        judge: perplexity,
    },
    Claim {
        place: "Table 3",
        text: "fine-tuned, nearly as accurate as full attention",
        published: || average("cos-table3", "average"),
        command: "effattn finetune --suite cos-table3 --from RUN",
        judge: |_| None,
    },
    Claim {
        place: "Table 1",
        text: "kernels that are never negative reach a lower loss and a higher accuracy",
        published: || {
            let of = |label| printed_number("cos-table1", label, "accuracy", "mnli", 0);
            Some(format!("MNLI: {:.2} with ReLU, {:.2} with the identity", of("phi_ReLU")?, of("phi_I")?))
        },
        command: "effattn mlm --suite cos-table1-loss",
        judge: |_| None,
    },
];

/// The printed averages of cosFormer and of the best other row.
fn average(suite: &str, key: &str) -> Option<String> {
    let suite = Suite::load(suite).ok()?;
    let value = |label: &str| printed_number(&suite.name, label, "accuracy", key, 0);
    let others = suite.rows.iter().filter(|row| row.label != "cosFormer");
    let best = others.filter_map(|row| Some((value(&row.label)?, row.label.as_str())));
    let (best, name) = best.max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(format!("{:.2}, the best other row {best:.2} ({name})", value("cosFormer")?))
}

/// How many times as fast as full attention it is in the source, by length.
fn speedups(pass: &str) -> Option<String> {
    let lens = Suite::load(SPEED).ok()?.base.len?.0;
    let of = |label, index| printed_number(SPEED, label, "steps_per_second", pass, index);
    let at = |(index, len): (usize, &u64)| {
        Some(format!(
            "{:.2} times at {len}",
            Ratio::exact(of("cosFormer", index)?, of("Transformer", index)?)?.value
        ))
    };
    let all: Vec<String> = lens.iter().enumerate().filter_map(at).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn faster(rows: &[Row], pass: Pass) -> Option<Finding> {
    let rows: Vec<&Row> =
        of_suite(rows, SPEED, "steps_per_second").filter(|row| row.pass == Some(pass)).collect();
    let batch = rows.iter().filter_map(|row| row.batch).max()?;
    let of = |model: &str, len: Option<u64>| {
        rows.iter().find(|row| row.model == model && row.len == len && row.batch == Some(batch))
    };
    let mut ratios: Vec<(u64, Ratio)> = (rows.iter())
        .filter(|row| row.model == "cosformer" && row.batch == Some(batch))
        .filter_map(|row| Some((row.len?, Ratio::of(row, of("full", row.len)?)?)))
        .collect();
    ratios.sort_by_key(|(len, _)| *len);
    let ((_, first), (_, last)) = (ratios.first()?, ratios.last()?);
    let all = |standing: Standing| ratios.iter().all(|(_, ratio)| decided(*ratio) == standing);
    let falls = ratios.iter().enumerate().any(|(index, (_, longer))| {
        ratios[..index].iter().any(|(_, shorter)| longer.upper() < shorter.lower())
    });
    let rises = last.lower() > first.upper() && !falls;
    let verdict = match () {
        () if all(Standing::More) && rises => ClaimVerdict::Reproduced,
        () if ratios.iter().any(|(_, ratio)| decided(*ratio) == Standing::Less) => ClaimVerdict::Contradicted,
        () => ClaimVerdict::Undecided,
    };
    let texts: Vec<String> =
        ratios.iter().map(|(len, ratio)| format!("{} times at {len}", said(*ratio))).collect();
    let overlap = |pair: &&[(u64, Ratio)]| pair[1].1.lower() <= pair[0].1.upper();
    let alike = ratios
        .windows(2)
        .filter(overlap)
        .map(|pair| format!("; {} and {} are not told apart", pair[0].0, pair[1].0));
    Some(Finding {
        verdict,
        measured: texts.join(", ") + &alike.collect::<String>(),
        rows: format!("steps_per_second suite={SPEED} model=cosformer, full pass={pass} batch={batch}"),
    })
}

/// The rows that ran out of memory in the source, and what they need here.
fn out_of_memory(rows: &[Row]) -> Option<Finding> {
    const LEN: u64 = 3072;
    const MEMORY: f64 = 48e9;
    let suite = Suite::load(SPEED).ok()?;
    let index = suite.base.len.as_ref()?.0.iter().position(|len| *len == LEN)?;
    let gone = |label: &str| {
        printed(SPEED, label, "steps_per_second", "train", index) == Some(Published::Outcome(Outcome::Oom))
    };
    let mut texts = Vec::new();
    let (mut fit, mut all) = (0, 0);
    for entry in suite.rows.iter().filter(|row| gone(&row.label)) {
        let own = |row: &&Row| {
            row.suite.as_deref() == Some(SPEED)
                && row.metric == "steps_per_second"
                && (row.model == entry.model.name, row.pass, row.len) == (true, Some(Pass::Train), Some(LEN))
                && row.batch == suite.base.batch.as_ref().and_then(|batch| batch.0.first().copied())
        };
        // what failed in another way, or was not finished, says nothing of memory
        let is_telling = |row: &&Row| own(row) && matches!(row.outcome, Outcome::Ok | Outcome::Oom);
        let Some(row) = rows.iter().find(is_telling) else { continue };
        all += 1;
        match row.peak_bytes.filter(|_| row.outcome == Outcome::Ok) {
            Some(bytes) => {
                fit += usize::from((bytes as f64) < MEMORY);
                texts.push(format!("{} {}", entry.label, Bytes(bytes)));
            }
            None => texts.push(format!("{} {}", entry.label, row.outcome)),
        }
    }
    let verdict = match fit {
        0 if all == 0 => return None,
        0 => ClaimVerdict::Reproduced,
        _ => ClaimVerdict::Contradicted,
    };
    Some(Finding {
        verdict,
        measured: format!(
            "peak of a training step at {LEN}, batch 32: {}; fused kernels store no scores, and the definitions of Longformer and Sparse \
             Transformer need no dense matrix, which the code behind the table masks",
            texts.join(", ")
        ),
        rows: format!("steps_per_second suite={SPEED} pass=train len={LEN}, column peak_bytes"),
    })
}

/// Exponents of the growth of time by length, of the longest series of both mechanisms.
fn linear_time(rows: &[Row]) -> Option<Finding> {
    let times: Vec<&Row> = (rows.iter())
        .filter(|row| row.metric == "step_time" && row.protocol == "speed" && row.variant.is_none())
        .filter(|row| row.outcome == Outcome::Ok && row.len.is_some() && row.other_program().is_none())
        .collect();
    let law = |group: &[&Row], model: &str| {
        let own = group.iter().filter(|row| row.model == model);
        let points: Vec<(f64, f64)> = own.filter_map(|row| Some((row.len? as f64, row.value?))).collect();
        Some((points.len(), power_law(&points).filter(|_| points.len() > 2)?.slope))
    };
    // rows do not name a run: models of one size are those whose linear mechanism needs as many operations per position
    let size = |row: &Row| {
        let same =
            |other: &&&Row| other.model == "cosformer" && (other.len, other.params) == (row.len, row.params);
        let own = times.iter().find(same)?;
        Some((own.flops? as f64 / own.len? as f64).log2().round() as i64)
    };
    let mut sizes: Vec<Option<i64>> = times.iter().map(|row| size(row)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let groups = sizes.into_iter().flat_map(|wanted| {
        let here: Vec<&Row> = times.iter().filter(|row| size(row) == wanted).copied().collect();
        alike(&here)
    });
    let laws = groups.filter_map(|(_, group)| {
        let (full, own) = (law(&group, "full")?, law(&group, "cosformer")?);
        let longest = group.iter().filter_map(|row| row.len).max()?;
        Some((longest, full.1, own.1, group[0].clone()))
    });
    let (longest, full, own, row) = laws.max_by_key(|(longest, ..)| *longest)?;
    let verdict = if LINEAR.contains(&own) { ClaimVerdict::Reproduced } else { ClaimVerdict::Contradicted };
    let pass = row.pass.map_or("", Pass::word);
    Some(Finding {
        verdict,
        measured: format!(
            "time grows as length^{own:.2} up to {longest} ({pass}), of full attention as length^{full:.2}"
        ),
        rows: format!("step_time protocol=speed model=cosformer, full pass={pass}"),
    })
}

/// Word language models of a small size.
fn perplexity(rows: &[Row]) -> Option<Finding> {
    const SMALL: &str = "cos-table2-small";
    let of = |model: &'static str| {
        of_suite(rows, SMALL, "ppl_context")
            .filter(move |row| row.model == model && row.task.as_deref() == Some("wikitext103-small"))
    };
    super::indication(
        (of("cosformer"), "cosFormer"),
        (of("full"), "full attention"),
        "perplexity on the published validation text",
        ("at a small size of our own", "ppl_context suite=cos-table2-small model=cosformer, full"),
    )
}
