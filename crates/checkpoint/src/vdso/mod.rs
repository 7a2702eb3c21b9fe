//! Adaptation of the vDSO (`vdso(7)`), the kernel's code in a program, to another kernel. The program knows the
//! addresses of the donor's vDSO, and a vDSO reads data pages in its own kernel's layout. On another kernel the known
//! functions must therefore lead to that kernel's code.

mod elf;

use super::error::{Error, Result};
use std::collections::BTreeMap;

pub use elf::{VdsoFunction, functions};

/// Function that works on any kernel, as it reads none of the kernel's data pages.
const KERNEL_INDEPENDENT_FUNCTION: &[u8] = b"sgx_enter_enclave";
/// System calls that do the same as functions of the vDSO.
const SYSCALL_EQUIVALENTS: [(&[u8], libc::c_long); 6] = [
    (b"clock_gettime", libc::SYS_clock_gettime),
    (b"gettimeofday", libc::SYS_gettimeofday),
    (b"time", libc::SYS_time),
    (b"getcpu", libc::SYS_getcpu),
    (b"clock_getres", libc::SYS_clock_getres),
    (b"getrandom", libc::SYS_getrandom),
];

/// A vDSO image with redirected functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchedVdso {
    /// The image's pages.
    pub image: Vec<u8>,
    /// Parts of the image with replaced code: offset and length in bytes.
    pub patched_ranges: Vec<(u64, u64)>,
}

/// Redirects each function of the image `old` to the function of the same name in `new`, mapped at address `base`. A
/// function that `new` lacks makes its system call.
///
/// # Errors
/// [`Error::Image`] for a malformed image; [`Error::Refused`] for a function that this kernel does not offer.
pub fn patch(old: &[u8], new: &[u8], base: u64) -> Result<PatchedVdso> {
    let found = if new.is_empty() {
        Vec::new()
    } else {
        functions(new)?
    };
    let new_offsets: BTreeMap<&[u8], u64> = (found.iter())
        .map(|one| (base_name(&one.name), one.offset))
        .collect();
    let mut image = old.to_vec();
    let mut patched_functions: BTreeMap<u64, FunctionPatch> = BTreeMap::new();
    for VdsoFunction { name, offset, size } in functions(old)? {
        let function = patched_functions.entry(offset).or_insert(FunctionPatch {
            size,
            patched_bytes: None,
        });
        function.size = function.size.min(size);
        // If a function has several names, the first known one counts.
        if function.patched_bytes.is_some() {
            continue;
        }
        let Some(code) = entry_code(base_name(&name), &new_offsets, base) else {
            continue;
        };
        let start = offset as usize;
        let target = image.get_mut(start..start + code.len());
        let target = target.ok_or(Error::Image("a vDSO function lies past the image's end"))?;
        target.copy_from_slice(&code);
        function.patched_bytes = Some(code.len() as u64);
    }
    check(&patched_functions)?;
    let patched = patched_functions.iter();
    let patched_ranges =
        patched.filter_map(|(offset, place)| Some((*offset, place.patched_bytes?)));
    Ok(PatchedVdso {
        image,
        patched_ranges: patched_ranges.collect(),
    })
}

/// A function of the image, under all of its names.
struct FunctionPatch {
    size: u64,
    /// Number of bytes replaced at its beginning.
    patched_bytes: Option<u64>,
}

/// Returns the acceptor's refusal of the donor's image.
fn refusal(reason: &str) -> Error {
    Error::Refused(format!(
        "the donor's vDSO differs from its own and {reason}"
    ))
}

/// Checks that every function is redirected and that no two functions overlap.
fn check(patched_functions: &BTreeMap<u64, FunctionPatch>) -> Result<()> {
    let mut end = 0;
    for (offset, function) in patched_functions {
        let Some(written) = function.patched_bytes else {
            return Err(refusal("has an unknown function"));
        };
        if *offset < end || written > function.size {
            return Err(refusal("has a function without room for a jump"));
        }
        end = offset + function.size;
    }
    if patched_functions.is_empty() {
        return Err(refusal("has no functions"));
    }
    Ok(())
}

/// Strips the kernel's prefix from a function name. A function may have both names.
fn base_name(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"__vdso_").unwrap_or(name)
}

/// Returns the code to write at the function's beginning: empty for a function that stays, `None` for an unknown one.
fn entry_code(name: &[u8], new_offsets: &BTreeMap<&[u8], u64>, base: u64) -> Option<Vec<u8>> {
    if let Some(offset) = new_offsets.get(name) {
        return Some(jump_code(base.wrapping_add(*offset)));
    }
    if name == KERNEL_INDEPENDENT_FUNCTION {
        return Some(Vec::new());
    }
    let (_, number) = SYSCALL_EQUIVALENTS
        .iter()
        .find(|(known, _)| *known == name)?;
    Some(syscall_code(*number))
}

/// Returns `jmp *0(%rip)` and the address behind it. The jump changes no register.
fn jump_code(to: u64) -> Vec<u8> {
    let mut code = vec![0xff, 0x25, 0, 0, 0, 0];
    code.extend_from_slice(&to.to_le_bytes());
    code
}

/// Returns `mov $number, %eax; syscall; ret`. Function and system call take their arguments in the same registers.
fn syscall_code(number: libc::c_long) -> Vec<u8> {
    let mut code = Vec::new();
    if number == libc::SYS_getrandom {
        // A program that queries the state's size by `opaque_len` -1 gets ENOSYS: `cmp $-1, %r8; jne over; mov $-38,
        // %rax; ret`.
        code.extend_from_slice(&[0x49, 0x83, 0xf8, 0xff, 0x75, 0x08]);
        code.extend_from_slice(&[0x48, 0xc7, 0xc0, 0xda, 0xff, 0xff, 0xff, 0xc3]);
    }
    code.push(0xb8);
    code.extend_from_slice(&(number as u32).to_le_bytes());
    code.extend_from_slice(&[0x0f, 0x05, 0xc3]);
    code
}

#[cfg(test)]
mod tests;
