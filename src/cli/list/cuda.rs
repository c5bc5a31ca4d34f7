//! What a mechanism runs on CUDA, observed in a small call on the CPU.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Result, Tensor};
use serde_json::{Value, json};

use effattn_kernel::cuda_coverage::{CudaCoverage, observe};
use effattn_kernel::heads::{PackedLayout, Qkv};
use effattn_kernel::{KernelMode, with_mode};
use effattn_model::attention::choose::MechanismChoice;
use effattn_model::attention::{AttentionInput, HeadShape, MechanismConfig, Projections};
use effattn_model::nn::params::ParamBuilder;

/// Length, number of heads and their width in the observed call: a square, so that it can be an image.
const LEN: usize = 256;
const HEADS: usize = 2;
const HEAD_DIM: usize = 32;

/// The operations of one call of `choice`, without the projections around it.
pub(super) fn coverage(choice: &MechanismChoice) -> Result<CudaCoverage> {
    let (width, knobs) = (HEADS * HEAD_DIM, choice.knobs.clone());
    let needs = (choice.entry.needs)(&knobs);
    let causal = !choice.entry.support.bidirectional;
    let config =
        MechanismConfig { knobs, heads: HEADS, head_dim: HEAD_DIM, width, max_len: LEN, causal, layer: 0 };
    let mechanism = (choice.entry.build)(&config, &ParamBuilder::seeded(0, &Device::Cpu, false))?;
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu);
    let part = |shape: Option<HeadShape>| {
        let of = |shape: HeadShape| shape.of(HEADS, HEAD_DIM);
        shape.map(of).map(|(heads, dim)| ones(&[1, heads, LEN, dim])).transpose()
    };
    let Projections { q, k, v } = needs.projections;
    let qkv = Qkv::Separate { q: part(q)?, k: part(k)?, v: part(v)? };
    let rows = ones(&[1, LEN, 3 * width])?;
    let global = Qkv::Packed { rows, heads: HEADS, parts: PackedLayout::QKV };
    let x = ones(&[1, LEN, width])?;
    let stream = needs.stream.map(|rows| ones(&[1, rows, width])).transpose()?;
    let input = AttentionInput {
        x: needs.x.then_some(&x),
        residual: needs.residual.then_some(&x),
        stream: stream.as_ref(),
        global: needs.global.then_some(&global),
        ..AttentionInput::new(&qkv)
    };
    let (result, seen) = observe(|| with_mode(KernelMode::Fused, || mechanism.forward(&input)));
    result.map(|_| seen)
}

fn words(names: &BTreeSet<&'static str>) -> String {
    names.iter().map(|name| name.replace('_', " ")).collect::<Vec<_>>().join(", ")
}

/// `kernel`, `composed` or `both`; `-` where the call cannot be made.
pub(super) fn mark(choice: &MechanismChoice) -> &'static str {
    match coverage(choice) {
        Err(_) => "-",
        Ok(seen) if seen.kernels.is_empty() => "composed",
        Ok(seen) if seen.composed.is_empty() => "kernel",
        Ok(_) => "both",
    }
}

/// The operations with kernels and the composed ones.
pub(super) fn describe(choice: &MechanismChoice) -> Value {
    match coverage(choice) {
        Ok(seen) => json!({ "kernels": seen.kernels, "composed": seen.composed }),
        Err(_) => Value::Null,
    }
}

/// The same in a sentence.
pub(super) fn explain(choice: &MechanismChoice) -> String {
    let with = |text: &str, names: &BTreeSet<_>| format!("{text} ({})", words(names));
    let (kernels, composed) = ("kernels of this program", "candle's operations, composed");
    match coverage(choice) {
        Err(error) => format!("unknown: {error}"),
        Ok(seen) => match (seen.kernels.is_empty(), seen.composed.is_empty()) {
            (true, true) => composed.to_owned(),
            (true, false) => with(composed, &seen.composed),
            (false, true) => with(kernels, &seen.kernels),
            (false, false) => {
                format!("{}; {}", with(kernels, &seen.kernels), with(composed, &seen.composed))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use effattn_model::attention::entries;

    #[test]
    fn every_mechanism_says_what_runs_on_cuda() {
        for entry in entries() {
            let choice = MechanismChoice::default_of(entry);
            let seen = coverage(&choice).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
            let expected: Option<(&[&str], &[&str])> = match entry.name {
                "full" | "window" | "streaming" => None,
                "linear" => Some((&["linear_attention"], &[])),
                "fnet" => Some((&[], &["fourier"])),
                _ => continue,
            };
            match expected {
                None => assert!(seen.kernels.contains("attend"), "{}: {seen:?}", entry.name),
                Some((kernels, composed)) => {
                    assert_eq!(seen.kernels.into_iter().collect::<Vec<_>>(), kernels, "{}", entry.name);
                    assert_eq!(seen.composed.into_iter().collect::<Vec<_>>(), composed, "{}", entry.name);
                }
            }
        }
        let composed = MechanismChoice::default_of(effattn_model::attention::find("fnet").unwrap());
        assert_eq!(mark(&composed), "composed");
        assert!(explain(&composed).contains("fourier"), "{}", explain(&composed));
    }
}
