//! What the commands that train share: flags, the run itself, and learning curves drawn while it goes on.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::export::Exports;
use super::grid::Place;
use super::{data_dir, finish, start};
use crate::config::units::{Bytes, Seconds};
use crate::protocol::grid::Grid;
use crate::protocol::training::{self, Curve, Job, conduct};
use crate::record::Row;
use crate::report::chart::{Evaluation, Learning, learning};
use crate::run::plan::Plan;
use crate::term::{Term, clock};
use crate::train::session::{Point, Score};

/// Flags of every command that trains.
#[derive(clap::Args)]
pub struct Flags {
    /// Training steps (charlm: updates per phase), instead of the protocol's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Budget")]
    pub steps: Option<u64>,
    /// Peak, base or first learning rate, instead of the protocol's
    #[arg(long, value_name = "RATE", value_parser = rate, help_heading = "Budget")]
    pub rate: Option<f64>,
    /// Use data that are incomplete; rows say so
    #[arg(long, help_heading = "Data")]
    pub allow_partial: bool,
    /// Time between checkpoints: what a kill can cost
    #[arg(long, value_name = "TIME", default_value = "10s", help_heading = "Output")]
    save_every: Seconds,
    /// Look for NaN and infinity behind every operation, also backward; slower. Without it the step that fails is
    /// computed again to name the operation
    #[arg(long, help_heading = "Machine")]
    detect_anomaly: bool,
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub exports: Exports,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 10.0 => Ok(rate),
        _ => Err("expected a number above 0 and up to 10, such as 1e-4".to_owned()),
    }
}

impl Flags {
    /// Where data are.
    pub fn data_dir(&self) -> PathBuf {
        self.place.data_dir.clone().unwrap_or_else(data_dir::default_dir)
    }

    /// Trains what is left of `plan`, shows it, and ends the command.
    ///
    /// # Errors
    /// A run that cannot be opened, written or continued.
    pub fn run<J: Job>(
        &self,
        (plan, jobs): (&Plan, &[Option<J>]),
        ready: &start::Ready,
        grid: &Grid,
        curves: &Curves,
        term: Term,
    ) -> Result<u8> {
        let mut session = start::session(plan, &self.place, ready, None, term)?;
        let left = plan.cells.iter().filter(|cell| !session.is_done(cell)).map(|cell| cell.seconds).sum();
        let count = plan.cells.len() - session.finished();
        let runs = if count == 1 { "run" } else { "runs" };
        session.term.say(&format!("{count} {runs}, about {} to {}", clock(left), session.path().display()));
        session.term.begin(plan.seconds());
        let folder = (!self.place.no_plot).then_some(&self.place.plots_dir);
        let place = training::Place {
            folder: PathBuf::new(),
            data: self.data_dir(),
            planned: plan.data.clone(),
            save: self.save_every.0,
            detect_anomaly: self.detect_anomaly,
        };
        let result = conduct(plan, jobs, &place, &mut session, |all| {
            folder.into_iter().for_each(|folder| curves.draw(all, folder));
        });
        finish::finish(session, result, grid.suite.as_ref(), &self.place, &self.exports)
    }
}

/// The different values that the rows of `plan` have, in order.
pub fn listed<T: ToString>(plan: &Plan, of: impl Fn(&Row) -> Option<T>) -> String {
    let mut all: Vec<String> =
        plan.cells.iter().filter_map(|cell| of(&cell.row)).map(|x| x.to_string()).collect();
    all.dedup();
    all.join(",")
}

/// `effattn lra · listops · ls-lra · 5000 steps · batch 32 · length 2048 · cpu · f32 · 2 threads · limit 20 GiB`.
pub fn header(plan: &Plan, amount: &str, limit: u64) -> String {
    let dtype = listed(plan, |row| Some(row.dtype.clone()));
    format!(
        "effattn {} · {} · {} · {amount} · {} · {dtype} · {} threads · limit {}",
        plan.command,
        listed(plan, |row| row.task.clone()),
        listed(plan, |row| row.preset.clone()),
        plan.device,
        plan.threads,
        Bytes(limit)
    )
}

/// What is said of data that are not whole.
pub fn incomplete(task: &str, remark: &str) -> String {
    format!("{task}: incomplete data ({remark}); rows say which share of the protocol it is")
}

/// What a command calls its curves.
pub struct Curves {
    /// Command: the charts' prefix.
    pub command: &'static str,
    /// Axis of what is shown of an evaluation.
    pub measure: &'static str,
    /// That number, from the evaluation.
    pub value: fn(&Score) -> f64,
}

impl Curves {
    /// Draws the curves of the group that is being trained. A chart that cannot be written does not end a run.
    fn draw(&self, all: &[Curve], folder: &Path) {
        if let Err(error) = self.write(all, folder) {
            log::warn!("the learning curve was not drawn: {error}");
        }
    }

    fn write(&self, all: &[Curve], folder: &Path) -> std::io::Result<()> {
        let Some(group) = all.last().map(|curve| curve.group.as_str()) else { return Ok(()) };
        let here = all.iter().filter(|curve| curve.group == group);
        let points = |curve: &Curve| {
            let point = |point: &Point| Evaluation {
                step: point.step as f64,
                train_loss: point.train_loss,
                loss: point.score.loss,
                value: (self.value)(&point.score),
            };
            curve.points.iter().map(point).collect()
        };
        let lines: Vec<Learning> =
            here.map(|curve| Learning { label: curve.label.clone(), points: points(curve) }).collect();
        let (name, title) = (format!("{}-{group}-curves", self.command), format!("Learning {group}"));
        if let Some(chart) = learning(&name, &title, self.measure, &lines)? {
            chart.write(folder)?;
        }
        Ok(())
    }
}
