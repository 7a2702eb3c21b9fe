use super::*;
use proptest::prelude::*;
use std::ptr;

const PROTECTION: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;

/// Returns this kernel's vDSO image and address.
fn own_vdso() -> (Vec<u8>, u64) {
    let lines = crate::procfs::mappings(std::process::id() as i32).expect("mappings");
    let line = lines.iter().find(|line| line.name == b"[vdso]");
    let line = line.expect("this kernel has one");
    let bytes = (line.end - line.start) as usize;
    // SAFETY: the kernel keeps these pages mapped there and readable as long as the process lives.
    let image = unsafe { std::slice::from_raw_parts(line.start as *const u8, bytes) };
    (image.to_vec(), line.start)
}

/// Maps code that stays callable until the process ends.
fn map_code(image: &[u8]) -> u64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping of the size of the code copied into it.
    unsafe {
        let address = libc::mmap(ptr::null_mut(), image.len(), PROTECTION, flags, -1, 0);
        assert_ne!(address, libc::MAP_FAILED);
        ptr::copy_nonoverlapping(image.as_ptr(), address.cast(), image.len());
        address.addr() as u64
    }
}

fn function_address(image: &[u8], base: u64, name: &str) -> u64 {
    let found = functions(image).expect("functions");
    let found = found.iter().find(|one| one.name == name.as_bytes());
    base + found.expect("it is there").offset
}

fn call_time(address: u64) -> i64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a function of this type is at the address.
    let clock: extern "C" fn(i32, *mut libc::timespec) -> i32 =
        unsafe { std::mem::transmute(address as *const ()) };
    assert_eq!(clock(libc::CLOCK_MONOTONIC, &raw mut now), 0);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

#[test]
fn patched_functions_call_the_new_vdso_or_the_syscall() {
    let (image, base) = own_vdso();
    let real = function_address(&image, base, "__vdso_clock_gettime");
    for new in [&image[..], &[]] {
        let patched = patch(&image, new, base).expect("patched");
        assert_ne!(patched.image, image);
        let address = map_code(&patched.image);
        for name in ["__vdso_clock_gettime", "clock_gettime"] {
            let (first, now) = (
                call_time(real),
                call_time(function_address(&image, address, name)),
            );
            assert!(first <= now && now <= call_time(real), "{first} {now}");
        }
        // SAFETY: functions of these types are at the addresses.
        let (time, cpu) = unsafe {
            let time: extern "C" fn(*mut i64) -> i64 =
                std::mem::transmute(function_address(&image, address, "__vdso_time") as *const ());
            let cpu: extern "C" fn(*mut u32, *mut u32, *mut u8) -> i32 = std::mem::transmute(
                function_address(&image, address, "__vdso_getcpu") as *const (),
            );
            (time, cpu)
        };
        assert!(time(ptr::null_mut()) > 1_600_000_000);
        let mut number = u32::MAX;
        assert_eq!(cpu(&raw mut number, ptr::null_mut(), ptr::null_mut()), 0);
        assert!(number < 8192);
    }
}

#[test]
fn getrandom_falls_back_to_the_syscall() {
    let address = map_code(&syscall_code(libc::SYS_getrandom));
    // SAFETY: a function of this type is at the address.
    let random: extern "C" fn(*mut u8, usize, u32, *mut u8, usize) -> isize =
        unsafe { std::mem::transmute(address as *const ()) };
    let mut bytes = [0; 32];
    assert_eq!(random(bytes.as_mut_ptr(), 32, 0, ptr::null_mut(), 144), 32);
    assert_ne!(bytes, [0; 32]);
    let outcome = random(ptr::null_mut(), 0, 0, bytes.as_mut_ptr(), usize::MAX);
    assert_eq!(outcome, -(libc::ENOSYS as isize));
}

#[test]
fn all_aliases_are_found_within_the_image() {
    let (image, _) = own_vdso();
    let found = functions(&image).expect("functions");
    for name in [
        "clock_gettime",
        "gettimeofday",
        "time",
        "getcpu",
        "clock_getres",
    ] {
        let aliases: Vec<&VdsoFunction> = found
            .iter()
            .filter(|one| base_name(&one.name) == name.as_bytes())
            .collect();
        assert_eq!(aliases.len(), 2, "{name}");
        assert_eq!(aliases[0].offset, aliases[1].offset, "{name}");
    }
    assert!(
        found
            .iter()
            .all(|one| one.offset + one.size <= image.len() as u64)
    );
}

/// Renames a function in all of its names.
fn rename_function(image: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut image = image.to_vec();
    let from = [from.as_bytes(), b"\0"].concat();
    for at in 0..image.len() - from.len() {
        if image[at..].starts_with(&from) {
            image[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    }
    image
}

#[test]
fn function_without_replacement_is_refused() {
    let (image, base) = own_vdso();
    let renamed_image = rename_function(&image, "getcpu", "gotcpu");
    let error = patch(&renamed_image, &image, base).unwrap_err().to_string();
    assert!(error.ends_with("an unknown function"), "{error}");
    // A function that both images export is accepted.
    assert!(patch(&renamed_image, &renamed_image, base).is_ok());
    let enclave = rename_function(&image, "getrandom", "sgx_enter");
    assert!(patch(&enclave, &image, base).is_err());
    let mut other = image.clone();
    other[18] = 183;
    let error = patch(&other, &image, base).unwrap_err().to_string();
    assert!(error.contains("no ELF image for x86_64"), "{error}");
    assert!(patch(&image[..64], &image, base).is_err());
}

#[test]
fn both_hash_tables_give_the_symbol_count() {
    const OLD: u64 = 4;
    let (image, _) = own_vdso();
    let entry = [OLD.to_le_bytes()].concat();
    let at = (0..image.len() - 8).step_by(8).find(|at| {
        image[*at..].starts_with(&entry)
            && image[at + 8..at + 16] != [0; 8]
            && image[at + 16..].starts_with(&0x6fff_fef5u64.to_le_bytes())
    });
    // A kernel may have only one of the tables; `functions` then uses that one.
    let Some(at) = at else {
        assert!(functions(&image).is_ok());
        return;
    };
    let mut other = image.clone();
    other[at..at + 8].copy_from_slice(&0x6000_0000u64.to_le_bytes());
    assert_eq!(
        functions(&other).expect("read"),
        functions(&image).expect("read")
    );
}

proptest! {
    #[test]
    fn any_bytes_give_an_error_or_an_image(bytes: Vec<u8>) {
        let _ = functions(&bytes);
        let _ = patch(&bytes, &bytes, 0);
    }

    /// Any damage leaves all functions within the image, and only the reported parts changed.
    #[test]
    fn damaged_image_yields_functions_within_the_image(
        damage in prop::collection::vec((0usize..0x800, any::<u8>()), 1..8),
        length in 0usize..8192,
        cut: bool,
    ) {
        let (mut image, base) = own_vdso();
        for (at, byte) in damage {
            image[at] = byte;
        }
        if cut {
            image.truncate(length);
        }
        let found = functions(&image).unwrap_or_default();
        prop_assert!(found.iter().all(|one| one.offset + one.size <= image.len() as u64));
        if let Ok(patched) = patch(&image, &own_vdso().0, base) {
            prop_assert_eq!(patched.image.len(), image.len());
            let is_reported = |at: u64| patched.patched_ranges.iter().any(|(from, bytes)| at >= *from && at - from < *bytes);
            for (at, (old, new)) in (0..).zip(image.iter().zip(&patched.image)) {
                prop_assert!(old == new || is_reported(at));
            }
        }
    }
}
