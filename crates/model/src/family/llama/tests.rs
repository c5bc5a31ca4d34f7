use super::*;
use crate::attention::choose::choose;

const LEN: usize = 37;

fn small(model: &str, kv_heads: usize) -> LlamaConfig {
    let choice = choose(&model.parse().unwrap()).unwrap().remove(0);
    LlamaConfig {
        entry: choice.entry,
        knobs: choice.knobs,
        backbone: backbone(2, 24, 4, 32),
        kv_heads,
        vocab: 13,
        block: LEN,
        theta: 10_000.0,
        eps: 1e-5,
        tied: true,
    }
}

/// With larger matrices than a new model's, which make all logits alike.
fn built(config: &LlamaConfig) -> Llama {
    let builder = ParamBuilder::seeded(3, &Device::Cpu, false);
    Llama::new(config, &builder).unwrap();
    let params = builder.finish();
    let given = params.names().map(|name| {
        let value = params.value(name).unwrap();
        let value = if value.rank() == 2 { (value * 12.0).unwrap() } else { value };
        (name.to_owned(), value)
    });
    Llama::new(config, &ParamBuilder::given(given.collect(), &Device::Cpu, false)).unwrap()
}

fn ids() -> Tensor {
    let ids: Vec<u32> = (0..2 * LEN as u32).map(|at| at * at % 13).collect();
    Tensor::from_vec(ids, (2, LEN), &Device::Cpu).unwrap()
}

fn apart(a: &Tensor, b: &Tensor) -> f32 {
    let largest = |x: &Tensor| x.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    largest(&(a - b).unwrap()) / largest(b)
}

#[test]
fn a_token_after_another_is_the_forward_pass_at_every_position() {
    for (model, kv_heads) in [
        ("full", 4),
        ("full", 2),
        ("full", 1),
        ("window:w=5", 2),
        ("rope", 4),
        ("gqa:groups=2", 4),
        ("linear", 2),
    ] {
        let config = small(model, kv_heads);
        let model_built = built(&config);
        let whole = model_built.forward(&ids(), Dropout::NONE).unwrap();
        let mut states = model_built.start_decoding(2, LEN).unwrap().unwrap();
        for at in 0..LEN {
            let token = ids().narrow(1, at, 1).unwrap().contiguous().unwrap();
            let logits = model_built.decode(&token, &mut states).unwrap();
            let apart = apart(&logits, &whole.narrow(1, at, 1).unwrap());
            assert!(apart <= 1e-4, "{model}, {kv_heads} heads of keys, at {at}: {apart}");
        }
        let held: usize = states.iter().map(|state| state.bytes()).sum();
        let said = config.state_bytes(LEN);
        assert_eq!(
            held as u64,
            2 * said,
            "{model}, {kv_heads}: two sequences hold something else than the cost"
        );
    }
}

/// A mechanism with a rotation of its own is not turned a second time, and shared heads are those of the mechanism that shares.
#[test]
fn the_blocks_rotation_and_shared_heads_are_those_of_rope_and_gqa() {
    for (block, mechanism, kv_heads) in [("full", "rope", 4), ("full", "gqa:groups=2", 2)] {
        let config = small(block, kv_heads);
        let own = LlamaConfig { kv_heads: 4, ..small(mechanism, 4) };
        let [a, b] = [&config, &own].map(|config| built(config).forward(&ids(), Dropout::NONE).unwrap());
        assert!(apart(&a, &b) <= 1e-5, "{block} and {mechanism}: {}", apart(&a, &b));
        let unrotated = built(&small("rope:rotary=none", 4)).forward(&ids(), Dropout::NONE).unwrap();
        assert!(apart(&unrotated, &b) > 1e-3, "the rotation changes nothing");
    }
}

#[test]
fn published_sizes() {
    let choice = choose(&"full".parse().unwrap()).unwrap().remove(0);
    let model = |backbone: Backbone, kv_heads, vocab, tied| LlamaConfig {
        entry: choice.entry,
        knobs: choice.knobs.clone(),
        backbone,
        kv_heads,
        vocab,
        block: 64,
        theta: 10_000.0,
        eps: 1e-5,
        tied,
    };
    for (config, parameters) in [
        (model(backbone(32, 4096, 32, 11_008), 32, 32_000, false), 6_738_415_616),
        (model(backbone(32, 4096, 32, 14_336), 8, 128_256, false), 8_030_261_248),
        (model(backbone(16, 2048, 32, 8192), 8, 128_256, true), 1_235_814_400),
        (model(backbone(30, 576, 9, 1536), 3, 49_152, true), 134_515_008),
    ] {
        assert_eq!(config.parameters().unwrap(), parameters);
        // projections, feed-forward, attention, logits; the norms are counted besides
        let Backbone { layers, width: d, heads, ffn, .. } = config.backbone;
        let (head_dim, n) = (d / heads, 64);
        let products = layers * n * (d * head_dim * (2 * heads + 2 * config.kv_heads) + 3 * d * ffn)
            + layers * 2 * heads * n * n * head_dim
            + n * d * config.vocab;
        let norms = n * d * 4 * (2 * layers + 1);
        assert_eq!(config.flops(n), (products + norms) as u64);
    }
}

#[test]
fn heads_that_cannot_be_shared_or_rotated_are_refused() {
    let says = |config: LlamaConfig| config.validate().unwrap_err().to_string();
    assert!(says(small("full", 3)).contains("4 heads of width 6 cannot share 3 heads"));
    let odd = Backbone { inner: 4 * 5, ..backbone(2, 24, 4, 32) };
    assert!(says(LlamaConfig { backbone: odd, ..small("full", 2) }).contains("width 5"));
    assert!(says(small("nystrom", 4)).contains("causal"));
}

#[test]
fn a_single_token_is_trained_on() {
    let config = LlamaConfig { block: 1, ..small("full", 2) };
    let wanted = SyntheticInput { batch: 2, len: 1, text: b"text", seed: 1 };
    let batches = config.synthetic_batches(&wanted, &Device::Cpu).unwrap();
    let loss = Model::loss(&mut built(&config), &batches[0], DropoutRng::new(1)).unwrap();
    assert!(loss.count == 2.0 && loss.sum.to_scalar::<f32>().unwrap().is_finite());
}
