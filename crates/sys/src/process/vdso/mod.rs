//! Adaptation of the vDSO (`vdso(7)`), the kernel's code in a program, to another kernel. The program knows the
//! addresses of the donor's vDSO, and a vDSO reads data pages in its own kernel's layout. On another kernel the known
//! functions must therefore lead to that kernel's code.

mod elf;

use super::error::{Error, Result};
use std::collections::BTreeMap;

pub use elf::{Function, functions};

/// Function that works on any kernel, as it reads none of the kernel's data pages.
const ALONE: &[u8] = b"sgx_enter_enclave";
/// System calls that do the same as functions of the vDSO.
const CALLS: [(&[u8], libc::c_long); 6] = [
    (b"clock_gettime", libc::SYS_clock_gettime),
    (b"gettimeofday", libc::SYS_gettimeofday),
    (b"time", libc::SYS_time),
    (b"getcpu", libc::SYS_getcpu),
    (b"clock_getres", libc::SYS_clock_getres),
    (b"getrandom", libc::SYS_getrandom),
];

/// A vDSO image with redirected functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patched {
    /// The image's pages.
    pub image: Vec<u8>,
    /// Parts of the image with replaced code: offset and length in bytes.
    pub places: Vec<(u64, u64)>,
}

/// Redirects each function of the image `old` to the function of the same name in `new`, mapped at address `base`. A
/// function that `new` lacks makes its system call.
///
/// # Errors
/// [`Error::Image`] for a malformed image; [`Error::Refused`] for a function that this kernel does not offer.
pub fn patch(old: &[u8], new: &[u8], base: u64) -> Result<Patched> {
    let found = if new.is_empty() {
        Vec::new()
    } else {
        functions(new)?
    };
    let there: BTreeMap<&[u8], u64> = (found.iter())
        .map(|one| (plain(&one.name), one.offset))
        .collect();
    let mut image = old.to_vec();
    let mut places: BTreeMap<u64, Place> = BTreeMap::new();
    for Function { name, offset, size } in functions(old)? {
        let place = places.entry(offset).or_insert(Place {
            size,
            written: None,
        });
        place.size = place.size.min(size);
        // If a function has several names, the first known one counts.
        if place.written.is_some() {
            continue;
        }
        let Some(code) = code(plain(&name), &there, base) else {
            continue;
        };
        let start = offset as usize;
        let whole = image.get_mut(start..start + code.len());
        let whole = whole.ok_or(Error::Image("a function behind the end"))?;
        whole.copy_from_slice(&code);
        place.written = Some(code.len() as u64);
    }
    check(&places)?;
    let places = places.iter();
    let places = places.filter_map(|(offset, place)| Some((*offset, place.written?)));
    Ok(Patched {
        image,
        places: places.collect(),
    })
}

/// A function of the image, under all of its names.
struct Place {
    size: u64,
    /// Number of bytes replaced at its beginning.
    written: Option<u64>,
}

/// Returns the acceptor's refusal of the donor's image.
fn refused(what: &str) -> Error {
    Error::Refused(format!("the donor's vDSO differs from its own, and {what}"))
}

/// Checks that every function is redirected and that no two functions overlap.
fn check(places: &BTreeMap<u64, Place>) -> Result<()> {
    let mut end = 0;
    for (offset, place) in places {
        let Some(written) = place.written else {
            return Err(refused("has a function that is not known here"));
        };
        if *offset < end || written > place.size {
            return Err(refused("has a function without room for a jump"));
        }
        end = offset + place.size;
    }
    if places.is_empty() {
        return Err(refused("has no functions"));
    }
    Ok(())
}

/// Strips the kernel's prefix from a function name. A function may have both names.
fn plain(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"__vdso_").unwrap_or(name)
}

/// Returns the code to write at the function's beginning: empty for a function that stays, `None` for an unknown one.
fn code(name: &[u8], there: &BTreeMap<&[u8], u64>, base: u64) -> Option<Vec<u8>> {
    if let Some(offset) = there.get(name) {
        return Some(jump(base.wrapping_add(*offset)));
    }
    if name == ALONE {
        return Some(Vec::new());
    }
    let (_, number) = CALLS.iter().find(|(known, _)| *known == name)?;
    Some(call(*number))
}

/// Returns `jmp *0(%rip)` and the address behind it. The jump changes no register.
fn jump(to: u64) -> Vec<u8> {
    let mut code = vec![0xff, 0x25, 0, 0, 0, 0];
    code.extend_from_slice(&to.to_le_bytes());
    code
}

/// Returns `mov $number, %eax; syscall; ret`. Function and system call take their arguments in the same registers.
fn call(number: libc::c_long) -> Vec<u8> {
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
