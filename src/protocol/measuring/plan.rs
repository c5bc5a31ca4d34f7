//! From the grid to cells, as far as `speed` and `memory` agree.

use serde::{Deserialize, Serialize};

use crate::protocol::differing::differing_words;
use crate::protocol::grid::{Grid, GridEntry, PlanError, listed};
use crate::protocol::model_spec::ModelSpec;
use crate::run::plan::{Cell, Plan, unusual_values};
use effattn_record::config::lists::{Batches, Lengths, Modes, Seeds};
use effattn_record::config::settings::Settings;
use effattn_record::config::units::Seconds;
use effattn_record::config::unknown;
use effattn_record::{Pass, Row};

/// Preset where nothing is said.
pub const PRESET: &str = "lra-repo";
/// Multiply-adds per second and thread that predictions start from.
pub const RATE: f64 = 8e9;
/// Seconds until a cell ends as `timeout`, where nothing is said.
const TIMEOUT: f64 = 600.0;

/// What a protocol asks of a cell's worker besides the model and its step.
pub trait Measure: Serialize + Clone {
    /// What `settings` ask.
    fn of(settings: &Settings) -> Self;

    /// Whether the length is looked for: `--len` only bounds it then.
    fn searches(&self) -> bool {
        false
    }
}

/// What the worker of a cell is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRequest<M> {
    /// The model and its step.
    pub spec: ModelSpec,
    /// What is measured.
    #[serde(flatten)]
    pub measure: M,
    /// The program whose cell it is, as on the command line; none: effattn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

impl<M: Measure> StepRequest<M> {
    pub fn new(spec: ModelSpec, measure: M) -> Self {
        Self { spec, measure, program: None }
    }

    /// The same for another length.
    pub fn with_len(&self, len: u64) -> Self {
        Self { spec: ModelSpec { len, ..self.spec.clone() }, ..self.clone() }
    }
}

/// A cell before it has its place in the plan.
pub struct Draft<M> {
    /// The words that its key begins with.
    pub words: String,
    /// Its row without what the suite says.
    pub row: Row,
    /// Request of its worker.
    pub request: StepRequest<M>,
    /// The request under the same words without any setting.
    pub usual: StepRequest<M>,
    /// Why it cannot be run.
    pub unsupported: Option<String>,
}

impl<M: Measure> Draft<M> {
    /// The cell of `pick`, predicted to take `seconds` with so many threads.
    pub fn cell(
        self,
        grid: &Grid,
        pick: &GridEntry,
        threads: usize,
        seconds: impl Fn(usize) -> f64,
    ) -> Result<Cell, PlanError> {
        let Self { words, row, request, usual, unsupported } = self;
        let suite = grid.suite.as_ref().map(|suite| suite.name.clone());
        let row = Row { suite, differs: differs(pick, &request)?, ..row };
        let cell = Cell::new(&words, row, &request, &usual).with_seconds(threads, seconds);
        let series = match request.measure.searches() {
            true => String::new(),
            false => serde_json::to_string(&request.with_len(0)).map_err(PlanError::new)?,
        };
        let timeout = pick.settings.timeout.map(|time| time.0);
        Ok(Cell { series, timeout, ..cell }.with_unsupported(unsupported))
    }
}

/// What `request` asks that the suite's line of `pick` does not, in words.
fn differs<M: Measure>(pick: &GridEntry, request: &StepRequest<M>) -> Result<Option<String>, PlanError> {
    let Some(own) = pick.of_suite() else { return Ok(None) };
    let ModelSpec { len, batch, pass, seed, .. } = request.spec;
    let batches = own.settings.batch.as_ref().map_or(&[][..], |list| &list.0);
    let usual = if batches.contains(&batch) { batch } else { batches.first().copied().unwrap_or(batch) };
    let usual = StepRequest::new(ModelSpec::new(&own, len, usual, pass, seed)?, M::of(&own.settings));
    let mut words = differing_words(&unusual_values(request, &usual), &[]);
    let lens = own.settings.len.as_ref();
    if !request.measure.searches() && lens.is_some_and(|list| !list.0.contains(&len)) {
        words.push(format!("length {len} (none of the suite's)"));
    }
    Ok((!words.is_empty()).then(|| words.join("; ")))
}

/// Settings without flags, for the lengths `len`.
pub fn defaults(len: Vec<u64>) -> Settings {
    Settings {
        len: Some(Lengths(len)),
        batch: Some(Batches(vec![1])),
        seeds: Some(Seeds(vec![0])),
        mode: Some(Modes(vec![Pass::Infer, Pass::Train])),
        preset: Some(PRESET.to_owned()),
        timeout: Some(Seconds(TIMEOUT)),
        ..Settings::NONE
    }
}

/// Makes sure that what the suite of `grid` has published is one of `shown`, or counted in a column of its table.
pub fn check_metrics(grid: &Grid, shown: &[&str]) -> Result<(), PlanError> {
    let Some(suite) = &grid.suite else { return Ok(()) };
    let of_columns = suite.columns.iter().flat_map(|column| &column.metrics).map(String::as_str);
    let known: Vec<&str> =
        shown.iter().copied().chain(of_columns.filter(|name| !shown.contains(name))).collect();
    for row in &suite.rows {
        let table = row.published.iter().find(|table| !known.contains(&table.metric.as_str()));
        if let Some(table) = table {
            let (file, line, label) = (&suite.file, row.line, &row.label);
            let problem = unknown("metric of published numbers", &table.metric, known.iter().copied());
            return Err(PlanError(format!("suite {file}:{line}: {label}: {problem}")));
        }
    }
    Ok(())
}

/// `lra-repo · batch 1 · IMDb reviews`: what steps are measured with.
pub fn summary(plan: &Plan) -> String {
    let text = if plan.data.contains_key("imdb") { "IMDb reviews" } else { "built-in text" };
    let (preset, batch) = (listed(plan, |row| row.preset.clone()), listed(plan, |row| row.batch));
    format!("{preset} · batch {batch} · {text}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_record::config::suite::Suite;

    #[test]
    fn a_metric_that_nothing_shows_is_refused() {
        let text = "title = 't'\nprotocol = 'speed'\nsource = 's'\n[base]\nlen = [8]\n[[row]]\nlabel = 'a'\nmodel = 'full'\n\
                    published = { metric = 'step_tme', infer = 3.0 }\n";
        let told = |text: &str| {
            let suite = Some(Suite::parse("x.toml", text).unwrap());
            let grid = Grid { suite, settings: Settings::NONE, entries: Vec::new() };
            check_metrics(&grid, &["step_time", "steps_per_second"]).map_err(|error| error.0)
        };
        let says = "suite x.toml:8: a: unknown metric of published numbers \"step_tme\" (did you mean step_time?); known: ";
        assert!(told(text).unwrap_err().starts_with(says), "{:?}", told(text));
        assert_eq!(told(&text.replace("step_tme", "step_time")), Ok(()));
        let column = "[[columns]]\ntitle = 'c'\nmetrics = ['gflops']\nkey = 'infer'\n";
        assert_eq!(told(&(text.replace("step_tme", "gflops") + column)), Ok(()));
    }
}
