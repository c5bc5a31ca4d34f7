//! The recipe of `docs/adding-a-mechanism.md` works: its toy mechanism, registered at run time, is found,
//! listed, checked against a golden file and used in a model. `tests/properties` proves it like any other.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use clap::Parser;
use effattn::attention::knobs::Knobs;
use effattn::attention::{self, entries};
use effattn::cli::list;
use effattn::config::settings::{DeviceName, DtypeName, KernelName};
use effattn::model::char_lm::{Cache, CharLm, CharLmConfig};
use effattn::model::char_lm_preset::CharLmPreset;
use effattn::model::encoder::Classifier;
use effattn::model::family;
use effattn::model::{Backbone, ClassifierConfig, Pooling};
use effattn::nn::params::ParamBuilder;
use effattn::protocol::check::check_bytes;
use effattn::protocol::measuring::step::MeasuredStep;
use effattn::protocol::model_spec::ModelSpec;
use effattn::record::Pass;
use safetensors::tensor::TensorView;

use crate::{bag, mean, start};

fn register() {
    attention::register(&mean::ENTRY);
}

#[test]
fn the_document_shows_this_very_mechanism() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let (text, code) = (read("docs/adding-a-mechanism.md"), read("tests/recipe/mean.rs"));
    assert!(
        text.contains(&format!("```rust\n{code}```")),
        "docs/adding-a-mechanism.md differs from tests/recipe/mean.rs"
    );
}

/// The start page of the library: the program that it shows is the one that is compiled here, and it measures.
#[test]
fn the_start_page_shows_a_program_that_measures() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let (text, code) = (read("docs/library.md"), read("examples/start.rs"));
    assert!(text.contains(&format!("```rust\n{code}```")), "docs/library.md differs from examples/start.rs");
    let manifest: toml::Table = read("Cargo.toml").parse().expect("a manifest");
    let candle = &manifest["workspace"]["dependencies"]["candle-core"];
    let candle = candle.as_str().or_else(|| candle["version"].as_str()).expect("a version");
    assert!(
        text.contains(&format!("candle-core = \"{candle}\"")),
        "the page names another candle than {candle}"
    );
    let _: fn() -> std::process::ExitCode = start::main;
    attention::register(&start::ENTRY);
    for pass in [Pass::Infer, Pass::Train] {
        let spec = ModelSpec {
            model: "average".to_owned(),
            preset: "ls-lra".to_owned(),
            sizes: family::SizeOverrides::default(),
            batch: 2,
            len: 16,
            pass,
            seed: 1,
            device: DeviceName::Cpu,
            dtype: DtypeName::F32,
            kernel: KernelName::Fused,
        };
        let mut step = MeasuredStep::open(&spec, b"a text").expect("a step");
        assert!(step.step().expect("seconds") > 0.0);
    }
}

#[test]
fn a_registered_family_is_shown_listed_and_measured() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let (text, code) = (read("docs/adding-a-family.md"), read("tests/recipe/bag.rs"));
    assert!(
        text.contains(&format!("```rust\n{code}```")),
        "docs/adding-a-family.md differs from tests/recipe/bag.rs"
    );
    effattn::model::register(&bag::FAMILY);
    let families = effattn::model::families();
    assert!(family::presets(&families).iter().any(|preset| preset.name == "bag"));
    for pass in [Pass::Infer, Pass::Train] {
        let spec = ModelSpec {
            model: "full".to_owned(),
            preset: "bag".to_owned(),
            sizes: family::SizeOverrides::default(),
            batch: 2,
            len: 10,
            pass,
            seed: 1,
            device: DeviceName::Cpu,
            dtype: DtypeName::F32,
            kernel: KernelName::Fused,
        };
        let model = spec.choice().and_then(|choice| spec.resolve_measured(&choice)).expect("a model");
        let row = spec.row("speed", 1, Some(model.as_ref()));
        assert_eq!(
            (row.params, row.flops, row.task.as_deref()),
            (Some(257 * 16 + 34), Some(32), Some("text"))
        );
        let mut step = MeasuredStep::open(&spec, b"a text").expect("a step");
        assert!(step.step().expect("seconds") > 0.0);
    }
}

#[test]
fn every_mechanism_of_a_file_is_in_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/model/src/attention");
    let mut found = 0;
    for file in std::fs::read_dir(folder).expect("the sources") {
        let path = file.expect("an entry").path();
        let Ok(code) = std::fs::read_to_string(&path) else { continue };
        let here = code
            .lines()
            .filter(|line| line.starts_with("pub static ") && line.contains(": MechanismEntry = "));
        found += here.count();
        if code.contains("pub static ENTRY: MechanismEntry") {
            let name = path.file_stem().expect("a name").to_string_lossy().replace('_', "-");
            assert!(
                attention::TABLE.iter().any(|entry| entry.name == name),
                "{name} is not in attention::TABLE"
            );
        }
    }
    assert_eq!(found, attention::TABLE.len(), "a mechanism that is not in the table");
}

#[test]
fn a_registered_mechanism_is_found_and_listed() {
    #[derive(Parser)]
    struct Args {
        #[command(subcommand)]
        what: list::ListCommand,
    }
    register();
    assert!(entries().iter().any(|entry| entry.name == "mean"));
    let run = |line: &str| list::run(&Args::parse_from(line.split(' ')).what, 80).expect(line);
    assert!(run("list mechanisms").contains("mean"));
    let text = run("list mechanisms --model mean:learned=false");
    assert!(text.contains("out_i = scale_h") && text.contains("learned=false"), "{text}");
    let error = Knobs::parse("mean", mean::ENTRY.knobs, [("lerned", "true")]).expect_err("a typing error");
    assert!(error.to_string().contains("did you mean \"learned\"?"));
}

#[test]
fn a_model_is_built_around_it() {
    register();
    let entry = attention::find("mean").expect("registered above");
    let config = ClassifierConfig {
        entry,
        knobs: Knobs::defaults(entry.knobs),
        backbone: Backbone::new(2, 16, 2, 32),
        vocab: 12,
        max_len: 9,
        classes: 3,
        pooling: Pooling::Mean,
        towers: 1,
    };
    let builder = ParamBuilder::seeded(1, &Device::Cpu, true);
    let model = Classifier::new(&config, &builder).expect("a model");
    let params = builder.finish();
    assert!(params.names().any(|name| name.ends_with(".scale")), "its parameters belong to the model");
    let ids = Tensor::new(&[[1u32, 5, 3, 2, 7]], &Device::Cpu).expect("ids");
    let logits = model.forward(&ids, None).expect("logits").flatten_all().expect("flat").to_vec1::<f32>();
    assert!(logits.expect("numbers").iter().all(|x| x.is_finite()));
}

#[test]
fn it_decodes_token_by_token() {
    register();
    let entry = attention::find("mean").expect("registered above");
    let preset = CharLmPreset::find("charlm-small").expect("a preset");
    let config = preset.model(entry, [("learned", "true")], 13).expect("a model");
    let config = CharLmConfig { backbone: Backbone::new(2, 16, 2, 32), ..config };
    let model =
        CharLm::new(&config.at(9, 0), &ParamBuilder::seeded(1, &Device::Cpu, false)).expect("a model");
    let ids: Vec<u32> = (0..18).map(|at| at * at % 13).collect();
    let ids = Tensor::from_vec(ids, (2, 9), &Device::Cpu).expect("ids");
    let (whole, _) = model.forward(&ids, &Cache::default()).expect("logits");
    let mut states = model.start_decoding(2, 9).expect("states").expect("a form that decodes");
    for at in 0..9 {
        let token = ids.narrow(1, at, 1).and_then(|token| token.contiguous()).expect("a token");
        let logits = model.decode(&token, &mut states).expect("logits");
        let apart = logits.sub(&whole.narrow(1, at, 1).expect("a row")).and_then(|x| x.abs()?.max_all());
        let apart = apart.and_then(|x| x.to_scalar::<f32>()).expect("a number");
        assert!(apart < 1e-5, "{apart} apart at {at}");
    }
    let said = (entry.cost)(&config.knobs, &config.backbone.shape(2, 9, true)).state_bytes;
    assert!(states.iter().all(|state| state.bytes() as u64 == 2 * said));
}

/// A golden file of the causal form with a padded position, its numbers from the definition in f64.
fn golden(scale_error: f64) -> Vec<u8> {
    let (h, n, d) = (2, 5, 3);
    let (mask, scale) = ([1.0, 1.0, 0.0, 1.0, 1.0f64], [0.5, -2.0f64]);
    let v: Vec<f64> = (0..h * n * d).map(|i| f64::from((i as f32 * 0.37).sin())).collect();
    let weight: Vec<f64> =
        (0..h * n * d).map(|i| mask[i / d % n] * f64::from((i as f32 * 0.73).cos())).collect();
    let (mut out, mut dv, mut dscale) = (vec![0.0; v.len()], vec![0.0; v.len()], vec![0.0; h]);
    for head in 0..h {
        for i in (0..n).filter(|&i| mask[i] != 0.0) {
            let seen: Vec<usize> = (0..=i).filter(|&j| mask[j] != 0.0).collect();
            for c in 0..d {
                let at = |j: usize| (head * n + j) * d + c;
                let mean = seen.iter().map(|&j| v[at(j)]).sum::<f64>() / seen.len() as f64;
                out[at(i)] = scale[head] * mean;
                dscale[head] += weight[at(i)] * mean + scale_error;
                seen.iter().for_each(|&j| dv[at(j)] += scale[head] * weight[at(i)] / seen.len() as f64);
            }
        }
    }
    let bytes = |data: &[f64]| -> Vec<u8> { data.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect() };
    let rows = [1, h, n, d];
    let tensors = [
        ("v", bytes(&v), rows.to_vec()),
        ("mask", bytes(&mask), vec![1, n]),
        ("scale", bytes(&scale), vec![h]),
        ("grad_out", bytes(&weight), rows.to_vec()),
        ("out", bytes(&out), rows.to_vec()),
        ("grad_v", bytes(&dv), rows.to_vec()),
        ("grad_scale", bytes(&dscale), vec![h]),
    ];
    let macs = (h * n * n * d).to_string();
    let metadata = [
        ("mechanism", "mean"),
        ("causal", "true"),
        ("config", r#"{"B": 1, "H": 2, "N": 5, "D": 3, "learned": true}"#),
        ("leaves", r#"["v", "scale"]"#),
        ("atol", r#"{"out": 1e-6, "grad_v": 1e-6, "grad_scale": 1e-5}"#),
        ("rtol", "0"),
        ("macs", &macs),
    ];
    let metadata: HashMap<String, String> =
        metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect();
    let views = tensors.iter().map(|(name, bytes, shape)| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).expect("a tensor");
        (*name, view)
    });
    safetensors::serialize(views, Some(metadata)).expect("a golden file")
}

#[test]
fn check_proves_it_against_golden_files() {
    register();
    let verdict = check_bytes("mean-00.safetensors", &golden(0.0), &Device::Cpu).expect("a verdict");
    assert!(verdict.passed(), "{verdict:?}");
    let wrong = check_bytes("mean-01.safetensors", &golden(1e-3), &Device::Cpu).expect("a verdict");
    assert_eq!(wrong.worst, "grad_scale");
    assert!(!wrong.passed());
}
