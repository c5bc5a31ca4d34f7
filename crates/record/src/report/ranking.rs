//! How many times as fast as a baseline every mechanism is, and in how much of its memory: in words and as rankings.

use super::chart::{Quantity, RatioPanel, alike};
use super::compare::same_cell;
use super::place;
use super::ratio::{Ratio, Standing, UNRESOLVED};
use super::seeds;
use super::table::Table;
use super::wrap::TIED;
use crate::stats::{Interval, mean};
use crate::{Pass, Published, Row};

/// What a ratio is against where nothing is asked: full attention in classifiers and in language models.
pub(super) const USUAL: [&str; 2] = ["full", "transformer-xl"];

/// Lines about single mechanisms below a ranking.
const LINES: usize = 3;

/// What the source prints for one cell as a multiple of the baseline's.
#[derive(Clone, Debug, PartialEq)]
enum PrintedRatio {
    Times(f64),
    /// What happened instead of a number, in words.
    None(String),
}

/// One mechanism relative to the baseline at one length.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    len: u64,
    ratio: Ratio,
    printed: Option<PrintedRatio>,
}

impl Place {
    /// Measured, and published where the source has it: `1.50 ±0.05 / 2.28`.
    fn text(&self) -> String {
        match &self.printed {
            None => self.ratio.text(),
            Some(PrintedRatio::Times(times)) => format!("{} / {times:.2}", self.ratio.text()),
            Some(PrintedRatio::None(words)) => format!("{} / {words}", self.ratio.text()),
        }
        .replace(' ', &TIED.to_string())
    }

    /// `linear is 1.8 ±0.1 times as fast as full at 4096 (training)`.
    fn line(&self, quantity: Quantity, (label, baseline): (&str, &str), title: &str) -> String {
        let at = if title.is_empty() { String::new() } else { format!(" ({})", title.to_lowercase()) };
        let at = format!("at {}{at}", self.len);
        let text = self.ratio.text();
        let apart = self.ratio.standing() != Standing::Same;
        match (quantity, self.ratio.interval.filter(|_| !self.ratio.is_resolved())) {
            (Quantity::Memory, _) if !apart => {
                format!("{label} and {baseline} need the same memory {at}: {text}.")
            }
            (Quantity::Memory, _) => format!("{label} needs {text} times the memory of {baseline} {at}."),
            (_, None) if !apart => format!("{label} and {baseline} are as fast {at}: {text}."),
            (_, None) => format!("{label} is {text} times as fast as {baseline} {at}."),
            (_, Some(Interval { low, high })) => format!(
                "{label} and {baseline} cannot be told apart {at}: {:.2} times as fast, {low:.2} to {high:.2}.",
                self.ratio.value
            ),
        }
    }
}

/// What is typed for the rows called `labels`: mechanisms with their knobs, each once, and the programs beside effattn.
fn typed<'a>(rows: &[&'a Row], labels: &[&str]) -> (Vec<String>, Vec<&'a str>) {
    let (mut choices, mut programs) = (Vec::new(), Vec::new());
    for label in labels {
        let Some(row) = rows.iter().find(|row| row.label() == **label) else { continue };
        if !choices.contains(&row.choice()) {
            choices.push(row.choice());
        }
        if let Some(program) = row.other_program().filter(|program| !programs.contains(program)) {
            programs.push(program);
        }
    }
    (choices, programs)
}

/// What to do about what is `unresolved`: the command that measures it again, with as many steps as the widest interval needs, or with
/// more seeds where there are several; `rows` are those of the ranking.
fn resolving_command(
    (rows, seeds): (&[&Row], usize),
    baseline: &str,
    unresolved: &[(String, Place)],
) -> Option<String> {
    let row = rows.first()?;
    let mut labels: Vec<&str> = vec![baseline];
    let mut lens: Vec<u64> = Vec::new();
    for (label, place) in unresolved {
        if !labels.contains(&label.as_str()) {
            labels.push(label);
        }
        if !lens.contains(&place.len) {
            lens.push(place.len);
        }
    }
    lens.sort_unstable();
    // the interval shrinks with the root of the number: to a tenth of the ratio, or to half of its distance from 1
    let factor = unresolved.iter().filter_map(|(_, Place { ratio, .. })| {
        let half = ratio.interval.map(|interval| (interval.high - interval.low) / 2.0)?;
        let wanted = (0.1 * ratio.value).min((ratio.value - 1.0).abs() / 2.0).max(0.02 * ratio.value);
        Some((half / wanted).powi(2))
    });
    let steps =
        rows.iter().filter(|row| labels.contains(&row.label().as_str())).filter_map(|row| row.n).min()?;
    let runs = (steps as f64 * factor.fold(1.0, f64::max)).ceil().clamp(10.0, 1000.0);
    let (what, repeated) = match seeds {
        0 | 1 => ("steps", format!("--min-runs {runs} --runs {runs}")),
        several => ("seeds", format!("--seeds 0..{}", (2 * several).max(10) - 1)),
    };
    let (choices, programs) = typed(rows, &labels);
    let program =
        if programs.is_empty() { String::new() } else { format!(" --program {}", programs.join(",")) };
    let preset = row.preset.as_ref().map_or_else(String::new, |preset| format!(" --preset {preset}"));
    let batch = row.batch.map_or_else(String::new, |batch| format!(" --batch {batch}"));
    let mode = row.pass.map_or_else(String::new, |pass| format!(" --mode {pass}"));
    // a program has no kernels of ours
    let kernel = match row.kernel.as_str() {
        "fused" | "" => String::new(),
        kernel => format!(" --kernel {kernel}"),
    };
    let dtype = match row.dtype.as_str() {
        "f32" | "" => String::new(),
        dtype => format!(" --dtype {dtype}"),
    };
    let device = match row.device.as_str() {
        "cpu" | "" => String::new(),
        device => format!(" --device {device}"),
    };
    let layers = row.setting("layers").map_or_else(String::new, |layers| format!(" --layers {layers}"));
    let threads = row.threads.map_or_else(String::new, |threads| format!(" --threads {threads}"));
    let lens = lens.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    Some(format!(
        "More {what} resolve it: effattn {} --model {}{program}{preset}{layers} --len {lens}{batch}{mode}{kernel}{dtype}{device}{threads} {repeated}",
        row.protocol,
        choices.join(",")
    ))
}

/// Tables per pass, batch and whatever else differs: how many times as fast as `baseline` (full attention where none is named) every
/// mechanism is, the fastest first, then in how much of its memory, and what follows in words. Nothing without the baseline.
pub fn rankings(rows: &[Row], baseline: Option<&str>) -> Vec<Table> {
    let tables = [Quantity::Time, Quantity::Memory].into_iter().flat_map(|quantity| {
        let picked = quantity.rows(rows);
        let alike = alike(&picked.iter().collect::<Vec<_>>());
        let groups = alike.into_iter().filter_map(move |(title, group)| {
            let has = |name: &&str| group.iter().any(|row| row.label() == **name);
            let baseline = baseline.or_else(|| USUAL.into_iter().find(has))?;
            Ranking { quantity, all: rows, rows: &group, baseline, title: &title }.table()
        });
        groups.collect::<Vec<_>>()
    });
    tables.collect()
}

/// The same as panels of a chart; the baseline's own values stand in the titles.
pub(super) fn panels(rows: &[Row], quantity: Quantity) -> Vec<RatioPanel> {
    let picked = quantity.rows(rows);
    let alike = alike(&picked.iter().collect::<Vec<_>>());
    let groups = alike.into_iter().filter_map(|(title, group)| {
        let has = |name: &&str| group.iter().any(|row| row.label() == **name);
        let baseline = USUAL.into_iter().find(has)?;
        let ranked = Ranking { quantity, all: rows, rows: &group, baseline, title: &title }.sorted();
        let own = group.iter().filter(|row| row.label() == baseline).filter_map(|row| quantity.value(row));
        let (low, high) = own.fold((f64::MAX, 0.0), |(low, high), value| (value.min(low), value.max(high)));
        let (low, high) = (quantity.unit().text(low), quantity.unit().text(high));
        let own = if low == high { low } else { format!("{low} to {high}") };
        let title = if title.is_empty() { String::new() } else { format!("{title} · ") };
        let points = |places: Vec<Place>| places.iter().map(|place| (place.len, place.ratio.value)).collect();
        (!ranked.is_empty()).then(|| RatioPanel {
            title: format!("{title}{baseline}: {own}"),
            rows: ranked.into_iter().map(|(label, places)| (label, points(places))).collect(),
        })
    });
    groups.collect()
}

/// One table before it is text.
struct Ranking<'a> {
    quantity: Quantity,
    /// Every row of the run: published numbers stand in rows of other metrics.
    all: &'a [Row],
    /// The rows that are ranked.
    rows: &'a [&'a Row],
    baseline: &'a str,
    title: &'a str,
}

impl Ranking<'_> {
    fn lens(&self) -> Vec<u64> {
        let own = self.rows.iter().filter(|row| row.label() == self.baseline);
        let mut lens: Vec<u64> = own.filter_map(|row| row.len).collect();
        lens.sort_unstable();
        lens.dedup();
        lens
    }

    /// The ratio of `own` to the baseline: above 1 is faster, or more memory.
    fn ratio(&self, own: &Row, base: &Row) -> Option<Ratio> {
        match self.quantity {
            Quantity::Memory | Quantity::Limit => self.quantity.ratio(own, base),
            Quantity::Time | Quantity::Tokens => self.quantity.ratio(base, own),
        }
    }

    /// What the source prints for both, where it prints both.
    fn printed(&self, own: &Row, base: &Row) -> Option<PrintedRatio> {
        if self.quantity == Quantity::Memory {
            return None;
        }
        let printed = |row: &Row| -> Vec<&Row> {
            self.all.iter().filter(|other| other.published.is_some() && same_cell(row, other)).collect()
        };
        let bases = printed(base);
        let pairs = printed(own)
            .into_iter()
            .filter_map(|own| Some((own, *bases.iter().find(|base| base.metric == own.metric)?)));
        let mut ratios = pairs.filter_map(|(own, base)| printed_ratio(own, base, self.baseline));
        ratios.next()
    }

    /// Every mechanism beside the baseline with its ratios by length, the best first.
    fn ranked(&self) -> Vec<(String, Vec<Place>)> {
        let of = |len: u64| self.rows.iter().find(|row| row.label() == self.baseline && row.len == Some(len));
        let mut ranked: Vec<(String, Vec<Place>)> = Vec::new();
        for row in self.rows {
            let (label, Some(len)) = (row.label(), row.len) else { continue };
            let Some(base) = of(len).filter(|_| label != self.baseline) else { continue };
            let Some(ratio) = self.ratio(row, base) else { continue };
            let printed = self.printed(row, base);
            let entry = place(&mut ranked, |known| known.0 == label, || (label.clone(), Vec::new()));
            entry.1.push(Place { len, ratio, printed });
        }
        ranked
    }

    /// The lengths that every mechanism ran: a mean over different ones would compare nothing.
    fn common(&self, ranked: &[(String, Vec<Place>)]) -> Vec<u64> {
        let ran = |len: &u64| ranked.iter().all(|(_, places)| places.iter().any(|place| place.len == *len));
        self.lens().into_iter().filter(ran).collect()
    }

    /// [`Self::ranked`], the best first by the mean over the lengths that all ran, or else by the last one.
    fn sorted(&self) -> Vec<(String, Vec<Place>)> {
        let mut ranked = self.ranked();
        let common = self.common(&ranked);
        let last = |places: &[Place]| places.iter().map(|place| place.ratio.value).next_back();
        let rank = |places: &[Place]| geometric_mean(places, &common).or(last(places)).unwrap_or(0.0);
        ranked.sort_by(|a, b| rank(&b.1).total_cmp(&rank(&a.1)));
        if self.quantity == Quantity::Memory {
            ranked.reverse();
        }
        ranked
    }

    fn is_simulated(&self, label: &str) -> bool {
        self.rows.iter().any(|row| row.label() == label && row.simulated == Some(true))
    }

    fn table(&self) -> Option<Table> {
        let (lens, ranked) = (self.lens(), self.sorted());
        if ranked.is_empty() {
            return None;
        }
        let common = self.common(&ranked);
        let line = |(index, (label, places)): (usize, &(String, Vec<Place>))| {
            let at =
                |len: &u64| places.iter().find(|place| place.len == *len).map_or("-".to_owned(), Place::text);
            let star = if self.is_simulated(label) { "*" } else { "" };
            let mut cells = vec![format!("{}. {label}{star}", index + 1).replace(' ', &TIED.to_string())];
            cells.extend(lens.iter().map(at));
            cells.push(geometric_mean(places, &common).map_or("-".to_owned(), |times| format!("{times:.2}")));
            cells
        };
        let mut columns = vec!["model".to_owned()];
        columns.extend(lens.iter().map(u64::to_string));
        columns.push("mean".to_owned());
        let beside = ranked.iter().any(|(_, places)| places.iter().any(|place| place.printed.is_some()));
        Some(Table {
            title: self.heading(beside),
            numbers: columns.len() - 1,
            columns,
            rows: ranked.iter().enumerate().map(line).collect(),
            notes: self.notes(&ranked, &lens, &common),
            ranks: true,
            ..Table::default()
        })
    }

    fn heading(&self, beside: bool) -> String {
        let what = match self.quantity {
            Quantity::Memory => format!("Peak memory as a multiple of that of {}", self.baseline),
            _ if beside => format!("Times as fast as {}, measured / published", self.baseline),
            _ => format!("Times as fast as {}", self.baseline),
        };
        let how =
            if self.quantity == Quantity::Memory { "" } else { ", with 95 % intervals and geometric mean" };
        let place = if self.title.is_empty() { String::new() } else { format!(" · {}", self.title) };
        format!("{what}{how}{place}")
    }

    fn notes(&self, ranked: &[(String, Vec<Place>)], lens: &[u64], common: &[u64]) -> Vec<String> {
        let genuine = ranked.iter().filter(|(label, _)| !self.is_simulated(label));
        let lines = genuine.filter_map(|(label, places)| {
            let last = places.iter().max_by_key(|place| place.len)?;
            Some(last.line(self.quantity, (label, self.baseline), self.title))
        });
        let mut notes: Vec<String> = lines.take(LINES).collect();
        let all = ranked
            .iter()
            .flat_map(|(label, places)| places.iter().map(move |place| (label.clone(), place.clone())));
        let unresolved: Vec<(String, Place)> = all.filter(|(_, place)| !place.ratio.is_resolved()).collect();
        let command = resolving_command((self.rows, seeds::count(self.all)), self.baseline, &unresolved);
        let command = command.filter(|_| !unresolved.is_empty());
        notes.extend(command.map(|command| {
            format!("{UNRESOLVED}: the 95 % interval contains 1, or is wider than the ratio. {command}")
        }));
        if common.len() < lens.len() {
            let list: Vec<String> = common.iter().map(u64::to_string).collect();
            let list = if list.is_empty() { "there is none".to_owned() } else { list.join(", ") };
            notes.push(format!("The geometric mean is over the lengths that all of them ran: {list}."));
        }
        if self.quantity == Quantity::Memory {
            notes.extend(fused_full_attention(self.rows));
        }
        if ranked.iter().any(|(label, _)| self.is_simulated(label)) {
            let what = if self.quantity == Quantity::Memory { "memory" } else { "time" };
            notes.push(format!(
                "*: computes a dense matrix and masks it, so its {what} is not representative of the method."
            ));
        }
        notes
    }
}

/// What a comparison of memory with fused full attention has to say, where `rows` make one.
pub(super) fn fused_full_attention(rows: &[&Row]) -> Option<String> {
    let fused = |row: &&&Row| row.kernel == "fused" && row.pass != Some(Pass::Decode);
    let models = |full: bool| rows.iter().filter(fused).any(|row| (row.model == "full") == full);
    (models(true) && models(false)).then(|| {
        "Fused full attention stores no scores, so that its memory grows with the length, as that of the others. The papers' grows with \
         its square: --kernel composed measures that form."
            .to_owned()
    })
}

/// Geometric mean of the ratios at the lengths of `common`.
fn geometric_mean(places: &[Place], common: &[u64]) -> Option<f64> {
    let here = places.iter().filter(|place| common.contains(&place.len));
    mean(&here.map(|place| place.ratio.value.ln()).collect::<Vec<_>>()).map(f64::exp)
}

/// What a source prints of `own` as a multiple of the speed of `base`, called `baseline`.
fn printed_ratio(own: &Row, base: &Row, baseline: &str) -> Option<PrintedRatio> {
    Some(match (own.published?, base.published?) {
        (Published::Outcome(outcome), _) => PrintedRatio::None(outcome.to_string()),
        (_, Published::Outcome(outcome)) => PrintedRatio::None(format!("{baseline} {outcome}")),
        (Published::Value(own_value), Published::Value(base_value)) => {
            let (over, under) =
                if own.metric.ends_with("_time") { (base_value, own_value) } else { (own_value, base_value) };
            PrintedRatio::Times(Ratio::exact(over, under)?.value)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Outcome, Pass};

    fn row(model: &str, len: u64, seconds: f64) -> Row {
        let row = Row {
            len: Some(len),
            pass: Some(Pass::Train),
            std: Some(seconds / 50.0),
            n: Some(20),
            ..Row::new("speed", model)
        };
        row.with("step_time", "s", Some(seconds)).with_outcome(Outcome::Ok, None)
    }

    #[test]
    fn the_fastest_stands_first_and_is_told_in_words() {
        let mut rows = vec![row("full", 1024, 1.0), row("full", 2048, 4.0)];
        rows.extend([
            row("ls", 1024, 1.0),
            row("ls", 2048, 2.0),
            row("linear", 1024, 0.5),
            row("linear", 2048, 1.0),
        ]);
        rows.push(Row { simulated: Some(true), ..row("sparse", 1024, 2.0) });
        let table = &rankings(&rows, None)[0];
        assert_eq!(table.columns, ["model", "1024", "2048", "mean"]);
        let first: Vec<&str> = table.rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(first, ["1.\u{a0}linear", "2.\u{a0}ls", "3.\u{a0}sparse*"]);
        assert_eq!(table.rows[0][3], "2.00", "over 1024, which all ran");
        assert_eq!(table.rows[2][2], "-");
        assert!(
            table.notes[0].starts_with("linear is 4.00 ±0.05 times as fast as full at 2048"),
            "{table:?}"
        );
        assert!(table.notes.iter().any(|note| note.ends_with("that all of them ran: 1024.")), "{table:?}");
        assert!(!table.notes.iter().any(|note| note.contains("sparse is")), "{table:?}");
        let other = &rankings(&rows, Some("ls"))[0];
        assert!(
            other.rows.iter().any(|row| row[0].ends_with("full") && row[1].starts_with("1.00")),
            "{other:?}"
        );
        assert!(rankings(&rows, Some("rfa")).is_empty() && rankings(&[], None).is_empty());
    }

    #[test]
    fn noise_is_not_called_faster() {
        let noisy = |model, seconds| Row { std: Some(0.5), n: Some(4), ..row(model, 1024, seconds) };
        let table = &rankings(&[noisy("full", 1.0), noisy("ls", 0.9)], None)[0];
        assert!(table.notes[0].starts_with("ls and full cannot be told apart at 1024"), "{table:?}");
    }

    #[test]
    fn what_is_not_resolved_has_a_command() {
        let noisy = |model, seconds, std| Row { std: Some(std), n: Some(3), ..row(model, 2048, seconds) };
        let table = &rankings(&[noisy("full", 5.0, 4.0), noisy("ls", 1.0, 0.01)], None)[0];
        assert_eq!(table.rows[0][1], "not\u{a0}resolved", "5 ±11 is no finding");
        let note = table.notes.iter().find(|note| note.starts_with("not resolved")).unwrap();
        assert!(note.contains("effattn speed --model full,ls --len 2048 --mode train --min-runs "), "{note}");
        let same = &rankings(&[row("full", 8, 1.0), row("ls", 8, 1.0)], None)[0];
        assert!(same.notes[0].starts_with("ls and full are as fast at 8"), "{same:?}");
    }

    #[test]
    fn the_command_for_rows_of_programs_can_be_typed() {
        let noisy = |model, program: &str, std| Row {
            std: Some(std),
            n: Some(3),
            kernel: String::new(),
            program: Some(program.to_owned()),
            ..row(model, 2048, 2.0)
        };
        let rows = [noisy("full", "torch", 1.5), noisy("full", "jax", 1.0), noisy("ls", "torch", 1.0)];
        let table = &rankings(&rows, Some("full (torch)"))[0];
        let note = table.notes.iter().find(|note| note.starts_with("not resolved")).unwrap();
        let command = "effattn speed --model full,ls --program torch,jax --len 2048 --mode train --min-runs ";
        assert!(note.contains(command), "{note}");
        let rows = ["full", "ls"].map(|model| Row {
            std: Some(1.5),
            n: Some(3),
            dtype: "bf16".to_owned(),
            device: "cuda".to_owned(),
            ..row(model, 2048, 2.0)
        });
        let table = &rankings(&rows, None)[0];
        let note = table.notes.iter().find(|note| note.starts_with("not resolved")).unwrap();
        assert!(note.contains(" --dtype bf16 --device cuda --"), "{note}");
    }

    #[test]
    fn the_published_ratio_stands_beside_the_measured_one() {
        let cell = |model: &str, len: u64, seconds: f64, published| {
            let time = row(model, len, seconds);
            let rate = Row {
                published: Some(published),
                ..time.clone().with("steps_per_second", "1/s", Some(1.0 / seconds))
            };
            [time, rate]
        };
        let rows = [
            cell("full", 1024, 1.0, Published::Value(10.0)),
            cell("full", 2048, 4.0, Published::Outcome(Outcome::Oom)),
            cell("ls", 1024, 0.5, Published::Value(23.0)),
            cell("ls", 2048, 1.0, Published::Value(11.0)),
        ]
        .concat();
        let table = &rankings(&rows, None)[0];
        assert!(table.title.starts_with("Times as fast as full, measured / published"), "{table:?}");
        let cells: Vec<String> = table.rows[0][1..3].iter().map(|cell| cell.replace(TIED, " ")).collect();
        assert_eq!(cells, ["2.00 ±0.03 / 2.30", "4.00 ±0.05 / full oom"]);
    }

    #[test]
    fn memory_is_a_multiple_and_two_percent_are_none() {
        let peak = |model: &str, bytes: u64| Row { peak_bytes: Some(bytes), ..row(model, 1024, 1.0) };
        let rows = [peak("full", 1_000_000), peak("ls", 1_200_000), peak("local", 999_456)];
        let table = rankings(&rows, None).pop().unwrap();
        assert_eq!(table.title, "Peak memory as a multiple of that of full");
        assert_eq!(table.rows[0][1], "1.00");
        assert_eq!(table.notes[0], "local and full need the same memory at 1024: 1.00.");
        assert_eq!(table.notes[1], "ls needs 1.20 times the memory of full at 1024.");
    }
}
