//! The CPU as a [`KernelDevice`]: sources compiled by the C compiler, every CUDA thread a coroutine. What CUDA leaves undefined is
//! found: see `emulate.c` and `trace.c`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use candle_core::{CpuStorage, Layout, Result, bail};
use libloading::Library;
use tempfile::TempDir;

use super::counts::{Counted, counting};
use super::{Arg, KernelDevice, Launch, MatmulTarget, Matrix, Module};

/// Shared memory that a block may have, by architecture: "Maximum amount of shared memory per thread block" of the CUDA C++
/// Programming Guide.
const SHARED_LIMITS: &[(u32, usize)] =
    &[(80, 163 << 10), (86, 99 << 10), (89, 99 << 10), (90, 227 << 10), (100, 227 << 10), (120, 99 << 10)];

/// The same, of what a kernel declares with a size.
const FIXED_LIMIT: usize = 48 << 10;

/// Bytes around every buffer that belong to nobody.
const MARGIN: usize = 1024;

/// Whether every access is watched: by what GCC and Clang know on Linux.
pub const TRACED: bool = cfg!(target_os = "linux");

/// Compiles and runs kernels on this computer.
pub struct Emulated {
    folder: TempDir,
    built: RefCell<HashMap<String, Built>>,
    seeded: Option<SeededFault>,
    /// What launches did, where they are counted.
    counted: Option<RefCell<Vec<Counted>>>,
}

/// A fault that is put into the sources that have its `text`: the first place becomes `instead`. What is found then is kept in
/// place of a panic.
struct SeededFault {
    text: &'static str,
    instead: &'static str,
    is_put: Cell<bool>,
    found: RefCell<Vec<String>>,
}

impl SeededFault {
    fn put(&self, source: &str) -> String {
        self.is_put.set(self.is_put.get() || source.contains(self.text));
        source.replacen(self.text, self.instead, 1)
    }
}

impl Emulated {
    /// With a fault in the sources: the first place of `text` becomes `instead`.
    pub fn seeded(text: &'static str, instead: &'static str) -> Self {
        let seeded = SeededFault { text, instead, is_put: Cell::new(false), found: RefCell::default() };
        Self { seeded: Some(seeded), ..Self::default() }
    }

    /// That counts what launches do.
    pub fn counting() -> Self {
        Self { counted: Some(RefCell::default()), ..Self::default() }
    }

    /// What was launched since this was called last.
    pub fn counted(&self) -> Vec<Counted> {
        self.counted.as_ref().map(RefCell::take).unwrap_or_default()
    }

    /// What was found of the seeded fault.
    pub fn found(self) -> Vec<String> {
        let Some(SeededFault { text, is_put, found, .. }) = self.seeded else { return Vec::new() };
        assert!(is_put.get(), "no {text:?} in the sources");
        found.into_inner()
    }

    /// Faults of a kernel: a panic, unless one was seeded.
    fn tell(&self, kernel: &str, faults: &str) {
        match &self.seeded {
            Some(seeded) => seeded.found.borrow_mut().extend(faults.lines().map(str::to_owned)),
            None => panic!("{kernel}:\n{faults}"),
        }
    }
}

thread_local! {
    /// What operations on tensors of the CPU run on.
    static HERE: RefCell<Rc<Emulated>> = RefCell::default();
}

/// Runs `f` on the machine of this thread.
pub fn here<T>(f: impl FnOnce(&Emulated) -> T) -> T {
    f(&HERE.with_borrow(Rc::clone))
}

/// What an operation gives for f32 operands on the CPU, by kernels on the machine of this thread.
pub fn forward<T>(
    operands: &[(&CpuStorage, &Layout)],
    f: impl FnOnce(&Emulated, &[(&Vec<f32>, &Layout)]) -> Result<T>,
) -> Result<T> {
    let floats = operands.iter().map(|(storage, layout)| match storage {
        CpuStorage::F32(floats) => Ok((floats, *layout)),
        _ => bail!("an emulated kernel was given something else than f32"),
    });
    let floats = floats.collect::<Result<Vec<_>>>()?;
    here(|machine| f(machine, &floats))
}

/// Runs `f` while another machine is that of this thread; gives it back.
pub fn with_machine(machine: Emulated, f: impl FnOnce()) -> Emulated {
    let machine = Rc::new(machine);
    let before = HERE.replace(Rc::clone(&machine));
    f();
    HERE.set(before);
    Rc::into_inner(machine).expect("the only owner")
}

/// Runs `f` while a machine with a fault is that of this thread; what was found.
pub fn with_seeded(text: &'static str, instead: &'static str, f: impl FnOnce()) -> Vec<String> {
    with_machine(Emulated::seeded(text, instead), f).found()
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
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder, built: RefCell::default(), seeded: None, counted: None }
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
    compile(folder, module, stem);
    // SAFETY: the library has no initialisers.
    let library = unsafe { Library::new(file("so")).expect("the compiled kernels") };
    Built { library, functions }
}

/// `stem.cu` and `stem.h` to `stem.so`.
fn compile(folder: &Path, module: &Module, stem: &str) {
    let file = |end: &str| folder.join(format!("{stem}.{end}"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let run = |words: &dyn Fn(&mut Command)| {
        let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
        compiler.args(["-std=gnu11", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function"]);
        words(&mut compiler);
        let output = compiler.output().expect("a C compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run(&|compiler| {
        compiler.args(module.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        compiler.arg(format!("-DSOURCE=\"{}\"", file("cu").display()));
        compiler.arg(format!("-DCALLS=\"{}\"", file("h").display()));
        if TRACED {
            compiler.args(["-DTRACED", "-fsanitize=thread"]);
        }
        compiler.arg("-c").arg(sources.join("emulate.c")).arg("-o").arg(file("o"));
    });
    let mut objects = vec![file("o")];
    if TRACED {
        objects.push(file("trace.o"));
        run(&|compiler| {
            compiler.arg("-c").arg(sources.join("trace.c")).arg("-o").arg(file("trace.o"));
        });
    }
    run(&|compiler| {
        compiler.arg("-shared").args(&objects).args(["-lm", "-lpthread", "-o"]).arg(file("so"));
    });
}

/// Copies of the buffers of a launch, with a margin around each that belongs to nobody.
#[derive(Default)]
struct Arena {
    /// All ones: no number, and no index.
    words: Vec<u32>,
    /// First word, words and argument of every buffer.
    places: Vec<[usize; 3]>,
}

impl Arena {
    /// A copy of `words` for the argument of this number; gives its place.
    fn add(&mut self, words: impl IntoIterator<Item = u32>, argument: usize) {
        let margin = MARGIN / size_of::<u32>();
        self.words.resize(self.words.len().next_multiple_of(64) + margin, u32::MAX);
        let start = self.words.len();
        self.words.extend(words);
        self.places.push([start, self.words.len() - start, argument]);
        self.words.resize(self.words.len() + margin, u32::MAX);
    }

    /// Where the buffer of an argument lies.
    fn place(&self, argument: usize) -> Option<&[usize; 3]> {
        self.places.iter().find(|place| place[2] == argument)
    }

    /// Address, bytes, margin and argument of every buffer.
    fn buffers(&mut self) -> Vec<c_long> {
        let base = self.words.as_mut_ptr() as usize;
        let line = |&[start, words, argument]: &[usize; 3]| [base + 4 * start, 4 * words, MARGIN, argument];
        self.places.iter().flat_map(line).map(|number| number as c_long).collect()
    }
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
        let Built { library, functions } = built.entry(key).or_insert_with(|| {
            let seeded = self.seeded.as_ref().map(|seeded| seeded.put(module.source));
            let source = self.counted.as_ref().map(|_| counting(module.source)).or(seeded);
            let module = Module { source: source.as_deref().unwrap_or(module.source), ..*module };
            build(self.folder.path(), &module, &format!("{}{number}", module.name))
        });
        let number = functions.iter().position(|function| function.name == *kernel).expect("the kernel");
        let kinds = &functions[number].arguments;
        assert_eq!(kinds.len(), arguments.len(), "arguments of {kernel}");
        for (at, (argument, kind)) in arguments.iter().zip(kinds).enumerate() {
            assert!(fits(argument, kind), "argument {at} of {kernel} is not a {kind}");
        }
        let mut arena = Arena::default();
        for (number, argument) in arguments.iter().enumerate() {
            match argument {
                Arg::In(view) => arena.add(view.floats[view.start..].iter().map(|x| x.to_bits()), number),
                Arg::Out(floats) => arena.add(floats.iter().map(|x| x.to_bits()), number),
                Arg::Ints(words) => arena.add(words.iter().map(|word| *word as u32), number),
                Arg::Longs(words) => {
                    arena.add(words.iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]), number);
                }
                Arg::Float(_) | Arg::Int(_) | Arg::Long(_) => {}
            }
        }
        let buffers = arena.buffers();
        let base = arena.words.as_mut_ptr();
        // every argument's value, in the first bytes of a word
        let value = |(number, argument): (usize, &Arg<Self>)| match argument {
            Arg::Float(number) => u64::from(number.to_bits()),
            Arg::Int(number) | Arg::Long(number) => *number as u64,
            _ => arena.place(number).map_or(0, |&[start, ..]| base.wrapping_add(start) as u64),
        };
        let values: Vec<u64> = arguments.iter().enumerate().map(value).collect();
        let faults = run(library, (number, *grid, launch.shared), &values, &buffers);
        if let Some(faults) = faults {
            self.tell(kernel, &faults);
        }
        if let Some(counted) = &self.counted {
            counted.borrow_mut().push(Counted::last_of(library, launch));
        }
        for (number, argument) in arguments.iter_mut().enumerate() {
            if let (Arg::Out(floats), Some(&[start, words, _])) = (argument, arena.place(number)) {
                **floats =
                    arena.words[start..start + words].iter().map(|bits| f32::from_bits(*bits)).collect();
            }
        }
        Ok(())
    }
}

/// Runs kernel `number` of `library`; what is wrong with it, if anything is.
fn run(
    library: &Library,
    (number, grid, shared): (usize, [usize; 3], usize),
    values: &[u64],
    buffers: &[c_long],
) -> Option<String> {
    type Run =
        unsafe extern "C" fn(c_int, c_uint, c_uint, c_uint, *const *const u64, c_long, *const c_long, c_int);
    type Found = unsafe extern "C" fn(*mut c_int) -> *const c_char;
    let pointers: Vec<*const u64> = values.iter().map(std::ptr::from_ref).collect();
    let [x, y, z] = grid.map(|size| size as c_uint);
    // SAFETY: the symbols have these types, and the arguments are those of the kernel.
    unsafe {
        let fixed = library.get::<unsafe extern "C" fn() -> c_long>(b"fixed_shared").expect("its size")();
        if let Some(said) = too_large(fixed as usize, shared) {
            return Some(said);
        }
        let run = library.get::<Run>(b"launch").expect("launch");
        let count = (buffers.len() / 4) as c_int;
        run(number as c_int, x, y, z, pointers.as_ptr(), shared as c_long, buffers.as_ptr(), count);
        let mut count = 0;
        let found = library.get::<Found>(b"found_faults").expect("faults")(&raw mut count);
        (count > 0).then(|| CStr::from_ptr(found).to_string_lossy().into_owned())
    }
}

/// What a device says to a block with so much shared memory: declared with a size, and asked for by the launch.
fn too_large(fixed: usize, asked: usize) -> Option<String> {
    if fixed > FIXED_LIMIT {
        return Some(format!("{fixed} bytes of shared memory are declared, more than {FIXED_LIMIT}"));
    }
    let (architecture, limit) = SHARED_LIMITS.iter().find(|(_, limit)| fixed + asked > *limit)?;
    let bytes = fixed + asked;
    Some(format!("{bytes} bytes of shared memory are more than the {limit} of architecture {architecture}"))
}

#[test]
#[should_panic(expected = "argument 1 of gelu is not a long long")]
fn a_wrong_argument_is_found() {
    let (x, mut y) = (vec![1.0], vec![0.0]);
    let launch = Launch { module: super::rows::MODULE, kernel: "gelu", grid: [1, 1, 1], shared: 0 };
    let arguments = vec![Arg::In(super::BufferView::all(&x)), Arg::Int(1), Arg::Out(&mut y)];
    Emulated::default().launch(&launch, arguments).unwrap();
}
