//! Golden files of images (`SPEC-vision.md` section 1): attention over grids, whole models, and the measures of the
//! tables and figures. Their leaves are inputs and weights alike.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::whole::{Checked, Computed, size, weights_and_states};
use super::{CheckError, FileVerdict, Golden};
use effattn_kernel::conv::ConvGeometry;
use effattn_kernel::heads::split;
use effattn_kernel::linear::linear;
use effattn_model::attention::ls2d::{LongShort2d, LongShort2dConfig, Names};
use effattn_model::nn::params::{Init, ParamBuilder};
use effattn_model::vision::cvt::{self, Cvt, CvtConfig};
use effattn_model::vision::resnet::{ResNet, ResNetConfig};
use effattn_model::vision::similarity::{corruption_error, patch_cosine};
use effattn_model::vision::vil::{self, Vil, VilConfig, full_2d};
use effattn_model::vision::vit::{Vit, VitConfig};
use effattn_model::vision::{ClassifierOutput, Flops, ForwardOptions};
use effattn_record::pattern::Grid2d;

/// One file with the builder of its leaves.
struct Case<'a> {
    golden: &'a Golden,
    builder: ParamBuilder,
    device: &'a Device,
}

/// Largest number in the config of a file: no product of so large sizes wraps around.
const LARGEST: u64 = 512;

/// The largest whole number in `value`.
fn largest(value: &Value) -> u64 {
    match value {
        Value::Number(number) => number.as_u64().unwrap_or(0),
        Value::Array(all) => all.iter().map(largest).max().unwrap_or(0),
        Value::Object(all) => all.values().map(largest).max().unwrap_or(0),
        _ => 0,
    }
}

/// Checks one file.
pub(super) fn check(golden: &Golden, device: &Device) -> Checked<FileVerdict> {
    let found = golden.config.values().map(largest).max().unwrap_or(0);
    if found > LARGEST {
        return Err(golden.wrong(format!("its config has {found}; a file of images has at most {LARGEST}")));
    }
    let case = Case { golden, builder: weights_and_states(golden, device)?, device };
    let (mut computed, flops) = match golden.meta("mechanism") {
        "ls2d" => case.long_short()?,
        "full2d" => case.full()?,
        "vil-ls" => case.vil()?,
        "cvt" => case.cvt()?,
        "vit" => case.vit()?,
        "resnet" => case.resnet()?,
        "patch-cosine" => case.patch_cosine()?,
        "mce" => case.mce()?,
        other => {
            let (file, mechanism) = (golden.file.clone(), other.to_owned());
            return Err(CheckError::UnknownMechanism { file, mechanism });
        }
    };
    case.gradients(&mut computed).map_err(|error| golden.refused(error))?;
    let mut verdict = computed.all(golden)?;
    let macs = flops.macs * golden.int("B").unwrap_or(1) as u64;
    if golden.meta("macs") != macs.to_string() {
        verdict.complain(format!("{macs} multiply-adds, expected {}", golden.meta("macs")));
    }
    Ok(verdict)
}

impl Case<'_> {
    fn leaf(&self, name: &str) -> Checked<Tensor> {
        let dims = self.golden.tensor(name)?.dims().to_vec();
        self.builder.param(name, &dims, Init::ZERO).map_err(|error| self.golden.refused(error))
    }

    fn run<T>(&self, f: impl FnOnce() -> Result<T>) -> Checked<T> {
        f().map_err(|error| self.golden.refused(error))
    }

    /// Gradients of sum(out grad_out) for every leaf.
    fn gradients(&self, computed: &mut Computed) -> Result<()> {
        let grad =
            self.golden.tensor("grad_out").map_err(candle_core::Error::wrap)?.to_device(self.device)?;
        let loss = (computed.get("out")? * grad)?.sum_all()?;
        computed.gradients(self.golden, &self.builder, &loss)
    }

    fn grid(&self) -> Checked<Grid2d> {
        Ok(Grid2d { rows: size(self.golden, "rows")?, cols: size(self.golden, "cols")? })
    }

    fn flag(&self, key: &str) -> bool {
        self.golden.config.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Refuses a config that cannot be built, and one of more work than any file asks for.
    fn affordable(&self, valid: std::result::Result<(), String>, macs: u64) -> Checked<()> {
        valid.map_err(|reason| self.golden.wrong(reason))?;
        self.golden.affordable(macs)
    }

    fn long_short(&self) -> Checked<(Computed, Flops)> {
        let golden = self.golden;
        let size = |key| size(golden, key);
        let (heads, g, r) = (size("H")?, size("g")?, size("r")?);
        let config = LongShort2dConfig {
            grid: self.grid()?,
            w: size("w")?,
            r,
            g,
            heads,
            width: heads * size("D")?,
            dual_ln: self.flag("dual_ln"),
            rel_pos: self.flag("rel_pos"),
        };
        self.affordable(config.validate(), config.macs())?;
        let qkv = [self.leaf("q")?, self.leaf("k")?, self.leaf("v")?];
        let scores = if r > 0 {
            let (x, weight, bias) = (self.leaf("x")?, self.leaf("dp.weight")?, self.leaf("dp.bias")?);
            Some(
                self.run(|| linear(&x.narrow(1, g, config.grid.len())?.contiguous()?, &weight, Some(&bias)))?,
            )
        } else {
            None
        };
        let names = Names { local: "ln_local", global: "ln_global", bias: "rel_bias" };
        let out = self.run(|| {
            let layer = LongShort2d::new(config, names, &self.builder)?;
            split(&layer.forward(qkv.each_ref(), scores.as_ref())?, config.heads)
        })?;
        Ok((Computed::of("out", out), Flops { macs: config.macs(), ..Flops::default() }))
    }

    fn full(&self) -> Checked<(Computed, Flops)> {
        let grid = self.grid()?;
        let qkv = [self.leaf("q")?, self.leaf("k")?, self.leaf("v")?];
        let table = self.leaf("rel_bias")?;
        let global = match size(self.golden, "g")? {
            0 => None,
            _ => Some((self.leaf("g2l_bias")?, self.leaf("g2g_bias")?)),
        };
        let global = global.as_ref().map(|(lines, corner)| (lines, corner));
        let out = self.run(|| full_2d(qkv.each_ref(), &table, global, grid))?;
        let n = size(self.golden, "N")?;
        let macs = 2 * n * n * size(self.golden, "H")? * size(self.golden, "D")?;
        Ok((Computed::of("out", out), Flops { macs: macs as u64, ..Flops::default() }))
    }

    /// Logits and Figure 6's values of every block.
    fn classified(&self, forward: impl FnOnce(&Tensor) -> Result<ClassifierOutput>) -> Checked<Computed> {
        let image = self.leaf("image")?;
        self.run(|| {
            let ClassifierOutput { logits, blocks } = forward(&image)?;
            let mut computed = Computed::of("out", logits);
            if self.golden.tensors.contains_key("cosine") {
                let all = blocks.iter().map(|(x, skip)| patch_cosine(x, *skip));
                let (absolute, signed): (Vec<_>, Vec<_>) =
                    all.collect::<Result<Vec<_>>>()?.into_iter().unzip();
                computed.put("cosine", Tensor::stack(&absolute, 0)?);
                computed.put("cosine_signed", Tensor::stack(&signed, 0)?);
            }
            Ok(computed)
        })
    }

    fn list(&self, key: &str) -> Vec<&Value> {
        self.golden.config.get(key).and_then(Value::as_array).into_iter().flatten().collect()
    }

    fn sizes(&self, key: &str, count: usize) -> Checked<Vec<usize>> {
        let all: Vec<usize> =
            self.list(key).into_iter().filter_map(Value::as_u64).map(|x| x as usize).collect();
        if all.len() < count {
            return Err(self.golden.wrong(format!("its {key} are not {count} whole numbers")));
        }
        Ok(all)
    }

    /// How the file's model runs.
    fn pass(&self) -> ForwardOptions {
        ForwardOptions { train: self.flag("train"), ..ForwardOptions::LOOK }
    }

    fn vil(&self) -> Checked<(Computed, Flops)> {
        let stage = |stage: &Value| {
            let size = |key: &str| stage.get(key).and_then(Value::as_u64).map(|x| x as usize);
            Some(vil::Stage {
                patch: size("p")?,
                width: size("d")?,
                heads: size("h")?,
                depth: size("n")?,
                global: size("g")?,
                long_short: size("s")? == 1,
            })
        };
        let stages: Option<Vec<_>> = self.list("stages").into_iter().map(stage).collect();
        let config = VilConfig {
            size: size(self.golden, "size")?,
            stages: stages.ok_or_else(|| self.golden.wrong("its stages are not complete".to_owned()))?,
            w: size(self.golden, "w")?,
            r: size(self.golden, "r")?,
            dual_ln: true,
            classes: size(self.golden, "classes")?,
        };
        self.affordable(config.validate(), config.flops().macs)?;
        let model = self.run(|| Vil::new(&config, &self.builder))?;
        Ok((self.classified(|image| model.forward(image, &self.pass()))?, config.flops()))
    }

    fn cvt(&self) -> Checked<(Computed, Flops)> {
        let depths = self.sizes("depths", 1)?;
        let count = depths.len();
        let all = |key| self.sizes(key, count);
        let (kernels, strides, pads) = (all("kernels")?, all("strides")?, all("pads")?);
        let (dims, heads, w, r) = (all("dims")?, all("heads")?, all("w")?, all("r")?);
        let stage = |at: usize| cvt::Stage {
            window: ConvGeometry { size: kernels[at], stride: strides[at], pad: pads[at] },
            width: dims[at],
            heads: heads[at],
            depth: depths[at],
            long_short: self.flag("ls").then_some((w[at], r[at])),
        };
        let config = CvtConfig {
            size: size(self.golden, "size")?,
            stages: (0..count).map(stage).collect(),
            dual_ln: true,
            classes: size(self.golden, "classes")?,
        };
        self.affordable(config.validate(), config.flops().macs)?;
        let model = self.run(|| Cvt::new(&config, &self.builder))?;
        let mut computed = self.classified(|image| model.forward(image, &self.pass()))?;
        for (name, tensor) in self.builder.constants() {
            computed.put(&format!("new_{name}"), tensor);
        }
        Ok((computed, config.flops()))
    }

    fn vit(&self) -> Checked<(Computed, Flops)> {
        let size = |key| size(self.golden, key);
        let config = VitConfig {
            size: size("size")?,
            patch: size("p")?,
            width: size("d")?,
            heads: size("h")?,
            depth: size("depth")?,
            classes: size("classes")?,
        };
        self.affordable(Ok(()), config.flops().macs)?;
        let model = self.run(|| Vit::new(&config, &self.builder))?;
        Ok((self.classified(|image| model.forward(image, &self.pass()))?, config.flops()))
    }

    fn resnet(&self) -> Checked<(Computed, Flops)> {
        let config = ResNetConfig {
            size: size(self.golden, "size")?,
            base: size(self.golden, "base")?,
            layers: self.sizes("layers", 1)?,
            classes: size(self.golden, "classes")?,
        };
        self.affordable(Ok(()), config.flops().macs)?;
        let model = self.run(|| ResNet::new(&config, &self.builder))?;
        Ok((self.classified(|image| model.forward(image, &self.pass()))?, config.flops()))
    }

    fn patch_cosine(&self) -> Checked<(Computed, Flops)> {
        let (x, skip) = (self.leaf("x")?, size(self.golden, "g")?);
        let (absolute, signed) = self.run(|| patch_cosine(&x, skip))?;
        let mut computed = Computed::of("out", absolute);
        computed.put("signed", signed);
        Ok((computed, Flops::default()))
    }

    fn mce(&self) -> Checked<(Computed, Flops)> {
        let errors = self.leaf("err")?;
        let given = |name: &str| {
            let tensor = self.golden.tensor(name)?.to_device(self.device);
            tensor.map_err(|error| self.golden.refused(error))
        };
        let (alexnet, clean, alexnet_clean) = (given("alexnet")?, given("clean")?, given("alexnet_clean")?);
        let found = self.run(|| corruption_error(&errors, &alexnet, &clean, &alexnet_clean))?;
        let out = self.run(|| found.mean_ce.reshape(1)?.to_dtype(DType::F32))?;
        let mut computed = Computed::of("out", out);
        computed.put("ce", found.ce);
        computed.put("rel_ce", found.relative_ce);
        Ok((computed, Flops::default()))
    }
}
