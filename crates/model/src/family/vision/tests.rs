use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};

use super::net::losses;
use super::{ImageClassifier, classifier, rank};
use crate::attention::choose::choose;
use crate::batch::SyntheticInput;
use crate::family::{Architecture, ModelRequest, ResolveError, SizeOverrides};
use crate::nn::dropout::DropoutRng;
use crate::nn::params::ParamBuilder;

fn resolved(
    preset: &str,
    model: &str,
    len: Option<usize>,
) -> std::result::Result<ImageClassifier, ResolveError> {
    let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
    let sizes = SizeOverrides::default();
    let asked = ModelRequest { len, ..ModelRequest::new(preset, &choice, &sizes) };
    let resolved = classifier(&asked)?;
    resolved.validate()?;
    Ok(resolved)
}

#[test]
fn presets_are_the_rows_of_the_specification() {
    for (preset, model, len, parameters, flops) in [
        ("vil-ls-medium", "ls2d", None, 39_799_423, 8_721_554_496),
        ("vil-ls-medium", "ls2d", Some(384), 39_947_653, 28_742_795_328),
        ("vil-ls-base", "ls2d", None, 55_834_363, 13_394_931_264),
        ("cvt-13", "full", None, 20_006_184, 6_648_049_024),
        ("cvt-13", "ls2d", None, 20_279_160, 4_923_515_776),
        ("cvt-21", "ls2d", Some(384), 32_084_856, 23_834_532_736),
        ("cvt-21", "ls2d", Some(448), 32_084_856, 34_067_899_264),
        ("deit-s", "full", None, 22_050_664, 4_608_338_304),
        ("deit-b", "full", Some(384), 86_859_496, 55_539_742_464),
        ("vit-l", "full", None, 304_715_752, 191_211_058_176),
        ("resnet-50", "full", None, 25_557_032, 4_111_412_224),
    ] {
        let model = resolved(preset, model, len).unwrap();
        let got = (model.parameters().unwrap(), Architecture::flops(&model, 0));
        assert_eq!(got, (parameters, flops), "{preset} {len:?}");
        assert!(model.core_macs(2, 0) < 2 * flops);
    }
}

#[test]
fn what_a_preset_is_not_built_with_is_said() {
    let says = |preset, model, len| resolved(preset, model, len).unwrap_err().to_string();
    assert!(says("vil-ls-medium", "cosformer", None).contains("built with ls2d, not with cosformer"));
    assert!(says("deit-s", "full", Some(225)).contains("multiple of 16"));
    assert!(says("vil-ls-medium", "ls2d", Some(16)).contains("sides from 32"));
    assert!(says("cvt-13", "ls2d:w=0,r=0", None).contains("nothing to attend to"));
}

#[test]
fn small_models_train_and_score() {
    for (preset, model) in [
        ("vil-ls-small", "ls2d"),
        ("cvt-small", "full"),
        ("cvt-small", "ls2d"),
        ("cvt-small", "ls2d:dual_ln=false"),
    ] {
        let model = resolved(preset, model, None).unwrap();
        let builder = ParamBuilder::seeded(1, &Device::Cpu, true);
        let mut net = model.build(&builder).unwrap();
        let params = builder.finish();
        let wanted = SyntheticInput { text: b"", batch: 2, len: 32, seed: 3 };
        let batch = model.synthetic_batches(&wanted, &Device::Cpu).unwrap().remove(0);
        let loss = net.loss(&batch, DropoutRng::new(1)).unwrap();
        let grads = (loss.sum / loss.count).unwrap().backward().unwrap();
        for name in params.names() {
            let grad = params.grad(&grads, name).unwrap().sqr().unwrap().sum_all().unwrap();
            let zero = grad.to_scalar::<f32>().unwrap() == 0.0;
            // a shift of all scores changes no softmax over positions
            let idle =
                name.ends_with("dynamic_projection.bias") || name.ends_with("projection.pointwise.bias");
            // the head reads the class token of the last block alone
            let last = name.starts_with("stage3_transformer.0.layers.2.0.fn.to_q.");
            assert!(!zero || idle || last, "{preset}: {name} has no gradient");
        }
        let metrics = net.metrics(&batch).unwrap();
        assert_eq!(
            metrics.iter().map(|metric| metric.name).collect::<Vec<_>>(),
            ["loss", "accuracy", "top5"]
        );
        assert!(metrics[2].sum >= metrics[1].sum);
    }
}

#[test]
fn shares_of_one_class_are_that_class() {
    let logits = Tensor::new(&[[0.3f32, -1.0, 2.0], [0.0, 0.5, 0.1]], &Device::Cpu).unwrap();
    let hard = losses(&logits, &Tensor::new(&[2u32, 0], &Device::Cpu).unwrap()).unwrap();
    let shares = Tensor::new(&[[0f32, 0.0, 1.0], [1.0, 0.0, 0.0]], &Device::Cpu).unwrap();
    let soft = losses(&logits, &shares).unwrap().to_vec1::<f32>().unwrap();
    let hard = hard.to_vec1::<f32>().unwrap();
    assert!(hard.iter().zip(&soft).all(|(a, b)| (a - b).abs() < 1e-6), "{hard:?} {soft:?}");
}

#[test]
fn weights_of_another_resolution_are_made_to_fit() {
    let small = resolved("deit-s", "full", None).unwrap();
    let mut stored = HashMap::new();
    let positions = Tensor::zeros((1, 197, 384), DType::F32, &Device::Cpu).unwrap();
    stored.insert("pos_embed".to_owned(), positions.clone());
    assert_eq!(small.fit(&mut stored).unwrap(), None);
    let large = resolved("deit-s", "full", Some(384)).unwrap();
    let said = large.fit(&mut stored).unwrap().unwrap();
    assert_eq!(said, "position embedding resized from 14 x 14 to 24 x 24");
    assert_eq!(stored["pos_embed"].dims(), [1, 577, 384]);
}

#[test]
fn ranks_count_what_stands_before() {
    assert_eq!([0, 1, 2].map(|label| rank(&[1.0, 3.0, 1.0], label)), [1, 0, 2]);
}

#[test]
fn the_released_names_decay_as_in_the_released_code() {
    let vil = resolved("vil-ls-medium", "ls2d", None).unwrap();
    let decays = |name: &str| vil.decays(name);
    assert!(!decays("layer1.0.cls_token") && !decays("layer2.1.norm.weight") && !decays("head.bias"));
    assert!(!decays("layer1.1.attn.local_relative_position_bias_table") && !decays("norm.bias"));
    assert!(decays("layer1.1.attn.dual_ln_full.weight") && decays("layer1.1.attn.qkv.bias"));
    assert_eq!(vil.map_tensor_name("module.norm.weight").as_deref(), Some("norm.weight"));
    assert_eq!(vil.map_tensor_name("layer1.1.attn.relative_position_index"), None);
}
