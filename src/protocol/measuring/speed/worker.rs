//! The worker's side of a cell.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::SpeedRequest;
use crate::protocol::definition::WorkerInput;
use crate::protocol::measuring::step::MeasuredStep;
use crate::run::outcome::CellFailure;
use crate::run::worker::ParentLink;
use effattn_kernel::cpu::rates::{Rates, rates};
use effattn_kernel::device::machine::Resident;
use effattn_kernel::profile::{self, Product, Spent};
use effattn_record::config::settings::{DeviceName, KernelName};

/// What the parent asks of a worker that is warm.
#[derive(Debug, Serialize, Deserialize)]
pub struct TurnRequest {
    /// Step for so many seconds,
    pub seconds: f64,
    /// at most so many times.
    pub runs: u64,
    /// Time operations instead of steps.
    pub profile: bool,
}

/// The answer when it is warm and after a turn.
#[derive(Debug, Serialize, Deserialize)]
pub struct Stepped {
    /// Seconds of every step of the turn; empty when warm.
    pub seconds: Vec<f64>,
    /// Highest live bytes so far, where they are counted.
    pub peak_bytes: Option<u64>,
    /// Bytes that the process holds and may reach again.
    pub held_bytes: u64,
    /// The products of a step and how often it makes each; when warm.
    pub products: Vec<(Product, u64)>,
}

/// The answer where operations were timed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Profiled {
    /// How many steps were made.
    pub steps: u64,
    /// Their seconds, operation by operation.
    pub spent: Vec<Spent>,
    /// What this machine reaches at most.
    pub rates: Rates,
}

/// Builds, warms up, and steps whenever it is its turn, until the parent closes the pipe or something fails.
pub fn work(link: &ParentLink, request: Value, given: &WorkerInput) -> anyhow::Result<()> {
    let request: SpeedRequest = serde_json::from_value(request)?;
    let (mut step, products) = match warm(&request, given.text) {
        Ok(warm) => warm,
        Err(failure) => return Ok(link.send(&Err::<(), _>(failure))?),
    };
    let mut resident = Resident::default();
    let mut answer = |step: &MeasuredStep, seconds: Vec<f64>, products: Vec<(Product, u64)>| {
        let peak_bytes = step.peak_bytes();
        let held_bytes = peak_bytes.unwrap_or(0).max(resident.own());
        Stepped { seconds, peak_bytes, held_bytes, products }
    };
    link.send(&Ok::<_, CellFailure>(answer(&step, Vec::new(), products)))?;
    while let Some(turn) = link.next::<TurnRequest>()? {
        let failed = if turn.profile {
            let profiled = profile(&mut step, &turn);
            link.send(&profiled)?;
            profiled.is_err()
        } else {
            let stepped = steps(&mut step, &turn).map(|seconds| answer(&step, seconds, Vec::new()));
            link.send(&stepped)?;
            stepped.is_err()
        };
        if failed {
            break;
        }
    }
    Ok(())
}

/// The model after its warm-up, and the products of a step: counted in the first one, where the kernels of this crate compute
/// them on the processor.
fn warm(request: &SpeedRequest, text: &[u8]) -> Result<(MeasuredStep, Vec<(Product, u64)>), CellFailure> {
    profile::reserve_products();
    let mut step = MeasuredStep::open(&request.spec, text)?;
    step.reset_peak();
    let start = Instant::now();
    let (first, products) = profile::products(|| step.step());
    first?;
    for _ in 1..request.measure.warmup {
        if start.elapsed().as_secs_f64() >= request.measure.max_time {
            break;
        }
        step.step()?;
    }
    let counted = (request.spec.device, request.spec.kernel) == (DeviceName::Cpu, KernelName::Fused);
    Ok((step, if counted { products } else { Vec::new() }))
}

/// Steps as [`steps`], each operation timed.
fn profile(step: &mut MeasuredStep, turn: &TurnRequest) -> Result<Profiled, CellFailure> {
    let device = step.device().clone();
    let (seconds, spent) = profile::record(&device, || steps(step, turn));
    Ok(Profiled { steps: seconds?.len() as u64, spent, rates: rates() })
}

fn steps(step: &mut MeasuredStep, turn: &TurnRequest) -> Result<Vec<f64>, CellFailure> {
    let start = Instant::now();
    let mut seconds = Vec::new();
    while seconds.is_empty()
        || (start.elapsed().as_secs_f64() < turn.seconds && seconds.len() < turn.runs as usize)
    {
        seconds.push(step.step()?);
    }
    Ok(seconds)
}
