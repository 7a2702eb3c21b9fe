//! The kernel's code in a program (`vdso(7)`). A program has its addresses, and it reads pages whose layout is that kernel's own: on
//! another kernel its functions must lead to that one's.

mod elf;

use super::error::{Error, Result};
use std::collections::BTreeMap;

pub use elf::{Function, functions};

/// What programs call that reads none of the kernel's pages.
const ALONE: &[u8] = b"sgx_enter_enclave";
/// The calls that functions stand for.
const CALLS: [(&[u8], libc::c_long); 6] = [
    (b"clock_gettime", libc::SYS_clock_gettime),
    (b"gettimeofday", libc::SYS_gettimeofday),
    (b"time", libc::SYS_time),
    (b"getcpu", libc::SYS_getcpu),
    (b"clock_getres", libc::SYS_clock_getres),
    (b"getrandom", libc::SYS_getrandom),
];

/// An image whose functions lead elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patched {
    /// The pages.
    pub image: Vec<u8>,
    /// Where in it other code is than before: offset and bytes.
    pub places: Vec<(u64, u64)>,
}

/// The image `old`, each function of which leads to the one of the same name in `new` at address `base`, or to the system call where
/// that has none.
///
/// # Errors
/// [`Error::Image`] of an image that makes no sense; [`Error::Refused`] if it has what this kernel cannot give.
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
        // Of the names of one function the first that is known counts.
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

/// A function, by whatever names.
struct Place {
    size: u64,
    /// Bytes that were written where it begins.
    written: Option<u64>,
}

/// What the acceptor says of the donor's image.
fn refused(what: &str) -> Error {
    Error::Refused(format!("the donor's vDSO differs from its own, and {what}"))
}

/// Every function leads elsewhere, and none reaches into the next.
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

/// The name without what the kernel puts before it: the same function may have both.
fn plain(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"__vdso_").unwrap_or(name)
}

/// What is written where a function begins; nothing for what stays, or is not known.
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

/// `jmp *0(%rip)`, and the address behind it: no register changes.
fn jump(to: u64) -> Vec<u8> {
    let mut code = vec![0xff, 0x25, 0, 0, 0, 0];
    code.extend_from_slice(&to.to_le_bytes());
    code
}

/// `mov $number, %eax; syscall; ret`: a function has its arguments where the call wants them.
fn call(number: libc::c_long) -> Vec<u8> {
    let mut code = Vec::new();
    if number == libc::SYS_getrandom {
        // Who asks by `opaque_len` -1 what its state would be gets ENOSYS: `cmp $-1, %r8; jne over; mov $-38, %rax; ret`.
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
