//! GELU in its exact form, x/2 (1 + erf(x / sqrt 2)), and with tanh in the place of erf; ReLU; SiLU; SwiGLU; softplus.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorage;

use super::cpu::{self, par, rows};
#[cfg(feature = "cuda")]
use super::cuda::{rows as device_rows, tensors};
use super::op::{self, FusedOp, SavedOutput};
use super::tape;

/// Elements that one thread handles at a time.
const CHUNK: usize = 1 << 15;

/// Exact GELU.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if super::fused(x) {
        return tape::apply(&[&x.contiguous()?], Gelu { tanh: false });
    }
    composed(x)
}

/// x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016): Flax's GELU, off the exact one by up to 5e-4.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&x.contiguous()?], Gelu { tanh: true });
    }
    x.gelu() // candle's is this one
}

/// The definition in plain candle operations.
pub fn composed(x: &Tensor) -> Result<Tensor> {
    let erf = (x * std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
    (x * 0.5)? * (erf + 1.0)?
}

/// max(x, 0), without a gradient at exactly 0 (candle's own passes one on to dead units).
pub fn relu(x: &Tensor) -> Result<Tensor> {
    x * x.gt(0f32)?.to_dtype(x.dtype())?
}

/// ln(1 + exp(x)); small results keep their digits.
pub fn softplus(x: &Tensor) -> Result<Tensor> {
    scaled_softplus(x, 1.0, 1.0)
}

/// `outer` ln(1 + exp(`inner` x)); with -1 twice it is the logarithm of the sigmoid.
pub fn scaled_softplus(x: &Tensor, inner: f64, outer: f64) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        let [inner, outer] = [inner, outer].map(|factor| factor as f32);
        return tape::apply(&[&tape::contiguous(x)?], Softplus { inner, outer });
    }
    composed_softplus(&(x * inner)?)? * outer
}

/// x sigmoid(x).
pub fn silu(x: &Tensor) -> Result<Tensor> {
    if super::fused_cpu(x.device()) && x.dtype() == DType::F32 {
        return tape::apply(&[&tape::contiguous(x)?], Silu);
    }
    x.silu()
}

/// The definition in plain candle operations, in f64.
fn composed_softplus(x: &Tensor) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F64)?;
    let (low, high) = (wide.minimum(30.0)?, relu(&(wide - 30.0)?)?);
    (((low.exp()? + 1.0)?.log()? + high)?).to_dtype(x.dtype())
}

/// SiLU(gate) * up, element by element (Shazeer 2020).
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Gate::Silu.apply(gate, up)
}

/// sigmoid(gate) * up, element by element (Dauphin et al. 2017).
pub fn glu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Gate::Sigmoid.apply(gate, up)
}

/// What a gate is passed through before it opens something.
#[derive(Clone, Copy)]
enum Gate {
    Silu,
    Sigmoid,
}

impl Gate {
    fn apply(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        if gate.dims() != up.dims() {
            bail!("a gate {:?} and what it opens, {:?}, have different shapes", gate.dims(), up.dims());
        }
        if super::fused_cpu(gate.device()) && gate.dtype() == DType::F32 {
            return tape::apply(&[&tape::contiguous(gate)?, &tape::contiguous(up)?], self);
        }
        match self {
            Self::Silu => gate.silu()? * up,
            Self::Sigmoid => (gate.neg()?.exp()? + 1.0)?.recip()? * up,
        }
    }
}

impl FusedOp for Gate {
    fn name(&self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
            Self::Sigmoid => "glu",
        }
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [gate, up] = cpu::slices(operands)?;
        let y = par::build(gate.len(), CHUNK, |index, y| {
            let here = index * CHUNK..index * CHUNK + y.len();
            match self {
                Self::Silu => rows::swiglu(&gate[here.clone()], &up[here], y),
                Self::Sigmoid => rows::glu(&gate[here.clone()], &up[here], y),
            }
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [gate, up] = op::operands(operands)?;
        let (dgate, dup) = cpu::with_slices([gate, up, grad], |[gate, up, dy]| {
            let lens = (dy.len(), CHUNK);
            Ok(par::build_two(
                lens,
                lens,
                || (),
                |(), index, dgate, dup| {
                    let here = index * CHUNK..index * CHUNK + dgate.len();
                    let back = match self {
                        Self::Silu => rows::swiglu_backward,
                        Self::Sigmoid => rows::glu_backward,
                    };
                    back(&gate[here.clone()], &up[here.clone()], &dy[here], dgate, dup);
                },
            ))
        })?;
        Ok(vec![cpu::gradient(gate, dgate)?, cpu::gradient(up, dup)?])
    }
}

struct Silu;

impl FusedOp for Silu {
    fn name(&self) -> &'static str {
        "silu"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let y = par::build(x.len(), CHUNK, |index, y| rows::silu(&x[index * CHUNK..][..y.len()], y));
        Ok((y, operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let dx = cpu::with_slices([x, grad], |[x, dy]| {
            Ok(par::build(x.len(), CHUNK, |index, dx| {
                let here = index * CHUNK..index * CHUNK + dx.len();
                rows::silu_backward(&x[here.clone()], &dy[here], dx);
            }))
        })?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

struct Softplus {
    inner: f32,
    outer: f32,
}

impl FusedOp for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let y = par::build(x.len(), CHUNK, |index, y| {
            rows::softplus(&x[index * CHUNK..][..y.len()], self.inner, self.outer, y);
        });
        Ok((y, operands[0].1.shape().clone()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        let dx = cpu::with_slices([x, grad], |[x, dy]| {
            Ok(par::build(x.len(), CHUNK, |index, dx| {
                let here = index * CHUNK..index * CHUNK + dx.len();
                rows::softplus_backward(&x[here.clone()], &dy[here], self.inner, self.outer, dx);
            }))
        })?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

struct Gelu {
    tanh: bool,
}

impl Gelu {
    fn values(&self, x: &[f32], y: &mut [f32]) {
        if self.tanh { rows::gelu_tanh(x, y) } else { rows::gelu(x, y) }
    }

    fn gradients(&self, x: &[f32], dy: &[f32], dx: &mut [f32]) {
        if self.tanh { rows::gelu_tanh_backward(x, dy, dx) } else { rows::gelu_backward(x, dy, dx) }
    }
}

impl FusedOp for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn forward(&self, operands: &[(&CpuStorage, &Layout)]) -> Result<(Vec<f32>, Shape)> {
        let [x] = cpu::slices(operands)?;
        let y = par::build(x.len(), CHUNK, |index, y| self.values(&x[index * CHUNK..][..y.len()], y));
        Ok((y, operands[0].1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn forward_cuda(&self, operands: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        let shape = operands[0].1.shape();
        tensors::forward(operands, shape, |device, [x]| device_rows::gelu(device, x, shape.elem_count()))
    }

    fn backward(&self, operands: &[&Tensor], _: SavedOutput, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = op::operands(operands)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return tensors::with_views([x, grad], |device, operands| {
                let dx = device_rows::gelu_backward(device, operands, x.elem_count())?;
                Ok(vec![Some(tensors::tensor(device, dx, x.shape()))])
            });
        }
        let dx = cpu::with_slices([x, grad], |[x, dy]| {
            Ok(par::build(x.len(), CHUNK, |index, dx| {
                let here = index * CHUNK..index * CHUNK + dx.len();
                self.gradients(&x[here.clone()], &dy[here], dx);
            }))
        })?;
        Ok(vec![cpu::gradient(x, dx)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, randn};

    #[test]
    fn fused_is_the_twin() {
        for dims in [vec![1], vec![3, 17], vec![2, 20_011]] {
            let x = [(randn("x", &dims) * 2.0).unwrap()];
            check(&format!("{dims:?}"), &x, 1e-6, |x| gelu(&x[0]));
            let pair = [(randn("gate", &dims) * 2.0).unwrap(), randn("up", &dims)];
            check(&format!("swiglu {dims:?}"), &pair, 1e-6, |x| swiglu(&x[0], &x[1]));
            check(&format!("glu {dims:?}"), &pair, 1e-6, |x| glu(&x[0], &x[1]));
            let wide = [(randn("x", &dims) * 8.0).unwrap()];
            check(&format!("softplus {dims:?}"), &wide, 1e-6, |x| softplus(&x[0]));
            check(&format!("log sigmoid {dims:?}"), &wide, 1e-6, |x| scaled_softplus(&x[0], -1.0, -0.3));
            check(&format!("silu {dims:?}"), &wide, 1e-6, |x| silu(&x[0]));
            check(&format!("tanh {dims:?}"), &x, 2e-6, |x| gelu_tanh(&x[0]));
        }
    }

    #[test]
    fn softplus_keeps_its_digits_and_its_slope() {
        let x = candle_core::Var::new(&[-1e5f32, -20.0, 0.0, 3.0, 1e5], &candle_core::Device::Cpu).unwrap();
        let y = softplus(&x).unwrap();
        let want = [0.0, (-20f64).exp().ln_1p() as f32, 2f32.ln(), 3f64.exp().ln_1p() as f32, 1e5];
        let grads = y.sum_all().unwrap().backward().unwrap();
        let slopes = grads.get(&x).unwrap().to_vec1::<f32>().unwrap();
        let pairs = y.to_vec1::<f32>().unwrap().into_iter().zip(want);
        let pairs = pairs.chain(slopes.into_iter().zip([0.0, (-20f32).exp(), 0.5, 0.95257413, 1.0]));
        for (got, want) in pairs {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} is not {want}");
        }
    }

    #[test]
    fn a_transposed_input_is_copied() {
        let x = randn("x", &[3, 5]);
        check("transposed", &[x], 1e-6, |x| gelu(&x[0].t()?));
    }
}
