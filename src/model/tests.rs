use candle_core::{DType, Device, Tensor};

use super::*;
use crate::attention::find;
use crate::device::rng::Stream;
use crate::nn::params::Builder;

fn config(mechanism: &str, pooling: Pooling, max_len: usize) -> ModelConfig {
    let entry = find(mechanism).unwrap();
    let knobs = Knobs::defaults(entry.knobs);
    let backbone = Backbone::new(2, 16, 2, 32);
    ModelConfig { entry, knobs, backbone, vocab: 12, max_len, classes: 3, pooling, towers: 1 }
}

fn ids(b: usize, n: usize) -> Tensor {
    let mut stream = Stream::new(3, "ids");
    let data: Vec<u32> = (0..b * n).map(|_| 1 + stream.below(10) as u32).collect();
    Tensor::from_vec(data, (b, n), &Device::Cpu).unwrap()
}

fn numbers(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn every_pooling_takes_every_length_up_to_the_table() {
    for pooling in Pooling::ALL {
        for n in [1, 2, 7, 13] {
            let model = Classifier::new(&config("ls", *pooling, 13), &builder()).unwrap();
            let logits = model.forward(&ids(2, n), None).unwrap();
            assert_eq!(logits.dims(), [2, 3]);
            assert!(numbers(&logits).iter().all(|x| x.is_finite()), "{pooling:?} {n}");
        }
    }
}

fn builder() -> Builder {
    Builder::seeded(1, &Device::Cpu, true)
}

#[test]
fn what_stands_at_padded_positions_changes_nothing() {
    let mask =
        Tensor::new(&[[1f32, 1., 0., 1., 0., 0., 0.], [1., 1., 1., 1., 1., 1., 1.]], &Device::Cpu).unwrap();
    let (clean, junk) = (ids(2, 7), ids(2, 7).to_vec2::<u32>().unwrap());
    let junk: Vec<u32> = (junk.iter().flatten().zip(numbers(&mask)))
        .map(|(id, keep)| if keep == 0.0 { 11 - id } else { *id })
        .collect();
    let junk = Tensor::from_vec(junk, (2, 7), &Device::Cpu).unwrap();
    for (mechanism, pooling) in [
        ("full", Pooling::Mean),
        ("full", Pooling::ClsFront),
        ("ls", Pooling::ClsLastLayer),
        ("ls", Pooling::First),
    ] {
        let model = Classifier::new(&config(mechanism, pooling, 7), &builder()).unwrap();
        let logits = |ids: &Tensor| numbers(&model.forward(ids, Some(&mask)).unwrap());
        assert_eq!(logits(&clean), logits(&junk), "{mechanism} {pooling:?}");
    }
}

#[test]
fn configurations_that_cannot_be_built_say_why() {
    let base = config("full", Pooling::Mean, 8);
    let refused = |config: &ModelConfig| Classifier::new(config, &builder()).err().unwrap().to_string();
    let heads = ModelConfig { backbone: Backbone::new(2, 16, 3, 32), ..base.clone() };
    assert!(refused(&heads).contains("3 heads do not divide a width of 16"), "{}", refused(&heads));
    let cls = ModelConfig { pooling: Pooling::ClsLastLayer, ..base.clone() };
    assert!(refused(&cls).contains("full has no class token"), "{}", refused(&cls));
    let layers = ModelConfig { backbone: Backbone::new(0, 16, 2, 32), ..base.clone() };
    assert!(refused(&layers).contains("number of layers is 0"), "{}", refused(&layers));
    let towers = ModelConfig { towers: 3, ..base.clone() };
    assert!(refused(&towers).contains("3"), "{}", refused(&towers));
    let model = Classifier::new(&base, &builder()).unwrap();
    let long = model.forward(&ids(1, 9), None).err().unwrap().to_string();
    assert!(long.contains("9 positions do not fit a position table of 8 rows"), "{long}");
}
