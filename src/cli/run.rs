//! The way of every protocol's command: plan, dry run or session, runner, tables.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use clap::ArgMatches;

use super::command::CommandArgs;
use super::curves::draw;
use super::open_run::{OpenRun, RunStart};
use super::{dry_run, finish, open_run};
use crate::protocol::Protocol;
use crate::protocol::runner::Runner;
use crate::term::Term;
use effattn_record::file;
use effattn_record::report::reference::{self, Reference};

/// Runs the command of `protocol`.
pub fn run(protocol: &'static dyn Protocol, matches: &ArgMatches, term: Term) -> Result<u8> {
    let asked = CommandArgs::from_matches(protocol, matches)?;
    if let (Some(values), Some(instead)) = (&asked.alternative, &protocol.info().alternative) {
        let flags = &asked.flags;
        let said = [
            ("model", flags.model.is_some()),
            ("exclude", flags.exclude.is_some()),
            ("suite", flags.suite.is_some()),
            ("quick", flags.quick),
            ("set", !flags.set.set_keys().is_empty()),
        ];
        if let Some((flag, _)) = said.iter().find(|(_, said)| *said) {
            anyhow::bail!("--{flag} says nothing about a model that is stored; leave --{flag} out");
        }
        (instead.run)(values, &asked.flags.settings, &mut std::io::stdout().lock())?;
        return Ok(0);
    }
    let references = references(&asked.reference)?;
    let open = match open_run::open_run(&asked, &references, term)? {
        RunStart::DryRun(dry) => return dry_run::print_plan(&dry.plan, &asked.exports, &dry.term),
        RunStart::Open(open) => *open,
    };
    let OpenRun { plan, suite, mut session, context } = open;
    let folder = (!asked.output.no_plot).then_some(asked.output.plots_dir.as_path());
    let mut charts = BTreeSet::new();
    let mut draw = |curves: &[_]| charts.extend(draw(asked.protocol, curves, folder));
    let result = Runner::new(asked.protocol, &plan, &mut session, context, &mut draw).run();
    finish::finish(session, result, suite.as_ref(), &asked, &charts)
}

fn references(paths: &[std::path::PathBuf]) -> Result<Vec<Reference>> {
    let mut all = Vec::new();
    for path in paths {
        let name = || format!("--reference {}", path.display());
        let text = file::read_to_string(path).with_context(name)?;
        let mut here = reference::parse(&text).with_context(name)?;
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        for one in here.iter_mut().filter(|one| paths.len() > 1 && one.program.is_none()) {
            one.program.clone_from(&stem); // else several files would be taken for one program
        }
        all.extend(here);
    }
    Ok(all)
}
