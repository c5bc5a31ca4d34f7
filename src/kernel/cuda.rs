//! CUDA kernels as C strings, compiled by NVRTC for the device at hand when they are first used.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use candle_core::{Error, Result};

/// Kernels that are compiled together.
pub struct Module<'a> {
    /// Name, different for different sources.
    pub name: &'a str,
    /// CUDA C.
    pub source: &'a str,
    /// Macros that are defined.
    pub defines: &'a [(&'a str, usize)],
}

/// Compiled modules by name, defines and architecture.
static COMPILED: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);

/// A kernel of `module` that may use `memory` bytes of shared memory per block.
///
/// # Errors
/// No NVRTC library, a source that it refuses, a device without that much shared memory.
pub fn function(device: &CudaDevice, module: &Module, kernel: &str, memory: usize) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let (major, minor) = stream.context().compute_capability().map_err(Error::wrap)?;
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
