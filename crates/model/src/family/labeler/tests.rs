use super::*;
use crate::batch::DataShape;
use crate::labeler::LayerState;
use crate::nn::params::{Init, ParamSpec};

fn resolve(
    model: &str,
    kinds: Option<&str>,
    layers: Option<u64>,
) -> std::result::Result<LabelerConfig, ResolveError> {
    let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
    let sizes = super::super::SizeOverrides { layers, width: Some(16), ..Default::default() };
    let examples: Option<DataShape> = None;
    let request = ModelRequest {
        len: Some(37),
        vocab: Some(11),
        examples,
        ..ModelRequest::new("recall-small", &choice, &sizes)
    };
    let kinds: Option<Vec<String>> = kinds.map(|kinds| kinds.split(',').map(str::to_owned).collect());
    config(&request, kinds.as_deref())
}

fn forms(config: &LabelerConfig) -> String {
    let name = |form: &LayerForm| match form {
        LayerForm::ShortConv => "shortconv",
        LayerForm::Mixer(entry, _) => entry.name,
    };
    config.layers.iter().map(name).collect::<Vec<_>>().join(",")
}

#[test]
fn layers_are_the_presets_repeated_or_a_list() {
    let of = |kinds, layers| resolve("full", kinds, layers).map(|config| forms(&config));
    assert_eq!(of(None, None).unwrap(), "shortconv,full");
    assert_eq!(of(None, Some(1)).unwrap(), "full", "the mixer is there in any case");
    assert_eq!(of(None, Some(4)).unwrap(), "shortconv,full,shortconv,full");
    assert_eq!(of(Some("window,mixer,shortconv"), None).unwrap(), "window,full,shortconv");
    assert_eq!(of(Some("shortconv,full"), None).unwrap(), "shortconv,full");
    let wrong = |kinds| of(Some(kinds), None).unwrap_err().to_string();
    assert!(wrong("shortconv,window").contains("write mixer"), "{}", wrong("shortconv,window"));
    assert!(wrong("shortcnv,full").contains("did you mean shortconv"), "{}", wrong("shortcnv,full"));
}

#[test]
fn a_token_after_another_is_the_forward_pass_and_holds_the_bytes_that_are_said() {
    for name in [
        "full",
        "window:w=5",
        "ls:w=5,l=4,r=2",
        "linear",
        "cosformer",
        "retention",
        "gla",
        "mamba2",
        "deltanet",
        "gated-deltanet",
        "based",
    ] {
        let config = LabelerConfig { echo: true, ..resolve(name, None, None).unwrap() };
        let draw = |spec: &ParamSpec| match spec.shape.len() {
            2 => Init::Uniform { bound: 0.5 },
            _ => spec.init,
        };
        let builder = ParamBuilder::seeded(3, &Device::Cpu, false).with_init(draw);
        let model = Labeler::new(&LabelerConfig { drawn: Drawn::Torch, ..config.clone() }, &builder).unwrap();
        let ids: Vec<u32> = (0..2 * 37u32).map(|at| at * at % 11).collect();
        let ids = Tensor::from_vec(ids, (2, 37), &Device::Cpu).unwrap();
        let hidden = model.hidden(&ids, crate::nn::dropout::Dropout::NONE).unwrap();
        let mut states = model.start_decoding(2, 37).unwrap().unwrap();
        for at in 0..37 {
            let logits =
                model.decode(&ids.narrow(1, at, 1).unwrap().contiguous().unwrap(), &mut states).unwrap();
            let whole = model.logits(&hidden, &[at as u32, 37 + at as u32]).unwrap();
            let largest = whole.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            let apart =
                (logits - whole).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(apart <= 1e-4 * largest, "{name} at {at}: {apart} of {largest}");
        }
        let held: usize = states.iter().map(LayerState::bytes).sum();
        assert_eq!(held as u64, 2 * config.state_bytes(37), "{name}");
        // as a step is measured: behind tokens that were never there
        let mut unseen = model.start_decoding(2, 37).unwrap().unwrap();
        unseen.iter_mut().for_each(|state| state.set_position(36));
        let logits = model.decode(&ids.narrow(1, 36, 1).unwrap().contiguous().unwrap(), &mut unseen).unwrap();
        let sum = logits.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(sum.is_finite(), "{name}: {sum}");
    }
    let whole = resolve("mega", None, None).unwrap();
    assert!(whole.build_decoder(&ParamBuilder::counting(), 1).unwrap().is_none());
}

#[test]
fn only_labelled_positions_count() {
    let config = resolve("full", None, None).unwrap();
    let mut model = Labeler::new(&config, &ParamBuilder::seeded(1, &Device::Cpu, false)).unwrap();
    let ids = Tensor::new(&[[1u32, 2, 3, 4], [5, 6, 7, 8]], &Device::Cpu).unwrap();
    let batch = |labels: [[u32; 4]; 2]| Batch {
        input: ModelInput::Tokens(Tokens { ids: ids.clone(), mask: None }),
        labels: Tensor::new(&labels, &Device::Cpu).unwrap(),
    };
    let one = batch([[IGNORED, IGNORED, 3, IGNORED], [IGNORED, IGNORED, IGNORED, 9]]);
    let logits = model.forward(&one).unwrap();
    assert_eq!(logits.dims(), [2, 11]);
    let rows = logits.to_vec2::<f32>().unwrap();
    let nll = |row: &[f32], label: usize| row.iter().map(|logit| logit.exp()).sum::<f32>().ln() - row[label];
    let expected = f64::from(nll(&rows[0], 3) + nll(&rows[1], 9));
    let scores = model.metrics(&one).unwrap();
    assert!((scores[0].sum - expected).abs() < 1e-4 && scores[0].count == 2.0);
    let best = |row: &[f32]| (0..11).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
    let right =
        batch([[IGNORED, IGNORED, best(&rows[0]), IGNORED], [IGNORED, IGNORED, IGNORED, best(&rows[1])]]);
    assert_eq!(model.metrics(&right).unwrap()[1].sum, 2.0);
    let loss = model.loss(&one, DropoutRng::new(0)).unwrap();
    assert!((f64::from(loss.sum.to_scalar::<f32>().unwrap()) - expected).abs() < 1e-4 && loss.count == 2.0);
}

/// Bytes of the picture in the README of Zoology's code, at 1024 tokens.
#[test]
fn zoology_counts_the_published_bytes() {
    for (model, width, heads, published) in [
        ("full", 64, 1, 525_056),
        ("window:w=8", 128, 1, 9728),
        ("based:Dk=16", 64, 1, 40_548),
        ("deltanet", 64, 2, 8960),
        ("deltanet", 256, 2, 134_144),
    ] {
        let mut config = resolve(model, None, None).unwrap();
        config.backbone = Backbone::new(2, width, heads, 0);
        assert_eq!(config.zoology_state_bytes(1024), published, "{model} {width}");
    }
}

#[test]
fn everything_can_be_read_from_the_last_vector() {
    let config = LabelerConfig { read_at_end: true, ..resolve("linear", None, None).unwrap() };
    let builder = ParamBuilder::seeded(3, &Device::Cpu, false);
    let mut model = Labeler::new(&config, &builder).unwrap();
    let logits = |model: &mut Labeler, tokens: [u32; 8], asked: [bool; 8]| {
        let labels: Vec<u32> = asked.iter().map(|asked| if *asked { 1 } else { IGNORED }).collect();
        let tensor = |values: &[u32]| Tensor::from_slice(values, (2, 4), &Device::Cpu).unwrap();
        let input = ModelInput::Tokens(Tokens { ids: tensor(&tokens), mask: None });
        let out = model.forward(&Batch { input, labels: tensor(&labels) }).unwrap();
        out.to_vec2::<f32>().unwrap()
    };
    let every = logits(&mut model, [1, 2, 3, 4, 1, 2, 5, 4], [true; 8]);
    assert_eq!((every.len(), every[0].len()), (8, 11));
    assert!(every[0] != every[1] && every[0] != every[4], "a position and a sequence make a difference");
    let some = [false, true, false, false, true, false, false, false];
    assert_eq!(logits(&mut model, [1, 2, 3, 4, 1, 2, 5, 4], some), [every[1].clone(), every[4].clone()]);
    let other_end = logits(&mut model, [1, 2, 3, 6, 1, 2, 5, 4], [true; 8]);
    assert!(other_end[0] != every[0] && other_end[4..] == every[4..]);
    assert!(config.build_decoder(&builder, 1).unwrap().is_none());
}

/// The distance that cosFormer's weights follow is the model's length, but where there are no such weights.
#[test]
fn a_distance_that_has_no_effect_is_not_set() {
    let of = |model: &str| {
        let config = resolve(model, None, None).unwrap();
        config.validate().unwrap();
        let LayerForm::Mixer(entry, knobs) = &config.layers[1] else { panic!() };
        knobs.is_set(entry.knobs, "m")
    };
    assert_eq!(["cosformer", "cosformer:reweight=none"].map(of), [true, false]);
}
