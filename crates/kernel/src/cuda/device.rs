//! A CUDA device: kernels are compiled for it by NVRTC when they are first used.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cudaDataType,
};
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use candle_core::cuda_backend::{CudaDevice, gemm_reduced_precision_f32};
use candle_core::{Error, Result, bail};

use super::{Arg, KernelDevice, Launch, MatmulTarget, Matrix, Module, THREADS};
use crate::cpu::matmul_format::{MatmulFormat, matmul_format};

/// Compiled modules by name, defines and architecture.
static COMPILED: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);

/// A kernel of `module` that may use `memory` bytes of shared memory per block.
fn function(device: &CudaDevice, module: &Module, kernel: &str, memory: usize) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let (major, minor) = stream.context().compute_capability().map_err(Error::wrap)?;
    if major < 8 {
        bail!("this device has compute capability {major}.{minor}; the kernels need 8.0 (A100) or newer");
    }
    let defines = module.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    let mut options: Vec<String> = defines.collect();
    options.push(format!("--gpu-architecture=compute_{major}{minor}"));
    let key = format!("{} {}", module.name, options.join(" "));
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = compiled.get_or_insert_default();
    if !compiled.contains_key(&key) {
        let options = CompileOptions { options, ..CompileOptions::default() };
        let ptx = compile_ptx_with_opts(module.source, options).map_err(Error::wrap)?;
        compiled.insert(key.clone(), ptx.to_src());
    }
    let function = device.get_or_load_custom_func(kernel, &key, &compiled[&key])?.into_cuda_function();
    if memory > 48 << 10 {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, memory as i32).map_err(Error::wrap)?;
    }
    Ok(function)
}

/// A device has no empty allocations: at least one element.
fn some<T: Copy + Default>(words: &[T]) -> Vec<T> {
    if words.is_empty() { vec![T::default()] } else { words.to_vec() }
}

impl KernelDevice for CudaDevice {
    type Floats = CudaSlice<f32>;
    type Ints = CudaSlice<i32>;
    type Longs = CudaSlice<i64>;

    fn zeros(&self, len: usize) -> Result<CudaSlice<f32>> {
        self.alloc_zeros(len.max(1))
    }

    fn fresh(&self, len: usize) -> Result<CudaSlice<f32>> {
        // SAFETY: any bits are floats, and kernels write the buffer before anything reads it: the tests fill it with NaN.
        unsafe { self.alloc::<f32>(len.max(1)) }
    }

    fn ints(&self, words: &[i32]) -> Result<CudaSlice<i32>> {
        self.clone_htod(&some(words))
    }

    fn longs(&self, words: &[i64]) -> Result<CudaSlice<i64>> {
        self.clone_htod(&some(words))
    }

    fn multiply(&self, a: Matrix<Self>, b: Matrix<Self>, to: MatmulTarget<Self>) -> Result<()> {
        let ((m, k), (inner, n)) = (a.dims(), b.dims());
        let reach = if m * n == 0 { 0 } else { (m - 1) * to.stride + n };
        let inside = |matrix: &Matrix<Self>| matrix.view.start + matrix.extent() <= matrix.view.floats.len();
        if k != inner || !inside(&a) || !inside(&b) || to.start + reach > to.floats.len() {
            bail!("a product [{m}, {k}] x [{inner}, {n}] that does not fit its buffers");
        }
        if m * n * k == 0 {
            return Ok(()); // what is written was zero, and nothing is added
        }
        let size = |count: usize| i32::try_from(count).map_err(Error::wrap);
        let turn =
            |turned| if turned { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N };
        let compute = match matmul_format() {
            MatmulFormat::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_16BF,
            MatmulFormat::F32 if gemm_reduced_precision_f32() => {
                cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
            }
            MatmulFormat::F32 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let (float, any) = (cudaDataType::CUDA_R_32F, cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP);
        let (alpha, beta) = (1f32, if to.add { 1f32 } else { 0.0 });
        let (stream, blas) = (self.cuda_stream(), self.cublas_handle());
        let (a_view, b_view) = (a.view.floats.slice(a.view.start..), b.view.floats.slice(b.view.start..));
        let mut c_view = to.floats.slice_mut(to.start..);
        let (a_at, _a) = a_view.device_ptr(&stream);
        let (b_at, _b) = b_view.device_ptr(&stream);
        let (c_at, _c) = c_view.device_ptr_mut(&stream);
        // cuBLAS counts by columns: c^T = b^T a^T of what it sees as b^T and a^T.
        // SAFETY: the matrices lie within their buffers, c is borrowed exclusively, and with a factor of 0 it is only written.
        unsafe {
            gemm_ex(
                *blas.handle(),
                turn(b.turned),
                turn(a.turned),
                size(n)?,
                size(m)?,
                size(k)?,
                (&raw const alpha).cast(),
                b_at as *const c_void,
                float,
                size(b.stride)?,
                a_at as *const c_void,
                float,
                size(a.stride)?,
                (&raw const beta).cast(),
                c_at as *mut c_void,
                float,
                size(to.stride)?,
                compute,
                any,
            )
        }
        .map_err(Error::wrap)
    }

    fn launch(&self, launch: &Launch, mut arguments: Vec<Arg<Self>>) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let function = function(self, &launch.module, launch.kernel, launch.shared)?;
        let size = |count: usize| u32::try_from(count).map_err(Error::wrap);
        let [x, y, z] = launch.grid;
        let config = LaunchConfig {
            grid_dim: (size(x)?, size(y)?, size(z)?),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: size(launch.shared)?,
        };
        let views = arguments.iter().filter_map(|argument| match argument {
            Arg::In(view) => Some(view.floats.slice(view.start.min(view.floats.len())..)),
            _ => None,
        });
        let views: Vec<_> = views.collect();
        let numbers = arguments.iter().filter_map(|argument| match argument {
            Arg::Int(number) => Some(i32::try_from(*number).map_err(Error::wrap)),
            _ => None,
        });
        let numbers = numbers.collect::<Result<Vec<i32>>>()?;
        let (mut views, mut numbers) = (views.iter(), numbers.iter());
        let stream = self.cuda_stream();
        let mut builder = stream.launch_builder(&function);
        for argument in &mut arguments {
            match argument {
                Arg::In(_) => views.next().map(|view| builder.arg(view)),
                Arg::Out(floats) => Some(builder.arg(&mut **floats)),
                Arg::Ints(words) => Some(builder.arg(*words)),
                Arg::Longs(words) => Some(builder.arg(*words)),
                Arg::Float(number) => Some(builder.arg(&*number)),
                Arg::Int(_) => numbers.next().map(|number| builder.arg(number)),
                Arg::Long(number) => Some(builder.arg(&*number)),
            };
        }
        // SAFETY: the arguments are those of the kernel in number, order and type: the tests launch every kernel by the
        // same code and compare them with its signature. Every kernel keeps its accesses within them.
        unsafe { builder.launch(config) }.map_err(Error::wrap)?;
        Ok(())
    }
}
