//! What golden files cannot show: garbage that is not a number, lengths below every knob, hidden sequences.

use candle_core::{Device, Result, Tensor, Var};
use serde_json::json;

use crate::attention::knobs::Knobs;
use crate::attention::{self, AttentionInput, MechanismConfig};
use crate::nn::params::ParamBuilder;
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::{PackedLayout, Qkv};

const HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const WIDTH: usize = HEADS * HEAD_DIM;

fn variants() -> Vec<(&'static str, serde_json::Value, bool)> {
    vec![
        ("dp", json!({"r": 3}), false),
        ("dp", json!({"r": 2, "l": 4, "dual_ln": true, "dp_input": "raw"}), true),
        ("ls", json!({"w": 4, "r": 3}), false),
        ("ls", json!({"w": 3, "r": 2, "dual_ln": false}), false),
        ("ls", json!({"w": 3, "r": 0}), false),
        ("ls", json!({"w": 5, "r": 2, "l": 3}), true),
        ("ls", json!({"w": 4, "r": 1, "l": 4, "dp_input": "raw", "rel_pos": true}), true),
        ("linformer", json!({"k": 3}), false),
        ("linformer-window", json!({"k": 3, "w": 2, "dual_ln": true, "share_kv": false}), false),
        ("transformer-xl", json!({}), true),
    ]
}

/// Output and gradient of packed rows and layer input, with `garbage` at hidden positions.
fn run(variant: usize, n: usize, hidden: &[usize], garbage: f32) -> Result<[Vec<f32>; 3]> {
    let (name, knobs, causal) = &variants()[variant];
    let entry = attention::find(name).expect("a mechanism of the table");
    let knobs = Knobs::from_json(entry.name, entry.knobs, knobs.as_object().expect("an object"));
    let config = MechanismConfig {
        knobs: knobs.expect("knobs that fit"),
        heads: HEADS,
        head_dim: HEAD_DIM,
        width: WIDTH,
        max_len: n,
        causal: *causal,
        layer: 0,
    };
    let device = Device::Cpu;
    let mechanism = (entry.build)(&config, &ParamBuilder::seeded(7, &device, true))?;
    let mut stream = RngStream::new(1, "inputs");
    let mut draw = |width: usize| {
        let mut data = stream.normal_tensor((n, width), 0.0, 1.0, &device)?.to_vec2::<f32>()?;
        hidden.iter().for_each(|&row| data[row].fill(garbage));
        Var::from_tensor(&Tensor::new(data, &device)?.unsqueeze(0)?)
    };
    let (rows, x) = (draw(3 * WIDTH)?, draw(WIDTH)?);
    let mut mask = vec![1f32; n];
    hidden.iter().for_each(|&row| mask[row] = 0.0);
    let mask = Tensor::new(mask, &device)?.unsqueeze(0)?;
    let qkv = Qkv::Packed { rows: rows.as_tensor().clone(), heads: HEADS, parts: PackedLayout::QKV };
    let out = mechanism
        .forward(&AttentionInput { x: Some(&x), mask: Some(&mask), ..AttentionInput::new(&qkv) })?
        .out
        .merged()?;
    let keep = mask.unsqueeze(2)?.broadcast_as(out.shape())?.ne(0f32)?;
    let out = keep.where_cond(&out, &out.zeros_like()?)?;
    let grads = out.sqr()?.sum_all()?.backward()?;
    let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let grad = |var: &Var| grads.get(var).map_or_else(|| flat(&var.zeros_like()?), flat);
    Ok([flat(&out)?, grad(&rows)?, grad(&x)?])
}

/// The pattern softmax itself only promises to ignore numbers.
fn garbage_for(variant: usize) -> &'static [f32] {
    if variants()[variant].0 == "transformer-xl" { &[1e4] } else { &[1e4, f32::NAN, f32::INFINITY] }
}

#[test]
fn what_stands_at_hidden_positions_is_inert() -> Result<()> {
    let cases: [(usize, &[usize]); 5] = [
        (1, &[]),
        (2, &[1]),
        (7, &[0, 3, 6]),
        (13, &[2, 3, 4, 5, 12]),
        (17, &[4, 5, 6, 7, 8, 9, 10, 11, 16]),
    ];
    for variant in 0..variants().len() {
        for (n, hidden) in cases {
            let calm = run(variant, n, hidden, 0.5)?;
            for &garbage in garbage_for(variant) {
                let wild = run(variant, n, hidden, garbage)?;
                assert_eq!(calm, wild, "{:?} n {n} {garbage}", variants()[variant]);
            }
            assert!(calm.iter().flatten().all(|value| value.is_finite()));
            for &row in hidden {
                let grad = &calm[1][row * 3 * WIDTH..][..3 * WIDTH];
                assert!(grad.iter().all(|&value| value == 0.0), "{:?}: {grad:?}", variants()[variant]);
            }
        }
    }
    Ok(())
}

#[test]
fn a_sequence_without_valid_positions_is_all_zeros() -> Result<()> {
    for variant in 0..variants().len() {
        let hidden: Vec<usize> = (0..5).collect();
        let garbage = garbage_for(variant)[garbage_for(variant).len() - 1];
        let [out, rows, x] = run(variant, 5, &hidden, garbage)?;
        assert!(out.iter().chain(&rows).chain(&x).all(|&value| value == 0.0), "{:?}", variants()[variant]);
    }
    Ok(())
}

#[test]
fn wrong_inputs_are_named() {
    for (name, knobs, causal, says) in [
        ("ls", json!({"rel_pos": true}), false, "causal form only"),
        ("ls", json!({"w": 0, "r": 0}), false, "nothing to attend to"),
        ("linformer", json!({"n_max": 4}), false, "n_max=4"),
        ("linformer", json!({}), true, "no causal form"),
        ("transformer-xl", json!({}), false, "causal form only"),
    ] {
        let entry = attention::find(name).expect("a mechanism of the table");
        let knobs = Knobs::from_json(entry.name, entry.knobs, knobs.as_object().expect("an object"));
        let shape = attention::Shape {
            batch: 1,
            heads: 2,
            head_dim: 4,
            width: 8,
            queries: 5,
            keys: 5,
            causal,
            cls: false,
            grid: None,
        };
        let error = (entry.validate)(&knobs.expect("knobs that fit"), &shape).expect_err(name);
        assert!(error.contains(says), "{error}");
    }
}
