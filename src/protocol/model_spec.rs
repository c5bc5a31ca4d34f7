//! What a cell's model is: mechanism, preset, sizes, length, batch, pass, seed, and how it is computed.

use serde::{Deserialize, Serialize};

use super::grid::{GridEntry, PlanError};
use effattn_kernel as kernel;
use effattn_kernel::KernelMode;
use effattn_kernel::cpu::matmul_format::{MatmulFormat, set_products};
use effattn_kernel::device::set_tf32;
use effattn_model::Family;
use effattn_model::attention::choose::{MechanismChoice, choose};
use effattn_model::family::causal::{self, CausalArchitecture};
use effattn_model::family::{self, Architecture, ModelRequest, ResolveError, SizeOverrides};
use effattn_record::config::lists::Layers;
use effattn_record::config::settings::{DeviceName, DtypeName, KernelName};
use effattn_record::{Pass, Row};

/// What a worker builds: everything that defines one model and its step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Mechanism and knobs, as on the command line.
    pub model: String,
    /// Preset.
    pub preset: String,
    /// Sizes instead of the preset's.
    pub sizes: SizeOverrides,
    /// Samples per step.
    pub batch: u64,
    /// Length.
    pub len: u64,
    /// Inference or training.
    pub pass: Pass,
    /// Seed of the weights and of where the text is cut.
    pub seed: u64,
    /// Where to compute.
    pub device: DeviceName,
    /// Number format.
    pub dtype: DtypeName,
    /// Fused kernels or plain operations.
    pub kernel: KernelName,
}

/// Why a number format cannot be had, with what to do instead.
fn unsupported_dtype(dtype: DtypeName, kernel: KernelName, device: DeviceName) -> Option<String> {
    let bf16 = "bf16 means products of bf16 operands in the fused kernels of the CPU and of CUDA";
    match dtype {
        DtypeName::F32 => None,
        DtypeName::Tf32 if !matches!(device, DeviceName::Cuda(_)) => {
            Some(format!("--dtype tf32: {device} has no TF32; it is a format of CUDA devices"))
        }
        DtypeName::Bf16 if kernel != KernelName::Fused => {
            Some(format!("--dtype bf16: {bf16}; leave --kernel {kernel} out, or the number format"))
        }
        DtypeName::Bf16 if device == DeviceName::Metal => {
            Some(format!("--dtype bf16: {bf16}; leave --device {device} out, or the number format"))
        }
        DtypeName::Bf16 | DtypeName::Tf32 => None,
    }
}

/// Makes this thread (as to the number format of products: this process) compute as a cell asks.
pub fn compute_as(kernel: KernelName, dtype: DtypeName) {
    kernel::set_mode(match kernel {
        KernelName::Fused => KernelMode::Fused,
        KernelName::Composed => KernelMode::Composed,
    });
    set_products(match dtype {
        DtypeName::F32 | DtypeName::Tf32 => MatmulFormat::F32,
        DtypeName::Bf16 => MatmulFormat::Bf16,
    });
    set_tf32(dtype == DtypeName::Tf32);
}

/// The model that `resolve` finds for the mechanism of `pick`, or why its row says `unsupported`.
pub fn resolve_or_unsupported<T>(
    pick: &GridEntry,
    resolve: impl FnOnce(&MechanismChoice) -> Result<T, ResolveError>,
) -> Result<(Option<T>, Option<String>), PlanError> {
    let choice = match &pick.choice {
        Ok(choice) => choice,
        Err(reason) => return Ok((None, Some(reason.clone()))),
    };
    match resolve(choice) {
        Ok(resolved) => Ok((Some(resolved), None)),
        Err(ResolveError::Unsupported(reason)) => Ok((None, Some(reason))),
        Err(ResolveError::Invalid(reason)) => Err(PlanError(reason)),
    }
}

impl ModelSpec {
    /// The specification of one cell.
    pub fn new(pick: &GridEntry, len: u64, batch: u64, pass: Pass, seed: u64) -> Result<Self, PlanError> {
        let settings = &pick.settings;
        if let Some(layers @ Layers::Each(_)) = &settings.layers {
            return Err(PlanError(format!(
                "--layers {layers}: only recall takes a list of layers; give their number"
            )));
        }
        let preset = settings.preset.clone().unwrap_or_else(|| "lra-repo".to_owned());
        let label = |choice: &MechanismChoice| choice.label_under(&family::knobs_of(&preset));
        let label = pick.choice.as_ref().map_or_else(|_| pick.model.clone(), label);
        let dtype = settings.dtype.unwrap_or_default();
        let (device, kernel) = (settings.device.unwrap_or_default(), settings.kernel.unwrap_or_default());
        if let Some(reason) = unsupported_dtype(dtype, kernel, device) {
            return Err(PlanError(reason));
        }
        Ok(Self {
            model: label,
            preset,
            sizes: SizeOverrides::of(settings),
            batch,
            len,
            pass,
            seed,
            device,
            dtype,
            kernel,
        })
    }

    /// The mechanism that it names.
    pub fn choice(&self) -> Result<MechanismChoice, ResolveError> {
        let models = self.model.parse().map_err(ResolveError::wrong)?;
        let mut choices = choose(&models).map_err(ResolveError::wrong)?;
        match (choices.pop(), choices.is_empty()) {
            (Some(choice), true) => Ok(choice),
            _ => Err(ResolveError::wrong("one mechanism is built at a time")),
        }
    }

    /// Its request for a model around `choice`, to be completed with what a protocol knows besides.
    pub fn model_request<'a>(&'a self, choice: &'a MechanismChoice) -> ModelRequest<'a> {
        ModelRequest {
            len: Some(self.len as usize),
            cached: Some(self.len as usize),
            ..ModelRequest::new(&self.preset, choice, &self.sizes)
        }
    }

    /// The model that is measured.
    pub fn resolve_measured(&self, choice: &MechanismChoice) -> Result<Box<dyn Architecture>, ResolveError> {
        // one token after another begins without cached positions
        let cached = Some(if self.pass == Pass::Decode { 0 } else { self.len as usize });
        let request = ModelRequest { cached, ..self.model_request(choice) };
        let resolved = family::resolve(&family::families(), &request)?;
        let all = u128::from(resolved.flops(self.len as usize)) * u128::from(self.batch);
        let core = u128::from(resolved.core_macs(1, self.len as usize)) * u128::from(self.batch);
        if all.max(core) >= 1 << 62 {
            return Err(ResolveError::Unsupported(format!(
                "{} samples of length {} are more than can be counted; choose smaller sizes",
                self.batch, self.len
            )));
        }
        Ok(resolved)
    }

    /// The model that predicts the next of `vocab` ids, for segments behind as many cached positions.
    pub fn resolve_causal(
        &self,
        choice: &MechanismChoice,
        vocab: usize,
    ) -> Result<Box<dyn CausalArchitecture>, ResolveError> {
        causal::resolve(&ModelRequest { vocab: Some(vocab), ..self.model_request(choice) })
    }

    /// The row of this cell with everything that is known without running it.
    pub fn row(&self, protocol: &str, threads: usize, resolved: Option<&dyn Architecture>) -> Row {
        let (model, variant) = match self.model.split_once(':') {
            Some((model, variant)) => (model, Some(variant.to_owned())),
            None => (self.model.as_str(), None),
        };
        let family = family::serving(&family::families(), &self.preset, None);
        let mut row = Row {
            task: family.ok().map(|family: &Family| family.sample.to_owned()),
            variant,
            preset: Some(self.preset.clone()),
            device: self.device.to_string(),
            dtype: self.dtype.to_string(),
            kernel: self.kernel.to_string(),
            threads: Some(threads as u64),
            batch: Some(self.batch),
            len: Some(self.len),
            pass: Some(self.pass),
            seed: Some(self.seed),
            ..Row::new(protocol, model)
        };
        if let Some(resolved) = resolved {
            let len = self.len as usize;
            let flops = resolved.flops(len);
            if self.pass != Pass::Decode {
                row.flops = Some(flops);
                row.flops_2x = Some(2 * flops);
                row.core_macs = Some(resolved.core_macs(self.batch as usize, len));
            }
            let state: u64 = resolved.stages(1, len).iter().map(|stage| stage.state_bytes).sum();
            row.state_bytes = Some(state).filter(|bytes| *bytes > 0);
            row.params = resolved.parameters().ok().map(|count| count as u64);
            let copies = if self.pass == Pass::Train { 3 } else { 1 }; // weights, and AdamW's two moments
            row.bytes = row.params.map(|count| 4 * copies * count);
            row.simulated = Some(false);
        }
        row
    }

    /// The same model as it usually is: the preset called `preset`, its sizes, f32 on the fused kernels of the CPU.
    #[must_use]
    pub fn default_spec(&self, preset: &str) -> Self {
        let (device, dtype, kernel) = Default::default();
        Self {
            preset: preset.to_owned(),
            sizes: SizeOverrides::default(),
            device,
            dtype,
            kernel,
            ..self.clone()
        }
    }

    /// Name of the cell within its plan.
    pub fn key(&self) -> String {
        format!("{} n{} b{} {} s{}", self.model, self.len, self.batch, self.pass, self.seed)
    }

    /// Multiply-adds of one step on samples of `flops` each, roughly: backward costs two forwards.
    pub fn step_flops(&self, flops: u64) -> f64 {
        let passes = if self.pass == Pass::Train { 3.0 } else { 1.0 };
        passes * flops as f64 * self.batch as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_kernel::device::rng::RngStream;
    use effattn_model::attention;
    use effattn_record::config::lists::{MAX_BATCH, MAX_LEN};

    /// One size of a model, and its bound.
    type Axis = (u64, fn(&mut ModelSpec) -> &mut u64);

    /// Sizes grow two-fold until a model is refused. What is counted of those that are not grows with them, and never to
    /// where twofold sizes, which count at most four times as much, could wrap around.
    #[test]
    fn costs_grow_with_every_size_until_they_are_refused() {
        const AXES: [Axis; 5] = [
            (MAX_LEN, |spec| &mut spec.len),
            (MAX_BATCH, |spec| &mut spec.batch),
            (1 << 12, |spec| spec.sizes.layers.get_or_insert(1)),
            (1 << 16, |spec| spec.sizes.width.get_or_insert(16)),
            (1 << 20, |spec| spec.sizes.ffn.get_or_insert(16)),
        ];
        let (mut counted, mut refused) = (0, 0);
        for preset in family::presets(&family::families()) {
            let mut random = RngStream::new(18, preset.name);
            for entry in attention::TABLE {
                let mut spec = ModelSpec {
                    model: entry.name.to_owned(),
                    preset: preset.name.to_owned(),
                    sizes: SizeOverrides {
                        layers: Some(1),
                        width: Some(16),
                        heads: Some(2),
                        ffn: Some(16),
                        ..SizeOverrides::default()
                    },
                    batch: 1,
                    len: 64,
                    pass: Pass::Infer,
                    seed: 0,
                    device: DeviceName::Cpu,
                    dtype: DtypeName::F32,
                    kernel: KernelName::Fused,
                };
                let mut before = [0; 2];
                for _ in 0..70 {
                    let (most, size) = AXES[random.below(AXES.len())];
                    *size(&mut spec) = (2 * *size(&mut spec)).min(most);
                    let choice = spec.choice().unwrap();
                    let resolved = match spec.resolve_measured(&choice) {
                        Ok(resolved) => resolved,
                        Err(error) if error.to_string().contains("more than can be counted") => {
                            refused += 1;
                            break;
                        }
                        Err(_) => break, // a mechanism that this preset or size has no form of
                    };
                    let len = spec.len as usize;
                    let now = [resolved.flops(len), resolved.core_macs(spec.batch as usize, len)];
                    let grows =
                        now.iter().zip(before).all(|(now, before)| *now >= before / 10 * 7 && *now < 1 << 62);
                    assert!(grows, "{spec:?}: {before:?}, then {now:?}");
                    (before, counted) = (now, counted + 1);
                }
            }
        }
        assert!(counted > 3000 && refused > 30, "{counted} models were counted, {refused} refused");
    }
}
