//! Activations that wait for the backward pass as bf16: what the forward pass computes does not change, gradients hardly.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor, Var};
use effattn::kernel::activation::gelu;
use effattn::kernel::cpu::matmul_format::{MatmulFormat, set_products};
use effattn::kernel::tape;
use effattn::model::layer::{Block, BlockConfig, BlockStyle, ForwardArgs};
use effattn::nn::ffn::FfnConfig;
use effattn::nn::params::{ParamBuilder, Params};

use super::blocks::numbers;
use super::zoo::{BATCH, Case, HEAD_DIM, HEADS, WIDTH, cases};

/// Distance of gradients from those of activations that do not wait.
const NEAR: f64 = 0.03;

fn blocks(case: &Case) -> Result<([Block; 2], Params)> {
    let builder = ParamBuilder::seeded(7, &Device::Cpu, true);
    let block = |layer: usize| {
        let config = BlockConfig {
            entry: case.entry,
            knobs: case.knobs.clone(),
            width: WIDTH,
            heads: HEADS,
            head_dim: HEAD_DIM,
            ffn: 2 * WIDTH,
            bias: true,
            max_len: case.config().max_len,
            causal: case.causal,
            layer,
            form: FfnConfig::default(),
            style: BlockStyle::default(),
        };
        Block::new(&config, &builder.pp(format!("layers.{layer}")))
    };
    let both = [block(0)?, block(1)?];
    Ok((both, builder.finish()))
}

/// The loss, and the gradients of the input and of all parameters, one behind another.
fn gradients(case: &Case, waits: bool) -> Result<(f32, Vec<f32>)> {
    let ([first, second], params) = blocks(case)?;
    let x = Var::from_tensor(&numbers(&[BATCH, case.queries, WIDTH], 1))?;
    let call = ForwardArgs::default();
    let loss = || {
        let y = tape::with_bf16_activations(&[], || first.forward(x.as_tensor(), &call))?;
        let y = tape::with_bf16_activations(&[&y], || second.forward(&y, &call))?;
        (&y * numbers(y.dims(), 7))?.sum_all()
    };
    let (loss, grads) = if waits {
        let (loss, tape) = tape::record(loss)?;
        let grads = tape.backward(&loss)?;
        (loss, grads)
    } else {
        let loss = loss()?;
        let grads = loss.backward()?;
        (loss, grads)
    };
    let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    let mut all = flat(grads.get(&x).expect("a gradient"))?;
    for name in params.names() {
        all.extend(flat(&params.grad(&grads, name)?)?);
    }
    Ok((loss.to_scalar()?, all))
}

/// Every mechanism in two blocks.
pub fn check() {
    set_products(MatmulFormat::Bf16);
    inner_results_wait();
    let mut worst: BTreeMap<&str, (f64, String)> = BTreeMap::new();
    // a second stream is carried by classifiers only
    let alone = |case: &Case| (case.entry.needs)(&case.knobs).stream.is_none();
    let plain = |case: &Case| !case.cls && case.keys == case.queries && alone(case);
    for case in cases(33).into_iter().filter(plain) {
        let [(want_loss, want), (loss, got)] = [false, true]
            .map(|waits| gradients(&case, waits).unwrap_or_else(|error| panic!("{case} {waits}: {error}")));
        assert_eq!(loss.to_bits(), want_loss.to_bits(), "{case}: the forward pass changed");
        let gap =
            super::norm(got.iter().zip(&want).map(|(got, want)| got - want)) / super::norm(want.into_iter());
        let entry = worst.entry(case.entry.name).or_default();
        if gap >= entry.0 {
            *entry = (gap, case.to_string());
        }
    }
    for (mechanism, (gap, case)) in &worst {
        println!("waiting {mechanism:18} {gap:.5} {case}");
    }
    for (mechanism, (gap, case)) in &worst {
        let near = if super::CANCELS.contains(mechanism) { f64::MAX } else { NEAR };
        assert!(
            (1e-5..near).contains(gap),
            "{case}: gradients of activations that wait are {gap} from the others"
        );
    }
    set_products(MatmulFormat::F32);
}

/// What is inside of a part waits, what comes out of it does not, and what goes into it only if it is named.
fn inner_results_wait() {
    let var = Var::from_tensor(&numbers(&[7, 5], 1)).expect("a variable");
    let mut seen = Vec::new();
    let (y, tape) = tape::record(|| {
        let [a, b] = [gelu(var.as_tensor())?, gelu(var.as_tensor())?];
        let y = tape::with_bf16_activations(&[&a], || {
            let inner = gelu(&(&a + &b)?)?;
            seen.push(inner.clone());
            gelu(&inner)? * 2.0
        })?;
        seen.extend([a, b]);
        y.sum_all()
    })
    .expect("forward");
    let readable = || seen.iter().map(|x| x.to_vec2::<f32>().is_ok()).collect::<Vec<_>>();
    assert_eq!(readable(), [false, false, true]);
    let grads = tape.backward(&y).expect("backward");
    assert!(grads.get(&var).is_some() && readable() == [true, true, true]);
}
