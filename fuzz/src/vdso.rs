//! The vDSO of a program from another node: the acceptor reads its symbols and patches its functions.

use holdfast_checkpoint::vdso::{functions, patch};

/// Checks that all functions lie inside the image, and that patching changes only the reported ranges.
pub fn run(data: &[u8]) -> bool {
    let Ok(found) = functions(data) else {
        return false;
    };
    let length = data.len() as u64;
    for function in &found {
        assert!(function.offset <= length && function.size <= length - function.offset);
    }
    let example = example_vdso();
    for new in [data, &example, &[]] {
        let Ok(patched) = patch(data, new, 0x7000_0000) else {
            continue;
        };
        assert_eq!(patched.image.len(), data.len());
        let mut unpatched_from = 0;
        for (start, bytes) in patched.patched_ranges {
            let (start, end) = (start as usize, (start + bytes) as usize);
            assert_eq!(
                patched.image[unpatched_from..start],
                data[unpatched_from..start]
            );
            unpatched_from = end;
        }
        assert_eq!(patched.image[unpatched_from..], data[unpatched_from..]);
    }
    !found.is_empty()
}

/// Returns a small image: two functions, one of them with two names.
#[must_use]
pub fn example_vdso() -> Vec<u8> {
    const TABLES: u64 = 0x100;
    const STRINGS: &[u8] = b"\0__vdso_time\0time\0__vdso_getcpu\0";
    let symbols = [(1u32, 0x300u64), (13, 0x300), (18, 0x340)];
    let mut image = vec![0; 0x400];
    let mut put = |at: u64, bytes: &[u8]| {
        let at = at as usize;
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(0, b"\x7fELF\x02\x01\x01");
    // A shared object for x86_64, with two program headers.
    put(16, &[3, 0, 62, 0, 1]);
    put(32, &64u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 2]);
    put(64, &[1, 0, 0, 0, 5]);
    put(64 + 32, &0x400u64.to_le_bytes());
    put(120, &[2, 0, 0, 0, 4]);
    for tables_offset in [8, 16] {
        put(120 + tables_offset, &TABLES.to_le_bytes());
    }
    put(120 + 32, &0x60u64.to_le_bytes());
    let strings = STRINGS.len() as u64;
    // Positions of the hash table, the strings and the symbols, and the number of bytes of strings.
    let entries = [(4u64, 0x180u64), (5, 0x1c0), (6, 0x200), (10, strings)];
    for (number, (tag, value)) in (0..).zip(entries) {
        put(TABLES + number * 16, &tag.to_le_bytes());
        put(TABLES + number * 16 + 8, &value.to_le_bytes());
    }
    put(0x180, &[1, 0, 0, 0, 4]);
    put(0x1c0, STRINGS);
    for (number, (name, value)) in (1..).zip(symbols) {
        let at = 0x200 + number * 24;
        put(at, &name.to_le_bytes());
        put(at + 4, &[0x12, 0, 1]);
        put(at + 8, &value.to_le_bytes());
        put(at + 16, &40u64.to_le_bytes());
    }
    image
}
