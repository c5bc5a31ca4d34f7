//! Bytes in use of a CUDA device's memory pool, from which candle's tensors come where the driver has pools.

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUmemPool_attribute, CUmemoryPool, CUresult, cuDeviceGetDefaultMemPool, cuMemPoolGetAttribute,
    cuMemPoolSetAttribute,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Error, Result};

const LIVE: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
const PEAK: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
const KEEP: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;

/// A device's default pool.
pub struct Pool(CUmemoryPool);

impl Pool {
    /// The pool of `device`, all of whose work is done.
    pub fn of(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        stream.synchronize().w()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the context is current on this thread, and `pool` is written before it is read.
        done(unsafe { cuDeviceGetDefaultMemPool(&raw mut pool, stream.context().cu_device()) })?;
        Ok(Self(pool))
    }

    fn get(&self, attribute: CUmemPool_attribute) -> Result<u64> {
        let mut value = 0u64;
        // SAFETY: these attributes are 64-bit numbers.
        done(unsafe { cuMemPoolGetAttribute(self.0, attribute, (&raw mut value).cast()) })?;
        Ok(value)
    }

    fn set(&self, attribute: CUmemPool_attribute, mut value: u64) -> Result<()> {
        // SAFETY: as for `get`.
        done(unsafe { cuMemPoolSetAttribute(self.0, attribute, (&raw mut value).cast()) })
    }

    /// Bytes in use.
    pub fn live(&self) -> Result<u64> {
        self.get(LIVE)
    }

    /// Most bytes in use since [`Self::reset_peak`].
    pub fn peak(&self) -> Result<u64> {
        self.get(PEAK)
    }

    /// Forgets the peak so far.
    pub fn reset_peak(&self) -> Result<()> {
        self.set(PEAK, 0)
    }

    /// Keeps freed memory for the next step instead of giving it back whenever the device is waited for.
    pub fn keep(&self) -> Result<()> {
        self.set(KEEP, u64::MAX)
    }
}

fn done(result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(Error::Msg(format!("CUDA's memory pool: {result:?}")))
    }
}
