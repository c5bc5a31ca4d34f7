//! Backends, counted memory and seeded random streams; the only home of `cfg(feature)`.

#[allow(unsafe_code)]
pub mod alloc;
pub mod machine;
pub mod rng;
#[allow(unsafe_code)]
pub mod threads;

use candle_core::Device;

use crate::config::settings::DeviceName;

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
    ///
    /// # Errors
    /// A device this build lacks (names the build command) or that does not answer.
    pub fn open(name: DeviceName) -> Result<Self, OpenError> {
        let opened = match name {
            DeviceName::Cpu => Ok(Device::Cpu),
            DeviceName::Cuda(_) if !cfg!(feature = "cuda") => {
                return Err(OpenError::NotBuilt { device: name, feature: "cuda" });
            }
            DeviceName::Metal if !cfg!(feature = "metal") => {
                return Err(OpenError::NotBuilt { device: name, feature: "metal" });
            }
            DeviceName::Cuda(index) => Device::new_cuda(index),
            DeviceName::Metal => Device::new_metal(0),
        };
        let unavailable =
            |error: candle_core::Error| OpenError::Unavailable { device: name, reason: error.to_string() };
        Ok(Self { name, device: opened.map_err(unavailable)? })
    }

    /// Its name in rows.
    pub fn name(&self) -> DeviceName {
        self.name
    }

    /// candle's handle.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until everything that was asked of the device is done; call before reading a clock.
    ///
    /// # Errors
    /// What a queued operation failed with.
    pub fn sync(&self) -> candle_core::Result<()> {
        self.device.synchronize()
    }
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
