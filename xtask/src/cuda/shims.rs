//! Static libraries in the place of CUDA's: every function is a jump to the real one, which is looked for on its first call. Where
//! there is none, the call returns an error code of its library.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A library that is not linked.
struct Library {
    /// Name for the linker.
    name: &'static str,
    /// cudarc's module with its functions.
    module: &'static str,
    /// How their names begin.
    prefix: &'static str,
    /// The file that is looked for.
    file: &'static str,
    /// What a call returns where it is missing: no device, or not initialized, in its own numbers.
    missing: u32,
}

const LIBRARIES: &[Library] = &[
    Library { name: "cuda", module: "driver", prefix: "cu", file: "libcuda.so.1", missing: 100 },
    Library { name: "cublas", module: "cublas", prefix: "cublas", file: "libcublas.so.13", missing: 1 },
    Library { name: "cublasLt", module: "cublaslt", prefix: "cublas", file: "libcublasLt.so.13", missing: 1 },
    Library { name: "curand", module: "curand", prefix: "curand", file: "libcurand.so.10", missing: 203 },
    Library { name: "nvrtc", module: "nvrtc", prefix: "nvrtc", file: "libnvrtc.so.13", missing: 7 },
];

/// NVRTC looks for this one itself, beside the program only.
const BUILTINS: &str = "libnvrtc-builtins.so.13.0";

/// Registers that hold the arguments of a call (System V, x86-64).
const INTEGERS: [&str; 7] = ["rdi", "rsi", "rdx", "rcx", "r8", "r9", "r10"];

/// Writes and compiles the libraries into `folder`; `cudarc` is the folder of its sources.
pub fn build(cudarc: &Path, folder: &Path) -> Result<()> {
    for library in LIBRARIES {
        let path = cudarc.join("src").join(library.module).join("sys/mod.rs");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let functions = functions(&text, library.prefix);
        ensure!(functions.len() > 5, "{}: only {} functions are found", path.display(), functions.len());
        let name = library.name;
        fs::write(folder.join(format!("{name}.s")), jumps(name, &functions))?;
        fs::write(folder.join(format!("{name}.c")), finder(library))?;
        let mut objects = Vec::new();
        for ending in ["s", "c"] {
            let object = format!("{name}_{ending}.o");
            let source = format!("{name}.{ending}");
            run(folder, "cc", &["-c", "-O2", "-fPIC", &source, "-o", &object])?;
            objects.push(object);
        }
        let archive = format!("lib{name}.a");
        let _ = fs::remove_file(folder.join(&archive)); // members of an earlier one would stay
        run(folder, "ar", &["crs", &archive, &objects[0], &objects[1]])?;
    }
    Ok(())
}

fn run(folder: &Path, program: &str, words: &[&str]) -> Result<()> {
    let status = Command::new(program).args(words).current_dir(folder).status();
    let status = status.with_context(|| format!("{program} cannot be started; a C compiler is needed"))?;
    ensure!(status.success(), "{program} {} failed", words.join(" "));
    Ok(())
}

/// The functions of the C library that `text` declares: `prefix` and a capital letter, as in `cuInit`.
fn functions<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let word = |rest: &'a str| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')?;
        Some(&rest[..end])
    };
    let declared = text.split("fn ").skip(1).filter_map(word);
    declared
        .filter(|name| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
        })
        .collect()
}

/// Assembly: one section per function, so that the linker drops those that nobody calls.
fn jumps(library: &str, functions: &BTreeSet<&str>) -> String {
    let mut text = String::new();
    for (i, function) in functions.iter().enumerate() {
        let _ = write!(
            text,
            ".section .text.{function},\"ax\",@progbits\n.globl {function}\n.type {function},@function\n\
             {function}: movq .Ls{i}(%rip),%r11\n testq %r11,%r11\n jz 1f\n jmp *%r11\n\
             1: leaq .Ln{i}(%rip),%rax\n leaq .Ls{i}(%rip),%r11\n jmp lazy_{library}\n\
             .section .data.{function},\"aw\",@progbits\n.align 8\n.Ls{i}: .quad 0\n\
             .section .rodata.{function},\"a\",@progbits\n.Ln{i}: .asciz \"{function}\"\n"
        );
    }
    // keeps every register that holds an argument while the function is looked for
    let (mut kept, mut back) = (String::new(), String::new());
    for (i, register) in INTEGERS.iter().enumerate() {
        let _ = writeln!(kept, " movq %{register},{}(%rsp)", 8 * i);
        let _ = writeln!(back, " movq {}(%rsp),%{register}", 8 * i);
    }
    for i in 0..8 {
        let _ = writeln!(kept, " movups %xmm{i},{}(%rsp)", 64 + 16 * i);
        let _ = writeln!(back, " movups {}(%rsp),%xmm{i}", 64 + 16 * i);
    }
    let _ = write!(
        text,
        ".text\nlazy_{library}: pushq %rbp\n movq %rsp,%rbp\n andq $-16,%rsp\n subq $208,%rsp\n{kept} movq %rax,%rdi\n movq %r11,%rsi\n \
         call lazy_{library}_symbol\n movq %rax,%r11\n{back} leave\n jmp *%r11\n.section .note.GNU-stack,\"\",@progbits\n"
    );
    text
}

/// C: finds a function of the library, in the folders of `EFFATTN_CUDA_LIBS` and then where the loader looks.
fn finder(library: &Library) -> String {
    let Library { name, file, missing, .. } = library;
    let first = if *name == "nvrtc" { format!("find(\"{BUILTINS}\");") } else { String::new() };
    format!(
        r#"#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *find(const char *file) {{
  for (const char *p = getenv("EFFATTN_CUDA_LIBS"); p && *p;) {{
    char path[4096];
    size_t length = strcspn(p, ":");
    snprintf(path, sizeof path, "%.*s/%s", (int)length, p, file);
    void *handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (handle) return handle;
    p += length;
    if (*p) p++;
  }}
  return dlopen(file, RTLD_NOW | RTLD_GLOBAL);
}}

static long missing(void) {{ return {missing}; }}

/* Two threads may both look: they find the same. */
__attribute__((visibility("hidden"))) void *lazy_{name}_symbol(const char *name, void **slot) {{
  static void *handle;
  if (!handle) {{
    {first}
    handle = find("{file}");
  }}
  void *symbol = handle ? dlsym(handle, name) : 0;
  return *slot = symbol ? symbol : (void *)missing;
}}
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_those_of_the_library_only() {
        let text = "pub unsafe fn cuInit(Flags: u32) -> r { fn cuInit(Flags: u32); } fn culib() fn cublasCreate_v2(a) fn new(x)";
        assert_eq!(functions(text, "cu").into_iter().collect::<Vec<_>>(), ["cuInit"]);
        assert_eq!(functions(text, "cublas").into_iter().collect::<Vec<_>>(), ["cublasCreate_v2"]);
    }

    /// A program that calls through the jumps: a library that is there (the C library's own, under another name) is found with
    /// all its arguments, and one that is not gives its code.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[test]
    fn calls_reach_a_library_that_is_there_and_return_a_code_where_none_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let real = "double fooMany(long a, double b, int c, float d, long e, long f, long g, long h, double i) \
                    { return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i; }";
        fs::write(at.join("real.c"), real).unwrap();
        run(at, "cc", &["-shared", "-fPIC", "real.c", "-o", "libfoo.so.1"]).unwrap();
        let main = "double fooMany(long, double, int, float, long, long, long, long, double); int barInit(int);\n\
                    int main() { for (int i = 0; i < 2; i++) if (fooMany(1, 2, 3, 4, 5, 6, 7, 8, 9) != 285) return 1;\n\
                    return barInit(0) == 42 && barInit(0) == 42 ? 0 : 2; }";
        fs::write(at.join("main.c"), main).unwrap();
        let mut words = vec!["main.c".to_owned()];
        for (name, function, file) in [("foo", "fooMany", "libfoo.so.1"), ("bar", "barInit", "libbar.so.1")] {
            fs::write(at.join(format!("{name}.s")), jumps(name, &[function].into())).unwrap();
            let library = Library { name, module: "", prefix: "", file, missing: 42 };
            fs::write(at.join(format!("{name}-finder.c")), finder(&library)).unwrap();
            words.extend([format!("{name}.s"), format!("{name}-finder.c")]);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["-o", "main"]).collect();
        run(at, "cc", &words).unwrap();
        let status = Command::new(at.join("main"))
            .env("EFFATTN_CUDA_LIBS", format!("/nowhere:{}", at.display()))
            .status();
        assert_eq!(status.unwrap().code(), Some(0));
    }
}
