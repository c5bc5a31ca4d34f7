//! Backends, counted memory and seeded random streams. With the CUDA kernels the only home of `cfg(feature)`.

#[allow(unsafe_code)]
pub mod alloc;
pub mod counters;
#[cfg(all(unix, any(feature = "cuda", test)))]
#[allow(unsafe_code)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod cuda_libraries;
pub mod machine;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod pool;
pub mod rng;
#[allow(unsafe_code)]
pub mod signals;
pub mod simd;
#[allow(unsafe_code)]
pub mod threads;

use candle_core::Device;

use effattn_record::config::settings::DeviceName;

/// A device that cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This binary was built without it.
    #[error(
        "--device {device}: this build has no {feature}; build it with: cargo build --release --features {feature}"
    )]
    NotBuilt {
        /// The device.
        device: DeviceName,
        /// The cargo feature that brings it.
        feature: &'static str,
    },
    /// It is built in but does not answer.
    #[error("--device {device} cannot be opened: {reason}; `effattn list devices` shows what can")]
    Unavailable {
        /// The device.
        device: DeviceName,
        /// What the driver said.
        reason: String,
    },
}

/// An opened device.
#[derive(Clone, Debug)]
pub struct Backend {
    name: DeviceName,
    device: Device,
}

impl Backend {
    /// Opens `name`.
    pub fn open(name: DeviceName) -> Result<Self, OpenError> {
        let opened = match name {
            DeviceName::Cpu => Ok(Device::Cpu),
            DeviceName::Cuda(_) if !cfg!(feature = "cuda") => {
                return Err(OpenError::NotBuilt { device: name, feature: "cuda" });
            }
            DeviceName::Metal if !cfg!(feature = "metal") => {
                return Err(OpenError::NotBuilt { device: name, feature: "metal" });
            }
            #[cfg(all(unix, feature = "cuda"))]
            DeviceName::Cuda(index) => Self::open_cuda(name, index)?,
            #[cfg(not(all(unix, feature = "cuda")))]
            DeviceName::Cuda(index) => Device::new_cuda(index),
            DeviceName::Metal => Device::new_metal(0),
        };
        // candle appends a backtrace where RUST_BACKTRACE asks for one
        let unavailable = |error: candle_core::Error| OpenError::Unavailable {
            device: name,
            reason: error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        let device = opened.map_err(unavailable)?;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = &device {
            // without pools every step asks the driver for its memory again
            let kept = pool::Pool::of(device).and_then(|pool| pool.keep());
            kept.unwrap_or_else(|error| log::debug!("{error}"));
        }
        Ok(Self { name, device })
    }

    /// CUDA's bindings panic where a library or a function is missing: what is missing is said, and a panic is an error in words.
    #[cfg(all(unix, feature = "cuda"))]
    fn open_cuda(name: DeviceName, index: usize) -> Result<candle_core::Result<Device>, OpenError> {
        use std::panic::{catch_unwind, set_hook, take_hook};
        if let Some(reason) = cuda_libraries::missing() {
            return Err(OpenError::Unavailable { device: name, reason });
        }
        let hook = take_hook();
        set_hook(Box::new(|_| {})); // it is told below
        let opened = catch_unwind(|| Device::new_cuda(index));
        set_hook(hook);
        opened.map_err(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            let reason = said.unwrap_or_else(|| "CUDA's libraries cannot be called".to_owned());
            OpenError::Unavailable {
                device: name,
                reason: reason.lines().next().unwrap_or_default().to_owned(),
            }
        })
    }

    /// Its name in rows.
    pub fn name(&self) -> DeviceName {
        self.name
    }

    /// What an accelerator calls itself, such as `NVIDIA H100 80GB HBM3`; none for the processor.
    pub fn accelerator(&self) -> Option<String> {
        match &self.device {
            Device::Cpu => None,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let name = device.cuda_stream().context().name();
                Some(name.unwrap_or_else(|error| format!("a card without a name ({error:?})")))
            }
            #[cfg(feature = "metal")]
            Device::Metal(device) => Some(device.device().architecture_name()),
            #[cfg(not(all(feature = "cuda", feature = "metal")))]
            _ => None,
        }
    }

    /// candle's handle.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes in use; none where they are not counted.
    pub fn live(&self) -> Option<u64> {
        match &self.device {
            Device::Cpu => Some(alloc::live() as u64),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::Pool::of(device).and_then(|pool| pool.live()).ok(),
            _ => None,
        }
    }

    /// Most bytes in use since [`Self::reset_peak`]; none where they are not counted.
    pub fn peak(&self) -> Option<u64> {
        match &self.device {
            Device::Cpu => Some(alloc::peak() as u64),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => pool::Pool::of(device).and_then(|pool| pool.peak()).ok(),
            _ => None,
        }
    }

    /// Forgets the peak so far.
    pub fn reset_peak(&self) {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = &self.device {
            let reset = pool::Pool::of(device).and_then(|pool| pool.reset_peak());
            reset.unwrap_or_else(|error| log::debug!("{error}")); // `peak` has the same error, and is then none
            return;
        }
        alloc::reset_peak();
    }

    /// Waits until everything that was asked of the device is done; call before reading a clock.
    pub fn sync(&self) -> candle_core::Result<()> {
        self.device.synchronize()
    }
}

/// Whether f32 matrix products on CUDA devices may use TF32, which has 10 bits of mantissa.
pub fn set_tf32(on: bool) {
    #[cfg(feature = "cuda")]
    candle_core::cuda_backend::set_gemm_reduced_precision_f32(on);
    let _ = on;
}

/// The cargo features that this build was made with.
pub fn features() -> Vec<&'static str> {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("metal", cfg!(feature = "metal")),
        ("accelerate", cfg!(feature = "accelerate")),
    ];
    all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_built_names_the_build_command() {
        assert!(Backend::open(DeviceName::Cpu).is_ok());
        if !cfg!(feature = "cuda") {
            let error = Backend::open(DeviceName::Cuda(0)).unwrap_err().to_string();
            assert!(error.contains("cargo build --release --features cuda"), "{error}");
        }
    }
}
