//! Golden files of the short convolution, which layers put in front of recurrences (`SPEC-modern.md` section 12).

use candle_core::{DType, Device, Result, Tensor, Var};

use super::{CheckError, FileVerdict, Golden};
use effattn_kernel::short_conv::{ShortConv, short_conv};

/// Checks one file: the result, the gradients of its leaves, and the multiply-adds.
pub(super) fn check(golden: &Golden, device: &Device) -> std::result::Result<FileVerdict, CheckError> {
    let mut verdict = golden.verdict();
    let (out, mask, grads) = evaluate(golden, device).map_err(|error| golden.refused(error))?;
    let macs = out.elem_count() * golden.int("K").unwrap_or(0);
    if golden.meta("macs") != macs.to_string() {
        verdict.complain(format!("core_macs is {macs}, expected {}", golden.meta("macs")));
    }
    golden.compare(&mut verdict, "out", &out, mask.as_deref())?;
    for (leaf, grad) in golden.leaves.iter().zip(&grads) {
        golden.compare(&mut verdict, &format!("grad_{leaf}"), grad, None)?;
    }
    Ok(verdict)
}

/// The result, which of its rows count, and the gradients in the order of the leaves.
fn evaluate(golden: &Golden, device: &Device) -> Result<(Tensor, Option<Vec<f32>>, Vec<Tensor>)> {
    let tensor = |name: &str| golden.tensors.get(name).map(|tensor| tensor.to_device(device)).transpose();
    let leaf = |name: &String| -> Result<Var> {
        let missing = || candle_core::Error::msg(format!("it has no tensor {name}"));
        Var::from_tensor(&tensor(name)?.ok_or_else(missing)?)
    };
    let leaves = golden.leaves.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let find =
        |name: &str| golden.leaves.iter().position(|leaf| leaf == name).map(|at| leaves[at].as_tensor());
    let missing = || candle_core::Error::msg("it has no leaf x or w");
    let (x, weight) = (find("x").ok_or_else(missing)?, find("w").ok_or_else(missing)?);
    let mask = tensor("mask")?;
    let visible = match &mask {
        Some(mask) => x.broadcast_mul(&mask.unsqueeze(2)?)?,
        None => x.clone(),
    };
    let silu = golden.config.get("act").and_then(|act| act.as_str()) == Some("silu");
    let out = short_conv(&visible, ShortConv { weight, bias: find("b"), silu })?;
    let weights = tensor("grad_out")?.map_or_else(|| Tensor::zeros(out.shape(), DType::F32, device), Ok)?;
    let grads = (&out * weights)?.sum_all()?.backward()?;
    let grad = |var: &Var| {
        let zeros = || Tensor::zeros(var.shape(), DType::F32, device);
        grads.get(var).cloned().map_or_else(zeros, Ok)
    };
    let grads = leaves.iter().map(grad).collect::<Result<_>>()?;
    let mask = mask.map(|mask| mask.flatten_all()?.to_vec1()).transpose()?;
    Ok((out, mask, grads))
}
