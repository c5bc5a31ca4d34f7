//! A [`TrainingProtocol`]: what one protocol that trains does otherwise than the others.

use serde_json::Value;

use super::TrainingRequest;
use super::estimate::estimate;
use super::parent::compute;
use crate::protocol::cell_runner::CellRunner;
use crate::protocol::curve::CurveSpec;
use crate::protocol::definition::{
    DataDirs, EstimateContext, Prepared, Protocol, ProtocolInfo, ResultView, WorkerInput,
};
use crate::protocol::grid::{Grid, GridDefaults, GridFlags, PlanError};
use crate::run::RunError;
use crate::run::plan::{Cell, Plan};
use crate::run::worker::ParentLink;

/// A protocol whose cells are training runs.
pub trait TrainingProtocol: Sync {
    /// What the worker of a cell is asked.
    type Request: TrainingRequest;

    /// Its command.
    const INFO: ProtocolInfo;
    /// Learning curves.
    const CURVE: CurveSpec;

    /// See [`Protocol::defaults`].
    fn defaults(&self, flags: &GridFlags) -> GridDefaults;

    /// See [`Protocol::cells`].
    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError>;

    /// See [`Protocol::prepare`].
    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared>;

    /// See [`Protocol::summary`].
    fn summary(&self, plan: &Plan) -> String;

    /// See [`Protocol::same_group`].
    fn same_group(&self, _: &Cell, _: &Cell) -> bool {
        false
    }

    /// See [`Protocol::compute`].
    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        compute::<Self::Request>(runner, open, Self::CURVE)
    }

    /// See [`Protocol::work`].
    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()>;
}

impl<T: TrainingProtocol> Protocol for T {
    fn info(&self) -> &'static ProtocolInfo {
        const { &T::INFO }
    }

    fn defaults(&self, flags: &GridFlags) -> GridDefaults {
        TrainingProtocol::defaults(self, flags)
    }

    fn cells(&self, grid: &Grid, threads: usize) -> Result<Vec<Cell>, PlanError> {
        TrainingProtocol::cells(self, grid, threads)
    }

    fn prepare(&self, plan: &mut Plan, dirs: &DataDirs) -> anyhow::Result<Prepared> {
        TrainingProtocol::prepare(self, plan, dirs)
    }

    fn summary(&self, plan: &Plan) -> String {
        TrainingProtocol::summary(self, plan)
    }

    fn estimate(&self, plan: &mut Plan, context: &EstimateContext) -> Result<(), RunError> {
        estimate::<T::Request>(plan, context)
    }

    fn same_group(&self, a: &Cell, b: &Cell) -> bool {
        TrainingProtocol::same_group(self, a, b)
    }

    fn compute(&self, runner: &mut CellRunner, open: &[usize]) -> Result<(), RunError> {
        TrainingProtocol::compute(self, runner, open)
    }

    fn work(&self, link: &ParentLink, request: Value, input: &WorkerInput) -> anyhow::Result<()> {
        TrainingProtocol::work(self, link, request, input)
    }

    fn view(&self) -> ResultView {
        ResultView::Trained
    }

    fn curve(&self) -> Option<CurveSpec> {
        Some(T::CURVE)
    }
}
