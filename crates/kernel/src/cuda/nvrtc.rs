//! NVIDIA's compiler, where it is at hand: kernels that it takes are valid CUDA.

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::Library;

use super::Module;

const ARCHITECTURES: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// Checks that NVRTC takes the first of `modules` for every architecture and the others, the same text with other macros, for
/// the lowest: one module takes it one to two seconds.
pub fn assert_compiles<'a>(modules: impl IntoIterator<Item = Module<'a>>) {
    for (index, module) in modules.into_iter().enumerate() {
        let architectures = if index == 0 { &ARCHITECTURES[..] } else { &ARCHITECTURES[..1] };
        for &architecture in architectures {
            if let Err(complaint) = nvrtc(&module, architecture) {
                panic!("{}, {:?}, compute_{architecture}: {complaint}", module.name, module.defines);
            }
        }
    }
}

/// Compiles `module` by the NVRTC library that EFFATTN_NVRTC names; its complaints, if it has any.
pub fn nvrtc(module: &Module, architecture: u32) -> std::result::Result<(), String> {
    type Create = unsafe extern "C" fn(
        *mut *mut c_void,
        *const c_char,
        *const c_char,
        c_int,
        *const c_void,
        *const c_void,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
    type Log = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;
    type LogSize = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
    let path = std::env::var("EFFATTN_NVRTC").expect("EFFATTN_NVRTC names an NVRTC library");
    let mut options: Vec<String> =
        module.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    options.push(format!("--gpu-architecture=compute_{architecture}"));
    let options: Vec<CString> = options.iter().map(|text| CString::new(text.as_str()).unwrap()).collect();
    let options: Vec<*const c_char> = options.iter().map(|text| text.as_ptr()).collect();
    let (source, name) = (CString::new(module.source).unwrap(), CString::new(module.name).unwrap());
    // SAFETY: the symbols have these types (nvrtc.h), and what is passed outlives the calls.
    unsafe {
        let library = Library::new(path).map_err(|error| error.to_string())?;
        let (mut program, none) = (std::ptr::null_mut(), std::ptr::null());
        let create = library.get::<Create>(b"nvrtcCreateProgram").unwrap();
        assert_eq!(create(&raw mut program, source.as_ptr(), name.as_ptr(), 0, none, none), 0);
        let compile = library.get::<Compile>(b"nvrtcCompileProgram").unwrap();
        let status = compile(program, options.len() as c_int, options.as_ptr());
        let mut size = 0;
        library.get::<LogSize>(b"nvrtcGetProgramLogSize").unwrap()(program, &raw mut size);
        let mut log = vec![0u8; size];
        library.get::<Log>(b"nvrtcGetProgramLog").unwrap()(program, log.as_mut_ptr().cast());
        if status == 0 { Ok(()) } else { Err(String::from_utf8_lossy(&log).into_owned()) }
    }
}
