use super::*;
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::definition::{ProtocolInfo, WorkerInput};
use crate::protocol::measuring::Speed;
use crate::protocol::robustness::Robustness;
use crate::protocol::vision::Vision;
use crate::protocol::{Protocol, resolve};
use crate::run::RunError;
use crate::run::worker::ParentLink;
use effattn_record::Outcome;
use effattn_record::config::lists::Lengths;
use serde_json::Value;

/// The settings of `speed` with two mechanisms.
struct Two;

impl Protocol for Two {
    fn info(&self) -> &'static ProtocolInfo {
        Speed.info()
    }

    fn defaults(&self, _: &GridFlags) -> GridDefaults {
        GridDefaults { settings: Settings::NONE, models: "full,ls:w=16" }
    }

    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        Speed.cells(grid, threads)
    }

    fn summary(&self, plan: &Plan) -> String {
        Speed.summary(plan)
    }

    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        Speed.compute(runner, open)
    }

    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        Speed.work(link, request, input)
    }
}

fn labels(flags: GridFlags) -> Result<Vec<String>, String> {
    let grid = resolve(&flags, &Two).map_err(|error| error.to_string())?;
    Ok(grid.entries.into_iter().map(|pick| pick.label).collect())
}

fn models(text: &str) -> Option<Models> {
    Some(text.parse().unwrap())
}

fn table5() -> GridFlags {
    GridFlags { suite: Some("cos-table5".to_owned()), ..GridFlags::default() }
}

#[test]
fn defaults_flags_and_exclusions() {
    assert_eq!(labels(GridFlags::default()).unwrap(), ["full", "ls:w=16"]);
    let flags = GridFlags { model: models("ls*,full"), exclude: models("full"), ..GridFlags::default() };
    assert_eq!(labels(flags).unwrap(), ["ls", "ls2d"]);
    let flags = GridFlags { exclude: models("ls:w=16"), ..GridFlags::default() };
    assert_eq!(labels(flags).unwrap(), ["full"]);
    assert!(
        labels(GridFlags { exclude: models("dp"), ..GridFlags::default() }).unwrap_err().contains("nothing")
    );
    assert!(labels(GridFlags { exclude: models("*"), ..GridFlags::default() }).unwrap_err().contains("left"));
}

#[test]
fn a_suite_brings_rows_and_published_numbers() {
    let grid = resolve(&table5(), &Two).unwrap();
    assert_eq!(grid.entries.len(), 12);
    let full = &grid.entries[0];
    assert_eq!(full.label, "Transformer");
    let at = |pass, len| full.published("steps_per_second", pass, len);
    assert_eq!(at(Pass::Infer, 2048), Some(Published::Value(7.83)));
    assert_eq!(at(Pass::Train, 3072), Some(Published::Outcome(Outcome::Oom)));
    assert_eq!(at(Pass::Train, 512), None);
    assert_eq!(full.published("loss", Pass::Train, 1024), None);
}

#[test]
fn flags_narrow_a_suite_and_set_overrides_it() {
    let settings = |text: &str| toml::from_str::<Settings>(text).unwrap();
    let flags = GridFlags {
        settings: settings("len = [2048]\nruns = 3"),
        model: models("cosFormer,full"),
        ..table5()
    };
    let grid = resolve(&flags, &Two).unwrap();
    assert_eq!(grid.entries.len(), 2);
    assert_eq!(grid.entries[0].settings.len, Some(Lengths(vec![2048])));
    assert_eq!((grid.entries[0].settings.runs, grid.entries[0].settings.min_runs), (Some(3), Some(3)));
    let error = labels(GridFlags { settings: settings("len = 512"), ..table5() }).unwrap_err();
    assert!(error.contains("has no len 512") && error.contains("--set len=512"), "{error}");
    let grid = resolve(&GridFlags { set: settings("len = 512"), ..table5() }, &Two).unwrap();
    assert_eq!(grid.entries[0].settings.len, Some(Lengths(vec![512])));
    assert!(labels(GridFlags { model: models("dp"), ..table5() }).unwrap_err().contains("has no row dp"));
}

#[test]
fn a_flag_chooses_among_the_lists_of_each_row() {
    let settings = |text: &str| toml::from_str::<Settings>(text).unwrap();
    let suite = |settings: Settings| GridFlags {
        suite: Some("ls-table5".to_owned()),
        settings,
        ..GridFlags::default()
    };
    let labels_at = |len: &str| labels(suite(settings(len))).unwrap();
    assert!(!labels_at("len = 224").contains(&"ViT-L".to_owned()), "which has 384 alone");
    assert_eq!(labels_at("len = 448"), ["CvT*-LS-21"]);
    let grid = resolve(&suite(settings("len = [224, 384]")), &Two).unwrap();
    let lens =
        |label: &str| grid.entries.iter().find(|pick| pick.label == label).unwrap().settings.len.clone();
    assert_eq!(lens("CvT*-LS-13"), Some(Lengths(vec![224])));
    assert_eq!(lens("CvT*-LS-21"), Some(Lengths(vec![224, 384])));
    let error = labels(suite(settings("len = 512"))).unwrap_err();
    assert!(error.contains("has no len 512; it has 224, 384, 448."), "{error}");
}

#[test]
fn a_preset_chooses_rows_that_have_it_and_replaces_others() {
    let of = |suite: &str, preset: &str| GridFlags {
        suite: Some(suite.to_owned()),
        settings: Settings { preset: Some(preset.to_owned()), ..Settings::NONE },
        ..GridFlags::default()
    };
    assert_eq!(labels(of("ls-table5", "vit-l")).unwrap(), ["ViT-L"]);
    let grid = resolve(&of("cos-table5", "ls-lra"), &Two).unwrap();
    assert!(grid.entries.len() > 5);
    assert!(grid.entries.iter().all(|pick| pick.settings.preset.as_deref() == Some("ls-lra")));
}

#[test]
fn a_suite_of_another_protocol_says_who_runs_it() {
    let error = resolve(&table5(), &crate::protocol::measuring::Memory).err().unwrap().to_string();
    assert_eq!(error, "suite cos-table5 is run by: effattn speed --suite cos-table5");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ok.toml").display().to_string();
    let told = |protocol: &str| {
        let head = format!("title = 't'\nprotocol = '{protocol}'\nsource = 's'");
        std::fs::write(&path, format!("{head}\n[[row]]\nlabel = 'a'\nmodel = 'ls'\n")).unwrap();
        labels(GridFlags { suite: Some(path.clone()), ..GridFlags::default() }).unwrap_err()
    };
    assert_eq!(told("lra"), format!("suite ok is run by: effattn lra --suite {path}"));
    let says = format!("suite {path}: unknown protocol \"sped\" (did you mean speed?); known: speed, memory");
    assert!(told("sped").starts_with(&says), "{}", told("sped"));
}

#[test]
fn numbers_for_other_tasks_of_a_row_go_along_with_its_cells() {
    let text = "title = \"t\"\nprotocol = \"robustness\"\nsource = \"s\"\n[base]\npreset = \"ls-lra\"\ntask = [\"text\"]\n[[row]]\n\
                label = \"a\"\nmodel = \"linformer\"\npublished = { metric = \"accuracy\", text = 1.0, text-deletion = 2.0 }\n";
    let of = |preset: Option<&str>| {
        let settings = Settings { preset: preset.map(str::to_owned), ..Settings::NONE };
        let flags = GridFlags { settings, ..GridFlags::default() };
        let suite = Suite::parse("x.toml", text).unwrap();
        let grid = crate::protocol::resolve_suite(&flags, Some(suite), &Robustness).unwrap();
        Protocol::cells(&Robustness, &grid, 1).unwrap().remove(0)
    };
    let cell = of(None);
    let number = |value| Some(Published::Value(value));
    let has = |cell: &Cell, task: &str| cell.published("accuracy", task).map(|beside| beside.published);
    assert_eq!((cell.row.published, has(&cell, "text-deletion")), (number(1.0), number(2.0)));
    assert_eq!(has(&cell, "text-other"), None);
    assert_eq!(has(&cell, "text-insertion"), number(55.94), "of the shipped suite");
    let other = of(Some("lra-repo"));
    assert_eq!(other.published("accuracy", "text-deletion"), None, "sizes of another preset");
    assert_eq!(other.row.differs.as_deref(), Some("sizes of lra-repo (ls-lra)"));
    let usual = text.replace("preset = \"ls-lra\"\n", "");
    let suite = Suite::parse("x.toml", &usual).unwrap();
    let grid = crate::protocol::resolve_suite(&GridFlags::default(), Some(suite), &Robustness).unwrap();
    let cell = Protocol::cells(&Robustness, &grid, 1).unwrap().remove(0);
    assert_eq!(has(&cell, "text-deletion"), number(2.0), "the usual preset");
}

#[test]
fn numbers_for_other_tasks_come_with_what_speaks_against_them() {
    let preset = Some("cvt-13".to_owned());
    let task = Some(Words(vec!["imagenet".into()]));
    let flags = GridFlags { settings: Settings { preset, task, ..Settings::NONE }, ..GridFlags::default() };
    let grid = crate::protocol::resolve(&flags, &Vision).unwrap();
    let cell = Protocol::cells(&Vision, &grid, 1).unwrap().remove(0);
    let beside = cell.published("accuracy", "imagenet-real").unwrap();
    assert_eq!(beside.published, Published::Value(86.7));
    assert!(beside.foreign.iter().any(|words| words.contains("official CvT")), "{beside:?}");
}

#[test]
fn a_suite_that_is_run_as_it_stands_differs_in_nothing() {
    let cells = |base: &str, said: Settings| {
        let text = format!(
            "title = \"t\"\nprotocol = \"speed\"\nsource = \"s\"\n[base]\nlen = [64]\n{base}\n[[row]]\nlabel = \"a\"\nmodel = \"full\"\n"
        );
        let flags = GridFlags { settings: said, ..GridFlags::default() };
        let grid =
            crate::protocol::resolve_suite(&flags, Some(Suite::parse("x.toml", &text).unwrap()), &Speed)
                .unwrap();
        Protocol::cells(&Speed, &grid, 1).unwrap()
    };
    for base in ["runs = 2", "min_runs = 2000", "runs = 50\nmin_runs = 5"] {
        assert!(cells(base, Settings::NONE).iter().all(|cell| cell.row.differs.is_none()), "{base}");
    }
    let typed = Settings { min_runs: Some(3), ..Settings::NONE };
    let cell = cells("runs = 2\nmin_runs = 1", typed).remove(0);
    assert_eq!(cell.row.differs.as_deref(), Some("min runs 3 (1); runs 3 (2)"));
}
