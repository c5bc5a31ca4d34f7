//! From flags and suites to what is measured: mechanisms, lengths, batch sizes, passes, seeds.
//!
//! Flag > suite row > suite > default. With a suite, the lists of the grid (`--model`, `--len`, `--batch`,
//! `--mode`, `--seeds`) choose among its own; `--set` overrides.

use super::own_data::own_task;
use crate::run::plan::{Cell, Plan, PublishedMatch, TaskNumber};
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_record::config::lists::{Models, Words};
use effattn_record::config::settings::Settings;
use effattn_record::config::suite::{BUILTIN_SUITES, Suite, SuiteRow};
use effattn_record::departures::sizes_of;
use effattn_record::{Pass, Published, Row};

/// What the user said.
#[derive(Clone, Debug, Default)]
pub struct GridFlags {
    /// Settings given as flags.
    pub settings: Settings,
    /// Settings given with `--set`.
    pub set: Settings,
    /// `--model`.
    pub model: Option<Models>,
    /// `--exclude`.
    pub exclude: Option<Models>,
    /// `--suite`.
    pub suite: Option<String>,
    /// `--quick`.
    pub quick: bool,
}

impl GridFlags {
    /// Everything that was said, flags over `--set`.
    pub fn user_settings(&self) -> Settings {
        self.settings.clone().over(self.set.clone())
    }
}

/// What a protocol does where nothing is said.
pub struct GridDefaults {
    /// Settings.
    pub settings: Settings,
    /// Mechanisms.
    pub models: &'static str,
}

/// A wrong request: what is wrong, what is allowed, what to type.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(pub String);

impl PlanError {
    pub(crate) fn new(error: impl ToString) -> Self {
        Self(error.to_string())
    }
}

/// One line of the grid.
#[derive(Clone)]
pub struct GridEntry {
    /// Name in the paper, or the mechanism with its knobs.
    pub label: String,
    /// Name of the mechanism.
    pub model: String,
    /// The mechanism; or why this build cannot run it.
    pub choice: Result<MechanismChoice, String>,
    /// Settings, all resolved.
    pub settings: Settings,
    /// The suite's own, without what the user said; none without a suite.
    suite_settings: Option<Settings>,
    /// The suite's row.
    row: Option<SuiteRow>,
    published_lens: Vec<u64>,
}

impl GridEntry {
    /// The line as its suite has it, with nothing that the user said; none without a suite.
    pub fn of_suite(&self) -> Option<Self> {
        Some(Self { settings: self.suite_settings.clone()?, ..self.clone() })
    }

    /// The preset that its suite runs it with, said there or usual.
    fn own_preset(&self) -> Option<&str> {
        self.suite_settings.as_ref()?.preset.as_deref()
    }

    /// What the paper printed for `metric` of `pass` at `len`.
    pub fn published(&self, metric: &str, pass: Pass, len: u64) -> Option<Published> {
        let table = self.row.as_ref()?.table(metric)?;
        let index = self.published_lens.iter().position(|known| *known == len)?;
        table.at(pass.word(), index)
    }
}

impl GridEntry {
    /// Whether the line has cells for `task`.
    pub fn runs(&self, task: &str) -> bool {
        let own = self.settings.task.as_ref().is_some_and(|tasks| tasks.0.iter().any(|own| own == task));
        own && self.row.as_ref().is_none_or(|row| row.has(task))
    }
}

/// The number of `row` for `metric` under `key` beside a run with `preset`; `own` is the preset of the row.
fn beside(
    (suite, own): (&Suite, Option<&str>),
    row: &SuiteRow,
    (metric, key): (&str, &str),
    preset: &str,
) -> Option<PublishedMatch> {
    let published = row.table(metric)?.at(key, 0)?;
    let sizes = suite.numbers_of.as_deref().or(own).filter(|of| *of != preset);
    let sizes = sizes.map(|of| sizes_of(preset, of));
    Some(PublishedMatch { published, foreign: sizes.into_iter().chain(row.not_comparable.clone()).collect() })
}

/// The rows for `model` (a mechanism with its knobs) in shipped suites of `protocol` that run `preset`, or whose numbers belong to
/// it, each with its suite.
fn shipped_rows(protocol: &str, model: &str, preset: &str) -> Vec<(Suite, SuiteRow)> {
    let label = |models: &Models| Some(choose(models).ok()?.pop()?.label());
    let Some(wanted) = model.parse().ok().and_then(|models| label(&models)) else { return Vec::new() };
    let suites = BUILTIN_SUITES.iter().filter_map(|(name, _)| Suite::load(name).ok());
    let rows = suites.filter(|suite| suite.protocol == protocol).flat_map(|suite| {
        let rows = suite.rows.iter().filter(|row| suite.is_of(suite.preset_of(row), preset)).cloned();
        rows.map(|row| (suite.clone(), row)).collect::<Vec<_>>()
    });
    rows.filter(|(_, row)| label(&Models(vec![row.model.clone()])).as_ref() == Some(&wanted)).collect()
}

/// The number that shipped suites of `protocol` have for `model`: `what` is the metric and the task it is of.
pub fn published_elsewhere(
    protocol: &str,
    model: &str,
    what: (&str, &str),
    preset: &str,
) -> Option<PublishedMatch> {
    let rows = shipped_rows(protocol, model, preset);
    rows.iter().find_map(|(suite, row)| beside((suite, suite.preset_of(row)), row, what, preset))
}

/// Every number that shipped suites of `protocol` have for `model`.
pub fn numbers_elsewhere(protocol: &str, model: &str, preset: &str) -> Vec<TaskNumber> {
    let rows = shipped_rows(protocol, model, preset);
    rows.iter().flat_map(|(suite, row)| numbers((suite, suite.preset_of(row)), row, preset)).collect()
}

/// Every number of `row`, each as [`beside`] has it.
fn numbers(of: (&Suite, Option<&str>), row: &SuiteRow, preset: &str) -> Vec<TaskNumber> {
    let number = |metric: &str, task: &str| {
        let number = beside(of, row, (metric, task), preset)?;
        Some(TaskNumber { metric: metric.to_owned(), task: task.to_owned(), number })
    };
    let tables = row.published.iter();
    tables.flat_map(|table| table.values.keys().filter_map(|task| number(&table.metric, task))).collect()
}

/// Everything to be measured.
pub struct Grid {
    /// The suite.
    pub suite: Option<Suite>,
    /// Settings that hold for all lines.
    pub settings: Settings,
    /// The lines.
    pub entries: Vec<GridEntry>,
}

impl Grid {
    /// Every number that the suite has in the line of `pick`, where it is one of `preset`.
    pub fn numbers(&self, pick: &GridEntry, preset: &str) -> Vec<TaskNumber> {
        let own = pick.own_preset();
        let of = self.suite.as_ref().zip(pick.row.as_ref()).filter(|(suite, _)| suite.is_of(own, preset));
        of.map_or_else(Vec::new, |(suite, row)| numbers((suite, own), row, preset))
    }

    /// What the suite has for `metric` under `key` in the line of `pick`, run with `preset`.
    pub fn beside(&self, pick: &GridEntry, what: (&str, &str), preset: &str) -> Option<PublishedMatch> {
        beside((self.suite.as_ref()?, pick.own_preset()), pick.row.as_ref()?, what, preset)
    }
}

/// Puts `flags`, `suite` and the `defaults` of a protocol together.
pub(super) fn combine(
    flags: &GridFlags,
    suite: Option<Suite>,
    defaults: &GridDefaults,
) -> Result<Grid, PlanError> {
    let suite_name = suite.as_ref().map(|suite| suite.name.as_str());
    let own = own_task(&flags.user_settings(), suite_name).map_err(PlanError)?;
    let with_task = |all: Settings| Settings { task: own.clone().or(all.task.clone()), ..all };
    let base = suite.as_ref().map_or_else(Settings::default, |suite| suite.base.clone());
    let set = flags.set.clone().overriding(base.clone().overriding(defaults.settings.clone()));
    let settings = with_task(flags.settings.clone().overriding(set));
    let mut entries = match &suite {
        Some(suite) => suite_picks(suite, flags, &base, defaults, &with_task)?,
        None => {
            let models = match &flags.model {
                Some(models) => models.clone(),
                None => defaults.models.parse().map_err(PlanError::new)?,
            };
            let choices = choose(&models).map_err(PlanError::new)?;
            choices.into_iter().map(|choice| pick(choice, settings.clone())).collect()
        }
    };
    if let Some(exclude) = &flags.exclude {
        let out = |pick: &GridEntry| exclude.0.iter().any(|variant| names(variant, pick));
        if let Some(idle) = exclude.0.iter().find(|variant| !entries.iter().any(|pick| names(variant, pick)))
        {
            return Err(PlanError(format!("--exclude {idle} excludes nothing here; see --dry-run")));
        }
        entries.retain(|pick| !out(pick));
    }
    if entries.is_empty() {
        return Err(PlanError("nothing is left to run; choose other --model or --exclude".to_owned()));
    }
    Ok(Grid { suite, settings, entries })
}

fn pick(choice: MechanismChoice, settings: Settings) -> GridEntry {
    GridEntry {
        label: choice.label(),
        model: choice.entry.name.to_owned(),
        choice: Ok(choice),
        settings,
        suite_settings: None,
        row: None,
        published_lens: Vec::new(),
    }
}

/// Whether `variant` names the line: its mechanism, or exactly its knobs, or its label in the paper.
fn names(variant: &effattn_record::config::lists::MechanismSpec, pick: &GridEntry) -> bool {
    if variant.knobs.is_empty() {
        return variant.matches(&pick.model) || pick.label.eq_ignore_ascii_case(&variant.name);
    }
    let wanted = choose(&Models(vec![variant.clone()])).ok().and_then(|mut choices| choices.pop());
    let label = |choice: &MechanismChoice| choice.label();
    wanted.as_ref().map(label) == pick.choice.as_ref().ok().map(label)
}

fn suite_picks(
    suite: &Suite,
    flags: &GridFlags,
    base: &Settings,
    defaults: &GridDefaults,
    with_task: &dyn Fn(Settings) -> Settings,
) -> Result<Vec<GridEntry>, PlanError> {
    let shipped = BUILTIN_SUITES.iter().any(|(name, _)| *name == suite.name);
    let own = |row: &SuiteRow| row.set.clone().overriding(base.clone()).overriding(defaults.settings.clone());
    let lines: Vec<Settings> = suite.rows.iter().map(|row| flags.set.clone().overriding(own(row))).collect();
    let of_base = flags.set.clone().overriding(base.clone()).overriding(defaults.settings.clone());
    let known = if lines.is_empty() { std::slice::from_ref(&of_base) } else { &lines[..] };
    ensure_known(&flags.settings, known, &suite.name)?;
    let preset = flags.settings.preset.as_ref();
    let is_of_preset = |line: &Settings| preset.is_none() || line.preset.as_ref() == preset;
    let has_preset = lines.iter().any(is_of_preset);
    let mut entries = Vec::new();
    for (row, line) in suite.rows.iter().zip(lines) {
        if has_preset && !is_of_preset(&line) {
            continue;
        }
        let Some(settings) = narrowed(&flags.settings, line) else { continue };
        let choice = choose(&Models(vec![row.model.clone()])).map(|mut choices| choices.pop());
        let choice = match choice {
            Ok(Some(choice)) => Ok(choice),
            Ok(None) => Err("not a mechanism of this version".to_owned()),
            Err(error) if shipped => Err(format!("this version cannot run it: {error}")),
            Err(error) => return Err(PlanError(format!("suite {}:{}: {error}", suite.file, row.line))),
        };
        entries.push(GridEntry {
            label: row.label.clone(),
            model: row.model.name.clone(),
            choice,
            settings: with_task(settings),
            suite_settings: Some(own(row)),
            row: Some(row.clone()),
            published_lens: suite.base.len.as_ref().map_or_else(Vec::new, |len| len.0.clone()),
        });
    }
    if let Some(models) = &flags.model {
        for variant in &models.0 {
            if !entries.iter().any(|pick| names(variant, pick)) {
                let said = |pick: &GridEntry| {
                    pick.choice.as_ref().map_or_else(|_| pick.model.clone(), MechanismChoice::label)
                };
                let rows: Vec<String> = entries.iter().map(said).collect();
                let (name, rows) = (&suite.name, rows.join(", "));
                return Err(PlanError(format!("suite {name} has no row {variant}; its rows: {rows}")));
            }
        }
        entries.retain(|pick| models.0.iter().any(|variant| names(variant, pick)));
    }
    Ok(entries)
}

/// The lists of the grid in `settings`, as words.
fn lists(settings: &Settings) -> [(&'static str, Vec<String>); 4] {
    let numbers =
        |list: Option<&Vec<u64>>| list.into_iter().flatten().map(u64::to_string).collect::<Vec<_>>();
    let passes = settings.mode.iter().flat_map(|list| &list.0).map(Pass::to_string).collect();
    [
        ("len", numbers(settings.len.as_ref().map(|list| &list.0))),
        ("batch", numbers(settings.batch.as_ref().map(|list| &list.0))),
        ("seeds", numbers(settings.seeds.as_ref().map(|list| &list.0))),
        ("mode", passes),
    ]
}

/// Refuses a list of the grid in `flags` with a value that no line of the suite has; `lines` are the settings that it chooses among.
fn ensure_known(flags: &Settings, lines: &[Settings], suite: &str) -> Result<(), PlanError> {
    let lines: Vec<_> = lines.iter().map(lists).collect();
    for (index, (key, wanted)) in lists(flags).into_iter().enumerate() {
        let mut known: Vec<&str> = Vec::new();
        for value in lines.iter().flat_map(|line| &line[index].1) {
            if !known.contains(&value.as_str()) {
                known.push(value);
            }
        }
        let is_foreign = |value: &&String| !known.is_empty() && !known.contains(&value.as_str());
        if let Some(foreign) = wanted.iter().find(is_foreign) {
            let known = known.join(", ");
            return Err(PlanError(format!(
                "suite {suite} has no {key} {foreign}; it has {known}. Override it with --set {key}={foreign}"
            )));
        }
    }
    Ok(())
}

/// `flags` over the settings of a line of a suite, of whose lists they choose what the line has; nothing where that is nothing.
fn narrowed(flags: &Settings, line: Settings) -> Option<Settings> {
    fn keep<T: PartialEq>(chosen: &mut Vec<T>, own: Option<&Vec<T>>) -> bool {
        chosen.retain(|value| own.is_none_or(|own| own.contains(value)));
        !chosen.is_empty()
    }
    let mut flags = flags.clone();
    let has_cells = [
        flags.len.as_mut().is_none_or(|list| keep(&mut list.0, line.len.as_ref().map(|own| &own.0))),
        flags.batch.as_mut().is_none_or(|list| keep(&mut list.0, line.batch.as_ref().map(|own| &own.0))),
        flags.seeds.as_mut().is_none_or(|list| keep(&mut list.0, line.seeds.as_ref().map(|own| &own.0))),
        flags.mode.as_mut().is_none_or(|list| keep(&mut list.0, line.mode.as_ref().map(|own| &own.0))),
    ];
    has_cells.iter().all(|has| *has).then(|| flags.overriding(line))
}

/// Length, batch size, pass and seed of a cell that is measured.
pub type Point = (u64, u64, Pass, u64);

/// The cells that `cell` makes at every place of the lines of `grid`: by length, batch size and pass, so that those that take
/// turns stand together; mechanisms keep their order.
pub fn cells_by_place(
    grid: &Grid,
    cell: impl Fn(&GridEntry, Point) -> Result<Option<Cell>, PlanError>,
) -> Result<Vec<Cell>, PlanError> {
    let mut cells = Vec::new();
    for pick in &grid.entries {
        for place in points(&pick.settings) {
            cells.extend(cell(pick, place)?.map(|cell| (place, cell)));
        }
    }
    cells.sort_by_key(|(place, _)| *place); // stable
    Ok(cells.into_iter().map(|(_, cell)| cell).collect())
}

/// Every combination of the grid's lists.
fn points(settings: &Settings) -> Vec<Point> {
    let lens = settings.len.as_ref().map_or(&[][..], |list| &list.0);
    let batches = settings.batch.as_ref().map_or(&[][..], |list| &list.0);
    let modes = settings.mode.as_ref().map_or(&[][..], |list| &list.0);
    let seeds = settings.seeds.as_ref().map_or(&[][..], |list| &list.0);
    let mut points = Vec::new();
    for &len in lens {
        for &batch in batches {
            for &pass in modes {
                points.extend(seeds.iter().map(|&seed| (len, batch, pass, seed)));
            }
        }
    }
    points
}

/// The tasks of `grid`: those of its lines, in order.
pub fn tasks(grid: &Grid) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for task in
        grid.entries.iter().filter_map(|pick| pick.settings.task.as_ref()).flat_map(|Words(list)| list)
    {
        if !all.contains(task) {
            all.push(task.clone());
        }
    }
    all
}

/// The different values that the rows of `plan` have, in order.
pub fn listed<T: ToString>(plan: &Plan, of: impl Fn(&Row) -> Option<T>) -> String {
    let mut all: Vec<String> = Vec::new();
    for value in plan.cells.iter().filter_map(|cell| of(&cell.row)).map(|value| value.to_string()) {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all.join(",")
}

#[cfg(test)]
mod tests;
