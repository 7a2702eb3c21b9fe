//! vDSO of a donor with another kernel. The original's vDSO stays at its address as ordinary memory, in which each
//! function jumps to this kernel's vDSO. This kernel's vDSO lies at addresses that the program does not use.
//!
//! The data pages that the original's vDSO reads are zeros, which mean a clock that only a system call can read. So a
//! thread that a signal interrupted inside that code, and that returns there, makes the system call.

use super::stub_process::StubProcess;
use crate::donor::free_range;
use crate::error::{Error, Result};
use crate::image::{
    ADDRESS_END, MappingBacking, MemoryMapping, ProcessLayout, ProcessState, TreeLayout,
};
use crate::procfs::{self, MapLine};
use crate::trace::{ProcessMemory, STUB_BYTES};
use crate::vdso::{self, PatchedVdso};

/// Number of stack bytes that are searched for return addresses.
const SEARCHED_MAX: u64 = 1 << 20;

/// The vDSO images of the donor's kernel and of this one.
#[derive(Debug)]
pub(super) struct VdsoImages {
    original: Vec<u8>,
    current: Vec<u8>,
}

/// Addresses of both vDSOs in a stub process.
#[derive(Debug)]
pub(super) struct VdsoPlacement {
    /// Range of this kernel's vDSO and its data.
    current: (u64, u64),
    /// Original vDSO: first address, length in bytes.
    original: (u64, u64),
    /// Redirected functions in the original vDSO: offset, length in bytes.
    redirected: Vec<(u64, u64)>,
}

impl VdsoImages {
    /// Returns `None` if both kernels have the same vDSO.
    pub fn compare_vdsos(tree: &TreeLayout) -> Result<Option<Self>> {
        let pid = std::process::id() as i32;
        let lines = procfs::mappings(pid)?;
        let mut current = Vec::new();
        if let Some(line) = lines.iter().find(|line| line.name == b"[vdso]") {
            current.resize((line.end - line.start) as usize, 0);
            ProcessMemory::open(pid)?.read(line.start, &mut current)?;
        }
        if tree.vdso.is_empty() || tree.vdso == current {
            return Ok(None);
        }
        // Patch once as a test, so that a refusal comes before any process exists.
        vdso::patch(&tree.vdso, &current, 0)?;
        Ok(Some(Self {
            original: tree.vdso.clone(),
            current,
        }))
    }

    /// Moves this kernel's pages `here` out of the program's way, and maps the original's vDSO at its address.
    /// Returns false if the program has no vDSO.
    pub fn place_original(
        &self,
        stub_process: &mut StubProcess,
        here: &[MapLine],
        process: &ProcessLayout,
    ) -> Result<bool> {
        let is_kernels =
            |mapping: &&MemoryMapping| matches!(mapping.backing, MappingBacking::Kernel(_));
        let known: Vec<MemoryMapping> = (process.mappings.iter().filter(is_kernels))
            .cloned()
            .collect();
        let Some(code) = known.iter().find(|mapping| is_vdso(mapping)) else {
            return Ok(false);
        };
        if code.end - code.start != self.original.len() as u64 {
            return Err(Error::Image("the vDSO mapping has an unexpected size"));
        }
        let (current, base) = move_kernel_vdso(stub_process, here, process)?;
        let PatchedVdso {
            image,
            patched_ranges: places,
        } = vdso::patch(&self.original, &self.current, base)?;
        let mut script = stub_process.script();
        for mapping in &known {
            let executable = if is_vdso(mapping) { libc::PROT_EXEC } else { 0 };
            let protection = (libc::PROT_READ | executable) as u64;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let (start, length) = (mapping.start, mapping.end - mapping.start);
            let arguments = [start, length, protection, flags as u64, u64::MAX, 0];
            script.add_call("mmap", libc::SYS_mmap, &arguments);
        }
        stub_process.run_script(script)?;
        stub_process.memory.write_protected(code.start, &image)?;
        stub_process.foreign_vdso = Some(VdsoPlacement {
            current,
            original: (code.start, code.end - code.start),
            redirected: places,
        });
        stub_process.mappings = known;
        Ok(true)
    }
}

impl VdsoPlacement {
    /// Checks that the original has not mapped anything at the addresses of this kernel's vDSO.
    pub fn check_addresses(&self, process: &ProcessLayout) -> Result<()> {
        let (start, end) = self.current;
        let overlaps = |mapping: &MemoryMapping| mapping.start < end && start < mapping.end;
        if process.mappings.iter().any(overlaps) {
            let why =
                "the original has mapped memory at the addresses of this kernel's vDSO; try again";
            return Err(Error::Refused(why.to_owned()));
        }
        Ok(())
    }

    /// Checks that no thread runs in the original's vDSO, nor returns from a signal handler into one of its replaced
    /// instructions. Parts of the stack that are `missing` arrive only after the process runs, and cannot be
    /// inspected.
    pub fn check_threads(
        &self,
        stub_process: &StubProcess,
        state: &ProcessState,
        missing: &[(u64, u64)],
    ) -> Result<()> {
        for (tid, thread) in stub_process.threads.iter().zip(&state.threads) {
            let registers = &thread.registers;
            let (start, length) = self.original;
            let inside = registers.rip.wrapping_sub(start) < length;
            if inside || self.returns_into_replaced(stub_process, registers.rsp, missing)? {
                return Err(Error::Refused(format!(
                    "thread {tid} is in the vDSO of the donor's kernel, which differs from this one's; try again"
                )));
            }
        }
        Ok(())
    }

    /// Returns true if the stack contains an address inside replaced instructions.
    fn returns_into_replaced(
        &self,
        stub_process: &StubProcess,
        stack: u64,
        missing: &[(u64, u64)],
    ) -> Result<bool> {
        let of_stack = |mapping: &&MemoryMapping| mapping.start <= stack && stack < mapping.end;
        let Some(mapping) = stub_process.mappings.iter().find(of_stack) else {
            return Ok(false);
        };
        let at = stack.next_multiple_of(8);
        let length = bytes_before_missing(at, mapping.end, missing).min(SEARCHED_MAX);
        let mut bytes = vec![0; length as usize];
        stub_process.memory.read(at, &mut bytes)?;
        Ok(self.has_address_in_replaced(&bytes))
    }

    fn has_address_in_replaced(&self, stack: &[u8]) -> bool {
        let (start, length) = self.original;
        let within = |address: u64| {
            let offset = address.wrapping_sub(start);
            let is_inside = |(from, bytes): &(u64, u64)| offset > *from && offset - from < *bytes;
            offset < length && self.redirected.iter().any(is_inside)
        };
        let words = stack.chunks_exact(8);
        words
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()))
            .any(within)
    }
}

/// Returns the number of bytes present from an address on, up to the next missing range.
fn bytes_before_missing(at: u64, end: u64, missing: &[(u64, u64)]) -> u64 {
    let behind = missing.iter().filter(|(_, missing_end)| *missing_end > at);
    let next = behind.map(|(start, _)| *start).min();
    next.map_or(end, |next| next.min(end)).saturating_sub(at)
}

fn is_vdso(mapping: &MemoryMapping) -> bool {
    matches!(&mapping.backing, MappingBacking::Kernel(name) if name == "[vdso]")
}

/// Moves the kernel's pages together, since the code reads the data next to it. Returns the new range and the address
/// of the code.
fn move_kernel_vdso(
    stub_process: &StubProcess,
    here: &[MapLine],
    process: &ProcessLayout,
) -> Result<((u64, u64), u64)> {
    let here: Vec<&MapLine> = here.iter().filter(|line| line.end <= ADDRESS_END).collect();
    let start = here.iter().map(|line| line.start).min().unwrap_or(0);
    let end = here.iter().map(|line| line.end).max().unwrap_or(0);
    let mut used: Vec<(u64, u64)> = (process.mappings.iter())
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    used.push((start, end));
    used.push((
        stub_process.stub.address,
        stub_process.stub.address + STUB_BYTES,
    ));
    let to = free_range::find(&used, end - start).ok_or(Error::Image("no free address range"))?;
    let how = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut script = stub_process.script();
    let mut base = 0;
    for line in here {
        let (length, place) = (line.end - line.start, to + (line.start - start));
        let arguments = [line.start, length, length, how, place];
        script.add_call("mremap", libc::SYS_mremap, &arguments);
        if line.name == b"[vdso]" {
            base = place;
        }
    }
    stub_process.run_script(script)?;
    Ok(((to, to + (end - start)), base))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read of missing memory would wait for the daemon, which waits for this check.
    #[test]
    fn missing_memory_is_not_read() {
        let missing = [(0x1000, 0x2000), (0x5000, 0x6000), (0x9000, 0xa000)];
        assert_eq!(bytes_before_missing(0x3000, 0x8000, &missing), 0x2000);
        assert_eq!(bytes_before_missing(0x5800, 0x8000, &missing), 0);
        assert_eq!(bytes_before_missing(0x6000, 0x8000, &missing), 0x2000);
        assert_eq!(bytes_before_missing(0x6000, 0x8000, &[]), 0x2000);
    }

    #[test]
    fn return_addresses_inside_replaced_code_are_found() {
        let placed = VdsoPlacement {
            current: (0x1000, 0x3000),
            original: (0x7000, 0x2000),
            redirected: vec![(0x800, 14), (0xa00, 14)],
        };
        let found = |words: &[u64]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            placed.has_address_in_replaced(&bytes)
        };
        // The first instruction was replaced by a jump; the code behind the last replaced byte is unchanged.
        assert!(!found(&[
            0,
            0x7800,
            0x780e,
            0x7a00,
            0x6801,
            0x9801,
            u64::MAX
        ]));
        assert!(found(&[0, 0x7801]));
        assert!(found(&[0x7a0d, 0]));
    }
}
