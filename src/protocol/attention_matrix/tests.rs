use super::*;
use effattn_model::attention::choose::choose;
use effattn_model::attention::observe::observed;
use effattn_model::char_lm::{Cache, CharLm};
use effattn_model::family::{ModelRequest, SizeOverrides, character_lm};
use effattn_model::nn::params::Init;

fn one(model: &str) -> MechanismChoice {
    choose(&model.parse().unwrap()).unwrap().remove(0)
}

fn probe(len: usize, causal: bool) -> ProbeConfig {
    ProbeConfig { len, causal, heads: 2, head_dim: 8, ..ProbeConfig::default() }
}

#[test]
fn full_attention_is_the_softmax_of_the_scores() {
    for causal in [false, true] {
        let probe = probe(19, causal);
        let matrix = implied(&one("full"), &probe).unwrap();
        let q = probe.tensor("q", &[1, 2, 19, 8]).unwrap().get(0).unwrap().get(0).unwrap();
        let k = probe.tensor("k", &[1, 2, 19, 8]).unwrap().get(0).unwrap().get(0).unwrap();
        let scores = q.matmul(&k.t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
        for (query, scores) in scores.iter().enumerate() {
            let last = if causal { query } else { 18 };
            let weights: Vec<f32> = scores[..=last].iter().map(|s| (s / 8f32.sqrt()).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for (key, weight) in matrix.row(query).iter().enumerate() {
                let expected = weights.get(key).map_or(0.0, |weight| weight / sum);
                assert!((weight - expected).abs() < 1e-5, "{query} {key}: {weight} {expected}");
            }
        }
    }
}

#[test]
fn the_cos_distances_are_what_divides_cosformer_from_relu() {
    for causal in [false, true] {
        let probe = probe(13, causal);
        let [with, without] = ["cosformer", "relu-linear"].map(|name| implied(&one(name), &probe).unwrap());
        let cos = cos_distances(&probe);
        for query in 0..13 {
            let product: Vec<f32> =
                without.row(query).iter().zip(cos.row(query)).map(|(weight, cos)| weight * cos).collect();
            let sum: f32 = product.iter().sum();
            for (key, (product, with)) in product.iter().zip(with.row(query)).enumerate() {
                assert!((product / sum - with).abs() < 1e-5, "{causal} {query} {key}");
            }
        }
    }
}

#[test]
fn rows_of_linear_attention_sum_to_one() {
    for model in ["linear", "cosformer", "relu-linear", "performer:m=16", "nystrom", "reformer"] {
        let matrix = implied(&one(model), &probe(17, false)).unwrap();
        for query in 0..17 {
            let sum: f32 = matrix.row(query).iter().sum();
            assert!((sum - 1.0).abs() < 1e-2, "{model}: row {query} sums to {sum}");
        }
    }
}

#[test]
fn a_matrix_times_the_values_is_the_result() {
    for model in [
        "full",
        "gqa:groups=1",
        "linear",
        "cosformer",
        "based:Dk=4",
        "retention",
        "retention:score_norm=torchscale",
        "gla",
        "mamba2",
        "mamba2:Dk=4,out_norm=gated-rms",
        "deltanet",
        "deltanet:neg_eigval=true,gate=swish",
        "gated-deltanet",
    ] {
        for causal in [false, true] {
            let (probe, choice) = (ProbeConfig { head: 1, ..probe(21, causal) }, one(model));
            if probe.admits(&choice).is_err() {
                continue;
            }
            let matrix = implied(&choice, &probe).unwrap();
            assert!(!matrix.note.contains("channel"), "{model}: {}", matrix.note);
            let knobs = linear_form(choice.entry, &choice.knobs).unwrap().0;
            let asked = ProbedMechanism::new(choice.entry, knobs, &probe).unwrap();
            let values = asked.drawn_values("others").unwrap();
            let out = asked.out(&values).unwrap().to_vec2::<f32>().unwrap();
            let values = values.to_vec2::<f32>().unwrap();
            for (query, out) in out.iter().enumerate() {
                let row = matrix.row(query);
                let future: f32 = row[query + 1..].iter().map(|weight| weight.abs()).sum();
                assert!(!causal || future == 0.0, "{model}: {query} sees its future");
                for (channel, out) in out.iter().enumerate() {
                    let sum: f32 = row.iter().zip(&values).map(|(weight, v)| weight * v[channel]).sum();
                    assert!((sum - out).abs() < 1e-4, "{model} {causal} {query} {channel}: {sum} {out}");
                }
            }
        }
    }
}

#[test]
fn retention_is_scores_that_decay_with_the_distance() {
    let probe = ProbeConfig { head: 1, ..probe(12, true) };
    let matrix = implied(&one("retention:rotary=none,gamma=0.9+0.5"), &probe).unwrap();
    assert_eq!(matrix.note, "with norm=none, gate=none");
    let of = |name: &str| {
        let rows = probe.tensor(name, &[1, 2, 12, 8]).unwrap().get(0).unwrap().get(1).unwrap();
        rows.to_vec2::<f32>().unwrap()
    };
    let (q, k) = (of("q"), of("k"));
    for query in 0..12 {
        for key in 0..=query {
            let score: f32 = q[query].iter().zip(&k[key]).map(|(q, k)| q * k).sum();
            let expected = score / 8f32.sqrt() * 0.5f32.powi((query - key) as i32);
            let weight = matrix.row(query)[key];
            assert!((weight - expected).abs() < 1e-5, "{query} {key}: {weight} {expected}");
        }
    }
}

#[test]
fn channels_with_weights_of_their_own_are_drawn_one_by_one() {
    for model in ["aft-simple", "aft-local:window=3"] {
        let matrix = implied(&one(model), &probe(9, true)).unwrap();
        assert_eq!(matrix.note, "channel 0 of 8, each has a matrix of its own");
    }
    let probe = probe(9, false);
    let matrix = implied(&one("aft-simple"), &probe).unwrap();
    let first = |name: &str| -> Vec<f32> {
        let rows = probe.tensor(name, &[1, 2, 9, 8]).unwrap().get(0).unwrap().get(0).unwrap();
        rows.narrow(1, 0, 1).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let (q, k) = (first("q"), first("k"));
    let sum: f32 = k.iter().map(|k| k.exp()).sum();
    for (row, q) in q.iter().enumerate() {
        for (key, (found, k)) in matrix.row(row).iter().zip(&k).enumerate() {
            let expected = k.exp() / sum / (1.0 + (-q).exp());
            assert!((found - expected).abs() < 1e-5, "{row} {key}");
        }
    }
}

#[test]
fn what_has_no_matrix_says_why() {
    for (model, reason) in [
        ("s5", "it mixes the layer input itself and has no values of heads; leave s5 out"),
        ("fnet", "it mixes the layer input itself"),
        ("mega", "it mixes the layer input itself"),
        ("luna", "its values are keys of a second attention, so that they enter the weights; leave luna out"),
        ("luna:tie_kv=false", "its values are keys of a second attention"),
    ] {
        let error = implied(&one(model), &probe(16, false)).unwrap_err().to_string();
        assert!(error.contains("has no attention matrix: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn normalised_values_have_no_matrix() {
    let error = implied(&one("ls"), &probe(16, false)).unwrap_err().to_string();
    assert!(error.contains("set dual_ln=false"), "{error}");
    assert!(implied(&one("ls:dual_ln=false"), &probe(16, false)).is_ok());
}

#[test]
fn algorithm_2_counts_up_to_the_entry_that_exceeds_the_threshold() {
    let matrix = Matrix {
        queries: 2,
        keys: 4,
        values: vec![0.1, 0.5, 0.3, 0.1, 0.25, 0.25, 0.25, 0.25],
        ..Matrix::default()
    };
    assert_eq!(counted(&matrix, 0.6).values, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
    assert_eq!(counted(&matrix, 0.0).values, [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(counted(&matrix, 1.0).values, [1.0; 8]);
}

#[test]
fn given_tensors_take_the_place_of_drawn_ones() {
    let given =
        HashMap::from([("q".to_owned(), Tensor::zeros((1, 2, 5, 8), DType::F32, &Device::Cpu).unwrap())]);
    let matrix = implied(&one("full"), &ProbeConfig { given, ..probe(5, false) }).unwrap();
    assert!(matrix.values.iter().all(|weight| (weight - 0.2).abs() < 1e-6));
    let given =
        HashMap::from([("q".to_owned(), Tensor::zeros((1, 2, 4, 8), DType::F32, &Device::Cpu).unwrap())]);
    let error = implied(&one("full"), &ProbeConfig { given, ..probe(5, false) }).unwrap_err().to_string();
    assert!(error.contains("q has shape [1, 2, 4, 8], expected [1, 2, 5, 8]"), "{error}");
}

/// Queries and keys of head `head` in layer `layer` of `model` by their definition: the projections of LN(x).
fn projected(
    net: (&CharLm, &HashMap<String, Tensor>),
    ids: &Tensor,
    (layer, head): (usize, usize),
) -> [Tensor; 2] {
    let (model, weights) = net;
    let of = |name: &str| &weights[&format!("layers.{layer}.{name}")];
    let x = &model.trace(ids, &Cache::default()).unwrap().2[layer];
    let mean = x.mean_keepdim(2).unwrap();
    let centred = x.broadcast_sub(&mean).unwrap();
    let deviation = (centred.sqr().unwrap().mean_keepdim(2).unwrap() + 1e-5).unwrap().sqrt().unwrap();
    let normal = centred.broadcast_div(&deviation).unwrap();
    let normal = normal.broadcast_mul(of("norm1.weight")).unwrap();
    let normal = normal.broadcast_add(of("norm1.bias")).unwrap().squeeze(0).unwrap();
    ["q", "k"].map(|part| {
        let rows = normal.matmul(&of(&format!("attn.{part}.weight")).t().unwrap()).unwrap();
        rows.narrow(1, head * 8, 8).unwrap().contiguous().unwrap()
    })
}

#[test]
fn the_matrix_of_a_causal_model_is_the_masked_softmax_of_its_scores() {
    let choice = one("full");
    let sizes = SizeOverrides {
        layers: Some(2),
        width: Some(16),
        heads: Some(2),
        ffn: Some(24),
        ..SizeOverrides::default()
    };
    let asked = ModelRequest {
        len: Some(32),
        cached: Some(0),
        vocab: Some(13),
        ..ModelRequest::new("charlm-small", &choice, &sizes)
    };
    let config = character_lm::config(&asked).unwrap();
    let drawn = ParamBuilder::seeded(3, &Device::Cpu, false)
        .with_init(|spec| if spec.shape.len() == 2 { Init::Uniform { bound: 0.7 } } else { spec.init });
    let ids: Vec<u32> = (0..19u32).map(|at| at * at % 13).collect();
    let ids = Tensor::from_vec(ids, (1, 19), &Device::Cpu).unwrap();
    let run = || {
        let model = CharLm::new(&config, &drawn)?;
        model.forward(&ids, &Cache::default())?;
        Ok(model)
    };
    let (model, calls) = observed(run).unwrap();
    let params = drawn.finish();
    let weights = params.names().map(|name| (name.to_owned(), params.value(name).unwrap())).collect();
    assert_eq!(calls.len(), 2, "a call a layer");
    for (layer, call) in calls.iter().enumerate() {
        for head in 0..2 {
            let matrix = of_call(call, head).unwrap();
            let [q, k] = projected((&model, &weights), &ids, (layer, head));
            let scores = q.matmul(&k.t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(matrix.queries, 19);
            for (query, scores) in scores.iter().enumerate() {
                let exps: Vec<f32> =
                    scores[..=query].iter().map(|score| (score / 8f32.sqrt()).exp()).collect();
                let sum: f32 = exps.iter().sum();
                assert!((matrix.row(query).iter().sum::<f32>() - 1.0).abs() < 1e-5);
                for (key, weight) in matrix.row(query).iter().enumerate() {
                    let expected = exps.get(key).map_or(0.0, |exp| exp / sum);
                    let seen = (layer, head, query, key);
                    assert!(key <= query || *weight == 0.0, "{seen:?} sees its future");
                    assert!((weight - expected).abs() < 1e-4, "{seen:?}: {weight} {expected}");
                }
            }
        }
    }
    assert!(observed(|| Ok(())).unwrap().1.is_empty());
}
