//! The CUDA kernels without a GPU: compiled for the CPU and run thread by thread, their results are those of the fused
//! CPU kernel; compiled by NVRTC where it is at hand, they are valid CUDA.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::path::Path;
use std::process::Command;

use candle_core::Tensor;
use libloading::Library;

use super::SOURCE;
use super::tables::{Places, Tables, WIDEST, block, header, memory_bytes};
use crate::kernel::Mode;
use crate::kernel::attend::cpu::operands::{Dims, Place};
use crate::kernel::attend::cpu::plan::Plan;
use crate::kernel::attend::tests::cases;
use crate::kernel::attend::tests::reference::{Case, Form, Operands, evaluate, operands};

/// The kernels for heads of width `width`, compiled for the CPU.
fn build(folder: &Path, width: usize) -> Library {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel/attend/cuda");
    let library = folder.join(format!("attend{width}.so"));
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()));
    compiler.args(["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function"]);
    compiler.args([format!("-DWIDTH={width}"), format!("-DBLOCK={}", block(width))]);
    compiler.arg(format!("-DSOURCE=\"{}\"", source.join("attend.cu").display()));
    compiler.arg(source.join("emulate.c")).args(["-lm", "-lpthread", "-o"]).arg(&library);
    let output = compiler.output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library has no initialisers.
    unsafe { Library::new(&library).expect("the compiled kernels") }
}

/// Calls kernel number `kernel` over a grid; every argument is a pointer to its value.
fn launch(library: &Library, kernel: c_int, grid: [usize; 3], arguments: &[*const c_void]) {
    type Launch = unsafe extern "C" fn(c_int, c_uint, c_uint, c_uint, *const *const c_void);
    let [x, y, z] = grid.map(|size| size as c_uint);
    // SAFETY: the symbol has this type, and the arguments are those of the kernel (`call` of emulate.c).
    unsafe {
        let launch = library.get::<Launch>(b"launch").expect("launch");
        launch(kernel, x, y, z, arguments.as_ptr());
    }
}

fn at<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

/// Operands [b, h, n, d] of a call and its gradients, all in one buffer.
struct Buffer {
    data: Vec<f32>,
    places: Vec<Option<Place>>,
}

impl Buffer {
    fn new(case: &Case, operands: &Operands) -> Self {
        let (mut data, mut places) = (Vec::new(), Vec::new());
        for name in ["q", "k", "v", "slot_k", "slot_v"] {
            let tensor = operands.named.iter().find(|(key, _)| *key == name).map(|(_, tensor)| tensor);
            places.push(tensor.map(|tensor| {
                let rows = tensor.dims()[2];
                let start = data.len();
                data.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                let head = rows * case.d;
                Place { start, batch: case.heads * head, head, row: case.d }
            }));
        }
        Self { data, places }
    }

    fn operand(&self, case: &Case, index: usize, rows: usize) -> &[f32] {
        let start = self.places[index].expect("an operand").start;
        &self.data[start..start + case.batch * case.heads * rows * case.d]
    }
}

/// Output and gradients, as `evaluate` gives them.
fn emulate(library: &Library, case: &Case, seed: u64) -> Vec<Vec<f32>> {
    let operands = operands(case, seed).unwrap();
    let Case { pattern, batch, heads, d, .. } = case;
    let (keys, slots, queries) = (pattern.keys, pattern.slots, pattern.queries);
    let dims = Dims { batch: *batch, heads: *heads, width: *d, queries, keys, slots };
    let plan = Plan::new(pattern, *heads).unwrap();
    let tables = Tables::new(&plan, &dims).unwrap();
    let hidden = operands.hidden(keys + slots);
    let x = Buffer::new(case, &operands);
    let merged = Place { start: 0, batch: queries * heads * d, head: *d, row: heads * d };
    let [q, k, v, slot_k, slot_v] = [0, 1, 2, 3, 4].map(|index| x.places[index]);
    let (d_q, d_k, d_v, d_slot_k, d_slot_v) = (q, k, v, slot_k, slot_v);
    let out = Some(merged);
    let places = Places { q, k, v, slot_k, slot_v, out, d_q, d_k, d_v, d_slot_k, d_slot_v };
    let header = header(&dims, pattern.offset, !hidden.is_empty(), &places);

    let scale = case.scale as f32;
    let factor = scale * std::f32::consts::LOG2_E;
    let count = batch * queries * heads;
    let (mut out, mut stats, mut means) = (vec![0f32; count * d], vec![0f32; 2 * count], vec![0f32; count]);
    let mut grads = Buffer { data: vec![0.0; x.data.len()], places: x.places.clone() };
    let grad = crate::kernel::heads::merge(&operands.grad_out).unwrap();
    let grad = grad.flatten_all().unwrap().to_vec1::<f32>().unwrap();

    let (header, x_data, grad) = (header.as_ptr(), x.data.as_ptr(), grad.as_ptr());
    let (tiles, head_tiles, streams) =
        (tables.tiles.as_ptr(), tables.head_tiles.as_ptr(), tables.streams.as_ptr());
    let (bounds, lanes, hidden) = (tables.bounds.as_ptr(), tables.queries.as_ptr(), hidden.as_ptr());
    let (blocks, visits, shared) =
        (tables.blocks.as_ptr(), tables.visits.as_ptr(), c_int::from(tables.shared));
    let (out_p, stats_p, means_p) = (out.as_mut_ptr(), stats.as_mut_ptr(), means.as_mut_ptr());
    let grads_p = grads.data.as_mut_ptr();
    let plan = [at(&header), at(&tiles), at(&head_tiles), at(&streams), at(&bounds), at(&lanes), at(&hidden)];
    let five = [at(&x_data); 5];
    let saved = [at(&grad), at(&stats_p), at(&means_p), at(&factor), at(&scale)];
    let grid = [tables.most_tiles, *heads, *batch];
    if tables.most_tiles > 0 {
        let rest = [at(&factor), at(&out_p), at(&stats_p)];
        launch(library, 0, grid, &[plan.as_slice(), &five, &rest].concat());
    }
    let threads = [queries.div_ceil(128), *heads, *batch];
    launch(library, 1, threads, &[at(&header), at(&out_p), at(&grad), at(&means_p)]);
    if tables.most_tiles > 0 {
        launch(library, 2, grid, &[plan.as_slice(), &five, &saved, &[at(&grads_p)]].concat());
    }
    let plan = [
        at(&header),
        at(&tiles),
        at(&blocks),
        at(&visits),
        at(&streams),
        at(&bounds),
        at(&lanes),
        at(&hidden),
    ];
    let grid = [tables.key_blocks, *heads, *batch];
    launch(library, 3, grid, &[plan.as_slice(), &five, &saved, &[at(&shared), at(&grads_p)]].concat());

    let out = Tensor::from_vec(out, (*batch, queries, heads * d), &candle_core::Device::Cpu).unwrap();
    let out = crate::kernel::heads::split(&out, *heads).unwrap();
    let mut results = vec![out.flatten_all().unwrap().to_vec1::<f32>().unwrap()];
    for (index, rows) in [queries, keys, keys, slots, slots].into_iter().enumerate() {
        if x.places[index].is_some() {
            results.push(grads.operand(case, index, rows).to_vec());
        }
    }
    results
}

#[test]
fn the_kernels_run_thread_by_thread_give_the_results_of_the_cpu() {
    assert!(memory_bytes(WIDEST) <= 99 << 10, "no block of an RTX card has so much shared memory");
    let folder = tempfile::tempdir().unwrap();
    let mut libraries = HashMap::new();
    let wide = Case::new(crate::pattern::Pattern::full(30, 40, false), 1, 1, 128);
    let cases = cases().into_iter().chain([wide]).filter(|case| case.relative.is_none());
    for (seed, case) in cases.enumerate() {
        let library = libraries.entry(case.d).or_insert_with(|| build(folder.path(), case.d));
        // SAFETY: the symbol has this type.
        let bytes = unsafe { library.get::<extern "C" fn() -> c_ulong>(b"memory_bytes").unwrap()() };
        assert_eq!(bytes as usize, memory_bytes(case.d), "working memory for heads of {}", case.d);
        let want = evaluate(&case, seed as u64, Form::Separate, Mode::Fused).unwrap();
        let got = emulate(library, &case, seed as u64);
        assert_eq!(got.len(), want.len());
        for (number, (got, want)) in got.iter().zip(&want).enumerate() {
            let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = want.iter().fold(1f32, |a, b| a.max(b.abs()));
            let gap = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            let finite = got.iter().all(|x| x.is_finite());
            assert!(
                finite && got.len() == want.len() && gap <= 1e-5 * largest,
                "result {number} is off by {gap} (d {}, {:?})",
                case.d,
                case.pattern
            );
        }
    }
}

/// Compiles [`SOURCE`] by the NVRTC library at `path`; its complaints, if it has any.
fn nvrtc(path: &str, options: &[String]) -> Result<(), String> {
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
    let options: Vec<CString> = options.iter().map(|text| CString::new(text.as_str()).unwrap()).collect();
    let options: Vec<*const c_char> = options.iter().map(|text| text.as_ptr()).collect();
    let (source, name) = (CString::new(SOURCE).unwrap(), c"attend.cu");
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

#[test]
#[ignore = "needs an NVRTC library, named by EFFATTN_NVRTC"]
fn nvrtc_compiles_the_kernels_for_all_architectures() {
    let path = std::env::var("EFFATTN_NVRTC").expect("EFFATTN_NVRTC");
    for architecture in [80, 90] {
        for width in [8, 33, 64, WIDEST] {
            let mut options = vec![format!("-DWIDTH={width}"), format!("-DBLOCK={}", block(width))];
            options.push(format!("--gpu-architecture=compute_{architecture}"));
            let result = nvrtc(&path, &options);
            assert!(result.is_ok(), "compute_{architecture}, width {width}: {}", result.unwrap_err());
        }
    }
    assert!(nvrtc(&path, &["-DWIDTH=none".to_owned(), "-DBLOCK=32".to_owned()]).is_err());
}
