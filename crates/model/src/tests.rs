use candle_core::{DType, Device, Tensor};

use super::char_lm::{Cache, CharLm, CharLmConfig, LmVariant, language_knobs};
use super::evaluate::{bits_per_symbol, overlap, single, stream};
use super::*;
use crate::attention::find;
use crate::nn::params::ParamBuilder;
use effattn_kernel::device::rng::RngStream;

fn config(mechanism: &str, pooling: Pooling, max_len: usize) -> ClassifierConfig {
    let entry = find(mechanism).unwrap();
    let knobs = Knobs::defaults(entry.knobs);
    let backbone = Backbone::new(2, 16, 2, 32);
    ClassifierConfig { entry, knobs, backbone, vocab: 12, max_len, classes: 3, pooling, towers: 1 }
}

fn ids(b: usize, n: usize) -> Tensor {
    let mut stream = RngStream::new(3, "ids");
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

fn builder() -> ParamBuilder {
    ParamBuilder::seeded(1, &Device::Cpu, true)
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
        ("full", Pooling::ClsVector),
        ("ls", Pooling::ClsLastLayer),
        ("ls", Pooling::First),
    ] {
        let model = Classifier::new(&config(mechanism, pooling, 7), &builder()).unwrap();
        let logits = |ids: &Tensor| numbers(&model.forward(ids, Some(&mask)).unwrap());
        assert_eq!(logits(&clean), logits(&junk), "{mechanism} {pooling:?}");
    }
}

#[test]
fn rows_that_are_read_have_the_values_and_gradients_of_all_rows() {
    let (n, lens) = (11, [4, 11, 1]);
    let mask: Vec<f32> =
        lens.iter().flat_map(|len| (0..n).map(move |at| f32::from(u8::from(at < *len)))).collect();
    let mask = Tensor::from_vec(mask, (3, n), &Device::Cpu).unwrap();
    let ids = ids(3, n);
    let cases = crate::attention::entries();
    let takes =
        |entry: &&&MechanismEntry, cls: bool| entry.support.bidirectional && (!cls || entry.support.cls);
    let mut tried = 0;
    for pooling in
        [Pooling::Mean, Pooling::First, Pooling::ClsFront, Pooling::ClsVector, Pooling::ClsLastLayer]
    {
        let cls = pooling == Pooling::ClsLastLayer;
        for entry in cases.iter().filter(|entry| takes(entry, cls)) {
            let config = config(entry.name, pooling, n);
            if config.validate().is_err() {
                continue;
            }
            tried += 1;
            let builder = builder();
            let model = Classifier::new(&config, &builder).unwrap();
            let params = builder.finish();
            let close = |a: &Tensor, b: &Tensor, what: &str| {
                let largest = numbers(b).iter().fold(1e-3f32, |largest, x| largest.max(x.abs()));
                let apart = numbers(a).iter().zip(numbers(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart <= 2e-5 * largest, "{} {pooling:?} {what}: {apart} of {largest}", entry.name);
            };
            let weights = if entry.support.dropout { 0.1 } else { 0.0 };
            for dropout in [Dropout::NONE, Dropout::new(0.2, 9).with_attention(weights)] {
                let some = model.forward_train(&ids, Some(&mask), dropout).unwrap();
                let whole = model.forward_whole(&ids, Some(&mask), dropout).unwrap();
                close(&some, &whole, "logits");
                let [some, whole] =
                    [some, whole].map(|x| x.sqr().unwrap().sum_all().unwrap().backward().unwrap());
                let mut compared = 0;
                for name in params.names() {
                    let grad = |grads| params.grad(grads, name);
                    if let (Ok(some), Ok(whole)) = (grad(&some), grad(&whole)) {
                        close(&some, &whole, name);
                        compared += 1;
                    }
                }
                assert!(compared > 10, "{} {pooling:?}: {compared} gradients", entry.name);
            }
        }
    }
    assert!(tried > 60, "{tried}");
}

#[test]
fn a_class_vector_is_a_class_id_in_front_of_all_tokens() {
    let (front, vector) = (builder(), config("linformer", Pooling::ClsVector, 7));
    let longer = ClassifierConfig { vocab: 13, max_len: 8, pooling: Pooling::ClsFront, ..vector.clone() };
    let other = Classifier::new(&longer, &front).unwrap();
    let params = front.finish();
    let mut given: std::collections::HashMap<String, Tensor> =
        params.names().map(|name| (name.to_owned(), params.value(name).unwrap())).collect();
    let tokens = given.remove("token_embedding.weight").unwrap();
    given.insert("cls".to_owned(), tokens.get(12).unwrap());
    given.insert("token_embedding.weight".to_owned(), tokens.narrow(0, 0, 12).unwrap());
    let model = Classifier::new(&vector, &ParamBuilder::given(given, &Device::Cpu, false)).unwrap();
    for n in [1, 7] {
        let behind = Tensor::cat(&[&ids(2, n), &ids(2, 1)], 1).unwrap();
        let keep: Vec<f32> = (0..2 * n).map(|at| f32::from(u8::from(at % 3 != 1))).collect();
        let mask = Tensor::from_vec(keep, (2, n), &Device::Cpu).unwrap();
        let longer =
            Tensor::cat(&[&mask, &Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap()], 1).unwrap();
        let (a, b) = (model.forward(&ids(2, n), Some(&mask)), other.forward(&behind, Some(&longer)));
        assert_eq!(numbers(&a.unwrap()), numbers(&b.unwrap()), "{n}");
    }
}

#[test]
fn configurations_that_cannot_be_built_say_why() {
    let base = config("full", Pooling::Mean, 8);
    let refused = |config: &ClassifierConfig| Classifier::new(config, &builder()).err().unwrap().to_string();
    let heads = ClassifierConfig { backbone: Backbone::new(2, 16, 3, 32), ..base.clone() };
    assert!(refused(&heads).contains("3 heads do not divide a width of 16"), "{}", refused(&heads));
    let cls = ClassifierConfig { pooling: Pooling::ClsLastLayer, ..base.clone() };
    assert!(refused(&cls).contains("full has no class token"), "{}", refused(&cls));
    let layers = ClassifierConfig { backbone: Backbone::new(0, 16, 2, 32), ..base.clone() };
    assert!(refused(&layers).contains("number of layers is 0"), "{}", refused(&layers));
    let towers = ClassifierConfig { towers: 3, ..base.clone() };
    assert!(refused(&towers).contains("3"), "{}", refused(&towers));
    let model = Classifier::new(&base, &builder()).unwrap();
    let long = model.forward(&ids(1, 9), None).err().unwrap().to_string();
    assert!(long.contains("9 positions do not fit a position table of 8 rows"), "{long}");
}

fn language(mechanism: &str, given: &[(&str, &str)], mem: usize) -> CharLmConfig {
    let entry = find(mechanism).unwrap();
    let takes = |setting: &(&str, &str)| Knobs::parse(entry.name, entry.knobs, [*setting]).is_ok();
    let small = [("w", "8"), ("l", "4"), ("r", "1")].into_iter().filter(takes);
    let knobs = language_knobs(entry, small.chain(given.iter().copied())).unwrap();
    let form = LmVariant::of(entry, &knobs);
    CharLmConfig { entry, knobs, backbone: Backbone::new(2, 16, 2, 32), vocab: 12, block: 48, mem, form }
}

fn symbols(n: usize) -> Vec<u32> {
    ids(1, n).flatten_all().unwrap().to_vec1().unwrap()
}

/// Weights of a size at which attention matters.
fn lively(config: &CharLmConfig) -> CharLm {
    let builder = builder();
    let model = CharLm::new(config, &builder).unwrap();
    for group in builder.finish().groups() {
        let larger = (group.var.as_detached_tensor() * 4.0).unwrap();
        group.var.set(&larger).unwrap();
    }
    model
}

#[test]
fn no_position_of_a_language_model_sees_its_future() {
    let causal = crate::attention::entries().into_iter().filter(|entry| entry.support.causal);
    for entry in causal {
        let mem = if entry.support.memory { 24 } else { 0 };
        let config = language(entry.name, &[], mem);
        if entry.exceptions.iter().any(|e| {
            e.property == crate::attention::Property::IgnoresFuture && (e.applies)(&config.knobs, true)
        }) {
            continue;
        }
        let model = lively(&config);
        let logits = |symbols: &[u32]| {
            let (old, new) = (&symbols[..24], &symbols[24..]);
            let row = |ids: &[u32]| Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let (_, cache) = model.forward(&row(old), &model.start(1).unwrap()).unwrap();
            model.forward(&row(new), &cache).unwrap().0
        };
        let base = symbols(48);
        for t in [1, 6, 13, 23] {
            let mut changed = base.clone();
            changed[24 + t] = (changed[24 + t] + 3) % 12;
            let (a, b) = (logits(&base), logits(&changed));
            let before = |x: &Tensor| numbers(&x.narrow(1, 0, t).unwrap());
            assert_eq!(before(&a), before(&b), "{} {t}", entry.name);
            let at = |x: &Tensor| numbers(&x.narrow(1, t, 1).unwrap());
            assert_ne!(at(&a), at(&b), "{} {t} does not see itself", entry.name);
        }
    }
}

#[test]
fn streaming_with_a_long_cache_is_one_long_forward() {
    for (mechanism, given) in
        [("ls", &[][..]), ("ls", &[("r", "2"), ("w", "5")]), ("transformer-xl", &[]), ("full", &[])]
    {
        let model = lively(&language(mechanism, given, 64));
        let symbols = symbols(47);
        let whole = single(&model, &symbols).unwrap();
        let kept = |x: &[f32]| x.iter().skip(1).all(|x| *x > 0.0);
        assert!(kept(&whole) && whole[0] == 0.0);
        for block in [4, 8, 20] {
            let mut seen = 0;
            let streamed = stream(&model, &symbols, block, &mut |n| seen = n).unwrap();
            assert_eq!(seen, 46);
            for (t, (a, b)) in streamed.iter().zip(&whole).enumerate() {
                assert!((a - b).abs() < 1e-4, "{mechanism} {block} {t}: {a} {b}");
            }
        }
        let windows = overlap(&model, &symbols, 64, 5, &mut |_| ()).unwrap();
        assert_eq!(windows.len(), 47);
        assert!(windows.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-4), "{mechanism}");
    }
}

#[test]
fn a_model_that_knows_nothing_scores_exactly_the_logarithm_of_its_symbols() {
    let config = language("ls", &[], 16);
    let drawn = builder();
    CharLm::new(&config, &drawn).unwrap();
    let drawn = drawn.finish();
    let zeros = drawn.names().map(|name| (name.to_owned(), drawn.value(name).unwrap().zeros_like().unwrap()));
    let tokens = zeros.collect();
    let model = CharLm::new(&config, &ParamBuilder::given(tokens, &Device::Cpu, false)).unwrap();
    let nll = stream(&model, &symbols(41), 8, &mut |_| ()).unwrap();
    assert!((bits_per_symbol(&nll) - 12f64.log2()).abs() < 1e-6);
}

#[test]
fn the_released_form_starts_from_a_full_cache_of_zeros() {
    let model = lively(&language("ls", &[("compat", "code")], 16));
    assert_eq!(model.start(3).unwrap().len(), 16);
    assert!(lively(&language("ls", &[], 16)).start(3).unwrap().is_empty());
    let row = Tensor::new(&symbols(8)[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let logits = |cache: &Cache| numbers(&model.forward(&row, cache).unwrap().0);
    assert_ne!(logits(&model.start(1).unwrap()), logits(&Cache::default()));
}

#[test]
fn language_models_that_cannot_be_built_say_why() {
    let refused = |config: &CharLmConfig| CharLm::new(config, &builder()).err().unwrap().to_string();
    let odd = language("ls", &[], 10);
    assert!(refused(&odd).contains("not a multiple of l=4"), "{}", refused(&odd));
    let linformer = language("linformer", &[], 0);
    assert!(refused(&linformer).contains("linformer has no causal form"), "{}", refused(&linformer));
    let model = lively(&language("full", &[], 0));
    let error = |result: candle_core::Result<Vec<f32>>| result.err().unwrap().to_string();
    assert!(error(stream(&model, &[1], 4, &mut |_| ())).contains("at least 2"));
    assert!(error(stream(&model, &[1, 2], 0, &mut |_| ())).contains("at least 1"));
    assert!(error(overlap(&model, &[1, 2], 2, 4, &mut |_| ())).contains("step up to the window"));
    assert!(stream(&model, &[1, 99], 4, &mut |_| ()).is_err());
}
