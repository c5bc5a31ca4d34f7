//! The CPU as a [`KernelDevice`]: sources compiled by the C compiler, every CUDA thread a thread of the system.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;

use candle_core::Result;
use libloading::Library;
use tempfile::TempDir;

use super::{Arg, KernelDevice, Launch, MatmulTarget, Matrix, Module};

/// Compiles and runs kernels on this computer.
pub struct Emulated {
    folder: TempDir,
    built: RefCell<HashMap<String, Built>>,
}

struct Built {
    library: Library,
    functions: Vec<Function>,
}

/// Name and argument types of a kernel.
struct Function {
    name: String,
    arguments: Vec<String>,
}

impl Default for Emulated {
    fn default() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder"), built: RefCell::default() }
    }
}

/// The kernels of a source: `KERNEL void name(types and names)`.
fn functions(source: &str) -> Vec<Function> {
    let heads = source.split("\nKERNEL void ").skip(1);
    let function = |head: &str| {
        let (name, rest) = head.split_once('(').expect("arguments");
        let (arguments, _) = rest.split_once(')').expect("an end of the arguments");
        let kind = |argument: &str| {
            let argument = argument.split_whitespace().collect::<Vec<_>>().join(" ");
            argument.trim_end_matches(|c: char| c.is_alphanumeric() || c == '_').trim().to_owned()
        };
        Function { name: name.to_owned(), arguments: arguments.split(',').map(kind).collect() }
    };
    heads.map(function).collect()
}

/// Whether an argument may stand for a parameter of this type.
fn fits(argument: &Arg<Emulated>, kind: &str) -> bool {
    match argument {
        Arg::In(_) => kind == "const float *",
        Arg::Out(_) => kind == "float *",
        Arg::Longs(_) => kind == "const Header *",
        Arg::Ints(_) => ["const int *", "const Tile *", "const Stream *"].contains(&kind),
        Arg::Float(_) => kind == "float",
        Arg::Int(_) => kind == "int",
        Arg::Long(_) => kind == "long long",
    }
}

fn build(folder: &Path, module: &Module, stem: &str) -> Built {
    let functions = functions(module.source);
    let case = |(number, function): (usize, &Function)| {
        let argument = |(at, kind): (usize, &String)| format!("*({kind} *)a[{at}]");
        let arguments: Vec<String> = function.arguments.iter().enumerate().map(argument).collect();
        format!("case {number}: {}({}); break;\n", function.name, arguments.join(", "))
    };
    let cases: String = functions.iter().enumerate().map(case).collect();
    let calls = format!("static void call(int kernel, void **a) {{ switch (kernel) {{\n{cases}}} }}\n");
    let file = |end: &str| folder.join(format!("{stem}.{end}"));
    std::fs::write(file("cu"), module.source).expect("a file");
    std::fs::write(file("h"), calls).expect("a file");
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/emulate.c");
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    compiler.args(["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function"]);
    compiler.args(module.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    compiler.arg(format!("-DSOURCE=\"{}\"", file("cu").display()));
    compiler.arg(format!("-DCALLS=\"{}\"", file("h").display()));
    compiler.arg(runner).args(["-lm", "-lpthread", "-o"]).arg(file("so"));
    let output = compiler.output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library has no initialisers.
    let library = unsafe { Library::new(file("so")).expect("the compiled kernels") };
    Built { library, functions }
}

impl KernelDevice for Emulated {
    type Floats = Vec<f32>;
    type Ints = Vec<i32>;
    type Longs = Vec<i64>;

    fn zeros(&self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    /// Not numbers, so that an element that was not written is found.
    fn fresh(&self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![f32::NAN; len])
    }

    fn ints(&self, words: &[i32]) -> Result<Vec<i32>> {
        Ok(words.to_vec())
    }

    fn longs(&self, words: &[i64]) -> Result<Vec<i64>> {
        Ok(words.to_vec())
    }

    fn multiply(&self, a: Matrix<Self>, b: Matrix<Self>, to: MatmulTarget<Self>) -> Result<()> {
        let ((m, k), (inner, n)) = (a.dims(), b.dims());
        assert_eq!(k, inner, "a product [{m}, {k}] x [{inner}, {n}]");
        let at = |matrix: &Matrix<Self>, i: usize, j: usize| {
            let (row, column) = if matrix.turned { (j, i) } else { (i, j) };
            assert!(row < matrix.rows && column < matrix.cols && matrix.cols <= matrix.stride);
            matrix.view.floats[matrix.view.start + row * matrix.stride + column]
        };
        for i in 0..m {
            for j in 0..n {
                let sum: f32 = (0..k).map(|l| at(&a, i, l) * at(&b, l, j)).sum();
                let c = &mut to.floats[to.start + i * to.stride + j];
                *c = if to.add { *c + sum } else { sum };
            }
        }
        Ok(())
    }

    fn launch(&self, launch: &Launch, mut arguments: Vec<Arg<Self>>) -> Result<()> {
        let Launch { module, kernel, grid, .. } = launch;
        let key = format!("{}{:?}", module.name, module.defines);
        let mut built = self.built.borrow_mut();
        let number = built.len();
        let Built { library, functions } = built
            .entry(key)
            .or_insert_with(|| build(self.folder.path(), module, &format!("{}{number}", module.name)));
        let number = functions.iter().position(|function| function.name == *kernel).expect("the kernel");
        let kinds = &functions[number].arguments;
        assert_eq!(kinds.len(), arguments.len(), "arguments of {kernel}");
        for (at, (argument, kind)) in arguments.iter().zip(kinds).enumerate() {
            assert!(fits(argument, kind), "argument {at} of {kernel} is not a {kind}");
        }
        // every argument's value, in the first bytes of a word
        let float = |number: &f32| u64::from(number.to_bits());
        let value = |argument: &mut Arg<Self>| match argument {
            Arg::In(view) => view.floats[view.start..].as_ptr() as u64,
            Arg::Out(floats) => floats.as_mut_ptr() as u64,
            Arg::Ints(words) => words.as_ptr() as u64,
            Arg::Longs(words) => words.as_ptr() as u64,
            Arg::Float(number) => float(number),
            Arg::Int(number) | Arg::Long(number) => *number as u64,
        };
        let values: Vec<u64> = arguments.iter_mut().map(value).collect();
        let pointers: Vec<*const u64> = values.iter().map(std::ptr::from_ref).collect();
        type Run = unsafe extern "C" fn(c_int, c_uint, c_uint, c_uint, *const *const u64);
        let [x, y, z] = grid.map(|size| size as c_uint);
        // SAFETY: the symbol has this type, and the arguments are those of the kernel.
        unsafe {
            let run = library.get::<Run>(b"launch").expect("launch");
            run(number as c_int, x, y, z, pointers.as_ptr());
        }
        Ok(())
    }
}

#[test]
#[should_panic(expected = "argument 1 of gelu is not a long long")]
fn a_wrong_argument_is_found() {
    let (x, mut y) = (vec![1.0], vec![0.0]);
    let launch = Launch { module: super::rows::MODULE, kernel: "gelu", grid: [1, 1, 1], shared: 0 };
    let arguments = vec![Arg::In(super::BufferView::all(&x)), Arg::Int(1), Arg::Out(&mut y)];
    Emulated::default().launch(&launch, arguments).unwrap();
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
