use candle_core::{DType, Device, Result, Tensor};

use super::*;
use crate::attention::knobs::Knobs;
use crate::attention::{ConvForm, MechanismEntry, full};
use crate::{Backbone, Classifier, ClassifierConfig, Pooling};
use effattn_kernel::device::rng::RngStream;
use effattn_kernel::heads::Heads;

const WIDTH: usize = 8;
const GROUPED: Projections = Projections::grouped(Some(1));

/// Gives back what it was given: the values, or x.
struct Echo;

impl Mechanism for Echo {
    fn forward(&self, input: &AttentionInput) -> Result<AttentionOutput> {
        let Ok(v) = input.qkv.v() else {
            let x = input.layer_input()?;
            let rows = match input.residual {
                Some(residual) => (x + residual)?,
                None => x.clone(),
            };
            return Ok(AttentionOutput { stream: input.stream.cloned(), ..AttentionOutput::rows(rows) });
        };
        let q = input.qkv.q()?;
        let (_, heads, _, width) = q.dims4()?;
        assert_eq!(input.qkv.k()?.dims(), v.dims(), "keys and values have the same groups");
        assert_eq!((heads, width), (2, WIDTH / 2));
        let groups = v.dim(1)?;
        Ok(Heads::Split(v.repeat((1, heads / groups, 1, 1))?).into())
    }
}

/// A mechanism of these needs; `needs` is a function without captures.
fn echo(needs: fn(&Knobs) -> Needs) -> &'static MechanismEntry {
    Box::leak(Box::new(MechanismEntry {
        name: "echo",
        needs,
        knobs: &[],
        validate: |_, _| Ok(()),
        build: |_, _| Ok(Box::new(Echo)),
        ..full::ENTRY
    }))
}

/// Those of a mixer on x.
fn mixer() -> Needs {
    let (projections, output) = (Projections::NONE, OutputForm::Plain);
    Needs { projections, x: true, output, ..Needs::default() }
}

/// Those of an attention behind convolutions.
fn convolved() -> Needs {
    Needs { conv: Some(ConvForm { taps: 3, bias: false, silu: true }), ..Needs::default() }
}

fn config(entry: &'static MechanismEntry) -> ClassifierConfig {
    let backbone = Backbone::new(2, WIDTH, 2, 16);
    let (knobs, pooling) = (Knobs::defaults(entry.knobs), Pooling::Mean);
    ClassifierConfig { entry, knobs, backbone, vocab: 12, max_len: 6, classes: 3, pooling, towers: 1 }
}

/// Names of the parameters of the first layer, and its output for a random x [2, 6, 8].
fn layer(entry: &'static MechanismEntry, mask: Option<&Tensor>) -> Result<(Vec<String>, Tensor, Tensor)> {
    let builder = ParamBuilder::seeded(3, &Device::Cpu, true);
    let layer = AttentionLayer::new(&config(entry).block(0), &builder)?;
    let x = RngStream::new(1, "x").normal_tensor((2, 6, WIDTH), 0.0, 1.0, &Device::Cpu)?;
    let out = layer.forward(&x, &ForwardArgs { mask, ..ForwardArgs::default() })?;
    Ok((builder.finish().names().map(String::from).collect(), x, out))
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    let largest = (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    a.dims() == b.dims() && largest.to_scalar::<f32>().unwrap() < 1e-5
}

#[test]
fn a_mixer_on_x_has_no_projections_and_the_layer_adds_its_residual() {
    let (names, x, out) = layer(echo(|_| mixer()), None).unwrap();
    assert_eq!(names, ["norm1.weight", "norm1.bias"]);
    let one = |value: f32| Tensor::full(value, WIDTH, &Device::Cpu).unwrap();
    let normal = norm::layer_norm(&x, &one(1.0), &one(0.0), norm::EPS).unwrap();
    assert!(close(&out, &(&x + &normal).unwrap()));
    let whole = echo(|_| Needs { residual: true, output: OutputForm::Whole, ..mixer() });
    assert!(close(&layer(whole, None).unwrap().2, &out), "the mechanism adds the same residual");
    let (names, _, half) = layer(echo(|_| Needs { output: OutputForm::HalfGlu, ..mixer() }), None).unwrap();
    assert_eq!(names[2..], ["attn.o.weight", "attn.o.bias"]);
    let (names, _, both) = layer(echo(|_| Needs { output: OutputForm::Glu, ..mixer() }), None).unwrap();
    assert_eq!(names[4..], ["attn.o_gate.weight", "attn.o_gate.bias"]);
    assert!(!close(&half, &both) && half.dims() == x.dims());
}

#[test]
fn grouped_projections_are_tensors_of_their_own_and_make_the_same_layer_as_equal_ones() {
    let (names, _, out) = layer(echo(|_| Needs { projections: GROUPED, ..Needs::default() }), None).unwrap();
    let builder = ParamBuilder::seeded(3, &Device::Cpu, true);
    AttentionLayer::new(
        &config(echo(|_| Needs { projections: GROUPED, ..Needs::default() })).block(0),
        &builder,
    )
    .unwrap();
    let params = builder.finish();
    let shape = |name: &str| params.value(name).unwrap().dims().to_vec();
    assert_eq!((shape("attn.k.weight"), shape("attn.q.weight")), (vec![4, WIDTH], vec![WIDTH, WIDTH]));
    assert!(names.contains(&"attn.v.bias".to_owned()));
    assert_eq!(out.dims(), [2, 6, WIDTH]);
    let equal = echo(|_| Needs { projections: Projections::grouped(Some(2)), ..Needs::default() });
    let plain = echo(|_| Needs::default());
    assert!(close(&layer(equal, None).unwrap().2, &layer(plain, None).unwrap().2));
}

#[test]
fn a_convolution_sees_the_past_alone_and_hides_what_the_mask_hides() {
    for projections in [Projections::QKV, GROUPED] {
        let entry = if projections == GROUPED {
            echo(|_| Needs { projections: GROUPED, ..convolved() })
        } else {
            echo(|_| convolved())
        };
        let builder = ParamBuilder::seeded(3, &Device::Cpu, true);
        let layer = AttentionLayer::new(&config(entry).block(0), &builder).unwrap();
        assert!(builder.finish().names().any(|name| name == "attn.conv_v.weight"));
        let x = RngStream::new(1, "x").normal_tensor((1, 6, WIDTH), 0.0, 1.0, &Device::Cpu).unwrap();
        let mask = Tensor::new(&[[1f32, 0.0, 1.0, 1.0, 1.0, 1.0]], &Device::Cpu).unwrap();
        let run = |x: &Tensor| {
            layer.forward(x, &ForwardArgs { mask: Some(&mask), ..ForwardArgs::default() }).unwrap()
        };
        let from = |x: &Tensor, start: usize| x.narrow(1, start, 6 - start).unwrap();
        let changed = |at: usize| {
            let row = Tensor::full(5f32, (1, 1, WIDTH), &Device::Cpu).unwrap();
            let row = (row * Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((1, 1, 8))).unwrap();
            x.slice_assign(&[0..1, at..at + 1, 0..WIDTH], &row).unwrap()
        };
        let out = run(&x);
        assert!(close(&from(&out, 2), &from(&run(&changed(1)), 2)), "a hidden position is seen");
        let moved = run(&changed(2));
        assert!(close(&from(&out, 5), &from(&moved, 5)) && !close(&from(&out, 4), &from(&moved, 4)));
    }
}

#[test]
fn the_second_stream_goes_from_layer_to_layer_and_other_models_refuse_it() {
    let entry = echo(|_| Needs { stream: Some(5), ..mixer() });
    let builder = ParamBuilder::seeded(3, &Device::Cpu, true);
    let model = Classifier::new(&config(entry), &builder).unwrap();
    let params = builder.finish();
    assert_eq!(params.value("stream").unwrap().dims(), [5, WIDTH]);
    let ids = Tensor::ones((2, 6), DType::U32, &Device::Cpu).unwrap();
    assert_eq!(model.forward(&ids, None).unwrap().dims(), [2, 3]);
    let block = Block::new(&config(entry).block(0), &ParamBuilder::seeded(3, &Device::Cpu, true)).unwrap();
    let x = Tensor::zeros((2, 6, WIDTH), DType::F32, &Device::Cpu).unwrap();
    let stream = RngStream::new(1, "p").normal_tensor((2, 5, WIDTH), 0.0, 1.0, &Device::Cpu).unwrap();
    let (_, next) = block.forward_with_stream(&x, &stream, &ForwardArgs::default()).unwrap();
    assert!(next.dims() == stream.dims() && !close(&next, &stream));
    assert!(block.forward(&x, &ForwardArgs::default()).is_err());
    let needs = (entry.needs)(&Knobs::defaults(&[]));
    assert!(needs.beyond_plain(2, 4).is_some() && Needs::default().beyond_plain(2, 4).is_none());
}
