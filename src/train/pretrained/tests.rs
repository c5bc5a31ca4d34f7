use candle_core::{DType, Device};
use serde_json::json;

use super::weights::{POSITIONS, TYPES, layer_name};
use super::*;
use effattn_kernel::embedding::PADDING;
use effattn_kernel::kept_rows::KeptRows;
use effattn_model::nn::dropout::Dropout;
use effattn_model::nn::params::ParamBuilder;
use effattn_model::roberta::Roberta;

/// A small encoder of full attention for `positions` words.
fn config(tokenizer: &Tokenizer, positions: usize) -> RobertaConfig {
    let attention = one("full").unwrap();
    let backbone = Backbone::new(2, 16, 2, 24);
    let (entry, knobs) = (attention.entry, attention.knobs);
    RobertaConfig { entry, knobs, backbone, vocab: tokenizer.len(), positions, eps: 1e-5, top: Top::Masked }
}

/// The same around another mechanism.
fn around(model: &RobertaConfig, mechanism: &str) -> RobertaConfig {
    let choice = one(mechanism).unwrap();
    RobertaConfig { entry: choice.entry, knobs: choice.knobs, ..model.clone() }
}

/// Writes a small encoder of full attention for 16 words, and gives its model.
pub(crate) fn small(folder: &Path) -> (RobertaConfig, HashMap<String, Tensor>) {
    let tokenizer =
        Tokenizer::train(["the old lamp the old lamp the bell the bell"].into_iter(), 270).unwrap();
    let model = config(&tokenizer, 16);
    let builder = ParamBuilder::seeded(5, &Device::Cpu, false);
    Roberta::new(&model, &builder).unwrap();
    let params = builder.finish();
    // biases and gains that a mistake would show, deviations of a trained model
    let noisy = |name: &str| {
        let value = params.value(name).unwrap();
        let noise = Tensor::arange(0f32, value.elem_count() as f32, &Device::Cpu).unwrap();
        let noise = noise.affine(12.9898, name.len() as f64).unwrap().sin().unwrap();
        (value + (noise * 0.3).unwrap().reshape(params.value(name).unwrap().shape()).unwrap()).unwrap()
    };
    let weights: HashMap<String, Tensor> =
        params.names().map(|name| (name.to_owned(), noisy(name))).collect();
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("tokenizer.json"), tokenizer.json()).unwrap();
    let config = json!({
        "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "hidden_act": "gelu",
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "vocab_size": 270, "max_position_embeddings": 18, "layer_norm_eps": 1e-5,
        "effattn": { "model": "full", "tokenizer": tokenizer.hash() },
    });
    std::fs::write(folder.join("config.json"), serde_json::to_string_pretty(&config).unwrap()).unwrap();
    (model, weights)
}

fn logits(model: &RobertaConfig, weights: HashMap<String, Tensor>, ids: &Tensor) -> Vec<f32> {
    let net = Roberta::new(model, &ParamBuilder::given(weights, &Device::Cpu, false)).unwrap();
    let (b, n) = ids.dims2().unwrap();
    let all = KeptRows::at(b, n, (0..(b * n) as u32).collect());
    let logits = net.masked_logits(&net.encode_at(ids, &all, Dropout::NONE).unwrap()).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

fn ids(b: usize, n: usize) -> Tensor {
    let id = |at: usize| if at % n + at / n < n { 4 + (at as u32 * 7919) % 250 } else { PADDING };
    Tensor::from_vec((0..b * n).map(id).collect::<Vec<u32>>(), (b, n), &Device::Cpu).unwrap()
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_window_over_the_whole_input_is_the_encoder_that_was_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (model, weights) = small(folder.path());
    let start = Pretrained::open(folder.path()).unwrap();
    assert_eq!((start.positions, start.vocab, start.attention.label()), (16, 270, "full".to_owned()));
    start.tokenizer().unwrap();
    let ids = ids(3, 16);
    let expected = logits(&model, weights, &ids);
    for mechanism in
        ["full", "window:w=64", "longformer:left=64,right=64", "longformer:left=3,right=64,global=0"]
    {
        let longer = RobertaConfig { positions: 40, ..around(&model, mechanism) };
        start.becomes(&one(mechanism).unwrap()).unwrap();
        let fitted = start.weights().unwrap().fit(&longer).unwrap();
        let difference = largest(&logits(&longer, fitted, &ids), &expected);
        let narrow = mechanism.contains("left=3");
        assert_eq!(difference > 1e-3, narrow, "{mechanism}: {difference}");
        assert!(narrow || difference <= 2e-5, "{mechanism}: {difference}");
    }
}

#[test]
fn positions_are_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let (model, weights) = small(folder.path());
    let start = Pretrained::open(folder.path()).unwrap();
    let longer = RobertaConfig { positions: 40, ..model };
    let fitted = start.weights().unwrap().fit(&longer).unwrap();
    let rows = |of: &HashMap<String, Tensor>| of[POSITIONS].to_vec2::<f32>().unwrap();
    let (old, new) = (rows(&weights), rows(&fitted));
    assert_eq!(new.len(), 42);
    for (row, values) in new.iter().enumerate() {
        let from = if row < 2 { row } else { 2 + (row - 2) % 16 };
        assert_eq!(*values, old[from], "{row}");
    }
}

/// The weights of `model` in `folder`, for [`Pretrained::open`].
fn store(folder: &Path, model: &RobertaConfig, label: &str) -> HashMap<String, Tensor> {
    small(folder);
    let builder = ParamBuilder::seeded(5, &Device::Cpu, false);
    Roberta::new(model, &builder).unwrap();
    let params = builder.finish();
    let mut weights: HashMap<String, Tensor> =
        params.names().map(|name| (name.to_owned(), params.value(name).unwrap())).collect();
    weights.extend(params.constants().clone());
    candle_core::safetensors::save(&weights, folder.join("model.safetensors")).unwrap();
    let path = folder.join("config.json");
    let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["effattn"]["model"] = json!(label);
    config["max_position_embeddings"] = json!(model.positions + 2);
    std::fs::write(&path, config.to_string()).unwrap();
    weights
}

/// Writes an encoder for 16 words with the sizes of `model` around `mechanism`.
pub(crate) fn encoder(folder: &Path, model: &RobertaConfig, mechanism: &str) {
    store(folder, &around(model, mechanism), mechanism);
}

/// Writes an encoder for 16 words that hashes them into eight buckets, with the sizes of `model`, and gives its weights.
pub(crate) fn reformer(folder: &Path, model: &RobertaConfig) -> HashMap<String, Tensor> {
    store(folder, &around(model, "reformer:chunk=4"), "reformer:chunk=4")
}

#[test]
fn a_longer_reformer_keeps_the_rotations_of_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = small(folder.path());
    let short = around(&model, "reformer:chunk=4");
    let weights = reformer(folder.path(), &model);
    let start = Pretrained::open(folder.path()).unwrap();
    let rotations = layer_name(0, "reformer.rotations");
    let told = start.weights().unwrap().fit(&RobertaConfig { positions: 80, ..short.clone() });
    let told = told.err().unwrap().to_string();
    assert!(
        told.contains("rotations have shape [2, 8, 2, 4], expected (2, 8, 2, 6); these weights"),
        "{told}"
    );
    assert!(told.ends_with("are of inputs of at most 16 positions: give --len 16"), "{told}");
    let other = RobertaConfig { positions: 80, ..around(&model, "reformer:chunk=4,num_buckets=16") };
    let told = start.weights().unwrap().fit(&other).err().unwrap().to_string();
    assert!(told.ends_with("expected (2, 8, 2, 8)"), "another length would not help: {told}");
    let longer = RobertaConfig { positions: 80, ..around(&model, "reformer:chunk=4,num_buckets=8") };
    let fitted = start.weights().unwrap().fit(&longer).unwrap();
    let values = |of: &HashMap<String, Tensor>| of[&rotations].flatten_all().unwrap().to_vec1::<f32>();
    assert_eq!(values(&fitted).unwrap(), values(&weights).unwrap());
    let ids = ids(2, 16);
    assert_eq!(logits(&longer, fitted, &ids), logits(&short, weights, &ids));
    // one chunk is not hashed: its model has no rotations, and a longer one draws them
    let bare = around(&model, "reformer:chunk=16");
    assert!(!store(folder.path(), &bare, "reformer:chunk=16").contains_key(&rotations));
    let start = Pretrained::open(folder.path()).unwrap();
    let fitted = start.weights().unwrap().fit(&RobertaConfig { positions: 40, ..bare }).unwrap();
    assert!(!fitted.contains_key(&rotations));
    // a longer chunk would not hash at the length of the weights, which have rotations all the same
    let weights = reformer(folder.path(), &model);
    let longer = RobertaConfig { positions: 80, ..around(&model, "reformer:chunk=32,num_buckets=8") };
    let start = Pretrained::open(folder.path()).unwrap();
    let fitted = start.weights().unwrap().fit(&longer).unwrap();
    assert_eq!(values(&fitted).unwrap(), values(&weights).unwrap());
}

#[test]
fn random_features_of_another_size_are_not_drawn_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = small(folder.path());
    store(folder.path(), &around(&model, "rfa:proj_dim=8"), "rfa:proj_dim=8");
    let start = Pretrained::open(folder.path()).unwrap();
    let longer = RobertaConfig { positions: 40, ..around(&model, "rfa:proj_dim=4") };
    let told = start.weights().unwrap().fit(&longer).err().unwrap().to_string();
    assert!(told.ends_with("proj has shape [2, 8, 8], expected [2, 4, 8]"), "{told}");
}

#[test]
fn a_longer_bigbird_draws_its_blocks_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = small(folder.path());
    let short = around(&model, "bigbird:block=2");
    let mut weights = store(folder.path(), &short, "bigbird:block=2");
    let start = Pretrained::open(folder.path()).unwrap();
    let blocks = layer_name(1, "bigbird.rand_blocks");
    let same = start.weights().unwrap().fit(&short).unwrap();
    let values =
        |tensor: &Tensor| tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>();
    assert_eq!(values(&same[&blocks]).unwrap(), values(&weights[&blocks]).unwrap());
    let longer = RobertaConfig { positions: 40, ..short.clone() };
    let fitted = start.weights().unwrap().fit(&longer).unwrap();
    assert!(!fitted.contains_key(&blocks) && fitted.contains_key(&layer_name(1, "query.weight")));
    // those of the same length belong to the weights
    weights.remove(&blocks);
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    let told = start.weights().unwrap().fit(&short).err().unwrap().to_string();
    assert!(told.contains(&format!("no tensor {blocks}")), "{told}");
}

#[test]
fn dual_norms_start_at_the_size_of_keys_and_values() {
    let folder = tempfile::tempdir().unwrap();
    let (model, weights) = small(folder.path());
    let start = Pretrained::open(folder.path()).unwrap();
    let long = RobertaConfig { positions: 32, ..around(&model, "ls:w=4,r=2") };
    let ids = ids(2, 16);
    let mut taken = start.weights().unwrap();
    assert!(taken.wants_calibration(&long) && !taken.wants_calibration(&model));
    taken.calibrate(&long, std::iter::once(Ok(ids.clone()))).unwrap();
    let fitted = taken.fit(&long).unwrap();
    // by hand, for the first layer
    let net = Roberta::new(&model, &ParamBuilder::given(weights.clone(), &Device::Cpu, false)).unwrap();
    let x = net.trace(&ids).unwrap()[0].to_vec3::<f32>().unwrap();
    let keep = ids.to_vec2::<u32>().unwrap();
    let (mut deviation, mut mean, mut count) = (0.0f64, 0.0f64, 0.0f64);
    for part in ["key", "value"] {
        let tensor = |kind: &str| &weights[&layer_name(0, &format!("{part}.{kind}"))];
        let (weight, bias) =
            (tensor("weight").to_vec2::<f32>().unwrap(), tensor("bias").to_vec1::<f32>().unwrap());
        for (row, id) in x.iter().flatten().zip(keep.iter().flatten()).filter(|(_, id)| **id != PADDING) {
            assert_ne!(*id, PADDING);
            let product =
                |weights: &Vec<f32>| weights.iter().zip(row).map(|(w, x)| f64::from(w * x)).sum::<f64>();
            let channels: Vec<f64> =
                weight.iter().zip(&bias).map(|(weights, bias)| product(weights) + f64::from(*bias)).collect();
            let own = channels.iter().sum::<f64>() / 16.0;
            let variance = channels.iter().map(|value| (value - own).powi(2)).sum::<f64>() / 16.0;
            (deviation, mean, count) = (deviation + variance.sqrt(), mean + own, count + 1.0);
        }
    }
    for (part, expected) in [("weight", deviation / count), ("bias", mean / count)] {
        for norm in ["ln_local", "ln_global"] {
            let values = fitted[&layer_name(0, &format!("ls.{norm}.{part}"))].to_vec1::<f32>().unwrap();
            assert!(values.iter().all(|value| (f64::from(*value) - expected).abs() < 1e-5), "{norm}.{part}");
        }
    }
    let drawn = ParamBuilder::given_or_seeded(1, fitted, &Device::Cpu, false);
    Roberta::new(&long, &drawn).unwrap();
    let params = drawn.finish();
    let dp = params.value(&layer_name(1, "ls.dp.bias")).unwrap().to_vec1::<f32>().unwrap();
    assert!(dp.iter().all(|bias| *bias == 0.0), "slots start as near-means");
}

#[test]
fn parts_of_a_checkpoint_are_read_by_their_index() {
    let folder = tempfile::tempdir().unwrap();
    let (model, weights) = small(folder.path());
    let whole = Pretrained::open(folder.path()).unwrap().weights().unwrap().fit(&model).unwrap();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let mut map = BTreeMap::new();
    let mut sides = [HashMap::new(), HashMap::new()];
    for (name, tensor) in &weights {
        let side = usize::from(name.contains("layer.1"));
        // as RobertaModel alone writes them
        let bare = name.strip_prefix("roberta.").unwrap_or(name).to_owned();
        map.insert(bare.clone(), format!("part-{side}.safetensors"));
        sides[side].insert(bare, tensor.clone());
    }
    for (side, tensors) in sides.iter().enumerate() {
        candle_core::safetensors::save(tensors, folder.path().join(format!("part-{side}.safetensors")))
            .unwrap();
    }
    let index = json!({ "weight_map": map }).to_string();
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let parts = Pretrained::open(folder.path()).unwrap();
    let read = parts.weights().unwrap().fit(&model).unwrap();
    let ids = ids(2, 9);
    assert_eq!(logits(&model, read, &ids), logits(&model, whole, &ids));
    assert_eq!(parts.hash().unwrap().len(), 64);
    std::fs::remove_file(folder.path().join("part-1.safetensors")).unwrap();
    let error = parts.weights().err().unwrap().to_string();
    assert!(
        error.contains("part-1.safetensors: is missing") && error.contains("names 2 parts, and 1"),
        "{error}"
    );
    std::fs::remove_file(folder.path().join("model.safetensors.index.json")).unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "x").unwrap();
    let error = parts.weights().err().unwrap().to_string();
    assert!(error.contains("has no weights: there is pytorch_model.bin, which is not read"), "{error}");
}

#[test]
fn an_embedding_may_be_padded_beyond_the_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut weights) = small(folder.path());
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["vocab_size"] = json!(320);
    config.as_object_mut().unwrap().remove("effattn");
    std::fs::write(&path, config.to_string()).unwrap();
    for name in ["roberta.embeddings.word_embeddings.weight", "lm_head.bias"] {
        let rows = weights[name].dim(0).unwrap();
        let padded = weights[name].pad_with_zeros(0, 0, 320 - rows).unwrap();
        weights.insert(name.to_owned(), padded);
    }
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    let start = Pretrained::open(folder.path()).unwrap();
    let tokenizer = start.tokenizer().unwrap();
    let said = start.padding(&tokenizer).unwrap();
    assert!(said.contains("320 rows") && said.contains(&format!("{} words", tokenizer.len())), "{said}");
    start.weights().unwrap().fit(&RobertaConfig { vocab: 320, ..start.source() }).unwrap();
}

#[test]
fn what_other_programs_drop_of_the_config_stands_beside_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = small(folder.path());
    let path = folder.path().join("config.json");
    let mut config: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let own = config.as_object_mut().unwrap().remove("effattn").unwrap();
    std::fs::write(&path, config.to_string()).unwrap();
    let file = folder.path().join("model.safetensors");
    let hash = own["tokenizer"].as_str().unwrap().to_owned();
    let bytes = std::fs::read(&file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Json = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header["__metadata__"] = json!({ "format": "pt", MODEL_KEY: "cosformer:m=16", TOKENIZER_KEY: hash });
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&file, [&length[..], header.as_bytes(), &bytes[8 + len..]].concat()).unwrap();
    let start = Pretrained::open(folder.path()).unwrap();
    assert_eq!(start.attention.label(), "cosformer:m=16");
    start.tokenizer().unwrap();
    start.weights().unwrap().fit(&around(&model, "cosformer:m=16")).unwrap();
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (model, weights) = small(folder.path());
    let path = folder.path().join("config.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let says = |from: &str, to: &str| {
        std::fs::write(&path, good.replace(from, to)).unwrap();
        let error = Pretrained::open(folder.path()).and_then(|start| start.tokenizer().map(|_| ()));
        std::fs::write(&path, &good).unwrap();
        error.err().unwrap().to_string()
    };
    assert!(
        says("RobertaForMaskedLM", "BertModel")
            .contains("config.json: architecture \"BertModel\" is not known")
    );
    assert!(says("\"roberta\"", "\"bert\"").contains("model_type is \"bert\""));
    assert!(says("\"gelu\"", "\"relu\"").contains("hidden_act is \"relu\""));
    let padded = says("\"hidden_act\"", "\"pad_token_id\": 7, \"hidden_act\"");
    assert!(padded.contains("config.json: pad_token_id is 7, and only 1 is read"), "{padded}");
    assert!(says("\"hidden_size\"", "\"size\"").contains("missing field `hidden_size`"));
    assert!(
        says("\"num_attention_heads\": 2", "\"num_attention_heads\": 3")
            .contains("config.json: hidden_size 16 does not divide among num_attention_heads 3")
    );
    assert!(
        says("\"vocab_size\": 270", "\"vocab_size\": 269")
            .contains("vocab_size is 269, and the tokenizer next to it has")
    );
    assert!(says("\"tokenizer\": \"", "\"tokenizer\": \"0").contains("was made with tokenizer"));
    let misfit = |name: &str, tensor: Option<Tensor>, top: Top| {
        let mut changed = weights.clone();
        match tensor {
            Some(tensor) => changed.insert(name.to_owned(), tensor),
            None => changed.remove(name),
        };
        candle_core::safetensors::save(&changed, folder.path().join("model.safetensors")).unwrap();
        let start = Pretrained::open(folder.path()).unwrap();
        let target = RobertaConfig { top, ..model.clone() };
        start.weights().and_then(|weights| weights.fit(&target)).err().map(|error| error.to_string())
    };
    let some = || Some(Tensor::zeros((3, 3), DType::F32, &Device::Cpu).unwrap());
    let classes = Top::Classes(2);
    let query = layer_name(1, "query.weight");
    assert!(misfit(&query, None, classes).unwrap().contains(&format!("no tensor {query}")));
    assert!(misfit(&query, some(), classes).unwrap().contains("has shape [3, 3], expected [16, 16]"));
    let whole = Some(Tensor::zeros((16, 16), DType::U32, &Device::Cpu).unwrap());
    assert!(
        misfit(&query, whole, classes).unwrap().contains(&format!("{query:?} is U32; weights are floats"))
    );
    let other = "roberta.encoder.layer.2.output.dense.weight";
    assert!(misfit(other, some(), classes).unwrap().contains(&format!("the weights have 3: {other}")));
    let other = "roberta.encoder.layer.1.output.gate.weight";
    assert!(misfit(other, some(), classes).unwrap().contains(&format!("the tensor {other} has no place")));
    assert_eq!(misfit("roberta.pooler.dense.weight", some(), classes), None);
    assert_eq!(misfit("lm_head.bias", None, classes), None);
    assert!(misfit("lm_head.bias", None, Top::Masked).unwrap().contains("no tensor lm_head.bias"));
    assert_eq!(misfit(TYPES, None, classes), None, "fairseq has none");
    std::fs::write(folder.path().join("model.safetensors"), b"no").unwrap();
    let error = Pretrained::open(folder.path()).unwrap().weights().err().unwrap().to_string();
    assert!(error.contains("model.safetensors: not a complete safetensors file"), "{error}");
    let start = Pretrained::open(folder.path()).unwrap();
    let error = start.becomes(&one("cosformer").unwrap()).err().unwrap().to_string();
    assert!(
        error.contains("was trained with full") && error.contains("needs weights trained with it"),
        "{error}"
    );
}

#[test]
fn a_size_of_the_config_that_the_weights_do_not_have_is_named_with_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let (_, mut weights) = small(folder.path());
    let path = folder.path().join("config.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let says = |from: &str, to: &str| {
        assert!(good.contains(from));
        std::fs::write(&path, good.replace(from, to)).unwrap();
        Pretrained::open(folder.path()).unwrap().weights().err().unwrap().to_string()
    };
    let tables = ["word", "position", "token_type"]
        .map(|table| format!("roberta.embeddings.{table}_embeddings.weight"));
    for (from, to, tensor) in [
        ("\"vocab_size\": 270", "\"vocab_size\": 300", tables[0].as_str()),
        ("\"hidden_size\": 16", "\"hidden_size\": 32", &tables[0]),
        ("\"max_position_embeddings\": 18", "\"max_position_embeddings\": 34", &tables[1]),
        ("\"model_type\"", "\"type_vocab_size\": 2, \"model_type\"", &tables[2]),
        (
            "\"intermediate_size\": 24",
            "\"intermediate_size\": 48",
            "roberta.encoder.layer.0.intermediate.dense.weight",
        ),
    ] {
        let key = to.split('"').nth(1).unwrap();
        let told = says(from, to);
        assert!(told.contains("config.json: ") && told.contains(key) && told.contains(tensor), "{told}");
    }
    for layers in [1, 3] {
        let told = says("\"num_hidden_layers\": 2", &format!("\"num_hidden_layers\": {layers}"));
        assert!(
            told.contains(&format!(
                "num_hidden_layers is {layers}, and the weights have 2: roberta.encoder.layer.1."
            )),
            "{told}"
        );
    }
    // more token types than one, on which both agree
    std::fs::write(&path, good.replace("\"model_type\"", "\"type_vocab_size\": 2, \"model_type\"")).unwrap();
    weights.insert(TYPES.to_owned(), Tensor::zeros((2, 16), DType::F32, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
    let start = Pretrained::open(folder.path()).unwrap();
    let told = start.weights().unwrap().fit(&start.source()).err().unwrap().to_string();
    assert!(told.contains(TYPES) && told.contains("[2, 16], expected [1, 16]"), "{told}");
}

#[test]
fn a_run_gives_the_encoder_of_the_mechanism() {
    let run = tempfile::tempdir().unwrap();
    for cell in ["a", "b"] {
        std::fs::create_dir_all(run.path().join("cells").join(cell)).unwrap();
        small(&run.path().join("cells").join(cell));
    }
    let config = run.path().join("cells/b/config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"full\"", "\"cosformer:m=16\"");
    std::fs::write(&config, text).unwrap();
    let found = |mechanism: &str| {
        let start = Pretrained::find(run.path(), &one(mechanism).unwrap()).unwrap();
        start.map(|start| start.folder.file_name().unwrap().to_string_lossy().into_owned())
    };
    assert_eq!([found("full"), found("cosformer"), found("ls")].map(Option::unwrap), ["a", "b", "a"]);
    std::fs::remove_file(run.path().join("cells/a/config.json")).unwrap();
    assert_eq!(found("ls"), None);
}
