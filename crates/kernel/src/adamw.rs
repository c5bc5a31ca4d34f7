//! One AdamW update of a flat parameter (Loshchilov & Hutter, arXiv:1711.05101; decay scaled by the rate).
//!
//! m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
//! p <- p - lr wd p - lr (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps), old p in both places.

use std::sync::Mutex;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, CudaStorage, cudarc::driver::CudaSlice};
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, Var, bail};

use super::cpu;
use super::cpu::math::{load, store};
#[cfg(feature = "cuda")]
use super::cuda::{BufferView, rows, tensors};

/// Settings of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment in this step, also in its correction.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the rate.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping, micro-batches); 1 leaves it alone.
    pub grad_scale: f64,
    /// Number k of this update, from 1.
    pub step: u64,
}

/// First and second moment of one parameter, zero at the start.
#[derive(Debug)]
pub struct Moments(State);

#[derive(Debug)]
enum State {
    /// In plain memory, where the fused CPU update writes in place.
    Host { m: Vec<f32>, v: Vec<f32> },
    /// As flat tensors, for the composed update.
    Tensors { m: Tensor, v: Tensor },
    /// On a CUDA device, where its kernel writes in place.
    #[cfg(feature = "cuda")]
    Device { m: CudaSlice<f32>, v: CudaSlice<f32>, device: CudaDevice },
}

impl Moments {
    /// Zeros for `var`.
    pub fn zeros(var: &Var) -> Result<Self> {
        let zeros = || Tensor::zeros(var.elem_count(), var.dtype(), var.device());
        Ok(Self(State::Tensors { m: zeros()?, v: zeros()? }))
    }

    /// Moments as stored by [`Moments::tensors`].
    pub fn from_tensors(m: &Tensor, v: &Tensor) -> Result<Self> {
        if m.elem_count() != v.elem_count() {
            bail!("moments of {} and {} elements belong to no parameter", m.elem_count(), v.elem_count());
        }
        Ok(Self(State::Tensors { m: m.flatten_all()?.detach(), v: v.flatten_all()?.detach() }))
    }

    /// First and second moment as flat tensors on the CPU or on the parameter's device.
    pub fn tensors(&self) -> Result<(Tensor, Tensor)> {
        match &self.0 {
            State::Tensors { m, v } => Ok((m.clone(), v.clone())),
            State::Host { m, v } => Ok((host_tensor(m.clone())?, host_tensor(v.clone())?)),
            #[cfg(feature = "cuda")]
            State::Device { m, v, device } => {
                let copy = |floats: &CudaSlice<f32>| -> Result<Tensor> {
                    Ok(tensors::tensor(
                        device,
                        tensors::copy(device, BufferView::all(floats), floats.len())?,
                        floats.len(),
                    ))
                };
                Ok((copy(m)?, copy(v)?))
            }
        }
    }

    fn host(&mut self) -> Result<(&mut [f32], &mut [f32])> {
        if let State::Tensors { m, v } = &self.0 {
            self.0 = State::Host { m: m.to_vec1()?, v: v.to_vec1()? };
        }
        match &mut self.0 {
            State::Host { m, v } => Ok((m, v)),
            _ => bail!("moments were not moved to the host"),
        }
    }

    #[cfg(feature = "cuda")]
    fn device(&mut self) -> Result<(&mut CudaSlice<f32>, &mut CudaSlice<f32>)> {
        if let State::Tensors { m, v } = &self.0 {
            let len = m.elem_count();
            self.0 = tensors::with_views([m, v], |device, [m, v]| {
                let (m, v) = (tensors::copy(device, m, len)?, tensors::copy(device, v, len)?);
                Ok(State::Device { m, v, device: device.clone() })
            })?;
        }
        match &mut self.0 {
            State::Device { m, v, .. } => Ok((m, v)),
            _ => bail!("moments were not moved to the device"),
        }
    }
}

fn host_tensor(data: Vec<f32>) -> Result<Tensor> {
    let len = data.len();
    Tensor::from_vec(data, len, &candle_core::Device::Cpu)
}

/// Updates `var` and `moments` in place with the gradient `grad` of the same number of elements.
pub fn update(var: &Var, grad: &Tensor, moments: &mut Moments, hyper: &Hyper) -> Result<()> {
    check(var, grad, hyper)?;
    if super::fused_cpu(var.device()) && var.dtype() == DType::F32 && grad.dtype() == DType::F32 {
        let (m, v) = moments.host()?;
        if m.len() != var.elem_count() {
            bail!("moments of {} elements for a parameter of {}", m.len(), var.elem_count());
        }
        return var.inplace_op2(&grad.contiguous()?, &Update { hyper: *hyper, moments: Mutex::new((m, v)) });
    }
    #[cfg(feature = "cuda")]
    if super::fused(var.as_tensor()) && grad.dtype() == DType::F32 {
        let (m, v) = moments.device()?;
        if m.len() != var.elem_count() {
            bail!("moments of {} elements for a parameter of {}", m.len(), var.elem_count());
        }
        let update = DeviceUpdate { hyper: *hyper, moments: Mutex::new((m, v)) };
        return var.inplace_op2(&grad.contiguous()?, &update);
    }
    composed(var, grad, moments, hyper)
}

fn check(var: &Var, grad: &Tensor, hyper: &Hyper) -> Result<()> {
    if grad.elem_count() != var.elem_count() {
        bail!("a gradient of {} elements for a parameter of {}", grad.elem_count(), var.elem_count());
    }
    if hyper.step == 0 {
        bail!("AdamW counts its steps from 1");
    }
    Ok(())
}

/// The definition in plain candle operations.
pub fn composed(var: &Var, grad: &Tensor, moments: &mut Moments, hyper: &Hyper) -> Result<()> {
    check(var, grad, hyper)?;
    let (m, v) = moments.tensors()?;
    let grad = (grad.flatten_all()?.detach() * hyper.grad_scale)?;
    let old = var.as_detached_tensor().flatten_all()?;
    let m = ((m * hyper.beta1)? + (&grad * (1.0 - hyper.beta1))?)?;
    let v = ((v * hyper.beta2)? + (grad.sqr()? * (1.0 - hyper.beta2))?)?;
    let (correct1, correct2) = corrections(hyper);
    let root = ((&v / correct2)?.sqrt()? + hyper.eps)?;
    let change = ((&m / correct1)? / root)?;
    let new = ((&old - (&old * (hyper.lr * hyper.weight_decay))?)? - (change * hyper.lr)?)?;
    var.set(&new.reshape(var.shape())?)?;
    moments.0 = State::Tensors { m, v };
    Ok(())
}

/// 1 - b1^k and 1 - b2^k.
fn corrections(hyper: &Hyper) -> (f64, f64) {
    let power = |beta: f64| 1.0 - beta.powf(hyper.step as f64);
    (power(hyper.beta1), power(hyper.beta2))
}

struct Update<'a> {
    hyper: Hyper,
    moments: Mutex<(&'a mut [f32], &'a mut [f32])>,
}

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, p: &mut CpuStorage, layout: &Layout, g: &CpuStorage, g_layout: &Layout) -> Result<()> {
        let grad = cpu::slice(g, g_layout)?;
        let CpuStorage::F32(data) = p else { bail!("the fused AdamW updates f32 parameters") };
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("a strided parameter") };
        let mut moments = self.moments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (m, v) = &mut *moments;
        const CHUNK: usize = 1 << 14;
        let hyper = Factors::new(&self.hyper);
        let p = data[start..end].chunks_mut(CHUNK);
        let state = m.chunks_mut(CHUNK).zip(v.chunks_mut(CHUNK));
        let pieces = p.zip(grad.chunks(CHUNK)).zip(state);
        cpu::par::each_piece(pieces, |_, ((p, g), (m, v))| step(p, g, m, v, hyper));
        Ok(())
    }
}

/// [`Update`] on a CUDA device.
#[cfg(feature = "cuda")]
struct DeviceUpdate<'a> {
    hyper: Hyper,
    moments: Mutex<(&'a mut CudaSlice<f32>, &'a mut CudaSlice<f32>)>,
}

#[cfg(feature = "cuda")]
impl InplaceOp2 for DeviceUpdate<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        bail!("moments are on a device, the parameter is not")
    }

    fn cuda_fwd(
        &self,
        p: &mut CudaStorage,
        layout: &Layout,
        grad: &CudaStorage,
        grad_layout: &Layout,
    ) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("a strided parameter") };
        let (device, grad) = (p.device.clone(), tensors::view(grad, grad_layout)?);
        let update = rows::Update { grad, count: end - start, factors: factors(&self.hyper) };
        let mut moments = self.moments.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (m, v) = &mut *moments;
        rows::adamw(&device, update, p.as_cuda_slice_mut::<f32>()?, start, [&mut **m, &mut **v])
    }
}

/// What the inner loop multiplies with.
#[derive(Clone, Copy)]
struct Factors {
    beta1: f32,
    beta2: f32,
    new1: f32,
    new2: f32,
    keep: f32,
    rate: f32,
    root: f32,
    eps: f32,
    grad_scale: f32,
}

impl Factors {
    fn new(hyper: &Hyper) -> Self {
        let (correct1, correct2) = corrections(hyper);
        Self {
            beta1: hyper.beta1 as f32,
            beta2: hyper.beta2 as f32,
            new1: (1.0 - hyper.beta1) as f32,
            new2: (1.0 - hyper.beta2) as f32,
            keep: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            rate: (hyper.lr / correct1) as f32,
            root: (1.0 / correct2.sqrt()) as f32,
            eps: hyper.eps as f32,
            grad_scale: hyper.grad_scale as f32,
        }
    }
}

/// What a CUDA kernel multiplies with, in the order of its arguments.
#[cfg(any(feature = "cuda", test))]
pub(super) fn factors(hyper: &Hyper) -> [f32; 9] {
    let Factors { beta1, beta2, new1, new2, keep, rate, root, eps, grad_scale } = Factors::new(hyper);
    [beta1, beta2, new1, new2, keep, rate, root, eps, grad_scale]
}

crate::simd_fn! {
    fn step<S>(simd, p: &'a mut [f32], g: &'a [f32], m: &'a mut [f32], v: &'a mut [f32], f: Factors) {
        for at in (0..p.len()).step_by(S::F32_LANES) {
            let grad = simd.mul_f32s(load(simd, g, at), simd.splat_f32s(f.grad_scale));
            let new_m = simd.mul_f32s(simd.splat_f32s(f.new1), grad);
            let new_m = simd.mul_add_e_f32s(simd.splat_f32s(f.beta1), load(simd, m, at), new_m);
            let new_v = simd.mul_f32s(simd.splat_f32s(f.new2), simd.mul_f32s(grad, grad));
            let new_v = simd.mul_add_e_f32s(simd.splat_f32s(f.beta2), load(simd, v, at), new_v);
            let root = simd.mul_add_e_f32s(simd.sqrt_f32s(new_v), simd.splat_f32s(f.root), simd.splat_f32s(f.eps));
            let change = simd.div_f32s(simd.mul_f32s(simd.splat_f32s(f.rate), new_m), root);
            let new_p = simd.sub_f32s(simd.mul_f32s(load(simd, p, at), simd.splat_f32s(f.keep)), change);
            store(simd, m, at, new_m);
            store(simd, v, at, new_v);
            store(simd, p, at, new_p);
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{KernelMode, with_mode};

    fn hyper(step: u64) -> Hyper {
        let lr = if step == 1 { 0.0 } else { 2e-2 / step as f64 };
        Hyper { lr, beta1: 0.9, beta2: 0.98, eps: 1e-9, weight_decay: 0.1, grad_scale: 0.5, step }
    }

    fn trajectory(mode: KernelMode, dtype: DType, len: usize) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        with_mode(mode, || {
            let start =
                (Tensor::arange(0.0, len as f64, &Device::Cpu).unwrap() * 0.37).unwrap().sin().unwrap();
            let var = Var::from_tensor(&start.to_dtype(dtype).unwrap()).unwrap();
            let mut moments = Moments::zeros(&var).unwrap();
            for step in 1..=4 {
                let grad = (start.affine(1.0 + step as f64, 0.1).unwrap().cos().unwrap() - 0.3).unwrap();
                update(&var, &grad.to_dtype(dtype).unwrap(), &mut moments, &hyper(step)).unwrap();
            }
            let (m, v) = moments.tensors().unwrap();
            let vec = |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            (vec(var.as_tensor()), vec(&m), vec(&v))
        })
    }

    #[test]
    fn four_steps_agree_with_the_twin_in_f64() {
        for len in [1, 15, 16, 17, 1000, 40_001] {
            let fused = trajectory(KernelMode::Fused, DType::F32, len);
            let exact = trajectory(KernelMode::Composed, DType::F64, len);
            for (got, exact) in [(fused.0, exact.0), (fused.1, exact.1), (fused.2, exact.2)] {
                for (got, exact) in got.iter().zip(&exact) {
                    assert!((got - exact).abs() <= 1e-6, "{got} instead of {exact} of {len}");
                }
            }
        }
    }

    #[test]
    fn a_rate_of_zero_changes_no_weight_but_the_moments() {
        let var = Var::new(&[1.5f32, -2.0], &Device::Cpu).unwrap();
        let grad = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let mut moments = Moments::zeros(&var).unwrap();
        update(&var, &grad, &mut moments, &hyper(1)).unwrap();
        assert_eq!(var.to_vec1::<f32>().unwrap(), [1.5, -2.0]);
        assert!(moments.tensors().unwrap().0.to_vec1::<f32>().unwrap()[1] > 0.0);
    }

    #[test]
    fn moments_survive_a_round_trip_through_tensors() {
        let var = Var::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap();
        let grad = Tensor::new(&[0.1f32, -0.2, 0.3], &Device::Cpu).unwrap();
        let mut moments = Moments::zeros(&var).unwrap();
        update(&var, &grad, &mut moments, &hyper(2)).unwrap();
        let (m, v) = moments.tensors().unwrap();
        let mut restored = Moments::from_tensors(&m, &v).unwrap();
        let other = Var::from_tensor(&var.as_tensor().copy().unwrap()).unwrap();
        update(&var, &grad, &mut moments, &hyper(3)).unwrap();
        update(&other, &grad, &mut restored, &hyper(3)).unwrap();
        assert_eq!(var.to_vec1::<f32>().unwrap(), other.to_vec1::<f32>().unwrap());
    }

    #[test]
    fn wrong_lengths_and_step_zero_are_errors() {
        let var = Var::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let grad = Tensor::new(&[1f32], &Device::Cpu).unwrap();
        let mut moments = Moments::zeros(&var).unwrap();
        assert!(update(&var, &grad, &mut moments, &hyper(1)).is_err());
        let good = Tensor::new(&[1f32, 1.0], &Device::Cpu).unwrap();
        assert!(update(&var, &good, &mut moments, &Hyper { step: 0, ..hyper(1) }).is_err());
        let mut short = Moments::from_tensors(&grad, &grad).unwrap();
        assert!(update(&var, &good, &mut short, &hyper(1)).is_err());
    }
}
